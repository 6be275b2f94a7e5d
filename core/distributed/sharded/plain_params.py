"""PlainParams: parameters that every rank holds whole, so that nothing is gathered. It stands in for an Unsharder."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn

from core.distributed.contract.placement import MemStats
from core.distributed.sharded.param_unit import ParamUnit
from core.distributed.wire.shared_memory import HostChannel


class PlainParams:
    """The face of `Unsharder` for a model whose parameters are not sharded. Nothing here is collective."""

    units: Sequence[ParamUnit] = ()
    channels: Sequence[HostChannel] = ()
    is_held = True  # True while all values are there until the caller gives them up
    take_gathers: Callable[[], dict[str, list[str]]] = dict  # the gathers since the last call

    @property
    def memstats(self) -> MemStats | None:
        """Findings of the first step under a budget of memory."""
        return None

    def reading(self) -> AbstractContextManager[None]:
        """Surround what reads parameters."""
        return nullcontext()

    def gathered(self, caller: str = "gathered()") -> AbstractContextManager[None]:
        """Surround what needs all parameters, or writes them."""
        return nullcontext()

    def loading(self) -> AbstractContextManager[None]:
        """Surround what copies whole values into parameters."""
        return nullcontext()

    def own_part_of(self, param: nn.Parameter) -> tuple[int, torch.Tensor] | None:
        """(First element that this rank keeps, the elements from there on); None for a parameter that it has whole."""
        return None

    def cut(self, param: nn.Parameter) -> None:
        """Keep the shard of a parameter that has memory of its own; `cut_all` after the last."""

    def cut_all(self, params: Iterable[nn.Parameter]) -> None:
        """Keep the shards of parameters that have memory of their own."""

    def refuse(self, error: Exception | None, what: str) -> None:
        """Raise an error of this rank."""
        if error is not None:
            raise error

    def begin_update(self) -> None:
        """Parameters are about to be written."""

    def finish_update(self) -> None:
        """A step has written them."""

    def invalidate(self) -> None:
        """They have other values now."""

    def barrier(self) -> None:
        """Wait for ranks that read this one's memory."""

    def describe(self) -> str:
        """Text behind the table of buckets."""
        return ""
