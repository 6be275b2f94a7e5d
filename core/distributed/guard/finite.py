"""The last look at gradients before the optimizer. Each check raises on all ranks or on none."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch
import torch.distributed as dist

from core import agree
from core.distributed.buffer.bucket import Bucket
from core.distributed.buffer.grad_placeholder import GradPlaceholder
from core.process_groups import ProcessGroups, world_groups

LARGE_FACTOR = 10.0  # a bucket's norm is large when it is this many times the largest one before it
UNSEEN = 2**31 - 1

Finding = tuple[int, int, str]  # (order of importance, rank, what): `agree.first` tells all ranks the smallest


class NonFiniteGradientError(RuntimeError):
    """A gradient of some rank holds a NaN or an infinity; raised on all ranks."""


class ReplicaDriftError(RuntimeError):
    """Gradients or weights that must be equal on several ranks are not."""


class NonFiniteWatch:
    """Remembers for each parameter in which microbatch its gradient stopped being finite.

    The hook of every parameter calls `look`: one small operation on the device, and no synchronisation with it.
    """

    def __init__(self, buckets: Sequence[Bucket]) -> None:
        self.buckets = list(buckets)
        self.index = {(id(bucket), i): n for n, (bucket, i) in enumerate(_all_params(buckets))}
        self.names = [bucket.contracts[i].name for bucket, i in _all_params(buckets)]
        device = self.buckets[0].device if self.buckets else torch.device("cpu")
        self.nothing = (torch.zeros((), device=device),) * 2
        self.first_bad = torch.empty(len(self.names), dtype=torch.int64, device=device)
        self.backwards = 0
        self.reset()

    def look(self, bucket: Bucket, index: int) -> None:
        """Check the accumulated gradient of `bucket.params[index]`."""
        n = self.index[id(bucket), index]
        grad = bucket.params[index].grad
        if isinstance(grad, GradPlaceholder):  # the bucket has left: this gradient came late
            grad = grad.added
        self.arrivals[n] += 1
        if self.arrivals[n] > self.backwards:  # not every backward uses every parameter
            self._note()
            self.backwards = self.arrivals[n]
        if grad is not None:
            values = grad.coalesce().values() if grad.is_sparse else grad
            self.ends[n] = torch.aminmax(values) if values.numel() else self.nothing

    def _note(self) -> None:
        """Note what the last backward left. What is not finite stays so in later ones."""
        if self.backwards:
            low, high = map(torch.stack, zip(*self.ends, strict=True))
            self.first_bad.clamp_(max=torch.where(_are_finite(low, high), UNSEEN, self.backwards - 1))

    def reset(self) -> None:
        """Begin a new step."""
        self.first_bad.fill_(UNSEEN)
        self.ends = [self.nothing] * len(self.names)  # of each gradient the smallest and the largest value
        self.arrivals = [0] * len(self.names)
        self.backwards = 0

    def first(self) -> tuple[str, int] | None:
        """(parameter, microbatch) of this rank's earliest non-finite gradient; None when all were finite."""
        self._note()
        if not self.names or int(self.first_bad.min()) == UNSEEN:
            return None
        n = int(self.first_bad.argmin())
        return self.names[n], int(self.first_bad[n])

    def finding(self) -> str | None:
        """What `first` gives, in words."""
        bad = self.first()
        return None if bad is None else f"the gradient of {bad[0]!r} became non-finite in microbatch {bad[1]}"


def check_finite(watches: Sequence[NonFiniteWatch], groups: ProcessGroups) -> None:
    """Raise NonFiniteGradientError on every rank if a gradient was or became non-finite on any of them.

    Collective: every rank of the job.
    """
    finding = agree.first(_find_bad(watches), world_groups(groups), "the guard against NaN")
    if finding is None:
        return
    _, rank, message = finding
    raise NonFiniteGradientError(
        f"rank {rank}: {message}. No rank may step on it; zero the gradients and skip the batch, or look for the cause "
        "on that rank (learning rate, loss scale, a division by zero)"
    )


def _find_bad(watches: Sequence[NonFiniteWatch]) -> Finding | None:
    """What is not finite here, if anything. What backward made (0) comes before what came later (1)."""
    rank = dist.get_rank()
    for watch in watches:
        seen = watch.finding()
        if seen is not None:
            return 0, rank, seen
    buckets = [bucket for watch in watches for bucket in watch.buckets]
    found = [_all_finite(bucket.valid_grad).to(bucket.device) for bucket in buckets]
    if not found or bool(torch.stack(found).all()):
        return None
    for watch in watches:
        for bucket, i in _all_params(watch.buckets):
            part = bucket.valid_part(i)
            if not _all_finite(part):
                name = bucket.contracts[i].name
                where = f"in its reduction in {part.dtype} or before it"
                return 1, rank, f"the gradient of {name!r} became non-finite after backward, {where}"
    return None


def _all_finite(values: torch.Tensor) -> torch.Tensor:
    """0-dim bool on the device of the values. One pass over them, and no synchronisation with the device."""
    if values.numel() == 0:
        return torch.ones((), dtype=torch.bool, device=values.device)
    return _are_finite(*torch.aminmax(values))  # on a CPU 20 times as fast as a norm with ord=inf


def _are_finite(low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
    """True where the smallest and the largest of some values are finite: then all are. NaN is both ends of its own."""
    return low * 0 == high * 0  # inf times 0 is NaN, and NaN equals nothing


class LargeGradientWatch:
    """Warns if a bucket's reduced gradient is LARGE_FACTOR times larger than in any step before."""

    def __init__(self, buckets: Sequence[Bucket]) -> None:
        self.buckets = list(buckets)
        self.largest: list[float] = [0.0] * len(self.buckets)

    def look(self) -> None:
        """Compare this step's norms with the largest ones so far. Waits for the device once a bucket."""
        for n, bucket in enumerate(self.buckets):
            precise = torch.promote_types(bucket.dtype, torch.float32)
            norm = float(torch.linalg.vector_norm(bucket.valid_grad, dtype=precise)) * float(bucket.pending_scale)
            if 0.0 < self.largest[n] * LARGE_FACTOR < norm:
                warnings.warn(
                    f"rank {dist.get_rank()}: the gradient norm of {bucket.name} is {norm:.3g}, "
                    f"{norm / self.largest[n]:.0f} times the largest one before ({self.largest[n]:.3g})",
                    stacklevel=3,
                )
            self.largest[n] = max(self.largest[n], norm)


def check_replicas(buckets: Sequence[Bucket], groups: ProcessGroups) -> None:
    """Raise ReplicaDriftError on all ranks if the copies of a parameter in some group got different gradients.

    buckets: those of all chunks of this rank, because copies may lie in other chunks on other ranks. Ranks compare a
    norm and a random projection of each parameter's valid part, in fp64, over each group that replicates it. Data
    ranks do so where gradients are not sharded. Collective: every rank of the job.
    """
    by_group: dict[str, list[tuple[Bucket, int]]] = {}
    for bucket, i in _all_params(buckets):
        contract = bucket.contracts[i]
        for name in contract.replicated_over:
            by_group.setdefault(name, []).append((bucket, i))
        if bucket.whole:
            by_group.setdefault(contract.data_group, []).append((bucket, i))
    drift: Finding | None = None
    for name in sorted(by_group):
        if groups.size(name) > 1:
            found = _compare_over(name, by_group[name], groups.control(name))
            # Raised after the loop: ranks of another group may not know of it, and wait in the next comparison.
            drift = drift or (None if found is None else (0, dist.get_rank(), found))
    drift = agree.first(drift, world_groups(groups), "the guard of equal copies")
    if drift is not None:
        raise ReplicaDriftError(drift[2])


def _compare_over(name: str, served: list[tuple[Bucket, int]], group: dist.ProcessGroup) -> str | None:
    """The first difference between the ranks of a group, in words."""
    sketches = torch.stack([_sketch(bucket.valid_part(i)).to(bucket.device) for bucket, i in served])  # [parameters, 3]
    told = agree.gather(sketches.cpu(), group, f"the gradients of copies over group {name}")
    ranks, everyone = list(told), list(told.values())
    for rank, other in zip(ranks[1:], everyone[1:], strict=True):
        for n, (bucket, i) in enumerate(served):
            tolerance = 1e-2 if bucket.dtype.itemsize == 2 else 1e-5
            norms = float(everyone[0][n, 0]), float(other[n, 0])
            off = (other[n] - everyone[0][n]).abs()
            elsewhere = bool(off[2] > 1e-9)
            if elsewhere or bool((off[:2] > tolerance * max(norms)).any()):
                also = ", and elements that are not finite are not the same ones" if elsewhere else ""
                return (
                    f"the gradient of {bucket.contracts[i].name!r} differs between ranks {ranks[0]} and {rank} of "
                    f"group {name!r} {ranks}: norms {norms[0]:.6g} and {norms[1]:.6g}{also}. Both "
                    "hold a copy of this parameter; a reduction is missing in its contract (see ddp.describe()), or "
                    "the ranks saw different inputs"
                )
    return None


def _sketch(part: torch.Tensor) -> torch.Tensor:
    """[norm, projection on a fixed random direction, the same projection of marks], in fp64.

    The first two leave out what is not finite, because NaN equals nothing. The marks stand for NaN, Inf and -Inf.
    """
    values = part.detach().to(torch.float64)
    generator = torch.Generator("cpu").manual_seed(values.numel())  # the same numbers for every kind of device
    direction = torch.randn(values.numel(), generator=generator, dtype=torch.float64, device="cpu")
    direction = (direction / max(1.0, float(direction.norm()))).to(values.device)
    finite = values.nan_to_num(0.0, 0.0, 0.0)
    marks = torch.where(values.isfinite(), 0.0, values.nan_to_num(1.0, 2.0, 3.0))
    return torch.stack([torch.linalg.vector_norm(finite), finite @ direction, marks @ direction])


def _all_params(buckets: Sequence[Bucket]) -> list[tuple[Bucket, int]]:
    return [(bucket, i) for bucket in buckets for i in range(len(bucket.params))]
