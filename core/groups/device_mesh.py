"""Conversion of groups to torch's DeviceMesh, for DTensor and other tools, and of a mesh to sizes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from core.groups.process_groups import ProcessGroups
from core.groups.rank_grid import TOKENS, RankGrid, axes_of

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def device_mesh_of(grid: RankGrid, groups: ProcessGroups, *, expert: bool = False) -> DeviceMesh:
    """Build the mesh for ``core.parallel_state.get_device_mesh`` from a grid and its groups."""
    from torch.distributed.device_mesh import DeviceMesh

    names = {axis.token: axis.name for axis in axes_of(expert)}
    tokens = [token for token in reversed(grid.axes) if token in names]
    ranks = torch.arange(grid.world_size, device="cpu").view([grid.size(token, expert) for token in tokens])
    members = [groups.require(names[token]) for token in tokens]
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    kind = "cpu" if device is None or dist.get_backend(members[0]) == "gloo" else device.type
    return DeviceMesh.from_group(members, kind, ranks, mesh_dim_names=tuple(names[token] for token in tokens))


# Common names for the dimensions of a mesh -> tokens of the grid. HSDP's two dimensions are one axis.
DIMENSIONS = {"pp": "pp", "dp": "dp", "cp": "cp", "tp": "tp", "ddp": "dp", "fsdp": "dp", "data": "dp", "tensor": "tp"}
REPLICATE, SHARD = "dp_replicate", "dp_shard"


def arguments_of_mesh(mesh: DeviceMesh, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``options`` with a mesh's sizes and order, as arguments of initialize_model_parallel. No communication.

    Raises ValueError as documented at ``core.parallel_state.initialize_from_device_mesh``.
    """
    names = mesh.mesh_dim_names
    if not names:
        raise ValueError("the DeviceMesh has no names of dimensions; make it with mesh_dim_names=('dp', 'tp') or so")
    known = {"order", "num_distributed_optimizer_instances", *(f"{axis}_size" for axis in _ARGUMENTS.values())}
    twice = sorted(known & options.keys())
    if twice:
        raise ValueError(f"{', '.join(twice)} is given by the DeviceMesh; leave it out")
    ranks = mesh.mesh.flatten().tolist()
    if ranks != list(range(dist.get_world_size())):
        raise ValueError(
            f"the DeviceMesh has ranks {ranks}, and the job {dist.get_world_size()} ranks in order; give the mesh of "
            "all ranks, as init_device_mesh makes it, not a part of it"
        )
    sizes: dict[str, int] = {}
    instances = 1
    for place, (name, size) in enumerate(zip(names, mesh.mesh.shape, strict=True)):
        if name == REPLICATE and names[place + 1 : place + 2] == (SHARD,):
            instances = size
        token = "dp" if name in (REPLICATE, SHARD) else DIMENSIONS.get(name)
        if token is None:
            raise ValueError(
                f"dimension {name!r} of the DeviceMesh has no counterpart; known are {', '.join(DIMENSIONS)}, and "
                f"{REPLICATE} before {SHARD}. Experts' sizes are options of this function"
            )
        if token in sizes and not (name == SHARD and names[place - 1] == REPLICATE):
            raise ValueError(f"dimensions {names} of the DeviceMesh name {token!r} twice")
        sizes[token] = sizes.get(token, 1) * size
    order = [*reversed(sizes), *(token for token in TOKENS if token not in sizes)]
    arguments: dict[str, Any] = {f"{argument}_size": sizes.get(token, 1) for token, argument in _ARGUMENTS.items()}
    arguments |= {"num_distributed_optimizer_instances": instances, "order": "-".join(order)}
    return {**arguments, **options}


_ARGUMENTS = {"tp": "tensor_model_parallel", "pp": "pipeline_model_parallel", "cp": "context_parallel"}
