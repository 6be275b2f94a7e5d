"""Norm, zero count and finiteness of the model's gradients from one small reduction, and clipping by that norm.

Every rank adds up the elements that it owns. An element held by several ranks is counted by exactly one of them, which
its contract and the data rank determine, but all of them check it for NaN and Inf. One reduction covers all ranks, so
all pipeline stages and optimizer instances, dense and expert, have the same bits and make the same decision.

The gradients in memory are only read. Their pending factors (data average, tokens, loss scale) multiply a few numbers
here, and multiply the gradients themselves when the optimizer reads them.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from core.distributed.guard.finite import refuse_unshared_edits
from core.distributed.wire.collectives import Collectives
from core.groups import agree
from core.groups.agree import SyncError
from core.optimizer.masters.master_weights import BucketMasters
from core.optimizer.norm.norm_pass import NormPass
from core.optimizer.norm.step_settings import Settings, digest_terms, first_difference, same_digest


@dataclass(frozen=True, slots=True)
class GradStats:
    """Statistics of a step's unscaled gradients before clipping, the same on all ranks."""

    norms: Mapping[str | None, float]  # keyed by norm group; None for gradients in no group
    num_zeros: int | None
    culprit: str | None = None  # description of the first non-finite gradient; None if all are finite
    factors: tuple[float, ...] = ()  # true gradient = factor * memory, for each bucket

    @property
    def norm(self) -> float:
        """Norm of all gradients that are in no norm group."""
        return self.norms[None]

    @property
    def finite(self) -> bool:
        """True if a step may be made with these gradients."""
        return self.culprit is None and all(map(math.isfinite, self.norms.values()))


class GradMeter:
    """Measures the gradients of a list of buckets. A step allocates only a few numbers.

    All ranks must create it together.

    Args:
        masters: This rank's buckets with their master weights.
        groups: Process groups that together reach every rank of the model, reduced over one after the other.
        norm_type: Order p of the norm, or math.inf for the largest magnitude.
        watched: Model chunks. A chunk's ``nan_watch``, if any, knows the microbatch that a NaN came from.
        models: Model of each bucket. Copies with one name count once within a model.
    """

    def __init__(
        self,
        masters: Sequence[BucketMasters],
        groups: Sequence[dist.ProcessGroup],
        *,
        norm_type: float,
        watched: Sequence[Any],
        models: Sequence[Hashable],
    ) -> None:
        self.masters = masters
        self.groups = groups
        self.norm_type = norm_type
        self.watched = watched
        # A stage without parameters uses the device of the backend that the other ranks communicate with.
        served = (device for device in map(agree.device_of, groups) if device.type != "cpu")
        self.device = masters[0].bucket.device if masters else next(served, torch.device("cpu"))
        self.ranks = math.prod(map(dist.get_world_size, groups))
        self.collectives = Collectives()
        # A stage may lack a norm group, so ranks exchange the names of their norm groups.
        mine = {shard.norm_group for bucket_masters in masters for shard in bucket_masters.shards} - {None}
        answers = agree.gather(mine, groups, "the norm groups")
        self.norm_groups: list[str | None] = [None, *sorted(str(name) for name in set().union(*answers.values()))]
        self.counted_memory: list[torch.Tensor] = []  # gradients that this rank counts in a norm
        memory: list[torch.Tensor] = []
        column: list[int] = []  # index of each tensor's norm group; one more if it is not counted
        bucket: list[int] = []
        counted_copies: dict[Hashable, dict[str, int]] = {}
        for index, bucket_masters in enumerate(masters):
            copies = counted_copies.setdefault(models[index], {})
            groups_here = bucket_masters.bucket.groups
            equals = groups_here.replica if bucket_masters.bucket.sharded else groups_here.data
            here = equals is None or dist.get_rank(equals) == 0  # one of the ranks with equal gradients
            # Padding between shards is left out: a peer's collective may have written to it.
            for found in _ranges(bucket_masters, copies):
                grad = bucket_masters.bucket.memory.owned_grad[found.start : found.end]
                counted = found.in_norm and here
                memory.append(grad)
                self.counted_memory += [grad] * counted
                column.append(self.norm_groups.index(found.norm_group) if counted else len(self.norm_groups))
                bucket.append(index)
        is_double = any(bucket_masters.grad.dtype == torch.float64 for bucket_masters in masters)
        self.norm_dtype = torch.float64 if is_double else torch.float32
        self.norm_pass = NormPass(memory, self.device)
        of_blocks = [[of[i] for i in self.norm_pass.tensor_of] for of in (column, bucket)]
        self.column, self.bucket = torch.tensor(of_blocks, dtype=torch.int64, device=self.device)

    def measure(
        self,
        *,
        count_zeros: bool = False,
        loss_scale: float = 1.0,
        settings: Settings | None = None,
        problem: str | None = None,
        edited: bool = False,
    ) -> GradStats:
        """Measure the norm, and optionally the zeros, of all gradients of the model. Collective over the job.

        Args:
            settings: Settings of the next step, or None on all ranks.
            problem: Error text if this rank cannot make the step.
            edited: True if the user has written to reduced gradients of this rank.

        Raises:
            SyncError: On all ranks, if settings differ, a rank has a problem, or ranks have edited in different ways.
        """
        factors = self._factors(loss_scale)
        zeros = self._zeros() if count_zeros else 0
        terms = (*digest_terms(settings or (), problem=problem is not None), edited)
        norms, (bad, num_zeros, *sums, edits), host_factors = self._over_all_ranks(
            self.norm_dtype, factors, zeros, terms
        )
        if not same_digest(self.ranks, *sums):
            self._refuse(settings or (), problem)
        if edits and not bad:  # no step is made with non-finite gradients
            refuse_unshared_edits([masters.bucket for masters in self.masters], self.watched[0].groups)
        culprit = None
        if bad or not all(map(math.isfinite, norms)):
            # Finite gradients whose powers overflow fp32 also end here, and are measured again in fp64.
            culprit = self._find_culprit()
            norms, (_, num_zeros, *_), _ = self._over_all_ranks(torch.float64, factors, zeros, terms)
        by_group = dict(zip(self.norm_groups, norms, strict=True))
        return GradStats(by_group, int(num_zeros) if count_zeros else None, culprit, tuple(host_factors))

    def _factors(self, loss_scale: float) -> torch.Tensor:
        """Return the factor of each bucket's memory, [buckets] in fp64. Token counts stay on the device."""
        pending = [masters.bucket.step.pending_scale for masters in self.masters]
        if any(isinstance(scale, torch.Tensor) for scale in pending):
            factors = torch.stack([torch.as_tensor(s, dtype=torch.float64, device=self.device) for s in pending])
        else:
            # Pinned: a copy from pageable memory would make the host wait for all work queued on the device.
            here = torch.tensor(pending, dtype=torch.float64, device="cpu", pin_memory=self.device.type != "cpu")
            factors = here.to(self.device, non_blocking=True)
        return factors / loss_scale

    def _zeros(self) -> torch.Tensor:
        zeros = torch.zeros((), dtype=torch.float64, device=self.device)
        for grad in self.counted_memory:
            zeros += grad.numel() - torch.count_nonzero(grad)
        return zeros

    def _over_all_ranks(
        self, dtype: torch.dtype, factors: torch.Tensor, zeros: torch.Tensor | int, terms: Sequence[int]
    ) -> tuple[list[float], list[float], list[float]]:
        """Reduce this rank's powers, zeros and terms over all ranks.

        Every rank adds the gathered vectors of a group in rank order, so that all ranks have the same bits. Return the
        norm of each norm group; [number above 0 if a gradient is not finite, zeros, sums of terms]; and the bucket
        factors.
        """
        norms = self.norm_pass.norms(self.norm_type, dtype)
        count = len(self.norm_groups)
        largest = math.isinf(self.norm_type)
        powers = norms * factors[self.bucket]
        # A maximum over ranks of NaN depends on the backend; the flag shows it in both cases.
        powers = powers.nan_to_num(nan=math.inf) if largest else powers.pow(self.norm_type)
        sums = torch.zeros(count + 5, dtype=torch.float64, device=self.device)
        sums[: count + 1].scatter_reduce_(0, self.column, powers, "amax" if largest else "sum")
        sums[count] = (~torch.isfinite(norms)).any()  # overwrites the column of uncounted gradients
        sums[count + 1] = zeros
        sums[count + 2], sums[count + 3], sums[count + 4] = terms
        for group in self.groups:
            rows = self.collectives.gather_rows(sums, group, "the gradient norm")
            sums = rows.sum(0)
            if largest:
                sums[: count + 1] = rows[:, : count + 1].amax(0)
        numbers = torch.cat([sums, factors]).tolist()  # the one wait for the device in a step
        root = 1.0 if largest else 1.0 / self.norm_type
        totals = [power if math.isnan(power) else power**root for power in numbers[:count]]
        return totals, numbers[count : count + 5], numbers[count + 5 :]

    def _refuse(self, settings: Settings, problem: str | None) -> None:
        """Raise SyncError on all ranks, naming the rank's problem or the setting that differs. Collective."""
        answers = agree.gather((settings, problem), self.groups, "the settings of a step")
        for other, (_, found) in sorted(answers.items()):
            if found is not None:
                raise SyncError(f"rank {other}: the step was not made: {found}")
        difference = first_difference({rank: found for rank, (found, _) in answers.items()})
        raise SyncError(
            f"rank {dist.get_rank()}: the step was not made: {difference}, and both hold parts of one model. Set it "
            "alike on all ranks; a scheduler that looks at a metric needs one that is reduced over them"
        )

    def _find_culprit(self) -> str | None:
        """Describe the first non-finite gradient, preferring one that a watch saw during backward.

        Collective, and called only before a skipped step.
        """
        answers = agree.gather(self._culprit_here(), self.groups, "the gradients that are not finite")
        culprits = sorted((found[0], rank, found[1]) for rank, found in answers.items() if found is not None)
        if not culprits:
            return None
        _, rank, what = culprits[0]
        others = f" (and on {len(culprits) - 1} more ranks)" if len(culprits) > 1 else ""
        return f"rank {rank}: {what}{others}"

    def _culprit_here(self) -> tuple[bool, str] | None:
        """Return whether this rank's first non-finite gradient was only found after the reduction, and its
        description.
        """
        for chunk in self.watched:
            watch = getattr(chunk, "nan_watch", None)
            seen = None if watch is None else watch.finding()
            if seen is not None:
                return False, seen
        for masters in self.masters:
            for shard in masters.shards:
                grad = masters.bucket.memory.owned_grad[shard.start : shard.end]
                bad = ~torch.isfinite(grad)
                if bool(bad.any()):
                    value, count = grad[bad][0].item(), int(bad.sum())
                    name = shard.contract.name
                    return True, f"the gradient of {name!r} holds {value} in {count} of {grad.numel()} elements"
        return None


class _Range(NamedTuple):
    """Elements [start, end) of a bucket's owned range with the same counting rule."""

    start: int
    end: int
    in_norm: bool
    norm_group: str | None


def _ranges(masters: BucketMasters, counted_copies: dict[str, int]) -> list[_Range]:
    """Return a bucket's parameter shards, with adjacent shards joined if they have the same counting rule.

    ``counted_copies`` maps a parameter name with copies in several virtual pipeline chunks to the id of the copy that
    counts. It is updated here.
    """
    found: list[_Range] = []
    for shard in masters.shards:
        counted = shard.contract.counts_in_norm
        if counted and shard.contract.crosses_stages:
            counted = counted_copies.setdefault(shard.contract.name, id(shard.param)) == id(shard.param)
        here = _Range(shard.start, shard.end, counted, shard.norm_group)
        if found and found[-1].end == here.start and found[-1][2:] == here[2:]:
            here = here._replace(start=found.pop().start)
        found.append(here)
    return found


def clip_coefficient(max_norm: float, norm: float) -> float:
    """Return the factor, at most 1, that limits gradients with this norm to ``max_norm``. 0 means no limit."""
    if max_norm <= 0:
        return 1.0
    return min(1.0, max_norm / (norm + 1e-6))
