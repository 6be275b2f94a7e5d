"""WithoutValues: a mode in which operators say what they would give, and none computes.

torch's own FakeTensorMode does the same and takes six times as long an operator. It also answers for other devices,
strange layouts and symbolic sizes, which no plan needs.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
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

    def __init__(self) -> None:
        super().__init__()
        # What operators gave that make new tensors, by their arguments: experts run the same ones again and again.
        self._made: dict[Any, Any] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        asked = func, described(args), described(kwargs)
        made = self._made.get(asked)
        if made is not None:
            return mapped(made, lambda make: Hollow(make()))
        given: dict[int, Hollow] = {}
        storages: set[int] = set()  # of the arguments

        def shadow_of(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return META if isinstance(value, torch.device) else value
            shadow = value.shadow if isinstance(value, Hollow) else value.to(META)
            storages.add(id(shadow.untyped_storage()))
            if isinstance(value, Hollow):
                given[id(shadow)] = value
            return shadow

        def hollow(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            value = value.to(META)  # a few operators that take no tensor make one of the CPU
            known = given.get(id(value))
            if known is not None and known.shape != value.shape:
                raise RuntimeError(f"{func} changes a tensor's shape from {tuple(known.shape)} to {tuple(value.shape)}")
            return Hollow(value) if known is None else known

        named = mapped(kwargs or {}, shadow_of)
        result = func(*mapped(args, shadow_of), **named)
        tensors = [result] if isinstance(result, Tensor) else result
        if isinstance(tensors, (tuple, list)) and all(
            isinstance(one, Tensor) and id(one.untyped_storage()) not in storages for one in tensors
        ):
            self._made[asked] = mapped(
                result, lambda one: partial(torch.empty_strided, one.shape, one.stride(), dtype=one.dtype, device=META)
            )
        return mapped(result, hollow)


def described(value: Any) -> Any:
    """Equal for arguments for which an operator gives tensors of the same shapes."""
    if isinstance(value, Tensor):
        return value.shape, value.stride(), value.dtype, value.requires_grad
    if isinstance(value, (tuple, list)):
        return tuple(map(described, value))
    if isinstance(value, dict):
        return tuple((key, described(item)) for key, item in value.items())
    return type(value), value


def mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    """A value with all that is in its lists, tuples and dictionaries changed."""
    if isinstance(value, (tuple, list)):
        return type(value)(mapped(item, change) for item in value)
    if isinstance(value, dict):
        return {key: mapped(item, change) for key, item in value.items()}
    return change(value)
