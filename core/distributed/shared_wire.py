"""SharedWire: several wrapped models, or chunks of one, that use the same communicators.

A communicator pairs the n-th collective of one rank with the n-th of another. Within one model the reducer keeps one
order. Between models there is none that backward could follow: a rank may call them in another order, or leave one out.
So with several models backward launches nothing, and each model's buckets leave in its finalize, which is a call that
all ranks make in the same order. Chunks of one pipeline have an order (`link_chunks`) and count as one model.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

import torch.distributed as dist

if TYPE_CHECKING:
    from core.distributed.grad_reducer import GradReducer
    from core.distributed.socket_channel import SocketChannel


class SharedWire:
    """The reducers that use one communicator, and the channel beside it, where there is one."""

    # Belongs to the communicator and dies with it; torch's ProcessGroup takes no attribute of ours.
    _of_group: ClassVar[weakref.WeakKeyDictionary[dist.ProcessGroup, SharedWire]] = weakref.WeakKeyDictionary()

    def __init__(self) -> None:
        self._reducers: list[weakref.ref[GradReducer]] = []
        self.channel: SocketChannel | None = None

    @classmethod
    def of(cls, group: dist.ProcessGroup) -> SharedWire:
        """The one object that all models wrapped with `group` share."""
        return cls._of_group.setdefault(group, cls())

    def reducers(self) -> list[GradReducer]:
        """Those whose wrapper is alive."""
        alive = [reducer for reducer in (reference() for reference in self._reducers) if reducer is not None]
        self._reducers = [weakref.ref(reducer) for reducer in alive]
        return alive

    def quiesce(self) -> None:
        """Before a collective that is not a reducer's: launch the rest of every step that some rank has begun to
        launch.
        """
        for reducer in self.reducers():
            if reducer.open and reducer.synced_backward:
                reducer.start()

    def join(self, reducer: GradReducer) -> None:
        """A model was wrapped."""
        self._reducers.append(weakref.ref(reducer))

    def is_own(self, unit: Sequence[GradReducer]) -> bool:
        """Does nobody but these use it?"""
        return all(any(reducer is member for member in unit) for reducer in self.reducers())


def link_chunks(reducers: Sequence[GradReducer]) -> None:
    """Give the chunks of this rank, in the model's order, one launch order: the last chunk's buckets first."""
    unit = [weakref.ref(reducer) for reducer in reversed(reducers)]
    for reducer in reducers:
        reducer.linked = unit
