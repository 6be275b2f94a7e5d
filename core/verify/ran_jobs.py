"""Steps that a user's loop has already run, of a wrapped model or a pipeline."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
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
        """Call ``finish`` when the step's gradients are reduced, on all ranks; the guard of first steps is paused."""
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


def refuse_what_does_not_fit(job: RanJob, dtype: torch.dtype) -> None:
    """Raise MemoryError on all ranks if weights and gradients of the unsplit model do not fit on rank 0."""
    mine = {held.name: math.prod(held.place.shape) for held in job.model.held}
    answers = agree.gather((mine, free_bytes(job.model.device)), None, "the size of the reference")
    numels: dict[str, int] = {name: numel for theirs, _ in answers.values() for name, numel in theirs.items()}
    own = job.model.dtype
    of_element = 2 * dtype.itemsize + (2 * own.itemsize if own != dtype else 0)  # bytes per element
    needed, free = sum(numels.values()) * of_element, answers[0][1]
    if needed > free:
        raise MemoryError(
            f"the unsplit model has {sum(numels.values()):,} parameters; its weights and gradients in {dtype} and "
            f"{own} take {needed / 2**30:.2f} GiB on rank 0, where {free / 2**30:.2f} GiB are free. Verify a model "
            "with fewer layers, or pass reference_dtype=torch.float32"
        )


def free_bytes(device: torch.device) -> int:
    """Return the number of free bytes on a device."""
    if device.type != "cpu":
        return int(torch.get_device_module(device).mem_get_info(device)[0])
    meminfo = Path("/proc/meminfo")
    if not meminfo.exists():  # not Linux
        return 1 << 60
    lines = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
    return int(lines["MemAvailable"].split()[0]) * 1024
