"""Collectives: the only file that calls torch.distributed reductions for gradients and gathers for parameters.

Every call takes the name of its bucket or its purpose, is counted (bytes this rank sends, number of calls), and returns
a Flight; ``flight.wait()`` completes it. Some of the work may happen only in ``wait()``. Flights of one group must
therefore be waited for in launch order.

Only this file records the launch, end and wait of collectives: in a CollectiveEvent, and as the spans
"core::reduce_scatter bucket 0 (...)" and "core::wait reduce_scatter bucket 0 (...)" of torch's profiler.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist
from torch.profiler import record_function

from core.distributed.wire.backend import backend_of
from core.distributed.wire.collective_events import CollectiveEvent, HostClock, StreamClock
from core.distributed.wire.rank_order_sum import add_in_rank_order, split_evenly
from core.distributed.wire.shared_memory import HostChannel, channel_of
from core.watch.waiting import complete, waiting

SLOW_NETWORK = 50e6  # bytes a second; on a slower network a wait may be mistaken for a hang

Op = Literal["sum", "mean", "max"]

# torch 2.13 renames the flat collectives; 2.11 has only the old names.
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


@dataclass(slots=True)
class Traffic:
    """Data that this rank has sent in this step."""

    bytes_sent: int = 0
    collectives: int = 0

    def count(self, nbytes: float) -> None:
        self.bytes_sent += int(nbytes)
        self.collectives += 1


class InFlight(Protocol):
    """A launched collective."""

    def is_done(self) -> bool:
        """Make all progress that needs no other rank. True if ``wait`` has nothing left to do."""

    def wait(self) -> None:
        """Complete the collective. Idempotent."""


@dataclass(slots=True)
class Handle:
    """A torch.distributed collective in flight."""

    works: Sequence[dist.Work] = ()
    finish: Callable[[], object] | None = None
    keep: tuple[torch.Tensor, ...] = ()  # memory the backend reads or writes until the wait
    first: InFlight | None = None  # must be complete before `finish`

    def is_done(self) -> bool:
        # Poll the backend. A callback would run in its thread, which may outlive the interpreter.
        return (self.first is None or self.first.is_done()) and all(work.is_completed() for work in self.works)

    def wait(self) -> None:
        if self.first is not None:
            self.first.wait()
        for work in self.works:
            complete(work, takes_s(self.keep[0])) if self.keep and self.keep[0].is_cpu else work.wait()
        if self.finish is not None:
            self.finish()
        self.works, self.finish, self.keep, self.first = (), None, (), None


@dataclass(slots=True, eq=False)
class Flight:
    """A collective in flight, returned by every call of Collectives. Records its end and wait."""

    inner: InFlight
    event: CollectiveEvent
    clock: HostClock
    kind: str
    group: dist.ProcessGroup
    waited: bool = False

    def is_done(self) -> bool:
        return self.clock.look(self.event, self.inner.is_done)

    def wait(self) -> None:
        """Complete the collective. Idempotent. Wait for the flights of one group in launch order."""
        if self.waited:
            return
        self.is_done()
        name = self.event.name
        with record_function(f"core::wait {self.kind} {name}"), waiting(f"the {self.kind} of", self.group, name):
            self.clock.mark(self.event, "wait_start_s")
            self.inner.wait()
            self.clock.end(self.event)
        self.waited = True


class Collectives:
    """Gradient collectives of one wrapped model.

    Reductions and all-gathers are asynchronous and in place: the contiguous tensor is valid once the flight's
    ``wait()`` returns. Every rank of the group must make the call. ``name`` is the bucket, or the purpose, for messages
    and profiles.

    In ordered mode (deterministic_reduction, or fp32 accumulation of 16-bit gradients) the parts of a bucket are
    exchanged and added locally, rank 0 first. Sums then do not depend on bucket borders or on the backend's algorithm.
    Over gloo, reduce-scatter always adds in rank order, because gloo's own reduce-scatter is slower.

    Args:
        ordered: Add in rank order with every backend.
        traffic: Counts bytes and calls.
        channels: Memory that ranks of a group have mapped from each other. Tensors in it are reduced there.
        clock: Records the times of collectives.
    """

    def __init__(
        self,
        *,
        ordered: bool = False,
        traffic: Traffic | None = None,
        channels: Sequence[HostChannel] = (),
        clock: HostClock | None = None,
    ) -> None:
        self.ordered = ordered
        self.traffic = traffic if traffic is not None else Traffic()
        self.channels = list(channels)
        self.clock = clock if clock is not None else HostClock()

    def begin_step(self) -> None:
        self.traffic.bytes_sent = self.traffic.collectives = 0
        self.clock.begin_step()

    # -- what can be launched ---------------------------------------------------------------------------------------

    def all_reduce(
        self, tensor: torch.Tensor, group: dist.ProcessGroup, name: str, op: Op = "sum", *, scale: float = 1.0
    ) -> Flight:
        """Multiply a tensor by ``scale`` and reduce it over a group."""
        return self._launch("all_reduce", name, self.start_all_reduce, tensor, group, op, scale=scale)

    def reduce_scatter(
        self, full: torch.Tensor, group: dist.ProcessGroup, name: str, op: Op = "sum", *, scale: float = 1.0
    ) -> Flight:
        """Multiply a tensor [n * size] by ``scale``, reduce it over a group, and keep this rank's part, [n].

        The other parts are overwritten and undefined afterwards.
        """
        return self._launch("reduce_scatter", name, self.start_reduce_scatter, full, group, op, scale=scale)

    def all_gather(self, full: torch.Tensor, group: dist.ProcessGroup, name: str) -> Flight:
        """Gather every rank's part, [n], of a tensor [n * size], in which this rank's part is valid."""
        return self._launch("all_gather", name, self.start_all_gather, full, group)

    def gather_rows(self, values: torch.Tensor, group: dist.ProcessGroup, name: str) -> torch.Tensor:
        """Gather values [n] from every rank, wait, and return [ranks, n] in rank order."""
        rows = values.repeat(dist.get_world_size(group), 1)

        def start(rows: torch.Tensor, group: dist.ProcessGroup) -> InFlight:
            return Handle((_all_gather(rows.view(-1), values, group=group, async_op=True),), None, (rows,))

        self._launch("all_gather", name, start, rows, group).wait()
        return rows

    def broadcast(self, tensor: torch.Tensor, group: dist.ProcessGroup, name: str, source: int = 0) -> None:
        """Copy a tensor from rank ``source`` of the group to all others, and wait."""
        self._launch("broadcast", name, self.start_broadcast, tensor, group, source).wait()

    def _launch(
        self,
        kind: str,
        name: str,
        start: Callable[..., InFlight],
        tensor: torch.Tensor,
        group: dist.ProcessGroup,
        *how: Any,
        **scale: float,
    ) -> Flight:
        """Begin a collective. Recording its launch and wait costs about 10 us without a profiler."""
        event = CollectiveEvent(name, tensor.nbytes)
        with record_function(f"core::{kind} {name}"):
            self.clock.mark(event, "launched_s")
            if dist.get_world_size(group) == 1 or tensor.numel() == 0:
                scale_now(tensor, **scale)
                inner: InFlight = Handle()
            else:
                inner = start(tensor, group, *how, *scale.values())
        if isinstance(self.clock, StreamClock):
            self.clock.follow(event, _works_of(inner))
        return Flight(inner, event, self.clock, kind, group)

    # -- the steps between several ranks; overridden by other gradient formats and by a simulated network ------------

    def start_all_reduce(self, tensor: torch.Tensor, group: dist.ProcessGroup, op: Op, scale: float) -> InFlight:
        size = dist.get_world_size(group)
        mapped = None if op == "max" else channel_of(self.channels, tensor, group)
        if mapped is None or self.ordered:  # ordered: the product is rounded before the sum in every case
            scale = scale_now(tensor, scale)
        self.traffic.count(2 * (size - 1) / size * tensor.numel() * tensor.element_size())
        if mapped is not None:
            return mapped.all_reduce(tensor, scale=scale, mean=op == "mean")
        if self.ordered and op in ("sum", "mean"):
            return self._ordered_all_reduce(tensor, group, mean=op == "mean")
        reduce_op, divide = _backend_op(op, tensor, group)
        work = dist.all_reduce(tensor, op=reduce_op, group=group, async_op=True)
        return Handle((work,), partial(tensor.div_, size) if divide else None, (tensor,))

    def start_reduce_scatter(self, full: torch.Tensor, group: dist.ProcessGroup, op: Op, scale: float) -> InFlight:
        size, rank = dist.get_world_size(group), dist.get_rank(group)
        mapped = channel_of(self.channels, full, group)
        exchanged = mapped is None and (self.ordered or backend_of(group, full.device) == "gloo")
        if self.ordered or not (mapped or exchanged):
            scale = scale_now(full, scale)
        self.traffic.count((size - 1) / size * full.numel() * full.element_size())
        if mapped is not None:
            return mapped.reduce_scatter(full, scale=scale, mean=op == "mean")
        part = full.numel() // size
        shard = full[rank * part : (rank + 1) * part]
        if exchanged:
            received = torch.empty_like(full)
            work = dist.all_to_all_single(received, full, group=group, async_op=True)
            parts = received.view(size, part).unbind()
            return Handle((work,), lambda: add_in_rank_order(parts, shard, scale, op == "mean"), (full,))
        reduce_op, divide = _backend_op(op, full, group)
        work = _reduce_scatter(shard, full, op=reduce_op, group=group, async_op=True)
        return Handle((work,), partial(shard.div_, size) if divide else None, (full,))

    def start_all_gather(self, full: torch.Tensor, group: dist.ProcessGroup) -> InFlight:
        size, rank = dist.get_world_size(group), dist.get_rank(group)
        self.traffic.count((size - 1) / size * full.numel() * full.element_size())
        channel = channel_of(self.channels, full, group)
        if channel is not None:
            return channel.all_gather(full)
        part = full.numel() // size
        if backend_of(group, full.device) == "gloo":
            # One broadcast a rank, all at once, is faster than gloo's all-gather (2 to 6 times from 1 to 64 MB).
            parts = full.view(-1).split(part)
            works = [dist.broadcast(each, group=group, group_src=r, async_op=True) for r, each in enumerate(parts)]
            return Handle(works, None, (full,))
        work = _all_gather(full, full[rank * part : (rank + 1) * part], group=group, async_op=True)
        return Handle((work,), None, (full,))

    def start_broadcast(self, tensor: torch.Tensor, group: dist.ProcessGroup, source: int) -> InFlight:
        self.traffic.count(tensor.numel() * tensor.element_size())
        work = dist.broadcast(as_bytes(tensor), group=group, group_src=source, async_op=True)
        return Handle((work,), None, (tensor,))

    def _ordered_all_reduce(self, tensor: torch.Tensor, group: dist.ProcessGroup, *, mean: bool) -> Handle:
        size, rank = dist.get_world_size(group), dist.get_rank(group)
        flat = tensor.view(-1)
        sizes = split_evenly(flat.numel(), size)
        parts = list(flat.split(sizes))
        received = torch.empty(size * sizes[rank], dtype=flat.dtype, device=flat.device)
        work = dist.all_to_all_single(
            received, flat, output_split_sizes=[sizes[rank]] * size, input_split_sizes=sizes, group=group, async_op=True
        )

        def finish() -> None:
            add_in_rank_order(received.view(size, -1).unbind(), parts[rank], 1.0, mean)
            sends = [
                dist.broadcast(part, group=group, group_src=r, async_op=True)
                for r, part in enumerate(parts)
                if part.numel()
            ]
            for send in sends:
                complete(send, takes_s(flat)) if flat.is_cpu else send.wait()

        return Handle((work,), finish, (flat, received))


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """View a contiguous tensor of 8-bit floats, which backends do not support, as bytes; return others unchanged."""
    return tensor.view(torch.uint8) if tensor.is_floating_point() and tensor.dtype.itemsize == 1 else tensor


def takes_s(tensor: torch.Tensor) -> float:
    """Return the seconds that a collective of a CPU tensor may take over a slow network."""
    return tensor.nbytes / SLOW_NETWORK


def _works_of(flight: InFlight | None) -> list[dist.Work]:
    """Return the backend's handles of a collective."""
    return [*_works_of(flight.first), *flight.works] if isinstance(flight, Handle) else []


def _backend_op(op: Op, tensor: torch.Tensor, group: dist.ProcessGroup) -> tuple[Any, bool]:
    """Return the backend's operation, and True if its result must still be divided: gloo cannot average."""
    if op == "mean":
        averages = backend_of(group, tensor.device) == "nccl"
        return (dist.ReduceOp.AVG, False) if averages else (dist.ReduceOp.SUM, True)
    return dist.ReduceOp.MAX if op == "max" else dist.ReduceOp.SUM, False


def scale_now(tensor: torch.Tensor, scale: float = 1.0) -> float:
    """Multiply a tensor in place, and return the factor that is left to apply: 1."""
    if scale != 1.0:
        tensor.mul_(scale)
    return 1.0
