"""Bucket: one collective's worth of gradients, and the state machine that moves it. No hooks, no modules.

    ACCUMULATING --launch--> IN_FLIGHT --complete--> REDUCED --close--> FINAL --reset--> ACCUMULATING

While a bucket is in flight its parameters' `.grad` is a GradPlaceholder: a gradient that arrives late is kept there
instead of racing with the wire, is noticed, and is reduced afterwards. No peer can silently lose or mix it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from core.agree import SyncError
from core.distributed.buffer.grad_attribute import BucketState, GradAttribute, dense
from core.distributed.buffer.param_views import views_of
from core.distributed.contract.gradient_contract import GradientContract
from core.distributed.layout.param_layout import BucketLayout
from core.distributed.measure.step_clock import BucketEvent, HostClock
from core.distributed.wire.collectives import Collectives, Handle, InFlight, Op
from core.waiting import waiting

__all__ = ["Bucket", "BucketGroups", "BucketState"]


@dataclass(frozen=True, slots=True)
class BucketGroups:
    """The process groups of a bucket: shard x replica = data."""

    data: dist.ProcessGroup  # all ranks whose gradients are added
    shard: dist.ProcessGroup  # the ranks that share one copy of the optimizer's state
    replica: dist.ProcessGroup | None  # the same shard in the other optimizer instances

    @property
    def all(self) -> list[dist.ProcessGroup]:
        """Those that there are."""
        return [self.data, self.shard, *([self.replica] if self.replica else [])]


class Bucket(GradAttribute):
    """A slice [start, end) of a gradient buffer. Owned by its GradBuffer; moved by the GradReducer."""

    def __init__(
        self,
        layout: BucketLayout,
        grad: torch.Tensor,
        params: list[nn.Parameter],
        contracts: list[GradientContract],
        groups: BucketGroups,
        *,
        sharded: bool,
        scale: float,
        average: bool,
        scale_later: bool = False,
        param_data: torch.Tensor | None = None,
    ) -> None:
        self.layout = layout
        self.grad = grad  # [layout.numel], a view of the buffer
        self.dtype, self.device = grad.dtype, grad.device
        self.param_data = param_data  # [layout.numel] of the parameters where they are sharded, else None
        self.params = params
        self.params_stay = False  # True where another tensor uses their memory, so that an optimizer must not move them
        self.contracts = contracts
        self.groups = groups
        self.sharded = sharded
        self.scale = 1.0 if scale_later else scale  # multiplied in before the reduction
        self.scale_later = scale_later
        self._due_scale = scale if scale_later else 1.0
        # The true gradient is `grad` times this. A 0-dim fp64 tensor once a number of tokens is part of it.
        self.pending_scale: float | torch.Tensor = 1.0
        self.spent = False  # has an optimizer made its step of these gradients?
        self.op: Op = "mean" if average else "sum"
        self.views = self._views()  # of each parameter's gradient
        self._shard_range = 0, layout.numel
        if sharded:
            self._shard_range = layout.shard(dist.get_rank(groups.shard), dist.get_world_size(groups.shard))
        self.state = BucketState.ACCUMULATING
        self.detached = False  # True while placeholders are in `.grad` of gradients that were collected
        self.full = not sharded  # after the reduction: is the whole bucket valid, or this rank's shard alone?
        GradAttribute.__init__(self, len(params))
        self.reductions = 0  # that were completed, ever
        self.arrivals = [0] * len(params)
        self.expected = [1] * len(params)
        self.pending = len(params)
        self.handle: InFlight = Handle()
        self.clock = HostClock()  # the reducer's, once there is one
        self.past_events: list[BucketEvent] = []  # of the step's earlier collectives, where it has several
        self.name = layout.describe()
        self.nbytes = grad.numel() * grad.element_size()
        self.event = self._new_event()

    # -- memory -----------------------------------------------------------------------------------------------------

    def _views(self) -> list[torch.Tensor]:
        return views_of(self.grad, self.layout.slots, self.layout.start)

    @property
    def homes(self) -> list[torch.Tensor]:
        """For each parameter the memory that must stay where it is as long as the model is wrapped."""
        return self.views

    @property
    def shard_range(self) -> tuple[int, int]:
        """[start, end) within the bucket that this rank owns; everything where gradients are not sharded."""
        return self._shard_range

    @property
    def owned_grad(self) -> torch.Tensor:
        """[n], the part of the bucket that this rank's optimizer updates: the same memory in every step."""
        low, high = self.shard_range
        return self.grad[low:high]

    @property
    def valid_range(self) -> tuple[int, int]:
        """[start, end) within the bucket that holds reduced gradients once the bucket is reduced."""
        return (0, self.layout.numel) if self.full else self.shard_range

    @property
    def valid_grad(self) -> torch.Tensor:
        """The gradients in the valid range, flat."""
        low, high = self.valid_range
        return self.grad[low:high]

    def valid_part(self, index: int) -> torch.Tensor:
        """The flat part of parameter `index`'s gradient that lies in the valid range; may be empty."""
        slot = self.layout.slots[index]
        low, high = self.valid_range
        start = max(slot.start - self.layout.start, low)
        end = min(slot.end - self.layout.start, high)
        return self.valid_grad[start - low : max(start, end) - low]

    def reset(self, *, keep: bool = False) -> None:
        """Begin a new step. The caller has zeroed the memory, or lets collected gradients overwrite it.

        keep: add to the reduced gradients that are still in `.grad`, as torch does.
        """
        kept = self.kept if keep else bytes(len(self.params))
        self.carried, self.carries = None, bytes(len(self.params))
        if keep:
            self._carry(kept)
        self._forget_touches()
        self.placed = bytearray(len(self.params))
        self.dropped = None
        self.detached = False
        self.used = bytearray(kept)
        self.state = BucketState.ACCUMULATING
        self.full = not self.sharded
        self.pending_scale = 1.0
        self.spent = False
        self.arrivals = [0] * len(self.params)
        self.pending = len(self.expected) - self.expected.count(0)
        self.handle = Handle()
        self.past_events = []
        self.event = self._new_event()

    # -- the state machine ------------------------------------------------------------------------------------------

    def arrive(self, index: int) -> bool:
        """Note a gradient that came outside no_sync; True when it was the last one the bucket waited for."""
        count = self.arrivals[index] = self.arrivals[index] + 1
        if self.state is BucketState.IN_FLIGHT:
            return False
        if count == self.expected[index]:
            self.pending -= 1
            if self.pending == 0:
                self.clock.mark(self.event, "ready_s")
                return True
        return False

    @torch.no_grad()  # hooks run with grad mode on under create_graph, where a gradient has a graph of its own
    def collect(self, *, detach: bool = True) -> None:
        """Bring every gradient into the buffer, wherever the user or autograd left it.

        detach: a placeholder is in `.grad` afterwards, so that what comes until the reduction is done is noticed.
        """
        self._note_written()
        for index, (param, view) in enumerate(zip(self.params, self.views, strict=True)):
            grad = param.grad
            written = param.__dict__.get("grad_added_to_main_grad", False)  # by somebody's fused kernel
            if written:
                param.grad_added_to_main_grad = False
            if not param.requires_grad or (grad is None and not written):
                view.zero_()  # emptied by zero_grad(set_to_none=True), or frozen: it contributes zeros
                self.used[index] = self.carries[index]
            elif grad is None:
                continue
            elif grad is not view:
                view.copy_(dense(grad))
                self.used[index] = 1
                param.grad = None
        if detach:
            self.detach()

    def _note_written(self) -> None:
        """Note parameters whose gradient somebody has written into the buffer himself, so that no hook has run."""
        silent = [i for i, (param, used) in enumerate(zip(self.params, self.used, strict=True)) if not used]
        silent = [i for i in silent if self.params[i].grad is self.views[i]]
        if silent:
            written = torch.stack([self.views[i].any() for i in silent]).tolist()  # one wait for a device
            for index, is_written in zip(silent, written, strict=True):
                self.used[index] = is_written

    @torch.no_grad()
    def launch(self, collectives: Collectives, *, detach: bool = True) -> None:
        """Start the reduction over the data group. Every rank of it launches its buckets in the same order.

        detach: False where nothing but the reduction runs until it is waited for.
        """
        self._expect(BucketState.ACCUMULATING, "launched")
        self.collect(detach=detach or self.sharded)  # sharded ones stay detached
        self.state = BucketState.IN_FLIGHT
        self.clock.mark(self.event, "launched_s")
        self.handle = self.reduce(self.grad, collectives)
        self.clock.follow(self.event, self.handle)

    def detach(self) -> None:
        """Put placeholders into `.grad`, so that what comes until the reduction is done is noticed."""
        if not self.detached:
            for index, used in enumerate(self.used):
                if used:
                    self._place(index)
                else:
                    self.params[index].grad = None
            self.detached = True

    def _place(self, index: int) -> None:
        """Put a placeholder into the `.grad` of `params[index]`, whose gradient is in the buffer."""
        self.placed[index] = 1
        try:
            self.params[index].grad = self._placeholders()[index]
        except RuntimeError:  # it has another dtype or device since the wrap, which finalize refuses by name
            self.params[index].grad = None
            self.placed[index] = 0

    def note_done(self) -> bool:
        """Look whether the collective is done, and note when that was first seen."""
        return self.clock.look(self.event, self.handle)

    def _new_event(self) -> BucketEvent:
        return BucketEvent(self.layout.index, self.name, self.nbytes)

    @property
    def events(self) -> list[BucketEvent]:
        """What the step's collectives did when, one after the other."""
        return [*self.past_events, self.event]

    def reduce(self, grad: torch.Tensor, collectives: Collectives) -> InFlight:
        """Scale and reduce a tensor laid out like this bucket, in place, over the data group or to this rank's
        shard.
        """
        if self.full:
            return collectives.all_reduce(grad, self.groups.data, self.op, scale=self.scale)
        return collectives.reduce_scatter(grad, self.groups.shard, self.op, scale=self.scale)

    def join_instances(self, collectives: Collectives) -> None:
        """With several optimizer instances: wait for this one's sum, and start adding those of the others to it."""
        self._expect(BucketState.IN_FLIGHT, "joined")
        self.note_done()
        self.clock.mark(self.event, "wait_start_s")
        if not self.full and self.groups.replica is not None:
            self.wait()
            self.clock.end(self.event)
            low, high = self.shard_range
            self._launch_across_instances(self.grad[low:high], collectives)

    def _launch_across_instances(self, shard: torch.Tensor, collectives: Collectives) -> None:
        """The sum of this instance is there: add those of the others, a collective with an event of its own."""
        assert self.groups.replica is not None, "only a bucket of several optimizer instances has others"
        self.past_events.append(self.event)
        self.event = self._new_event()
        self.event.name += " across instances"
        self.event.nbytes = shard.numel() * shard.element_size()
        self.clock.mark(self.event, "launched_s")
        self.handle = collectives.all_reduce(shard, self.groups.replica, self.op)
        self.clock.follow(self.event, self.handle)
        self.clock.mark(self.event, "wait_start_s")

    def step(self) -> bool:
        """Do the next part of the reduction; False where `wait` is all that is left."""
        with waiting("the reduction of", self.groups.data, self.name):
            return self.handle.step()

    def wait(self) -> None:
        """Wait for what is in flight."""
        with waiting("the reduction of", self.groups.data, self.name):
            self.handle.wait()

    def complete(self) -> None:
        """Wait for the reduction."""
        self._expect(BucketState.IN_FLIGHT, "waited for")
        if not self.event.has("wait_end_s"):  # else backward has waited for it, to have its memory
            self.note_done()
            self.wait()
            self.clock.end(self.event)
        self.handle = Handle()
        self.pending_scale = self._due_scale
        self.state = BucketState.REDUCED
        self.reductions += 1

    def add_instances(self, grad: torch.Tensor, collectives: Collectives) -> InFlight:
        """Second half of a sharded reduction over several optimizer instances: the same shard, across instances."""
        if self.full or self.groups.replica is None:
            return Handle()
        low, high = self.shard_range
        return collectives.all_reduce(grad[low:high], self.groups.replica, self.op)

    @property
    def has_late(self) -> bool:
        """True if a hook, or the user, has put a gradient into `.grad` since the launch."""
        return self.detached and any(self._take(index) is not None for index in range(len(self.params)))

    def late_gradients(self) -> list[tuple[int, torch.Tensor]]:
        """(index, gradient) of what arrived while the bucket was in flight; forgotten here."""
        found = [(index, self._take(index)) for index in range(len(self.params)) if self.detached]
        self._forget_touches()
        return [(index, grad) for index, grad in found if grad is not None]

    @torch.no_grad()
    def add_late(self, late: list[tuple[int, torch.Tensor]], collectives: Collectives) -> None:
        """Reduce gradients that came after the launch, and add them. Collective: all ranks of the data group."""
        extra = torch.zeros(self.layout.numel, dtype=self.dtype, device=self.device)
        for index, grad in late:
            slot = self.layout.slots[index]
            extra[slot.start - self.layout.start : slot.end - self.layout.start].copy_(dense(grad).reshape(-1))
        self.reduce(extra, collectives).wait()
        self.add_instances(extra, collectives).wait()
        low, high = self.valid_range
        self.valid_grad.add_(extra[low:high])

    def gather_whole(self, collectives: Collectives) -> None:
        """Put together every rank's shard, so that the whole bucket is valid until the next step. Collective."""
        if not self.full:
            collectives.all_gather(self.grad, self.groups.shard).wait()
            self.full = True

    def learn(self) -> None:
        """Expect next time what was seen this time, so that a bucket leaves as soon as its last gradient is there.

        A wrong expectation costs overlap or a second reduction, never correctness.
        """
        self.expected = list(self.arrivals)

    def scale_gradients(self, factor: float | torch.Tensor) -> None:
        """Multiply what this rank holds: its own contributions before the reduction, the valid range after it."""
        if self.carried is not None:
            self.carried.mul_(factor)
        if self.state in (BucketState.REDUCED, BucketState.FINAL):
            self.take_edits()
        self._multiply(factor)

    def _multiply(self, factor: float | torch.Tensor) -> None:
        if self.state is BucketState.IN_FLIGHT:
            raise SyncError(
                f"{self.event.name} is in flight and cannot be scaled; scale before the last backward, or after "
                "finish_grad_sync or finalize_model_grads"
            )
        if self.state is not BucketState.ACCUMULATING:
            self.valid_grad.mul_(factor)
            return
        self.grad.mul_(factor)
        for param, view in zip(self.params, self.views, strict=True):
            if param.grad is not None and param.grad is not view:
                param.grad.mul_(factor)

    def leave_scale(self, factor: float | torch.Tensor) -> None:
        """Have the optimizer multiply by a further factor, or multiply now where scales are not left to it."""
        if self.scale_later:
            self.pending_scale = self.pending_scale * factor
        else:
            self._multiply(factor)

    @property
    def scale_is_due(self) -> bool:
        """Is a factor left that nobody has taken?"""
        return isinstance(self.pending_scale, torch.Tensor) or self.pending_scale != 1.0

    def take_scale(self) -> float | torch.Tensor:
        """The factor that is still due. Whoever takes it applies it: the gradients count as scaled from now on."""
        factor, self.pending_scale = self.pending_scale, 1.0
        return factor

    def close(self) -> None:
        """The sync rules are done: hand the gradients to the optimizer."""
        self._expect(BucketState.REDUCED, "closed")
        self.state = BucketState.FINAL
        if self.carried is not None:
            self._multiply(self.take_scale())
            self.owned_grad.add_(self.carried)
            self.carried = None

    def _expect(self, state: BucketState, action: str) -> None:
        if self.state is not state:
            raise SyncError(f"{self.event.name} cannot be {action}: it is {self.state.value}, not {state.value}")
