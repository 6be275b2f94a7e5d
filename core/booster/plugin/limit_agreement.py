"""Limits that each rank passes alone, for a gradient of which each holds a part."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist

from core.groups import agree


def check_limit(name: str, value: Any, check: Callable[[Any], None], groups: Sequence[dist.ProcessGroup]) -> None:
    """`check(value)`, which raises ValueError, and the same value on all ranks; else ValueError on all. Collective.

    What cannot be compared (a complex tensor, a huge int) raises its own error here, and ValueError elsewhere.
    groups: one after the other they join all ranks that hold a part.
    """
    failure: Exception | None = None
    table: list[str] = []
    try:
        check(value)
        table = [f"{name} = {float(value)}"]
    except Exception as error:  # of any kind: the others are on their way to the comparison
        failure = error
    advice = "Each holds a part of one gradient: pass the same on all of them. Nothing was changed"
    agree.same((("the gradient's parts", group, table) for group in groups), failure, kind=ValueError, advice=advice)
