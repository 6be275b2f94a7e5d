"""WithoutValues: a mode in which operators return results of the correct shape and dtype without computing them.

torch's FakeTensorMode does the same but takes six times as long per operator. It also handles other devices, unusual
layouts and symbolic sizes, which plans do not need.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

# A public module of torch that has the class; the module that defines it has a private name.
from torch.fx.experimental.proxy_tensor import TorchDispatchMode

from core_plan.live_memory import BEFORE, LiveMemory, Work

META = torch.device("meta")
A_VALUE, PLACES = "aten::_local_scalar_dense", "aten::nonzero"  # operators that ask for values


class Hollow(Tensor):
    """A CPU tensor without values. ``shadow`` is its copy on the meta device, whose views share a storage."""

    shadow: Tensor

    @staticmethod
    def __new__(cls, shadow: Tensor) -> Hollow:
        """Wrap an operator's result on the meta device."""
        made: Hollow = Tensor._make_wrapper_subclass(
            cls, shadow.shape, shadow.stride(), shadow.storage_offset(), dtype=shadow.dtype, device="cpu"
        )
        made.shadow = shadow
        return made

    def untyped_storage(self) -> torch.UntypedStorage:
        """Return the shadow's storage: equal for views of one tensor, freed with the last of them."""
        return self.shadow.untyped_storage()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run operators outside the mode inside it."""
        with WithoutValues():
            return func(*args, **(kwargs or {}))


class WithoutValues(TorchDispatchMode):
    """Mode in which all new tensors are ``Hollow``, and tensors from outside are treated as ``Hollow``."""

    def __init__(self) -> None:
        super().__init__()
        self.live: LiveMemory | None = None

    @contextmanager
    def followed_by(self, live: LiveMemory) -> Iterator[None]:
        """Record all results in ``live`` inside this context."""
        self.live = live
        try:
            yield
        finally:
            self.live = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.name() in (A_VALUE, PLACES) and isinstance(args[0], Hollow):
            result = self._asked(func, args[0])
        else:
            result = _computed(func, args, kwargs)
        if self.live is not None:
            self.live.note(result, Work.of(func, args, kwargs, result))
        return result

    def _asked(self, func: Any, tensor: Hollow) -> Any:
        """Return results of operators that need values: a check passes, a count is 0."""
        if func.name() == A_VALUE:
            return False if tensor.dtype == torch.bool else 0
        if self.live is None or self.live.place.part in ("", BEFORE):  # a check of masks: no element is found
            return tensor.new_empty(0, tensor.dim(), dtype=torch.int64)
        return func(tensor.shadow)  # torch raises an error


def _computed(func: Any, args: Any, kwargs: Any) -> Any:
    """Return the result of an operator, from the shadows of its arguments."""
    given: dict[int, Hollow] = {}

    def shadow_of(value: Any) -> Any:
        if isinstance(value, Hollow):
            given[id(value.shadow)] = value
            return value.shadow
        if isinstance(value, Tensor):
            return value.to(META)
        return META if isinstance(value, torch.device) else value

    def hollow(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        value = value.to(META)  # a few operators without tensor arguments create a CPU tensor
        known = given.get(id(value))
        if known is not None and known.shape != value.shape:
            raise RuntimeError(f"{func} changes a tensor's shape from {tuple(known.shape)} to {tuple(value.shape)}")
        return Hollow(value) if known is None else known

    compute = func
    if func.name() == "aten::_grouped_mm" and args[0].dtype != torch.bfloat16:
        compute = _grouped_product
    elif func.name() == "aten::addmm.dtype_out":  # torch 2.11 has it only for GPUs
        compute = _product_into
    return mapped(compute(*mapped(args, shadow_of), **mapped(kwargs, shadow_of)), hollow)


def _grouped_product(first: Tensor, second: Tensor, offs: Tensor | None = None, *_: Any, **__: Any) -> Tensor:
    """Return the result of a product of row groups, [rows, n], or of a weight gradient, [groups, k, n]."""
    if first.dim() == second.dim() == 2:
        assert offs is not None, "two matrices are cut into groups by offsets"
        return first.new_empty(len(offs), first.shape[0], second.shape[1])
    return first.new_empty(*first.shape[:-1], second.shape[-1])


def _product_into(*_: Any, out: Tensor, **__: Any) -> Tensor:
    """Return the result of a product that is written into ``out``."""
    return out


def mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    """Apply ``change`` to all values in nested lists, tuples and dictionaries."""
    if isinstance(value, (tuple, list)):
        return type(value)(mapped(item, change) for item in value)
    if isinstance(value, dict):
        return {key: mapped(item, change) for key, item in value.items()}
    return change(value)


def take_values(model: nn.Module, dtype: torch.dtype | None = None) -> None:
    """Replace tensors on the meta device by tensors of the active mode, with parameters in ``dtype`` if it is given.

    Tied parameters stay tied.
    """
    taken: dict[int, Any] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.device.type != "meta":  # it has been taken before
                continue
            if id(parameter) not in taken:
                fake = torch.empty(parameter.shape, dtype=dtype or parameter.dtype)
                taken[id(parameter)] = nn.Parameter(fake, requires_grad=parameter.requires_grad)
            setattr(module, name, taken[id(parameter)])
        others = [*module.named_buffers(recurse=False), *vars(module).items()]
        for name, tensor in others:
            if isinstance(tensor, Tensor):
                setattr(module, name, torch.empty(tensor.shape, dtype=tensor.dtype))
