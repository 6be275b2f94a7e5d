"""get_device_mesh: the groups of `parallel_state` as torch's DeviceMesh, for DTensor and tools that take one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from core.rank_grid import axes_of

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def get_device_mesh(*, expert: bool = False) -> DeviceMesh:
    """All ranks along the axes of the dense grid: dimensions 'pp', 'dp', 'cp', 'tp' in the default order.

    expert: of the expert grid, 'pp', 'expt_dp', 'ep', 'expt_tp'. The first dimension has the largest stride between
    ranks. An axis of size 1 is there too. No groups are made: those of `parallel_state` are used. Local.
    Raises RuntimeError before initialize_model_parallel.
    """
    from torch.distributed.device_mesh import DeviceMesh

    from core import parallel_state  # which gives this function its public name

    grid, groups = parallel_state.get_rank_grid(), parallel_state.get_process_groups()
    names = {axis.token: axis.name for axis in axes_of(expert)}
    tokens = [token for token in reversed(grid.axes) if token in names]
    ranks = torch.arange(grid.world_size).view([grid.size(token, expert) for token in tokens])
    members = [groups.require(names[token]) for token in tokens]
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    kind = "cpu" if device is None or dist.get_backend(members[0]) == "gloo" else device.type
    return DeviceMesh.from_group(members, kind, ranks, mesh_dim_names=tuple(names[token] for token in tokens))
