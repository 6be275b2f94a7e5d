"""Communication formats of gradients that differ from their format in memory.

A bucket is copied into the communication dtype, reduced, and copied back when its handle is waited for. The backend
adds in the communication dtype (ordered collectives add in fp32). 8-bit floats are added in fp32, in blocks of 256 with
a scale each (see core/distributed/wire/fp8_communication.py for the error).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from core.distributed.wire import fp8_communication
from core.distributed.wire.collectives import Collectives, Handle, InFlight, Op, scale_now


def gradient_collectives(dtype: torch.dtype, plain: Collectives) -> Collectives:
    """Return the collectives that reduce buckets in a communication dtype, counted into the traffic of ``plain``."""
    if dtype is fp8_communication.FP8:
        return EightBitCollectives(ordered=plain.ordered, traffic=plain.traffic, clock=plain.clock)
    return CastingCollectives(dtype, plain)


class CastingCollectives(Collectives):
    """Reductions of floating tensors in another dtype. Gathers and broadcasts are not cast."""

    def __init__(self, dtype: torch.dtype, plain: Collectives) -> None:
        super().__init__(ordered=plain.ordered, traffic=plain.traffic, clock=plain.clock)
        self.dtype = dtype

    def start_all_reduce(self, tensor: torch.Tensor, group: dist.ProcessGroup, op: Op, scale: float) -> InFlight:
        return self._cast(super().start_all_reduce, tensor, slice(None), group, op, scale)

    def start_reduce_scatter(self, full: torch.Tensor, group: dist.ProcessGroup, op: Op, scale: float) -> InFlight:
        part, rank = full.numel() // dist.get_world_size(group), dist.get_rank(group)
        return self._cast(super().start_reduce_scatter, full, slice(rank * part, (rank + 1) * part), group, op, scale)

    def _cast(
        self, start: Any, tensor: torch.Tensor, result: slice, group: dist.ProcessGroup, op: Op, scale: float
    ) -> InFlight:
        """Reduce a copy in the communication dtype. Waiting for the handle changes part ``result`` of the tensor."""
        if tensor.dtype is self.dtype:
            return start(tensor, group, op, scale)
        scale_now(tensor, scale)
        wire = tensor.to(self.dtype)
        reduced = start(wire, group, op, 1.0)
        return Handle(finish=partial(tensor[result].copy_, wire[result]), first=reduced, keep=(wire, tensor))


class EightBitCollectives(Collectives):
    """Reductions of floating tensors as 8-bit numbers with scales. They block, so nothing overlaps them."""

    def start_all_reduce(self, tensor: torch.Tensor, group: dist.ProcessGroup, op: Op, scale: float) -> InFlight:
        size = dist.get_world_size(group)
        if op == "max":
            return super().start_all_reduce(tensor, group, op, scale)
        scale_now(tensor, scale)
        self.traffic.count(2 * (size - 1) / size * _packed_bytes(tensor))
        fp8_communication.all_reduce(tensor, group, mean=op == "mean")
        return Handle()

    def start_reduce_scatter(self, full: torch.Tensor, group: dist.ProcessGroup, op: Op, scale: float) -> InFlight:
        size, rank = dist.get_world_size(group), dist.get_rank(group)
        scale_now(full, scale)
        self.traffic.count((size - 1) / size * _packed_bytes(full))
        part = full.numel() // size
        fp8_communication.reduce_scatter(full[rank * part : (rank + 1) * part], full, group, mean=op == "mean")
        return Handle()


def _packed_bytes(tensor: torch.Tensor) -> float:
    return tensor.numel() * (1 + 4 / fp8_communication.BLOCK)
