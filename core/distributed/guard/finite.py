"""The last look at gradients before the optimizer. Each check raises on all ranks or on none."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist

from core.distributed.buffer.bucket import Bucket
from core.distributed.buffer.grad_placeholder import GradPlaceholder
from core.distributed.guard.agreement import Member, members_of
from core.groups import agree
from core.groups.agree import SyncError
from core.groups.process_groups import ProcessGroups, world_groups
from core.groups.rank_grid import DATA_KINDS, STAGE_CROSSING

UNSEEN = 2**31 - 1
# Gradients of copies are equal within this part of their norm: where all is computed in 32 bits or more, or in 16.
FINE, COARSE = 1e-5, 1e-2
MARKS_OFF = 1e-6  # equal marks of what is not finite differ by rounding
NOISE = 0.05  # of the largest norm: a gradient that is zero but for rounding (a bias of keys) is not compared closer

Finding = tuple[int, int, str]  # (order of importance, rank, what): `agree.first` gives all ranks the smallest


class NonFiniteGradientError(RuntimeError):
    """A gradient of some rank holds a NaN or an infinity; raised on all ranks."""


class ReplicaDriftError(RuntimeError):
    """Gradients or weights that must be equal on several ranks are not."""


class GradWatch(Protocol):
    """A check of each gradient that arrives, which can refuse the step."""

    @property
    def problem(self) -> str | None: ...

    def look(self, bucket: Bucket, index: int) -> None: ...

    def note_loss(self) -> None: ...

    def reset(self) -> None: ...


class NonFiniteWatch:
    """Remembers for each parameter in which microbatch its gradient stopped being finite.

    The hook of every parameter calls `look`: one small operation on the device, and no synchronisation with it.
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
        bad = self.first()
        return None if bad is None else f"the gradient of {bad[0]!r} became non-finite in microbatch {bad[1]}"


def check_finite(watches: Sequence[NonFiniteWatch], groups: ProcessGroups) -> None:
    """Raise NonFiniteGradientError on all ranks of the job if a gradient is not finite on any of them. Collective."""
    finding = agree.first(_find_bad(watches), world_groups(groups), "the guard against NaN")
    if finding is None:
        return
    _, rank, message = finding
    raise NonFiniteGradientError(
        f"rank {rank}: {message}. No rank may step on it; zero the gradients and skip the batch, or look for the cause "
        "on that rank (learning rate, loss scale, a division by zero)"
    )


def _find_bad(watches: Sequence[NonFiniteWatch]) -> Finding | None:
    """Find what is not finite here. A value of backward (0) has priority over a later one (1)."""
    rank = dist.get_rank()
    for watch in watches:
        seen = watch.finding()
        if seen is not None:
            return 0, rank, seen
    if are_finite([bucket for watch in watches for bucket in watch.buckets]):
        return None
    for watch in watches:
        for bucket, i in members_of(watch.buckets):
            part = bucket.valid_part(i)
            if not all_finite(part):
                name = bucket.contracts[i].name
                where = f"in its reduction in {part.dtype} or before it"
                return 1, rank, f"the gradient of {name!r} became non-finite after backward, {where}"
    return None


def are_finite(buckets: Sequence[Bucket]) -> bool:
    """True if this rank's reduced gradients are finite. Waits for the device once."""
    found = [all_finite(bucket.valid_grad).to(bucket.device) for bucket in buckets]
    return not found or bool(torch.stack(found).all())


def all_finite(values: torch.Tensor) -> torch.Tensor:
    """0-dim bool on the device of the values. One pass over them, and no synchronisation with the device."""
    if values.numel() == 0:
        return torch.ones((), dtype=torch.bool, device=values.device)
    return _are_finite(*torch.aminmax(values))  # on a CPU 20 times as fast as a norm with ord=inf


def _are_finite(low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
    """True where the smallest and the largest of some values are finite: then all are. NaN is both ends of its own."""
    return low * 0 == high * 0  # inf times 0 is NaN, and NaN equals nothing


def check_replicas(buckets: Sequence[Bucket], groups: ProcessGroups) -> None:
    """Raise ReplicaDriftError on all ranks if the copies of a parameter in some group got different gradients.

    buckets: those of all chunks of this rank, because copies may lie in other chunks on other ranks. Data ranks compare
    too where gradients are not sharded. Collective: every rank of the job.
    """
    drift = agree.first(
        unequal_gradients(buckets, groups, data=True), world_groups(groups), "the guard of equal copies"
    )
    if drift is not None:
        raise ReplicaDriftError(drift[2])


def refuse_unshared_edits(buckets: Sequence[Bucket], groups: ProcessGroups) -> None:
    """Refuse edits of reduced gradients that the ranks of a data group do not share. Collective: every rank of the job.

    Args:
        buckets: All buckets of this rank. Those that are sharded are skipped, because their edits are refused.
        groups: The groups that the model was wrapped with.

    Raises:
        SyncError: On all ranks, with the first parameter whose gradients differ.
    """
    finding: Finding | None = None
    for name in DATA_KINDS:
        members = [(bucket, i) for bucket, i in members_of(buckets) if bucket.whole]
        members = [(bucket, i) for bucket, i in members if bucket.contracts[i].data_group == name]
        if members and groups.size(name) > 1:
            fine = all(bucket.dtype.itemsize > 2 for bucket, _ in members)
            text = _dropped_apart(name, members, groups.control(name))
            text = text or _compare_over(name, members, groups.control(name), FINE if fine else COARSE)
            finding = finding or (None if text is None else (2, dist.get_rank(), text))
    finding = agree.first(finding, world_groups(groups), "the edits of gradients")
    if finding is not None:
        raise SyncError(
            f"rank {finding[1]}: the step was not made: {finding[2]}. Edit `.grad` alike on all data ranks, between "
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
    """The first parameter whose copies over some group have got different gradients. Collective over these groups.

    Four numbers a parameter travel, in one maximum a group: the norm of its valid part, a random projection, marks of
    what is not finite, and the tolerance. Copies are compared within a tolerance and not by bits: each rank computes
    the gradient of its copy with kernels that may add in another order. A missing reduction is off by far more.

    data: compare data ranks too, where gradients are not sharded. coarse: True if the model computes in 16 bits though
    its parameters have more. Ranks of another group may not know of a finding; the caller lets all of them agree.
    """
    by_group: dict[str, list[Member]] = {}
    for bucket, i in members_of(buckets):
        contract = bucket.contracts[i]
        for name in contract.replicated_over:
            by_group.setdefault(name, []).append((bucket, i))
        if data and bucket.whole:
            by_group.setdefault(contract.data_group, []).append((bucket, i))
    dtypes = {dtype for bucket in buckets for dtype in (bucket.dtype, *(param.dtype for param in bucket.params))}
    coarse = coarse or any(dtype.is_floating_point and dtype.itemsize <= 2 for dtype in dtypes)
    found: Finding | None = None
    for name in sorted(by_group):
        if groups.size(name) > 1:
            text = _compare_over(name, by_group[name], groups.control(name), COARSE if coarse else FINE)
            found = found or (None if text is None else (2, dist.get_rank(), text))
    return found


def _compare_over(name: str, served: Sequence[Member], group: dist.ProcessGroup, tolerance: float) -> str | None:
    """The first difference between the ranks of a group, in words. served: in the order of backward."""
    directions: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    sketches = torch.stack(
        [_sketch(bucket.valid_part(i), tolerance, directions).to(bucket.device) for bucket, i in served]
    )
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
    """Name the likeliest cause, from where in the model the copies differ, and its remedy. Pure."""
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
    # What a rule makes equal says nothing about where the others begin to differ.
    own = [
        is_bad
        for contract, is_bad in zip(contracts, differs, strict=True)
        if is_bad or name not in (*contract.partial_over, *contract.averaged_over)
    ]
    modules = {c.name.rpartition(".")[0] for c, is_bad in zip(contracts, differs, strict=True) if is_bad}
    if own[0] and 2 * count > len(own) and len(modules) > 1:
        return (
            f"{count} of {len(served)} copies differ, from the loss backwards, so these ranks have computed different "
            f"outputs: likeliest the outputs of a split layer are not added over {name!r}, or the ranks saw different "
            "inputs or dropped out other elements"
        )
    before = own[own.index(True) :]
    if len(modules) > 1 and 4 * sum(before) >= 3 * len(before):  # the order is that of registration, not of the forward
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


def _sketch(
    part: torch.Tensor, tolerance: float, directions: dict[int, tuple[torch.Tensor, torch.Tensor]]
) -> torch.Tensor:
    """[norm, projection, projection of marks, tolerance], in fp64; no synchronisation with the device.

    The first two leave out what is not finite, because NaN equals nothing. The marks stand for NaN, Inf and -Inf. The
    projection is on a fixed direction of rank one, of which two vectors of sqrt(numel) numbers are drawn.
    """
    values = part.detach().to(torch.promote_types(part.dtype, torch.float32))
    if values.numel() not in directions:
        directions[values.numel()] = _direction(values)
    finite = values.nan_to_num(0.0, 0.0, 0.0)
    marks = torch.where(values.isfinite(), 0.0, values.nan_to_num(1.0, 2.0, 3.0))
    norm = torch.linalg.vector_norm(finite, dtype=torch.float64)
    ends = [_project(flat, *directions[values.numel()]) for flat in (finite, marks.double())]
    return torch.stack([norm, *ends, torch.full_like(norm, tolerance)])


def _direction(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Two normal vectors, of columns and of rows, so that a projection is about as large as what is projected."""
    columns = max(1, math.isqrt(values.numel()))
    rows = -(-values.numel() // columns)
    generator = torch.Generator("cpu").manual_seed(values.numel())  # the same numbers for every kind of device
    across, down = (torch.randn(n, generator=generator, device="cpu").to(values.device) for n in (columns, rows))
    return across, down


def _project(flat: torch.Tensor, across: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    """0-dim fp64: the sum over rows and columns of value x across x down. The last row may be shorter."""
    columns = across.numel()
    body = flat.numel() // columns * columns
    across = across.to(flat.dtype)
    sums = [flat[:body].view(-1, columns) @ across]
    if body < flat.numel():
        sums.append(torch.dot(flat[body:], across[: flat.numel() - body]).reshape(1))
    return torch.dot(torch.cat(sums).double(), down.double())
