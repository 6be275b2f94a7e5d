"""ShardedGradient: what stands in `.grad` while a reduced gradient is spread over the ranks of a data group.

With None there, `torch.nn.utils.clip_grad_norm_` would return 0 and clip nothing, and an edit would change nothing. It
also tells gradients that the user has dropped (`p.grad = None`, any zero_grad) from those that the next backward adds
to, which torch's rule for `.grad` needs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class SyncError(RuntimeError):
    """A gradient or a call came at a moment at which it could only have been mixed up with another step's."""


class ShardedGradient(torch.Tensor):
    """Has the gradient's shape, dtype and device and no memory of its own. Every use but these raises SyncError:
    autograd may add to it, as to a gradient that is not there yet, and zero_grad(set_to_none=False) may zero it.
    """

    of_param: str  # its name
    added: torch.Tensor | None  # what autograd has added since
    zeroed: bool

    @classmethod
    def of(cls, param: nn.Parameter, name: str, dtype: torch.dtype) -> ShardedGradient:
        """For the parameter of this name, whose gradient has this dtype."""
        memory = torch.empty(param.shape, dtype=dtype, device=param.device)
        memory.untyped_storage().resize_(0)
        marker: ShardedGradient = memory.as_subclass(cls)
        marker.of_param, marker.added, marker.zeroed = name, None, False
        return marker

    def take_added(self) -> torch.Tensor | None:
        """What autograd has added, which is forgotten here."""
        added, self.added = self.added, None
        return added

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            return args[0]
        if func is torch.ops.aten.zero_.default:
            args[0].zeroed = True
            return args[0]
        if func is torch.ops.aten._foreach_zero_.default:
            for tensor in args[0]:
                tensor.zero_()
            return None
        if func is torch.ops.aten.add_.Tensor and type(args[0]) is cls and type(args[1]) is not cls:
            marker, grad = args[:2]
            marker.added = grad.to(marker.dtype, copy=True) if marker.added is None else marker.added + grad
            return marker
        if func is torch.ops.aten.add.Tensor and type(args[0]) is cls and type(args[1]) is not cls:
            return args[1].clone()  # create_graph=True adds out of place
        raise SyncError(next(value for value in _tensors(args) if type(value) is cls).refusal(func.__name__))

    def refusal(self, use: str) -> str:
        """Why it cannot be used, and what to call instead."""
        return (
            f"{use} was asked of the gradient of {self.of_param!r}, which is sharded: each rank holds a part of it. "
            "Clip with the optimizer of get_megatron_optimizer (OptimizerConfig.clip_grad or clip_grad_norm), scale "
            "with scale_gradients() of the wrapped model, or have whole gradients with finalize_model_grads(..., "
            "force_all_reduce=True)"
        )

    def __repr__(self, **_: Any) -> str:
        return f"ShardedGradient({self.of_param!r}, shape={list(self.shape)})"

    def __deepcopy__(self, memo: Any) -> Any:
        raise SyncError(self.refusal("a copy"))

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise SyncError(self.refusal("pickling"))


def _tensors(value: Any) -> list[Any]:
    """Those in nested lists and tuples of arguments."""
    if isinstance(value, (list, tuple)):
        return [tensor for item in value for tensor in _tensors(item)]
    return [value] if isinstance(value, torch.Tensor) else []
