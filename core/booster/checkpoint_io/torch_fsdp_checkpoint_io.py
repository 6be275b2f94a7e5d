"""TorchFSDPCheckpointIO: shards in memory, whole tensors in files."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from core.booster.checkpoint_io.general_checkpoint_io import plain
from core.booster.checkpoint_io.torch_ddp_checkpoint_io import TorchDDPCheckpointIO


class TorchFSDPCheckpointIO(TorchDDPCheckpointIO):
    """Gathers one tensor at a time, so a sharded save needs room for one tensor and one file."""

    def check_gather(self, gather_dtensor: bool) -> None:
        """Files hold whole tensors."""
        if not gather_dtensor:
            raise ValueError(
                "gather_dtensor=False would write one rank's shards, which load in no other layout; leave it at True "
                "with shard=True (needs room for one tensor and one file), or use torch.distributed.checkpoint"
            )

    def model_tensors(self, model: nn.Module) -> Iterator[tuple[str, Any]]:
        """Each tensor, gathered. Tied weights are gathered once."""
        gathered: dict[int, Any] = {}
        tensors = plain(model).state_dict(keep_vars=True)
        uses = Counter(id(value) for value in tensors.values())
        for name, value in tensors.items():
            if id(value) in gathered:
                whole = gathered[id(value)]
            else:
                whole = gather(value)
                if uses[id(value)] > 1:
                    gathered[id(value)] = whole
            yield name, whole

    def place_tensor(self, whole: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """This rank's shard of a whole tensor."""
        placed: torch.Tensor = shard_like(whole, like)
        return placed

    def optimizer_states(self, optimizer: Any) -> Iterator[tuple[int, dict[str, Any]]]:
        """Each parameter's state, gathered."""
        for number, state in super().optimizer_states(optimizer):
            yield number, {key: gather(value) for key, value in state.items()}

    def place_state(self, optimizer: Any, number: int, state: dict[str, Any]) -> dict[str, Any]:
        """This rank's shards of a parameter's state."""
        param = optimizer.parameters[number]
        return {key: shard_like(value, param) for key, value in state.items()}


def gather(value: Any) -> Any:
    """A sharded tensor, whole; anything else is returned unchanged. Collective for sharded ones."""
    if not isinstance(value, DTensor):
        return value
    # Offloaded shards lie on the host, and the group's collectives may be of the device.
    return value.detach().to(value.device_mesh.device_type).full_tensor()


def shard_like(value: Any, param: Any) -> Any:
    """This rank's shard of a whole tensor of `param`'s shape; anything else unchanged. Not collective."""
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
