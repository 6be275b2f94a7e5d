"""Workers of a DataLoader hold no connections of the rank that has forked them.

A forked process has all descriptors of its parent. A rank that is killed would seem to be alive to the others for as
long as a worker of it runs: their connections to it stay open.
"""

from __future__ import annotations

import functools
import gc
import os
import socket
import stat
import sys
from collections.abc import Collection
from types import FrameType

from torch.utils.data import dataloader

FAMILIES = (socket.AF_INET, socket.AF_INET6)


def drop_connections_in_workers() -> None:
    """From now on, workers that a DataLoader forks let go of the network connections of this process."""
    if sys.platform == "linux":
        _register()


@functools.cache
def _register() -> None:
    kept: set[int] = set()  # descriptors of sockets that Python knows: the data set may use one

    def before() -> None:
        kept.clear()
        if _is_from_a_dataloader():  # the child looks at no objects: their memory would be copied
            kept.update(item.fileno() for item in gc.get_objects() if issubclass(type(item), socket.socket))

    def after() -> None:
        if _is_from_a_dataloader():
            drop_connections(kept)

    os.register_at_fork(before=before, after_in_child=after)


def _is_from_a_dataloader() -> bool:
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code.co_filename == dataloader.__file__:
            return True
        frame = frame.f_back
    return False


def drop_connections(kept: Collection[int] = ()) -> None:
    """Let go of this process's network connections: those of gloo, NCCL and torch's store.

    Each descriptor stays, and leads nowhere, so that no other file takes its number.
    """
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        if descriptor not in kept and _is_connection(descriptor):
            os.dup2(nowhere, descriptor)
    os.close(nowhere)


def _is_connection(descriptor: int) -> bool:
    try:
        if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
            return False
        with socket.socket(fileno=os.dup(descriptor)) as opened:
            return opened.family in FAMILIES
    except OSError:  # the listing itself had a descriptor
        return False
