"""Attach a cut model's tags, seams, loss, sequence and random streams, and declare its gradient contracts.

One forward on a small example shows which activations each unsplit parameter sees, and that decides its contract.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from torch import nn

from core.distributed.contract.gradient_contract import declare_gradient
from core.groups import agree
from core.groups.process_groups import ProcessGroups
from core.hugging_face.cut.parts import of_stage, place_seams, tag_slices, tie_ends
from core.hugging_face.cut.places import list_of_layers
from core.hugging_face.cut.report import REPORT, SplitReport, Splitting
from core.hugging_face.cut.sequence import over_sequence
from core.hugging_face.prove.compare import CUT, Shown, compare_sequence
from core.hugging_face.read.example import unreached
from core.hugging_face.read.plan import AGAIN, Plan, PlanError
from core.hugging_face.read.quiet import ONCE_SPLIT, refusing_failures, run_quietly
from core.hugging_face.run.dropout import ForwardStream, drop_parts_apart
from core.hugging_face.run.generate import generate_together
from core.hugging_face.run.loss.parallel_loss import use_parallel_loss, why_logits_stay_whole
from core.hugging_face.run.refusals import (
    IN_STAGES,
    SPLIT_HEADS,
    refuse_methods,
    refuse_partial_outputs,
)
from core.hugging_face.run.sequence import OVER_CONTEXT, OVER_TENSOR, SequenceParallel, present_layers
from core.hugging_face.run.stage_forward import StageForward
from core.hugging_face.run.stages import received_example, stage_of
from core.tensor_parallel.dataflow import run_watched
from core.watch.warn_user import warn_user

ALONE = "A pipeline sends hidden states, and of an encoder-decoder the encoder's output. "
IN_PARTS = "would choose a token from a part of the layers or of the sequence; generate with the model saved"


def attach_parts(parts: Sequence[Any], plan: Plan, arguments: dict[str, Any], how: Splitting) -> None:
    """Attach all parts of this rank, and run one forward of each stage with ``arguments``. Collective."""
    if how.layout is None:
        attach(parts[0], plan, arguments, how)
        return
    with agree.together(None, CUT, PlanError), refusing_failures(plan, "without the layers of other stages", ALONE):
        for part in parts:
            stage, given = stage_of(part), {**arguments, **received_example(part, arguments)}
            own = dataclasses.replace(how, parallel_output=how.parallel_output if stage.part.post_process else False)
            attach(part, of_stage(plan, part), given, own)
            output = run_quietly(part, given)
            sent = output if isinstance(output, tuple) else (Shown.of(output).output,)
            if any(bool(value.isnan().any()) for value in sent):
                raise PlanError(
                    f"{plan.family}: the layers of stage {stage.part.index} read a value of the embeddings or of "
                    f"earlier layers that is not sent between stages. {ALONE}"
                )
            for name in stage.cut.around:
                part.get_parameter(name).pipeline_parallel = True
        tie_ends(parts, how.layout)


def attach(model: Any, plan: Plan, arguments: dict[str, Any], how: Splitting) -> SplitReport:
    """Attach one part: tags, seams, loss, sequence, gradient contracts, and refusals. Collective.

    Return the report, which the model also carries.
    """
    groups, tp = how.groups, how.groups.size("tp")
    tag_slices(dict(model.named_parameters()), plan, groups)
    for name, number in plan.numbers.items() if tp > 1 else ():
        owner, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(owner), attribute, number // tp)
    place_seams(dict(model.named_modules()), plan, groups)
    keeps_split, sequence = _keeps_logits_split(model, plan, arguments, how), None
    if how.sequence_parallel is not None:
        sequence = SequenceParallel(how.sequence_parallel, groups, plan.family, local_logits=keeps_split)
    if keeps_split:
        plan = use_parallel_loss(model, plan, groups.tp, sequence)
    unlabelled = {name: value for name, value in arguments.items() if name != "labels"}
    cut = contextlib.nullcontext(plan) if sequence is None else _sequence_cut(model, plan, unlabelled, sequence, groups)
    partial_ones = unseen = frozenset[str]()
    with cut as plan:
        if tp > 1:
            partial_ones, unseen = _declare_unsplit(model, plan, groups, unlabelled)
    is_stage = isinstance(vars(model).get("forward"), StageForward)
    in_parts = sequence is not None or is_stage
    if tp > 1:
        refuse_partial_outputs(model, plan.family, f"over tp {tp}", SPLIT_HEADS)
    if is_stage:
        refuse_partial_outputs(model, plan.family, "in stages", IN_STAGES)
    if tp * plan.ep > 1 or in_parts:
        refuse_methods(model, plan.family, **({"generate": IN_PARTS} if in_parts else {}))
        if not in_parts and hasattr(model, "generate"):
            model.generate = partial(generate_together, model.generate)
        model.forward_stream = ForwardStream(groups)
        model.forward_stream.attach(model)
    report = SplitReport(plan, tp, partial_ones, unseen, unreached(model, arguments))
    setattr(model, REPORT, report)
    return report


def attach_adapted(adapted: Any, plan: Plan, groups: ProcessGroups, arguments: dict[str, Any]) -> None:
    """Attach a PeftModel around a split model: declare the gradients of its own parameters, and refuse methods.

    Collective over the tensor-parallel group.
    """
    contracts = _declare_unsplit(adapted, plan, groups, arguments)
    setattr(adapted, REPORT, SplitReport(plan, groups.size("tp"), *contracts))
    refuse_methods(adapted, plan.family)


def _keeps_logits_split(model: Any, plan: Plan, arguments: dict[str, Any], how: Splitting) -> bool:
    """Return ``True`` if the model keeps its logits split and computes its loss from the parts."""
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
def _sequence_cut(
    model: Any, plan: Plan, arguments: dict[str, Any], sequence: SequenceParallel, groups: ProcessGroups
) -> Iterator[Plan]:
    """Cut the layers' sequence when the context ends, and prove it by the example without labels.

    Yields the plan with the seams of ``split_gather``. The model is watched with these, and with its full sequence.
    """
    layers = list_of_layers(model, f"{plan.family}: sequence parallelism is for models with")
    inner = [model.get_submodule(place) for place in present_layers(model, layers)]
    with compare_sequence(model, plan, arguments, sequence, inner):
        if sequence.mode in OVER_TENSOR:
            plan = over_sequence(model, plan, layers)
            place_seams(dict(model.named_modules()), plan, groups)
        yield plan
        sequence.attach(model, layers)


def _declare_unsplit(
    model: nn.Module, plan: Plan, groups: ProcessGroups, arguments: dict[str, Any]
) -> tuple[frozenset[str], frozenset[str]]:
    """Declare the gradient contract of each trainable unsplit parameter from one watched forward of the split model.

    Return the parameters whose gradients are partial over tp, and the parameters that the forward did not use. Raises
    PlanError if no contract can make a gradient right.
    """
    slices = [
        value
        for value in (*model.parameters(), *arguments.get("received", ()))
        if getattr(value, "tensor_model_parallel", False)
    ]
    with refusing_failures(plan, *ONCE_SPLIT):
        flow = run_watched(model, slices, arguments)
    if flow.faults:
        more = f" (and {len(flow.faults) - 1} more places)" if len(flow.faults) > 1 else ""
        raise PlanError(f"{plan.family}: {flow.faults[0]}{more}. {AGAIN}")
    both = sorted(flow.partial & flow.complete)
    if both:
        raise PlanError(
            f"{plan.family}: parameter {both[0]!r} is used both with split and with full tensors, so its gradient is "
            f"neither complete nor a partial sum over tp. {AGAIN}"
        )
    unsplit = {n: p for n, p in model.named_parameters() if p.requires_grad and n not in plan.splits}
    unseen = unsplit.keys() - flow.partial - flow.complete
    partial_ones = (flow.partial | (unseen & plan.partial)) & unsplit.keys()
    for name in unsplit.keys() - unseen | partial_ones:
        declare_gradient(unsplit[name], partial_over=("tp",) if name in partial_ones else ())
    drop_parts_apart(model, flow, groups)
    return frozenset(partial_ones), frozenset(unseen)
