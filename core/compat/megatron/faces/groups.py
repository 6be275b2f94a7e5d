"""Process groups by Megatron's arguments: initialize_model_parallel, the data group, a stage's place."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from core import parallel_state
from core.compat.arguments import arguments

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
