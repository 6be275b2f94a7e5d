"""Final checks of gradients before the optimizer. Each check raises on all ranks or on none."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import nn

from core.distributed.buffer.bucket import Bucket
from core.distributed.buffer.grad_placeholder import GradPlaceholder
from core.distributed.guard.agreement import Member, members_of
from core.groups import agree
from core.groups.agree import SyncError
from core.groups.process_groups import ProcessGroups, world_groups
from core.groups.rank_grid import DATA_KINDS, STAGE_CROSSING
from core.watch.warn_user import warn_user

UNSEEN = 2**31 - 1
# Gradients of copies are equal within this fraction of their norm, for computation in at least 32 bits, or in 16.
FINE, COARSE = 1e-5, 1e-2
MARKS_OFF = 1e-6  # equal marks of what is not finite differ by rounding
# Megatron's numbers: the largest of this many norms is the usual one, and a norm this many times as large is reported.
NORMS_SAMPLED, LARGE = 100, 10.0
NOISE = 0.05  # fraction of the largest norm: no closer comparison of a gradient that is only rounding (a bias of keys)

Finding = tuple[int, int, str]  # (order of importance, rank, text): `agree.first` gives all ranks the smallest
Direction = Callable[[int, torch.device], tuple[torch.Tensor, torch.Tensor]]


class NonFiniteGradientError(RuntimeError):
    """A gradient of some rank contains a NaN or an infinity. Raised on all ranks."""


class ReplicaDriftError(RuntimeError):
    """Gradients or weights that must be equal on several ranks differ."""


class GradWatch(Protocol):
    """Interface of an optimizer's check of each gradient that arrives, which can reject the step."""

    @property
    def problem(self) -> str | None: ...
    def look(self, bucket: Bucket, index: int) -> None: ...
    def record_loss(self) -> None: ...
    def reset(self) -> None: ...


class NonFiniteWatch:
    """Records the microbatch in which each parameter's gradient became non-finite.

    The hook of every parameter calls ``look``, which queues one small operation on the device and does not wait for it.
    """

    def __init__(self, buckets: Sequence[Bucket]) -> None:
        self.buckets = list(buckets)
        self.index = {(id(bucket), i): n for n, (bucket, i) in enumerate(members_of(buckets))}
        self.names = [bucket.contracts[i].name for bucket, i in members_of(buckets)]
        device = self.buckets[0].device if self.buckets else torch.device("cpu")
        self.nothing = (torch.zeros((), device=device),) * 2
        self.first_bad = torch.empty(len(self.names), dtype=torch.int64, device=device)
        self.backwards = 0
        self.reset()

    def look(self, bucket: Bucket, index: int) -> None:
        """Record a gradient that has just arrived."""
        n, grad = self.index[id(bucket), index], bucket.params[index].grad
        if isinstance(grad, GradPlaceholder):  # the bucket is in flight: this gradient came late
            grad = grad.added
        self.arrivals[n] += 1
        if self.arrivals[n] > self.backwards:  # not every backward uses every parameter
            self._end_backward()
            self.backwards = self.arrivals[n]
        if grad is not None:
            values = grad.coalesce().values() if grad.is_sparse else grad
            self.ends[n] = torch.aminmax(values) if values.numel() else self.nothing

    def _end_backward(self) -> None:
        """Record the results of the last backward. A non-finite gradient stays non-finite in later backwards."""
        if self.backwards:
            low, high = map(torch.stack, zip(*self.ends, strict=True))
            self.first_bad.clamp_(max=torch.where(_are_finite(low, high), UNSEEN, self.backwards - 1))

    def reset(self) -> None:
        """Begin a new step."""
        self.first_bad.fill_(UNSEEN)
        self.ends = [self.nothing] * len(self.names)  # smallest and largest value of each gradient
        self.arrivals = [0] * len(self.names)
        self.backwards = 0

    def first(self) -> tuple[str, int] | None:
        """Return (parameter, microbatch) of this rank's earliest non-finite gradient, or None if all are finite."""
        self._end_backward()
        if not self.names or int(self.first_bad.min()) == UNSEEN:
            return None
        n = int(self.first_bad.argmin())
        return self.names[n], int(self.first_bad[n])

    def finding(self) -> str | None:
        """Describe this rank's earliest non-finite gradient, or return None."""
        bad = self.first()
        return None if bad is None else f"the gradient of {bad[0]!r} became non-finite in microbatch {bad[1]}"


def check_finite(watches: Sequence[NonFiniteWatch], groups: ProcessGroups) -> None:
    """Raise NonFiniteGradientError on all ranks if a gradient is not finite on any of them. Collective over the job."""
    finding = agree.first(_find_bad(watches), world_groups(groups), "the guard against NaN")
    if finding is None:
        return
    _, rank, message = finding
    raise NonFiniteGradientError(
        f"rank {rank}: {message}. No rank may step on it; zero the gradients and skip the batch, or look for the cause "
        "on that rank (learning rate, loss scale, a division by zero)"
    )


def _find_bad(watches: Sequence[NonFiniteWatch]) -> Finding | None:
    """Find a non-finite gradient on this rank. One from backward (0) has priority over a later one (1)."""
    rank = dist.get_rank()
    texts = (watch.finding() for watch in watches)
    if (text := next(filter(None, texts), None)) is not None:
        return 0, rank, text
    if are_finite([bucket for watch in watches for bucket in watch.buckets]):
        return None
    for bucket, i in members_of([bucket for watch in watches for bucket in watch.buckets]):
        part = bucket.valid_part(i)
        if not all_finite(part):
            name, where = bucket.contracts[i].name, f"in its reduction in {part.dtype} or before it"
            return 1, rank, f"the gradient of {name!r} became non-finite after backward, {where}"
    return None


def are_finite(buckets: Sequence[Bucket]) -> bool:
    """Return True if this rank's reduced gradients are finite. Waits for the device once."""
    flags = [all_finite(bucket.valid_grad).to(bucket.device) for bucket in buckets]
    return not flags or bool(torch.stack(flags).all())


def all_finite(values: torch.Tensor) -> torch.Tensor:
    """Return a 0-dim bool on the values' device, after one pass and without synchronization."""
    if values.numel() == 0:
        return torch.ones((), dtype=torch.bool, device=values.device)
    return _are_finite(*torch.aminmax(values))  # on a CPU 20 times as fast as a norm with ord=inf


def _are_finite(low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
    """Return True if values with this minimum and maximum are all finite. With a NaN, both are NaN."""
    return low * 0 == high * 0  # inf times 0 is NaN, and NaN equals nothing


class LargeGradWatch:
    """Warns of a bucket whose gradient norm is far above the usual one, as corrupted results are. Local to a rank."""

    def __init__(self, buckets: Sequence[Bucket]) -> None:
        self.buckets = list(buckets)
        self.sampled = 0
        self.largest = 0.0

    def look(self, step: int) -> None:
        """Sample the norms of reduced gradients, or compare them with the sampled ones. Waits for the device once."""
        grads = [bucket.valid_grad for bucket in self.buckets]
        norms = [grad.norm(dtype=torch.promote_types(grad.dtype, torch.float32)).double() for grad in grads]
        for norm, bucket in zip(torch.stack(norms).tolist() if norms else (), self.buckets, strict=True):
            if self.sampled < NORMS_SAMPLED:
                self.sampled += 1
                self.largest = max(self.largest, norm if math.isfinite(norm) else 0.0)
            elif norm > LARGE * self.largest:
                warn_user(
                    f"rank {dist.get_rank()}, step {step}: the gradients of the bucket that begins with "
                    f"{bucket.contracts[0].name!r} have norm {norm:.3g}; the largest of the first {NORMS_SAMPLED} was "
                    f"{self.largest:.3g} (check_for_large_grads). Look at the batch and at this rank's hardware"
                )


def check_replicas(buckets: Sequence[Bucket], groups: ProcessGroups) -> None:
    """Raise ReplicaDriftError on all ranks if copies of a parameter got different gradients. Collective over the job.

    Pass the buckets of all chunks, because copies may be in other chunks on other ranks. Data ranks are also compared
    if gradients are not sharded.
    """
    finding = unequal_gradients(buckets, groups, data=True)
    drift = agree.first(finding, world_groups(groups), "the guard of equal copies")
    if drift is not None:
        raise ReplicaDriftError(drift[2])


def refuse_unshared_edits(buckets: Sequence[Bucket], groups: ProcessGroups) -> None:
    """Raise SyncError on all ranks if reduced gradients were edited on some ranks of a data group only.

    Collective over the job. Sharded buckets are skipped, because edits of theirs are rejected.
    """
    texts = []
    for name in DATA_KINDS:
        members = [(b, i) for b, i in members_of(buckets) if b.step.is_full_grad and b.contracts[i].data_group == name]
        if members and groups.size(name) > 1:
            fine = all(bucket.dtype.itemsize > 2 for bucket, _ in members)
            text = _dropped_apart(name, members, groups.control(name))
            texts.append(text or _compare_over(name, members, groups.control(name), FINE if fine else COARSE))
    mine = next(((dist.get_rank(), text) for text in texts if text is not None), None)
    finding = agree.first(mine, world_groups(groups), "the edits of gradients")
    if finding is not None:
        raise SyncError(
            f"rank {finding[0]}: the step was not made: {finding[1]}. Edit `.grad` equally on all data ranks, between "
            "finalize_model_grads and step(); zero_grad() drops this step"
        )


def _dropped_apart(name: str, members: Sequence[Member], group: dist.ProcessGroup) -> str | None:
    """Name the first gradient that only some ranks of a group have set to None. Collective."""
    used = [bucket.used[i] for bucket, i in members]
    low, high = agree.bounds(used, group, f"the dropped gradients of group {name}")
    place = next((n for n, ends in enumerate(zip(low, high, strict=True)) if ends[0] != ends[1]), None)
    if place is None:
        return None
    ranks = [rank for rank, theirs in agree.gather(used[place], group, "a dropped gradient").items() if not theirs]
    bucket, i = members[place]
    return f"the `.grad` of {bucket.contracts[i].name!r} was set to None on ranks {ranks} of group {name!r} only"


def unequal_gradients(
    buckets: Sequence[Bucket], groups: ProcessGroups, *, data: bool = False, coarse: bool = False
) -> Finding | None:
    """Return the first parameter whose copies in some group got different gradients. Collective over these groups.

    Each parameter is reduced to four numbers, sent in one maximum for each group: the norm of its valid part, a random
    projection, marks of non-finite elements, and the tolerance. Copies are compared within a tolerance and not by bits,
    because each rank computes the gradient of its copy with kernels that may add in another order. A missing reduction
    causes a far larger difference. Ranks of another group do not know of a finding, so the caller must let all ranks
    agree.

    Args:
        data: Also compare data ranks, if gradients are not sharded.
        coarse: True if the model computes in 16 bits although its parameters have more.
    """
    by_group: dict[str, list[Member]] = {}
    for bucket, i in members_of(buckets):
        contract = bucket.contracts[i]
        for name in contract.replicated_over:
            by_group.setdefault(name, []).append((bucket, i))
        if data and bucket.step.is_full_grad:
            by_group.setdefault(contract.data_group, []).append((bucket, i))
    dtypes = {dtype for bucket in buckets for dtype in (bucket.dtype, *(param.dtype for param in bucket.params))}
    coarse = coarse or any(dtype.is_floating_point and dtype.itemsize <= 2 for dtype in dtypes)
    tolerance = COARSE if coarse else FINE
    names = [name for name in sorted(by_group) if groups.size(name) > 1]
    texts = [_compare_over(name, by_group[name], groups.control(name), tolerance) for name in names]
    return next(((2, dist.get_rank(), text) for text in texts if text is not None), None)


def _compare_over(name: str, served: Sequence[Member], group: dist.ProcessGroup, tolerance: float) -> str | None:
    """Return a text about the first difference between the ranks of a group. ``served`` is in the order of backward."""
    direction = functools.cache(_direction)
    found = (_sketch(bucket.valid_part(i), tolerance, direction).to(bucket.device) for bucket, i in served)
    sketches = torch.stack(list(found))
    what = f"the gradients of copies over group {name}"
    ends = agree.bounds(sketches.reshape(-1), group, what)
    low, high = (torch.tensor(end, dtype=torch.float64, device="cpu").view(sketches.shape) for end in ends)
    limits = high[:, 3] * torch.maximum(high[:, 0], NOISE * high[:, 0].max())  # tolerances may differ between stages
    off = high - low
    differs = (off[:, 0] > limits) | (off[:, 1] > limits) | (off[:, 2] > MARKS_OFF)
    if not bool(differs.any()):
        return None
    n = int(differs.int().argmax())
    answers = agree.gather(sketches[n].cpu(), group, what)
    (first_rank, mine), *others = answers.items()
    rank, theirs = max(others, key=lambda other: float((other[1] - mine)[:3].abs().max()))
    also = ", and elements that are not finite are not the same ones" if bool(off[n, 2] > MARKS_OFF) else ""
    bucket, i = served[n]
    return (
        f"the gradient of {bucket.contracts[i].name!r} differs between ranks {first_rank} and {rank} of group "
        f"{name!r} {list(answers)}: norms {float(mine[0]):.6g} and {float(theirs[0]):.6g}{also}. Each of these ranks "
        f"holds a copy of it, so they must be equal. {_cause(name, served, differs.tolist(), n)}"
    )


def _cause(name: str, served: Sequence[Member], differs: Sequence[bool], first: int) -> str:
    """Name the likeliest cause and its remedy, from the part of the model in which copies differ. Pure."""
    bucket, i = served[first]
    count = sum(differs)
    if name in DATA_KINDS:
        return "Something has changed a gradient after its reduction on some ranks only; see ddp.describe()"
    if name in STAGE_CROSSING:
        return (
            f"Copies on several stages get the sum of their gradients by a rule over {name!r}: ddp.describe() lists "
            "none for this one, or something has changed it since"
        )
    contracts = [bucket.contracts[i] for bucket, i in served]
    pairs = list(zip(contracts, differs, strict=True))
    # Copies that a rule makes equal do not show where the others begin to differ.
    own = [is_bad for c, is_bad in pairs if is_bad or name not in (*c.partial_over, *c.averaged_over)]
    several = len({c.name.rpartition(".")[0] for c, is_bad in pairs if is_bad}) > 1  # modules
    if several and own[0] and 2 * count > len(own):
        return (
            f"{count} of {len(served)} copies differ, from the loss backwards, so these ranks have computed different "
            f"outputs: likeliest the outputs of a split layer are not added over {name!r}, or the ranks saw different "
            "inputs or dropped out other elements"
        )
    before = own[own.index(True) :]
    if several and 4 * sum(before) >= 3 * len(before):  # the order is that of registration, not of the forward
        return (
            f"So do {count - 1} copies before it in the model, and those behind it are equal: likeliest the layer "
            f"behind it is split and sends back only its own part of a gradient. Add the gradient of that layer's "
            f"input over {name!r} in its backward"
        )
    tag = getattr(bucket.params[i], "sequence_parallel", None)
    reason = (
        "It says sequence_parallel=False; if its layer sees this rank's part of the sequence, set it True"
        if tag is False
        else "Likeliest it is used on what the ranks of this group split (heads, features, part of a sequence), and no "
        f"rule adds its gradients: say declare_gradient(param, partial_over=({name!r},)), or "
        "param.sequence_parallel = True under sequence parallelism"
    )
    return f"{reason}. Else the ranks saw different inputs. {count} of {len(served)} copies differ; see ddp.describe()"


def _sketch(part: torch.Tensor, tolerance: float, direction: Direction) -> torch.Tensor:
    """Return [norm, projection, projection of marks, tolerance] in fp64, without synchronization.

    The first two leave out non-finite elements, because NaN equals nothing. The marks represent NaN, Inf and -Inf.
    """
    values = part.detach().to(torch.promote_types(part.dtype, torch.float32))
    finite = values.nan_to_num(0.0, 0.0, 0.0)
    marks = torch.where(values.isfinite(), 0.0, values.nan_to_num(1.0, 2.0, 3.0))
    norm = torch.linalg.vector_norm(finite, dtype=torch.float64)
    across, down = direction(values.numel(), values.device)
    flats, padding = [finite, marks.double()], across.numel() * down.numel() - values.numel()
    if padding:
        flats = [nn.functional.pad(flat, (0, padding)) for flat in flats]
    tables = [flat.view(down.numel(), -1) for flat in flats]
    projections = [(table @ across.to(table.dtype)).double() @ down.double() for table in tables]
    return torch.stack([norm, *projections, torch.full_like(norm, tolerance)])


def _direction(numel: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return normal vectors for the columns and rows of a table of ``numel`` elements.

    A projection on their outer product is about as large as the projected values, at the cost of sqrt(numel) numbers.
    """
    columns = max(1, math.isqrt(numel))
    generator = torch.Generator("cpu").manual_seed(numel)  # the same numbers for every kind of device
    sizes = columns, max(1, -(-numel // columns))
    across, down = (torch.randn(n, generator=generator, device="cpu").to(device) for n in sizes)
    return across, down
