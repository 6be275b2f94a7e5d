"""Keep Python's cyclic garbage collector from running while many lasting objects are made."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collector_paused() -> Iterator[None]:
    """No cyclic collection inside; afterwards it is on or off as it was.

    A model of 100 000 parameters gets a million objects when it is wrapped, and none of them is garbage. The collector
    would go over all of them, and all else that lives in the process, at every quarter more.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            _call_all_old()
            gc.enable()


def _call_all_old() -> None:
    """Spare the next young collection a look at all that was made: it would take as long as a tenth of the wrap.

    What is frozen is set aside, and thawing puts it among the oldest objects: two exchanges of lists, without a look at
    what is in them. Not where a user has set aside something, which would be thawed with it.
    """
    if gc.get_freeze_count() == 0:
        gc.freeze()
        gc.unfreeze()
