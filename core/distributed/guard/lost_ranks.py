"""Which ranks did not come, and where they wait instead: what a backend's error, such as "Timed out", does not say.

Where a wait fails, the rank writes what it waited for into the job's store, gives the others GRACE_S to do the same,
and reads theirs. Nothing runs, and nothing is written, as long as no wait fails.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

import torch.distributed as dist
from torch.distributed import distributed_c10d

from core.agree import SyncError
from core.distributed.wire.shared_memory import HostChannel, PeerLost
from core.waiting import wait_of, waiting

GRACE_S = 3.0  # a process closes its connections before it counts as ended, and others may begin to wait a little later
BACKENDS_WORDS = re.compile("gloo|nccl|connection|timed out|timeout|broken pipe|did not come", re.IGNORECASE)


@contextmanager
def naming_lost_ranks(call: str, step: int, channels: Sequence[HostChannel] = ()) -> Iterator[None]:
    """Turn a backend's error in a wait into one that says what this rank waited for, and who did not come.

    call: the user's, during which the wait failed. step: finalized ones before it, and one; each rank counts its own.
    channels: the memory of ranks of this host. Raises PeerLost where a rank of this host has ended, else SyncError;
    another error stays what it is.
    """
    try:
        yield
    except RuntimeError as error:
        if not _is_backends(error):
            raise
        wait = wait_of(error)
        told, ended = _look_for_others(wait, f"{call} (step {step})", channels)
        if wait is None and not ended:
            raise
        raise _lost(error, wait, f"{call} (step {step}", told, ended) from error


def _is_backends(error: RuntimeError) -> bool:
    if isinstance(error, PeerLost | dist.DistError):
        return True
    return type(error) is RuntimeError and BACKENDS_WORDS.search(str(error)) is not None


def _lost(
    error: RuntimeError, wait: waiting | None, during: str, told: dict[int, str], ended: dict[int, int]
) -> SyncError | PeerLost:
    rank = dist.get_rank()
    reason = (
        re.sub(r"^\[[^]]*\] *", "", str(error.__cause__ or error).strip()).partition("\n")[0].split(". ")[0]
    )  # the rest is advice
    others = ended.keys() if wait is None else [other for other in wait.ranks if other != rank]
    found = [f"rank {other} waited for {told[other]}" for other in others if other in told]
    found += [f"rank {other} (process {ended[other]}) has ended" for other in others if other in ended.keys() - told]
    missing = [other for other in others if other not in told and other not in ended]
    if missing:
        found.append(f"rank{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing))} did not come")
    if wait is None:
        where = f"waited in {during})"
    else:
        where = f"waited {wait.waited_s:.1f} s for {wait} in {during}, ranks {wait.ranks})"
    message = (
        f"rank {rank} {where}, which failed ({reason}); {'; '.join(found)}. Did a rank get fewer batches than the "
        "others, or leave out a backward, finalize_model_grads or optimizer.step? The output of the rank that failed "
        "first says more; restart from the last checkpoint"
    )
    return PeerLost(message) if ended.keys() - told else SyncError(message)


def _look_for_others(
    wait: waiting | None, here: str, channels: Sequence[HostChannel]
) -> tuple[dict[int, str], dict[int, int]]:
    """Rank -> what it told that it waited for, and rank -> process of those of this host that have ended.

    Tells the others what this rank waited for. Looks for at most GRACE_S, or until all others are known.
    """
    rank = dist.get_rank()
    others = [] if wait is None else [other for other in wait.ranks if other != rank]
    told: dict[int, str] = {}
    ended: dict[int, int] = {}
    begun = time.monotonic()
    with suppress(RuntimeError):  # the store may have gone with its rank
        if wait is not None:
            store = distributed_c10d._get_default_store()
            store.set(_key(rank), f"{wait} in {here}")
    while True:
        ended.update((member.rank, member.pid) for channel in channels for member in channel.ended())
        with suppress(RuntimeError):
            for other in others:
                if other not in told and store.check([_key(other)]):
                    told[other] = store.get(_key(other)).decode()
        known = bool(ended) if wait is None else set(others) <= told.keys() | ended.keys()
        if known or not (others or channels) or time.monotonic() - begun > GRACE_S:
            return told, ended
        time.sleep(0.05)


def _key(rank: int) -> str:
    return f"core.lost_ranks/{rank}"
