"""GatherOrder: the order in which a rank gathers its buckets of parameters. The next one is guessed from it, and ranks
compare it, because a gather that meets another bucket's gather would give it wrong values.
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
from core.watch.waiting import meet_in_store, waiting

EVALUATION = (
    "Where ranks run unequal numbers of forwards, as in a `generate` of unequal lengths, call it inside "
    "`model.gathered()`, or with synced_gpus=True"
)
MOST_GATHERS = 10_000  # that are remembered in words

LastTwo = tuple[ParamUnit | None, ParamUnit | None]


def needs_all(caller: str, group: dist.ProcessGroup) -> waiting:
    """Surrounds waits of a gather. caller: a call that makes all parameters whole; "" for a forward or a backward."""
    advice = f"{caller} of a model with sharded parameters is collective: call it on all ranks together"
    forward = "" if torch.is_grad_enabled() else EVALUATION
    return waiting(
        "the gather of parameters", group, f"for {caller}" if caller else "", advice=advice if caller else forward
    )


class GatherOrder:
    """A rank's gathers, in order."""

    def __init__(self) -> None:
        self.gathers: dict[str, list[str]] = {}  # by collectives of a data group, since ranks have compared them last
        self.next_of: dict[LastTwo, ParamUnit | None] = {}
        self.last_two: LastTwo = (None, None)  # units that were gathered since the last write

    def come_together(self, caller: str, groups: Sequence[dist.ProcessGroup]) -> None:
        """Wait until all ranks have made this call. Raises PeerLost if some wait for each other elsewhere."""
        for group in groups:
            with needs_all(caller, group):
                meet_in_store(caller, dist.get_process_group_ranks(group))

    def note(self, unit: ParamUnit, why: str) -> None:
        """A gather that other ranks take part in begins."""
        gathers = self.gathers.setdefault(unit.data_group, [])
        if len(gathers) == MOST_GATHERS:  # they are not read where nothing is trained
            gathers[:] = [f"{MOST_GATHERS} earlier ones of checksum {zlib.crc32(repr(gathers).encode())}"]
        gathers.append(unit.name + why)

    def take(self) -> dict[str, list[str]]:
        """The gathers of each data group since the last call, in words. Ranks compare them."""
        taken, self.gathers = self.gathers, {}
        return taken

    def compare(self, control: Mapping[str, dist.ProcessGroup]) -> None:
        """Raise SyncError where the ranks of a data group differ. Collective over the groups, which are by name."""
        taken = self.take()
        failure: SyncError | None = None  # raised at the end: ranks of the next group may wait for this one there
        for name, group in control.items():
            gathers = taken.get(name, ())
            with needs_all("", group):
                if not agree.equal(gathers, group, "the order of gathers in an evaluation"):
                    failure = failure or unequal_gathers(name, group, gathers)
        if failure is not None:
            raise failure

    def learn(self, unit: ParamUnit | None) -> ParamUnit | None:
        """Note that `unit` is gathered; None: a write comes. Returns what came after the same two gathers before."""
        self.next_of[self.last_two] = unit
        self.last_two = (None, None) if unit is None else (self.last_two[1], unit)
        return self.next_of.get(self.last_two)
