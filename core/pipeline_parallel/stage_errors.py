"""StageErrors: an error of one pipeline stage is raised on all ranks of the pipeline, once the step has ended.

The number and the shapes of a step's messages are fixed before it starts. A stage that left the step at once would
leave the others waiting for its messages, and the next step's messages would be mistaken for them. So it sends
non-finite placeholders instead of the tensors that it cannot compute, and the ranks agree at the end of the step.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor

from core.groups import agree
from core.groups.process_groups import ProcessGroups
from core.parallel_state import get_rank_watch
from core.watch.waiting import end_waits_of, in_short, is_peers

WITHIN_A_STAGE = ("tp", "cp", "ep")  # groups whose ranks wait for one another inside one stage
ALIKE_S = 3.0  # how long a rank waits for the same error on the other ranks of its stage
KINDS = (ValueError, TypeError, NotImplementedError)  # kept on the other ranks, where a loop may catch them


class StageErrors:
    """The first error of this rank's stages in a step."""

    def __init__(self, groups: ProcessGroups) -> None:
        self.groups = groups
        self.calls = 0
        self.error: Exception | None = None
        self.finding: tuple[int, int, int, str] | None = None

    def begin(self) -> None:
        self.calls += 1
        self.error = self.finding = None

    @contextmanager
    def kept(self, work: str, stage: int, microbatch: int) -> Iterator[None]:
        """Keep the error of a stage's work instead of raising it. The caller then sends placeholders.

        Errors that began on another rank are raised. So is an error that the other ranks of this stage do not have,
        because they wait inside the stage and would not end the step.
        """
        try:
            yield
        except Exception as error:
            watch = get_rank_watch()
            if is_peers(error):
                raise
            if watch is not None:
                watch.report_failure(error)
            if not self._all_failed_here(f"{work} {stage} {microbatch} {type(error).__name__}"):
                raise
            if self.finding is None:
                rank = torch.distributed.get_rank()
                words = f"rank {rank} failed in the {work} of microbatch {microbatch} on stage {stage}: "
                kind = next((number for number, kind in enumerate(KINDS) if isinstance(error, kind)), len(KINDS))
                self.error, self.finding = error, (microbatch, _place(work, stage), kind, words + in_short(error))

    @contextmanager
    def waits_ended(self) -> Iterator[None]:
        """End the other ranks' waits if an error leaves the step early, since this rank's messages will not come.

        The job's groups cannot be used afterwards, even if the program catches the error.
        """
        try:
            yield
        except Exception as error:
            watch = get_rank_watch()
            if watch is not None and not watch.failed:
                watch.failed = f"left a pipeline's step: {in_short(error)}"
            for group in self.groups.with_other_ranks():
                end_waits_of(group)
            raise

    def _all_failed_here(self, place: str) -> bool:
        """Return ``True`` if all ranks that compute this stage together have failed at the same place."""
        names = [name for name in WITHIN_A_STAGE if self.groups.size(name) > 1]
        watch = get_rank_watch()
        if watch is None:
            return not names
        with suppress(RuntimeError):  # the store has gone with its process
            missing: dict[str, int] = {}  # place -> how often its ranks will have come there
            for name in names:
                key = f"failed/{self.groups.ranks(name)} {self.calls} {place}"
                missing[key] = watch.visit(key)[1] * self.groups.size(name)
            last = time.monotonic() + ALIKE_S
            while missing := {key: count for key, count in missing.items() if watch.visits(key) < count}:
                if time.monotonic() > last:
                    return False
                time.sleep(0.01)
            return True
        return False

    def agreed(self) -> Exception | None:
        """Return the error to raise, which names the stage that failed first, or on its ranks the original error.
        Collective.

        Placeholders may have made later stages fail too.
        """
        found = agree.first(self.finding, self.groups.control("pp"), "the errors of a pipeline's stages")
        error, self.error = self.error, None
        if found is None or found[:2] == (self.finding or ())[:2]:
            return error
        kind: type[Exception] = (*KINDS, RuntimeError)[found[2]]
        return kind(f"{found[3]}. All ranks of the pipeline have ended this step; call zero_grad() and continue")


def _place(work: str, stage: int) -> int:
    """Return a number that orders errors of one microbatch by the stages it passes."""
    return stage if work == "forward" else 10**6 - stage


class _Placeholder(torch.autograd.Function):
    """Tensors of declared shapes that depend on the tensors a stage has received."""

    @staticmethod
    def forward(ctx: Any, forms: Sequence[Tensor], device: torch.device, *received: Tensor) -> Any:
        ctx.forms = [torch.empty_like(tensor, device="meta") for tensor in received]
        ctx.device = device
        return tuple(not_finite(form, device) for form in forms)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        return None, None, *(not_finite(form, ctx.device) for form in ctx.forms)


def placeholders(forms: Sequence[Tensor], received: Sequence[Tensor], device: torch.device) -> tuple[Tensor, ...]:
    """Return outputs for a failed stage, shaped like ``forms`` and with a backward to the tensors it has received."""
    anchor = torch.zeros((), device=device, requires_grad=True)  # the first stage has received nothing
    return _Placeholder.apply(forms, device, anchor, *received)


def not_finite(form: Tensor, device: torch.device) -> Tensor:
    """Return a tensor like ``form`` filled with NaN, or with zeros for integer dtypes."""
    return torch.full_like(form, torch.nan if form.is_floating_point() else 0, device=device, requires_grad=False)
