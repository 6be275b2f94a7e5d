"""SocketChannel: reductions among ranks that reach each other through gloo's sockets.

Each rank sends every other one its part of the tensor and adds what it receives, in rank order, where its own part
lies: a byte travels once, where gloo's own reduce-scatter copies it aside and its all-reduce sends it twice. An
all-reduce in rank order then sends the sums round. Tensors travel in chunks through a few MiB of kept scratch, however
large they are: at most WINDOW chunks of each other rank are under way, and the next leaves when the oldest has been
added. gloo's threads move them; whoever polls or waits adds.

A channel has a communicator of its own, on which messages are paired by their order alone. Note [Order of messages]
says why it is the same on all ranks, whenever each of them finds the time to poll.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from core.distributed.reduce.shared_wire import SharedWire, timeout_of
from core.distributed.wire.host_channel import PeerLost
from core.distributed.wire.rank_order_sum import add_in_rank_order, split_evenly

WINDOW = 2  # chunks under way: one that travels while another is added
MOST_CHUNK = 4 * 2**20  # bytes of one rank's chunk: from here on larger ones are no faster
LEAST_CHUNK = 256 * 2**10  # below it messages cost more than bytes
SCRATCH = 16 * 2**20  # bytes of a channel at most, as long as chunks are not the smallest
GRANULE = 4096  # bytes: a chunk holds whole elements of every dtype


def chunk_bytes_for(size: int) -> int:
    """Bytes of one rank's chunk in a group of `size` ranks."""
    fitting = SCRATCH // (WINDOW * (size - 1))
    return max(LEAST_CHUNK, min(MOST_CHUNK, fitting)) // GRANULE * GRANULE


# Note [Order of messages]
# The n-th message of a rank is paired with the n-th of another, so when a message is posted may depend on what the
# rank has received, but what it is must not. All ranks launch the reductions of a group in one order. Chunks of one
# reduction after another are posted in order, each as soon as scratch is free, and added in order. Two kinds of
# messages could overtake each other: chunks, and the sums of an all-reduce. So the sum of chunk i is posted when it has
# been made, right before chunk i + WINDOW, whose scratch is what it frees; and a reduction after an all-reduce begins
# when all its sums are posted.


class Posted(NamedTuple):
    """A message that may be under way, and its memory.

    A thread of gloo that let go of it as the last one would wait for Python, while Python may wait for the thread.
    """

    work: dist.Work
    sent: torch.Tensor
    received: torch.Tensor


@dataclass(frozen=True, slots=True)
class Chunk:
    """A chunk of this rank's part, whose other ranks' gradients are under way."""

    handle: SocketHandle
    number: int
    parts: list[torch.Tensor]  # every rank's, in group order; this rank's own is where the sum goes
    scratch: torch.Tensor
    messages: list[dist.Work]


class SocketChannel:
    """What the ranks of one gloo group exchange CPU tensors through. Made by all of them together.

    Each wrapped model has its own: what one of them still has under way when it is dropped, or has begun on some ranks
    only, is not paired with what another one sends. Its connections stay until all ranks have dropped it.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.ranks = dist.get_process_group_ranks(group)  # in the job, in group order
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        shared = SharedWire.of(group)
        store = distributed_c10d._get_process_group_store(group)
        store = dist.PrefixStore(f"core.distributed.wire.socket_channel.{shared.next_channel}", store)
        self.wire = dist.ProcessGroupGloo(store, self.rank, self.size, timeout=timeout_of(group))
        self.posted: deque[Posted] = deque()
        shared.join_channel(self)
        self.chunk_bytes = chunk_bytes_for(self.size)
        self.free: deque[torch.Tensor] = deque()  # scratch: WINDOW tensors of a chunk of every other rank
        self.has_scratch = False
        self.waiting: deque[SocketHandle] = deque()  # reductions whose messages are not all posted
        self.under_way: deque[Chunk] = deque()
        self.added = 0  # chunks, ever
        self.lost: str | None = None  # why nothing more can be exchanged
        self._connect(timeout_of(group))

    def _connect(self, timeout: timedelta) -> None:
        """Send every rank a byte: gloo may connect two ranks at their first message only, and a wait for that can not
        be aborted.
        """
        ones, hello = [1] * self.size, torch.zeros(self.size, dtype=torch.uint8)
        self.wait_for([self.swap_all(hello, ones, torch.empty_like(hello), ones, timeout)])

    # -- what can be launched ---------------------------------------------------------------------------------------

    def all_reduce(
        self, tensor: torch.Tensor, *, timeout: timedelta, scale: float = 1.0, mean: bool = False
    ) -> SocketHandle:
        """Sum (or mean) of a contiguous tensor over the group, times `scale`, on every rank; in place."""
        sizes = split_evenly(tensor.numel(), self.size)
        return self._launch(SocketHandle(self, tensor, sizes, scale, mean, timeout, whole=True))

    def reduce_scatter(
        self, full: torch.Tensor, *, timeout: timedelta, scale: float = 1.0, mean: bool = False
    ) -> SocketHandle:
        """The same for this rank's equal part of `full` alone; the rest of it stays what it was."""
        sizes = [full.numel() // self.size] * self.size
        return self._launch(SocketHandle(self, full, sizes, scale, mean, timeout, whole=False))

    def _launch(self, handle: SocketHandle) -> SocketHandle:
        if self.lost is not None:
            raise PeerLost(self.lost)
        if not self.has_scratch:
            self.free.extend(torch.empty((self.size - 1) * self.chunk_bytes, dtype=torch.uint8) for _ in range(WINDOW))
            self.has_scratch = True
        self.waiting.append(handle)
        self._post()
        return handle

    # -- how it runs ------------------------------------------------------------------------------------------------

    def _post(self) -> None:
        """Post what may be posted now: see Note [Order of messages]."""
        while self.waiting:
            handle = self.waiting[0]
            while handle.posted < handle.chunks and self.free:
                self.under_way.append(handle.post_chunk(self.free.popleft()))
            if handle.posted < handle.chunks or (handle.whole and handle.added < handle.chunks):
                return
            self.waiting.popleft()

    def poll(self) -> None:
        """Add what has come. Waits for nothing."""
        while self.under_way and all(work.is_completed() for work in self.under_way[0].messages):
            self.add_next()

    def add_next(self) -> None:
        """Wait for the oldest chunk, add it, and post what follows it."""
        chunk = self.under_way[0]
        self.wait_for(chunk.messages)
        chunk.handle.add(chunk)
        self.added += 1
        self.under_way.popleft()
        self.free.append(chunk.scratch)
        self._post()

    def wait_for(self, messages: Sequence[dist.Work]) -> None:
        """Wait for messages. Raises PeerLost when one fails; after that always, as what was not received would be
        added.
        """
        for work in messages:
            if self.lost is not None:
                raise PeerLost(self.lost)
            try:
                work.wait()
            except RuntimeError as error:
                reason = str(error).split(". ")[0]  # what follows is advice
                others = " or ".join(str(rank) for rank in self.ranks if rank != self.ranks[self.rank])
                self.lost = (
                    f"rank {self.ranks[self.rank]}: rank {others} has ended, or did not come to a reduction of group "
                    f"{self.ranks} within the group's timeout, or came with another one ({reason}). The output of the "
                    "rank that failed first says why; restart from the last checkpoint"
                )
                raise PeerLost(self.lost) from error

    def swap(self, to: int, sent: torch.Tensor, source: int, received: torch.Tensor, timeout: timedelta) -> dist.Work:
        """Send bytes to one rank of the group and receive bytes from one. Every rank posts its own at the same time."""
        ins, outs = [0] * self.size, [0] * self.size
        ins[to], outs[source] = sent.numel(), received.numel()
        # An all-to-all in which all other parts are empty: unlike a send and a receive it can be asked whether it is
        # done, and small ones are faster. It fails with any rank of the group.
        return self.swap_all(sent, ins, received, outs, timeout)

    def swap_all(
        self, sent: torch.Tensor, ins: list[int], received: torch.Tensor, outs: list[int], timeout: timedelta
    ) -> dist.Work:
        """The same with all ranks of the group in one message, its own part of which a rank copies."""
        options = dist.AllToAllOptions()
        options.timeout = timeout
        work = self.wire.alltoall_base(received, sent, outs, ins, options)
        while self.posted and self.posted[0].work.is_completed():
            self.posted.popleft()
        self.posted.append(Posted(work, sent, received))
        return work


class SocketHandle:
    """A reduction in flight; the same face as collectives.Handle."""

    def __init__(
        self,
        channel: SocketChannel,
        tensor: torch.Tensor,
        sizes: list[int],
        scale: float,
        mean: bool,
        timeout: timedelta,
        *,
        whole: bool,
    ) -> None:
        self.channel = channel
        self.flat = tensor.detach().view(-1)
        self.parts = self.flat.split(sizes)  # of every rank
        self.scale, self.mean = scale, mean
        self.timeout = timeout
        self.whole = whole  # are the sums sent round?
        self.chunk = channel.chunk_bytes // self.flat.element_size()  # elements
        self.chunks = -(-max(sizes) // self.chunk)  # as many on every rank
        self.posted = self.added = 0  # chunks
        self.sums: list[dist.Work] = []  # under way, of an all-reduce

    @property
    def bytes_sent(self) -> int:
        """What this rank sends for it."""
        own = self.parts[self.channel.rank].numel()
        others = self.flat.numel() - own
        return (others + (own * (self.channel.size - 1) if self.whole else 0)) * self.flat.element_size()

    # -- the face ---------------------------------------------------------------------------------------------------

    def is_done(self) -> bool:
        """Is there nothing left to do or to wait for? Does on the way what needs no waiting, as nobody else would."""
        return self.poll()

    def poll(self) -> bool:
        """Add what has come; would `wait` return at once?"""
        self.channel.poll()
        return self.added == self.chunks and all(work.is_completed() for work in self.sums)

    def step(self) -> bool:
        """Add all chunks; the sums of an all-reduce are left under way, while those of others are made."""
        while self.added < self.chunks:
            self.channel.add_next()
        return False

    def wait(self) -> None:
        """Complete it; a second wait does nothing."""
        self.step()
        self.channel.wait_for(self.sums)
        self.sums = []

    # -- its messages -----------------------------------------------------------------------------------------------

    def _of_chunk(self, rank: int, number: int) -> torch.Tensor:
        """The chunk of a rank's part; its last ones may be shorter than other ranks', or empty."""
        return self.parts[rank][number * self.chunk : (number + 1) * self.chunk]

    def post_chunk(self, scratch: torch.Tensor) -> Chunk:
        """Send every rank the next chunk of its part, and receive this rank's of all others."""
        channel, number = self.channel, self.posted
        self.posted += 1
        own = self._of_chunk(channel.rank, number)
        all_at_once = channel.size * max(map(len, self.parts)) * self.flat.element_size() <= scratch.numel()
        if all_at_once and channel.size > 2:
            return self._post_at_once(scratch, own)
        slots = scratch.view(self.flat.dtype).split(self.chunk)
        parts, messages = [own] * channel.size, []
        for distance in range(1, channel.size):
            to, source = (channel.rank + distance) % channel.size, (channel.rank - distance) % channel.size
            parts[source] = slots[distance - 1][: own.numel()]
            sent = self._of_chunk(to, number)
            messages.append(channel.swap(to, _bytes(sent), source, _bytes(parts[source]), self.timeout))
        return Chunk(self, number, parts, scratch, messages)

    def _post_at_once(self, scratch: torch.Tensor, own: torch.Tensor) -> Chunk:
        """A small tensor in one message instead of one a rank."""
        channel = self.channel
        received = scratch.view(self.flat.dtype)[: channel.size * own.numel()]
        ins = [part.numel() * part.element_size() for part in self.parts]
        outs = [ins[channel.rank]] * channel.size
        message = channel.swap_all(_bytes(self.flat), ins, _bytes(received), outs, self.timeout)
        parts = [received[rank * own.numel() : (rank + 1) * own.numel()] for rank in range(channel.size)]
        parts[channel.rank] = own
        return Chunk(self, 0, parts, scratch, [message])

    def add(self, chunk: Chunk) -> None:
        """Sum a chunk that has come; in an all-reduce send the sum to all, and receive theirs in place."""
        channel = self.channel
        own = chunk.parts[channel.rank]
        add_in_rank_order(chunk.parts, own, self.scale, self.mean)
        self.added += 1
        for distance in range(1, channel.size if self.whole else 1):
            to, source = (channel.rank + distance) % channel.size, (channel.rank - distance) % channel.size
            received = self._of_chunk(source, chunk.number)
            self.sums.append(channel.swap(to, _bytes(own), source, _bytes(received), self.timeout))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8)
