"""Properties of a group's backends, from torch."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist


def backend_of(group: dist.ProcessGroup, device: torch.device) -> str:
    """The backend that carries tensors of a device. A group may have several, and dist.get_backend names none then."""
    pairs = (entry.partition(":") for entry in dist.get_backend_config(group).split(","))
    return {kind: name for kind, _, name in pairs}.get(device.type) or dist.get_backend(group)


def timeout_of(group: dist.ProcessGroup) -> timedelta:
    """Timeout of a group with a CPU backend; 30 minutes where the backend does not say."""
    options = getattr(group._get_backend(torch.device("cpu")), "options", None)
    return timedelta(minutes=30) if options is None else options._timeout
