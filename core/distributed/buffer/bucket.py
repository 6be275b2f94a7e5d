"""Bucket: gradients that one collective reduces, and the state machine that moves them. No hooks, no modules.

    ACCUMULATING --launch--> IN_FLIGHT --complete--> REDUCED --close--> FINAL --reset--> ACCUMULATING

While a bucket is in flight, its parameters' `.grad` is a GradPlaceholder. It stores a gradient that arrives late, which
would otherwise race with the collective and be lost or mixed. The late gradient is reduced afterwards.

If a rank keeps only its shard, full gradients use memory borrowed from a BucketPool while they fill and are reduced.
Every reduction adds to the shard, so one step may have several: `next_microbatch` returns to ACCUMULATING.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum

import torch
import torch.distributed as dist

from core.distributed.buffer.bucket_pool import BucketPool
from core.distributed.buffer.grad_attribute import GradAttribute, dense
from core.distributed.buffer.memory_tier import HostTier, MemoryTier, copy_to_host
from core.distributed.distributed_data_parallel_config import DistributedDataParallelConfig
from core.distributed.layout.model_plan import BucketGroups, ModelPlan
from core.distributed.layout.param_layout import BucketLayout
from core.distributed.wire.collective_events import CollectiveEvent
from core.distributed.wire.collectives import Collectives, Flight, Op
from core.groups.agree import SyncError


class BucketState(Enum):
    """State of a bucket's gradients between autograd and the optimizer."""

    ACCUMULATING = "accumulating"  # autograd adds this rank's gradients
    IN_FLIGHT = "in flight"  # a collective owns the memory
    REDUCED = "reduced"  # reduced over the data group; sync rules may still be due
    FINAL = "final"  # ready for the optimizer


class Bucket:
    """Slice [start, end) of a gradient buffer. Owned by its GradBuffer; moved by the GradReducer.

    With a pool, `grad` and `views` are empty except between `borrow` and `give_back`.

    Args:
        memory: Full gradients, [layout.numel], or with a pool only this rank's shard.
        pool: Memory for full gradients if a rank keeps only its shard, else None.
        scale: Factor for the gradients.
        param_data: Parameters, [layout.numel], if the optimizer is sharded but parameters are not, else None.
        param_shard: This rank's shard of the parameters, [shard], if it keeps no more of them.
    """

    def __init__(
        self,
        layout: BucketLayout,
        memory: torch.Tensor,
        plan: ModelPlan,
        ddp_config: DistributedDataParallelConfig,
        groups: BucketGroups,
        *,
        pool: BucketPool | None,
        scale: float,
        param_data: torch.Tensor | None,
        param_shard: torch.Tensor | None,
    ) -> None:
        self.layout = layout
        self.name = layout.describe()
        self.nbytes = layout.numel * memory.element_size()
        self.params = [plan.params[slot.name] for slot in layout.slots]
        self.contracts = [plan.contracts[slot.name] for slot in layout.slots]
        self.groups = groups
        self.ranges = layout.ranges
        self.dtype, self.device = memory.dtype, memory.device if pool is None else pool.memory.device
        self.sharded = sharded = ddp_config.sharded
        self.pool = pool
        self.gathered = False  # True if all of the bucket is valid although it was reduced to shards
        # [start, end) within the bucket that this rank's optimizer updates; all of it without sharding.
        self.shard_range = layout.shard_of(dist.get_rank(groups.shard)) if sharded else (0, layout.numel)
        # The same memory in every step; it may be on the host instead of `device`.
        self.owned_grad = self.shard_of(memory) if pool is None else memory
        self.grad, self.views = memory[:0], list[torch.Tensor]()  # full gradients, and one view for each parameter
        self._views_at: dict[int, list[torch.Tensor]] = {}  # keyed by address: the pool lends one of two places
        if pool is None:
            self._lie_in(memory)
        self.param_data = param_data
        self.param_shard = param_shard if param_data is None else self.shard_of(param_data)
        self.state_tier: MemoryTier | None = None  # memory of masters and moments, if they are offloaded
        self.params_stay = False  # True if another tensor shares their memory: an optimizer must not move them
        self.op: Op = "mean" if ddp_config.average_in_collective else "sum"
        self.scale_later = ddp_config.scale_in_optimizer
        self.scale, self._due_scale = (1.0, scale) if self.scale_later else (scale, 1.0)  # before and after a reduction
        # The true gradient is `grad` times this. A 0-dim fp64 tensor once a number of tokens is part of it.
        self.pending_scale: float | torch.Tensor = 1.0
        # Set by an optimizer's step on these gradients. Returns (memory of gradients, factor): the step has not applied
        # the factor to that memory; code that adds to the memory must.
        self.owed: Callable[[torch.Tensor], list[tuple[torch.Tensor, float]]] | None = None
        factor = scale if self.op == "mean" else scale * dist.get_world_size(groups.data)
        unchanged = not (sharded or any(contract.rules for contract in self.contracts))
        # True if adding to reduced gradients in place, and reducing again, gives the sum of both.
        self.adds_exactly = unchanged and abs(factor - 1.0) < 1e-9
        self.held: dict[int, torch.Tensor] = {}  # accumulated gradients that cannot be added to in place
        self.lost: str | None = None  # a parameter whose held gradient was added to
        self.optimizer_steps = 0  # steps that our optimizer has made on earlier gradients
        self.attribute = GradAttribute(self.params, [contract.name for contract in self.contracts], self.dtype)
        self.used = self.attribute.used  # 1 for each parameter with a gradient in this step
        self.accumulates = bytes(len(self.params))  # 1 for each parameter whose earlier gradient this step adds to
        self.accumulated_shard: torch.Tensor | None = None  # these gradients if `.grad` does not show them: [shard]
        self.used_without = bytearray(len(self.params))  # 1 for each parameter that counts as used without a gradient
        self.state = BucketState.ACCUMULATING
        self.sums = 0  # reductions of this step that were added to the shard
        self.reductions = 0  # completed reductions since the wrap
        self.arrivals = [0] * len(self.params)
        self.expected = [1] * len(self.params)  # a wrong number costs overlap or a second reduction, never correctness
        self.pending = len(self.params)
        self.handle: Flight | None = None
        self.moved: torch.Tensor | None = None  # device copy of the shard in flight, if the shard itself is elsewhere
        self.copied: torch.Event | None = None  # recorded after the last copy of the shard to the host
        self.events: list[CollectiveEvent] = []  # one for each reduction of this step

    # -- memory -----------------------------------------------------------------------------------------------------

    def _lie_in(self, memory: torch.Tensor) -> None:
        place = memory.data_ptr()
        if place not in self._views_at:
            self._views_at[place] = self.layout.views_of(memory)
        self.grad, self.views = memory, self._views_at[place]

    def borrow(self) -> None:
        """Get memory for full gradients from the pool, waiting if necessary. Gaps between parameters are zeroed."""
        if self.pool is None or self.views:
            return
        self._lie_in(self.pool.acquire(self.layout.numel))
        end = 0
        for low, high in (*self.ranges, (self.layout.numel, 0)):  # values left by other buckets would be summed
            if end < low:
                self.grad[end:low].zero_()
            end = high

    def give_back(self) -> None:
        if self.pool is not None:
            if not self.pool.release(self.grad):
                self._views_at.pop(self.grad.data_ptr(), None)
            self.grad, self.views = self.owned_grad[:0], []

    @property
    def storage(self) -> list[torch.Tensor]:
        """For each parameter the memory that must not move while the model is wrapped."""
        return self.views if self.pool is None else [self.owned_grad] * len(self.ranges)

    @property
    def whole(self) -> bool:
        """True if all of the bucket, not just this rank's shard, is valid after the reduction."""
        return self.gathered or not self.sharded

    @property
    def valid_range(self) -> tuple[int, int]:
        """Range [start, end) within the bucket that contains reduced gradients after the reduction."""
        return (0, self.layout.numel) if self.whole else self.shard_range

    @property
    def valid_grad(self) -> torch.Tensor:
        """Gradients in the valid range, flat."""
        return self.grad if self.whole else self.owned_grad

    def valid_part(self, index: int) -> torch.Tensor:
        """Return the flat part of parameter `index`'s gradient inside the valid range; may be empty."""
        return self.part_of(self.valid_grad, index, self.valid_range)

    def part_of(self, flat: torch.Tensor, index: int, within: tuple[int, int]) -> torch.Tensor:
        """Return the elements of parameter `index` from a tensor with elements `within` = [start, end) of a bucket."""
        low, high = within
        start, end = max(self.ranges[index][0], low), min(self.ranges[index][1], high)
        return flat[start - low : max(start, end) - low]

    def shard_of(self, whole: torch.Tensor) -> torch.Tensor:
        """Return this rank's shard of a tensor with the bucket's layout."""
        low, high = self.shard_range
        return whole[low:high]

    def copy_to_shard(self) -> None:
        """Copy changes of the full gradient to the shard, if the shard is separate memory."""
        if self.pool is not None and self.gathered:
            self.owned_grad.copy_(self.shard_of(self.grad))

    @property
    def steps_apart(self) -> bool:
        """True if the parameters are on another device than the one that updates them."""
        memory = self.params[0] if self.param_shard is None else self.param_shard
        return memory.is_cpu != (isinstance(self.state_tier, HostTier) or self.owned_grad.is_cpu)

    # -- until the reduction ----------------------------------------------------------------------------------------

    def reset(self, *, keep: bool = False) -> None:
        """Begin a new step. The caller has zeroed the memory, or lets collected gradients overwrite it.

        With `keep`, add to the reduced gradients that are still in `.grad`, as torch does; gradients of a finished step
        include the factors that its optimizer applied. If that is impossible, `lost` names a parameter at the launch.
        """
        self.accumulates = self.attribute.accumulates if keep else bytes(len(self.params))
        self.accumulated_shard, self.held, self.lost = None, {}, None
        if 1 in self.accumulates and self.attribute.is_hidden:
            self.accumulated_shard = self._copy_accumulated()
        elif 1 in self.accumulates and not (self.adds_exactly and all(factor == 1.0 for _, factor in self._owed())):
            self.held = self.attribute.hold(self.accumulates, apart=self.pool is not None)
        self.used_without = bytearray(len(self.params) if self.accumulated_shard is None else self.accumulates)
        self.attribute.begin(self.accumulates)
        self.give_back()
        self.await_copy()
        self.optimizer_steps += self.owed is not None
        self.gathered, self.owed = False, None
        self.pending_scale = 1.0
        self.sums = 0
        self.handle = None
        self.events = []
        self._accumulate()

    def _accumulate(self) -> None:
        self.state = BucketState.ACCUMULATING
        self.arrivals = [0] * len(self.params)
        self.pending = len(self.expected) - self.expected.count(0)

    def _owed(self) -> list[tuple[torch.Tensor, float]]:
        return [] if self.owed is None else self.owed(self.owned_grad)

    @torch.no_grad()
    def _copy_accumulated(self) -> torch.Tensor:
        """Copy the accumulated gradients, [shard]. Autograd adds in place to those in `.grad`, which need no copy."""
        for memory, factor in self._owed():
            memory.mul_(factor)
        copy = torch.zeros_like(self.owned_grad)
        for index, adds in enumerate(self.accumulates):
            if adds:
                part = self.part_of(self.owned_grad, index, self.shard_range)
                self.part_of(copy, index, self.shard_range).copy_(part * _on(part.device, self.pending_scale))
        return copy

    def arrive(self, index: int) -> None:
        """Record a gradient that arrived outside no_sync."""
        self.arrivals[index] += 1
        if self.arrivals[index] == self.expected[index] and self.state is not BucketState.IN_FLIGHT:
            self.pending -= 1

    def fill(self, pool: BucketPool, index: int) -> None:
        """Move a gradient into borrowed memory when it arrives, if memory is available without waiting.

        Only for the bucket that is launched next; `launch` moves the rest.
        """
        if torch.is_grad_enabled():  # under create_graph
            return
        if self.used_without[index] or self.held:
            self._follow_drops((index,))
        if not self.views:
            if not pool.has_room(self.layout.numel):
                return
            self.borrow()
        self.attribute.collect((index,), self.views, None if self.sums else self.used_without)

    def _follow_drops(self, indices: Sequence[int]) -> None:
        """Forget accumulated gradients that the user dropped since the step began, as long as nothing was reduced."""
        for index in indices if self.accumulated_shard is not None and not self.sums else ():
            if self.used_without[index] and self.attribute.has_dropped(index):
                self.part_of(self.accumulated_shard, index, self.shard_range).zero_()
                self.used_without[index] = self.used[index] = 0
        for index, grad in self.held.items():
            if self.params[index].grad is grad:
                self.lost = self.contracts[index].name

    def _note_written(self) -> None:
        """Mark parameters as used if user code wrote their gradient into the buffer directly."""
        pairs = zip(self.params, self.views, strict=False)
        silent = [i for i, (param, view) in enumerate(pairs) if not self.used[i] and param.grad is view]
        if silent:
            written = torch.stack([self.views[i].any() for i in silent]).tolist()  # one wait for a device
            for index, is_written in zip(silent, written, strict=True):
                self.used[index] = is_written

    # -- the reduction ----------------------------------------------------------------------------------------------

    @torch.no_grad()  # under create_graph hooks run with grad mode on, and a gradient has a graph
    def launch(self, collectives: Collectives, *, watched: bool = True) -> None:
        """Start the reduction over the data group. Every rank of the group launches its buckets in the same order.

        Pass `watched=False` only if no user code runs until the reduction is done.
        """
        self._expect(BucketState.ACCUMULATING, "launched")
        if 1 in self.accumulates:
            self._follow_drops(range(len(self.params)))
        if 0 in self.used:
            self._note_written()
        if self.pool is not None:
            self.attribute.note_dropped()
            self.borrow()
        without = None if self.sums else self.used_without
        watched = watched or self.pool is not None
        self.attribute.collect(range(len(self.params)), self.views, without, watched=watched)
        self.state = BucketState.IN_FLIGHT
        self.handle = self._reduce(self.grad, collectives)
        self.events.append(self.handle.event)
        if self.pool is not None:
            self.pool.in_flight.append((self.wait, self.grad))

    def watch(self) -> None:
        """Put placeholders into `.grad` if `launch` has left gradients there that are being reduced."""
        if self.attribute.shown is self.views:
            self.attribute.collect(range(len(self.params)), self.views, None)

    def _reduce(self, grad: torch.Tensor, collectives: Collectives) -> Flight:
        """Scale and reduce a tensor with this bucket's layout, in place: over the data group, or to the shard."""
        if self.sharded:
            return collectives.reduce_scatter(grad, self.groups.shard, self.name, self.op, scale=self.scale)
        return collectives.all_reduce(grad, self.groups.data, self.name, self.op, scale=self.scale)

    def poll(self) -> bool:
        """Make all progress that needs no other rank. True if the collective is done."""
        return self.handle is None or self.handle.is_done()

    @torch.no_grad()
    def wait(self) -> None:
        """Wait for the collective in flight, store the result in the shard, and return borrowed memory."""
        if self.handle is None:
            return
        self.handle.wait()
        self.handle = None
        if self.moved is not None:
            self._keep(self.moved)
            self.moved = None
        if self.pool is not None and self.views:
            self._keep(self.shard_of(self.grad), adds=self.sums > 0)
            self.sums += 1
            self.give_back()

    def _keep(self, shard: torch.Tensor, *, adds: bool = False) -> None:
        """Store `shard`, on the device, as this rank's shard; with `adds`, add it to the stored one."""
        if self.owned_grad.device == self.device:
            self.owned_grad.add_(shard) if adds else self.owned_grad.copy_(shard)
            return
        if adds:  # on the device, so that the host waits for nothing
            shard = self.owned_grad.to(self.device, non_blocking=True).add_(shard)
        self.copied = copy_to_host(self.owned_grad, shard)

    def await_copy(self) -> None:
        """Wait until the host's copy of the shard is complete, before the shard is read or written."""
        if self.copied is not None:
            self.copied.synchronize()
            self.copied = None

    def all_reduce_replicas(self, collectives: Collectives) -> None:
        """With several optimizer instances: wait for this instance's sum, and start adding the others' sums."""
        self._expect(BucketState.IN_FLIGHT, "added up over the optimizer instances")
        if self.groups.replica is not None:
            self.wait()
            name = f"{self.name} across instances"
            shard = self.owned_grad.to(self.device, non_blocking=True)
            self.moved = None if shard is self.owned_grad else shard
            self.handle = collectives.all_reduce(shard, self.groups.replica, name, self.op)
            self.events.append(self.handle.event)

    def complete(self) -> None:
        self._expect(BucketState.IN_FLIGHT, "waited for")
        self.wait()
        self.await_copy()
        self.pending_scale = self._due_scale
        self.state = BucketState.REDUCED
        self.reductions += 1

    @torch.no_grad()
    def add_late(self, collectives: Collectives) -> None:
        """Reduce and add gradients that arrived after the launch. Collective: all ranks of the data group."""
        extra = torch.zeros(self.layout.numel, dtype=self.dtype, device=self.device)
        for index, grad in self.attribute.take_late():
            start, end = self.ranges[index]
            extra[start:end].copy_(dense(grad).reshape(-1))
        self._reduce(extra, collectives).wait()
        shard = self.shard_of(extra)
        if self.groups.replica is not None:
            collectives.all_reduce(shard, self.groups.replica, self.name, self.op).wait()
        self._keep(shard, adds=True)
        self.await_copy()

    def gather_whole(self, collectives: Collectives) -> None:
        """All-gather the shards, so that all of the bucket is valid until the next step. Collective."""
        if not self.whole:
            self.borrow()
            if self.pool is not None:
                self.shard_of(self.grad).copy_(self.owned_grad)
            collectives.all_gather(self.grad, self.groups.shard, self.name).wait()
            self.gathered = True

    # -- several reductions in a step -------------------------------------------------------------------------------

    def next_microbatch(self) -> None:
        """Accumulate again; the next reduction adds to the shard."""
        self.wait()
        self.attribute.note_dropped()
        self.attribute.withdraw()
        self._accumulate()

    def reduced_so_far(self) -> torch.Tensor | None:
        """Return a copy of the sum of this step's reductions, or None before the first one. Waits."""
        self.wait()
        self.await_copy()
        if self.accumulated_shard is not None:
            raise SyncError(
                "this step adds to gradients of an earlier finalize_model_grads, which are not saved; save before the "
                "first finalize_model_grads of a step, or after optimizer.step()"
            )
        self.attribute.note_dropped()
        self.attribute.withdraw()
        return self.owned_grad.clone() if self.sums else None

    def restore(self, reduced: torch.Tensor) -> None:
        """Continue from the result of `reduced_so_far`, in a step that has just begun."""
        self._expect(BucketState.ACCUMULATING, "restored")
        self.owned_grad.copy_(reduced)
        self.sums = 1
        for index in range(len(self.params)):  # a parameter with a nonzero part has had a gradient
            self.used[index] |= bool(self.valid_part(index).any())

    # -- once it is reduced -----------------------------------------------------------------------------------------

    def attach(self) -> None:
        """Set every parameter's `.grad`: its view, or a placeholder if it is sharded or not scaled yet."""
        if self.state is BucketState.ACCUMULATING:
            self.attribute.accumulate_into(self.views)
        else:
            self.attribute.show(self.views if self.whole and not self.scale_is_due else None)

    def follow_edits(self) -> str | None:
        """Apply the user's edits of `.grad` since the reduction. Returns a message if a shard cannot follow one."""
        problem = self.attribute.follow_edits()
        for index in self.attribute.take_zeroed():
            self.valid_part(index).zero_()
        self.copy_to_shard()
        return problem

    def take_edits(self) -> None:
        """Apply the user's edits of `.grad` as `follow_edits` does; raises SyncError if one cannot be followed."""
        problem = self.follow_edits()
        if problem is not None:
            raise SyncError(f"rank {dist.get_rank()}: {problem}")

    @torch.no_grad()
    def scale_gradients(self, factor: float | torch.Tensor) -> None:
        """Multiply this rank's gradients: its own contributions before the reduction, the valid range after it."""
        if self.accumulated_shard is not None:
            self.accumulated_shard.mul_(_on(self.accumulated_shard.device, factor))
        if self.state in (BucketState.REDUCED, BucketState.FINAL):
            self.take_edits()
        self._multiply(factor)

    def _multiply(self, factor: float | torch.Tensor) -> None:
        if self.state is BucketState.IN_FLIGHT and self.views:
            raise SyncError(
                f"{self.name} is in flight and cannot be scaled; scale before the last backward, or after "
                "finish_grad_sync or finalize_model_grads"
            )
        accumulating = self.state is BucketState.ACCUMULATING
        if self.pool is not None:
            self.await_copy()
            self.owned_grad.mul_(_on(self.owned_grad.device, factor))
            if self.views:
                self.grad.mul_(factor)
        else:
            (self.grad if accumulating else self.valid_grad).mul_(factor)
        for index in range(len(self.params) if accumulating else 0):
            grad = self.attribute.take(index)
            if grad is not None and not (self.views and grad is self.views[index]):
                grad.mul_(factor)

    def defer_scale(self, factor: float | torch.Tensor) -> None:
        """Leave a further factor to the optimizer, or multiply now if scales are not left to it."""
        if self.scale_later:
            self.pending_scale = self.pending_scale * factor
        else:
            self._multiply(factor)
            self.adds_exactly = False  # gradients of a later backward would be multiplied by another factor

    @property
    def scale_is_due(self) -> bool:
        """True if a factor has not been applied yet."""
        return isinstance(self.pending_scale, torch.Tensor) or self.pending_scale != 1.0

    def close(self) -> None:
        """Hand the gradients to the optimizer after the sync rules have run."""
        self._expect(BucketState.REDUCED, "closed")
        self.state = BucketState.FINAL
        if self.accumulated_shard is not None:
            self.owned_grad.add_(self.accumulated_shard.div_(_on(self.accumulated_shard.device, self.pending_scale)))
            self.accumulated_shard = None
        self.copy_to_shard()

    def _expect(self, state: BucketState, action: str) -> None:
        if self.state is not state:
            raise SyncError(f"{self.name} cannot be {action}: it is {self.state.value}, not {state.value}")


def _on(device: torch.device, factor: float | torch.Tensor) -> float | torch.Tensor:
    """Return a factor on the device of the tensor it multiplies."""
    return factor.to(device) if isinstance(factor, torch.Tensor) else factor
