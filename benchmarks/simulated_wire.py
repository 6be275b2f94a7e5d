"""A simulated wire: real collectives whose handles are done no earlier than a network of chosen speed would be.

For measuring overlap on one machine, whose ranks have no network between them and no device that computes while the
processor is free. Results are those of the real collectives. One wire a wrapped model: a transfer begins when it is
launched and the one before it has ended, as on one NIC, and takes latency + bytes / bandwidth; the bytes are those that
`Traffic` counts for the collective. A wait sleeps, so that the processor is free until then.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from core.distributed import DistributedDataParallel
from core.distributed.wire.collectives import Collectives, Handle, InFlight, Op


@dataclass(frozen=True, slots=True)
class Wire:
    """A network as two numbers: seconds that each collective takes at any size, and bytes a second of a rank."""

    latency_s: float
    bytes_per_s: float

    def __post_init__(self) -> None:
        if not (math.isfinite(self.latency_s) and self.latency_s >= 0):
            raise ValueError(f"latency_s is {self.latency_s}; a wire's latency is finite and at least 0")
        if not self.bytes_per_s > 0:
            raise ValueError(f"bytes_per_s is {self.bytes_per_s}; a wire's bandwidth is above 0 (math.inf: no limit)")

    def transfer_s(self, nbytes: float) -> float:
        """Seconds that one collective occupies the wire, of which this rank sends `nbytes`."""
        return self.latency_s + nbytes / self.bytes_per_s


class WireQueue:
    """The transfers of one wire, in launch order; each begins when the one before it has ended."""

    def __init__(
        self,
        wire: Wire,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.wire = wire
        self.clock = clock
        self.sleep = sleep
        self.free_s = -math.inf  # when the last transfer ends

    def send(self, nbytes: float) -> Transfer:
        """Queue a collective of which this rank sends `nbytes`, launched now."""
        self.free_s = max(self.clock(), self.free_s) + self.wire.transfer_s(nbytes)
        return Transfer(self, self.free_s)


class Transfer(dist.Work):
    """One collective on a simulated wire, as a backend's work: done when its time has come."""

    def __init__(self, queue: WireQueue, done_s: float) -> None:
        super().__init__()
        self.queue = queue
        self.done_s = done_s

    def is_completed(self) -> bool:
        """True if its time has come."""
        return self.queue.clock() >= self.done_s

    def wait(self, *_timeout: object) -> bool:
        """Sleep until its time has come."""
        while (left_s := self.done_s - self.queue.clock()) > 0:
            self.queue.sleep(left_s)
        return True


class SimulatedCollectives(Collectives):
    """`inner`, with each collective that sends something also on a simulated wire. Counts in `inner`'s traffic."""

    def __init__(self, inner: Collectives, queue: WireQueue) -> None:
        super().__init__(ordered=inner.ordered, traffic=inner.traffic, clock=inner.clock)
        self.inner = inner
        self.queue = queue

    def start_all_reduce(self, tensor: torch.Tensor, group: dist.ProcessGroup, op: Op, scale: float) -> InFlight:
        """As `inner`; done no earlier than on the wire."""
        return self._on_wire(lambda: self.inner.start_all_reduce(tensor, group, op, scale))

    def start_reduce_scatter(self, full: torch.Tensor, group: dist.ProcessGroup, op: Op, scale: float) -> InFlight:
        """As `inner`; done no earlier than on the wire."""
        return self._on_wire(lambda: self.inner.start_reduce_scatter(full, group, op, scale))

    def start_all_gather(self, full: torch.Tensor, group: dist.ProcessGroup) -> InFlight:
        """As `inner`; done no earlier than on the wire."""
        return self._on_wire(lambda: self.inner.start_all_gather(full, group))

    def start_broadcast(self, tensor: torch.Tensor, group: dist.ProcessGroup, source: int) -> InFlight:
        """As `inner`; done no earlier than on the wire."""
        return self._on_wire(lambda: self.inner.start_broadcast(tensor, group, source))

    def _on_wire(self, launch: Callable[[], InFlight]) -> InFlight:
        bytes_before, calls_before = self.traffic.bytes_sent, self.traffic.collectives
        handle = launch()
        if self.traffic.collectives == calls_before:  # a group of one rank, or an empty tensor: nothing travels
            return handle
        transfer = self.queue.send(self.traffic.bytes_sent - bytes_before)
        return Handle((transfer,), first=handle)


def put_on_wire(ddp: DistributedDataParallel, wire: Wire) -> None:
    """Have the collectives of a wrapped model travel on one simulated wire from now on. On every rank, between steps.

    Raises ValueError for a model on a GPU: only the host would sleep, and its streams would continue.
    """
    if ddp.plan.device.type != "cpu":
        raise ValueError(f"a simulated wire makes the host sleep, and this model is on {ddp.plan.device}")
    queue = WireQueue(wire)
    for holder in (ddp, ddp.reducer, ddp.grad_sync, ddp.param_sync):
        holder.collectives = SimulatedCollectives(holder.collectives, queue)
