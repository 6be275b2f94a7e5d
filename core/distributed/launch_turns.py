"""LaunchTurns: whose buckets go first, where several wrapped models or chunks share communicators.

A communicator pairs the n-th collective of one rank with the n-th of another. Within one model the reducer keeps one
order; but how far a backward gets before another model's begins differs between ranks (an unused layer, a late
gradient). So between models the order is that in which they began their step, which is the program's order and so the
same on every rank; chunks of one pipeline have theirs given by `link_chunks`.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from core.distributed.grad_reducer import GradReducer
    from core.process_groups import ProcessGroups


class LaunchTurns:
    """The reducers of one ProcessGroups that have a step under way, in the order of their turns."""

    def __init__(self) -> None:
        self._active: list[weakref.ref[GradReducer]] = []

    @classmethod
    def of(cls, groups: ProcessGroups) -> LaunchTurns:
        """The one object that all models wrapped with `groups` share."""
        turns = groups.shared.setdefault("launch_turns", cls())
        if not isinstance(turns, cls):
            raise TypeError(f"groups.shared['launch_turns'] is {turns!r} and not a LaunchTurns")
        return turns

    def active(self) -> list[GradReducer]:
        """In order."""
        reducers = [reference() for reference in self._active]
        return [reducer for reducer in reducers if reducer is not None]

    def enter(self, reducer: GradReducer) -> None:
        """A step of this reducer begins outside no_sync: its unit goes to the end of the line, unless it stands in
        it.
        """
        present = self.active()
        new = [member for member in reducer.unit() if not any(member is other for other in present)]
        self._active = [weakref.ref(member) for member in (*present, *new)]

    def leave(self, reducer: GradReducer) -> None:
        """Its step is reduced."""
        self._active = [weakref.ref(other) for other in self.active() if other is not reducer]

    def before(self, reducer: GradReducer) -> list[GradReducer]:
        """Those whose buckets all go before this reducer's."""
        present = self.active()
        place = next((n for n, other in enumerate(present) if other is reducer), len(present))
        return present[:place]

    def has_turn(self, reducer: GradReducer) -> bool:
        """May backward launch its buckets? Chunks of one unit follow each other; another model must have finished."""
        unit = reducer.unit()
        return all(other in unit and other.all_launched for other in self.before(reducer))


def link_chunks(reducers: Sequence[GradReducer]) -> None:
    """Give the chunks of this rank, in the model's order, one launch order: the last chunk's buckets first."""
    unit = [weakref.ref(reducer) for reducer in reversed(reducers)]
    for reducer in reducers:
        reducer.held = False
        reducer.linked = unit
