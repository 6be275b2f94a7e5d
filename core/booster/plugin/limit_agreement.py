"""Limits that every rank passes by itself, to a gradient of which each holds a part."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from core.agree import control_device
from core.distributed.wire.collectives import agree_max


def check_limit(name: str, value: Any, check: Callable[[Any], None], groups: Sequence[dist.ProcessGroup]) -> None:
    """`check(value)`, which raises ValueError, and the same value on all ranks; else ValueError on all. Collective.

    What cannot be compared or sent (a complex tensor, a huge int) raises its own error here, and ValueError elsewhere.
    groups: one after the other they join all ranks that hold a part.
    """
    refused: Exception | None = None
    largest_and_least = [torch.inf, torch.inf]  # of a rank that can offer none: no value is below it and above it
    try:
        check(value)
        largest_and_least = [float(value), -float(value)]
    except Exception as error:  # whatever it is: the others are on their way to the collective
        refused = error
    for group in groups:
        told = torch.tensor(largest_and_least, dtype=torch.float64, device=control_device(group))
        agree_max(told, group).wait()
        largest_and_least = told.tolist()
    if refused is not None:
        raise refused
    largest, least = largest_and_least[0], -largest_and_least[1]
    if largest != least:
        found = f"between {least} and {largest}" if least > 0 else "refused"
        raise ValueError(
            f"rank {dist.get_rank()}: {name} is {value} here and {found} on another rank, and each holds a part of one "
            "gradient; pass the same on all of them. Nothing was changed"
        )
