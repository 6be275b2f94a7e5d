"""Which operators torch runs: to see that a gradient was added in place, and not made apart."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

IN_PLACE = {"addmm_", "index_add_", "index_put_"}  # by which a fused layer adds to main_grad


class _Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if isinstance(func, torch._ops.OpOverload):
            self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def added_in_place(action: Callable[[], object]) -> bool:
    """Run the action; did it add a weight's gradient in place?"""
    with _Recorder() as recorder:
        action()
    return not IN_PLACE.isdisjoint(recorder.names)
