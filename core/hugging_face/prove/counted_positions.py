"""Detection of layers that count the positions of their tokens themselves.

Given a part of the sequence, such layers count from 0 on every rank. The error may show only beyond some length (the
floor of llama4's temperature), so comparing outputs of a short example can miss it. The example's forward is watched
instead.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as tree

# Indexing functions: an index selects one of this rank's tokens and is not a position.
INDEXING = ("__getitem__", "__setitem__", "gather", "scatter", "index", "take", "sort", "embedding")


class CountedPositions(TorchFunctionMode):
    """Mode that tracks integers which layers create by torch.arange, and how they are used.

    Integers that are only used as an index are ignored.

    Attributes:
        counts: Place in the code -> sizes of the ranges created there.
        used: Places whose integers were compared or converted to floats.
    """

    def __init__(self) -> None:
        super().__init__()
        self.counts: dict[str, set[int]] = defaultdict(set)
        self.used: set[str] = set()
        self._places: dict[int, tuple[Tensor, frozenset[str]]] = {}  # id -> tensor (keeps the id alive), places
        self._depth = 0

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        if self._depth == 0 or not isinstance(output, Tensor):
            return output
        name = getattr(func, "__name__", "")
        if func is torch.arange:
            caller = sys._getframe(1)
            module = str(caller.f_globals.get("__name__", ""))
            if not module.startswith("core."):
                place = f"{module}, line {caller.f_lineno}"
                self.counts[place].add(output.numel())
                self._places[id(output)] = output, frozenset([place])
            return output
        given = [leaf for leaf in tree.tree_leaves((args, kwargs)) if id(leaf) in self._places]
        places = frozenset[str]().union(*(self._places[id(leaf)][1] for leaf in given))
        if not places or any(word in name for word in INDEXING):
            return output
        if output.is_floating_point() or output.dtype is torch.bool:
            self.used |= places
        else:
            self._places[id(output)] = output, places
        return output

    @contextmanager
    def inside(self, layers: Collection[nn.Module]) -> Iterator[CountedPositions]:
        """Watch the forwards of these layers inside the context."""
        handles = []
        for layer in layers:
            handles.append(layer.register_forward_pre_hook(lambda *_: self._step(1)))
            handles.append(layer.register_forward_hook(lambda *_: self._step(-1), always_call=True))
        try:
            with self:
                yield self
        finally:
            self._places.clear()
            for handle in handles:
                handle.remove()

    def _step(self, by: int) -> None:
        self._depth += by

    def of_parts(self, parts: CountedPositions) -> list[str]:
        """Return places that counted all tokens here, but fewer in ``parts``, a forward of the cut sequence."""
        return sorted(place for place in self.used & parts.used if self.counts[place] != parts.counts[place])
