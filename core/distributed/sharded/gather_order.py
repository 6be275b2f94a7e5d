"""GatherOrder: the order in which a rank all-gathers its parameter buckets.

The order predicts the next gather. Ranks also compare it, because a gather that is paired with another bucket's gather
would return wrong values.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist

from core.distributed.guard.agreement import unequal_gathers
from core.distributed.sharded.param_unit import ParamUnit
from core.groups import agree
from core.groups.agree import SyncError
from core.watch.waiting import store_barrier, waiting

EVALUATION = (
    "Where ranks run unequal numbers of forwards, as in a `generate` of unequal lengths, call it inside "
    "`model.gathered()`, or with synced_gpus=True"
)
MOST_GATHERS = 10_000  # gathers whose descriptions are kept

LastTwo = tuple[ParamUnit | None, ParamUnit | None]


def needs_all(caller: str, group: dist.ProcessGroup) -> waiting:
    """Return a context for waits of a gather over a group, which adds advice to messages about waiting.

    ``caller`` is the call that unshards all parameters, or "" in a forward or a backward.
    """
    advice = f"{caller} of a model with sharded parameters is collective: call it on all ranks together"
    forward = "" if torch.is_grad_enabled() else EVALUATION
    return waiting(
        "the gather of parameters", group, f"for {caller}" if caller else "", advice=advice if caller else forward
    )


class GatherOrder:
    """Gathers of a rank, in order."""

    def __init__(self) -> None:
        self.gathers: dict[str, list[str]] = {}  # collective gathers of each data group since the last comparison
        self.next_of: dict[LastTwo, ParamUnit | None] = {}
        self.last_two: LastTwo = (None, None)  # units that were gathered since the last write

    def come_together(self, caller: str, groups: Sequence[dist.ProcessGroup]) -> None:
        """Wait until all ranks of the groups have made this call; PeerLost if some wait for each other elsewhere."""
        for group in groups:
            with needs_all(caller, group):
                store_barrier(caller, dist.get_process_group_ranks(group))

    def record(self, unit: ParamUnit, why: str) -> None:
        """Record the beginning of a gather that other ranks take part in, with ``why`` appended to its name."""
        gathers = self.gathers.setdefault(unit.data_group, [])
        if len(gathers) == MOST_GATHERS:  # they are never read without training
            gathers[:] = [f"{MOST_GATHERS} earlier ones of checksum {zlib.crc32(repr(gathers).encode())}"]
        gathers.append(unit.name + why)

    def pop(self) -> dict[str, list[str]]:
        """Return descriptions of each data group's gathers since the last call. Ranks compare them."""
        taken, self.gathers = self.gathers, {}
        return taken

    def compare(self, control: Mapping[str, dist.ProcessGroup]) -> None:
        """Raise SyncError if ranks of a data group gathered in different orders. Collective over the groups."""
        taken = self.pop()
        failure: SyncError | None = None  # raised at the end: ranks of the next group may wait for this one there
        for name, group in control.items():
            gathers = taken.get(name, ())
            with needs_all("", group):
                if not agree.equal(gathers, group, "the order of gathers in an evaluation"):
                    failure = failure or unequal_gathers(name, group, gathers)
        if failure is not None:
            raise failure

    def learn(self, unit: ParamUnit | None) -> ParamUnit | None:
        """Record a gather, or a write (None), and predict the next gather.

        The prediction is the unit that followed the same two gathers before, or None.
        """
        self.next_of[self.last_two] = unit
        self.last_two = (None, None) if unit is None else (self.last_two[1], unit)
        return self.next_of.get(self.last_two)
