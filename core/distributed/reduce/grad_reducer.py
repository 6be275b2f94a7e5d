"""GradReducer: turns autograd's gradients into reduced buckets, in one launch order shared by all ranks of a stage.

Collectives match by order, so buckets are always launched in that order, whichever gradient arrives first. ``start`` or
``finish`` launches the rest. A rank that did not use a parameter contributes zeros, and no rank waits for it.

With ``every_microbatch`` the end of each backward launches every bucket. All ranks must run equally many backwards, so
they agree before each one. If a rank ends its step early, it adds zeros (``may_join``), or all ranks raise an error.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from enum import Enum

import torch
import torch.distributed as dist

from core.distributed.buffer.bucket import Bucket
from core.distributed.buffer.grad_attribute import attributes_alone, call_after_backward, weakly
from core.distributed.guard.agreement import ControlGroup, Moment, agree_on_step
from core.distributed.guard.finite import GradWatch, NonFiniteWatch
from core.distributed.reduce.fused_kernels import check_declared
from core.distributed.reduce.model_order import ModelOrder
from core.distributed.reduce.producer_streams import ProducerStreams
from core.distributed.wire.collective_events import CollectiveEvent
from core.distributed.wire.collectives import Collectives
from core.distributed.wire.overlap import measure_overlap
from core.groups.agree import SyncError
from core.watch.waiting import calling


class StepState(Enum):
    """ACCUMULATING -> LAUNCHING -> LAUNCHED -> REDUCED -> FINAL -> AWAITED -> ACCUMULATING."""

    ACCUMULATING = "accumulating"  # no gradient has come outside no_sync, so no rank has launched a bucket
    LAUNCHING = "launching"  # backward launches buckets
    LAUNCHED = "launched"  # every bucket is in flight; gradients that come now are late
    REDUCED = "reduced"  # reduced over the data groups; sync rules may still be due
    FINAL = "final"  # ready for the optimizer
    AWAITED = "awaited"  # a training forward has run since FINAL: some rank may have begun the next step


OPEN = (StepState.ACCUMULATING, StepState.LAUNCHING, StepState.LAUNCHED)


class Launches(Enum):
    """Time at which buckets are launched."""

    AT_THE_END = "at the end"  # `start` and `finish` launch all of them
    IN_BACKWARD = "in backward"  # each as soon as its gradients have arrived
    ONE_BY_ONE = "one by one"  # like IN_BACKWARD, but backward waits for each, so nothing overlaps


@dataclass(slots=True)
class StepReport:
    """Cost of one step's gradients: times in milliseconds, bytes sent by this rank, collectives it took part in.

    ``exposed_ms`` is host time from the last launch to the end of the last wait and sync rule, agreement between ranks
    included. On CUDA a wait only queues work, so read the times of ``events`` there instead.
    """

    exposed_ms: float = 0.0
    bytes_sent: int = 0
    collectives: int = 0
    late_buckets: int = 0
    events: list[CollectiveEvent] = field(default_factory=list)

    @property
    def hidden_share(self) -> float:
        """Return the share of collective time during which no rank waited."""
        return measure_overlap(self.events).hidden_share


class GradReducer:
    """Launches, orders and completes the buckets, in launch order, of one wrapped model chunk.

    Args:
        buckets, collectives, control: The buckets, their reductions, and the groups over which ranks agree on a step.
        problems: Returns messages about changes to the model since the wrap that its buffers cannot follow.
        launches: When buckets are launched.
        every_microbatch: True to reduce every backward, False to reduce only the last one of a step.
        may_join: True if a rank may run fewer backwards than others under ``every_microbatch``.
        watch: Finds NaN and Inf in gradients as they arrive, or None.
        pop_gathers: Returns the gathers of sharded parameters since the last call.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        collectives: Collectives,
        control: Sequence[ControlGroup],
        problems: Callable[[], list[str]],
        *,
        launches: Launches,
        every_microbatch: bool,
        may_join: bool,
        watch: NonFiniteWatch | None,
        pop_gathers: Callable[[], dict[str, list[str]]],
    ) -> None:
        self.buckets = list(buckets)  # in launch order
        on_device = self.buckets and self.buckets[0].device.type not in ("cpu", "meta")
        self.producers = ProducerStreams(self.buckets[0].device) if on_device else None
        self._join_streams: Callable[[], object] = int if self.producers is None else self.producers.join
        self.collectives = collectives
        self.control = list(control)
        self.problems = problems
        self.when = launches
        self.every_microbatch = every_microbatch
        self.may_join = may_join
        self.watch = watch
        self.scale_watch: GradWatch | None = None  # set by an optimizer
        self.pop_gathers = pop_gathers
        # Data groups first, as in `control`: ranks ask each other in this order which model is next.
        groups = [bucket.groups.data for entry in control for bucket in entry.buckets]
        groups += [group for bucket in self.buckets for group in bucket.groups.all]
        self.model_orders = [ModelOrder.of(group) for group in dict.fromkeys(groups) if dist.get_world_size(group) > 1]
        self.chunks: list[weakref.ref[GradReducer]] = []  # the pipeline's chunks on this rank, in launch order
        self.num_other_models = 0  # others on the same communicators; if any, buckets are launched in finalize only
        for order in self.model_orders:
            order.join(self)
        self.state = StepState.ACCUMULATING
        self.next = 0  # index into `buckets` of the bucket to launch next
        self.polled = 0  # index of the first launched bucket that was not seen done
        self.gradients = 0  # gradients of this step that have arrived on this rank
        self.microbatches = 0  # microbatches whose reduction has begun in this step
        self.force_all_reduce = self.in_microbatch = False  # the latter while the end of a backward is due
        self.no_sync_depth = 0
        self.at_begin: Callable[[], object] = int  # called when a step begins
        self.at_end: Callable[[], None] | None = None  # after finalize_model_grads, on all ranks
        self.written = (False, False)  # see StepAnswer
        self.refusals: list[str] = []  # why this step's gradients must not be used, until they are zeroed
        self.loads = self.steps = 0  # loads of weights since the last step; finalized steps, ever
        self.launches = 0  # since the wrap; the same on all ranks whenever they agree on a step
        self.report = StepReport()

    # -- backward ---------------------------------------------------------------------------------------------------

    def arrive(self, bucket: Bucket, index: int) -> None:
        if self.producers is not None:
            self.producers.record()
        if self.state not in OPEN:
            self._begin_by_gradient(bucket, index)
        self.gradients += 1
        bucket.used[index] = 1
        if self.watch is not None:
            self.watch.look(bucket, index)
        if self.scale_watch is not None:
            self.scale_watch.look(bucket, index)
        if self.when is Launches.AT_THE_END or (self.no_sync_depth and not self.every_microbatch):
            return
        if self.num_other_models and self.state is StepState.ACCUMULATING:
            self.count_other_models()  # another model may have been deleted since
        if self.every_microbatch and not self.in_microbatch:
            self._begin_microbatch()
        if self.state is StepState.ACCUMULATING:
            self.state = StepState.LAUNCHING
        if self.polled < self.next and self.buckets[self.polled].poll():
            self.polled += 1
        bucket.arrive(index)
        if self.next < len(self.buckets):
            following = self.buckets[self.next]
            if bucket is following and bucket.memory.pool is not None:
                self._join_streams()
                bucket.fill(index)
            if following.step.pending <= 0:
                self._launch_ready()

    def count_other_models(self) -> None:
        """Count other models on the same communicators, when a step begins and when a model is wrapped or deleted."""
        chunks = self.pipeline_chunks()
        self.num_other_models = sum(order.count_others(chunks) for order in self.model_orders)

    @property
    def shards_gradients(self) -> bool:
        """True if backward waits for other ranks, because gradients borrow memory until they are reduced."""
        return any(bucket.memory.pool is not None for bucket in self.buckets)

    def _launch_ready(self) -> None:
        """Launch every bucket that is ready, in this reducer and in the pipeline's other chunks."""
        try:
            for chunk in self.pipeline_chunks() if self.chunks else (self,):
                if chunk.state is StepState.LAUNCHING and not chunk.num_other_models:
                    while chunk.next < len(chunk.buckets) and chunk.buckets[chunk.next].step.pending <= 0:
                        chunk._launch_next()
                if chunk.next < len(chunk.buckets) or chunk.state not in OPEN:
                    return  # later chunks launch when this one has launched all
        except RuntimeError:
            with self.named("backward"):
                raise

    def _launch_next(self, *, watched: bool = True) -> None:
        bucket = self.buckets[self.next]
        self._join_streams()
        bucket.launch(self.collectives, watched=watched)
        self.next += 1
        self.launches += 1
        for order in self.model_orders:
            order.launches += 1
        if self.when is Launches.ONE_BY_ONE:
            bucket.wait()

    def _launch_rest(self, *, watched: bool = True) -> None:
        while self.next < len(self.buckets):
            self._launch_next(watched=watched)

    def _learn(self) -> None:
        """Expect as many gradients in the next step as came in this one, unless none came."""
        if any(any(bucket.step.arrivals) for bucket in self.buckets):
            for bucket in self.buckets:
                bucket.expected = list(bucket.step.arrivals)

    # -- microbatch reductions --------------------------------------------------------------------------------------

    def _begin_microbatch(self) -> None:
        """Begin a reduction at a backward's first gradient. Collective; SyncError on all ranks if some end the step."""
        self.in_microbatch = call_after_backward(weakly(self._end_microbatch))
        if self.num_other_models or (self.microbatches and not self.in_microbatch):
            return  # gradients from outside a backward join the latest reduction
        with self.named("backward"):
            if self.microbatches:
                self._launch_rest()  # a backward failed, and other ranks wait for its buckets
            self._agree(Moment.BACKWARD)
            self._next_microbatch()

    def _next_microbatch(self) -> None:
        if self.microbatches:
            self._learn()
            self._join_streams()
            for bucket in self.buckets:
                bucket.next_microbatch()
            self.next = self.polled = 0
        self.microbatches += 1
        self.state = StepState.LAUNCHING

    def _end_microbatch(self) -> None:
        """Launch the buckets a backward left. Finalize does so if other models share the communicator."""
        self.in_microbatch = False
        if self.open and not self.num_other_models:
            with self.named("backward"), attributes_alone():
                self._launch_rest()

    def complete_microbatch(self) -> None:
        """Launch buckets left by a failed backward or by shared communicators. Collective after a backward."""
        if self.every_microbatch and self.state is StepState.LAUNCHING:
            self.start()

    def _agree(self, moment: Moment) -> bool:
        """Agree with all ranks. True if some ranks begin a backward while others end the step."""
        return agree_on_step(self.control, moment, self.microbatches, self.launches, may_join=self.may_join).continues

    # -- the beginning of a step ------------------------------------------------------------------------------------

    @property
    def open(self) -> bool:
        """True if more gradients of this step may arrive."""
        return self.state in OPEN

    @property
    def has_launched(self) -> bool:
        return self.state in (StepState.LAUNCHING, StepState.LAUNCHED)

    def begin(self, *, keep: bool = True) -> None:
        """Begin a new step: every bucket accumulates again. The memory is unchanged.

        With ``keep``, the step adds to the reduced gradients that are still in ``.grad``, as torch does.
        """
        self._join_streams()
        self.at_begin()
        for bucket in self.buckets:
            bucket.reset(keep=keep)
        if self.watch is not None:
            self.watch.reset()
        if self.scale_watch is not None:
            self.scale_watch.reset()
        self.report = self.step_report()
        self.collectives.begin_step()
        self.next = self.polled = self.gradients = self.microbatches = 0
        self.in_microbatch = self.force_all_reduce = False
        self.refusals, self.state = [], StepState.ACCUMULATING
        self.count_other_models()  # a deleted model is not waited for from here on

    def _begin_by_gradient(self, bucket: Bucket, index: int) -> None:
        if self.state is StepState.REDUCED and not bucket.step.is_full_grad:
            raise SyncError(
                f"rank {dist.get_rank()}: a gradient of {bucket.contracts[index].name!r} came after finish_grad_sync, "
                "and the shard that holds the reduced ones cannot take it. Call finalize_model_grads, then "
                "zero_grad_buffer() before the next backward; or finish after the last backward"
            )
        self.begin()

    def note_forward(self) -> None:
        """Record that a training forward begins: after a finalized step, other ranks may soon have gradients."""
        if self.state is StepState.FINAL:
            self.state = StepState.AWAITED

    @property
    def has_new_step(self) -> bool:
        """True if any rank may have new gradients: also if reduced ones were dropped, or after a training forward."""
        if self.open or not any(1 in bucket.attribute.accumulates for bucket in self.buckets):
            return True
        return self.state is StepState.AWAITED

    def discard(self) -> None:
        """Drop a step that has begun. Collective if any rank may have launched one of its buckets.

        Backward may have launched different numbers of buckets on different ranks, so every rank launches the rest
        first. A leftover collective on one rank would otherwise be paired with one of another step.
        """
        with self.named("zero_grad_buffer"):
            if self.state is StepState.LAUNCHING:
                self.start()
            try:
                if self.state is StepState.LAUNCHED:
                    self._agree(Moment.DROP)
            finally:
                self._drain()
        self.begin(keep=False)

    def _drain(self) -> None:
        """Wait for all collectives in flight before their memory is reused."""
        for bucket in self.buckets:
            bucket.wait()

    # -- the end of a step ------------------------------------------------------------------------------------------

    def agree_on_order(self) -> None:
        """Raise SyncError on all ranks, before any collective, if they are about to reduce different models."""
        if not self.has_new_step or self.pipeline_chunks()[0] is not self:
            return
        shared = [order for order in self.model_orders if order.shared]
        for chunk in self.pipeline_chunks() if shared else ():
            chunk.start(early=True)  # other ranks may wait in backward for buckets not launched here
        for order in shared:
            refusal = order.refusal(self)
            if refusal is not None:
                raise SyncError(refusal)

    def start(self, *, force_all_reduce: bool = False, early: bool = False, watched: bool = True) -> None:
        """Launch the remaining buckets in order. Asynchronous: ``finish`` completes them. No-op on a complete step.

        ``early`` launches nothing if other models use the same communicators. For ``watched`` see Bucket.launch.
        """
        if not self.open:
            if not self.has_new_step:
                return
            self.begin()
        self.force_all_reduce = self.force_all_reduce or force_all_reduce
        if self.state is StepState.LAUNCHED or (early and self.num_other_models):
            return
        for chunk in self.pipeline_chunks():
            if chunk is self:
                break
            chunk.start(force_all_reduce=force_all_reduce)
        if self.every_microbatch:
            if self.microbatches:  # left by a failed backward, or from outside one: other ranks may wait
                self._launch_rest()
            while self._agree(Moment.END):  # another rank has more backwards: add zeros to each
                self._next_microbatch()
                self._launch_rest()
        self._launch_rest(watched=watched)
        self.state = StepState.LAUNCHED

    def finish(self, *, force_all_reduce: bool = False, then: Callable[[Bucket], None] | None = None) -> None:
        """Complete the reduction over the data groups. Collective, after ``agree_on_order``. Idempotent.

        ``then`` is called with each bucket once it is reduced over its data group, in launch order.
        """
        for chunk in self.pipeline_chunks():  # no chunk may launch after a chunk's agreement on some ranks only
            if chunk is self or chunk.state is not StepState.REDUCED:
                chunk.start(force_all_reduce=force_all_reduce, watched=chunk is not self)
        if not self.open:
            return
        begun = time.perf_counter()
        self._join_streams()
        with self.named("finalize_model_grads"):
            late = self._complete(then)
        self._learn()
        self.state = StepState.REDUCED
        for bucket in self.buckets:
            bucket.attach()
        self.report = StepReport(
            exposed_ms=(time.perf_counter() - begun) * 1e3,
            late_buckets=late,
            events=[event for bucket in self.buckets for event in bucket.step.events],
        )

    def _complete(self, then: Callable[[Bucket], None] | None) -> int:
        """Agree, wait for every bucket, and return how many got gradients after their launch."""
        # After the last launch, so that on a group shared with the buckets every rank has the same order of calls.
        try:
            answer = agree_on_step(
                self.control,
                Moment.FINISH,
                self.microbatches,
                self.launches,
                problems=[*self.refusals, *self._spoilt(), *self.problems()],
                has_gradients=self.gradients > 0,
                begun_by_forward=any(1 in bucket.step.accumulates for bucket in self.buckets),
                wants_whole=self.force_all_reduce,
                gathers=self.pop_gathers(),
                loads=self.loads,
            )
            self.written, self.loads = answer.written, 0
        except SyncError:
            self.force_all_reduce = False
            with suppress(RuntimeError):  # flights of this rank alone fail; the agreement's error says why
                self._drain()
            for bucket in self.buckets:
                bucket.watch()
            raise
        for bucket in self.buckets:
            bucket.all_reduce_replicas(self.collectives)
        for bucket in self.buckets:
            bucket.complete()
            if id(bucket) in answer.late:
                bucket.add_late(self.collectives)
            if bucket.groups.data in answer.whole:
                bucket.all_gather_grads(self.collectives)
            if then is not None:
                then(bucket)
        return len(answer.late)

    def _spoilt(self) -> list[str]:
        """Return messages about gradients dropped or added to too late. Checked last, because a loop may zero both."""
        dropped = [bucket.attribute.record_dropped() for bucket in self.buckets]
        lost = next((bucket.step.lost for bucket in self.buckets if bucket.step.lost is not None), None)
        if lost is not None and self.gradients > 0:
            return [
                f"gradients came while that of {lost!r}, already reduced, was still in `.grad`, and what has "
                "multiplied it (rules, tokens, an optimizer's step) would multiply a part of the sum twice. Call "
                "zero_grad_buffer() (or optimizer.zero_grad()) between finalize_model_grads and the next backward; to "
                "accumulate microbatches finalize after the last one"
            ]
        return [
            f"the gradient of {name!r} was dropped through `.grad` (p.grad = None, or zero_grad of torch) after its "
            "reduction had begun, and is in it. Use zero_grad_buffer() of the wrapped model, or zero_grad() of its "
            "optimizer, or run the backward under no_sync()"
            for name in dropped
            if name is not None
        ]

    def close(self) -> None:
        if self.state is not StepState.REDUCED:
            raise SyncError(f"a step that is {self.state.value} cannot be handed to the optimizer; reduce it first")
        for bucket in self.buckets:
            bucket.close()
            bucket.attach()
        self.state = StepState.FINAL
        self.steps += 1

    # -- around it --------------------------------------------------------------------------------------------------

    def pipeline_chunks(self) -> list[GradReducer]:
        """Return the pipeline's chunks on this rank in launch order, or only this reducer without a pipeline."""
        return [chunk for reference in self.chunks if (chunk := reference()) is not None] or [self]

    def named(self, call: str) -> calling:
        """Return a context that names the user's call and the step in messages about waiting for ranks."""
        return calling(call, self.steps + 1)

    def step_report(self) -> StepReport:
        """Return the cost of the last finished step so far, its sync rules included."""
        if self.open:
            return self.report
        traffic = self.collectives.traffic
        return replace(self.report, bytes_sent=traffic.bytes_sent, collectives=traffic.collectives)


def arrived(reducer_of: weakref.ref[GradReducer], number: int, index: int, param: torch.Tensor) -> None:
    """Handle autograd's addition to the gradient of parameter ``index`` in bucket ``number``. Hook of all of them."""
    reducer = reducer_of()
    if reducer is None:
        return
    bucket = reducer.buckets[number]
    if param.__dict__.get("grad_added_to_main_grad"):
        check_declared(param, bucket.contracts[index].name)
    reducer.arrive(bucket, index)


def arrived_at_sharded(reducer_of: weakref.ref[GradReducer], number: int, index: int, param: torch.Tensor) -> None:
    """Call ``arrived`` with torch functions disabled, which avoids a class check for each sharded parameter."""
    with attributes_alone():
        arrived(reducer_of, number, index, param)


def link_chunks(reducers: Sequence[GradReducer]) -> None:
    """Give this rank's chunks (in the model's order) one launch order: the last chunk's buckets first."""
    chunks = [weakref.ref(reducer) for reducer in reversed(reducers)]
    for reducer in reducers:
        reducer.chunks = chunks
