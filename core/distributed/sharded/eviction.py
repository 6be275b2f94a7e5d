"""Eviction: selects the unsharded buckets to free when another one is used.

    Window   frees the buckets used longest ago, so that a few stay unsharded
    Budget   frees the buckets whose next use is farthest, so that unsharded ones stay below a number of bytes

Both depend only on the order of uses, which is the same on every rank.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from core.distributed.buffer.saved_tensors import Pack, Unpack, active_hooks
from core.distributed.contract.placement import MemStats, Placement
from core.distributed.sharded.param_unit import ParamUnit
from core.groups import agree
from core.watch.warn_user import warn_user

WINDOW = 2  # buckets: one layer's parameters are often in two


class Kept:
    """Bytes of memory that is kept, each storage counted once."""

    def __init__(self) -> None:
        self.keys: set[int] = set()
        self.nbytes = 0

    def add(self, key: int, nbytes: int) -> None:
        if key not in self.keys:
            self.keys.add(key)
            self.nbytes += nbytes


class Window:
    """Keeps a few buckets unsharded: enough for one layer's parameters, and all that one operation uses.

    ``prefetch`` is the number of buckets that are gathered before they are used, if a gather is a collective: 0, or 1
    (None).
    """

    memstats: MemStats | None = None

    def __init__(self, prefetch: int | None = None) -> None:
        self.prefetch = 1 if prefetch is None else prefetch

    def evict(self, unsharded: Sequence[ParamUnit], unit: ParamUnit, pinned: Collection[ParamUnit]) -> list[ParamUnit]:
        """Return the buckets to free for ``unit``, without the operation's own, which are pinned. Called for each use
        of a bucket.
        """
        others = [other for other in unsharded if other not in pinned]
        return others[: max(0, len(unsharded) + 1 - WINDOW)]

    def watch(self, pack: Pack, unpack: Unpack, *, again: bool, by_value: bool) -> tuple[Pack, Unpack] | None:
        """Return saved-tensor hooks for a forward that begins now, or None to set no hooks.

        ``pack`` and ``unpack`` are the usual hooks. ``again`` is True if a backward runs the forward again, and
        ``by_value`` is True inside other saved-tensor hooks.
        """
        return None if by_value else (pack, unpack)

    def end_backward(self) -> None:
        """Free saved tensors of forwards."""

    def end_step(self, groups: Sequence[dist.ProcessGroup]) -> None:
        """Handle new values of the parameters. Collective over the data groups."""

    def describe(self) -> str:
        """Return nothing, because the table of buckets is complete."""
        return ""


class Budget:
    """Limits unsharded buckets to a budget of bytes, minus the memory that is always used on the device.

    The first step learns the order of uses, unless an earlier run has. ``always`` are the bytes of the budget that
    gradients use. Raises ValueError if two buckets that follow each other do not fit.
    """

    prefetch = 0  # the budget has no room for a bucket that is not in use yet

    def __init__(self, units: Sequence[ParamUnit], placement: Placement, always: int) -> None:
        self.units = {unit.number: unit for unit in units}
        self.nbytes = {unit.number: unit.layout.numel * unit.shard.itemsize for unit in units}
        assert placement.memory_budget_bytes is not None, "made for a budget"
        self.budget = budget = placement.memory_budget_bytes
        self.always = always
        self.steady = placement.steady_cap_ratio
        self.stats: MemStats | None = None
        self.uses: list[int] = []  # uses in the step that is learned from
        self.is_common = True  # True if uses are the same on all ranks
        self.places: dict[int, list[int]] = {}  # positions of each bucket in the learned order
        self.place = 0  # position after the last use
        self.saved = Kept()  # memory that forwards have saved since the last backward
        self.recomputed = Kept()  # memory of a layer that backward recomputes, including its inputs again
        self.non_model_bytes = 0  # largest amount at one time
        self.transfers = 0
        self.steps = -1  # the first call comes when parameters are sharded
        self.limit = max(int(budget * (1 - placement.warmup_non_model_data_ratio)) - always, 0)
        if placement.memstats is not None:
            self._use_stats(placement.memstats)
        else:
            order = sorted(self.units, reverse=True)  # a forward's order, if it follows registration
            self._check_neighbours(order, int(budget * self.steady) - always)
            self.limit = max(self.limit, self._longest_pair(order)[0])

    # -- what the unsharder asks --------------------------------------------------------------------------------------

    def evict(self, unsharded: Sequence[ParamUnit], unit: ParamUnit, pinned: Collection[ParamUnit]) -> list[ParamUnit]:
        """Return the buckets with the farthest next use, until ``unit`` fits; RuntimeError if it cannot fit."""
        if self.stats is not None:
            self.place = (self.place + self._distance(unit.number) + 1) % max(1, len(self.stats.uses))
        elif not self.uses or self.uses[-1] != unit.number:
            self.uses.append(unit.number)
        if unit.full is not None:
            return []
        self.transfers += 1
        left = [other for other in unsharded if other not in pinned]
        used = sum(self.nbytes[other.number] for other in unsharded) + self.nbytes[unit.number]
        chosen: list[ParamUnit] = []
        while used > self.limit and left:
            farthest = max(left, key=lambda other: self._distance(other.number))
            left.remove(farthest)
            chosen.append(farthest)
            used -= self.nbytes[farthest.number]
        if used > self.limit:
            together = [other for other in unsharded if other not in chosen]
            raise RuntimeError(
                f"one operation needs {self._names([*together, unit])} unsharded at the same time, {used} bytes, but "
                f"the budget of {self.budget} bytes leaves {self.limit} for unsharded buckets. Increase "
                "memory_budget_bytes, or use smaller buckets"
            )
        return chosen

    def watch(self, pack: Pack, unpack: Unpack, *, again: bool, by_value: bool) -> tuple[Pack, Unpack]:
        """Return saved-tensor hooks that count the bytes kept. Inside other hooks these are called instead of the usual
        ones.
        """
        outer = active_hooks() if by_value else None
        kept = self.recomputed if again else self.saved

        def count(tensor: torch.Tensor) -> object:
            packed = pack(tensor)
            is_weight = type(packed) is not tuple  # saved by `pack` as a position
            if is_weight and by_value:  # counted with its bucket
                kept.add(-packed.unit.number, self.nbytes[packed.unit.number])
            elif not is_weight and tensor.layout is torch.strided:
                storage = tensor.untyped_storage()
                kept.add(storage.data_ptr(), storage.nbytes())
            self.non_model_bytes = max(self.non_model_bytes, self.saved.nbytes + self.recomputed.nbytes)
            return packed if outer is None else outer[0](tensor)

        def forget(saved: Any) -> torch.Tensor:  # backward continues, so earlier recomputations are freed, or will be
            self.recomputed = Kept()
            return unpack(saved)

        return count, forget if outer is None else outer[1]

    def end_backward(self) -> None:
        self.saved, self.recomputed = Kept(), Kept()

    def end_step(self, groups: Sequence[dist.ProcessGroup]) -> None:
        """Learn from the first step how many buckets fit; reduce the limit after a step that used more. Collective."""
        self.steps += 1
        self.place = 0
        if self.steps == 0:
            return
        _, (most,) = agree.bounds([self.non_model_bytes], groups, "the memory outside of the model")
        if self.stats is None:
            with agree.together(groups, "the budget of memory", ValueError):  # ranks may use different modules
                self._use_stats(MemStats(tuple(self.uses), most))
            self.is_common = agree.equal(self.uses, groups, "the order of uses")
        elif most > self.stats.non_model_bytes:
            warn_user(
                f"a step has kept {most} bytes for backward on some rank, and the budget of {self.budget} bytes counts "
                f"on {self.stats.non_model_bytes}, so it may have been exceeded; from now on {most} are counted. Give "
                "the first step the longest sequences"
            )
            self._use_stats(replace(self.stats, non_model_bytes=most))

    @property
    def memstats(self) -> MemStats | None:
        """Statistics of the first step; None before its end, and if ranks have used different buckets."""
        return self.stats if self.is_common else None

    def describe(self) -> str:
        """Return a line about the budget, which follows the table of buckets."""
        kept = "not counted yet" if self.stats is None else f"{self.stats.non_model_bytes} of what a forward keeps"
        return (
            f"\nbudget of {self.budget} bytes: {self.always} of gradients, {kept}, {self.limit} for unsharded buckets. "
            f"The one whose next use is farthest is freed first; {self.transfers} gathers so far"
        )

    # -- the order of uses ------------------------------------------------------------------------------------------

    def _distance(self, number: int) -> int:
        """Return the number of uses before this bucket's next one."""
        if self.stats is None:  # the order is not known yet: assume that the last used is used next, as in a backward
            return self.uses[::-1].index(number) if number in self.uses else len(self.uses)
        places, count = self.places.get(number, []), len(self.stats.uses)
        if not places:
            return count
        following = bisect_left(places, self.place)
        return (places[following] if following < len(places) else places[0] + count) - self.place

    # -- the limit ----------------------------------------------------------------------------------------------------

    def _use_stats(self, stats: MemStats) -> None:
        self.stats = stats
        self.places = {}
        limit = int(self.budget * self.steady) - self.always - stats.non_model_bytes
        self._check_neighbours(stats.uses, limit)
        self.limit = limit
        for place, number in enumerate(stats.uses):
            self.places.setdefault(number, []).append(place)

    def _longest_pair(self, order: Sequence[int]) -> tuple[int, tuple[int, ...]]:
        pairs: list[tuple[int, ...]] = [pair for pair in itertools.pairwise(order) if pair[0] != pair[1]]
        pairs = pairs or [tuple(order[:1])]
        return max((sum(self.nbytes[number] for number in pair), pair) for pair in pairs)

    def _check_neighbours(self, order: Sequence[int], limit: int) -> None:
        if not order:
            return
        nbytes, pair = self._longest_pair(order)
        if nbytes > limit:
            raise ValueError(
                f"{self._names([self.units[number] for number in pair])} are used one after the other and take "
                f"{nbytes} bytes unsharded, but the budget of {self.budget} bytes leaves {max(limit, 0)} for unsharded "
                f"buckets (gradients take {self.always}). Increase memory_budget_bytes, or use smaller buckets"
            )

    def _names(self, units: Sequence[ParamUnit]) -> str:
        return " and ".join(unit.name for unit in units)
