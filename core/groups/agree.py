"""Agreement of ranks on small facts: equality, a flag on any rank, an error on any rank.

A rank that raises, skips or waits on its own leaves the others in a collective. So ranks agree first, and all such
agreements are in this module. Every function is collective: all ranks call it, in the same order. ``groups`` is one
group, or a chain of groups that together reach every rank (``world_groups``). ``None`` is the default group, or only
this process if no job was started. ``what`` is the subject, for torch's profiler and for errors of failed waits.
"""

from __future__ import annotations

import hashlib
import pickle
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import zip_longest
from typing import Any, TypeAlias, TypeVar

import torch
import torch.distributed as dist
from torch.profiler import record_function

from core.watch.waiting import PeerLost, complete, waiting

T = TypeVar("T")
Groups: TypeAlias = "dist.ProcessGroup | Sequence[dist.ProcessGroup] | None"
ROUNDED_TO = 128  # the number of values is rounded up to a multiple of this
SAME_MODEL = (
    "The ranks of this group must hold the same model; did they build it from different configurations or in a "
    "different order?"
)


class SyncError(RuntimeError):
    """Error raised for a gradient or a call that could be mixed up with another step's."""


class LayoutMismatch(RuntimeError):
    """Error raised if the ranks of a group do not have the same model, or not the same weights."""


def bounds(values: Sequence[int] | torch.Tensor, groups: Groups, what: str) -> tuple[list[Any], list[Any]]:
    """Return the minimum and maximum of each value over all ranks, with one small max all-reduce per group.

    The hash of ``what`` is compared too. Raises ``PeerLost`` on every rank of a group whose ranks agree on
    different subjects. gloo would mix their numbers, or abort the process if they have different sizes; so sizes are
    rounded up.
    """
    values = values if isinstance(values, torch.Tensor) else torch.tensor(values, dtype=torch.int64, device="cpu")
    count = 1 + values.numel()
    values = torch.cat([values.new_tensor([zlib.crc32(what.encode()) % 2**20]), values])  # exact in fp32
    values = torch.nn.functional.pad(values, (0, -count % ROUNDED_TO))
    both = torch.cat([-values, values])
    for group in _chain(groups):
        with record_function(f"core::agree {what}"), waiting(what, group):
            both = both.to(control_device(group))
            work = dist.all_reduce(both, dist.ReduceOp.MAX, group, async_op=True)
            complete(work) if both.is_cpu else work.wait()
            both = both.cpu()  # waits for a device
            if -both[0] != both[values.numel()]:
                raise PeerLost("another rank came to agree on something else")
    least, largest = -both[: values.numel()], both[values.numel() :]
    return least[1:count].tolist(), largest[1:count].tolist()


def any(flag: bool, groups: Groups, what: str) -> bool:
    """Return ``True`` if a flag is true on any rank."""
    return bounds([flag], groups, what)[1] == [1]


def equal(value: object, groups: Groups, what: str, *, failed: bool = False) -> bool:
    """Return ``True`` if all ranks have the same ``repr`` of a value, compared by hash, and none has ``failed``."""
    digest = hashlib.sha256(repr(value).encode()).digest()
    words = [int.from_bytes(digest[i : i + 7], "big") for i in range(0, 28, 7)]
    least, largest = bounds([*words, failed], groups, what)
    return least == largest and not failed


def gather(value: T, groups: Groups, what: str) -> dict[int, T]:
    """Gather every rank's picklable value, by rank in the job. Only for startup and failures, never in a step."""
    everyone = {dist.get_rank() if dist.is_initialized() else 0: value}
    for group in _chain(groups):
        mine = torch.frombuffer(bytearray(pickle.dumps(everyone)), dtype=torch.uint8)
        longest = bounds([len(mine)], group, what)[1][0]
        with record_function(f"core::agree {what}"), waiting(what, group):
            mine = torch.nn.functional.pad(mine, (0, longest - len(mine))).to(control_device(group))
            rows = mine.new_empty((dist.get_world_size(group), longest))
            work = dist.all_gather(list(rows.unbind()), mine, group, async_op=True)
            complete(work) if rows.is_cpu else work.wait()
            parts = [pickle.loads(row.numpy()) for row in rows.cpu()]  # a pickle marks its end, so padding is ignored
        everyone = {rank: theirs for part in parts for rank, theirs in part.items()}
    return everyone


def first(finding: T | None, groups: Groups, what: str) -> T | None:
    """Return the smallest finding of any rank, or ``None`` if no rank has one.

    A finding is a tuple that starts with its sort key, such as the rank. Without a finding it costs one small
    all-reduce per group.
    """
    if bounds([finding is not None], groups, what)[1] == [0]:
        return None
    findings: list[Any] = [theirs for theirs in gather(finding, groups, what).values() if theirs is not None]
    return min(findings)


def refuse(error: Exception | None, groups: Groups, what: str, kind: type[Exception] = RuntimeError) -> None:
    """Raise on all ranks if any rank has an error.

    A rank with an error raises it; the others raise ``kind`` with the first rank's message.
    """
    rank = dist.get_rank() if dist.is_initialized() else 0
    failure = first(None if error is None else (rank, f"{type(error).__name__}: {error}"), groups, what)
    if error is not None:
        raise error
    if failure is not None:
        raise kind(f"{what}: rank {failure[0]} failed: {failure[1]}")


@contextmanager
def together(groups: Groups, what: str, kind: type[Exception] = RuntimeError) -> Iterator[None]:
    """Context manager for code that may fail on only one rank, which raises on all ranks at its end.

    ``kind`` is the type of the error on ranks without one.
    """
    error: Exception | None = None
    try:
        yield
    except Exception as caught:
        error = caught
    refuse(error, groups, what, kind)


def same(
    tables: Iterable[tuple[str, dist.ProcessGroup, Sequence[str]]],
    failure: Exception | None = None,
    *,
    kind: type[Exception] = LayoutMismatch,
    advice: str = SAME_MODEL,
) -> None:
    """Raise on all ranks of a group if their tables differ, naming the first different line and rank.

    Ranks exchange hashes, and tables only if the hashes differ. An error from one group is passed on to the next ones.

    Args:
        tables: (description of the group, the group, this rank's table with one line per fact), in the same order on
            all ranks.
        failure: This rank's own error, if any. It is raised here after all ranks know about it; they raise ``kind``.
        advice: Next step, for the error message.
    """
    for words, group, table in tables:
        what = f"the comparison of {words}"
        if equal(table, group, what, failed=failure is not None):
            continue
        text = None if failure is None else f"{type(failure).__name__}: {failure}"
        gathered = gather((list(table), text), group, what)
        failed = [(rank, theirs) for rank, (_, theirs) in gathered.items() if theirs is not None]
        if failure is None and failed:
            failure = kind(f"rank {failed[0][0]} of {words} {list(gathered)} failed. {failed[0][1]}")
        elif failure is None:
            difference = first_difference({rank: theirs for rank, (theirs, _) in gathered.items()})
            failure = kind(f"{difference} ({words}, ranks {list(gathered)}). {advice}")
    if failure is not None:
        raise failure


def first_difference(tables: Mapping[int, Sequence[str]]) -> str:
    """Name the first rank that differs from the lowest one, and the first difference."""
    nothing = "nothing: it ends before this"
    (first_rank, reference), *others = tables.items()
    for rank, table in others:
        for here, there in zip_longest(table, reference, fillvalue=nothing):
            if here != there:
                return f"rank {rank} has {here}; rank {first_rank} has {there}"
    return "the ranks have equal tables"


def control_device(group: dist.ProcessGroup) -> torch.device:
    """Return the device for small tensors sent over ``group``: the CPU if a backend serves it, else the accelerator."""
    return torch.device("cpu") if "cpu" in backends_of(group) else device_of(group)


def device_of(group: dist.ProcessGroup) -> torch.device:
    """Return the device of a model's tensors on ``group``: the accelerator if it has a backend that the CPU lacks."""
    backends = backends_of(group)
    kind = next((kind for kind, backend in backends.items() if backend != backends.get("cpu")), "cpu")
    return torch.device(kind) if kind == "cpu" else torch.device(kind, torch.get_device_module(kind).current_device())


def backends_of(group: dist.ProcessGroup | None = None) -> dict[str, str]:
    """Return the backend of each device type, such as {"cpu": "gloo", "cuda": "nccl"}."""
    return dict(pair.split(":", 1) for pair in dist.get_backend_config(group).split(","))


def _chain(groups: Groups) -> list[dist.ProcessGroup]:
    if groups is None:
        groups = dist.group.WORLD if dist.is_initialized() else ()
    several = [groups] if isinstance(groups, dist.ProcessGroup) else groups or ()
    return [group for group in several if dist.get_world_size(group) > 1]
