"""Closing of a rank's connections in forked DataLoader workers.

A forked process inherits all descriptors of its parent. If a rank is killed, its connections stay open while a worker
runs, so the rank would look alive to the others.
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
    """Close inherited network connections in all DataLoader workers forked from now on."""
    if sys.platform == "linux":
        _register()


@functools.cache
def _register() -> None:
    kept: set[int] = set()  # descriptors of Python sockets, which the data set may use

    def before() -> None:
        kept.clear()
        if _is_from_a_dataloader():  # before the fork, because the child would copy the memory of all objects
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
    """Close this process's network connections, except ``kept`` ones: gloo's, NCCL's and those of torch's store.

    Each descriptor stays open on the null device, so that no other file gets its number.
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
