"""Weight gradients that a user's kernel adds to ``main_grad`` itself, as Megatron's and TransformerEngine's layers do.

Such a kernel sets ``param.grad_added_to_main_grad = True``. It returns a dummy gradient to autograd, often
uninitialized, so that hooks run. Here ``.grad`` is the buffer, so autograd would add the dummy to it. A parameter is
therefore declared before the wrap by ``param.grad_added_to_main_grad = False``. A tensor hook then replaces the dummy
with zeros.

With ``param.zero_out_wgrad = True`` the dummy is zeros and is added. Set it if one backward uses a weight both with and
without the kernel (a tied embedding), because autograd adds the dummy to the gradient from the other use.
"""

from __future__ import annotations

import weakref

import torch
import torch.distributed as dist
from torch import nn

from core.groups.agree import SyncError


def ignore_dummies(param: nn.Parameter, name: str) -> None:
    """Register a hook on a declared parameter that replaces the dummy gradient of a fused kernel with zeros."""
    param_of = weakref.ref(param)

    def hook(grad: torch.Tensor | None) -> torch.Tensor | None:
        param = param_of()
        if param is None or not param.grad_added_to_main_grad:
            return None
        take_flag(param, name)
        return None if grad is None or asks_for_zeros(param) else grad.new_zeros(()).expand_as(grad)

    param.register_hook(hook)


def check_declared(param: torch.Tensor, name: str) -> None:
    """Check that a kernel which set ``grad_added_to_main_grad`` may do so, and clear the flag.

    Autograd has just added to the parameter's gradient. Raises SyncError if that was the dummy of a kernel whose
    parameter was not declared.
    """
    if not asks_for_zeros(param):
        raise SyncError(
            f"rank {dist.get_rank()}: a kernel set grad_added_to_main_grad on parameter {name!r}, and autograd has "
            "added the kernel's dummy gradient to main_grad. Set param.grad_added_to_main_grad = False before the "
            "model is wrapped, so that dummies are ignored; or let the kernel return None and leave the flag alone"
        )
    take_flag(param, name)


def take_flag(param: torch.Tensor, name: str) -> None:
    """Clear ``grad_added_to_main_grad`` for the next backward.

    Raises SyncError if the memory the kernel added to is not this step's gradient.
    """
    param.grad_added_to_main_grad = False
    main_grad = getattr(param, "main_grad", None)
    if main_grad is None or param.grad is not main_grad:
        raise SyncError(
            f"rank {dist.get_rank()}: a kernel added the gradient of {name!r} to main_grad while param.grad was not "
            "main_grad. It holds the last step's gradients, is being reduced, or is None as gradients are sharded. "
            "Call zero_grad_buffer() before the step's first backward, use no_sync() for all backwards but the last, "
            "and let the kernel return the gradient to autograd where param.grad is not param.main_grad"
        )


def asks_for_zeros(param: torch.Tensor) -> bool:
    """Return True if the kernel must return a dummy gradient of zeros, which changes nothing when it is added."""
    return bool(getattr(param, "zero_out_wgrad", False))
