"""Bucket: gradients that one collective reduces, and the state machine that moves them. No hooks, no modules.

    ACCUMULATING --launch--> IN_FLIGHT --complete--> REDUCED --close--> FINAL --reset--> ACCUMULATING

While a bucket is in flight, its parameters' ``.grad`` is a GradPlaceholder. It stores a gradient that arrives late,
which would otherwise race with the collective and be lost or mixed. The late gradient is reduced afterwards.

If a rank keeps only its shard, full gradients use memory borrowed from a BucketPool while they fill and are reduced.
Every reduction adds to the shard, so one step may have several: ``next_microbatch`` returns to ACCUMULATING.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum

import torch
import torch.distributed as dist

from core.distributed.buffer.bucket_memory import BucketMemory
from core.distributed.buffer.grad_attribute import GradAttribute, dense
from core.distributed.buffer.memory_tier import HostTier
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


@dataclass(slots=True)
class BucketStep:
    """Changes of one step to a bucket. ``Bucket.reset`` begins the next step with a new one."""

    pending: int  # parameters whose last gradient has not arrived
    arrivals: list[int]  # gradients of each parameter
    accumulates: bytes  # 1 for each parameter whose earlier gradient this step adds to
    used_without: bytearray  # 1 for each parameter that counts as used without a gradient
    is_full_grad: bool  # True if all of the bucket is valid once it is reduced, not just this rank's shard
    accumulated_shard: torch.Tensor | None  # earlier gradients if `.grad` does not show them: [shard]
    held: dict[int, torch.Tensor]  # earlier gradients that cannot be added to in place
    lost: str | None = None  # a parameter whose held gradient was added to
    state: BucketState = BucketState.ACCUMULATING
    sums: int = 0  # reductions that were added to the shard
    handle: Flight | None = None
    moved: torch.Tensor | None = None  # device copy of the shard in flight, if the shard itself is elsewhere
    events: list[CollectiveEvent] = field(default_factory=list)  # one for each reduction
    # The true gradient is `grad` times this. A 0-dim fp64 tensor once a number of tokens is part of it.
    pending_scale: float | torch.Tensor = 1.0
    # Set by an optimizer's step on these gradients. Returns (memory of gradients, factor): the step has not applied
    # the factor to that memory; code that adds to the memory must.
    owed: Callable[[torch.Tensor], list[tuple[torch.Tensor, float]]] | None = None


class Bucket:
    """Slice [start, end) of a gradient buffer. Owned by its GradBuffer; moved by the GradReducer.

    ``memory`` holds gradients and parameters, and ``step`` the changes of the current step. All other attributes are
    set at the wrap, and say how the bucket is reduced. ``scale`` is the factor for the gradients.
    """

    def __init__(
        self,
        layout: BucketLayout,
        memory: BucketMemory,
        plan: ModelPlan,
        ddp_config: DistributedDataParallelConfig,
        groups: BucketGroups,
        scale: float,
    ) -> None:
        self.layout, self.ranges, self.name = layout, layout.ranges, layout.describe()
        self.memory, self.shard_range, self.device = memory, memory.shard_range, memory.device
        self.dtype, self.nbytes = memory.owned_grad.dtype, layout.numel * memory.owned_grad.itemsize
        self.params = [plan.params[slot.name] for slot in layout.slots]
        self.contracts = [plan.contracts[slot.name] for slot in layout.slots]
        self.groups = groups
        self.sharded = sharded = ddp_config.sharded
        self.stays_full = not sharded  # True if a reduction leaves full gradients
        self.op: Op = "mean" if ddp_config.average_in_collective else "sum"
        self.scale_later = ddp_config.scale_in_optimizer
        self.scale, self._due_scale = (1.0, scale) if self.scale_later else (scale, 1.0)  # before and after a reduction
        factor = scale if self.op == "mean" else scale * dist.get_world_size(groups.data)
        unchanged = self.stays_full and not any(contract.rules for contract in self.contracts)
        # True if adding to reduced gradients in place, and reducing again, gives the sum of both.
        self.adds_exactly = unchanged and abs(factor - 1.0) < 1e-9
        self.attribute = GradAttribute(self.params, [contract.name for contract in self.contracts], self.dtype)
        self.used = self.attribute.used  # 1 for each parameter with a gradient in this step
        self.optimizer_steps = 0  # steps that our optimizer has made on earlier gradients
        self.reductions = 0  # completed reductions since the wrap
        self.expected = [1] * len(self.params)  # a wrong number costs overlap or a second reduction, never correctness
        count = len(self.params)
        self.step = BucketStep(count, [0] * count, bytes(count), bytearray(count), self.stays_full, None, {})

    # -- its gradients ----------------------------------------------------------------------------------------------

    @property
    def valid_range(self) -> tuple[int, int]:
        """Range [start, end) within the bucket that contains reduced gradients after the reduction."""
        return (0, self.layout.numel) if self.step.is_full_grad else self.shard_range

    @property
    def valid_grad(self) -> torch.Tensor:
        """Gradients in the valid range, flat."""
        return self.memory.grad if self.step.is_full_grad else self.memory.owned_grad

    def valid_part(self, index: int) -> torch.Tensor:
        """Return the flat part of parameter ``index``'s gradient inside the valid range; may be empty."""
        return self.part_of(self.valid_grad, index, self.valid_range)

    def part_of(self, flat: torch.Tensor, index: int, within: tuple[int, int]) -> torch.Tensor:
        """Return the part of parameter ``index`` in a tensor of the bucket's elements ``within`` = [start, end)."""
        low, high = within
        start, end = max(self.ranges[index][0], low), min(self.ranges[index][1], high)
        return flat[start - low : max(start, end) - low]

    def copy_to_shard(self) -> None:
        """Copy changes of the full gradient to the shard, if the shard is separate memory."""
        if self.memory.pool is not None and self.step.is_full_grad:
            self.memory.owned_grad.copy_(self.memory.shard_of(self.memory.grad))

    @property
    def steps_apart(self) -> bool:
        """True if the parameters are on another device than the one that updates them."""
        memory = self.memory
        params = self.params[0] if memory.param_shard is None else memory.param_shard
        return params.is_cpu != (isinstance(memory.state_tier, HostTier) or memory.owned_grad.is_cpu)

    # -- until the reduction ----------------------------------------------------------------------------------------

    def reset(self, *, keep: bool = False) -> None:
        """Begin a new step. The caller has zeroed the memory, or lets collected gradients overwrite it.

        With ``keep``, add to the reduced gradients that are still in ``.grad``, as torch does; gradients of a finished
        step include the factors that its optimizer applied. If that is impossible, ``lost`` names a parameter at the
        launch.
        """
        accumulates = self.attribute.accumulates if keep else bytes(len(self.params))
        accumulated_shard, held = None, dict[int, torch.Tensor]()
        if 1 in accumulates and self.attribute.is_hidden:
            accumulated_shard = self._copy_accumulated(accumulates)
        elif 1 in accumulates and not (self.adds_exactly and all(factor == 1.0 for _, factor in self._owed())):
            held = self.attribute.hold(accumulates, apart=self.memory.pool is not None)
        self.attribute.begin(accumulates)
        self.memory.give_back()
        self.memory.await_copy()
        self.optimizer_steps += self.step.owed is not None
        pending, arrivals = len(self.expected) - self.expected.count(0), [0] * len(self.params)
        without = bytearray(len(self.params) if accumulated_shard is None else accumulates)
        self.step = BucketStep(pending, arrivals, accumulates, without, self.stays_full, accumulated_shard, held)

    def _owed(self) -> list[tuple[torch.Tensor, float]]:
        return [] if self.step.owed is None else self.step.owed(self.memory.owned_grad)

    @torch.no_grad()
    def _copy_accumulated(self, accumulates: bytes) -> torch.Tensor:
        """Copy the accumulated gradients, [shard]. Autograd adds in place to those in ``.grad``, which need no copy."""
        for memory, factor in self._owed():
            memory.mul_(factor)
        copy = torch.zeros_like(self.memory.owned_grad)
        for index, adds in enumerate(accumulates):
            if adds:
                part = self.part_of(self.memory.owned_grad, index, self.shard_range)
                self.part_of(copy, index, self.shard_range).copy_(part * _on(part.device, self.step.pending_scale))
        return copy

    def arrive(self, index: int) -> None:
        """Record a gradient that arrived outside no_sync."""
        step = self.step
        step.arrivals[index] += 1
        if step.arrivals[index] == self.expected[index] and step.state is not BucketState.IN_FLIGHT:
            step.pending -= 1

    def fill(self, index: int) -> None:
        """Move a gradient into borrowed memory when it arrives, if memory is available without waiting.

        Only for the bucket that is launched next; ``launch`` moves the rest.
        """
        if torch.is_grad_enabled():  # under create_graph
            return
        if self.step.used_without[index] or self.step.held:
            self._follow_drops((index,))
        if not self.memory.views and not self.memory.borrow(wait=False):
            return
        self.attribute.collect((index,), self.memory.views, None if self.step.sums else self.step.used_without)

    def _follow_drops(self, indices: Sequence[int]) -> None:
        """Forget accumulated gradients that the user dropped since the step began, as long as nothing was reduced."""
        for index in indices if self.step.accumulated_shard is not None and not self.step.sums else ():
            if self.step.used_without[index] and self.attribute.has_dropped(index):
                self.part_of(self.step.accumulated_shard, index, self.shard_range).zero_()
                self.step.used_without[index] = self.used[index] = 0
        for index, grad in self.step.held.items():
            if self.params[index].grad is grad:
                self.step.lost = self.contracts[index].name

    def _record_written(self) -> None:
        """Mark parameters as used if user code wrote their gradient into the buffer directly."""
        pairs = zip(self.params, self.memory.views, strict=False)
        silent = [i for i, (param, view) in enumerate(pairs) if not self.used[i] and param.grad is view]
        if silent:
            written = torch.stack([self.memory.views[i].any() for i in silent]).tolist()  # one wait for a device
            for index, is_written in zip(silent, written, strict=True):
                self.used[index] = is_written

    # -- the reduction ----------------------------------------------------------------------------------------------

    @torch.no_grad()  # under create_graph hooks run with grad mode on, and a gradient has a graph
    def launch(self, collectives: Collectives, *, watched: bool = True) -> None:
        """Start the reduction over the data group. Every rank of the group launches its buckets in the same order.

        Pass ``watched=False`` only if no user code runs until the reduction is done.
        """
        self._expect(BucketState.ACCUMULATING, "launched")
        memory, step = self.memory, self.step
        if 1 in step.accumulates:
            self._follow_drops(range(len(self.params)))
        if 0 in self.used:
            self._record_written()
        if memory.pool is not None:
            self.attribute.record_dropped()
            memory.borrow()
        without = None if step.sums else step.used_without
        watched = watched or memory.pool is not None
        self.attribute.collect(range(len(self.params)), memory.views, without, watched=watched)
        step.state = BucketState.IN_FLIGHT
        step.handle = self._reduce(memory.grad, collectives)
        step.events.append(step.handle.event)
        if memory.pool is not None:
            memory.pool.in_flight.append((self.wait, memory.grad))

    def watch(self) -> None:
        """Put placeholders into ``.grad`` if ``launch`` has left gradients there that are being reduced."""
        if self.attribute.shown is self.memory.views:
            self.attribute.collect(range(len(self.params)), self.memory.views, None)

    def _reduce(self, grad: torch.Tensor, collectives: Collectives) -> Flight:
        """Scale and reduce a tensor with this bucket's layout, in place: over the data group, or to the shard."""
        if self.sharded:
            return collectives.reduce_scatter(grad, self.groups.shard, self.name, self.op, scale=self.scale)
        return collectives.all_reduce(grad, self.groups.data, self.name, self.op, scale=self.scale)

    def poll(self) -> bool:
        """Make all progress that needs no other rank. True if the collective is done."""
        return self.step.handle is None or self.step.handle.is_done()

    @torch.no_grad()
    def wait(self) -> None:
        """Wait for the collective in flight, store the result in the shard, and return borrowed memory."""
        memory, step = self.memory, self.step
        if step.handle is None:
            return
        step.handle.wait()
        step.handle = None
        if step.moved is not None:
            memory.keep(step.moved)
            step.moved = None
        if memory.pool is not None and memory.views:
            memory.keep(memory.shard_of(memory.grad), adds=step.sums > 0)
            step.sums += 1
            memory.give_back()

    def all_reduce_replicas(self, collectives: Collectives) -> None:
        """With several optimizer instances: wait for this instance's sum, and start adding the others' sums."""
        self._expect(BucketState.IN_FLIGHT, "added up over the optimizer instances")
        if self.groups.replica is not None:
            self.wait()
            name = f"{self.name} across instances"
            shard = self.memory.owned_grad.to(self.device, non_blocking=True)
            self.step.moved = None if shard is self.memory.owned_grad else shard
            self.step.handle = collectives.all_reduce(shard, self.groups.replica, name, self.op)
            self.step.events.append(self.step.handle.event)

    def complete(self) -> None:
        self._expect(BucketState.IN_FLIGHT, "waited for")
        self.wait()
        self.memory.await_copy()
        self.step.pending_scale = self._due_scale
        self.step.state = BucketState.REDUCED
        self.reductions += 1

    @torch.no_grad()
    def add_late(self, collectives: Collectives) -> None:
        """Reduce and add gradients that arrived after the launch. Collective: all ranks of the data group."""
        extra = torch.zeros(self.layout.numel, dtype=self.dtype, device=self.device)
        for index, grad in self.attribute.take_late():
            start, end = self.ranges[index]
            extra[start:end].copy_(dense(grad).reshape(-1))
        self._reduce(extra, collectives).wait()
        shard = self.memory.shard_of(extra)
        if self.groups.replica is not None:
            collectives.all_reduce(shard, self.groups.replica, self.name, self.op).wait()
        self.memory.keep(shard, adds=True)
        self.memory.await_copy()

    def all_gather_grads(self, collectives: Collectives) -> None:
        """All-gather the shards, so that all of the bucket is valid until the next step. Collective."""
        if not self.step.is_full_grad:
            self.memory.borrow()
            if self.memory.pool is not None:
                self.memory.shard_of(self.memory.grad).copy_(self.memory.owned_grad)
            collectives.all_gather(self.memory.grad, self.groups.shard, self.name).wait()
            self.step.is_full_grad = True

    # -- several reductions in a step -------------------------------------------------------------------------------

    def next_microbatch(self) -> None:
        """Accumulate again; the next reduction adds to the shard."""
        self.wait()
        self.attribute.record_dropped()
        self.attribute.withdraw()
        self.step.state = BucketState.ACCUMULATING
        self.step.arrivals = [0] * len(self.params)
        self.step.pending = len(self.expected) - self.expected.count(0)

    def reduced_so_far(self) -> torch.Tensor | None:
        """Return a copy of the sum of this step's reductions, or None before the first one. Waits."""
        self.wait()
        self.memory.await_copy()
        if self.step.accumulated_shard is not None:
            raise SyncError(
                "this step adds to gradients of an earlier finalize_model_grads, which are not saved; save before the "
                "first finalize_model_grads of a step, or after optimizer.step()"
            )
        self.attribute.record_dropped()
        self.attribute.withdraw()
        return self.memory.owned_grad.clone() if self.step.sums else None

    def restore(self, reduced: torch.Tensor) -> None:
        """Continue from the result of ``reduced_so_far``, in a step that has just begun."""
        self._expect(BucketState.ACCUMULATING, "restored")
        self.memory.owned_grad.copy_(reduced)
        self.step.sums = 1
        for index in range(len(self.params)):  # a parameter with a nonzero part has had a gradient
            self.used[index] |= bool(self.valid_part(index).any())

    # -- once it is reduced -----------------------------------------------------------------------------------------

    def attach(self) -> None:
        """Set every parameter's ``.grad``: its view, or a placeholder if it is sharded or not scaled yet."""
        if self.step.state is BucketState.ACCUMULATING:
            self.attribute.accumulate_into(self.memory.views)
        else:
            self.attribute.show(self.memory.views if self.step.is_full_grad and not self.scale_is_due else None)

    def follow_edits(self) -> str | None:
        """Apply the user's edits of ``.grad`` since the reduction. Returns a message if a shard cannot follow one."""
        problem = self.attribute.follow_edits()
        for index in self.attribute.take_zeroed():
            self.valid_part(index).zero_()
        self.copy_to_shard()
        return problem

    def take_edits(self) -> None:
        """Apply the user's edits of ``.grad`` as ``follow_edits`` does; raises SyncError if one cannot be followed."""
        problem = self.follow_edits()
        if problem is not None:
            raise SyncError(f"rank {dist.get_rank()}: {problem}")

    @torch.no_grad()
    def scale_gradients(self, factor: float | torch.Tensor) -> None:
        """Multiply this rank's gradients: its own contributions before the reduction, the valid range after it."""
        if self.step.accumulated_shard is not None:
            self.step.accumulated_shard.mul_(_on(self.step.accumulated_shard.device, factor))
        if self.step.state in (BucketState.REDUCED, BucketState.FINAL):
            self.take_edits()
        self._multiply(factor)

    def _multiply(self, factor: float | torch.Tensor) -> None:
        if self.step.state is BucketState.IN_FLIGHT and self.memory.views:
            raise SyncError(
                f"{self.name} is in flight and cannot be scaled; scale before the last backward, or after "
                "finish_grad_sync or finalize_model_grads"
            )
        accumulating = self.step.state is BucketState.ACCUMULATING
        if self.memory.pool is not None:
            self.memory.await_copy()
            self.memory.owned_grad.mul_(_on(self.memory.owned_grad.device, factor))
            if self.memory.views:
                self.memory.grad.mul_(factor)
        else:
            (self.memory.grad if accumulating else self.valid_grad).mul_(factor)
        for index in range(len(self.params) if accumulating else 0):
            grad = self.attribute.take(index)
            if grad is not None and not (self.memory.views and grad is self.memory.views[index]):
                grad.mul_(factor)

    def defer_scale(self, factor: float | torch.Tensor) -> None:
        """Leave a further factor to the optimizer, or multiply now if scales are not left to it."""
        if self.scale_later:
            self.step.pending_scale = self.step.pending_scale * factor
        else:
            self._multiply(factor)
            self.adds_exactly = False  # gradients of a later backward would be multiplied by another factor

    @property
    def scale_is_due(self) -> bool:
        """True if a factor has not been applied yet."""
        return isinstance(self.step.pending_scale, torch.Tensor) or self.step.pending_scale != 1.0

    def close(self) -> None:
        """Hand the gradients to the optimizer after the sync rules have run."""
        self._expect(BucketState.REDUCED, "closed")
        self.step.state = BucketState.FINAL
        if self.step.accumulated_shard is not None:
            self.memory.owned_grad.add_(
                self.step.accumulated_shard.div_(_on(self.step.accumulated_shard.device, self.step.pending_scale))
            )
            self.step.accumulated_shard = None
        self.copy_to_shard()

    def _expect(self, state: BucketState, action: str) -> None:
        if self.step.state is not state:
            raise SyncError(f"{self.name} cannot be {action}: it is {self.step.state.value}, not {state.value}")


def _on(device: torch.device, factor: float | torch.Tensor) -> float | torch.Tensor:
    """Return a factor on the device of the tensor it multiplies."""
    return factor.to(device) if isinstance(factor, torch.Tensor) else factor
