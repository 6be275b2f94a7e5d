"""Devices by name, and the default device of this process."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from core.groups.agree import backends_of


class Accelerator:
    """Device that the Booster trains on, given by its torch name, such as 'cpu', 'cuda', 'cuda:1' or 'mps'.

    Args:
        device (str | torch.device): Name of the device, or a torch.device.

    Raises:
        ValueError: If the device is not available on this machine.
    """

    def __init__(self, device: str | torch.device) -> None:
        self.device = torch.device(device)
        here = devices_here()
        if self.device.type not in here:
            raise ValueError(f"device {str(device)!r} is not on this machine, which has {here}; pass one of these")

    def configure_model(self, model: nn.Module) -> nn.Module:
        """Move a model to the device and return it."""
        return model.to(self.device)


def devices_here() -> list[str]:
    """Return the device types that this process can use."""
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return ["cpu"] if found is None else ["cpu", found.type]


def default_device() -> torch.device:
    """Return the current accelerator, or the CPU if there is no accelerator."""
    kind = devices_here()[-1]
    return torch.device(kind, torch.accelerator.current_device_index()) if kind != "cpu" else torch.device("cpu")


def device_of_group(group: dist.ProcessGroup | None = None) -> torch.device:
    """Return the device of a group's collectives: the accelerator if the group has a backend for it, else the CPU.

    A gloo group therefore trains on the CPU of a machine with GPUs, and an NCCL group on its current GPU.
    """
    kind = devices_here()[-1]
    served = kind != "cpu" and backends_of(group).get(kind, "gloo") != "gloo"
    return default_device() if served else torch.device("cpu")
