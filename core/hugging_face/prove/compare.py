"""Comparison of a cut model's output for the example with the full model's. The cut is rejected if they differ."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from core.groups import agree
from core.groups.process_groups import ProcessGroups
from core.hugging_face.prove.counted_positions import CountedPositions
from core.hugging_face.read.example import with_labels
from core.hugging_face.read.plan import AGAIN, Plan, PlanError
from core.hugging_face.read.precision import rounded_otherwise
from core.hugging_face.read.quiet import OF_MODELS, ONCE_SPLIT, refusing_failures, run_quietly
from core.hugging_face.run.loss.parallel_loss import with_whole_logits
from core.hugging_face.run.sequence import SequenceParallel
from core.hugging_face.run.stages import activations_of, stage_of
from core.pipeline_parallel.forward_only import forward_only
from core.pipeline_parallel.layout import PipelineLayout

CUT = "cutting the model into stages"
OTHER_TOKENS = "its layers use other tokens elsewhere than in attention, or in a way that is unknown here"
ORDER = "its plan is wrong, or its layers do not run once each, one after another"
ROUNDING = {torch.float64: 1e-6, torch.float32: 1e-3}  # fp64 models compute norms and routers in fp32
IN_16_BITS, TIMES = 0.1, 3.0  # lower bound of the tolerance, and factor on the measured rounding
Watch = Callable[[Any, Mapping[str, Any]], tuple[Any, Any]]


class Shown(NamedTuple):
    """Compared values of a forward: logits or last hidden state, and the loss if there are labels."""

    output: Tensor
    loss: Tensor | None = None

    @classmethod
    def of(cls, output: Any) -> Shown:
        if isinstance(output, Tensor):
            return cls(output.detach())
        named = output.items() if hasattr(output, "keys") else enumerate(output)
        loss = output.get("loss") if hasattr(output, "keys") else None
        value = next(value for name, value in named if isinstance(value, Tensor) and name != "loss").detach()
        return cls(value, loss.detach() if isinstance(loss, Tensor) and bool(loss.isfinite().all()) else None)


class Reference(NamedTuple):
    """Output of the full model for the example.

    Attributes:
        arguments: Arguments that worked, without labels if the attempt with labels failed.
        order: Findings of ``watch``, for stages.
        shown: Compared values.
        limit: Largest relative difference that rounding can cause.
        failure: Error of the attempt with labels, if any.
    """

    arguments: dict[str, Any]
    order: Any
    shown: Shown
    limit: float
    failure: Exception | None


def record_output(model: Any, arguments: dict[str, Any], watch: Watch | None = None) -> Reference:
    """Run the full model on the example before it is cut, with labels if its forward takes them. Does not communicate.

    Some models need more inputs for training than the example has. If the attempt with labels fails, they are proven
    without labels. ``watch`` runs the forward and also returns findings about it.
    """
    labelled, failure = with_labels(model, arguments), None
    for attempt in [labelled, arguments] if len(labelled) > len(arguments) else [arguments]:
        try:
            order, output = (None, run_quietly(model, attempt)) if watch is None else watch(model, attempt)
        except OF_MODELS as error:
            if attempt is arguments:
                raise
            failure = error
        else:
            break
    shown = Shown.of(output)
    return Reference(attempt, order, shown, _rounding_of(model, attempt, shown), failure)


def prove(
    parts: Sequence[Any],
    plan: Plan,
    reference: Reference,
    groups: ProcessGroups,
    layout: PipelineLayout | None,
    mode: str | None,
) -> None:
    """Compare the parts' output with the full model's, and raise PlanError if they differ.

    Collective over the groups of the split, or over the world for a pipeline. ``mode`` is the mode of sequence
    parallelism, if any.
    """
    arguments, before = reference.arguments, reference.shown
    if layout is None:
        words = () if groups.size("tp") * plan.ep > 1 else (f"under {mode!r}", OTHER_TOKENS)
        after = Shown.of(with_whole_logits(parts[0], run_quietly(parts[0], arguments)))
        refuse_other_output(plan, before, after, reference.limit, *words)
        return
    outputs: list[Shown] = []

    def run(part: Any, number: int, received: tuple[Tensor, ...]) -> Any:
        output = run_quietly(part, {**arguments, **({"received": received} if received else {})})
        if stage_of(part).part.post_process:
            outputs.append(Shown.of(with_whole_logits(part, output)))
        return output

    runs = {stage_of(part).part.index: functools.partial(run, part) for part in parts}
    sent = activations_of(parts[0], arguments)
    forward_only(layout, runs, 1, lambda stage: sent(stage - 1), groups.require("pp"), before.output.device)
    with agree.together(None, CUT, PlanError):
        for after in outputs:
            refuse_other_output(plan, before, after, reference.limit, "as a pipeline", ORDER)


@contextmanager
def compare_sequence(
    model: Any, plan: Plan, arguments: dict[str, Any], sequence: SequenceParallel, layers: Collection[nn.Module]
) -> Iterator[None]:
    """Compare the example's output before and after the block, which cuts the sequence of the layers.

    The model is split over tensor parallelism and has its seams, and ``arguments`` are without labels. Some models
    (gpt2) reshape their hidden states to the input's shape after the layers. For these, ``sequence.local_logits`` is
    set to False, and the sequence is joined right after the layers. Raises PlanError if the outputs differ, or a layer
    counts the positions of its tokens itself.
    """
    mode = sequence.mode
    counted, counted_of_parts = CountedPositions(), CountedPositions()
    with refusing_failures(plan, *ONCE_SPLIT), counted.inside(layers):
        before = Shown.of(run_quietly(model, arguments))
        limit = _rounding_of(model, arguments, before)
    yield
    after: Tensor | None = None
    with refusing_failures(plan, f"with {mode!r}"), counted_of_parts.inside(layers):
        if sequence.local_logits:
            with suppress(RuntimeError):
                after = sequence.join(Shown.of(run_quietly(model, arguments)).output, -2)
            sequence.local_logits = after is not None and after.shape == before.output.shape
        if not sequence.local_logits or after is None:
            after = Shown.of(run_quietly(model, arguments)).output
    refuse_other_output(plan, before, Shown(after), limit, f"under {mode!r}", OTHER_TOKENS)
    for place in counted.of_parts(counted_of_parts):
        raise PlanError(
            f"{plan.family}: under {mode!r} a layer counts the positions of its tokens itself (torch.arange in "
            f"{place}), from 0 on every rank; use 'split_gather'. {AGAIN}"
        )


def _rounding_of(model: Any, arguments: Mapping[str, Any], before: Shown) -> float:
    """Estimate the largest change of the example's output that rounding can cause, relative to the output's norm.

    In 16 bits, rounding can make a router choose another expert. The example therefore runs once more with other
    rounding.
    """
    eps = max(torch.finfo(p.dtype).eps for p in model.parameters() if p.is_floating_point())
    if eps <= torch.finfo(torch.float32).eps:
        return ROUNDING.get(before.output.dtype, IN_16_BITS)
    with rounded_otherwise(model):
        return max(IN_16_BITS, TIMES * _distance(Shown.of(run_quietly(model, arguments)).output, before.output))


def _distance(after: Tensor, before: Tensor) -> float:
    """Return the norm of the difference, relative to the norm of ``before``."""
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

    ``limit`` is relative to the norm. ``how`` describes the split, and ``why`` the likely cause, for the message.
    """
    for what, value, expected in zip(("output", "loss"), after, before, strict=True):
        if value is None or expected is None:
            continue
        if value.shape != expected.shape:
            raise PlanError(
                f"{plan.family}: {how}, its {what} for the example has shape {list(value.shape)}, expected "
                f"{list(expected.shape)} as from the unsplit model, so {why}. {AGAIN}"
            )
        off = _distance(value, expected)
        if not off <= limit:
            raise PlanError(
                f"{plan.family}: {how}, its {what} for the example differs from the unsplit model's by {off:.2g} "
                f"(relative to the norm), so {why}. {AGAIN}"
            )
