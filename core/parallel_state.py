"""Module-level interface to the process groups: `initialize_model_parallel` and Megatron's accessors.

All state is in `_state`. Our code takes `pg_collection=` and reads the default from here. There are many public names.
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
from core.groups.process_groups import FIELDS, ProcessGroups, refusal_reported, refuse_other_sizes
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
    """State of `initialize_model_parallel`, and sizes and ranks overridden by tests."""

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
    """Split the ranks of the started default process group and create the groups of this rank.

    Collective: every rank of the world calls it with the same arguments. They are validated before the first group is
    created. After a failed call nothing remains, so it can be repeated with other arguments.

        torch.distributed.init_process_group("gloo")
        initialize_model_parallel(tensor_model_parallel_size=2)

    Args:
        *_size: Ranks along an axis; data parallelism gets the remaining factor. Expert tensor size: as tensor size.
        num_distributed_optimizer_instances: Slices of each data group: shard within a slice, replicate across slices.
        distributed_timeout_minutes: Timeout of every group.
        order: Axes, smallest stride first.
        get_*embedding_ranks: From the ranks of a pipeline group to those that share the (position) embedding.
        create_gloo_process_groups: Also create control groups with the ranks of the data groups, for CPU tensors.
        high_priority_stream_groups: Names such as 'tp', 'ep_dp'. Like the next one, checked always, used on NCCL only.
        nccl_communicator_config_path: YAML, group name -> settings, listed at `core.groups.group_options`.
        watch_ranks: Start a thread per process that names a rank that has ended or hangs within seconds.
        pipeline_model_parallel_comm_backend, use_sharp, sharp_enabled_group: Not supported; must keep the default.
        hierarchical_context_parallel_sizes, hybrid_context_parallel: Not supported; must keep the default.
        gtp_remat, expert_gtp_remat, rank_offset, local_world_size: Not supported; must keep the default.

    Raises:
        RuntimeError: If sizes do not divide, torch.distributed is not started, or groups exist already.
        ValueError: If arguments are malformed or unsupported; on all ranks if ranks pass different ones.
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
    with refusal_reported():
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
        _state.watch.read_members()
    _state.grid = grid
    _state.memory = GlobalMemoryBuffer()
    _state.virtual_size = virtual_pipeline_model_parallel_size
    _state.virtual_rank = None if virtual_pipeline_model_parallel_size is None else 0
    drop_connections_in_workers()


def destroy_model_parallel() -> None:
    """Destroy every group that `initialize_model_parallel` created and remove all overrides. May be called twice."""
    global _state
    groups, watch, _state = _state.groups, _state.watch, _ParallelState()
    use_watch(None)
    if watch is not None:
        watch.stop(sys.exc_info()[1])  # the error by which this rank ends, if this is called on its way out
    if groups is not None:
        groups.destroy()


def initialize_from_device_mesh(mesh: DeviceMesh, **options: Any) -> None:
    """Call `initialize_model_parallel` with a DeviceMesh's sizes and order, so that groups have the mesh's ranks.

        mesh = init_device_mesh("cuda", (2, 4), mesh_dim_names=("dp", "tp"))
        initialize_from_device_mesh(mesh)

    Collective: every rank of the world calls it. ValueError, before any group is created, for an unknown dimension, a
    part of the ranks, or an option set by the mesh.

    Args:
        mesh: Over all ranks, largest stride first: 'pp', 'dp' (or 'dp_replicate', 'dp_shard' to shard in), 'cp', 'tp'.
        options: Further arguments of initialize_model_parallel, for example for experts.
    """
    initialize_model_parallel(**arguments_of_mesh(mesh, options))


def model_parallel_is_initialized() -> bool:
    """True if `initialize_model_parallel` has succeeded and `destroy_model_parallel` was not called since."""
    return _state.groups is not None


is_initialized = model_parallel_is_initialized  # the older name


def get_process_groups() -> ProcessGroups:
    """Return all groups of this rank, for `pg_collection=` arguments. RuntimeError before initialization."""
    if _state.groups is None:
        raise RuntimeError(
            "model parallel groups are not initialized; call core.parallel_state.initialize_model_parallel first or "
            "pass pg_collection=ProcessGroups(...)."
        )
    return _state.groups


def get_rank_watch() -> RankWatch | None:
    """Return the watch that names lost ranks; None with one rank, without groups, or with `watch_ranks=False`."""
    return _state.watch


def get_rank_grid() -> RankGrid:
    """Return the grid that defines the groups. RuntimeError before initialization."""
    get_process_groups()
    assert _state.grid is not None, "groups are set only together with their grid"
    return _state.grid


def get_device_mesh(*, expert: bool = False) -> DeviceMesh:
    """Return a mesh of all ranks: 'pp', 'dp', 'cp', 'tp', or with `expert` 'pp', 'expt_dp', 'ep', 'expt_tp'.

    The first dimension has the largest stride. Axes of size 1 are included. No communication, no new groups.
    RuntimeError before initialization.
    """
    return device_mesh_of(get_rank_grid(), get_process_groups(), expert=expert)


class ProcessGroupCollection(ProcessGroups):
    """ProcessGroups under Megatron's name."""

    @classmethod
    def use_mpu_process_groups(cls, required_pgs: Sequence[str] | None = None) -> ProcessGroups:
        """Return the groups of this module, all or only `required_pgs`. ValueError if a name is no group."""
        wanted = FIELDS if required_pgs is None else tuple(required_pgs)
        unknown = [name for name in wanted if name not in FIELDS]
        if unknown:
            raise ValueError(f"Invalid process groups requested: {unknown}; known are {', '.join(FIELDS)}.")
        groups = get_process_groups()
        return cls(**{name: getattr(groups, name) for name in wanted})


def get_all_ranks() -> str:
    """Return this rank's indices as 'tp_dp_cp_pp_ep', such as '1_0_0_2_0', for names of per-rank files."""
    return "_".join(str(get_process_groups().rank(name)) for name in ("tp", "dp", "cp", "pp", "ep"))


def get_global_memory_buffer() -> GlobalMemoryBuffer:
    """Return scratch memory shared by layers. RuntimeError before initialization and after destruction."""
    if _state.memory is None:
        raise RuntimeError("global memory buffer is not initialized; call initialize_model_parallel first.")
    return _state.memory


def destroy_global_memory_buffer() -> None:
    """Free the scratch memory; the next initialization creates a new one."""
    _state.memory = None


def update_pg_timeout(timeout: timedelta, pg_group: ProcessGroup | None = None) -> None:
    """Change the timeout of groups on this rank, for example before a long first step.

    Args:
        timeout: New timeout.
        pg_group: Group to change. Defaults to every group that `initialize_model_parallel` created.
    """
    for group in get_process_groups().created if pg_group is None else (pg_group,):
        distributed_c10d._set_pg_timeout(timeout, group)


def create_group(ranks: Sequence[int] | None = None, *arguments: Any, **options: Any) -> ProcessGroup | None:
    """Create a group with the arguments of torch's new_group; `destroy_model_parallel` does not destroy it."""
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
    """Return the group `name`. If there is none: an error with the name, or None if `check_initialized` is False."""
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
    """Return the ranks that hold a replica of this rank's dense parameters.

    Args:
        with_context_parallel: Include context-parallel ranks, which gradients are also reduced over.
        partial_data_parallel: Only the ranks of this optimizer instance; needs `with_context_parallel`.
        with_gtp_remat: No effect.
    """
    return _group(_data_group(with_context_parallel, partial_data_parallel))


def get_data_parallel_group_gloo(
    with_context_parallel: bool = False, partial_data_parallel: bool = False
) -> ProcessGroup | None:
    """Return the control group with the ranks of `get_data_parallel_group`, for CPU tensors.

    Args:
        with_context_parallel: As for `get_data_parallel_group`.
        partial_data_parallel: As for `get_data_parallel_group`.
    """
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
    """Return the ranks of this pipeline stage.

    Args:
        check_initialized: Raise RuntimeError if there are no groups, instead of returning None.
        with_context_parallel: Include the ranks that hold other parts of the sequence.
    """
    return _group("tp_dp_cp" if with_context_parallel else "tp_dp", check_initialized)


def get_amax_reduction_group(
    with_context_parallel: bool = False, tp_only_amax_red: bool = False
) -> ProcessGroup | None:
    """Return the ranks that share one quantization scale.

    Args:
        with_context_parallel: Include context-parallel ranks.
        tp_only_amax_red: Leave out data-parallel ranks.
    """
    if tp_only_amax_red:
        return _group("tp_cp" if with_context_parallel else "tp")
    return _group("tp_dp_cp" if with_context_parallel else "tp_dp")


def get_expert_data_parallel_group(
    check_initialized: bool = True, partial_expert_data_parallel: bool = False
) -> ProcessGroup | None:
    """Return the ranks that hold a replica of this rank's experts.

    Args:
        check_initialized: Raise RuntimeError if there are no groups, instead of returning None.
        partial_expert_data_parallel: Only the ranks of this optimizer instance.
    """
    return _group("intra_expt_dp" if partial_expert_data_parallel else "expt_dp", check_initialized)


def get_expert_data_parallel_group_gloo(partial_expert_data_parallel: bool = False) -> ProcessGroup | None:
    """Return the control group with the ranks of `get_expert_data_parallel_group`, for CPU tensors."""
    return _group("intra_expt_dp_gloo" if partial_expert_data_parallel else "expt_dp_gloo")


def _not_built(kind: str) -> Callable[..., None]:
    def get(check_initialized: bool = True, group_size: int | None = None) -> None:
        if check_initialized:
            raise RuntimeError(f"{kind} group is not initialized: initialize_model_parallel does not build this kind.")

    get.__doc__ = """Raise RuntimeError, because this kind of group is not built.

    Args:
        check_initialized: False to return None instead.
        group_size: No effect.
    """
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
    """Return the size of `get_data_parallel_group`.

    Args:
        with_context_parallel: As for `get_data_parallel_group`.
        partial_data_parallel: As for `get_data_parallel_group`.
    """
    return _size(_data_group(with_context_parallel, partial_data_parallel))


def get_data_parallel_rank(with_context_parallel: bool = False, partial_data_parallel: bool = False) -> int:
    """Return this rank's index in `get_data_parallel_group`.

    Args:
        with_context_parallel: As for `get_data_parallel_group`.
        partial_data_parallel: As for `get_data_parallel_group`.
    """
    if "rank dp" in _state.overrides:
        return _state.overrides["rank dp"]
    return _rank(_data_group(with_context_parallel, partial_data_parallel))


def get_expert_data_parallel_world_size(partial_expert_data_parallel: bool = False) -> int:
    """Return the number of replicas of this rank's experts."""
    return _size("intra_expt_dp" if partial_expert_data_parallel else "expt_dp")


def get_expert_data_parallel_rank(partial_expert_data_parallel: bool = False) -> int:
    """Return this rank's index among the replicas of its experts."""
    return _rank("intra_expt_dp" if partial_expert_data_parallel else "expt_dp")


# Overrides for tests without such groups: the getters return the value that was set; None removes it.


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
    """Set the result of `get_virtual_pipeline_model_parallel_world_size`."""
    _state.virtual_size = world_size


def set_virtual_pipeline_model_parallel_rank(rank: int | None) -> None:
    """Set the model chunk that this rank works on; new code passes `vp_stage` instead."""
    _state.virtual_rank = rank


# --- position in the pipeline -----------------------------------------------------------------------------------------


def get_virtual_pipeline_model_parallel_world_size() -> int | None:
    """Return the number of model chunks per stage; None without an interleaved schedule."""
    return _state.virtual_size


def get_virtual_pipeline_model_parallel_rank() -> int | None:
    """Return the model chunk that this rank works on; None without an interleaved schedule."""
    return _state.virtual_rank


def is_pipeline_first_stage(ignore_virtual: bool = True, vp_stage: int | None = None) -> bool:
    """Check if this rank is the first pipeline stage.

    Args:
        ignore_virtual: False to check also that the chunk is the stage's first one, in an interleaved schedule.
        vp_stage: Model chunk. Defaults to `get_virtual_pipeline_model_parallel_rank()`.
    """
    if not ignore_virtual and _state.virtual_size is not None and _chunk(vp_stage) != 0:
        return False
    return get_pipeline_model_parallel_rank() == 0


def is_pipeline_last_stage(ignore_virtual: bool = True, vp_stage: int | None = None) -> bool:
    """Check if this rank is the last pipeline stage.

    Args:
        ignore_virtual: False to check also that the chunk is the stage's last one, in an interleaved schedule.
        vp_stage: Model chunk. Defaults to `get_virtual_pipeline_model_parallel_rank()`.
    """
    if not ignore_virtual and _state.virtual_size is not None and _chunk(vp_stage) != _state.virtual_size - 1:
        return False
    return get_pipeline_model_parallel_rank() == get_pipeline_model_parallel_world_size() - 1


def is_rank_in_embedding_group(ignore_virtual: bool = True, vp_stage: int | None = None) -> bool:
    """Check if this rank has the word embedding.

    Args:
        ignore_virtual: False to check the chunk too: the first stage has the embedding in its first chunk, the last
            stage in its last chunk, and any other stage in every chunk.
        vp_stage: Model chunk. Defaults to `get_virtual_pipeline_model_parallel_rank()`.
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
    """True if this rank has the position embedding."""
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
    """Return the global rank of the last stage of this rank's pipeline."""
    return get_process_groups().ranks("pp")[-1]


def get_pipeline_model_parallel_next_rank() -> int:
    """Return the global rank of the next stage; after the last stage comes the first."""
    return _pipeline_neighbour(1)


def get_pipeline_model_parallel_prev_rank() -> int:
    """Return the global rank of the previous stage; before the first stage comes the last."""
    return _pipeline_neighbour(-1)


def get_data_parallel_src_rank(with_context_parallel: bool = False) -> int:
    """Return the global rank of the first member of this rank's data group."""
    return get_process_groups().ranks("dp_cp" if with_context_parallel else "dp")[0]


def get_context_parallel_global_ranks(check_initialized: bool = True) -> list[int] | None:
    """Return the global ranks that split the sequence with this rank, in sequence order."""
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
