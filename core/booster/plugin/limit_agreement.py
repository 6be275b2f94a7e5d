"""Agreement on limits that each rank passes separately, for a gradient that is distributed over ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist

from core.groups import agree


def check_limit(name: str, value: Any, check: Callable[[Any], None], groups: Sequence[dist.ProcessGroup]) -> None:
    """Check a limit on every rank, and that all ranks pass the same value. Collective.

    ``groups`` together join all ranks that hold a part of the gradient. Raises ValueError on all ranks if a value is
    invalid or differs. A value that cannot be compared (a complex tensor, a huge int) raises its own error on its rank.
    """
    failure: Exception | None = None
    table: list[str] = []
    try:
        check(value)
        table = [f"{name} = {float(value)}"]
    except Exception as error:  # any error: the other ranks are on their way to the comparison
        failure = error
    advice = "Each holds a part of one gradient: pass the same on all of them. Nothing was changed"
    agree.same((("the gradient's parts", group, table) for group in groups), failure, kind=ValueError, advice=advice)
