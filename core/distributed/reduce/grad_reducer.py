"""GradReducer: from autograd's arrivals to reduced buckets. Keeps the one launch order that all ranks of a stage share.

Buckets are launched in that order and in no other, whatever order their gradients arrive in; what backward never made
complete is launched by `start` or `finish`. So a rank that did not use a parameter contributes zeros, and nobody waits
for it.

Where gradients are sharded a step may have several rounds, each a launch of every bucket: the end of a backward ends
one. All ranks must have equally many. So they agree before each round and at the end of the step, and a rank that has
more backwards than another one raises on both.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist

from core.agree import SyncError
from core.distributed.buffer.bucket import Bucket, BucketState
from core.distributed.guard.agreement import ControlGroup, Moment, StepAnswer, agree_on_step
from core.distributed.guard.finite import NonFiniteWatch
from core.distributed.guard.lost_ranks import naming_lost_ranks
from core.distributed.measure.overlap_report import measure_overlap
from core.distributed.measure.step_clock import BucketEvent, HostClock, clock_for
from core.distributed.reduce.shared_wire import SharedWire
from core.distributed.wire.collectives import Collectives
from core.distributed.wire.host_channel import HostChannel


@dataclass(slots=True)
class StepReport:
    """What the gradients of one step cost: times in milliseconds, bytes this rank sent, collectives it took part in.

    exposed_ms: from the last launch to the end of the last wait and sync rule, agreement between ranks included. It is
    the host's time: on CUDA, where a wait only queues, it does not say what the wait cost; the events' times do.
    """

    exposed_ms: float = 0.0
    bytes_sent: int = 0
    collectives: int = 0
    late_buckets: int = 0
    events: list[BucketEvent] = field(default_factory=list)

    @property
    def hidden_share(self) -> float:
        """Of the time collectives were in flight, the part that nobody waited for."""
        return measure_overlap(self.events).hidden_share


class GradReducer:
    """Launches, orders and completes the buckets of one wrapped model chunk.

    problems: what was done to the model since it was wrapped that its buffers cannot follow, in words.
    in_backward: launch buckets during backward; wait_at_once: and wait for each, so that nothing overlaps.
    many_rounds: every backward is a round; else there is one a step, in its last backward. channels: the memory of
    ranks of this host, which also tells whether they still run.
    """

    def __init__(
        self,
        order: Sequence[Bucket],
        collectives: Collectives,
        control: Sequence[ControlGroup],
        problems: Callable[[], list[str]],
        *,
        in_backward: bool,
        wait_at_once: bool = False,
        many_rounds: bool = False,
        watch: NonFiniteWatch | None = None,
        channels: Sequence[HostChannel] = (),
    ) -> None:
        self.order = list(order)
        self.collectives = collectives
        self.clock = clock_for(self.order[0].device) if self.order else HostClock()
        for bucket in self.order:
            bucket.clock = self.clock
        self.control = list(control)
        self.problems = problems
        # Data groups first, as in `control`: in this order ranks ask each other whose turn it is.
        groups = [bucket.groups.data for entry in control for bucket in entry.buckets]
        groups += [group for bucket in self.order for group in bucket.groups.all]
        self.wires = [SharedWire.of(group) for group in dict.fromkeys(groups) if dist.get_world_size(group) > 1]
        for wire in self.wires:
            wire.join(self)
        self.in_backward = in_backward
        self.streamed = [bucket for bucket in order if bucket.pool is not None]
        self.wait_at_once = wait_at_once and bool(self.streamed)
        self.many_rounds = many_rounds
        self.rounds = 0  # that were begun in this step
        self.agreed_rounds = -1  # what `rounds` was when the ranks last agreed that the step ends
        self.backward_watched = False  # will the end of the running backward be told?
        self.watch = watch
        self.channels = list(channels)
        self.next = 0  # index into `order` of the bucket to launch next
        self.noted = 0  # index of the first launched bucket that was not seen done
        self.no_sync_depth = 0
        self.force_all_reduce = False
        self.open = True  # may gradients of this step still come?
        self.attached = False  # are the reduced ones back in `.grad`, where the user may drop them?
        self.turn_taken = False  # True once all ranks know that this model is the one they reduce
        self.dirty = False  # has a gradient of this step arrived?
        self.synced_backward = False  # has one arrived outside no_sync, so that some rank may have launched a bucket?
        self.linked: list[weakref.ref[GradReducer]] = []  # the chunks of this rank, in launch order
        self.steps = 0  # finalized, ever
        self.launches = 0  # ever; equal on all ranks whenever they agree on a step
        self.forward_seen = False  # did a training forward run since the step was closed?
        self.begun_unasked = False  # was this step begun because of that forward alone, with gradients sharded?
        self.needs_zero = any(_needs_zero(bucket) for bucket in self.order)
        self.report = StepReport()

    # -- backward ---------------------------------------------------------------------------------------------------

    def arrive(self, bucket: Bucket, index: int) -> None:
        """A gradient of `bucket.params[index]` has been accumulated. The hook of every parameter calls this."""
        if not self.open:
            self._reopen(bucket, index)
        self.dirty = True
        bucket.used[index] = 1
        if self.watch is not None:
            self.watch.look(bucket, index)
        if self.in_backward and (self.no_sync_depth == 0 or self.many_rounds):
            if self.many_rounds and not self.backward_watched:
                self._begin_round()
            self.synced_backward = True
            if self.noted < self.next and self.order[self.noted].poll():
                self.noted += 1
            complete = bucket.arrive(index)
            if self.next < len(self.order) and bucket is self.order[self.next]:
                bucket.fill(index)
            if complete or self.next_is_ready:
                self.advance()

    @property
    def next_is_ready(self) -> bool:
        """Can the bucket whose turn it is be launched?"""
        if self.next == len(self.order) or self.order[self.next].pending > 0:
            return False
        return self.wires_are_own and all(other.all_launched for other in self._before())

    @property
    def wires_are_own(self) -> bool:
        """True if no other model uses this one's communicators, so that buckets may leave before finalize."""
        return all(wire.is_own(self.unit()) for wire in self.wires)

    @property
    def all_launched(self) -> bool:
        """Has every bucket of the step that is open been launched?"""
        return self.open and self.next == len(self.order)

    def advance(self) -> None:
        """Launch every bucket of this reducer, and of chunks linked with it, whose turn has come and that is complete.

        In backward. Where gradients are sharded it waits until an earlier bucket is reduced on all ranks, if that one
        holds the memory.
        """
        with self.named("backward"):
            for member in self.unit():
                while member.synced_backward and member.next_is_ready:
                    member._launch_next()

    def _launch_next(self) -> None:
        bucket = self.order[self.next]
        bucket.launch(self.collectives)
        self.next += 1
        self.launches += 1
        for wire in self.wires:
            wire.launches += 1
        if self.wait_at_once:  # one bucket on the wire at a time
            bucket.wait()

    def _launch_rest(self) -> None:
        while self.next < len(self.order):
            self._launch_next()

    def _learn(self) -> None:
        """Expect what has arrived, unless nothing has."""
        if any(count for bucket in self.order for count in bucket.arrivals):
            for bucket in self.order:
                bucket.learn()

    # -- gradients that are sharded ---------------------------------------------------------------------------------

    def _begin_round(self) -> None:
        """The first gradient of a backward has come: a round begins. Collective.

        Raises SyncError on all ranks if some of them end the step instead.
        """
        self.backward_watched = _call_after_backward(weakref.WeakMethod(self._end_round))
        if not self.wires_are_own or (self.rounds and not self.backward_watched):
            return  # what comes outside of a backward joins the round that is open
        with self.named("backward"):
            if self.rounds:
                self._launch_rest()  # of a backward that failed: other ranks wait for it
            self.agreed_rounds = self.rounds
            self._agree(Moment.BACKWARD)
            if self.rounds:
                self._reset_round()
        self.rounds += 1

    def _reset_round(self) -> None:
        self._learn()
        for bucket in self.streamed:
            bucket.next_microbatch()
        self.next = self.noted = 0

    def _end_round(self) -> None:
        """A backward has ended: launch what it left. With other models on the wire that waits for finalize."""
        self.backward_watched = False
        if self.open and self.wires_are_own:
            with self.named("backward"):
                self._launch_rest()

    def named(self, call: str) -> AbstractContextManager[None]:
        """Surrounds a call of the user that waits for other ranks, to say who did not come."""
        return naming_lost_ranks(call, self.steps + 1, self.channels)

    def _agree(self, moment: Moment) -> StepAnswer:
        return agree_on_step(self.control, moment, self.rounds, self.launches)

    def complete_round(self) -> None:
        """Where every backward is a round: end the open one, if a failed backward or another model left it open.

        Collective where a backward of this step has run, which then is so on all ranks.
        """
        if self.many_rounds and self.open and self.synced_backward:
            self.start()

    def unit(self) -> list[GradReducer]:
        """This reducer and the chunks it is linked with, in launch order."""
        members = [member for member in (reference() for reference in self.linked) if member is not None]
        return members or [self]

    def _before(self) -> list[GradReducer]:
        unit = self.unit()
        return unit[: unit.index(self)]

    def _reopen(self, bucket: Bucket, index: int) -> None:
        if bucket.state is BucketState.REDUCED and not bucket.whole:
            raise SyncError(
                f"rank {dist.get_rank()}: a gradient of {bucket.contracts[index].name!r} came after finish_grad_sync, "
                "and the shard that holds the reduced ones cannot take it. Call finalize_model_grads, then "
                "zero_grad_buffer() before the next backward; or finish after the last backward"
            )
        self._refuse_spent()
        if self.needs_zero and self._any_attached():
            raise SyncError(
                f"rank {dist.get_rank()}: a gradient of {bucket.contracts[index].name!r} came while gradients of the "
                "last step, already reduced, are still there. Call zero_grad_buffer() (or "
                "optimizer.zero_grad(set_to_none=True)) between finalize_model_grads and the next backward; to "
                "accumulate microbatches finalize after the last one"
            )
        self.begin()

    def _refuse_spent(self) -> None:
        """An optimizer may have multiplied the gradients of its step by its factor, so nothing can be added to them."""
        if any(bucket.spent and 1 in bucket.still_in_grad() for bucket in self.order):
            raise SyncError(
                f"rank {dist.get_rank()}: a new step begins and the gradients of the optimizer's last step() are still "
                "there. Call optimizer.zero_grad() between its step() and the next backward"
            )

    def _any_attached(self) -> bool:
        """True if a whole reduced gradient is still in `.grad`."""
        return any(bucket.whole and 1 in bucket.still_in_grad() for bucket in self.order)

    def begin(self, *, keep: bool = True) -> None:
        """A new step: every bucket accumulates again. The memory is left as it is.

        keep: add to the reduced gradients that are still in `.grad`, as torch does.
        """
        for bucket in self.order:
            bucket.reset(keep=keep)
        if self.watch is not None:
            self.watch.reset()
        self.report = self.step_report()
        self.collectives.traffic.reset()
        self.clock.begin_step()
        self.next = self.noted = self.rounds = 0
        self.agreed_rounds = -1
        self.backward_watched = False
        self.force_all_reduce = False
        self.dirty = self.synced_backward = self.forward_seen = self.begun_unasked = False
        self.open = True
        self.attached = False

    # -- the end of a step ------------------------------------------------------------------------------------------

    @property
    def has_new_step(self) -> bool:
        """Is there something to reduce: gradients not yet reduced, or a step in which this rank produced none?"""
        return self.open or self._emptied()

    def take_turn(self) -> None:
        """Raise SyncError on all ranks if some are about to reduce another model: asked before anything is mixed."""
        if self.turn_taken or not self.has_new_step or self.unit()[0] is not self:
            return
        self.turn_taken = True
        if any(wire.shared for wire in self.wires):
            for member in self.unit():  # other ranks may wait in backward for what this one has not launched
                member.start(early=True)
        for wire in self.wires:
            refusal = wire.unequal_turns(self)
            if refusal is not None:
                raise SyncError(refusal)

    def start(self, *, force_all_reduce: bool = False, early: bool = False) -> None:
        """Launch what is left, in order. Asynchronous; `finish` completes it. Does nothing on a complete step.

        early: not where other models use the wires.
        """
        if not self.open:
            if not self._emptied():
                return
            unasked = not self._all_dropped()
            self._refuse_spent()
            self.begin()
            self.begun_unasked = unasked
        self.force_all_reduce = self.force_all_reduce or force_all_reduce
        if early and not self.wires_are_own:
            return
        for other in self._before():
            other.start(force_all_reduce=force_all_reduce)
        if self.rounds:
            self._launch_rest()  # of a backward that failed, or outside of one: other ranks may wait for it
        if self.many_rounds and self.agreed_rounds != self.rounds:
            self.agreed_rounds = self.rounds
            self._agree(Moment.END)
        self._launch_rest()

    def finish(self, *, force_all_reduce: bool = False, then: Callable[[Bucket], None] | None = None) -> None:
        """Complete the reduction over the data groups; a second call does nothing. Collective.

        then: called with each bucket as soon as it is whole, in launch order.
        """
        self.take_turn()
        for member in self.unit():  # none of its chunks may launch after a chunk's agreement on some ranks only
            member.start(force_all_reduce=force_all_reduce)
        if not self.open:
            return
        begun = time.perf_counter()
        with self.named("finalize_model_grads"):
            late = self._complete(then)
        self._learn()
        self.open = self.forward_seen = False
        self._write_report(begun, late)

    def _complete(self, then: Callable[[Bucket], None] | None) -> int:
        """Agree, and wait for every bucket; how many got gradients after their launch."""
        # After the last launch, so that on a group shared with the buckets every rank has the same order of calls.
        try:
            answer = agree_on_step(
                self.control,
                Moment.FINISH,
                self.rounds,
                self.launches,
                problems=[*self._dropped(), *self.problems()],
                has_gradients=self.dirty,
                begun_by_forward=self.begun_unasked,
                wants_whole=self.force_all_reduce,
            )
        except SyncError:
            self.force_all_reduce = False
            with suppress(RuntimeError):  # what is in flight on this rank alone fails; the agreement says why
                self.drain()
            raise
        for bucket in self.order:
            bucket.all_reduce_replicas(self.collectives)
        in_steps = self.order
        while in_steps:  # all buckets a step at a time: between steps ranks wait for each other
            in_steps = [bucket for bucket in in_steps if bucket.step()]
        for bucket in self.order:
            bucket.complete()
            if id(bucket) in answer.late:
                bucket.add_late(self.collectives)
            if bucket.groups.data in answer.whole:
                bucket.gather_whole(self.collectives)
            if then is not None:
                then(bucket)
        return len(answer.late)

    def _dropped(self) -> list[str]:
        """Gradients that the user has dropped too late, in words."""
        dropped = [bucket.attribute.note_dropped() for bucket in self.order]
        return [
            f"the gradient of {name!r} was dropped through `.grad` (p.grad = None, or zero_grad of torch) after its "
            "reduction had begun, and is in it. Use zero_grad_buffer() of the wrapped model, or zero_grad() of its "
            "optimizer, or run the backward under no_sync()"
            for name in dropped
            if name is not None
        ]

    def discard(self) -> None:
        """Forget a step that was begun. Collective when a bucket of it may have been launched on some rank.

        How many buckets backward launched differs between ranks, so all of them launch the rest: a collective that is
        left over on one rank would be paired with another step's.
        """
        with self.named("zero_grad_buffer"):
            if self.open and self.synced_backward:
                self.start()
            self.drain()
        self.begin(keep=False)
        self.turn_taken = False

    def drain(self) -> None:
        """Wait for whatever is in flight, before its memory is used otherwise."""
        for bucket in self.order:
            if bucket.state is BucketState.IN_FLIGHT:
                bucket.wait()

    def attach(self) -> None:
        """Put reduced gradients back into `.grad`, or say there that they are sharded."""
        self.attached = True
        for bucket in self.order:
            bucket.attach()

    def close(self) -> None:
        """Hand the gradients to the optimizer."""
        for bucket in self.order:
            bucket.close()
        self.attach()
        self.turn_taken = False
        self.steps += 1

    def _emptied(self) -> bool:
        """True if the closed step is over though no gradient has arrived on this rank since: other ranks may wait.

        The user has dropped its gradients, or a training forward has run and the new step may add to them.
        """
        if not self.attached:
            return False
        may_add = self.forward_seen and not (self.needs_zero and self._any_attached())
        return self._all_dropped() or (may_add and all(bucket.state is BucketState.FINAL for bucket in self.order))

    def _all_dropped(self) -> bool:
        """True if the user has dropped the reduced gradients of every parameter that has one."""
        return not any(1 in bucket.still_in_grad() for bucket in self.order)

    def _write_report(self, begun: float, late: int) -> None:
        self.report = StepReport(
            exposed_ms=(time.perf_counter() - begun) * 1e3,
            late_buckets=late,
            events=[event for bucket in self.order for event in bucket.events],
        )

    def step_report(self) -> StepReport:
        """What the last finished step cost so far, its sync rules included."""
        if self.open:
            return self.report
        traffic = self.collectives.traffic
        return replace(self.report, bytes_sent=traffic.bytes_sent, collectives=traffic.collectives)


def _needs_zero(bucket: Bucket) -> bool:
    """Would adding to reduced gradients and reducing again give something else than the sum of both?"""
    size = dist.get_world_size(bucket.groups.data)
    factor = bucket.scale if bucket.op == "mean" else bucket.scale * size
    exact_mean = abs(factor - 1.0) < 1e-9
    has_rules = any(contract.rules for contract in bucket.contracts)
    return bucket.sharded or bucket.scale_later or not exact_mean or has_rules


def _call_after_backward(method: weakref.WeakMethod[Callable[[], None]]) -> bool:
    """Have a method called when the running backward pass has ended; False where none is running."""

    def call() -> None:
        alive = method()
        if alive is not None:
            alive()

    try:
        torch.autograd.Variable._execution_engine.queue_callback(call)
    except RuntimeError:  # gradients that are announced outside of a backward, such as weight gradients put off
        return False
    return True
