"""Clipping of gradients in ``.grad``, outside the buffers of this package, as torch's own optimizers use them."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn
from torch.distributed.tensor import DTensor


@torch.no_grad()
def clip_loose_gradients(
    params: Iterable[nn.Parameter],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> torch.Tensor:
    """Scale all gradients so that their global norm is at most ``max_norm``, and return the norm before clipping.

    torch.nn.utils.clip_grad_norm_ cannot combine the norms of shards (DTensors) and plain tensors. Every rank that
    holds shards must call this function. Raises RuntimeError if the norm is not finite and ``error_if_nonfinite`` is
    set.
    """
    params = list(params)
    grads = [param.grad for param in params if param.grad is not None]
    sharded = [grad for grad in grads if isinstance(grad, DTensor)]
    if not sharded:
        return nn.utils.clip_grad_norm_(params, max_norm, norm_type, error_if_nonfinite, foreach)
    total = nn.utils.get_total_norm(sharded, norm_type, foreach=foreach).full_tensor()
    whole = [grad for grad in grads if not isinstance(grad, DTensor)]
    if whole:
        rest = nn.utils.get_total_norm(whole, norm_type, foreach=foreach).to(total.device)
        total = torch.linalg.vector_norm(torch.stack([total, rest]), norm_type)
    if error_if_nonfinite and not total.isfinite():
        raise RuntimeError(f"the gradient's norm of order {norm_type} is {total.item()}, so it cannot be clipped")
    factor = (max_norm / (total + 1e-6)).clamp(max=1.0)
    for grad in grads:
        local = grad.to_local() if isinstance(grad, DTensor) else grad
        local.mul_(factor.to(local.device))
    return total
