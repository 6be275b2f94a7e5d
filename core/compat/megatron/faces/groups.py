"""Process groups by Megatron's arguments: initialize_model_parallel, RankGenerator, HyperCommGrid, a stage's place."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from core import parallel_state
from core.compat.arguments import arguments
from core.compat.grid import groups_along, new_groups
from core.rank_grid import RankGrid

_WHERE = "with_context_parallel=False partial_data_parallel=False"
initialize_model_parallel = arguments(
    "tensor_model_parallel_size=1 pipeline_model_parallel_size=1 virtual_pipeline_model_parallel_size=None "
    "pipeline_model_parallel_comm_backend=None use_sharp=False context_parallel_size=1 "
    "hierarchical_context_parallel_sizes=None hybrid_context_parallel=False expert_model_parallel_size=1 "
    "gtp_remat_size>gtp_remat=1 expert_gtp_remat_size>expert_gtp_remat=1 num_distributed_optimizer_instances=1 "
    "expert_tensor_parallel_size=None nccl_communicator_config_path=None distributed_timeout_minutes=30 "
    "order='tp-cp-ep-dp-pp' get_embedding_ranks=None get_position_embedding_ranks=None "
    "create_gloo_process_groups=True high_priority_stream_groups=None sharp_enabled_group=None rank_offset=0 "
    "local_world_size=None !create_all_gather_group=False",
    {"create_all_gather_group": "gathers use the gradients' group"},
)(parallel_state.initialize_model_parallel)
get_data_parallel_group = arguments(f"{_WHERE} -independent_all_gather=False -with_gtp_remat=True")(
    parallel_state.get_data_parallel_group
)
get_data_parallel_world_size = arguments(f"{_WHERE} -with_gtp_remat=True")(parallel_state.get_data_parallel_world_size)
get_data_parallel_rank = arguments(f"{_WHERE} -with_gtp_remat=True")(parallel_state.get_data_parallel_rank)


def is_unitialized() -> bool:
    """True before initialize_model_parallel; the spelling is Megatron's."""
    return not parallel_state.is_initialized()


class RankGenerator:
    """All groups of a grid of ranks, from sizes whose product is its number of ranks. Pure arithmetic.

    Either ep or cp is 1: dense parameters and experts have a grid each. rank_offset: the number of the first rank.
    """

    @arguments("self tp ep dp pp cp order rank_offset=0 !gtp_remat=1", {"gtp_remat": "weights have no further groups"})
    def __init__(self, tp: int, ep: int, dp: int, pp: int, cp: int, order: str, rank_offset: int = 0) -> None:
        if ep > 1 and cp > 1:
            raise ValueError(f"ep is {ep} and cp {cp}: one grid has experts or a split sequence, make a grid for each")
        self.tp, self.ep, self.dp, self.pp, self.cp = tp, ep, dp, pp, cp
        self.rank_offset = rank_offset
        self.world_size = tp * ep * dp * pp * cp
        # The grid that is not asked for gets the same pipeline groups.
        self.grid = RankGrid(self.world_size, tp=tp, pp=pp, cp=cp, ep=ep, expt_tp=tp * cp, order=order)
        self.order = self.grid.order
        self.name_to_size = {"tp": tp, "ep": ep, "dp": dp, "pp": pp, "cp": cp}
        self.ordered_size = [self.name_to_size[token] for token in self.grid.axes]

    def get_mask(self, order: str, token: str) -> list[bool]:
        """For each axis of `order`, True if `token` has it."""
        return [axis in token.split("-") for axis in order.split("-")]

    def get_ranks(self, token: str) -> list[list[int]]:
        """The groups that span the axes of `token`, such as 'tp-dp'."""
        groups = self.grid.groups(token, expert=self.ep > 1)
        return [[rank + self.rank_offset for rank in group] for group in groups]


_VIEW = {"view": "a second factorisation of the ranks is a second HyperCommGrid"}


class HyperCommGrid:
    """A grid of ranks with named dimensions, of which groups are made when they are asked for.

    shape, dim_names: the first dimension has the smallest stride. rank_offset: the number of the first rank.
    """

    def __init__(
        self, shape: Sequence[int], dim_names: Sequence[str], rank_offset: int = 0, backend: str | None = None
    ) -> None:
        if len(shape) != len(dim_names) or len(set(dim_names)) != len(dim_names):
            raise ValueError(f"shape {list(shape)} and dim_names {list(dim_names)}: give each dimension one name")
        self.shape, self.dim_names = list(shape), list(dim_names)
        self.rank_offset, self.backend = rank_offset, backend
        self.size = math.prod(shape)
        world = int(os.environ.get("WORLD_SIZE", 0)) or dist.get_world_size()
        if rank_offset < 0 or rank_offset + self.size > world:
            raise RuntimeError(
                f"a grid of {self.size} ranks from rank {rank_offset} on does not fit into a world of {world} ranks"
            )
        self._groups: dict[tuple[int, ...], Any] = {}

    def _axes(self, dims: str | Sequence[str]) -> tuple[int, ...]:
        names = [dims] if isinstance(dims, str) else list(dims)
        unknown = [name for name in names if name not in self.dim_names]
        if unknown or not names:
            raise KeyError(f"{unknown or 'no dimension'} of a grid with {self.dim_names}")
        # Counted from the other end, because the last axis varies fastest in numpy.
        return tuple(sorted(len(self.shape) - 1 - self.dim_names.index(name) for name in names))

    @arguments("self dims * !view=None", _VIEW)
    def get_rank_enum(self, dims: str | Sequence[str]) -> list[list[int]]:
        """The ranks of every group that spans `dims`; the dimension with the smallest stride runs first."""
        return [[self.rank_offset + rank for rank in g] for g in groups_along(self.shape[::-1], self._axes(dims))]

    def create_pg(self, dims: str | Sequence[str], *, view: str | None = None, **kwargs: Any) -> Any:
        """Make the groups that span `dims`, and give this rank's. Collective: every rank of the world calls it."""
        axes = self._axes(dims)
        if axes in self._groups:
            raise KeyError(f"the group {dims} has already been created; get_pg({dims!r}) gives it")
        self._groups[axes] = new_groups(self.get_rank_enum(dims, view=view), backend=self.backend, **kwargs)
        return self._groups[axes]

    @arguments("self dims * !view=None", _VIEW)
    def get_pg(self, dims: str | Sequence[str]) -> Any:
        """This rank's group that spans `dims`. KeyError if it was not created."""
        if self._axes(dims) not in self._groups:
            raise KeyError(f"the group {dims} has not been created; call create_pg({dims!r}) on every rank first")
        return self._groups[self._axes(dims)]

    def is_current_rank_in_grid(self) -> bool:
        """True if this rank is one of the grid's."""
        return self.rank_offset <= dist.get_rank() < self.rank_offset + self.size

    def destroy(self) -> None:
        """Destroy the groups that were created."""
        for group in filter(None, self._groups.values()):
            dist.destroy_process_group(group)
        self._groups.clear()


# -- a place in a group; no group is one rank, and so is any group before torch.distributed is started ---------------


def _ranks(group: Any) -> list[int]:
    return [0] if group is None or not dist.is_initialized() else dist.get_process_group_ranks(group)


def get_pg_size(group: Any = None) -> int:
    """Ranks of a group."""
    return len(_ranks(group))


def get_pg_rank(group: Any = None) -> int:
    """This rank's place in a group."""
    return 0 if group is None or not dist.is_initialized() else int(group.rank())


def get_pg_src_rank(group: Any = None) -> int:
    """The global rank of a group's first member."""
    return _ranks(group)[0]


def get_pp_last_rank(pp_group: Any) -> int:
    """The global rank of the last stage."""
    return _ranks(pp_group)[-1]


def get_pp_next_rank(pp_group: Any, step: int = 1) -> int:
    """The global rank of the next stage; after the last one the first."""
    return _ranks(pp_group)[(get_pg_rank(pp_group) + step) % get_pg_size(pp_group)]


def get_pp_prev_rank(pp_group: Any) -> int:
    """The global rank of the stage before; before the first one the last."""
    return get_pp_next_rank(pp_group, -1)


def is_pp_first_stage(pp_group: Any) -> bool:
    """True on the first stage."""
    return get_pg_rank(pp_group) == 0


def is_pp_last_stage(pp_group: Any) -> bool:
    """True on the last stage."""
    return get_pg_rank(pp_group) == get_pg_size(pp_group) - 1


def is_vp_first_stage(vp_stage: int | None, vp_size: int | None) -> bool:
    """True for the first chunk of a rank, and for the only one."""
    return (vp_size or 1) <= 1 or vp_stage == 0


def is_vp_last_stage(vp_stage: int | None, vp_size: int | None) -> bool:
    """True for the last chunk of a rank, and for the only one."""
    return (vp_size or 1) <= 1 or vp_stage == (vp_size or 1) - 1


get_pp_first_rank = get_pg_src_rank
