"""split_stages: this rank's pipeline stages of a transformers model, each split over tensor parallelism and checked."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from core import agree
from core.hugging_face.plan import Plan, PlanError
from core.hugging_face.split import (
    cut_parameters,
    example_of,
    finish_split,
    first_tensor,
    prepare,
    refuse_other_output,
)
from core.hugging_face.stages import (
    ModelCut,
    find_cut,
    keep_stage,
    run_quietly,
    stage_activations,
    stage_of,
    watch_order,
)
from core.pipeline_parallel.forward_only import forward_only
from core.pipeline_parallel.gpt_stages import check_embedding_group
from core.pipeline_parallel.layout import PipelineLayout
from core.process_groups import ProcessGroups
from core.tensor_parallel.mappings import resolve_groups

CUT = "cutting the model into stages"


def split_stages(
    model: Any,
    layout: PipelineLayout,
    plan: Plan | None = None,
    *,
    example: Mapping[str, Any] | None = None,
    parallel_output: bool = False,
    sequence_parallel: str | None = None,
    pg_collection: ProcessGroups | None = None,
) -> list[Any]:
    """This rank's stages of a transformers model, in the model's order, split over tensor parallelism too.

    model: whole, with the same weights on all ranks, on a real device. It becomes the last stage of this rank; what
    lies elsewhere leaves it. The other arguments are those of `split_model`. One forward of the example runs through
    the whole model and one through the pipeline, and the outputs must be equal.

    Wrap the stages by `core.pipeline_parallel.wrap_stages`, and run them by a `PipelineRunner` with
    `stage_forward_step` and `stage_activations`. Collective over the world. Raises PlanError on all ranks for a model
    that cannot be cut so, and ValueError for a layout that does not fit the groups.
    """
    groups = resolve_groups(pg_collection)
    failure: Exception | None = None
    chunks: list[Any] = []
    before: Tensor | None = None
    try:
        check_pipeline(layout, groups)
        plan = prepare_stages(model, plan, groups)
        if any(parameter.is_meta for parameter in model.parameters()):
            raise PlanError(f"{plan.family}: parameters are on the meta device; load the checkpoint by load_split")
        arguments = dict(example_of(model, groups) if example is None else example)
        order, output = watch_order(model, arguments)
        before = None if parallel_output else first_tensor(output).detach()
        cut = find_cut(model, order)
        check_cut(cut, layout, groups)
        for index in layout.stages_of(groups.rank("pp"))[:-1]:
            chunks.append(keep_stage(_copied(model), cut, layout, index))
        chunks.append(keep_stage(model, cut, layout, layout.stages_of(groups.rank("pp"))[-1]))
        for chunk in chunks:
            cut_parameters(chunk, of_stage(plan, chunk), groups)
    except (PlanError, ValueError) as error:
        failure = error
    agree.refuse(failure, None, CUT, PlanError)
    assert plan is not None, "a failure was refused"
    options: dict[str, Any] = {"parallel_output": parallel_output, "sequence_parallel": sequence_parallel}
    finish_stages(chunks, layout, plan, arguments, groups, **options)
    if before is not None:
        _compare_output(chunks, layout, plan, arguments, before, groups)
    return chunks


def prepare_stages(model: Any, plan: Plan | None, groups: ProcessGroups) -> Plan:
    """The plan; one without splits for a family that has none, where nothing is split."""
    if groups.size("tp") > 1 or plan is not None or getattr(model, "tp_plan", None):
        return prepare(model, plan, groups)
    family = f"{model.config.model_type} ({type(model).__name__})"
    return prepare(model, Plan(family, {}, {}, whole={n: tuple(p.shape) for n, p in model.named_parameters()}), groups)


def check_pipeline(layout: PipelineLayout, groups: ProcessGroups) -> None:
    """Raise ValueError unless the layout is for as many ranks as the pipeline group has."""
    if groups.size("pp") != layout.pp:
        raise ValueError(
            f"the layout has {layout.pp} pipeline ranks, and group 'pp' has {groups.size('pp')}; give "
            f"initialize_model_parallel pipeline_model_parallel_size={layout.pp}"
        )


def check_cut(cut: ModelCut, layout: PipelineLayout, groups: ProcessGroups) -> None:
    """Raise ValueError or PlanError unless a model can be cut as a layout says."""
    layout.check_model(cut.count)
    if cut.tied and layout.pp > 1:
        check_embedding_group(layout, groups)
    if cut.around and layout.chunks > 1:
        raise PlanError(
            f"{cut.family}: parameter {sorted(cut.around)[0]!r} belongs to no module before or after the layers, so "
            f"every stage has a copy; {layout.chunks} stages on one rank cannot share it, use one a rank"
        )


def _copied(model: Any) -> Any:
    """A copy that has the same parameters, without memory of its own."""
    return copy.deepcopy(model, {id(parameter): parameter for parameter in model.parameters()})


def of_stage(plan: Plan, chunk: nn.Module) -> Plan:
    """What a plan says of the parameters and modules that a stage has."""
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


def finish_stages(
    chunks: Sequence[Any],
    layout: PipelineLayout,
    plan: Plan,
    arguments: Mapping[str, Any],
    groups: ProcessGroups,
    *,
    parallel_output: bool,
    sequence_parallel: str | None = None,
) -> None:
    """Tags, seams and contracts of stages whose parameters are cut; and one forward of each. Collective."""
    failure: Exception | None = None
    try:
        for chunk in chunks:
            stage = stage_of(chunk)
            given = {**arguments, **received_example(chunk, arguments)}
            own = of_stage(plan, chunk)
            finish_split(
                chunk,
                own,
                given,
                parallel_output=parallel_output and stage.part.post_process,
                sequence_parallel=sequence_parallel,
                pg_collection=groups,
            )
            output = run_quietly(chunk, given)
            if bool((output if isinstance(output, Tensor) else first_tensor(output)).isnan().any()):
                raise PlanError(
                    f"{plan.family}: the layers of stage {stage.part.index} use something of the embeddings, or of "
                    "earlier layers, beside the hidden states; a pipeline sends hidden states alone"
                )
            for name in stage.cut.around:
                chunk.get_parameter(name).pipeline_parallel = True
        _tie(chunks, layout)
    except PlanError as error:
        failure = error
    except (RuntimeError, ValueError, TypeError, IndexError, AttributeError, KeyError) as error:
        failure = PlanError(
            f"{plan.family}: a stage's forward fails without the layers of other stages: {type(error).__name__}: "
            f"{error}. A pipeline sends hidden states alone"
        )
    agree.refuse(failure, None, CUT, PlanError)


def received_example(chunk: Any, arguments: Mapping[str, Any]) -> dict[str, Tensor]:
    """Hidden states for a stage that is run alone: random, the same on all ranks."""
    if stage_of(chunk).part.pre_process:
        return {}
    (like,) = _sent(chunk, arguments)
    values = torch.randn(like.shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    device = next(chunk.parameters()).device
    return {"received": values.to(device, like.dtype).requires_grad_()}


def _sent(chunk: Any, arguments: Mapping[str, Any]) -> list[Tensor]:
    ids = arguments.get("input_ids")
    if not isinstance(ids, Tensor):
        raise PlanError(f"{stage_of(chunk).cut.family}: a pipeline needs a model of token ids (input_ids)")
    return stage_activations(chunk, *ids.shape)


def _tie(chunks: Sequence[Any], layout: PipelineLayout) -> None:
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
    chunks: Sequence[Any],
    layout: PipelineLayout,
    plan: Plan,
    arguments: dict[str, Any],
    before: Tensor,
    groups: ProcessGroups,
) -> None:
    """The pipeline gives what the whole model gave, or the model is refused. Collective over the world."""
    outputs: list[Tensor] = []

    def run(chunk: Any) -> Any:
        def forward(number: int, received: tuple[Tensor, ...]) -> Any:
            output = run_quietly(chunk, {**arguments, **({"received": received[0]} if received else {})})
            if stage_of(chunk).part.post_process:
                outputs.append(first_tensor(output))
            return output

        return forward

    runs = {stage_of(chunk).part.index: run(chunk) for chunk in chunks}
    sent = _sent(chunks[0], arguments)
    group: Any = groups.pp
    forward_only(layout, runs, 1, lambda stage: sent, group, before.device)
    failure: Exception | None = None
    try:
        for after in outputs:
            refuse_other_output(plan, before, after)
    except PlanError as error:
        failure = error
    agree.refuse(failure, None, CUT, PlanError)
