"""FSDP's all-gather of parameters and reduce-scatter of gradients in 8 bits.

``set_custom_all_gather`` and ``set_custom_reduce_scatter`` accept any callable object with an ``allocate`` method.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from core.distributed.wire import fp8_communication


class Allocating:
    """Base class that allocates new memory for each collective; FSDP frees it."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class FP8AllGather(Allocating):
    """All-gather of parameter shards in 8 bits. Ranks compute with equal rounded values; their shards stay exact."""

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> None:
        """Gather the shards. The collective is complete on return, so there is nothing to wait for."""
        if input_tensor.is_floating_point():
            fp8_communication.all_gather(output_tensor, input_tensor, group)
        else:  # parameters of several dtypes are sent as bytes
            fp8_communication.all_gather_bytes(output_tensor, input_tensor, group)


class FP8ReduceScatter(Allocating):
    """Reduce-scatter of gradients, sent in 8 bits and summed or averaged in fp32."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        """Reduce the gradients. The collective is complete on return, so there is nothing to wait for."""
        fp8_communication.reduce_scatter(output_tensor, input_tensor, group, mean=op == dist.ReduceOp.AVG)
