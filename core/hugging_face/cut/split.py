"""Split a transformers model over tensor parallelism and pipeline stages.

`split_model` cuts a full model in place, `split_stages` returns this rank's stages, and `split_empty` starts on the
meta device. All follow a plan; they use neither DTensor nor tracing. Parameters become this rank's slices and carry
the tags that the gradient contract reads, and modules at seams get a SeamForward. One forward on a small example then
shows which activations each unsplit parameter sees, and that decides its gradient contract. A model without pipeline
stages is handled as a single part.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import nn

from core.distributed.contract.gradient_contract import declare_gradient
from core.groups.process_groups import ProcessGroups
from core.hugging_face.cut.experts import over_experts
from core.hugging_face.cut.parts import cut_into_parts, draw, of_stage, place_seams, tag_slices, tie_ends
from core.hugging_face.cut.places import list_of_layers
from core.hugging_face.cut.report import REPORT, SplitReport, Splitting
from core.hugging_face.cut.sequence import OVER_CONTEXT, OVER_TENSOR, SequenceParallel, over_sequence, present_layers
from core.hugging_face.prove.compare import (
    AGAIN,
    CUT,
    OTHER_TOKENS,
    Shown,
    WholeRun,
    compare_output,
    received_example,
    refuse_failure_of_some,
    refuse_other_output,
    refusing_failures,
    refusing_together,
    rounding_of,
    shown_by,
    shown_over_sequence,
    shown_whole,
)
from core.hugging_face.prove.counted_positions import CountedPositions
from core.hugging_face.read.example import PASS, example_of, run_quietly, unreached
from core.hugging_face.read.plan import Plan, PlanError, family_of
from core.hugging_face.read.transformers_plans import read_plan
from core.hugging_face.run.dropout import ForwardStream, drop_parts_apart
from core.hugging_face.run.loss.parallel_loss import gathering_logits, use_parallel_loss, why_logits_stay_whole
from core.hugging_face.run.partial_outputs import IN_STAGES, SPLIT_HEADS, refuse_partial_outputs
from core.hugging_face.run.stage_forward import StageForward
from core.hugging_face.run.stages import stage_of
from core.interface.whole import about_to_change
from core.pipeline_parallel.layout import PipelineLayout
from core.tensor_parallel.dataflow import run_watched
from core.tensor_parallel.mappings import resolve_groups
from core.watch.warn_user import warn_user

IN_PARTS = "would choose a token from a part of the layers or of the sequence; generate with the model saved"
ONCE_SPLIT = ("once it is split", "A module there needs its whole width. ")
ALONE = "A pipeline sends hidden states, and of an encoder-decoder the encoder's output. "
NEEDS_EXAMPLE = f"Pass {PASS}"


def split_model(
    model: Any,
    plan: Plan | None = None,
    *,
    example: Mapping[str, Any] | None = None,
    parallel_output: bool | Literal["where possible"] = False,
    sequence_parallel: str | None = None,
    pg_collection: ProcessGroups | None = None,
) -> SplitReport:
    """Cut a transformers model over the tensor-parallel group, in place.

    Afterwards wrap the model in DistributedDataParallel. A wrong plan would train silently wrong, so an example runs
    before and after the cut, without backward, and the outputs must be equal.

    Collective over the tensor- and expert-parallel groups and, if sequence parallelism uses it, the context-parallel
    group.

    Args:
        model: Full model on a real device, with the same weights on every rank of the group.
        plan: Plan of the split. Defaults to the plan read from the model; `read_plan(model, policy)` builds one from a
            Policy.
        example: Keyword arguments of one small forward, the same on all ranks. Defaults to two rows of at least 8 token
            ids, or to pixels or audio for models that take these.
        parallel_output: True keeps the logits split and computes the loss from the parts. 'where possible' falls back
            to full logits, with a warning, for models that compute their loss in another way.
        sequence_parallel: 'split_gather' or 'ring' over the tensor-parallel group, 'all_to_all' or 'ring_attn' over the
            context-parallel group. Every rank of that group receives the complete sequence.
        pg_collection: Process groups; defaults to those of `parallel_state`.

    Returns:
        A report of the plan, the gradient contracts, and the lengths that the example did not reach.

    Raises:
        PlanError: On all ranks of these groups, if sizes do not fit or the plan cannot give right gradients. An error
            found after the cut leaves the model unusable; build it again.
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
    """Cut a transformers model into this rank's pipeline stages, split over tensor parallelism too.

    One forward of the example runs through the full model and one through the pipeline, and the outputs must be equal.
    Wrap the stages by `core.pipeline_parallel.wrap_stages`, and run them by a `PipelineRunner` with
    `stage_forward_step` and `stage_activations`. Collective over the world.

    Args:
        model: Full model. It becomes the last stage of this rank; modules of other stages are removed from it.
        layout: Pipeline layout.
        plan: As in `split_model`.
        example: As in `split_model`.
        parallel_output: As in `split_model`.
        sequence_parallel: As in `split_model`.
        pg_collection: As in `split_model`.

    Returns:
        This rank's stages, in the model's order.

    Raises:
        PlanError: On all ranks, if the model cannot be cut this way.
        ValueError: If the layout does not fit the groups.
    """
    how = Splitting(resolve_groups(pg_collection), layout, parallel_output, sequence_parallel)
    return split_parts(model, plan, example, how)


def split_parts(model: Any, plan: Plan | None, example: Mapping[str, Any] | None, how: Splitting) -> list[Any]:
    """Cut a model into this rank's parts: the stages of a layout, or the model itself.

    See `split_model` and `split_stages` for the arguments, collectives, and errors.
    """
    layout, groups = how.layout, how.groups
    run: WholeRun | None = None
    limit = 0.0
    with refusing_together(CUT, ValueError, groups=how.ranks):
        plan = prepare(model, plan, groups)
        if any(parameter.is_meta for parameter in model.parameters()):
            raise PlanError(f"{plan.family}: parameters are on the meta device; load the checkpoint by load_split")
        arguments = example_of(model, groups, example, with_images=layout is not None)
        with refusing_failures(plan, "for the example", NEEDS_EXAMPLE, again=""):
            if layout is not None or groups.size("tp") * plan.ep > 1 or how.sequence_parallel is not None:
                run = shown_whole(model, arguments, layout)
        if run is not None:
            arguments = run.arguments
            limit = rounding_of(model, arguments, run.shown)
        parts = cut_into_parts(model, None if run is None else run.order, plan, how)
    if run is not None:
        refuse_failure_of_some(run.failure, how.ranks)
    finish_parts(parts, plan, arguments, how)
    if run is not None:
        compare_output(parts, plan, arguments, (run.shown, limit), how)
    return parts


def split_empty(
    model: Any, plan: Plan | None, example: Mapping[str, Any] | None, how: Splitting, device: torch.device
) -> list[Any]:
    """Split a model that is on the meta device, so that each rank allocates only its own slices.

    The values are a new model's and differ between layouts, so load a checkpoint over them. The full model exists on no
    rank, and the output is therefore not compared. Collective over the world.

    Args:
        model: Full model on the meta device.
        plan: As in `split_model`.
        example: As in `split_model`.
        how: Groups, layout, and options of the split.
        device: Device to allocate the slices on.

    Returns:
        This rank's parts, as in `split_parts`.
    """
    with refusing_together(CUT, ValueError):
        plan = prepare(model, plan, how.groups)
        parts = cut_into_parts(model, None, plan, how)
        for part in parts:
            draw(part, device)
    finish_parts(parts, plan, example_of(parts[0], how.groups, example), how)
    return parts


def prepare(model: Any, plan: Plan | None, groups: ProcessGroups) -> Plan:
    """Return the plan for these groups after every check that is possible before parameters change.

    Raises:
        PlanError: If the model was split before, has no plan, or does not fit the group sizes.
    """
    if getattr(model, REPORT, None) is not None:
        raise PlanError(f"this {type(model).__name__} was split already; split each model once")
    about_to_change(model)
    family = family_of(model)
    if plan is None:
        try:
            plan = read_plan(model)
        except PlanError:
            if groups.size("tp") > 1:
                raise
            shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
            plan = Plan(family, {}, {}, whole=shapes)  # one rank needs no split
    return over_experts(model, plan.at(groups.size("tp")), groups)


def finish_parts(parts: Sequence[Any], plan: Plan, arguments: dict[str, Any], how: Splitting) -> None:
    """Add tags, seams, and gradient contracts to cut parts, and run one forward of each stage. Collective."""
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
                    f"{plan.family}: the layers of stage {stage.part.index} read a value of the embeddings or of "
                    f"earlier layers that is not sent between stages. {ALONE}"
                )
            for name in stage.cut.around:
                part.get_parameter(name).pipeline_parallel = True
        tie_ends(parts, how.layout)


def finish_split(model: Any, plan: Plan, arguments: dict[str, Any], how: Splitting) -> SplitReport:
    """Add tags and seams to one cut part, and decide the gradient contracts of its unsplit parameters."""
    groups, tp = how.groups, how.groups.size("tp")
    split_ones = tag_parameters(model, plan, groups)
    parallel_output, sequence = splits_logits(model, plan, arguments, how), None
    if how.sequence_parallel is not None:
        sequence = SequenceParallel(how.sequence_parallel, groups, plan.family, local_logits=parallel_output)
    if parallel_output:
        plan = use_parallel_loss(model, plan, groups.tp, sequence)
    place_seams(dict(model.named_modules()), plan, groups)
    unlabelled = {name: value for name, value in arguments.items() if name != "labels"}
    cut = contextlib.nullcontext(plan) if sequence is None else proven_cut(model, plan, unlabelled, sequence, groups)
    partial_ones = unseen = frozenset[str]()
    with cut as plan:
        if tp > 1:
            partial_ones, unseen = declare_whole(model, plan, groups, unlabelled, split_ones)
    restrict_methods(model, plan, how)
    report = SplitReport(plan, tp, partial_ones, unseen, unreached(model, arguments))
    setattr(model, REPORT, report)
    return report


def tag_parameters(model: Any, plan: Plan, groups: ProcessGroups) -> list[nn.Parameter]:
    """Tag the parameters that hold slices, divide the head counts that modules store, and return these parameters."""
    tp, parameters = groups.size("tp"), dict(model.named_parameters())
    tag_slices(parameters, plan, groups)
    for name, number in plan.numbers.items() if tp > 1 else ():
        owner, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(owner), attribute, number // tp)
    place_seams(dict(model.named_modules()), plan, groups)
    return [parameter for name, parameter in parameters.items() if name in plan.splits]


def splits_logits(model: Any, plan: Plan, arguments: dict[str, Any], how: Splitting) -> bool:
    """Return True if the model keeps its logits split and computes its loss from the parts."""
    tp, mode = how.groups.size("tp"), how.sequence_parallel
    if how.parallel_output is False or (tp == 1 and mode is None):
        return False
    try:
        with refusing_failures(plan, "with labels", again=""):
            why = why_logits_stay_whole(model, plan, arguments, tp, cuts_sequence=mode in OVER_CONTEXT)
    except PlanError as error:
        why = str(error).strip().removeprefix(f"{plan.family}: ")
    if why is not None and how.parallel_output is True:
        raise PlanError(f"{plan.family}: {why}; set parallel_output=False, so that each rank gets full logits")
    if why is not None:
        warn_user(f"{plan.family}: logits stay whole on each rank: {why}")
    return why is None


@contextlib.contextmanager
def proven_cut(
    model: Any, plan: Plan, arguments: dict[str, Any], sequence: SequenceParallel, groups: ProcessGroups
) -> Iterator[Plan]:
    """Cut the layers' sequence when the context ends, and compare the example's output before and after.

    Args:
        model: Model that is split over tensor parallelism, with its seams.
        plan: Plan of the split.
        arguments: Keyword arguments of the example forward, without labels.
        sequence: Sequence parallelism of the model.
        groups: Process groups.

    Yields:
        The plan, with the seams of `split_gather`. The model is watched with these, and with its full sequence.

    Raises:
        PlanError: If the outputs differ, or a layer counts the positions of its tokens itself.
    """
    mode = sequence.mode
    layers = list_of_layers(model, f"{plan.family}: sequence parallelism is for models with")
    counted, counted_of_parts = CountedPositions(), CountedPositions()
    inner = [model.get_submodule(place) for place in present_layers(model, layers)]
    with refusing_failures(plan, *ONCE_SPLIT), counted.inside(inner):
        before = shown_by(model, arguments)  # with tensor parallelism only
        limit = rounding_of(model, arguments, before)
    if mode in OVER_TENSOR:
        plan = over_sequence(model, plan, layers)
        place_seams(dict(model.named_modules()), plan, groups)
    yield plan
    sequence.attach(model, layers)
    with refusing_failures(plan, f"with {mode!r}"), counted_of_parts.inside(inner):
        after = shown_over_sequence(model, arguments, sequence, before.output.shape)
    refuse_other_output(plan, before, after, limit, f"under {mode!r}", OTHER_TOKENS)
    for place in counted.of_parts(counted_of_parts):
        raise PlanError(
            f"{plan.family}: under {mode!r} a layer counts the positions of its tokens itself (torch.arange in "
            f"{place}), from 0 on every rank; use 'split_gather'. {AGAIN}"
        )


def restrict_methods(model: Any, plan: Plan, how: Splitting) -> None:
    """Reject methods and outputs that would use a rank's part as if it were the full model."""
    tp = how.groups.size("tp")
    is_stage = isinstance(vars(model).get("forward"), StageForward)
    in_parts = how.sequence_parallel is not None or is_stage
    if tp > 1:
        refuse_partial_outputs(model, plan.family, f"over tp {tp}", SPLIT_HEADS)
    if is_stage:
        refuse_partial_outputs(model, plan.family, "in stages", IN_STAGES)
    if tp * plan.ep == 1 and not in_parts:
        return
    refuse_whole_methods(model, plan.family, **({"generate": IN_PARTS} if in_parts else {}))
    if not in_parts and hasattr(model, "generate"):
        model.generate = partial(generate_alike, model.generate)
    model.forward_stream = ForwardStream(how.groups)
    model.forward_stream.attach(model)


def declare_whole(
    model: nn.Module, plan: Plan, groups: ProcessGroups, arguments: dict[str, Any], split: Collection[nn.Parameter]
) -> tuple[frozenset[str], frozenset[str]]:
    """Declare the gradient contract of each trainable unsplit parameter from one watched forward of the split model.

    Args:
        model: Split model, with tags and seams.
        plan: Plan of the split.
        groups: Process groups.
        arguments: Keyword arguments of the example forward, without labels.
        split: Parameters that hold slices.

    Returns:
        The parameters whose gradients are partial over tp, and the parameters that the forward did not use.

    Raises:
        PlanError: If no contract can make a gradient right. The message names the module or parameter.
    """
    received = [value for value in arguments.get("received", ()) if getattr(value, "tensor_model_parallel", False)]
    with refusing_failures(plan, *ONCE_SPLIT):
        flow = run_watched(model, [*split, *received], arguments)
    if flow.faults:
        more = f" (and {len(flow.faults) - 1} more places)" if len(flow.faults) > 1 else ""
        raise PlanError(f"{plan.family}: {flow.faults[0]}{more}. {AGAIN}")
    both = sorted(flow.partial & flow.complete)
    if both:
        raise PlanError(
            f"{plan.family}: parameter {both[0]!r} is used both with split and with full tensors, so its gradient is "
            f"neither complete nor a partial sum over tp. {AGAIN}"
        )
    whole = {n: p for n, p in model.named_parameters() if p.requires_grad and n not in plan.splits}
    unseen = whole.keys() - flow.partial - flow.complete
    partial_ones = (flow.partial | (unseen & plan.partial)) & whole.keys()
    for name, parameter in whole.items():
        if name in partial_ones:
            declare_gradient(parameter, partial_over=("tp",))
        elif name not in unseen:
            declare_gradient(parameter)
    drop_parts_apart(model, flow, groups)
    return frozenset(partial_ones), frozenset(unseen)


def whole_only(method: Callable[..., Any], sentence: str, *args: Any, **kwargs: Any) -> Any:
    """Replacement for a method that needs the full model: it would see this rank's part only, so it raises PlanError.

    A call that passes the full state in `state_dict` (`save_split`) runs the original method.
    """
    if kwargs.get("state_dict") is None:
        raise PlanError(sentence)
    return method(*args, **kwargs)


def generate_alike(method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Replacement for a split model's `generate`.

    It gathers the logits and draws the same random numbers on all ranks of the group.
    """
    model: Any = getattr(method, "__self__")  # noqa: B009
    with gathering_logits(model), model.forward_stream.alike():
        return method(*args, **kwargs)


def refuse_whole_methods(model: Any, family: str, **more: str) -> None:
    """Replace methods that would save or resize a rank's part as if it were the full model.

    Args:
        model: Split model.
        family: Name of the model in errors.
        **more: Further method names, each with the reason for the error text.
    """
    refused = {
        "save_pretrained": "would save this rank's part as if it were the model; call save_split on all ranks",
        "resize_token_embeddings": "would resize this rank's part; resize the whole model before it is split",
        **more,
    }
    for name, why in refused.items():
        if not isinstance(getattr(model, name, None), (partial, type(None))):
            setattr(model, name, partial(whole_only, getattr(model, name), f"{family} is split: {name} {why}"))
