"""Process groups with Megatron's arguments: initialize_model_parallel, the data group, a stage's position."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from core import parallel_state
from core_compat.megatron.faces.refusals import arguments

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
)(parallel_state.initialize_model_parallel)
get_data_parallel_group = arguments(f"{_WHERE} -independent_all_gather=False -with_gtp_remat=True")(
    parallel_state.get_data_parallel_group
)
get_data_parallel_world_size = arguments(f"{_WHERE} -with_gtp_remat=True")(parallel_state.get_data_parallel_world_size)
get_data_parallel_rank = arguments(f"{_WHERE} -with_gtp_remat=True")(parallel_state.get_data_parallel_rank)
_PARTIAL = "partial_expert_data_parallel=False -with_gtp_remat=True"
get_expert_data_parallel_group = arguments(f"check_initialized=True {_PARTIAL}")(
    parallel_state.get_expert_data_parallel_group
)
get_expert_data_parallel_world_size = arguments(_PARTIAL)(parallel_state.get_expert_data_parallel_world_size)
get_expert_data_parallel_rank = arguments(_PARTIAL)(parallel_state.get_expert_data_parallel_rank)


def is_unitialized() -> bool:
    """Return ``True`` before initialize_model_parallel. The spelling is Megatron's."""
    return not parallel_state.is_initialized()


def _place(group: Any) -> tuple[int, list[int]]:
    """Return this rank's index in a group, and its global ranks.

    Without a group or torch.distributed, there is one rank.
    """
    alone = group is None or not dist.is_initialized()
    return (0, [0]) if alone else (group.rank(), dist.get_process_group_ranks(group))


def _of(argument: str, answer: Callable[[int, list[int]], Any]) -> Callable[..., Any]:
    return arguments(argument)(lambda group: answer(*_place(group)))


get_pg_size = _of("group=None", lambda place, ranks: len(ranks))
get_pg_rank = _of("group=None", lambda place, ranks: place)
get_pg_src_rank = _of("group=None", lambda place, ranks: ranks[0])
get_pp_first_rank = _of("pp_group>group", lambda place, ranks: ranks[0])
get_pp_last_rank = _of("pp_group>group", lambda place, ranks: ranks[-1])
get_pp_next_rank = _of("pp_group>group", lambda place, ranks: ranks[(place + 1) % len(ranks)])
get_pp_prev_rank = _of("pp_group>group", lambda place, ranks: ranks[place - 1])
is_pp_first_stage = _of("pp_group>group", lambda place, ranks: place == 0)
is_pp_last_stage = _of("pp_group>group", lambda place, ranks: place == len(ranks) - 1)


_chunk = arguments("vp_stage vp_size")
is_vp_first_stage = _chunk(lambda vp_stage, vp_size: (vp_size or 1) <= 1 or vp_stage == 0)
is_vp_last_stage = _chunk(lambda vp_stage, vp_size: (vp_size or 1) <= 1 or vp_stage == vp_size - 1)
