"""Norm, zero count and finiteness of all gradients of the model, from one small reduction; and clipping by that norm.

Every rank adds up what it owns: an element that several ranks hold is counted by exactly one of them (its contract and
the data rank say which), but it is checked for NaN and Inf by all. The sums go once over everybody, so all ranks,
stages and optimizer instances, dense and expert, hold the same bits and decide alike.

Memory is read as it is. What the gradients still have to be multiplied by (data average, tokens, loss scale) multiplies
a few numbers here, and the gradients themselves when the optimizer reads them.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist

from core.agree import SyncError
from core.distributed.buffer.bucket import Bucket
from core.distributed.buffer.param_views import pieces_of
from core.distributed.wire.collectives import Collectives, gather_objects
from core.optimizer.masters.master_weights import BucketMasters
from core.optimizer.norm.norm_pass import NormPass
from core.optimizer.step.step_settings import Settings, digest_terms, first_difference, same_digest
from core.rank_grid import MODEL_AXES
from core.waiting import waiting

if TYPE_CHECKING:
    from core.process_groups import ProcessGroups


@dataclass(frozen=True, slots=True)
class GradStats:
    """What all ranks know of the gradients of a step. They hold the true gradient's numbers, before clipping."""

    norm: float  # of all gradients that are in no separate norm group
    num_zeros: int | None
    culprit: str | None = None  # where the first non-finite gradient is; None when all are finite
    separate_norms: dict[str, float] = field(default_factory=dict)  # of each norm group
    factors: tuple[float, ...] = ()  # what the memory of each bucket is multiplied by to be the true gradient

    @property
    def finite(self) -> bool:
        """May a step be made of these gradients?"""
        return self.culprit is None and all(map(math.isfinite, (self.norm, *self.separate_norms.values())))

    def norm_of(self, group: str | None) -> float:
        """The norm that gradients of a norm group are clipped by."""
        return self.norm if group is None else self.separate_norms[group]


# Each chain whose groups are all there reaches every rank of the model once.
CHAINS = (("intra_dist_opt", "inter_dist_opt"), ("mp", "dp_cp"), (*MODEL_AXES, "dp_cp"))


def everybody(groups: ProcessGroups) -> list[dist.ProcessGroup]:
    """Groups to reduce over, one after the other, so that the sum is over all ranks of the model, each once.

    groups: what the model was wrapped with. Raises ValueError where the job has more ranks and missing groups leave
    open whether they hold parts of the model too.
    """
    chain, reached = longest_chain(groups)
    complete = any(all(getattr(groups, name) is not None for name in names) for names in CHAINS)
    if reached < dist.get_world_size() and not complete:
        missing = ", ".join(repr(name) for name in CHAINS[-1] if getattr(groups, name) is None)
        raise ValueError(
            f"the norm would be taken over {reached} of the job's {dist.get_world_size()} ranks, because the groups "
            f"lack {missing}; wrap the model with them too, with a group of one rank "
            "(torch.distributed.new_subgroups(1)) along an axis that it is not split over"
        )
    return chain


def longest_chain(groups: ProcessGroups) -> tuple[list[dist.ProcessGroup], int]:
    """The chain that reaches most ranks, and how many; a missing group counts as one rank."""
    reach = {chain: math.prod(map(groups.size, chain)) for chain in CHAINS}
    longest = max(CHAINS, key=reach.__getitem__)
    return [groups.require(name) for name in longest if groups.size(name) > 1], reach[longest]


def other_ranks(groups: ProcessGroups, wrapped: ProcessGroups) -> str | None:
    """What is wrong where `groups` reach other ranks than those that a model chunk was wrapped with."""
    same_reach = longest_chain(groups)[1] == longest_chain(wrapped)[1]
    for name in (name for chain in reversed(CHAINS) for name in chain):
        given, own = (None if getattr(held, name) is None else held.ranks(name) for held in (groups, wrapped))
        if given != own and ((given and own) or (not same_reach and groups.size(name) != wrapped.size(name))):
            return (
                f"pg_collection.{name} holds ranks {given}, and the model was wrapped with {own}: ranks would clip by "
                "different norms. Pass the groups it was wrapped with, or leave pg_collection out"
            )
    return None


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
    """Measures the gradients of a list of buckets. Built once, by all ranks together; a step allocates a few numbers.

    norm_type: p of the norm, math.inf for the largest magnitude.
    watched: model chunks; the `nan_watch` of one, if it has one, knows which microbatch a NaN came from.
    models: for each bucket which model it is of, where there are several: names are shared within one alone.
    spare: memory that is written over, see NormPass.
    """

    def __init__(
        self,
        masters: Sequence[BucketMasters],
        groups: Sequence[dist.ProcessGroup],
        *,
        norm_type: float = 2.0,
        watched: Sequence[Any] = (),
        models: Sequence[Hashable] = (),
        spare: torch.Tensor | None = None,
    ) -> None:
        self.masters = masters
        self.groups = groups
        self.norm_type = norm_type
        self.watched = watched
        self.device = device_of(masters, groups)
        self.norm_groups = self._agree()
        self.ranks = math.prod(map(dist.get_world_size, groups))
        self.collectives = Collectives()
        memory: list[torch.Tensor] = []
        counted: list[bool] = []
        norm_group: list[int] = []
        bucket: list[int] = []
        shared_copies: dict[Hashable, dict[str, int]] = {}
        for index, bucket_masters in enumerate(masters):
            copies = shared_copies.setdefault(models[index] if models else 0, {})
            here = counts_here(bucket_masters.bucket)
            # Padding between slices is left out: it may hold what a peer's collective left there.
            stretches = list(_stretches(bucket_masters, copies))
            memory += pieces_of(bucket_masters.grad, [(stretch.start, stretch.end) for stretch in stretches])
            for stretch in stretches:
                counted.append(stretch.in_norm and here)
                norm_group.append(self.norm_groups.index(stretch.norm_group))
                bucket.append(index)
        is_double = any(bucket_masters.grad.dtype == torch.float64 for bucket_masters in masters)
        self.norm_dtype = torch.float64 if is_double else torch.float32
        self.norm_pass = NormPass(memory, self.device, spare)

        def of_pieces(values: list[Any], dtype: torch.dtype) -> torch.Tensor:
            return torch.tensor([values[i] for i in self.norm_pass.stretch_of], dtype=dtype, device=self.device)

        self.counted = of_pieces(counted, torch.bool)
        self.norm_group = of_pieces(norm_group, torch.int64)
        self.bucket = of_pieces(bucket, torch.int64)
        self.counted_memory = [stretch for stretch, here in zip(memory, counted, strict=True) if here]

    def _agree(self) -> list[str | None]:
        """All norm groups of the job in one order, because a stage may hold none of a kind."""
        found = {piece.norm_group for masters in self.masters for piece in masters.slices} - {None}
        names = sorted(str(name) for name in found)
        for group in self.groups:
            names = sorted({name for others in gather_objects(names, group) for name in others})
        return [None, *names]

    def measure(
        self,
        *,
        count_zeros: bool = False,
        loss_scale: float = 1.0,
        settings: Settings | None = None,
        problem: str | None = None,
    ) -> GradStats:
        """The norm of all gradients of the model, and their zeros. Collective: every rank of the job.

        settings: those of the step to come, or None on all ranks. problem: why this rank cannot make it, in words.
        Raises SyncError on every rank where settings differ or a rank has a problem.
        """
        factors = self._factors(loss_scale)
        zeros = self._zeros() if count_zeros else None
        terms = digest_terms(settings or (), problem=problem is not None)
        norms, num_zeros, bad, same, host_factors = self._over_everybody(
            self._norms(self.norm_dtype), zeros, terms, factors
        )
        if not same:
            self._refuse(settings or (), problem)
        culprit = None
        if bad or not all(map(math.isfinite, norms)):
            # Finite gradients whose powers overflow fp32 end here as well, and get a second look in fp64.
            culprit = self._find_culprit()
            norms, num_zeros, *_ = self._over_everybody(self._norms(torch.float64), zeros, terms, factors)
        separate = {str(name): norm for name, norm in zip(self.norm_groups[1:], norms[1:], strict=True)}
        return GradStats(norms[0], int(num_zeros) if count_zeros else None, culprit, separate, tuple(host_factors))

    def _factors(self, loss_scale: float) -> torch.Tensor:
        """What each bucket's memory is to be multiplied by, [buckets] in fp64; a count of tokens is on the device."""
        pending = [masters.bucket.pending_scale for masters in self.masters]
        if any(isinstance(scale, torch.Tensor) for scale in pending):
            factors = torch.stack([torch.as_tensor(s, dtype=torch.float64, device=self.device) for s in pending])
        else:
            # Pinned, for a copy from other memory would have the host wait for all that the device has queued.
            here = torch.tensor(pending, dtype=torch.float64, pin_memory=self.device.type == "cuda")
            factors = here.to(self.device, non_blocking=True)
        return factors / loss_scale

    def _norms(self, dtype: torch.dtype) -> torch.Tensor:
        """The norm of each piece of memory, [pieces] in fp64: the one pass over the gradients."""
        return self.norm_pass.norms(self.norm_type, dtype)

    def _zeros(self) -> torch.Tensor:
        zeros = torch.zeros((), dtype=torch.float64, device=self.device)
        for stretch in self.counted_memory:
            zeros += stretch.numel() - torch.count_nonzero(stretch)
        return zeros

    def _over_everybody(
        self, norms: torch.Tensor, zeros: torch.Tensor | None, terms: tuple[int, int], factors: torch.Tensor
    ) -> tuple[list[float], float, bool, bool, list[float]]:
        """(norm of each norm group, zeros, is a gradient of any rank not finite, do all ranks step alike, factors)
        from one vector of sums.

        Every rank adds the gathered vectors of a group in rank order, so all ranks hold the same bits.
        """
        count = len(self.norm_groups)
        largest = math.isinf(self.norm_type)
        powers = norms * factors[self.bucket]
        # What a maximum over ranks makes of NaN depends on the backend; the flag tells of it either way.
        powers = powers.nan_to_num(nan=math.inf) if largest else powers.pow(self.norm_type)
        sums = torch.zeros(count + 4, dtype=torch.float64, device=self.device)
        how = "amax" if largest else "sum"
        counted = torch.where(self.counted, powers, 0.0)
        sums[:count].scatter_reduce_(0, self.norm_group, counted, how)
        sums[count] = (~torch.isfinite(norms)).any()
        if zeros is not None:
            sums[count + 1] = zeros
        sums[count + 2], sums[count + 3] = terms
        for group in self.groups:
            with waiting("the gradient norm", group):
                rows = self.collectives.gather_rows(sums, group)
            sums = rows.sum(0)
            if largest:
                sums[: count + 1] = rows[:, : count + 1].amax(0)
        numbers = torch.cat([sums, factors]).tolist()  # the one wait for the device in a step
        root = 1.0 if largest else 1.0 / self.norm_type
        totals = [power if math.isnan(power) else power**root for power in numbers[:count]]
        same = same_digest(self.ranks, numbers[count + 2], numbers[count + 3])
        return totals, numbers[count + 1], numbers[count] > 0, same, numbers[count + 4 :]

    def _refuse(self, settings: Settings, problem: str | None) -> None:
        """Say where a rank has a problem, or where ranks would step differently. Collective; all of them raise."""
        rank = dist.get_rank()
        told = {rank: (settings, problem)}
        for group in self.groups:
            told = {r: found for part in gather_objects(told, group) for r, found in part.items()}
        for other, (_, found) in sorted(told.items()):
            if found is not None:
                raise SyncError(f"rank {other}: the step was not made: {found}")
        difference = first_difference({r: found for r, (found, _) in told.items()})
        raise SyncError(
            f"rank {rank}: the step was not made: {difference}, and both hold parts of one model. Set it "
            "alike on all ranks; a scheduler that looks at a metric needs one that is reduced over them"
        )

    def _find_culprit(self) -> str | None:
        """Name where the first non-finite gradient came from, if a watch has seen it, or was found, on the lowest rank.

        Collective; only on the way to a skipped step.
        """
        mine = self._culprit_here()
        found: list[tuple[bool, int, str] | None] = [mine]
        for group in self.groups:
            found = [entry for entries in gather_objects(found, group) for entry in entries]
        culprits = sorted({entry for entry in found if entry is not None})
        if not culprits:
            return None
        _, rank, what = culprits[0]
        others = f" (and on {len(culprits) - 1} more ranks)" if len(culprits) > 1 else ""
        return f"rank {rank}: {what}{others}"

    def _culprit_here(self) -> tuple[bool, int, str] | None:
        """(was it only found after the reduction, rank, what): the least of these is nearest to the cause."""
        for chunk in self.watched:
            watch = getattr(chunk, "nan_watch", None)
            seen = None if watch is None else watch.first()
            if seen is not None:
                return False, dist.get_rank(), f"the gradient of {seen[0]!r} became non-finite in microbatch {seen[1]}"
        what = first_non_finite(self.masters)
        return None if what is None else (True, dist.get_rank(), what)


class _Stretch(NamedTuple):
    """Elements [start, end) of an owned range that count alike."""

    start: int
    end: int
    in_norm: bool
    norm_group: str | None


def _stretches(masters: BucketMasters, shared_copies: dict[str, int]) -> Iterable[_Stretch]:
    """The slices; those that touch each other and count alike, joined.

    shared_copies: name -> id of the parameter that counts, of those with copies in several virtual pipeline chunks.
    """
    start = end = 0
    how: tuple[bool, str | None] | None = None  # the stretch at hand counts
    for piece in masters.slices:
        counted = piece.contract.counts_in_norm
        if counted and piece.contract.crosses_stages:
            counted = shared_copies.setdefault(piece.contract.name, id(piece.param)) == id(piece.param)
        if how is not None and (piece.start != end or how != (counted, piece.norm_group)):
            yield _Stretch(start, end, *how)
            how = None
        if how is None:
            start, how = piece.start, (counted, piece.norm_group)
        end = piece.end
    if how is not None:
        yield _Stretch(start, end, *how)


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
