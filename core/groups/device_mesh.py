"""The groups of `parallel_state` as torch's DeviceMesh, for DTensor and tools that take one; and groups from a mesh."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from core.groups.rank_grid import TOKENS, axes_of

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
    ranks = torch.arange(grid.world_size, device="cpu").view([grid.size(token, expert) for token in tokens])
    members = [groups.require(names[token]) for token in tokens]
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    kind = "cpu" if device is None or dist.get_backend(members[0]) == "gloo" else device.type
    return DeviceMesh.from_group(members, kind, ranks, mesh_dim_names=tuple(names[token] for token in tokens))


# What torch's users call the dimensions of a mesh -> tokens of the grid. HSDP's two dimensions are one axis.
DIMENSIONS = {"pp": "pp", "dp": "dp", "cp": "cp", "tp": "tp", "ddp": "dp", "fsdp": "dp", "data": "dp", "tensor": "tp"}
REPLICATE, SHARD = "dp_replicate", "dp_shard"


def initialize_from_device_mesh(mesh: DeviceMesh, **options: Any) -> None:
    """`initialize_model_parallel` with the sizes and the order of a DeviceMesh, so that groups have the mesh's ranks.

        mesh = init_device_mesh("cuda", (2, 4), mesh_dim_names=("dp", "tp"))
        initialize_from_device_mesh(mesh)

    mesh: over all ranks; dimensions 'pp', 'dp' (or 'dp_replicate', 'dp_shard': the optimizer shards within the second),
    'cp' and 'tp', the largest stride first. options: further arguments of initialize_model_parallel; those of experts,
    say. Collective: every rank of the world. Raises ValueError, before any group is made, for a dimension that has no
    counterpart here, for a part of the ranks, and for an option that the mesh tells.
    """
    from core import parallel_state

    names = mesh.mesh_dim_names
    if not names:
        raise ValueError("the DeviceMesh has no names of dimensions; make it with mesh_dim_names=('dp', 'tp') or so")
    told = {"order", "num_distributed_optimizer_instances", *(f"{axis}_size" for axis in _ARGUMENTS.values())}
    twice = sorted(told & options.keys())
    if twice:
        raise ValueError(f"{', '.join(twice)} is told by the DeviceMesh; leave it out")
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
    given: dict[str, Any] = {f"{argument}_size": sizes.get(token, 1) for token, argument in _ARGUMENTS.items()}
    given |= {"num_distributed_optimizer_instances": instances, "order": "-".join(order)}
    parallel_state.initialize_model_parallel(**given, **options)


_ARGUMENTS = {"tp": "tensor_model_parallel", "pp": "pipeline_model_parallel", "cp": "context_parallel"}
