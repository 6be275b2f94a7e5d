"""WithoutValues: a mode in which operators return results of the correct shape and dtype without computing them.

torch's FakeTensorMode does the same but takes six times as long per operator. It also handles other devices, unusual
layouts and symbolic sizes, which plans do not need.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

# A public module of torch that has the class; the module that defines it has a private name.
from torch.fx.experimental.proxy_tensor import TorchDispatchMode

from core_plan.live_memory import BEFORE, LiveMemory, Work

META = torch.device("meta")
A_VALUE, PLACES = "aten::_local_scalar_dense", "aten::nonzero"  # operators that ask for values
# Result constructors and work by operator and arguments: layers run the same operators repeatedly.
KNOWN: dict[Any, tuple[Any, Work | None]] = {}
MOST_KNOWN = 100_000


class Hollow(Tensor):
    """A CPU tensor without values. `shadow` is its copy on the meta device, whose views share a storage."""

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
    """Mode in which all new tensors are `Hollow`, and tensors from outside are treated as `Hollow`."""

    def __init__(self) -> None:
        super().__init__()
        self.live: LiveMemory | None = None

    @contextmanager
    def followed_by(self, live: LiveMemory) -> Iterator[None]:
        """Record all results in `live` inside this context."""
        self.live = live
        try:
            yield
        finally:
            self.live = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.name() in (A_VALUE, PLACES) and isinstance(args[0], Hollow):
            result = self._asked(func, args[0])
            work = Work.of(func, args, kwargs, result)
        else:
            result, work = _answered(func, args, kwargs)
        if self.live is not None:
            self.live.note(result, work)
        return result

    def _asked(self, func: Any, tensor: Hollow) -> Any:
        """Return results of operators that need values: a check passes, a count is 0."""
        if func.name() == A_VALUE:
            return False if tensor.dtype == torch.bool else 0
        if self.live is None or self.live.place.part in ("", BEFORE):  # a check of masks: no element is found
            return tensor.new_empty(0, tensor.dim(), dtype=torch.int64)
        return func(tensor.shadow)  # torch raises an error


def _answered(func: Any, args: Any, kwargs: Any) -> tuple[Any, Work | None]:
    """Return the result of an operator, and its work."""
    asked = func, described(args), described(kwargs.items()) if kwargs else (), torch.get_default_dtype()
    if asked in KNOWN:
        makers, work = KNOWN[asked]
        return makers(args) if callable(makers) else mapped(makers, lambda make: make(args)), work
    result, makers = _computed(func, args, kwargs)
    work = Work.of(func, args, kwargs, result)
    if makers is not None:
        if len(KNOWN) >= MOST_KNOWN:
            KNOWN.clear()
        KNOWN[asked] = makers, work
    return result, work


def _computed(func: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Return an operator's result, and a function that creates the same for equal arguments; None if not possible."""
    given: dict[int, Hollow] = {}
    storages: set[int] = set()  # storages of the arguments

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
        value = value.to(META)  # a few operators without tensor arguments create a CPU tensor
        known = given.get(id(value))
        if known is not None and known.shape != value.shape:
            raise RuntimeError(f"{func} changes a tensor's shape from {tuple(known.shape)} to {tuple(value.shape)}")
        return Hollow(value) if known is None else known

    shadows, named = mapped(args, shadow_of), mapped(kwargs, shadow_of)
    base: Any = args[0].shadow if args and isinstance(args[0], Hollow) else None
    before = None if base is None else (id(base.untyped_storage()), base.storage_offset())
    compute = func
    if func.name() == "aten::_grouped_mm" and args[0].dtype != torch.bfloat16:
        compute = _grouped_product
    elif func.name() == "aten::addmm.dtype_out":  # torch 2.11 has it only for GPUs
        compute = _product_into
    result = compute(*shadows, **named)

    def maker(one: Any) -> Any:
        if not isinstance(one, Tensor):
            return None
        storage, offset = id(one.untyped_storage()), one.storage_offset()
        if storage not in storages:
            return partial(_new, one.shape, one.stride(), one.dtype)
        if before is None or storage != before[0] or one.dtype != base.dtype:
            return None
        return _same if one is base else partial(_view, one.shape, one.stride(), offset - before[1])

    makers = mapped(result, maker)
    of_each = (makers,) if isinstance(result, Tensor) else makers
    is_given = isinstance(of_each, (tuple, list)) and all(map(callable, of_each))
    return mapped(result, hollow), makers if is_given else None


def _new(shape: Any, strides: Any, dtype: torch.dtype, args: Any) -> Hollow:
    return Hollow(torch.empty_strided(shape, strides, dtype=dtype, device=META))


def _view(shape: Any, strides: Any, offset: int, args: Any) -> Hollow:
    base = args[0].shadow
    return Hollow(base.as_strided(shape, strides, base.storage_offset() + offset))


def _same(args: Any) -> Any:
    return args[0]


def _grouped_product(first: Tensor, second: Tensor, offs: Tensor | None = None, *_: Any, **__: Any) -> Tensor:
    """Return the result of a product of row groups, [rows, n], or of a weight gradient, [groups, k, n]."""
    if first.dim() == second.dim() == 2:
        assert offs is not None, "two matrices are cut into groups by offsets"
        return first.new_empty(len(offs), first.shape[0], second.shape[1])
    return first.new_empty(*first.shape[:-1], second.shape[-1])


def _product_into(*_: Any, out: Tensor, **__: Any) -> Tensor:
    """Return the result of a product that is written into `out`."""
    return out


def described(values: Iterable[Any]) -> tuple[Any, ...]:
    """Return a key that is equal for arguments whose results have the same shapes."""
    found: list[Any] = []
    for value in values:
        if isinstance(value, Tensor):
            found += type(value), value.shape, value.stride(), value.dtype, value.requires_grad
        elif isinstance(value, (tuple, list)):
            found.append(described(value))
        else:
            found += type(value), value
    return tuple(found)


def mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    """Apply `change` to all values in nested lists, tuples and dictionaries."""
    if isinstance(value, (tuple, list)):
        return type(value)(mapped(item, change) for item in value)
    if isinstance(value, dict):
        return {key: mapped(item, change) for key, item in value.items()}
    return change(value)


def take_values(model: nn.Module, dtype: torch.dtype | None = None) -> None:
    """Replace tensors on the meta device by tensors of the active mode. Tied parameters stay tied.

    Args:
        model: Model to change.
        dtype: Dtype of the new parameters; None keeps their own.
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
