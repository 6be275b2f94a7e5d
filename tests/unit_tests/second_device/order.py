"""Checks the order of what runs on the streams of the second device, though every operator computes at once.

Each launch, event and wait is entered into torch's vector clocks (`torch.cuda._sanitizer`). An access that is not
ordered after the last write of a range of memory, or a write that is not ordered after the reads since, is a race: on a
GPU it reads or writes too early in some runs. Here it is found in every run.
"""

from __future__ import annotations

import bisect
import collections
import contextlib
import logging
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch.cuda._sanitizer import StreamSynchronizations, zip_arguments
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode

from tests.unit_tests.second_device import device

# Files that say nothing about a program.
OUTSIDE = (str(Path(torch.__file__).parent), contextlib.__file__, str(Path(__file__).with_name("manners.py")),
           __file__, "<frozen")  # fmt: skip
HOST = -1  # where a stream's number stands in an access
_listening: Order | None = None
DEPTH = 3  # frames that name a place


class RaceError(AssertionError):
    """Accesses of two streams, or of a stream and the host, to the same memory in no order."""


@dataclass(slots=True, frozen=True)
class Access:
    """One access of a launched operator to a range of memory."""

    number: int
    stream: int  # HOST for the host's
    operator: str
    argument: str
    writes: bool
    place: str

    def __str__(self) -> str:
        whose = "the host" if self.stream == HOST else f"stream {self.stream}"
        return f"{self.operator} {'writes' if self.writes else 'reads'} {self.argument!r} on {whose}, at {self.place}"


@dataclass(slots=True)
class Cell:
    """A range of bytes with equal history."""

    start: int
    end: int
    write: Access | None
    reads: dict[int, Access]  # the last of each stream since the write


class Memory:
    """The history of every byte that was accessed."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._cells: list[Cell] = []

    def cells(self, start: int, end: int) -> list[Cell]:
        """Cells that cover [start, end) exactly, in order; ranges without a history get a new one."""
        self._split(start)
        self._split(end)
        first = bisect.bisect_left(self._starts, start)
        found, at, index = [], start, first
        while at < end:
            if index < len(self._cells) and self._cells[index].start == at:
                cell = self._cells[index]
            else:
                stop = min(end, self._starts[index] if index < len(self._starts) else end)
                cell = Cell(at, stop, None, {})
                self._starts.insert(index, at)
                self._cells.insert(index, cell)
            found.append(cell)
            at, index = cell.end, index + 1
        return found

    def written(self, start: int, end: int, access: Access) -> None:
        """Forget the history of [start, end) but for this write."""
        self.forget(start, end)
        index = bisect.bisect_left(self._starts, start)
        self._starts.insert(index, start)
        self._cells.insert(index, Cell(start, end, access, {}))

    def forget(self, start: int, end: int) -> None:
        """Drop the history of [start, end)."""
        self._split(start)
        self._split(end)
        low, high = bisect.bisect_left(self._starts, start), bisect.bisect_left(self._starts, end)
        del self._starts[low:high], self._cells[low:high]

    def within(self, start: int, end: int) -> list[Cell]:
        """The cells inside [start, end) that have a history."""
        self._split(start)
        self._split(end)
        return self._cells[bisect.bisect_left(self._starts, start) : bisect.bisect_left(self._starts, end)]

    def _split(self, at: int) -> None:
        index = bisect.bisect_right(self._starts, at) - 1
        if index < 0:
            return
        cell = self._cells[index]
        if cell.start < at < cell.end:
            self._starts.insert(index + 1, at)
            self._cells.insert(index + 1, Cell(at, cell.end, cell.write, dict(cell.reads)))
            cell.end = at


class Order:
    """The listener of the second device: which races it has met, and where the host waited for a stream."""

    def __init__(self, names: Mapping[str, torch.Tensor]) -> None:
        self.races: dict[tuple[str, str], str] = {}  # by the two accesses
        self.waits: list[str] = []  # operator and place
        self.names = {name: (t.data_ptr(), t.data_ptr() + t.nbytes) for name, t in names.items()}
        self.clocks = StreamSynchronizations()
        self.memory = Memory()
        self._asked: dict[int, dict[int, int]] = {}  # state of each event when it was first asked
        self._number = 0
        self._lock = threading.RLock()
        # Memory is freed at any moment, also in the middle of a method: (first byte, end, streams or None for all).
        self._freed: collections.deque[tuple[int, int, Sequence[int] | None]] = collections.deque()

    # -- what the device tells ------------------------------------------------------------------------------------

    def launched(self, operator: str, stream: int, accesses: Sequence[Any], waits: bool) -> None:
        """An operator was launched; waits: the host has waited for its result."""
        with self._lock:
            self._enter(operator, stream, accesses)
            if waits:
                self.waits.append(f"{operator} at {place()}")
                self.clocks.all_streams_wait_for_stream(stream)

    def collective(self, operator: str, current: int, stream: int, accesses: Sequence[Any], event: int) -> None:
        """A collective was launched on its communicator's stream, after what is queued on the current one."""
        with self._lock:
            if stream != current:
                self.clocks.create_event(-event)
                self.clocks.record_state(-event, current)
                self.clocks.stream_wait_for_event(stream, -event)
            self._enter(operator, stream, accesses)
            self.recorded(event, stream)

    def recorded(self, event: int, stream: int) -> None:
        with self._lock:
            if event not in self.clocks.recorded_sync_states:
                self.clocks.create_event(event)
            self.clocks.record_state(event, stream)

    def waited(self, event: int, stream: int) -> None:
        with self._lock:
            self.clocks.stream_wait_for_event(stream, event)

    def host_waited_event(self, event: int) -> None:
        with self._lock:
            self.waits.append(f"synchronize of an event at {place()}")
            self.clocks.all_streams_wait_for_event(event)

    def host_waited_stream(self, stream: int, counts: bool) -> None:
        with self._lock:
            if counts:
                self.waits.append(f"synchronize of stream {stream} at {place()}")
            self.clocks.all_streams_wait_for_stream(stream)

    def host_waited_device(self) -> None:
        with self._lock:
            self.waits.append(f"synchronize of the device at {place()}")
            self.clocks.sync_all_streams()

    def queried(self, event: int) -> bool:
        """Whether an event has come: not when it is first asked, unless the host has waited for something later."""
        with self._lock:
            state, seen = self.clocks.recorded_sync_states[event], self.clocks.host_sync_state
            if all(number <= seen.get(stream, 0) for stream, number in state.items()):
                return True
            if self._asked.get(event) != state:
                self._asked[event] = dict(state)
                return False
            self.clocks.all_streams_wait_for_event(event)
            return True

    def freed(self, start: int, room: int, streams: Sequence[int]) -> None:
        """Memory was freed that record_stream has named: it is lent again once these streams have come so far."""
        self._freed.append((start, start + room, tuple(streams)))

    def grown(self, start: int, room: int) -> None:
        """Memory is new, or nothing uses it any more."""
        self._freed.append((start, start + room, None))

    # -- what the host does itself --------------------------------------------------------------------------------

    def host_access(self, operator: str, start: int, end: int, writes: bool) -> None:
        """The host reads or writes pinned memory."""
        with self._lock:
            self._forget_freed()
            access = Access(self._number, HOST, operator, "an argument", writes, place())
            for cell in self.memory.cells(start, end):
                for earlier in (cell.write, *(cell.reads.values() if writes else ())):
                    if earlier is not None and self.clocks.host_sync_state.get(earlier.stream, -1) < earlier.number:
                        self._race(cell, access, earlier)

    # -- the rules ------------------------------------------------------------------------------------------------

    def _enter(self, operator: str, stream: int, accesses: Sequence[tuple[int, int, bool, str]]) -> None:
        self._forget_freed()
        self._number += 1
        self.clocks.update_seq_num(stream, self._number)
        where = place()
        for start, end, writes, argument in sorted(accesses, key=lambda access: access[2]):
            access = Access(self._number, stream, operator, argument, writes, where)
            for cell in self.memory.cells(start, end):
                for earlier in (cell.write, *(cell.reads.values() if writes else ())):
                    if earlier is not None and not self._is_ordered(earlier, stream):
                        self._race(cell, access, earlier)
                cell.reads[stream] = access
            if writes:
                self.memory.written(start, end, access)

    def _is_ordered(self, earlier: Access, stream: int) -> bool:
        return self.clocks.is_ordered_after(stream, earlier.number, earlier.stream)

    def _race(self, cell: Cell, access: Access, earlier: Access) -> None:
        known = [name for name, (low, high) in self.names.items() if low < cell.end and cell.start < high]
        memory = ", ".join(known) or f"{cell.end - cell.start} bytes"
        words = f"{memory}: {access}, in no order with an earlier access: {earlier}"
        self.races.setdefault((f"{access.operator} {access.place}", f"{earlier.operator} {earlier.place}"), words)

    def _forget_freed(self) -> None:
        while self._freed:
            start, end, streams = self._freed.popleft()
            if streams is None:
                self.memory.forget(start, end)
                continue
            for cell in self.memory.within(start, end):
                if cell.write is not None and self._is_awaited(cell.write, streams):
                    cell.write = None
                cell.reads = {s: read for s, read in cell.reads.items() if not self._is_awaited(read, streams)}

    def _is_awaited(self, access: Access, streams: Sequence[int]) -> bool:
        return access.stream in streams or any(self._is_ordered(access, stream) for stream in streams)


class HostAccesses(TorchDispatchMode):
    """Tells an Order which pinned memory the host's operators read and write."""

    def __init__(self, order: Order) -> None:
        super().__init__()
        self.order = order

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for argument, value in zip_arguments(func._schema, args, kwargs):
            alias = argument.alias_info
            writes = alias is not None and alias.is_write
            if alias is not None and not writes:
                continue  # a view
            for tensor in _pytree.tree_leaves(value):
                if isinstance(tensor, torch.Tensor) and self._is_for_the_host(tensor, args, kwargs):
                    start = tensor.data_ptr()
                    self.order.host_access(func._schema.name, start, start + _span(tensor), writes)
        return func(*args, **kwargs)

    def _is_for_the_host(self, tensor: torch.Tensor, args: Any, kwargs: Any) -> bool:
        """True for pinned memory, unless the operator is a copy between the devices, which a stream makes."""
        if tensor.device.type != "cpu" or tensor.numel() == 0 or not device.library.is_pinned(tensor.data_ptr()):
            return False
        devices = [kwargs.get("device"), *(each.device for each in args if isinstance(each, torch.Tensor))]
        return all(each is None or torch.device(each).type == "cpu" for each in devices)


def _span(tensor: torch.Tensor) -> int:
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    return (1 + sum((size - 1) * stride for size, stride in sizes)) * tensor.element_size()


def place() -> str:
    """The innermost lines of the program outside torch, or the node of autograd that runs."""
    frame: FrameType | None = sys._getframe(1)
    lines: list[str] = []
    while frame is not None and len(lines) < DEPTH:
        code = frame.f_code
        if not code.co_filename.startswith(OUTSIDE):
            lines.append(f"{Path(code.co_filename).name}:{frame.f_lineno} {code.co_name}")
        frame = frame.f_back
    node = torch._C._current_autograd_node() if hasattr(torch._C, "_current_autograd_node") else None
    of_backward = [f"{node.name()} of backward"] if node is not None else []
    return " < ".join([*of_backward, *lines]) or "a thread without Python"


@contextmanager
def ordered(names: Mapping[str, torch.Tensor] | None = None) -> Iterator[Order]:
    """Listen to the device, and raise RaceError at the end if accesses were in no order.

    Args:
        names: Tensors to name in a race, by the name to use.
    """
    logging.getLogger("torch.cuda._sanitizer").setLevel(logging.WARNING)  # it names each stream that it meets
    global _listening
    order, outer = Order(names or {}), _listening
    device.library.listen(order)
    _listening = order
    try:
        with HostAccesses(order):
            yield order
    finally:
        device.library.listen(outer)
        _listening = outer
    if order.races:
        first = list(order.races.values())[:3]
        raise RaceError(f"{len(order.races)} races:\n" + "\n".join(first))
