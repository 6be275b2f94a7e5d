"""Unsharder: selects the parameters that are unsharded now, only from the order in which a rank uses them.

    forward     a parameter is used -> its unit is unsharded -> the unit used longest ago is resharded
    backward    a weight saved for backward is needed -> the same
    step        the shards have new values -> all units are resharded

Few units are unsharded at a time (see eviction.py). More are only if one operation uses parameters of more units, or
if a unit's ``keep_unsharded`` requires it. Weights are saved for backward by position, not by value (Note [Weights are
saved by place] in param_unit.py), so their memory is free until then.

If the ranks of one host map one memory that contains all shards, a bucket is always complete there, and nothing is
copied. Otherwise an all-gather is a collective on a separate communicator, and ranks must use their parameters in one
order. Ranks compare their gathers once in each step, and after each forward without gradients.

Note [Prefetch]
If all-gathers are collectives, or copies from the host to a GPU, the next bucket is prefetched: the one that followed
the last two in earlier steps. Ranks have the same order and therefore the same predictions. A wrong prediction is
waited for and dropped, as is any from before a write. A bucket's values only ever come from its own all-gather.

Note [Who writes the one memory of all ranks]
A rank writes only its own shard: in an optimizer's step, when ``gathered`` ends, in a load. Before the first two all
ranks wait for each other, so no rank computes with the old values any more. After all three they wait again, so no
rank begins before the new values are complete. ``gathered`` gives each rank a copy, because all may write it.
"""

from __future__ import annotations

import weakref
from bisect import bisect_right, insort
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from core.distributed.buffer.bucket import Bucket
from core.distributed.buffer.grad_attribute import attributes_alone, backward_runs, call_after_backward, weakly
from core.distributed.buffer.saved_tensors import active_hooks, load_unchanged, save_unchanged
from core.distributed.guard.misuse import refuse_reshaped
from core.distributed.guard.replicas import checksum, first_unequal
from core.distributed.sharded.gather_order import GatherOrder, needs_all
from core.distributed.sharded.param_unit import AllGather, KeepUnsharded, ParamUnit, SavedWeight
from core.distributed.sharded.plain_params import PlainParams
from core.distributed.sharded.sharded_parameter import ShardedParameter, owned_by, untraced
from core.distributed.wire import huge_pages
from core.distributed.wire.collectives import Collectives
from core.groups import agree
from core.groups.agree import SyncError
from core.groups.process_groups import ProcessGroups


class Unsharder(PlainParams):
    """Sharded parameters of one wrapped model chunk, in units in bucket order, frozen ones last."""

    def __init__(
        self, units: Sequence[ParamUnit], buckets: Sequence[Bucket], collectives: Collectives, groups: ProcessGroups
    ) -> None:
        super().__init__(buckets, collectives)
        self.units = list(units)
        self.control = {unit.data_group: groups.control(unit.data_group) for unit in self.units}
        self.compared = {unit.data_group: self.control[unit.data_group] for unit in self.units if unit.is_collective}
        self.unit_of = {id(param): unit for unit in self.units for param in unit.params}
        self.window: list[ParamUnit] = []  # units unsharded until others are used, the last used one at the end
        self.kept_unsharded: set[ParamUnit] = set()  # the other unsharded units
        self.at: dict[int, ParamUnit] = {}  # keyed by the address of the unsharded bucket
        self.addresses: list[int] = []  # sorted addresses of all unsharded buckets
        self.prefetched: AllGather | None = None  # Note [Prefetch]
        self.order = GatherOrder()
        self.pop_gathers = self.order.pop
        self.saves_by_place = any(unit.is_copied for unit in self.units)  # Note [Weights are saved by place]
        self.depth = 0  # number of nested forwards
        self.in_backward = False
        self.stays_unsharded = False  # True inside `gathered`
        self.loaded: dict[str, object] | None = None  # inside `loading`: checksums of the full values that were copied
        self.awaits_others = False  # True if other ranks may be writing their shards
        self.hooks: saved_tensors_hooks | None = None
        # A compiler that traced these would take storage addresses and versions for values of the graph.
        self._begin, self._end = untraced(Unsharder._begin_outermost), untraced(Unsharder._end_outermost)
        classes = owned_by(weakref.ref(self))
        for unit in self.units:
            unit.param_classes = classes
        # Classes of tensors that may be in a bucket's memory.
        self.plain_classes = (torch.Tensor, nn.Parameter, classes.when_unsharded, classes.lent)
        channels = [unit.channel for unit in self.units if unit.channel is not None]
        self.channels = list({id(channel.group): channel for channel in channels}.values())

    # -- when values are there --------------------------------------------------------------------------------------

    def enter(self) -> None:
        if self.depth > 0 and not self.awaits_others:
            self.depth += 1
        else:
            self._begin(self)

    def leave(self) -> None:
        if self.depth > 1:
            self.depth -= 1
        else:
            self._end(self)

    def _begin_outermost(self) -> None:
        runs = self.depth > 0 or self.stays_unsharded or not torch.is_grad_enabled() or self.runs()
        if self.awaits_others:
            self.barrier()
        self.depth += 1
        if self.hooks is not None or not self.saves_by_place:
            return
        by_value = active_hooks() is not None
        if by_value and not runs:  # they may save a parameter itself, which has no values in backward
            raise SyncError(
                f"rank {dist.get_rank()}: a forward of a model with sharded parameters begins inside other "
                "saved-tensor hooks: save_on_cpu, checkpoint(use_reentrant=False), or another model with sharded "
                "parameters. Use them around modules inside this model, and wrap one model around the other"
            )
        if by_value and not self.in_backward:
            return
        watched = self.eviction.watch(self._pack, self._unpack, again=self.in_backward, by_value=by_value)
        if watched is not None:
            self.hooks = saved_tensors_hooks(*watched)
            self.hooks.__enter__()

    def _end_outermost(self) -> None:
        if self.depth == 0:  # a hook of user code has failed before ours was called
            return
        self.depth -= 1
        hooks, self.hooks = self.hooks, None
        if hooks is not None:
            hooks.__exit__()
        if not self.runs():
            self._set_sharded()

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Return a context in which parameters can be read; each unit is unsharded while it is used.

        Collective in the order of the reads. Without gradients, values are used at once, so ranks compare the order
        when the context ends, and raise SyncError if it differs.
        """
        depth = self.depth
        try:
            self.enter()
            yield
        finally:
            self.depth = depth + 1  # after a Ctrl-C torch calls no hook at the end of a module's forward
            self.leave()
        if not (torch.is_grad_enabled() or self.stays_unsharded or self.runs()):
            self.order.compare(self.compared)

    def runs(self) -> bool:
        """True inside a forward or a backward, in which a use of a parameter unshards it."""
        if self.depth == 0:  # a backward that fails calls no hook, so torch is asked each time
            leave = weakly(self._leave_backward)
            self.in_backward = backward_runs() if self.in_backward else call_after_backward(leave)
        return self.depth > 0 or self.in_backward

    def _leave_backward(self) -> None:
        self.in_backward = False
        self.eviction.end_backward()
        self._set_sharded(ended=KeepUnsharded.BACKWARD)

    def _set_sharded(self, ended: KeepUnsharded | None = None) -> None:
        """Set parameters sharded, so that writes cannot be lost, and free buckets kept until ``ended``."""
        if not self.stays_unsharded and self.depth == 0:
            units = (*self.window, *self.kept_unsharded)
            _all_of(
                partial(self._reshard, unit) if unit.keep_unsharded is ended else unit.set_sharded for unit in units
            )

    # -- gathering --------------------------------------------------------------------------------------------------

    def unshard(self, missing: Sequence[ShardedParameter], others: Sequence[nn.Parameter]) -> None:
        """Unshard the units of an operation's ``missing`` parameters. Those of its ``others`` stay unsharded.

        Raises SyncError outside a forward or a backward.
        """
        if not self.runs():
            raise SyncError(
                f"{self._named(missing[0])} is used outside of a forward, and its values are not gathered; "
                "surround the use by `with model.gathered():`, on all ranks"
            )
        units = list(dict.fromkeys(self.unit_of[id(param)] for param in missing))
        pinned = {*units, *(self.unit_of[id(param)] for param in others if id(param) in self.unit_of)}
        with torch._C._DisableTorchDispatch():  # a selective checkpoint counts what the model itself computes
            for unit in units:
                first = next(param for param in missing if self.unit_of[id(param)] is unit)
                self._use(unit, pinned, used_by=self._name_of(first))
                unit.set_unsharded(in_backward=self.in_backward)

    def record_data(self, param: nn.Parameter, values: torch.Tensor) -> None:
        """Record that user code may write an unsharded parameter's ``.data``, because torch counts no write to it."""
        unit = self.unit_of.get(id(param))
        if unit is not None and unit.is_unsharded:
            unit.data_of.append((unit.names[unit.index_of[id(param)]], values))

    def refuse_write(self, param: ShardedParameter) -> None:
        raise SyncError(
            f"{self._named(param)} is sharded and not gathered, so it cannot be written; write it inside "
            "`with model.gathered():`, on all ranks alike"
        )

    def _named(self, param: nn.Parameter) -> str:
        return f"rank {dist.get_rank()}: parameter {self._name_of(param)!r}"

    def _name_of(self, param: nn.Parameter) -> str:
        unit = self.unit_of[id(param)]
        return unit.names[unit.index_of[id(param)]]

    def _use(self, unit: ParamUnit, pinned: Collection[ParamUnit] = (), used_by: str = "") -> torch.Tensor:
        """Return the unsharded bucket of a unit, and mark the unit as last used."""
        if unit in self.kept_unsharded and unit.full is not None:
            return unit.full
        if unit in self.window:
            self.window.remove(unit)
        until = unit.keep_unsharded
        if until is KeepUnsharded.STEP or (until is KeepUnsharded.BACKWARD and torch.is_grad_enabled()):
            self.kept_unsharded.add(unit)
        else:
            for other in self.eviction.evict(self.window, unit, pinned):
                self._reshard(other)
            self.window.append(unit)
        if unit.full is not None:
            return unit.full
        full = self._all_gather(unit, used_by)
        if unit.is_collective or unit.tier is not None:
            guess = self.order.learn(unit)
            if guess is not None and guess.full is None and guess.copies and self.eviction.prefetch:
                if guess.is_collective:
                    self.order.record(guess, " prefetched")
                self.prefetched = guess.start_all_gather(self.collectives)
        return full

    def _all_gather(self, unit: ParamUnit, used_by: str = "", caller: str = "") -> torch.Tensor:
        if unit.is_collective:
            self.order.record(unit, f" for {used_by!r}" if used_by else "")
        with needs_all(caller, self.control[unit.data_group]) if unit.is_collective else nullcontext():
            prefetched = self._wait_for_prefetch()
            if prefetched is not None and prefetched.unit is unit:
                full = unit.finish_all_gather(prefetched)
            else:
                full = unit.all_gather(self.collectives, bool(caller))
        if unit.is_copied and full.numel() > 0:
            self.at[full.data_ptr()] = unit
            insort(self.addresses, full.data_ptr())
        return full

    def _wait_for_prefetch(self) -> AllGather | None:
        """Wait for the prefetch, if any; the caller uses it or drops it."""
        prefetched, self.prefetched = self.prefetched, None
        if prefetched is not None:
            prefetched.wait()
        return prefetched

    def _reshard(self, unit: ParamUnit) -> None:
        if unit in self.window:
            self.window.remove(unit)
        self.kept_unsharded.discard(unit)
        if unit.full is not None:
            if self.at.pop(unit.full.data_ptr(), None) is not None:
                self.addresses.remove(unit.full.data_ptr())
            unit.reshard()

    # -- weights saved for backward ---------------------------------------------------------------------------------

    def _pack(self, tensor: torch.Tensor) -> object:
        unit = self.unit_of.get(id(tensor))
        if unit is not None and unit.is_copied and not unit.is_unsharded:  # a parameter itself, sharded again by now
            index = unit.index_of[id(tensor)]
            slot = unit.layout.slots[index]
            stride = torch.empty(slot.shape, device="meta").stride()
            return SavedWeight(unit, index, unit.starts[index], slot.shape, stride, version_of(tensor))
        if tensor.layout is torch.strided and type(tensor) in self.plain_classes:
            address = tensor.data_ptr()
            number = bisect_right(self.addresses, address) - 1  # the address of a storage takes 40 us to find
            unit = self.at[self.addresses[number]] if number >= 0 else None
            offset = -1 if unit is None else (address - self.addresses[number]) // unit.shard.itemsize
            # A view may have a sign in addition to its place (`conj().imag`); it is then saved unchanged.
            is_place = unit is not None and offset < unit.layout.numel and tensor.dtype is unit.shard.dtype
            if unit is not None and is_place and not tensor.is_neg():
                index = bisect_right(unit.starts, offset) - 1
                version = version_of(unit.params[index])
                return SavedWeight(unit, index, offset, tensor.shape, tensor.stride(), version)
        return save_unchanged(tensor)

    def _unpack(self, saved: SavedWeight | tuple[torch.Tensor, int]) -> torch.Tensor:
        if isinstance(saved, SavedWeight):
            if saved.version != version_of(saved.unit.params[saved.number]):
                raise SyncError(
                    f"rank {dist.get_rank()}: a backward needs {saved.unit.name} as they were in its forward, and they "
                    "have been written since (an optimizer's step, a load, a write inside `gathered`). Run the "
                    "backward before the step, or the forward again"
                )
            if not self.in_backward:
                self.runs()
            return self._use(saved.unit).as_strided(saved.shape, saved.stride, saved.offset)
        return load_unchanged(saved)

    # -- writing ----------------------------------------------------------------------------------------------------

    def shard_params(self, params: Iterable[nn.Parameter]) -> None:
        for param in params:
            self.shard_param(param)
        self.finish_update()
        huge_pages.give_back()  # freed above

    def shard_param(self, param: nn.Parameter) -> None:
        unit = self.unit_of.get(id(param))
        if unit is not None:
            unit.shard_param(unit.index_of[id(param)])

    def refuse(self, error: Exception | None, what: str) -> None:
        """Raise on all ranks if any has an error. Collective."""
        agree.refuse(error, list(self.control.values()), what)

    def own_part_of(self, param: nn.Parameter) -> tuple[int, torch.Tensor] | None:
        unit = self.unit_of.get(id(param))
        return None if unit is None else unit.own_part_of(unit.index_of[id(param)])

    def begin_update(self) -> None:
        """Wait until other ranks have read the old values, before an optimizer writes shards. Collective."""
        self._refuse_inside("a load or an optimizer's step")
        for tier in {unit.tier for unit in self.units if unit.tier is not None}:
            tier.wait_for_copies()
        self.barrier()

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Return a context in which ``param.copy_(full)`` writes this rank's part into its shard.

        All ranks enter and leave it together. Raises SyncError on all of them if they have copied different values.
        This rank's own error is raised after the others know of it.
        """
        self.begin_update()
        self.loaded, failure = {}, None
        try:
            yield
        except Exception as error:  # the other ranks compare in any case
            failure = error
        finally:
            sums, self.loaded = self.loaded, None
            self.invalidate()
            self.barrier()
        tables = []
        for data_group, group in self.control.items():
            units = [unit for unit in self.units if unit.data_group == data_group]
            names = [name for unit in units for name in unit.names if name in sums]
            lines = [f"parameter {name!r} with checksum {sums[name]}" for name in names]
            tables.append((f"data group {data_group!r}", group, lines))
        advice = "Each rank has kept its part of what it has read, so the weights are mixed: load the same files on all"
        agree.same(tables, failure, kind=SyncError, advice=advice)

    @torch.no_grad()
    def load_values(self, param: ShardedParameter, values: torch.Tensor) -> bool:
        """Store this rank's part of a parameter's full values and return True inside ``loading``; else return False."""
        if self.loaded is None:
            return False
        unit = self.unit_of[id(param)]
        first, part = unit.own_part_of(unit.index_of[id(param)])
        part.copy_(values.reshape(-1)[first : first + part.numel()])
        self.loaded[self._name_of(param)] = checksum(values).tolist()
        return True

    def finish_update(self) -> None:
        """Make earlier gathers invalid after shards were written. Collective."""
        self.invalidate()
        self.eviction.end_step(list(self.control.values()))
        self.barrier()

    def invalidate(self) -> None:
        """Reshard all units, because this rank's shards have new values. A use before ``barrier`` waits."""
        self.awaits_others = True
        self.order.learn(None)
        self._wait_for_prefetch()
        _all_of(partial(self._reshard, unit) for unit in self.units)
        for unit in self.units:
            unit.mark_written()

    @contextmanager
    def gathered(self, caller: str = "gathered()") -> Iterator[None]:
        """Return a context in which all parameters are unsharded and writable. Collective, at its begin and its end.

        All ranks must write the same values. An error inside the context is raised at its end on that rank. The other
        ranks raise a SyncError that names it. ``caller`` is the user's call, for messages.
        """
        if self.stays_unsharded:
            yield
            return
        self._refuse_inside(caller)
        self.order.come_together(caller, list(self.control.values()))
        if self.awaits_others:
            self.barrier()
        for unit in self.units:
            self._reshard(unit)
            self._all_gather(unit, caller=caller)
            self.kept_unsharded.add(unit)
            unit.set_unsharded(nn.Parameter)
        self.stays_unsharded = True
        try:
            by_value = active_hooks() is not None or not self.saves_by_place
            failure: Exception | None = None
            try:
                with nullcontext() if by_value else saved_tensors_hooks(self._pack, self._unpack):
                    yield
                for unit in self.units:
                    refuse_reshaped(unit.names, unit.params, [view.shape for view in unit.views])
            except Exception as error:
                failure = error
            with needs_all(caller, next(iter(self.control.values()))):
                agree.refuse(failure, list(self.control.values()), f"what ran inside {caller}", SyncError)
            edited = [unit for unit in self.units if unit.is_edited()]
            if any([agree.any(bool(edited), group, "writes inside gathered") for group in self.control.values()]):
                self._refuse_unequal_writes()
                for unit in self.units:
                    unit.store_writes()
                    unit.mark_written()
        finally:
            self.stays_unsharded = False
            for unit in self.units:
                unit.accept_writes()  # they were stored, or have failed
            _all_of(partial(self._reshard, unit) for unit in self.units)
        self.barrier()

    def _refuse_unequal_writes(self) -> None:
        """Raise SyncError if ranks have written different values, since each would keep part of its own. Collective."""
        findings = []
        for data_group in self.control:
            units = [unit for unit in self.units if unit.data_group == data_group]
            written = (pair for unit in units for pair in zip(unit.names, unit.views, strict=True))
            findings.append(first_unequal(written, units[0].groups.data, data_group))
        found = next((finding for finding in findings if finding is not None), None)
        if found is not None:  # raised after all groups have compared: ranks of another group may not know of it
            raise SyncError(
                f"rank {dist.get_rank()}: inside gathered() ranks have written different values: {found}. Nothing was "
                "taken over. Write the same on all ranks, or broadcast it from one of them inside gathered()"
            )

    def _refuse_inside(self, what: str) -> None:
        if self.stays_unsharded or self.runs():
            where = "gathered()" if self.stays_unsharded else "a forward" if self.depth else "a backward"
            raise SyncError(f"rank {dist.get_rank()}: {what} came inside {where}; leave it first, on all ranks")

    def barrier(self) -> None:
        """Wait until all ranks that read this rank's memory directly have arrived."""
        for channel in self.channels:
            channel.meet()
        self.awaits_others = False


def version_of(tensor: torch.Tensor) -> int:
    """Return the number of writes to a tensor that torch has counted. The tensor may be a parameter without values."""
    with attributes_alone():
        return tensor._version


def _all_of(actions: Iterable[Callable[[], None]]) -> None:
    """Run every action, then raise their first error."""
    failure: SyncError | None = None
    for action in actions:
        try:
            action()
        except SyncError as error:
            failure = failure or error
    if failure is not None:
        raise failure
