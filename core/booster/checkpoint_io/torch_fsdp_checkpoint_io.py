"""TorchFSDPCheckpointIO: full tensors in files, from shards in memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from core.booster.checkpoint_io.torch_ddp_checkpoint_io import TorchDDPCheckpointIO


class TorchFSDPCheckpointIO(TorchDDPCheckpointIO):
    """Checkpoints that gather one tensor at a time, so that a sharded save needs memory for one tensor and one file."""

    def check_gather(self, gather_dtensor: bool) -> None:
        """Raise ValueError for ``gather_dtensor=False``, because files have full tensors."""
        if not gather_dtensor:
            raise ValueError(
                "gather_dtensor=False would write one rank's shards, which load in no other layout; leave it at True "
                "with shard=True (needs room for one tensor and one file), or use torch.distributed.checkpoint"
            )

    def full_value(self, model: nn.Module, value: Any) -> Any:
        """All-gather a tensor. Collective."""
        return gather(value)

    def place_tensor(self, whole: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """Return this rank's shard of a full tensor."""
        placed: torch.Tensor = shard_like(whole, like)
        return placed

    def optimizer_states(self, optimizer: Any) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yield each parameter's gathered state. Collective."""
        for number, state in super().optimizer_states(optimizer):
            yield number, {key: gather(value) for key, value in state.items()}

    def place_state(self, optimizer: Any, number: int, state: dict[str, Any]) -> dict[str, Any]:
        """Return this rank's shards of a parameter's state."""
        param = optimizer.parameters[number]
        return {key: shard_like(value, param) for key, value in state.items()}


def gather(value: Any) -> Any:
    """Gather a sharded tensor. Collective for a DTensor; other values are returned unchanged."""
    if not isinstance(value, DTensor):
        return value
    # Offloaded shards are on the host, and the group's collectives may need the device.
    return value.detach().to(value.device_mesh.device_type).full_tensor()


def shard_like(value: Any, param: Any) -> Any:
    """Return this rank's shard of a full tensor. Does not communicate.

    Args:
        value: A tensor of the parameter's full shape. Other values are returned unchanged.
        param: The sharded parameter.

    Raises:
        ValueError: If the tensor has another shape and more than one element.
    """
    if not isinstance(param, DTensor) or not isinstance(value, torch.Tensor) or isinstance(value, DTensor):
        return value
    if value.shape != param.shape:
        if value.numel() <= 1:
            return value  # a count of steps
        raise ValueError(
            f"optimizer state of shape {list(value.shape)} belongs to a parameter of shape {list(param.shape)} and "
            "cannot be split with it; use an optimizer whose state has its parameters' shapes, or TorchDDPPlugin"
        )
    mesh = param.device_mesh
    shard = distribute_tensor(value.detach().to(mesh.device_type), mesh, param.placements, src_data_rank=None)
    return shard.to(param.to_local().device)
