"""Norm, zero count and finiteness of all gradients of the model, from one small reduction; and clipping by that norm.

Every rank adds up what it owns: an element that several ranks hold is counted by exactly one of them (its contract and
the data rank say which), but it is checked for NaN and Inf by all. The sums go once over everybody, so all ranks,
stages and optimizer instances, dense and expert, hold the same bits and decide alike.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from core.distributed.bucket import Bucket
from core.distributed.collectives import Collectives, gather_objects
from core.optimizer.master_weights import BucketMasters

if TYPE_CHECKING:
    from core.process_groups import ProcessGroups

# torch adds the squares of a long fp32 tensor in fp32 on CPU: 0.4 percent off at 50 million elements. Pieces of this
# many elements, added in fp64, are off by 2e-8 and as fast.
CPU_NORM_ELEMENTS = 16384


@dataclass(frozen=True, slots=True)
class GradStats:
    """What all ranks know of the gradients of a step."""

    norm: float
    num_zeros: int | None
    culprit: str | None = None  # where the first non-finite gradient is; None when all are finite


def everybody(groups: ProcessGroups) -> list[dist.ProcessGroup]:
    """Groups to reduce over, one after the other, so that the sum is over all ranks of the job, each once."""
    if groups.size("intra_dist_opt") > 1 or groups.size("inter_dist_opt") > 1:
        names = ["intra_dist_opt", "inter_dist_opt"]
    elif groups.size("mp") > 1:
        names = ["mp", "dp_cp"]
    else:
        names = ["tp", "pp", "dp_cp"]
    return [groups.require(name) for name in names if groups.size(name) > 1]


def counts_here(bucket: Bucket) -> bool:
    """Of the data ranks that hold the same reduced gradients, is this the one that counts them?"""
    if not bucket.sharded:
        return dist.get_rank(bucket.groups.data) == 0
    return bucket.groups.replica is None or dist.get_rank(bucket.groups.replica) == 0


def device_of(masters: Sequence[BucketMasters], groups: Sequence[dist.ProcessGroup]) -> torch.device:
    """Where the sums are made; a stage without parameters follows the backend that the others' sums travel over."""
    if masters:
        return masters[0].grad.device
    on_gpu = any("nccl" in dist.get_backend_config(group) for group in groups)
    return torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")


class GradMeter:
    """Measures the gradients of a list of buckets. Built once; a step allocates a few numbers."""

    def __init__(self, masters: Sequence[BucketMasters], groups: Sequence[dist.ProcessGroup]) -> None:
        self.masters = masters
        self.groups = groups
        self.device = device_of(masters, groups)
        self.collectives = Collectives()
        self.pieces: list[torch.Tensor] = []
        counted: list[bool] = []
        shared_copies: dict[str, int] = {}
        for bucket_masters in masters:
            here = counts_here(bucket_masters.bucket)
            # Padding between slices is left out: it may hold what a peer's collective left there.
            for start, end, in_norm in _stretches(bucket_masters, shared_copies):
                stretch = bucket_masters.grad[start:end]
                parts = stretch.split(CPU_NORM_ELEMENTS) if stretch.device.type == "cpu" else (stretch,)
                self.pieces.extend(parts)
                counted.extend([in_norm and here] * len(parts))
        is_double = any(piece.dtype == torch.float64 for piece in self.pieces)
        self.norm_dtype = torch.float64 if is_double else torch.float32
        self.counted = torch.tensor(counted, dtype=torch.bool, device=self.device)
        self.counted_pieces = [piece for piece, here in zip(self.pieces, counted, strict=True) if here]

    def measure(self, *, count_zeros: bool = False) -> GradStats:
        """The 2-norm of all gradients of the model, and their zeros. Collective: every rank of the job."""
        total, zeros, bad = self._sum_over_everybody(self._squares(), self._zeros() if count_zeros else None)
        culprit = None
        if bad or not math.isfinite(total):
            # Finite gradients whose squares overflow fp32 end here as well, and get a second look in fp64.
            culprit = self._find_culprit()
            total, zeros, _ = self._sum_over_everybody(self._squares_fp64(), self._zeros() if count_zeros else None)
        return GradStats(math.sqrt(total) if total >= 0 else math.nan, int(zeros) if count_zeros else None, culprit)

    def _squares(self) -> torch.Tensor:
        if not self.pieces:
            return torch.zeros(0, dtype=torch.float64, device=self.device)
        norms = torch._foreach_norm(self.pieces, 2, dtype=self.norm_dtype)
        return torch.stack(norms).to(torch.float64).square()

    def _squares_fp64(self) -> torch.Tensor:
        if not self.pieces:
            return torch.zeros(0, dtype=torch.float64, device=self.device)
        return torch.stack([torch.linalg.vector_norm(piece, dtype=torch.float64) for piece in self.pieces]).square()

    def _zeros(self) -> torch.Tensor:
        zeros = torch.zeros((), dtype=torch.float64, device=self.device)
        for piece in self.counted_pieces:
            zeros += piece.numel() - torch.count_nonzero(piece)
        return zeros

    def _sum_over_everybody(self, squares: torch.Tensor, zeros: torch.Tensor | None) -> tuple[float, float, float]:
        """(sum of counted squares, zeros, number of ranks with a non-finite one) over all ranks, in one vector."""
        sums = torch.zeros(3, dtype=torch.float64, device=self.device)
        sums[0] = torch.where(self.counted, squares, 0.0).sum()
        if zeros is not None:
            sums[1] = zeros
        sums[2] = (~torch.isfinite(squares)).any()
        for group in self.groups:
            self.collectives.all_reduce(sums, group).wait()
        total, zero_count, bad = sums.tolist()
        return total, zero_count, bad

    def _find_culprit(self) -> str | None:
        """Name the first non-finite gradient of the lowest rank. Collective; only on the way to a skipped step."""
        mine = first_non_finite(self.masters)
        found: list[tuple[int, str] | None] = [(dist.get_rank(), mine) if mine is not None else None]
        for group in self.groups:
            found = [entry for entries in gather_objects(found, group) for entry in entries]
        culprits = sorted({entry for entry in found if entry is not None})
        if not culprits:
            return None
        rank, what = culprits[0]
        others = f" (and on {len(culprits) - 1} more ranks)" if len(culprits) > 1 else ""
        return f"rank {rank}: {what}{others}"


def _stretches(masters: BucketMasters, shared_copies: dict[str, int]) -> Iterable[tuple[int, int, bool]]:
    """(start, end, counts in the norm) of slices that touch each other and count alike, joined.

    shared_copies: name -> id of the parameter that counts, of those with copies in several virtual pipeline chunks.
    """
    pending: tuple[int, int, bool] | None = None
    for piece in masters.slices:
        counted = piece.contract.counts_in_norm
        if counted and piece.contract.crosses_stages:
            counted = shared_copies.setdefault(piece.contract.name, id(piece.param)) == id(piece.param)
        if pending is not None and pending[1] == piece.start and pending[2] == counted:
            pending = (pending[0], piece.end, counted)
            continue
        if pending is not None:
            yield pending
        pending = (piece.start, piece.end, counted)
    if pending is not None:
        yield pending


def first_non_finite(masters: Iterable[BucketMasters]) -> str | None:
    """The first gradient of this rank that holds NaN or Inf, in words; None when all are finite."""
    for bucket_masters in masters:
        for piece in bucket_masters.slices:
            grad = bucket_masters.grad[piece.start : piece.end]
            bad = ~torch.isfinite(grad)
            if bool(bad.any()):
                value, count = grad[bad][0].item(), int(bad.sum())
                return f"the gradient of {piece.contract.name!r} holds {value} in {count} of {grad.numel()} elements"
    return None


def clip_coefficient(max_norm: float, norm: float) -> float:
    """What to multiply gradients of this norm with so that it is at most `max_norm`; 1 for a `max_norm` of 0."""
    if max_norm <= 0:
        return 1.0
    return min(1.0, max_norm / (norm + 1e-6))


def scale_gradients(masters: Iterable[BucketMasters], factor: float) -> None:
    """Multiply the gradients that the inner optimizer is about to read."""
    if factor != 1.0:
        grads = [grad for bucket_masters in masters for grad in bucket_masters.scalable if grad.numel()]
        if grads:
            torch._foreach_mul_(grads, factor)
