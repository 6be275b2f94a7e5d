"""Checks that calls of several ranks would meet over NCCL, though gloo carries them on the second device.

NCCL pairs calls by their order alone, makes a communicator at its first use, and has one for each two ranks next to the
group's, for messages that are not in a batch. Each rank logs its calls. A call that differs between ranks is an error
at once; `hang` looks for calls that wait for each other in the logs of all ranks.
"""

from __future__ import annotations

import json
import pickle
import sys
import threading
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch.distributed as dist

from tests.unit_tests.second_device.order import place

OF_OBJECTS = ("_object", "_object_list")  # ends of names of torch.distributed's functions
has_set_device = False  # True once this process has called set_device
_log: list[Call] = []
_lock = threading.RLock()


class Meeting(NamedTuple):
    """Something that ranks do together: a collective, a message, or making a communicator."""

    name: str  # the same on all of its ranks
    ranks: tuple[int, ...]


class Call(NamedTuple):
    """A call of a rank, in the order of its launches. It ends once all ranks of its meetings have come."""

    communicator: str
    meetings: tuple[Meeting, ...]
    words: str
    makes: bool = False  # True if the host makes a communicator, and waits


class HangError(AssertionError):
    """Calls of several ranks that wait for each other, or that a rank never makes."""


class Communicators:
    """The communicators of one process group, on one rank: the group's, and one for each pair of ranks."""

    def __init__(self, options: Any) -> None:
        self.store, self.rank = options.store, options.group_rank
        self.ranks = tuple(options.global_ranks_in_group) or tuple(range(options.group_size))
        self.name = f"group {options.group_id}"
        self.made: set[str] = set()
        self.counts: dict[Any, int] = defaultdict(int)

    def called(self, parts: Sequence[tuple[str, str, str, int]], is_of_two: bool) -> str:
        """Log a call and compare it with the other ranks' calls.

        Args:
            parts: Name, tensors, further options and peer (-1 for a collective) of each call of a batch.
            is_of_two: True for a message that is not in a batch.

        Returns:
            The reason why NCCL would not carry it, "" if there is none.
        """
        with _lock:
            where = place()
            if not has_set_device and self._is_of_objects():
                return (
                    "NCCL would refuse this collective of objects: Duplicate GPU detected. It puts objects on the "
                    f"current device, and no set_device was called on rank {self.ranks[self.rank]}, at {where}"
                )
            peers = sorted({self.rank, *(peer for *_, peer in parts if is_of_two)})
            ranks = tuple(self.ranks[peer] for peer in peers) if is_of_two else self.ranks
            communicator = f"{self.name} of ranks {list(self.ranks)}" + (f", pair {list(ranks)}" if is_of_two else "")
            if communicator not in self.made:
                self.made.add(communicator)
                words = f"the first use of {communicator} ({parts[0][0]} at {where})"
                _log.append(Call(communicator, (Meeting(f"first {communicator}", ranks),), words, makes=True))
            meetings, wrong = [], ""
            for meeting, what in self._meetings(communicator, parts):
                meetings.append(meeting)
                wrong = wrong or self._compare(meeting, what, where)
            words = f"{' and '.join(dict.fromkeys(name for name, *_ in parts))} over {communicator}, at {where}"
            _log.append(Call(communicator, tuple(meetings), words))
            return wrong

    def _meetings(self, communicator: str, parts: Sequence[tuple[str, str, str, int]]) -> Iterator[tuple[Meeting, str]]:
        collective = [f"{name} of {tensors} {rest}".rstrip() for name, tensors, rest, peer in parts if peer < 0]
        if collective:
            self.counts[communicator] += 1
            yield Meeting(f"call {self.counts[communicator]} of {communicator}", self.ranks), " and ".join(collective)
        for name, tensors, rest, peer in parts:
            if peer >= 0:
                source, target = (self.rank, peer) if name == "send" else (peer, self.rank)
                self.counts[communicator, name, source, target] += 1
                ends = self.ranks[source], self.ranks[target]
                number = self.counts[communicator, name, source, target]
                message = f"message {number} from rank {ends[0]} to rank {ends[1]} of {communicator}"
                yield Meeting(message, ends), f"{tensors}, {rest}"

    def _compare(self, meeting: Meeting, what: str, where: str) -> str:
        mine = [what, self.ranks[self.rank], where]
        theirs = json.loads(self.store.compare_set(meeting.name, "", json.dumps(mine)))
        if theirs[0] == what:
            return ""
        return (
            f"{meeting.name} is {what} on rank {mine[1]}, at {where}, and {theirs[0]} on rank {theirs[1]}, at "
            f"{theirs[2]}. NCCL pairs calls by their order alone: it would hang or give garbage"
        )

    def _is_of_objects(self) -> bool:
        if len(self.ranks) == 1:
            return False
        frame = sys._getframe(2)
        while frame is not None:
            is_of_torch = frame.f_globals.get("__name__") == dist.distributed_c10d.__name__
            if is_of_torch and frame.f_code.co_name.endswith(OF_OBJECTS):
                return frame.f_locals.get("device") is None
            frame = frame.f_back  # type: ignore[assignment]
        return False


def begin() -> None:
    """Start an empty log."""
    _log.clear()


def compare_logs(store: dist.Store, rank: int, world: int) -> None:
    """Look for calls that would hang over NCCL. Every rank must call it at the end of a program.

    Args:
        store: Store that all ranks share.
        rank: Global rank.
        world: Number of ranks.

    Raises:
        HangError: If calls wait for each other.
    """
    with _lock:
        store.set(f"log of {rank}", pickle.dumps(_log))
    logs = [pickle.loads(store.get(f"log of {other}")) for other in range(world)]
    found = hang(logs)
    if found:
        raise HangError(found)


def hang(logs: Sequence[Sequence[Call]]) -> str:
    """Return which calls of all ranks wait for each other, "" if none do.

    Args:
        logs: Calls of each rank, in the order of their launch.
    """
    stuck = _stuck(logs, side_by_side=True)
    if stuck:
        return f"NCCL would hang: {stuck}"
    stuck = _stuck(logs, side_by_side=False)
    return f"NCCL may hang, once a device runs one communicator at a time: {stuck}" if stuck else ""


def _stuck(logs: Sequence[Sequence[Call]], *, side_by_side: bool) -> str:
    """Let every call end that can, and describe the ones that are left.

    side_by_side: True if calls wait for earlier ones of their communicator alone, False if for all earlier ones.
    """
    places: dict[str, dict[int, int]] = defaultdict(dict)  # meeting -> rank -> number of its call
    waiting: list[dict[str, deque[int]]] = []
    makers: list[deque[int]] = []  # numbers of the calls that keep the host
    for rank, log in enumerate(logs):
        waiting.append(defaultdict(deque))
        makers.append(deque(number for number, call in enumerate(log) if call.makes))
        for number, call in enumerate(log):
            waiting[rank][call.communicator if side_by_side else ""].append(number)
            for meeting in call.meetings:
                places[meeting.name][rank] = number

    def has_come(rank: int, number: int) -> bool:
        line = waiting[rank][logs[rank][number].communicator if side_by_side else ""]
        is_next = not line or number <= line[0]
        return is_next and (not makers[rank] or number <= makers[rank][0])

    def missing(rank: int, number: int) -> list[int]:
        """Ranks that this call waits for."""
        return [
            other
            for meeting in logs[rank][number].meetings
            for other in meeting.ranks
            if other not in places[meeting.name] or not has_come(other, places[meeting.name][other])
        ]

    moved = True
    while moved:
        moved = False
        for rank, lines in enumerate(waiting):
            for line in lines.values():
                while line and has_come(rank, line[0]) and not missing(rank, line[0]):
                    number = line.popleft()
                    if makers[rank] and makers[rank][0] == number:
                        makers[rank].popleft()
                    moved = True
    left = []
    for rank, lines in enumerate(waiting):
        for number in sorted(line[0] for line in lines.values() if line)[:1]:
            call = logs[rank][number]
            never = {other for each in call.meetings for other in each.ranks if other not in places[each.name]}
            others = [f"rank {each} which never comes" if each in never else f"rank {each}"
                      for each in dict.fromkeys(missing(rank, number))]  # fmt: skip
            left.append(f"rank {rank} is in {call.words}, and waits for {', '.join(others) or 'itself'}")
    return "; ".join(left)
