"""FSDP's two collectives in 8 bits: parameters gathered, gradients scattered.

`set_custom_all_gather` and `set_custom_reduce_scatter` take any object that allocates and can be called.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from core.distributed.wire import fp8_communication


class Allocating:
    """Fresh memory a collective; FSDP frees it."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """An empty tensor."""
        return torch.empty(*size, dtype=dtype, device=device)


class FP8AllGather(Allocating):
    """Gathers shards of parameters in 8 bits. Ranks compute with the same rounded values; their shards stay exact."""

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> None:
        """Complete when it returns: there is nothing to wait for."""
        if input_tensor.is_floating_point():
            fp8_communication.all_gather(output_tensor, input_tensor, group)
        else:  # parameters of several dtypes travel as bytes
            fp8_communication.all_gather_bytes(output_tensor, input_tensor, group)


class FP8ReduceScatter(Allocating):
    """Sums or averages gradients in fp32, from contributions in 8 bits."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        """Complete when it returns: there is nothing to wait for."""
        fp8_communication.reduce_scatter(output_tensor, input_tensor, group, mean=op == dist.ReduceOp.AVG)
