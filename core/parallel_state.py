"""The module-level face of the process groups: `initialize_model_parallel` and the accessors Megatron's users know.

All state is in `_state`. Our code takes `pg_collection=` and asks here for the default. The public names are many.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch.distributed import ProcessGroup, distributed_c10d

from core.groups.device_mesh import arguments_of_mesh, device_mesh_of
from core.groups.group_options import get_nccl_options as get_nccl_options
from core.groups.group_options import group_options
from core.groups.memory_buffer import GlobalMemoryBuffer
from core.groups.process_groups import FIELDS, ProcessGroups, refuse_other_sizes
from core.groups.rank_grid import DEFAULT_ORDER, EmbeddingRule, RankGrid, group_ranks
from core.groups.rank_grid import default_embedding_ranks as default_embedding_ranks
from core.groups.rank_grid import default_position_embedding_ranks as default_position_embedding_ranks
from core.watch.forked import drop_connections_in_workers
from core.watch.rank_watch import RankWatch, start_watch
from core.watch.waiting import use_watch, waiting

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@dataclass
class _ParallelState:
    """State that `initialize_model_parallel` sets, and stand-ins for sizes and ranks that tests set."""

    groups: ProcessGroups | None = None
    grid: RankGrid | None = None
    memory: GlobalMemoryBuffer | None = None
    virtual_size: int | None = None
    virtual_rank: int | None = None
    watch: RankWatch | None = None
    overrides: dict[str, int] = field(default_factory=dict)  # 'size tp' or 'rank tp' -> value


_state = _ParallelState()


# --- life cycle -------------------------------------------------------------------------------------------------------


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
    gtp_remat: int = 1,
    expert_gtp_remat: int = 1,
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
    watch_ranks: bool = True,
) -> None:
    """Split the ranks of the started default process group and create the groups this rank belongs to.

    Collective: every rank of the world calls it with the same arguments. All arguments are validated before the first
    group is created. A call that fails leaves nothing behind, so it can be repeated with other arguments.

    *_size: ranks along an axis; the data parallel size is what remains. expert_tensor_parallel_size: by default the
    tensor size. num_distributed_optimizer_instances: the data groups are cut into that many slices; the optimizer
    shards inside a slice and replicates across slices. order: axes, smallest stride first. get_embedding_ranks,
    get_position_embedding_ranks: functions from the ranks of a pipeline group to those that share the (position)
    embedding. distributed_timeout_minutes: of every group. create_gloo_process_groups: also create control groups,
    with the ranks of the data groups, for CPU tensors. high_priority_stream_groups: names such as 'tp', 'ep_dp'.
    nccl_communicator_config_path: YAML, group name -> cga_cluster_size, min_ctas, max_ctas, net_name,
    is_high_priority_stream. The last two are checked on every backend and take effect on NCCL. watch_ranks: a thread of
    each process names, within seconds, a rank that has ended or hangs (core.watch.rank_watch).

    Raises RuntimeError where sizes do not come out, torch.distributed is not started, or groups exist already;
    ValueError on malformed or unsupported arguments, and on all ranks if ranks give different ones.

        torch.distributed.init_process_group("gloo")
        initialize_model_parallel(tensor_model_parallel_size=2)
    """
    _refuse_unsupported(
        pipeline_model_parallel_comm_backend=(pipeline_model_parallel_comm_backend, None),
        use_sharp=(use_sharp, False),
        hierarchical_context_parallel_sizes=(hierarchical_context_parallel_sizes, None),
        hybrid_context_parallel=(hybrid_context_parallel, False),
        gtp_remat=(gtp_remat, 1),
        expert_gtp_remat=(expert_gtp_remat, 1),
        sharp_enabled_group=(sharp_enabled_group, None),
        rank_offset=(rank_offset, 0),
        local_world_size=(local_world_size, None),
    )
    if not dist.is_initialized():
        raise RuntimeError("torch.distributed is not started; call torch.distributed.init_process_group first.")
    if _state.groups is not None:
        raise RuntimeError(
            "data parallel group is already initialized; call destroy_model_parallel before initializing again."
        )
    if not distributed_timeout_minutes > 0:
        raise ValueError(f"distributed_timeout_minutes must be above 0, got {distributed_timeout_minutes}.")
    _check_virtual_size(virtual_pipeline_model_parallel_size, pipeline_model_parallel_size)
    grid = RankGrid(
        world_size=dist.get_world_size(),
        tp=tensor_model_parallel_size,
        pp=pipeline_model_parallel_size,
        cp=context_parallel_size,
        ep=expert_model_parallel_size,
        expt_tp=expert_tensor_parallel_size,
        order=order,
    )
    members = group_ranks(
        grid,
        dist.get_rank(),
        num_instances=num_distributed_optimizer_instances,
        embedding_ranks=get_embedding_ranks,
        position_embedding_ranks=get_position_embedding_ranks,
    )
    options = group_options(high_priority_stream_groups or (), nccl_communicator_config_path)
    timeout = timedelta(minutes=distributed_timeout_minutes)

    _state.watch = start_watch(members["pp"].index(dist.get_rank())) if watch_ranks else None  # groups wait for ranks
    use_watch(_state.watch)
    try:
        instances = {"num_distributed_optimizer_instances": num_distributed_optimizer_instances}
        refuse_other_sizes({**grid.sizes, "order": grid.order, **instances}, timeout)
        _state.groups = ProcessGroups.build(
            members, timeout=timeout, control_groups=create_gloo_process_groups, options=options
        )
    except BaseException:
        destroy_model_parallel()
        raise
    if _state.watch is not None:
        _state.watch.meet()
    _state.grid = grid
    _state.memory = GlobalMemoryBuffer()
    _state.virtual_size = virtual_pipeline_model_parallel_size
    _state.virtual_rank = None if virtual_pipeline_model_parallel_size is None else 0
    drop_connections_in_workers()


def destroy_model_parallel() -> None:
    """Destroy every group that `initialize_model_parallel` created and forget all overrides. May be called twice."""
    global _state
    groups, watch, _state = _state.groups, _state.watch, _ParallelState()
    use_watch(None)
    if watch is not None:
        watch.stop(sys.exc_info()[1])  # the error by which this rank ends, if this is called on its way out
    if groups is not None:
        groups.destroy()


def initialize_from_device_mesh(mesh: DeviceMesh, **options: Any) -> None:
    """`initialize_model_parallel` with the sizes and the order of a DeviceMesh, so that groups have the mesh's ranks.

        mesh = init_device_mesh("cuda", (2, 4), mesh_dim_names=("dp", "tp"))
        initialize_from_device_mesh(mesh)

    mesh: over all ranks; dimensions 'pp', 'dp' (or 'dp_replicate', 'dp_shard': the optimizer shards within the second),
    'cp' and 'tp', the largest stride first. options: further arguments of initialize_model_parallel; those of experts,
    say. Collective: every rank of the world. Raises ValueError, before any group is made, for a dimension that has no
    counterpart here, for a part of the ranks, and for an option that the mesh gives.
    """
    initialize_model_parallel(**arguments_of_mesh(mesh, options))


def model_parallel_is_initialized() -> bool:
    """True if `initialize_model_parallel` has succeeded and not been undone."""
    return _state.groups is not None


is_initialized = model_parallel_is_initialized  # the older name


def get_process_groups() -> ProcessGroups:
    """All groups of this rank as one object, for `pg_collection=` arguments. RuntimeError before initialization."""
    if _state.groups is None:
        raise RuntimeError(
            "model parallel groups are not initialized; call core.parallel_state.initialize_model_parallel first or "
            "pass pg_collection=ProcessGroups(...)."
        )
    return _state.groups


def get_rank_watch() -> RankWatch | None:
    """The watch that names lost ranks; None in a job of one rank, without groups, or with `watch_ranks=False`."""
    return _state.watch


def get_rank_grid() -> RankGrid:
    """The grid the groups were cut from. RuntimeError before initialization."""
    get_process_groups()
    assert _state.grid is not None, "groups are set only together with their grid"
    return _state.grid


def get_device_mesh(*, expert: bool = False) -> DeviceMesh:
    """All ranks along the axes of the dense grid: dimensions 'pp', 'dp', 'cp', 'tp' in the default order.

    expert: of the expert grid, 'pp', 'expt_dp', 'ep', 'expt_tp'. The first dimension has the largest stride between
    ranks. An axis of size 1 is there too. No groups are made. Local. RuntimeError before initialization.
    """
    return device_mesh_of(get_rank_grid(), get_process_groups(), expert=expert)


class ProcessGroupCollection(ProcessGroups):
    """ProcessGroups by Megatron's name."""

    @classmethod
    def use_mpu_process_groups(cls, required_pgs: Sequence[str] | None = None) -> ProcessGroups:
        """The groups of this module, all or only `required_pgs`. ValueError if a name is no group."""
        wanted = FIELDS if required_pgs is None else tuple(required_pgs)
        unknown = [name for name in wanted if name not in FIELDS]
        if unknown:
            raise ValueError(f"Invalid process groups requested: {unknown}; known are {', '.join(FIELDS)}.")
        groups = get_process_groups()
        return cls(**{name: getattr(groups, name) for name in wanted})


def get_all_ranks() -> str:
    """This rank's places as 'tp_dp_cp_pp_ep', such as '1_0_0_2_0'. Use it in names of files that each rank writes."""
    return "_".join(str(get_process_groups().rank(name)) for name in ("tp", "dp", "cp", "pp", "ep"))


def get_global_memory_buffer() -> GlobalMemoryBuffer:
    """Scratch memory shared by layers, from initialization to destruction. RuntimeError before and after."""
    if _state.memory is None:
        raise RuntimeError("global memory buffer is not initialized; call initialize_model_parallel first.")
    return _state.memory


def destroy_global_memory_buffer() -> None:
    """Free the scratch memory; the next initialization makes a new one."""
    _state.memory = None


def update_pg_timeout(timeout: timedelta, pg_group: ProcessGroup | None = None) -> None:
    """Set the timeout of one group, or of every group that was created here. Local: affects this rank only."""
    for group in get_process_groups().created if pg_group is None else (pg_group,):
        distributed_c10d._set_pg_timeout(timeout, group)


def create_group(ranks: Sequence[int] | None = None, *arguments: Any, **options: Any) -> ProcessGroup | None:
    """A group of the caller's own, by the arguments of torch's new_group; `destroy_model_parallel` leaves it alone."""
    with waiting("a group of the caller's own", dist.group.WORLD):
        return dist.new_group(None if ranks is None else list(ranks), *arguments, **options)


def _refuse_unsupported(**arguments: tuple[Any, Any]) -> None:
    for name, (value, default) in arguments.items():
        if value != default:
            raise ValueError(f"initialize_model_parallel does not support {name}={value!r}; leave it at {default!r}.")


def _check_virtual_size(virtual: int | None, pipeline: int) -> None:
    if virtual is None:
        return
    if isinstance(virtual, bool) or not isinstance(virtual, int) or virtual < 1:
        raise ValueError(f"virtual_pipeline_model_parallel_size must be at least 1 or None, got {virtual!r}.")
    if pipeline == 1:
        raise RuntimeError(
            f"pipeline-model-parallel size should be greater than 1 with interleaved schedule: got "
            f"virtual_pipeline_model_parallel_size {virtual} and pipeline_model_parallel_size {pipeline}."
        )


# --- groups -----------------------------------------------------------------------------------------------------------


def _group(name: str, check_initialized: bool = True) -> ProcessGroup | None:
    """The group `name`. If there is none: an error that names it, or None if `check_initialized` is False."""
    if check_initialized:
        return get_process_groups().require(name)
    return None if _state.groups is None else getattr(_state.groups, name)


def _group_getter(name: str, meaning: str) -> Callable[..., ProcessGroup | None]:
    def get(check_initialized: bool = True) -> ProcessGroup | None:
        return _group(name, check_initialized)

    get.__doc__ = meaning
    return get


get_tensor_model_parallel_group = _group_getter("tp", "The ranks over which this rank's tensors are split.")
get_expert_tensor_parallel_group = _group_getter("expt_tp", "The ranks over which each expert's tensors are split.")
get_context_parallel_group = _group_getter("cp", "The ranks that split the sequence of one sample.")
get_expert_model_parallel_group = _group_getter("ep", "The ranks over which experts are distributed.")
get_pipeline_model_parallel_group = _group_getter("pp", "The stages of this rank's pipeline.")

get_model_parallel_group = _group_getter("mp", "The ranks that hold one dense model replica: tensor x pipeline.")
get_tensor_and_context_parallel_group = _group_getter("tp_cp", "The ranks that work on the same samples in one stage.")
get_embedding_group = _group_getter("embd", "The stages that hold the tied word embedding; other ranks have none.")
get_position_embedding_group = _group_getter(
    "pos_embd", "The stages that hold the position embedding; other ranks have none."
)
get_expert_tensor_and_model_parallel_group = _group_getter(
    "tp_ep", "The ranks that hold one stage's experts: expert tensor x expert."
)
get_expert_tensor_model_pipeline_parallel_group = _group_getter(
    "tp_ep_pp", "The ranks that hold all experts of the model once: expert tensor x expert x pipeline."
)
get_inter_partial_data_parallel_group = _group_getter(
    "inter_dp_cp", "This rank's place in every optimizer instance; sharded dense gradients are all-reduced over it."
)
get_inter_partial_expert_data_parallel_group = _group_getter(
    "inter_expt_dp", "This rank's place in every optimizer instance; sharded expert gradients are all-reduced over it."
)
get_intra_distributed_optimizer_instance_group = _group_getter(
    "intra_dist_opt", "All ranks of this optimizer instance; gradient statistics are reduced over it."
)
get_inter_distributed_optimizer_instance_group = _group_getter(
    "inter_dist_opt", "This rank's place in every optimizer instance."
)


def get_data_parallel_group(
    with_context_parallel: bool = False, partial_data_parallel: bool = False, with_gtp_remat: bool = True
) -> ProcessGroup | None:
    """The replicas of this rank's dense parameters.

    with_context_parallel: add the context parallel ranks, as the reduction of gradients does. partial_data_parallel:
    only the ranks of this optimizer instance (with_context_parallel must be True). with_gtp_remat: has no effect here.
    """
    return _group(_data_group(with_context_parallel, partial_data_parallel))


def get_data_parallel_group_gloo(
    with_context_parallel: bool = False, partial_data_parallel: bool = False
) -> ProcessGroup | None:
    """The control group with the ranks of `get_data_parallel_group`, for CPU tensors."""
    return _group(_data_group(with_context_parallel, partial_data_parallel) + "_gloo")


def _data_group(with_context_parallel: bool, partial_data_parallel: bool) -> str:
    if not partial_data_parallel:
        return "dp_cp" if with_context_parallel else "dp"
    if not with_context_parallel:
        raise ValueError("partial_data_parallel=True needs with_context_parallel=True: it slices the dp_cp group.")
    return "intra_dp_cp"


def get_tensor_and_data_parallel_group(
    check_initialized: bool = True, with_context_parallel: bool = False
) -> ProcessGroup | None:
    """All ranks of this pipeline stage; without `with_context_parallel` those at this place in the sequence."""
    return _group("tp_dp_cp" if with_context_parallel else "tp_dp", check_initialized)


def get_amax_reduction_group(
    with_context_parallel: bool = False, tp_only_amax_red: bool = False
) -> ProcessGroup | None:
    """The ranks that agree on a quantization scale: tensor, data unless `tp_only_amax_red`, and context if asked."""
    if tp_only_amax_red:
        return _group("tp_cp" if with_context_parallel else "tp")
    return _group("tp_dp_cp" if with_context_parallel else "tp_dp")


def get_expert_data_parallel_group(
    check_initialized: bool = True, partial_expert_data_parallel: bool = False
) -> ProcessGroup | None:
    """The replicas of this rank's experts; with `partial_expert_data_parallel` those of this optimizer instance."""
    return _group("intra_expt_dp" if partial_expert_data_parallel else "expt_dp", check_initialized)


def get_expert_data_parallel_group_gloo(partial_expert_data_parallel: bool = False) -> ProcessGroup | None:
    """The control group with the ranks of `get_expert_data_parallel_group`, for CPU tensors."""
    return _group("intra_expt_dp_gloo" if partial_expert_data_parallel else "expt_dp_gloo")


def _not_built(kind: str) -> Callable[..., None]:
    def get(check_initialized: bool = True, group_size: int | None = None) -> None:
        if check_initialized:
            raise RuntimeError(f"{kind} group is not initialized: initialize_model_parallel does not build this kind.")

    get.__doc__ = "Not built: an error that says so, or None if `check_initialized` is False."
    return get


get_hierarchical_context_parallel_groups = _not_built("hierarchical context parallel")
get_hybrid_data_context_parallel_groups = _not_built("hybrid data context parallel")
get_gtp_weight_remat_group = _not_built("gtp weight remat")
get_expert_gtp_weight_remat_group = _not_built("expert gtp weight remat")


# --- sizes and ranks --------------------------------------------------------------------------------------------------


def _size(name: str) -> int:
    override = _state.overrides.get(f"size {name}")
    return dist.get_world_size(get_process_groups().require(name)) if override is None else override


def _rank(name: str) -> int:
    override = _state.overrides.get(f"rank {name}")
    return dist.get_rank(get_process_groups().require(name)) if override is None else override


def _override(what: str, name: str, value: int | None) -> None:
    if value is None:
        _state.overrides.pop(f"{what} {name}", None)
    else:
        _state.overrides[f"{what} {name}"] = value


def _size_and_rank(name: str) -> tuple[Callable[[], int], Callable[[], int]]:
    def get_world_size() -> int:
        return _size(name)

    def get_rank() -> int:
        return _rank(name)

    get_world_size.__doc__ = f"Number of ranks of this rank's group '{name}'."
    get_rank.__doc__ = f"This rank's place in its group '{name}'."
    return get_world_size, get_rank


get_tensor_model_parallel_world_size, get_tensor_model_parallel_rank = _size_and_rank("tp")
get_expert_tensor_parallel_world_size, get_expert_tensor_parallel_rank = _size_and_rank("expt_tp")
get_context_parallel_world_size, get_context_parallel_rank = _size_and_rank("cp")
get_expert_model_parallel_world_size, get_expert_model_parallel_rank = _size_and_rank("ep")
get_pipeline_model_parallel_world_size, get_pipeline_model_parallel_rank = _size_and_rank("pp")
get_tensor_and_context_parallel_world_size, get_tensor_and_context_parallel_rank = _size_and_rank("tp_cp")
get_expert_tensor_and_model_parallel_world_size, get_expert_tensor_and_model_parallel_rank = _size_and_rank("tp_ep")


def get_data_parallel_world_size(with_context_parallel: bool = False, partial_data_parallel: bool = False) -> int:
    """Number of replicas of this rank's dense parameters; the arguments of `get_data_parallel_group`."""
    return _size(_data_group(with_context_parallel, partial_data_parallel))


def get_data_parallel_rank(with_context_parallel: bool = False, partial_data_parallel: bool = False) -> int:
    """This rank's place in the group of `get_data_parallel_group`; the same arguments."""
    if "rank dp" in _state.overrides:
        return _state.overrides["rank dp"]
    return _rank(_data_group(with_context_parallel, partial_data_parallel))


def get_expert_data_parallel_world_size(partial_expert_data_parallel: bool = False) -> int:
    """Number of replicas of this rank's experts."""
    return _size("intra_expt_dp" if partial_expert_data_parallel else "expt_dp")


def get_expert_data_parallel_rank(partial_expert_data_parallel: bool = False) -> int:
    """This rank's place among the replicas of its experts."""
    return _rank("intra_expt_dp" if partial_expert_data_parallel else "expt_dp")


# Stand-ins for tests without such groups: the getters return the value that was set; None removes it.


def _setters(name: str) -> tuple[Callable[[int | None], None], Callable[[int | None], None]]:
    def set_world_size(world_size: int | None) -> None:
        _override("size", name, world_size)

    def set_rank(rank: int | None) -> None:
        _override("rank", name, rank)

    set_world_size.__doc__ = f"Make the getter of the size of '{name}' return this."
    set_rank.__doc__ = f"Make the getter of the rank in '{name}' return this."
    return set_world_size, set_rank


set_tensor_model_parallel_world_size, set_tensor_model_parallel_rank = _setters("tp")
set_expert_tensor_parallel_world_size, set_expert_tensor_parallel_rank = _setters("expt_tp")
set_expert_model_parallel_world_size, set_expert_model_parallel_rank = _setters("ep")
set_pipeline_model_parallel_world_size, set_pipeline_model_parallel_rank = _setters("pp")
_, set_data_parallel_rank = _setters("dp")  # with and without context parallelism


def set_virtual_pipeline_model_parallel_world_size(world_size: int | None) -> None:
    """Make `get_virtual_pipeline_model_parallel_world_size` return this."""
    _state.virtual_size = world_size


def set_virtual_pipeline_model_parallel_rank(rank: int | None) -> None:
    """Set the model chunk that this rank works on; new code passes `vp_stage` instead."""
    _state.virtual_rank = rank


# --- position in the pipeline -----------------------------------------------------------------------------------------


def get_virtual_pipeline_model_parallel_world_size() -> int | None:
    """Number of model chunks a stage; None without an interleaved schedule."""
    return _state.virtual_size


def get_virtual_pipeline_model_parallel_rank() -> int | None:
    """The model chunk this rank works on; None without an interleaved schedule."""
    return _state.virtual_rank


def is_pipeline_first_stage(ignore_virtual: bool = True, vp_stage: int | None = None) -> bool:
    """True if this rank is the first stage and, unless `ignore_virtual`, works on its first chunk."""
    if not ignore_virtual and _state.virtual_size is not None and _chunk(vp_stage) != 0:
        return False
    return get_pipeline_model_parallel_rank() == 0


def is_pipeline_last_stage(ignore_virtual: bool = True, vp_stage: int | None = None) -> bool:
    """True if this rank is the last stage and, unless `ignore_virtual`, works on its last chunk."""
    if not ignore_virtual and _state.virtual_size is not None and _chunk(vp_stage) != _state.virtual_size - 1:
        return False
    return get_pipeline_model_parallel_rank() == get_pipeline_model_parallel_world_size() - 1


def is_rank_in_embedding_group(ignore_virtual: bool = True, vp_stage: int | None = None) -> bool:
    """True if this rank (unless `ignore_virtual`, this chunk of it) holds the word embedding.

    The first stage holds it in its first chunk, the last stage in its last chunk, any other stage in every chunk.
    """
    if get_process_groups().embd is None:
        return False
    if ignore_virtual:
        return True
    ranks = get_process_groups().ranks("embd")
    if dist.get_rank() == ranks[0]:
        return is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage)
    if dist.get_rank() == ranks[-1]:
        return is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage)
    return True


def is_rank_in_position_embedding_group() -> bool:
    """True if this rank holds the position embedding."""
    return get_process_groups().pos_embd is not None


def _first_rank(name: str, meaning: str) -> Callable[[], int]:
    def get() -> int:
        return get_process_groups().ranks(name)[0]

    get.__doc__ = f"Global rank of {meaning}."
    return get


get_tensor_model_parallel_src_rank = _first_rank("tp", "the first member of this rank's tensor group; it broadcasts")
get_model_parallel_src_rank = _first_rank("mp", "the first member of this rank's model group")
get_expert_model_parallel_src_rank = _first_rank("ep", "the first member of this rank's expert group")
get_pipeline_model_parallel_first_rank = _first_rank("pp", "the first stage of this rank's pipeline")


def get_pipeline_model_parallel_last_rank() -> int:
    """Global rank of the last stage of this rank's pipeline."""
    return get_process_groups().ranks("pp")[-1]


def get_pipeline_model_parallel_next_rank() -> int:
    """Global rank of the next stage; after the last stage comes the first."""
    return _pipeline_neighbour(1)


def get_pipeline_model_parallel_prev_rank() -> int:
    """Global rank of the previous stage; before the first stage comes the last."""
    return _pipeline_neighbour(-1)


def get_data_parallel_src_rank(with_context_parallel: bool = False) -> int:
    """Global rank of the first member of this rank's data group."""
    return get_process_groups().ranks("dp_cp" if with_context_parallel else "dp")[0]


def get_context_parallel_global_ranks(check_initialized: bool = True) -> list[int] | None:
    """Global ranks that split the sequence with this rank, in sequence order."""
    if not check_initialized and _state.groups is None:
        return None
    return get_process_groups().ranks("cp")


def _chunk(vp_stage: int | None) -> int:
    chunk = _state.virtual_rank if vp_stage is None else vp_stage
    if chunk is None:
        raise RuntimeError("The model chunk is unknown; pass vp_stage=, or set_virtual_pipeline_model_parallel_rank.")
    return chunk


def _pipeline_neighbour(step: int) -> int:
    ranks = get_process_groups().ranks("pp")
    return ranks[(get_pipeline_model_parallel_rank() + step) % get_pipeline_model_parallel_world_size()]
