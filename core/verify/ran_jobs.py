"""Steps that a user's loop has already run, of a wrapped model or a pipeline."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from core.distributed import DistributedDataParallel
from core.distributed.guard.first_steps import paused
from core.groups import agree
from core.pipeline_parallel import PipelineRunner
from core.pipeline_parallel.forward_backward import DrawingStep
from core.verify.gathered import first_tensor, kept
from core.verify.job import Job, PipelineJob, PlainJob
from core.verify.microbatches import Microbatch
from core.verify.recording import Recorder
from core.verify.step_ends import StepEnds


class Tape:
    """Iterator that records its items, so that a repeated step draws them again."""

    def __init__(self, source: Iterator[Any]) -> None:
        self.source = source
        self.items: list[Any] = []
        self.next = 0

    def __iter__(self) -> Tape:
        return self

    def __next__(self) -> Any:
        if self.next == len(self.items):
            self.items.append(kept(next(self.source)))
        self.next += 1
        return kept(self.items[self.next - 1])

    def __getattr__(self, name: str) -> Any:
        return getattr(self.source, name)


def taped(step: DrawingStep) -> list[Tape]:
    """Replace a step's iterators by tapes; chunks that share an iterator share its tape."""
    tapes = {id(source): Tape(source) for source in step.iterators if hasattr(source, "__next__")}
    step.iterators = [tapes.get(id(source), source) for source in step.iterators]
    return list(tapes.values())


class RanJob(Job):
    """Step that a loop has already run; the batch is a list of microbatches for each data rank.

    Attributes:
        tapes: Recorded data that a pipeline's forward step draws itself.
        mine: Arguments for loss_fn.
        forwards: Arguments of the model's forwards.
        ends: Meetings of the ranks if only an optimizer's step ends a step of the loop; else None.
        losses: (loss, number of tokens or 0) of this rank's microbatches, if the loop shows them.
    """

    losses: tuple[tuple[float, float], ...] = ()
    tapes: Sequence[Tape] = ()
    ends: StepEnds | None = None
    mine: list[Microbatch]  # arguments for loss_fn
    forwards: list[Microbatch]  # arguments of the model's forwards
    loss_fn: Any

    @contextmanager
    def watched(self, finish: Callable[..., None]) -> Iterator[None]:
        """Call `finish` when the step's gradients are reduced, on all ranks; the guard of first steps is paused."""
        with paused([chunk.engine.first_steps for chunk in self.model.chunks]):
            self.model.chunks[-1].reducer.at_end = finish
            try:
                yield
            finally:
                self.model.chunks[-1].reducer.at_end = None

    def step(self, batch: Any) -> float:
        """See Job; the loop has already run it, and may have shown its losses."""
        everyone = agree.gather(self.losses, None, "the losses of a step").values()
        losses = [pair for of_rank in everyone for pair in of_rank]
        self.sees_loss = bool(losses)
        if self.per_token:
            return sum(loss for loss, _ in losses) / (sum(tokens for _, tokens in losses) or 1.0)
        return sum(loss / (tokens or 1.0) for loss, tokens in losses) / max(len(losses), 1)

    def parts(self, batch: Any) -> list[Any]:
        """See Job; this rank's microbatches, which its tensor-parallel group may not share."""
        return self.mine

    def samples(self, batch: Any) -> int:
        """See Job."""
        tensor = first_tensor(batch)
        return tensor.shape[0] if tensor.dim() else 1

    def biases(self) -> dict[tuple[int, str], Tensor]:
        """See Job."""
        return self.before

    def weight_checksums(self) -> dict[tuple[Any, ...], list[int]]:
        """Return checksums of parameters by name and position; empty, because our wrapper compares weights itself."""
        return {}

    def keep_biases(self) -> None:
        """Save the biases before the step."""
        self.before = super().biases()


class LoopJob(RanJob, PlainJob):
    """Forwards and backwards of one wrapped model."""

    def __init__(self, ddp: DistributedDataParallel, loss_fn: Callable[[nn.Module, Microbatch], Any]) -> None:
        PlainJob.__init__(self, ddp, loss_fn, 1)
        self.keep_biases()


class PipelineLoopJob(RanJob, PipelineJob):
    """Step of a pipeline."""

    def __init__(self, runner: PipelineRunner, loss_fn: Callable[[nn.Module, Microbatch], Any]) -> None:
        PipelineJob.__init__(self, runner, 1)
        self.loss_fn = loss_fn
        self.keep_biases()

    def backward(self, batch: Any, recorder: Recorder | None = None) -> None:
        """See Job."""
        for tape in self.tapes:
            tape.next = 0
        super().backward(batch, recorder)

    def parts(self, batch: Any) -> list[Any]:
        """See Job; the runner's microbatches."""
        return [args[0] for args, _ in self.forwards]

    def factor_of_gradients(self, tokens: float | None) -> float:
        """See Job; a forward step may itself divide by the global batch's tokens."""
        if tokens is None or self.runner.per_token:
            return super().factor_of_gradients(tokens)
        return self.groups.size("dp_cp") / ((tokens or 1.0) * self.token_weight)
