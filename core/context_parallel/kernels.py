"""Fused attention kernels that also return lse: torch's on a CPU, and FlashAttention on a GPU.

``scaled_dot_product_attention`` does not return lse, so blocks call the underlying operators, like torch's own ring
attention. Shapes are documented in blocks.py. No scores are materialized or saved.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.backends.cuda import SDPAParams, can_use_flash_attention

FLASH_WIDTH = 8  # FlashAttention takes heads whose width is a multiple of this


class Kernel(NamedTuple):
    """Fused attention without a mask, or causal.

    Attributes:
        forward: (query, key, value, causal) -> output in the queries' dtype, and lse.
        backward: (grad, query, key, value, output, lse, causal) -> gradients of queries, keys and values. ``grad``,
            ``output`` and ``lse`` belong to the full attention, for these queries; the first two have the queries'
            dtype.
    """

    forward: Callable[[Tensor, Tensor, Tensor, bool], tuple[Tensor, Tensor]]
    backward: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, bool], tuple[Tensor, Tensor, Tensor]]


def kernel_for(query: Tensor, key: Tensor, value: Tensor) -> Kernel | None:
    """Return the kernel for these tensors on their device, or ``None`` if scores must be materialized."""
    if query.device.type == "cpu":
        return ON_CPU
    if query.device.type != "cuda" or query.shape[-1] % FLASH_WIDTH:
        return None
    return FLASH if can_use_flash_attention(SDPAParams(query, key, value, None, 0.0, False, True)) else None


def _cpu_forward(query: Tensor, key: Tensor, value: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    output, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, causal)
    return output, lse


def _cpu_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor, lse: Tensor, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    grads: tuple[Tensor, Tensor, Tensor] = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad, query, key, value, output, lse, 0.0, causal
    )
    return grads


def _flash_forward(query: Tensor, key: Tensor, value: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    output, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, 0.0, causal)
    return output, lse


def _flash_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor, lse: Tensor, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    # The lengths of packed rows, which there are none of, and the random state of dropout, which is 0
    packed, state = None, torch.empty((), dtype=torch.int64, device=query.device)
    lengths = query.shape[2], key.shape[2]
    grads: tuple[Tensor, Tensor, Tensor] = torch.ops.aten._scaled_dot_product_flash_attention_backward(
        *(grad, query, key, value, output, lse.contiguous(), packed, packed, *lengths, 0.0, causal, state, state)
    )
    return grads


ON_CPU = Kernel(_cpu_forward, _cpu_backward)  # every dtype and width
FLASH = Kernel(_flash_forward, _flash_backward)  # in 16 bits, on the GPUs that torch has it for
