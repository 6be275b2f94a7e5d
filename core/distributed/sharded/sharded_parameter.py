"""ShardedParameter: the class of a sharded parameter. Its use in a forward or backward unshards it.

A parameter may be read without a hook of its module: a tied weight, ``F.linear(x, emb.weight)``, attention that reads
its projection's weight, a custom function that kept it. torch asks a tensor's class before it computes with the tensor.
So the class changes with the values: UnshardedParameter while they are available, ShardedParameter otherwise. An
operation on a ShardedParameter first unshards its bucket, or is rejected. An UnshardedParameter costs nothing extra.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge

from core.distributed.buffer.grad_attribute import attributes_alone
from core.distributed.buffer.grad_placeholder import tensors_in
from core.groups.agree import SyncError

# Attributes that need values; all others are answered without a gather.
VALUES = frozenset({"data", "T", "H", "mT", "mH", "real", "imag"})
# Methods that are answered without a gather.
ABOUT = frozenset(
    {
        *("size", "dim", "ndimension", "numel", "nelement", "element_size", "__len__", "__hash__", "__repr__"),
        *("is_floating_point", "is_complex", "is_signed", "get_device", "requires_grad_", "retain_grad"),
        *("register_hook", "register_post_accumulate_grad_hook", "_has_compatible_shallow_copy_type"),
    }
)

CONVERSIONS = frozenset({"to", "cpu", "cuda", "float", "double", "half", "bfloat16"})

DATA: Any = torch.Tensor.data  # reads and writes `.data` without a record


class Owner(Protocol):
    """Interface of an Unsharder for its parameters."""

    def runs(self) -> bool: ...
    def record_data(self, param: nn.Parameter, values: torch.Tensor) -> None: ...
    def load_values(self, param: ShardedParameter, values: torch.Tensor) -> bool: ...
    def refuse_write(self, param: ShardedParameter) -> None: ...
    def unshard(self, missing: Sequence[ShardedParameter], others: Sequence[nn.Parameter]) -> None: ...


class UnshardedParameter(nn.Parameter):
    """A parameter with values; each owner has a separate subclass.

    torch counts writes to a tensor's ``.data`` separately from writes to the tensor. So each access to it is recorded.
    """

    owner: Callable[[], Owner | None]  # a weak reference

    @property
    def data(self) -> torch.Tensor:
        """The values. A write to them in a forward is rejected when they are freed."""
        values: torch.Tensor = DATA.__get__(self)
        owner = type(self).owner()
        if owner is not None:
            owner.record_data(self, values)
        return values

    @data.setter
    def data(self, values: torch.Tensor) -> None:
        if values is not self:  # as in `model.to(device)` on the same device
            DATA.__set__(self, values)

    def cpu(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Return a copy, or on a CPU another tensor in the same memory: torch's save_on_cpu keeps it for backward."""
        found = super().cpu(*args, **kwargs)
        return found.view_as(found) if found is self and not isinstance(self, ShardedParameter) else found


class LentParameter(UnshardedParameter):
    """A frozen parameter whose values are available for a recomputation within a backward.

    torch's checkpoint saves a tensor without gradients itself, and this parameter has no values when it is read again.
    So operations get another tensor in the same memory, which stays until backward has used it.
    """

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        written = tensors_in((_written(func, (*args, *kwargs.values())), kwargs.get("out")))
        if _asks_about(func) or any(isinstance(tensor, LentParameter) for tensor in written):
            with attributes_alone():
                return func(*args, **kwargs)
        return func(*_with_values(args), **_with_values(kwargs))


class ShardedParameter(UnshardedParameter):
    """A parameter without values; each owner has a separate subclass."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        owner = cls.owner()
        # torch's pipelines call `param.view_as(param)` to find a leaf's node in the graph.
        asks_for_edge = getattr(func, "__name__", "") == "view_as" and args[0] is args[1]
        if _asks_about(func) or (owner is not None and asks_for_edge and not owner.runs()):
            with attributes_alone():
                return func(*args, **kwargs)
        if owner is None:  # all ranks may still map one memory, where a write would reach the others
            raise SyncError(
                f"{getattr(func, '__name__', func)} was given a parameter that was sharded by a wrapper (strategy "
                "optim_grads_params) which was deleted, and its values with it. Take a state dict before"
            )
        if _changes_nothing(func, args, kwargs):
            return args[0]
        if getattr(func, "__name__", "") in ("grad", "backward"):  # torch.autograd's, for some inputs
            return _differentiated(func, args, kwargs)
        for written in tensors_in((_written(func, (*args, *kwargs.values())), kwargs.get("out"))):
            if type(written) is cls:
                if getattr(func, "__name__", "") == "copy_" and owner.load_values(written, args[1]):
                    return written
                owner.refuse_write(written)
        given = [tensor for tensor in tensors_in((args, kwargs)) if isinstance(tensor, nn.Parameter)]
        missing = [param for param in given if type(param) is cls]
        if not missing:
            raise SyncError(
                f"{getattr(func, '__name__', func)} was given a sharded parameter inside something else than lists, "
                "tuples and dictionaries, so its values cannot be gathered; pass it alone, or make the call inside "
                "`with model.gathered():`"
            )
        owner.unshard(missing, [param for param in given if type(param) is not cls])
        return func(*args, **kwargs)


class ParamClasses(NamedTuple):
    """Parameter classes of one owner."""

    when_sharded: type[nn.Parameter]  # without values
    when_unsharded: type[nn.Parameter]  # with values
    lent: type[nn.Parameter]  # frozen, with values for a recomputation


@lru_cache
def untraced(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that torch.compile calls without tracing it. Imports the compiler, which takes 1.5 s."""
    disabled: Callable[..., Any] = torch.compiler.disable(function)
    return disabled


def owned_by(owner: Callable[[], Owner | None]) -> ParamClasses:
    """Create parameter classes that call this owner, until it is deleted."""
    shared = {"owner": staticmethod(owner)}
    # A gather changes classes, and torch 2.11 fails if it traces that.
    function = classmethod(untraced(vars(ShardedParameter)["__torch_function__"].__func__))
    return ParamClasses(
        type("ShardedParameter", (ShardedParameter,), {**shared, "__torch_function__": function}),
        type("Parameter", (UnshardedParameter,), shared),
        type("Parameter", (LentParameter,), shared),
    )


@lru_cache(maxsize=1000)
def _asks_about(func: Any) -> bool:
    name = getattr(func, "__name__", "")
    if name in ("__get__", "__set__", "__delete__"):
        attribute = getattr(getattr(func, "__self__", None), "__name__", "")
        return attribute != "data" if name == "__set__" else attribute not in VALUES
    return name in ABOUT


def _changes_nothing(func: Any, args: Any, kwargs: Any) -> bool:
    """Return True for a conversion that changes nothing, such as ``param.to(device)`` or ``x.to(param)``."""
    if getattr(func, "__name__", "") not in CONVERSIONS or "memory_format" in kwargs:
        return False
    with attributes_alone():
        like = torch.empty(0, dtype=args[0].dtype, device=args[0].device)
        return func(like, *args[1:], **kwargs) is like


def _written(func: Any, args: Any) -> Any:
    """Return the tensor that an in-place function writes: its first argument."""
    name = getattr(func, "__name__", "")
    in_place = name.endswith("_") and not name.endswith("__")
    assigns = name in ("__set__", "__setitem__") or (name.startswith("__i") and name not in ("__int__", "__index__"))
    return args[0] if args and (in_place or (assigns and name != "__invert__")) else ()


def _differentiated(func: Any, args: Any, kwargs: Any) -> Any:
    """Run ``torch.autograd.grad`` or ``backward`` for sharded parameters; torch creates no zeros for an edge."""
    inputs = args[1] if len(args) > 1 else kwargs.get("inputs")
    if not kwargs.get("materialize_grads") or isinstance(inputs, dict):
        return func(*_with_edges(args), **_with_edges(kwargs))
    found = func(*_with_edges(args), **{**_with_edges(kwargs), "materialize_grads": False, "allow_unused": True})
    of_each = [inputs] if isinstance(inputs, torch.Tensor) else inputs
    return tuple(
        torch.zeros(
            value.shape, dtype=value.dtype, device=value.device, requires_grad=kwargs.get("create_graph", False)
        )
        if grad is None
        else grad
        for value, grad in zip(of_each, found, strict=True)
    )


def _with_edges(value: Any) -> Any:
    """Replace sharded parameters by graph edges, which a backward can reach without values."""
    return _replaced(value, ShardedParameter, get_gradient_edge)


def _with_values(value: Any) -> Any:
    """Replace lent parameters by plain tensors."""
    return _replaced(value, LentParameter, torch.Tensor.detach)


def _replaced(value: Any, kind: type[nn.Parameter], by: Callable[[torch.Tensor], Any]) -> Any:
    """Replace each tensor of a class in nested lists, tuples and dictionaries."""
    if isinstance(value, kind):
        with attributes_alone():
            return by(value)
    if isinstance(value, dict):
        return {key: _replaced(item, kind, by) for key, item in value.items()}
    return type(value)(_replaced(item, kind, by) for item in value) if type(value) in (list, tuple) else value
