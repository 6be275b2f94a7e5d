"""Eviction: which buckets of parameters are given up when another one is to be whole.

    Window   those used longest ago, so that a few are whole
    Budget   those whose next use is farthest, so that all that are whole stay below a number of bytes

Both decide by the order of uses alone, which is the same on every rank.
"""

from __future__ import annotations

import itertools
import warnings
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

WINDOW = 2  # buckets: parameters of one layer often lie in two


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
    """As many buckets are whole as parameters of one layer may lie in, and those that one operation takes."""

    memstats: MemStats | None = None

    def __init__(self, prefetch: int | None = None) -> None:
        """prefetch: buckets that are gathered before they are used, where a gather is a collective; 0, or 1 (None)."""
        self.prefetch = 1 if prefetch is None else prefetch

    def evict(self, whole: Sequence[ParamUnit], unit: ParamUnit, pinned: Collection[ParamUnit]) -> list[ParamUnit]:
        """Buckets of `whole` (used last at the end) to give up for `unit`. Called for each use of a bucket."""
        others = [other for other in whole if other not in pinned]
        return others[: max(0, len(whole) + 1 - WINDOW)]

    def watch(self, pack: Pack, unpack: Unpack, *, again: bool, by_value: bool) -> tuple[Pack, Unpack] | None:
        """Saved-tensor hooks for a forward that begins now; None for the usual ones.

        again: it is run again in a backward. by_value: inside the saved-tensor hooks of who runs it.
        """
        return None if by_value else (pack, unpack)

    def end_backward(self) -> None:
        """Free what forwards have saved."""

    def end_step(self, groups: Sequence[dist.ProcessGroup]) -> None:
        """Values of the parameters have changed. Collective."""

    def describe(self) -> str:
        """Nothing: the table of buckets says it."""
        return ""


class Budget:
    """Whole buckets take at most a budget of bytes, less what always lies on the device.

    placement: has `memory_budget_bytes`. always: of them, what gradients take. The first step learns the order of uses,
    unless an earlier run has. Raises ValueError where two buckets that follow each other do not fit.
    """

    prefetch = 0  # a bucket that is not in use yet is not in the budget

    def __init__(self, units: Sequence[ParamUnit], placement: Placement, always: int) -> None:
        self.units = {unit.number: unit for unit in units}
        self.nbytes = {unit.number: unit.layout.numel * unit.shard.itemsize for unit in units}
        assert placement.memory_budget_bytes is not None, "made for a budget"
        self.budget = budget = placement.memory_budget_bytes
        self.always = always
        self.steady = placement.steady_cap_ratio
        self.stats: MemStats | None = None
        self.uses: list[int] = []  # of the step that is learned from
        self.is_common = True  # the same on all ranks
        self.places: dict[int, list[int]] = {}  # of each bucket in the learned order
        self.place = 0  # there, behind the last use
        self.saved = Kept()  # what forwards have saved since the last backward
        self.recomputed = Kept()  # what a layer that is run again in it has, its inputs once more
        self.non_model_bytes = 0  # the most that there was at once
        self.transfers = 0
        self.steps = -1  # the parameters are cut into shards first
        self.limit = max(int(budget * (1 - placement.warmup_non_model_data_ratio)) - always, 0)
        if placement.memstats is not None:
            self._use_stats(placement.memstats)
        else:
            order = sorted(self.units, reverse=True)  # as a forward uses them, if it does in order of registration
            self._check_neighbours(order, int(budget * self.steady) - always)
            self.limit = max(self.limit, self._longest_pair(order)[0])

    # -- what the unsharder asks --------------------------------------------------------------------------------------

    def evict(self, whole: Sequence[ParamUnit], unit: ParamUnit, pinned: Collection[ParamUnit]) -> list[ParamUnit]:
        """Those whose next use is farthest, until `unit` fits. RuntimeError where it cannot."""
        if self.stats is not None:
            self.place = (self.place + self._distance(unit.number) + 1) % max(1, len(self.stats.uses))
        elif not self.uses or self.uses[-1] != unit.number:
            self.uses.append(unit.number)
        if unit.whole is not None:
            return []
        self.transfers += 1
        left = [other for other in whole if other not in pinned]
        used = sum(self.nbytes[other.number] for other in whole) + self.nbytes[unit.number]
        chosen: list[ParamUnit] = []
        while used > self.limit and left:
            farthest = max(left, key=lambda other: self._distance(other.number))
            left.remove(farthest)
            chosen.append(farthest)
            used -= self.nbytes[farthest.number]
        if used > self.limit:
            together = [other for other in whole if other not in chosen]
            raise RuntimeError(
                f"one operation takes {self._names([*together, unit])}, {used} bytes together, and {self.limit} of "
                f"the budget of {self.budget} bytes are there for whole buckets. Give a larger memory_budget_bytes, or "
                "make smaller buckets"
            )
        return chosen

    def watch(self, pack: Pack, unpack: Unpack, *, again: bool, by_value: bool) -> tuple[Pack, Unpack]:
        """`pack` and `unpack`, or those of who runs a forward again, which count the bytes that are kept."""
        outer = active_hooks() if by_value else None
        kept = self.recomputed if again else self.saved

        def count(tensor: torch.Tensor) -> object:
            packed = pack(tensor)
            is_weight = type(packed) is not tuple  # which `pack` saves by its place
            if is_weight and by_value:  # and this with its bucket
                kept.add(-packed.unit.number, self.nbytes[packed.unit.number])
            elif not is_weight and tensor.layout is torch.strided:
                storage = tensor.untyped_storage()
                kept.add(storage.data_ptr(), storage.nbytes())
            self.non_model_bytes = max(self.non_model_bytes, self.saved.nbytes + self.recomputed.nbytes)
            return packed if outer is None else outer[0](tensor)

        def forget(saved: Any) -> torch.Tensor:  # backward continues, so what was run again before is freed, or will be
            self.recomputed = Kept()
            return unpack(saved)

        return count, forget if outer is None else outer[1]

    def end_backward(self) -> None:
        self.saved, self.recomputed = Kept(), Kept()

    def end_step(self, groups: Sequence[dist.ProcessGroup]) -> None:
        """Agree on what the first step took: more buckets stay. Fewer do after one that took more. Collective."""
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
            warnings.warn(
                f"a step has kept {most} bytes for backward on some rank, and the budget of {self.budget} bytes counts "
                f"on {self.stats.non_model_bytes}, so it may have been exceeded; from now on {most} are counted. Give "
                "the first step the longest sequences",
                stacklevel=2,
            )
            self._use_stats(replace(self.stats, non_model_bytes=most))

    @property
    def memstats(self) -> MemStats | None:
        """Statistics of the first step; None before its end, and if ranks have used different buckets."""
        return self.stats if self.is_common else None

    def describe(self) -> str:
        """The budget, as a line behind the table of buckets."""
        kept = "not counted yet" if self.stats is None else f"{self.stats.non_model_bytes} of what a forward keeps"
        return (
            f"\nbudget of {self.budget} bytes: {self.always} of gradients, {kept}, {self.limit} for whole buckets, of "
            f"which the one whose next use is farthest is given up; {self.transfers} gathers so far"
        )

    # -- the order of uses ------------------------------------------------------------------------------------------

    def _distance(self, number: int) -> int:
        """Number of uses before this bucket's next one."""
        if self.stats is None:  # the order is not known yet: what was used last is used next, as in a backward
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
                f"{nbytes} bytes, and of the budget of {self.budget} bytes {max(limit, 0)} are there for whole buckets "
                f"(gradients take {self.always}). Give a larger memory_budget_bytes, or make smaller buckets"
            )

    def _names(self, units: Sequence[ParamUnit]) -> str:
        return " and ".join(unit.name for unit in units)
