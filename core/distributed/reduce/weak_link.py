"""WeakLink: how a wrapped module and its parameters refer to their wrapper."""

from __future__ import annotations

import weakref
from typing import Any, TypeVar

T = TypeVar("T")


class WeakLink(weakref.ref[T]):
    """A weak reference that copies and pickles as a dead one, as the wrapper of a module is none of its copy's.

    Without the wrapper, deleted or left behind, a module is a plain one: hooks that find a dead link do nothing.
    """

    __slots__ = ()

    def __reduce__(self) -> tuple[Any, ...]:
        return WeakLink, (_Gone(),)


class _Gone:
    """What a copied link refers to; nobody keeps it."""
