"""Prove a split: compare the example's output before and after, and reject with a message that names the difference."""

from __future__ import annotations

import functools
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from core.groups import agree
from core.hugging_face.cut.places import Watched, watch_order
from core.hugging_face.cut.report import Splitting
from core.hugging_face.cut.sequence import SequenceParallel
from core.hugging_face.read.example import run_quietly, with_labels
from core.hugging_face.read.plan import Plan, PlanError
from core.hugging_face.read.precision import rounded_otherwise
from core.hugging_face.run.loss.parallel_loss import with_whole_logits
from core.hugging_face.run.stages import activations_of, stage_of
from core.pipeline_parallel.forward_only import forward_only
from core.pipeline_parallel.layout import PipelineLayout
from core.watch.waiting import is_peers

AGAIN = "The model has been cut; make it again"
OTHER_TOKENS = "its layers use other tokens elsewhere than in attention, or in a way that is unknown here"
ROUNDING = {torch.float64: 1e-6, torch.float32: 1e-3}  # fp64 models compute norms and routers in fp32
IN_16_BITS, TIMES = 0.1, 3.0  # lower bound of the tolerance, and factor on the measured rounding
CUT = "cutting the model into stages"
# Errors that a model's forward raises for missing or unusable inputs.
OF_MODELS = (RuntimeError, ValueError, TypeError, IndexError, AttributeError, KeyError, NotImplementedError)
ORDER = "its plan is wrong, or its layers do not run once each, one after another"


class Shown(NamedTuple):
    """Compared values of a forward: logits or last hidden state, and the loss if there are labels."""

    output: Tensor
    loss: Tensor | None = None

    @classmethod
    def of(cls, output: Any) -> Shown:
        """Extract the compared values from a model's output."""
        if isinstance(output, Tensor):
            return cls(output)
        named = output.items() if hasattr(output, "keys") else enumerate(output)
        loss = output.get("loss") if hasattr(output, "keys") else None
        value = next(value for name, value in named if isinstance(value, Tensor) and name != "loss")
        return cls(value, loss if isinstance(loss, Tensor) and bool(loss.isfinite().all()) else None)


def shown_by(model: Any, arguments: Mapping[str, Any], *, whole: bool = False) -> Shown:
    """Run a forward without gradients and return the compared values.

    Args:
        model: Transformers model.
        arguments: Keyword arguments. With labels the model computes as in training, otherwise in evaluation mode.
        whole: True to gather split logits.

    Returns:
        The output, and the loss if there are labels.
    """
    output = run_quietly(model, arguments, training="labels" in arguments)
    return Shown.of(with_whole_logits(model, output) if whole else output)


class WholeRun(NamedTuple):
    """A forward of the full model.

    Attributes:
        arguments: The arguments that worked; without labels if the attempt with labels failed.
        order: Order of the modules, for stages.
        shown: Compared values.
        failure: Error of the attempt with labels, if any.
    """

    arguments: dict[str, Any]
    order: Watched | None
    shown: Shown
    failure: Exception | None


def shown_whole(model: Any, arguments: dict[str, Any], layout: PipelineLayout | None) -> WholeRun:
    """Run the full model on the example, with labels if its forward takes them.

    Some models need more inputs for training than the example has; if the attempt with labels fails, they are proven
    without labels.

    Args:
        model: Full transformers model.
        arguments: Keyword arguments of the example.
        layout: Pipeline layout. If given, the order of the modules is recorded.

    Returns:
        The run that succeeded.
    """
    attempts = [with_labels(model, arguments), arguments]
    failure: Exception | None = None
    for attempt in attempts if len(attempts[0]) > len(arguments) else [arguments]:
        try:
            if layout is None:
                return WholeRun(attempt, None, shown_by(model, attempt), failure)
            order, output = watch_order(model, attempt)
            shown = Shown(*(value if value is None else value.detach() for value in Shown.of(output)))
            return WholeRun(attempt, order, shown, failure)
        except OF_MODELS as error:
            if attempt is arguments:
                raise
            failure = error
    raise AssertionError("the last attempt returns or raises")


def refuse_failure_of_some(failure: Exception | None, ranks: agree.Groups) -> None:
    """Raise on all ranks if the example with labels failed on only some ranks, which would then prove less.

    Collective over `ranks`.
    """
    what = "the forward of the example with labels"
    least, most = agree.bounds([failure is not None], ranks, what)
    if least != most:
        agree.refuse(failure, ranks, what, PlanError)


def shown_over_sequence(model: Any, arguments: dict[str, Any], sequence: SequenceParallel, shape: torch.Size) -> Shown:
    """Run the example over a cut sequence and return the joined output.

    Collective over the ranks that cut the sequence. Some models (gpt2) reshape their hidden states to the input's shape
    after the layers. For these, `sequence.local_logits` is set to False and the sequence is joined right after the
    layers.

    Args:
        model: Split model.
        arguments: Keyword arguments of the example.
        sequence: Sequence parallelism of the model.
        shape: Shape of the output without it.

    Returns:
        The output.
    """
    if sequence.local_logits:
        try:
            after = sequence.join(shown_by(model, arguments).output, -2)
        except RuntimeError:
            after = None
        if after is not None and after.shape == shape:
            return Shown(after)
        sequence.local_logits = False
    return shown_by(model, arguments)


def rounding_of(model: Any, arguments: Mapping[str, Any], before: Shown) -> float:
    """Estimate the largest relative change of the example's output that rounding can cause.

    In 16 bits, rounding can make a router choose another expert. The example therefore runs once more with other
    rounding.

    Args:
        model: Transformers model.
        arguments: Keyword arguments of the example.
        before: Output to compare with.

    Returns:
        The tolerance, relative to the output's norm.
    """
    eps = max(torch.finfo(p.dtype).eps for p in model.parameters() if p.is_floating_point())
    if eps <= torch.finfo(torch.float32).eps:
        return ROUNDING.get(before.output.dtype, IN_16_BITS)
    with rounded_otherwise(model):
        return max(IN_16_BITS, TIMES * distance_of(shown_by(model, arguments).output, before.output))


def distance_of(after: Tensor, before: Tensor) -> float:
    """Return the norm of the difference, relative to the norm of `before`."""
    return float(torch.linalg.vector_norm(after - before) / torch.linalg.vector_norm(before).clamp(min=1e-30))


def refuse_other_output(
    plan: Plan,
    before: Shown,
    after: Shown,
    limit: float,
    how: str = "split over tp",
    why: str = "its plan is wrong",
) -> None:
    """Raise PlanError if the split model's output or loss differs from the full model's by more than rounding.

    Args:
        plan: Plan of the split.
        before: Values of the full model.
        after: Values of the split model.
        limit: Tolerance relative to the norm.
        how: Description of the split, for the message.
        why: Likely cause, for the message.
    """
    for what, value, expected in zip(("output", "loss"), after, before, strict=True):
        if value is None or expected is None:
            continue
        if value.shape != expected.shape:
            raise PlanError(
                f"{plan.family}: {how}, its {what} for the example has shape {list(value.shape)}, expected "
                f"{list(expected.shape)} as from the unsplit model, so {why}. {AGAIN}"
            )
        off = distance_of(value, expected)
        if not off <= limit:
            raise PlanError(
                f"{plan.family}: {how}, its {what} for the example differs from the unsplit model's by {off:.2g} "
                f"(relative to the norm), so {why}. {AGAIN}"
            )


def received_example(chunk: Any, arguments: Mapping[str, Any]) -> dict[str, Tensor]:
    """Create the received tensors of a stage that runs alone: random numbers, the same on all ranks.

    Args:
        chunk: A stage of the model.
        arguments: Keyword arguments of the example.

    Returns:
        The stage's argument `received`; empty for the first stage.
    """
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


def compare_output(
    parts: Sequence[Any], plan: Plan, arguments: dict[str, Any], whole: tuple[Shown, float], how: Splitting
) -> None:
    """Compare the parts' output with the full model's, and reject the split if they differ.

    Collective over the groups of the split; over the world for a pipeline.

    Args:
        parts: This rank's parts.
        plan: Plan of the split.
        arguments: Keyword arguments of the example.
        whole: Values of the full model, and the tolerance for rounding.
        how: Groups, layout, and options of the split.

    Raises:
        PlanError: If the outputs differ.
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


@contextmanager
def refusing_failures(plan: Plan, when: str, advice: str = "", again: str = AGAIN) -> Iterator[None]:
    """Convert errors of the model's own code inside the context into PlanErrors that name the module.

    Args:
        plan: Plan of the split.
        when: When the forward ran, for the message.
        advice: Next step, for the message.
        again: State of the model afterwards, for the message.
    """
    try:
        yield
    except PlanError:
        raise
    except OF_MODELS as error:
        if is_peers(error):  # another rank failed; this model's code is not the cause
            raise
        text = str(error).strip().splitlines() or [""]
        owners = [frame.f_locals.get("self") for frame, _ in traceback.walk_tb(error.__traceback__)]
        where = next((type(owner).__name__ for owner in reversed(owners) if isinstance(owner, nn.Module)), "")
        raise PlanError(
            f"{plan.family}: its forward fails {when}: {type(error).__name__}: {text[0]} (in module {where!r}). "
            f"{advice}{again}"
        ) from error


@contextmanager
def refusing_together(what: str, *kinds: type[Exception], groups: agree.Groups = None) -> Iterator[None]:
    """Raise on all ranks if one of them raises inside the context.

    Otherwise the remaining ranks would wait in their next collective. Collective over `groups`, or the world if None.

    Args:
        what: Name of the operation, for the message.
        *kinds: Exception types to share, in addition to PlanError.
        groups: Groups whose ranks raise together.
    """
    failure: Exception | None = None
    kinds = (PlanError, *kinds)
    try:
        yield
    except kinds as error:
        failure = error
    agree.refuse(failure, groups, what, PlanError)
