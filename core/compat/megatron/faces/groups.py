"""Process groups by Megatron's arguments: initialize_model_parallel, RankGenerator, HyperCommGrid, a stage's place."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from core import parallel_state
from core.rank_grid import DEFAULT_ORDER, EmbeddingRule, RankGrid


def initialize_model_parallel(
    tensor_model_parallel_size: int = 1,
    pipeline_model_parallel_size: int = 1,
    virtual_pipeline_model_parallel_size: int | None = None,
    pipeline_model_parallel_comm_backend: str | None = None,
    use_sharp: bool = False,
    context_parallel_size: int = 1,
    hierarchical_context_parallel_sizes: Sequence[int] | None = None,
    hybrid_context_parallel: bool = False,
    expert_model_parallel_size: int = 1,
    gtp_remat_size: int = 1,
    expert_gtp_remat_size: int = 1,
    num_distributed_optimizer_instances: int = 1,
    expert_tensor_parallel_size: int | None = None,
    nccl_communicator_config_path: str | None = None,
    distributed_timeout_minutes: float = 30,
    order: str = DEFAULT_ORDER,
    get_embedding_ranks: EmbeddingRule | None = None,
    get_position_embedding_ranks: EmbeddingRule | None = None,
    create_gloo_process_groups: bool = True,
    high_priority_stream_groups: Sequence[str] | None = None,
    sharp_enabled_group: str | None = None,
    rank_offset: int = 0,
    local_world_size: int | None = None,
    create_all_gather_group: bool = False,
) -> None:
    """core.parallel_state.initialize_model_parallel, which says what each argument does and which it refuses.

    create_all_gather_group: must be False; gradients and gathers share a communicator.
    """
    if create_all_gather_group:
        raise ValueError(
            "create_all_gather_group=True is not supported: gathers use the gradients' group; leave it out"
        )
    arguments = {name: value for name, value in locals().items() if name != "create_all_gather_group"}
    arguments["gtp_remat"] = arguments.pop("gtp_remat_size")
    arguments["expert_gtp_remat"] = arguments.pop("expert_gtp_remat_size")
    parallel_state.initialize_model_parallel(**arguments)


def get_data_parallel_group(
    with_context_parallel: bool = False,
    partial_data_parallel: bool = False,
    independent_all_gather: bool = False,
    with_gtp_remat: bool = True,
) -> Any:
    """core.parallel_state.get_data_parallel_group. independent_all_gather: gathers use the same group."""
    return parallel_state.get_data_parallel_group(with_context_parallel, partial_data_parallel)


def get_data_parallel_world_size(
    with_context_parallel: bool = False, partial_data_parallel: bool = False, with_gtp_remat: bool = True
) -> int:
    """core.parallel_state.get_data_parallel_world_size."""
    return parallel_state.get_data_parallel_world_size(with_context_parallel, partial_data_parallel)


def get_data_parallel_rank(
    with_context_parallel: bool = False, partial_data_parallel: bool = False, with_gtp_remat: bool = True
) -> int:
    """core.parallel_state.get_data_parallel_rank."""
    return parallel_state.get_data_parallel_rank(with_context_parallel, partial_data_parallel)


def is_unitialized() -> bool:
    """True before initialize_model_parallel; the spelling is Megatron's."""
    return not parallel_state.is_initialized()


class RankGenerator:
    """All groups of a grid of ranks, from sizes whose product is its number of ranks. Pure arithmetic.

    Either ep or cp is 1: dense parameters and experts have a grid each. rank_offset: the number of the first rank.
    """

    def __init__(
        self, tp: int, ep: int, dp: int, pp: int, cp: int, order: str, rank_offset: int = 0, gtp_remat: int = 1
    ) -> None:
        if ep > 1 and cp > 1:
            raise ValueError(f"ep is {ep} and cp {cp}: one grid has experts or a split sequence, make a grid for each")
        if gtp_remat != 1:
            raise ValueError(f"gtp_remat={gtp_remat} is not supported; leave it at 1")
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
        self._groups: dict[str, Any] = {}

    def _key(self, dims: str | Sequence[str]) -> str:
        names = [dims] if isinstance(dims, str) else list(dims)
        unknown = [name for name in names if name not in self.dim_names]
        if unknown or not names:
            raise KeyError(f"{unknown or 'no dimension'} of a grid with {self.dim_names}")
        return "-".join(name for name in reversed(self.dim_names) if name in names)

    def get_rank_enum(self, dims: str | Sequence[str], *, view: str | None = None) -> list[list[int]]:
        """The ranks of every group that spans `dims`; the dimension with the smallest stride runs first."""
        self._refuse_view(view)
        wanted = self._key(dims).split("-")
        strides = [math.prod(self.shape[:axis]) for axis in range(len(self.shape))]

        def sums(inside: bool) -> list[int]:
            axes = [axis for axis, name in enumerate(self.dim_names) if (name in wanted) is inside][::-1]
            places = itertools.product(*(range(self.shape[axis]) for axis in axes))
            return [sum(n * strides[axis] for n, axis in zip(place, axes, strict=True)) for place in places]

        return [[self.rank_offset + first + step for step in sums(True)] for first in sums(False)]

    def create_pg(self, dims: str | Sequence[str], *, view: str | None = None, **kwargs: Any) -> Any:
        """Make the groups that span `dims`, and give this rank's. Collective: every rank of the world calls it."""
        key = self._key(dims)
        if key in self._groups:
            raise KeyError(f"the group {dims} has already been created; get_pg({dims!r}) gives it")
        mine = None
        for ranks in self.get_rank_enum(dims, view=view):
            group = dist.new_group(ranks, backend=self.backend, **kwargs)
            mine = group if dist.get_rank() in ranks else mine
        self._groups[key] = mine
        return mine

    def get_pg(self, dims: str | Sequence[str], *, view: str | None = None) -> Any:
        """This rank's group that spans `dims`. KeyError if it was not created."""
        self._refuse_view(view)
        key = self._key(dims)
        if key not in self._groups:
            raise KeyError(f"the group {dims} has not been created; call create_pg({dims!r}) on every rank first")
        return self._groups[key]

    def is_current_rank_in_grid(self) -> bool:
        """True if this rank is one of the grid's."""
        return self.rank_offset <= dist.get_rank() < self.rank_offset + self.size

    def destroy(self) -> None:
        """Destroy the groups that were created."""
        for group in self._groups.values():
            if group is not None:
                dist.destroy_process_group(group)
        self._groups.clear()

    @staticmethod
    def _refuse_view(view: str | None) -> None:
        if view is not None:
            raise ValueError(f"view={view!r}: a second factorisation is not supported; make a second HyperCommGrid")


# -- a stage's place, from its group ---------------------------------------------------------------------------------


def is_pp_first_stage(pp_group: Any) -> bool:
    """True on the first stage."""
    return get_pg_rank(pp_group) == 0


def is_pp_last_stage(pp_group: Any) -> bool:
    """True on the last stage."""
    return get_pg_rank(pp_group) == get_pg_size(pp_group) - 1


def is_vp_first_stage(vp_stage: int | None, vp_size: int | None) -> bool:
    """True for the first chunk of a rank, and for the only one."""
    return vp_size is None or vp_size <= 1 or vp_stage == 0


def is_vp_last_stage(vp_stage: int | None, vp_size: int | None) -> bool:
    """True for the last chunk of a rank, and for the only one."""
    return vp_size is None or vp_size <= 1 or vp_stage == vp_size - 1


def get_pp_first_rank(pp_group: Any) -> int:
    """The global rank of the first stage."""
    return dist.get_process_group_ranks(pp_group)[0]


def get_pp_last_rank(pp_group: Any) -> int:
    """The global rank of the last stage."""
    return dist.get_process_group_ranks(pp_group)[-1]


def get_pp_next_rank(pp_group: Any) -> int:
    """The global rank of the next stage; after the last one the first."""
    return dist.get_process_group_ranks(pp_group)[(pp_group.rank() + 1) % pp_group.size()]


def get_pp_prev_rank(pp_group: Any) -> int:
    """The global rank of the stage before; before the first one the last."""
    return dist.get_process_group_ranks(pp_group)[(pp_group.rank() - 1) % pp_group.size()]


def get_pg_size(group: Any = None) -> int:
    """Ranks of a group; 1 without one, or without torch.distributed."""
    return 1 if group is None or not dist.is_initialized() else int(group.size())


def get_pg_rank(group: Any = None) -> int:
    """This rank's place in a group; 0 without one, or without torch.distributed."""
    return 0 if group is None or not dist.is_initialized() else int(group.rank())


def get_pg_src_rank(group: Any = None) -> int:
    """The global rank of a group's first member."""
    return 0 if group is None or not dist.is_initialized() else dist.get_process_group_ranks(group)[0]
