"""Bucket size that leaves the least communication exposed: one measured backward, and a simulated queue of launches.

Small buckets pay a latency each, large ones leave late. Between the two lies a minimum, and it can be computed: when
each gradient became ready is measured once, the buckets of any size follow from the layout's own rules, and a wire is a
latency and a bandwidth (given, or fitted from steps with two bucket sizes). What the model leaves out: processor time
that launching costs, and ranks that are not ready at the same time.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import nn

from benchmarks.simulated_wire import Wire
from core.distributed.buffer.grad_buffer import dtype_named
from core.distributed.layout.model_plan import param_specs
from core.distributed.layout.param_layout import ParamLayout, ParamSpec, group_by_key, launch_order, plan_buffer
from core.distributed.wire.collective_events import CollectiveEvent

if TYPE_CHECKING:
    from core.distributed.reduce.grad_reducer import StepReport


@dataclass(slots=True)
class BackwardTimes:
    """One backward on this rank. ready_s: by parameter, seconds from its begin to the gradient; absent where none came.

    specs: the trainable parameters in registration order. shards: ranks that share a copy of the optimizer's state.
    """

    specs: tuple[ParamSpec, ...]
    shards: int = 1
    sharded: bool = False
    streamed: bool = False  # are gradients sharded too?
    ready_s: dict[str, float] = field(default_factory=dict)
    end_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Candidate:
    """A bucket size (elements), the number of buckets it makes, and the exposed time it is predicted to leave."""

    bucket_size: int
    buckets: int
    exposed_ms: float


@dataclass(frozen=True, slots=True)
class BucketAdvice:
    """A value for `DistributedDataParallelConfig(bucket_size=...)`, and the curve it was chosen from."""

    bucket_size: int
    exposed_ms: float
    curve: tuple[Candidate, ...]  # by growing bucket size

    def table(self) -> str:
        """One line a candidate, the chosen one marked."""
        lines = [f"{'bucket_size':>14}{'buckets':>9}{'exposed ms':>12}"]
        for each in self.curve:
            mark = "  <- bucket_size" if each.bucket_size == self.bucket_size else ""
            lines.append(f"{each.bucket_size:>14,}{each.buckets:>9}{each.exposed_ms:>12.2f}{mark}")
        return "\n".join(lines)


@contextmanager
def record_backward(model: nn.Module, clock: Callable[[], float] = time.perf_counter) -> Iterator[BackwardTimes]:
    """Time one backward of a wrapped model: a `with` around `loss.backward()`, not the first one of a process.

    On a GPU a hook runs when work was queued, not when it is done: time there with a synchronizing `clock`. Not inside
    a compiled function. No collective.
    """
    wrapped: Any = model
    plan, config = wrapped.plan, wrapped.ddp_config
    specs = tuple(param_specs(plan.params, plan.contracts, config))
    shards = max((buffer.shards for buffer in plan.layout.buffers), default=1)
    times = BackwardTimes(specs, shards, config.sharded, config.shards_gradients)
    begin = clock()

    def note(name: str) -> Callable[[Any], None]:
        def hook(_param: Any) -> None:
            times.ready_s[name] = clock() - begin

        return hook

    hooks = [param.register_post_accumulate_grad_hook(note(name)) for name, param in plan.params.items()]
    try:
        yield times
        times.end_s = clock() - begin
    finally:
        for hook in hooks:
            hook.remove()


def sent_per_byte(report: StepReport) -> float:
    """Bytes that this rank sent for each byte of gradients: what a step's report has counted."""
    total = sum(event.nbytes for event in report.events)
    return report.bytes_sent / total if total else 0.0


def exposed_after(buckets: Sequence[tuple[float | None, float]], wire: Wire, end_s: float) -> float:
    """Seconds that a backward which ends at `end_s` waits for its buckets: (ready_s, bytes sent) in launch order.

    A bucket is launched when it is ready and the one before it was launched, and travels when the wire is free. One
    that waits for no gradient (ready_s None) is launched with the one before it; one that sends nothing costs nothing.
    """
    launched_s = free_s = 0.0
    for ready_s, sent_bytes in buckets:
        if ready_s is not None:
            launched_s = max(launched_s, ready_s)
        if sent_bytes:
            free_s = max(free_s, launched_s) + wire.transfer_s(sent_bytes)
    return max(0.0, free_s - end_s)


def buckets_of(times: BackwardTimes, bucket_size: int, sent: float) -> list[tuple[float | None, float]]:
    """(ready_s, bytes sent) of each bucket that `bucket_size` would make of this model, in launch order."""
    planned = [
        plan_buffer(
            specs, bucket_size=bucket_size, shards=times.shards, sharded=times.sharded, strict_size=times.streamed
        )
        for specs in group_by_key(times.specs).values()
    ]
    buckets = []
    for buffer, index in launch_order(ParamLayout(tuple(planned)), [spec.name for spec in times.specs]):
        bucket = planned[buffer].buckets[index]
        itemsize = dtype_named(planned[buffer].key.grad_dtype).itemsize
        came = [times.ready_s[slot.name] for slot in bucket.slots if slot.name in times.ready_s]
        buckets.append((max(came, default=None), bucket.numel * itemsize * sent))
    return buckets


def advise_bucket_size(
    times: BackwardTimes, wire: Wire, *, sent_per_byte: float, candidates: Sequence[int] | None = None
) -> BucketAdvice:
    """Predict the exposed time of each candidate bucket size (elements) and choose the smallest.

    times: a backward, by `record_backward`. wire: the network, given or by `fit_wire`. sent_per_byte: bytes sent for a
    byte of gradients, 2 (n - 1) / n for an all-reduce over n ranks, half of it for a reduce-scatter; the function of
    that name reads it from a step's report. candidates: by default 12 sizes or fewer, from the whole model down, each
    1 / sqrt(2) or less of the one before it, and no two with the same buckets. Of equal predictions the largest size
    wins: fewer launches.

    Local arithmetic. Ranks must be given one size: take rank 0's and broadcast it. Raises ValueError where there is
    nothing to advise on.

        with record_backward(model) as times:
            loss_of(model, batch).backward()
        finalize_model_grads([model])
        advice = advise_bucket_size(times, Wire(30e-6, 12e9), sent_per_byte=sent_per_byte(model.step_report()))
        DistributedDataParallelConfig(overlap_grad_reduce=True, bucket_size=advice.bucket_size)
    """
    if not times.ready_s:
        raise ValueError(
            f"none of {len(times.specs)} parameters had a gradient while the backward was recorded; put "
            "`with record_backward(model) as times:` around loss.backward()"
        )
    if candidates is not None and (not candidates or min(candidates) < 1):
        raise ValueError(f"candidates are {list(candidates)}; give bucket sizes of at least 1 element")
    curve: dict[tuple[float, ...], Candidate] = {}
    for size in sorted(candidates if candidates is not None else default_candidates(times.specs)):
        buckets = buckets_of(times, size, sent_per_byte)
        exposed_ms = 1e3 * exposed_after(buckets, wire, times.end_s)
        # Sizes that make the same buckets are one candidate: the largest of them, or each that the caller named.
        key = tuple(nbytes for _, nbytes in buckets) if candidates is None else (float(size),)
        curve[key] = Candidate(size, len(buckets), exposed_ms)
    found = sorted(curve.values(), key=lambda each: each.bucket_size)
    best = min(found, key=lambda each: (round(each.exposed_ms, 6), -each.bucket_size))
    return BucketAdvice(best.bucket_size, best.exposed_ms, tuple(found))


def default_candidates(specs: Sequence[ParamSpec], most: int = 24) -> list[int]:
    """Bucket sizes from the whole model down to its smallest parameter, each 1 / sqrt(2) of the one before."""
    total = sum(spec.numel for spec in specs)
    smallest = max(1, min((spec.numel for spec in specs if spec.numel), default=1))
    sizes = [math.ceil(total * 2 ** (-step / 2)) for step in range(most)]
    return [size for size in sizes if size >= smallest] or [max(1, total)]


def fit_wire(steps: Sequence[Sequence[CollectiveEvent]], *, sent_per_byte: float) -> Wire:
    """The latency and bandwidth that explain how long buckets of different sizes took: least squares over their times.

    steps: `overlap_report().reductions` of measured steps, with at least two bucket sizes among them. A bucket takes
    from its launch, or the end of the one before it, to its own end. Only ends that are exact count: a collective that
    a hook found done may have been done for a while. Raises ValueError where too few are left.
    """
    points: list[tuple[float, float]] = []  # (bytes sent, seconds)
    for events in steps:
        before: CollectiveEvent | None = None
        for event in events:
            if event.launched_s is not None and event.done_s is not None:
                begin_s, known = event.launched_s, True
                if before is not None and before.done_s is not None and before.done_s > begin_s:
                    begin_s, known = before.done_s, before.end_is_exact
                if event.end_is_exact and known:
                    points.append((event.nbytes * sent_per_byte, event.done_s - begin_s))
                before = event
    if len({nbytes for nbytes, _ in points}) < 2:
        raise ValueError(
            f"{len(points)} buckets with an exact end, of {len({nbytes for nbytes, _ in points})} different sizes, do "
            "not separate a latency from a bandwidth; pass steps with two bucket sizes with a wait for the last bucket"
        )
    mean_bytes = sum(nbytes for nbytes, _ in points) / len(points)
    mean_s = sum(seconds for _, seconds in points) / len(points)
    spread = sum((nbytes - mean_bytes) ** 2 for nbytes, _ in points)
    slope = sum((nbytes - mean_bytes) * (seconds - mean_s) for nbytes, seconds in points) / spread
    if slope <= 0:
        raise ValueError(
            f"larger buckets did not take longer ({slope * 1e9:.3g} s a GB over {len(points)} buckets): what was "
            "measured is not the wire; measure larger buckets, or give the Wire"
        )
    return Wire(max(0.0, mean_s - slope * mean_bytes), 1.0 / slope)
