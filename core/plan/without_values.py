"""WithoutValues: a mode in which operators say what they would give, and none computes.

torch's own FakeTensorMode does the same and takes six times as long an operator. It also answers for other devices,
strange layouts and symbolic sizes, which no plan needs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

# A public module of torch that has the class; the module that defines it has a private name.
from torch.fx.experimental.proxy_tensor import TorchDispatchMode

META = torch.device("meta")


class Hollow(Tensor):
    """A tensor of the CPU without values. shadow: the same on the meta device, where views share a storage."""

    shadow: Tensor

    @staticmethod
    def __new__(cls, shadow: Tensor) -> Hollow:
        """Around what an operator gave on the meta device."""
        made: Hollow = Tensor._make_wrapper_subclass(
            cls, shadow.shape, shadow.stride(), shadow.storage_offset(), dtype=shadow.dtype, device="cpu"
        )
        made.shadow = shadow
        return made

    def untyped_storage(self) -> torch.UntypedStorage:
        """That of the shadow: equal for views of one tensor, freed with the last of them."""
        return self.shadow.untyped_storage()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Operators outside the mode are taken into it."""
        with WithoutValues():
            return func(*args, **(kwargs or {}))


class WithoutValues(TorchDispatchMode):
    """Inside, all new tensors are `Hollow` ones, and what comes from outside counts as one."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given: dict[int, Hollow] = {}

        def shadow_of(value: Any) -> Any:
            if isinstance(value, Hollow):
                given[id(value.shadow)] = value
                return value.shadow
            return value.to(META) if isinstance(value, Tensor) else META if isinstance(value, torch.device) else value

        def hollow(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            value = value.to(META)  # a few operators that take no tensor make one of the CPU
            known = given.get(id(value))
            if known is not None and known.shape != value.shape:
                raise RuntimeError(f"{func} changes a tensor's shape from {tuple(known.shape)} to {tuple(value.shape)}")
            return Hollow(value) if known is None else known

        named = mapped(kwargs or {}, shadow_of)
        return mapped(func(*mapped(args, shadow_of), **named), hollow)


def mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    """A value with all that is in its lists, tuples and dictionaries changed."""
    if isinstance(value, (tuple, list)):
        return type(value)(mapped(item, change) for item in value)
    if isinstance(value, dict):
        return {key: mapped(item, change) for key, item in value.items()}
    return change(value)
