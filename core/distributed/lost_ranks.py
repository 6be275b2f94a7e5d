"""Which ranks of this host have ended: what a backend's error, such as "Connection closed by peer", does not say."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch.distributed as dist

from core.distributed.host_channel import HostChannel, PeerLost

LOOK_S = 2.0  # a process closes its connections before it counts as ended


@contextmanager
def naming_lost_ranks(channels: Sequence[HostChannel], doing: str) -> Iterator[None]:
    """Turn a backend's error into a PeerLost, where a rank whose memory this one has mapped has ended.

    Another error stays what it is. Looks for at most LOOK_S.
    """
    try:
        yield
    except RuntimeError as error:
        if type(error) is not RuntimeError and not isinstance(error, dist.DistError):
            raise  # one of ours, which says more
        ended = _ended(channels)
        if not ended:
            raise
        ranks = ", ".join(f"rank {rank} (process {pid})" for rank, pid in ended)
        verb = "has" if len(ended) == 1 else "have"
        reason = str(error).strip().partition("\n")[0].split(". ")[0]  # what follows is the backend's advice
        raise PeerLost(
            f"rank {dist.get_rank()}: {ranks} of this host {verb} ended, which stopped {doing} ({reason}). The output "
            "of the rank that ended first says why; restart from the last checkpoint"
        ) from error


def _ended(channels: Sequence[HostChannel]) -> list[tuple[int, int]]:
    """(rank, process) of those that have ended, or end within LOOK_S."""
    begun = time.monotonic()
    while True:
        found = sorted({(member.rank, member.pid) for channel in channels for member in channel.ended()})
        if found or not channels or time.monotonic() - begun > LOOK_S:
            return found
        time.sleep(0.02)
