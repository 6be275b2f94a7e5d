"""GradPlaceholder: the value of ``.grad`` while a gradient is in flight, sharded, or not scaled yet.

With None instead, ``torch.nn.utils.clip_grad_norm_`` would return 0 and clip nothing, and an edit would change nothing.
The placeholder also shows which gradients the user has dropped (``p.grad = None``, any zero_grad). The next backward
adds to the others, as torch's rule for ``.grad`` says.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import nn

from core.groups.agree import SyncError


class GradPlaceholder(torch.Tensor):
    """A tensor with the gradient's shape, dtype and device, but without memory.

    Two uses are allowed: autograd may add to it, as to a gradient that does not exist yet, and
    zero_grad(set_to_none=False) may zero it. Every other use raises SyncError.
    """

    of_param: str  # the parameter's name
    added: torch.Tensor | None  # sum of the gradients that autograd has added
    zeroed: bool
    touched: bool  # True if either has happened
    owner: weakref.ref[Any]  # moves the gradient; deleted with the wrapper

    @classmethod
    def of(cls, param: nn.Parameter, name: str, dtype: torch.dtype, owner: Any) -> GradPlaceholder:
        """Make the placeholder of a parameter's gradient, with a weak reference to ``owner``, the wrapper's part."""
        memory = torch.empty(param.shape, dtype=dtype, device=param.device)
        memory.untyped_storage().resize_(0)
        marker: GradPlaceholder = memory.as_subclass(cls)
        marker.of_param, marker.owner = name, weakref.ref(owner)
        marker.reset()
        return marker

    def reset(self) -> None:
        self.added, self.zeroed, self.touched = None, False, False

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            return args[0]
        if func is torch.ops.aten.zero_.default:
            args[0].reset()
            args[0].zeroed = args[0].touched = True
            return args[0]
        if func is torch.ops.aten._foreach_zero_.default:
            for tensor in args[0]:
                tensor.zero_()
            return None
        adds = func in (torch.ops.aten.add_.Tensor, torch.ops.aten.add.Tensor)  # the latter under create_graph=True
        if adds and not kwargs and type(args[0]) is cls and type(args[1]) is not cls:
            marker, grad = args
            if marker.added is None:
                marker.added = torch.zeros(marker.shape, dtype=marker.dtype, device=marker.device)
            marker.added.add_(grad)
            marker.touched = True
            return marker
        raise SyncError(next(value for value in tensors_in(args) if type(value) is cls).refusal(func.__name__))

    def refusal(self, use: str) -> str:
        """Return an error text: why the gradient cannot be used by an operation, and which call to make instead."""
        if self.owner() is None:
            return (
                f"{use} was asked of the gradient of {self.of_param!r}, which is gone: it was sharded by a "
                "DistributedDataParallel, or still to be scaled, and the wrapper is deleted. Call model.zero_grad() "
                "(set_to_none=True, its default) and run backward again. To reduce gradients over ranks, wrap the "
                "model again first"
            )
        return (
            f"{use} was asked of the gradient of {self.of_param!r}, which is not in `.grad` now: its reduction has "
            "begun, or it is sharded, so that each rank holds a part, or scale_in_optimizer leaves its division to the "
            "optimizer. Look at gradients after finalize_model_grads. Where they are sharded, clip with "
            "accelerator.clip_grad_norm_ or fabric.clip_gradients in loops of those, otherwise with the optimizer of "
            "get_megatron_optimizer (OptimizerConfig.clip_grad or clip_grad_norm) or LoopOptimizer.clip; scale with "
            "scale_gradients() of the wrapped model, or have whole gradients with finalize_model_grads(..., "
            "force_all_reduce=True)"
        )

    def __repr__(self, **_: Any) -> str:
        return f"GradPlaceholder({self.of_param!r}, shape={list(self.shape)})"

    def __deepcopy__(self, memo: Any) -> Any:
        raise SyncError(self.refusal("a copy"))

    def __dlpack__(self, **_: Any) -> Any:  # numpy and other libraries would read memory that is not there
        raise SyncError(self.refusal("an export to another library"))

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise SyncError(self.refusal("pickling"))


def tensors_in(value: Any) -> list[Any]:
    """Return the tensors in nested lists, tuples and dictionaries of arguments."""
    if isinstance(value, dict):
        return tensors_in(list(value.values()))
    if isinstance(value, (list, tuple)):
        return [tensor for item in value for tensor in tensors_in(item)]
    return [value] if isinstance(value, torch.Tensor) else []
