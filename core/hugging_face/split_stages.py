"""split_model, split_stages, split_empty: a whole model, this rank's stages of it, or either without memory at first.

Every one cuts, gives the parts their tags and seams, and checks them; a model that is not cut into stages is one part.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from core.groups.process_groups import ProcessGroups
from core.hugging_face.example import PASS, example_of, with_labels
from core.hugging_face.parallel_loss import with_whole_logits
from core.hugging_face.plan import Plan, PlanError
from core.hugging_face.split import (
    OTHER_TOKENS,
    REPORT,
    Shown,
    SplitReport,
    Splitting,
    cut_parameters,
    finish_split,
    prepare,
    refuse_other_output,
    refusing_failures,
    refusing_together,
    rounding_of,
    shown_by,
)
from core.hugging_face.stage_forward import ModelCut
from core.hugging_face.stages import (
    Watched,
    activations_of,
    find_cut,
    keep_stage,
    mark_absent,
    run_quietly,
    stage_of,
    watch_order,
)
from core.pipeline_parallel.forward_only import forward_only
from core.pipeline_parallel.gpt_stages import check_embedding_group
from core.pipeline_parallel.layout import PipelineLayout
from core.tensor_parallel.mappings import resolve_groups

CUT = "cutting the model into stages"
ALONE = "A pipeline sends hidden states, and of an encoder-decoder the encoder's output. "
NEEDS_EXAMPLE = f"Pass {PASS}"
ORDER = "its plan is wrong, or its layers do not run once each, one after another"


def split_model(
    model: Any,
    plan: Plan | None = None,
    *,
    example: Mapping[str, Any] | None = None,
    parallel_output: bool | Literal["where possible"] = False,
    sequence_parallel: str | None = None,
    pg_collection: ProcessGroups | None = None,
) -> SplitReport:
    """Cut a transformers model over the tensor-parallel group, in place. Then wrap it in DistributedDataParallel.

    model: whole, with the same weights on every rank of the group, on a real device. plan: read from the model by
    default; `read_plan(model, policy)` makes one of a Policy. example: keyword arguments of one small forward, equal on
    all ranks; by default two rows of 8 token ids, or pixels or sound for a model of these. It is run before and after
    the cut, without backward, and the outputs must be equal. parallel_output: keep the logits split and compute the
    loss from the parts; 'where possible' leaves them whole, with a warning, for a model that computes its loss in
    another way. sequence_parallel: 'split_gather' or 'ring' over the tensor-parallel group, 'all_to_all' or 'ring_attn'
    over the context-parallel group; every rank of it is given the whole sequence.

    Collective over these groups. Raises PlanError on all of its ranks where sizes do not fit or the plan
    cannot give right gradients; what was found after the cut leaves the model unusable, so make it again.
    """
    how = Splitting(resolve_groups(pg_collection), None, parallel_output, sequence_parallel)
    (part,) = split_parts(model, plan, example, how)
    report: SplitReport = getattr(part, REPORT)
    return report


def split_stages(
    model: Any,
    layout: PipelineLayout,
    plan: Plan | None = None,
    *,
    example: Mapping[str, Any] | None = None,
    parallel_output: bool | Literal["where possible"] = False,
    sequence_parallel: str | None = None,
    pg_collection: ProcessGroups | None = None,
) -> list[Any]:
    """This rank's stages of a transformers model, in the model's order, split over tensor parallelism too.

    model: becomes the last stage of this rank; what lies elsewhere leaves it. The other arguments are those of
    `split_model`. One forward of the example runs through the whole model and one through the pipeline, and the outputs
    must be equal.

    Wrap the stages by `core.pipeline_parallel.wrap_stages`, and run them by a `PipelineRunner` with
    `stage_forward_step` and `stage_activations`. Collective over the world. Raises PlanError on all ranks for a model
    that cannot be cut so, and ValueError for a layout that does not fit the groups.
    """
    how = Splitting(resolve_groups(pg_collection), layout, parallel_output, sequence_parallel)
    return split_parts(model, plan, example, how)


def split_parts(model: Any, plan: Plan | None, example: Mapping[str, Any] | None, how: Splitting) -> list[Any]:
    """This rank's parts of a model: stages of a layout, or the model itself. As `split_model` and `split_stages`."""
    layout, groups = how.layout, how.groups
    before: Shown | None = None
    limit = 0.0
    with refusing_together(CUT, ValueError, groups=how.ranks):
        plan = prepare(model, plan, groups)
        if any(parameter.is_meta for parameter in model.parameters()):
            raise PlanError(f"{plan.family}: parameters are on the meta device; load the checkpoint by load_split")
        arguments = example_of(model, groups, example, with_images=layout is not None)
        watched = None
        with refusing_failures(plan, "for the example", NEEDS_EXAMPLE, again=""):
            if layout is not None or groups.size("tp") * plan.ep > 1 or how.sequence_parallel is not None:
                arguments, watched, before = _shown_whole(model, arguments, layout)
        if before is not None:
            limit = rounding_of(model, arguments, before)
        parts = _cut(model, watched, plan, how)
    finish_parts(parts, plan, arguments, how)
    if before is not None:
        _compare_output(parts, plan, arguments, (before, limit), how)
    return parts


def split_empty(
    model: Any, plan: Plan | None, example: Mapping[str, Any] | None, how: Splitting, device: torch.device
) -> list[Any]:
    """`split_parts` of a model without memory. Each rank has slices of its own size, and no others.

    Their values are those of a new model, other ones in each layout; weights of a checkpoint take their place. device:
    where they lie. The whole model exists on no rank, so no output is compared with its. Collective over the world.
    """
    with refusing_together(CUT, ValueError):
        plan = prepare(model, plan, how.groups)
        parts = _cut(model, None, plan, how)
        for part in parts:
            draw(part, device)
    finish_parts(parts, plan, example_of(parts[0], how.groups, example), how)
    return parts


def _shown_whole(
    model: Any, arguments: dict[str, Any], layout: PipelineLayout | None
) -> tuple[dict[str, Any], Watched | None, Shown]:
    """(the example, with labels where a model's forward takes them; the order of modules; what the whole model shows)

    A model that fails with labels as in training (some need more of their inputs then) is proven without.
    """
    attempts = [with_labels(model, arguments), arguments]
    for attempt in attempts if len(attempts[0]) > len(arguments) else [arguments]:
        try:
            if layout is None:
                return attempt, None, shown_by(model, attempt)
            order, output = watch_order(model, attempt)
            return attempt, order, Shown(*(value if value is None else value.detach() for value in Shown.of(output)))
        except (RuntimeError, ValueError, TypeError, IndexError, AttributeError, KeyError, NotImplementedError):
            if attempt is arguments:
                raise
    raise AssertionError("the last attempt returns or raises")


@torch.no_grad()
def draw(model: Any, device: torch.device) -> None:
    """Give parameters and buffers memory, and the values by which the family begins. Equal slices are equal."""
    mark_absent(model)
    made: dict[int, Tensor] = {}
    for module in model.modules():
        for name, tensor in [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]:
            if id(tensor) not in made:  # tied ones stay tied
                memory = torch.zeros_like(tensor, device=device) if tensor.is_meta else tensor.to(device)
                is_learned = isinstance(tensor, nn.Parameter)
                made[id(tensor)] = nn.Parameter(memory, tensor.requires_grad) if is_learned else memory
            setattr(module, name, made[id(tensor)])
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model.initialize_weights()


def _cut(model: Any, watched: Watched | None, plan: Plan, how: Splitting) -> list[Any]:
    """This rank's stages with its slices: copies of the model, and the model itself as the last one."""
    layout, groups = how.layout, how.groups
    parts = [model]
    if layout is not None:
        cut, streams = find_cut(model, watched.sides if watched else None), watched.streams if watched else None
        check_cut(cut, layout, groups)
        if streams is not None:
            heads = getattr(model.config.get_text_config(), "num_attention_heads", 0)
            streams = streams.over(heads, groups.size("tp"))
        numbers = layout.stages_of(groups.rank("pp"))
        parts = [*(copied(model) for _ in numbers[:-1]), model]
        for part, number in zip(parts, numbers, strict=True):
            keep_stage(part, cut, layout, number, streams)
    for part in parts:
        cut_parameters(part, plan, groups)
    return parts


def check_cut(cut: ModelCut, layout: PipelineLayout, groups: ProcessGroups) -> None:
    """Raise ValueError or PlanError unless a model can be cut as a layout says."""
    layout.check_ranks(groups)
    layout.check_model(cut.count)
    if cut.tied and layout.pp > 1:
        check_embedding_group(layout, groups)
    if cut.around and layout.chunks > 1:
        raise PlanError(
            f"{cut.family}: parameter {sorted(cut.around)[0]!r} belongs to no module before or after the layers, so "
            f"every stage has a copy; {layout.chunks} stages on one rank cannot share it, use one a rank"
        )


def copied(model: Any) -> Any:
    """A copy that has the same parameters, without memory of its own."""
    return copy.deepcopy(model, {id(parameter): parameter for parameter in model.parameters()})


def of_stage(plan: Plan, chunk: nn.Module) -> Plan:
    """The part of a plan about the parameters and modules of a stage."""
    names = {name for name, _ in chunk.named_parameters(remove_duplicate=False)}
    modules = {name for name, module in chunk.named_modules() if any(True for _ in module.parameters())}
    return dataclasses.replace(
        plan,
        splits={name: split for name, split in plan.splits.items() if name in names},
        seams={name: seam for name, seam in plan.seams.items() if name in modules},
        partial=plan.partial & names,
        whole={name: shape for name, shape in plan.whole.items() if name in names},
        numbers={name: number for name, number in plan.numbers.items() if name.rpartition(".")[0] in modules},
    )


def finish_parts(parts: Sequence[Any], plan: Plan, arguments: dict[str, Any], how: Splitting) -> None:
    """Tags, seams and contracts of parts whose parameters are cut; and one forward of each stage. Collective."""
    if how.layout is None:
        finish_split(parts[0], plan, arguments, how)
        return
    with refusing_together(CUT), refusing_failures(plan, "without the layers of other stages", ALONE):
        for part in parts:
            stage, given = stage_of(part), {**arguments, **received_example(part, arguments)}
            own = dataclasses.replace(how, parallel_output=how.parallel_output if stage.part.post_process else False)
            finish_split(part, of_stage(plan, part), given, own)
            output = run_quietly(part, given, training="labels" in given)
            sent = output if isinstance(output, tuple) else (Shown.of(output).output,)
            if any(bool(value.isnan().any()) for value in sent):
                raise PlanError(
                    f"{plan.family}: the layers of stage {stage.part.index} use something of the embeddings, or of "
                    f"earlier layers, in addition to what they are sent. {ALONE}"
                )
            for name in stage.cut.around:
                part.get_parameter(name).pipeline_parallel = True
        tie_ends(parts, how.layout)


def received_example(chunk: Any, arguments: Mapping[str, Any]) -> dict[str, Tensor]:
    """Received tensors of a stage that is run alone: random numbers, the same on all ranks."""
    stage = stage_of(chunk)
    if stage.part.pre_process:
        return {}
    generator = torch.Generator("cpu").manual_seed(5)
    device = next(chunk.parameters()).device
    received = []
    for form, like in zip(
        stage.streams.sent_to(stage.first), activations_of(chunk, arguments)(stage.part.index - 1), strict=True
    ):
        values = torch.randn(like.shape, generator=generator, dtype=torch.float64, device="cpu")
        received.append(values.to(device, like.dtype).requires_grad_())
        received[-1].tensor_model_parallel = form.is_split
    return {"received": tuple(received)}


def tie_ends(chunks: Sequence[Any], layout: PipelineLayout) -> None:
    """A tied parameter has a copy on two ranks, whose gradients are added; or is one parameter of two stages."""
    first, last = chunks[0], chunks[-1]
    cut = stage_of(first).cut
    if layout.num_stages == 1 or not cut.tied:
        return
    if not layout.ends_share_a_rank:
        for chunk in chunks:
            for name, parameter in chunk.named_parameters(remove_duplicate=False):
                if name in cut.tied:
                    parameter.shared_embedding = True
        return
    if not stage_of(last).part.post_process:
        return
    weight = next(parameter for name, parameter in first.named_parameters() if name in cut.tied)
    for name in cut.tied:
        owner, _, leaf = name.rpartition(".")
        module = last.get_submodule(owner)
        if leaf in module._parameters:  # the module uses it, and the first stage holds it
            del module._parameters[leaf]
            vars(module)[leaf] = weight
            module.borrowed_weights = (weight,)


def _compare_output(
    parts: Sequence[Any], plan: Plan, arguments: dict[str, Any], whole: tuple[Shown, float], how: Splitting
) -> None:
    """The parts give what the whole model gave, or the model is refused. Collective, of a pipeline over the world.

    whole: what the whole model shows, and how far rounding may move it.
    """
    layout, (before, limit) = how.layout, whole
    if layout is None:
        words = () if how.groups.size("tp") * plan.ep > 1 else (f"under {how.sequence_parallel!r}", OTHER_TOKENS)
        refuse_other_output(plan, before, shown_by(parts[0], arguments, whole=True), limit, *words)
        return
    outputs: list[Shown] = []

    def run(part: Any, number: int, received: tuple[Tensor, ...]) -> Any:
        given = {**arguments, **({"received": received} if received else {})}
        output = run_quietly(part, given, training="labels" in arguments)
        if stage_of(part).part.post_process:
            outputs.append(Shown.of(with_whole_logits(part, output)))
        return output

    runs = {stage_of(part).part.index: functools.partial(run, part) for part in parts}
    sent, group = activations_of(parts[0], arguments), how.groups.require("pp")
    forward_only(layout, runs, 1, lambda stage: sent(stage - 1), group, before.output.device)
    with refusing_together(CUT):
        for after in outputs:
            refuse_other_output(plan, before, after, limit, "as a pipeline", ORDER)
