"""Module-level access to process groups: ``initialize_model_parallel`` and Megatron's accessors.

The only state is ``_state``. Code inside this package takes ``pg_collection=`` and uses this module for the default.
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
    """State created by ``initialize_model_parallel``, plus sizes and ranks that tests override."""

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
    """Create the process groups for tensor, pipeline, context, expert and data parallelism.

    Consecutive ranks form a tensor-parallel group, so that its frequent collectives stay within a node. The remaining
    factor of the world size becomes the data-parallel size.

        initialize_model_parallel(tensor_model_parallel_size=2, context_parallel_size=2)
        dp_group = get_data_parallel_group()  # 4 of 16 ranks

    Every rank of the world must call it with the same arguments, which are validated before the first group is created.
    After an error no group remains, so the call can be repeated with other arguments.

    Args:
        *_size: Number of ranks along an axis. ``expert_tensor_parallel_size`` defaults to the tensor-parallel size.
        num_distributed_optimizer_instances: Number of slices of each data group, across which state is replicated.
        distributed_timeout_minutes: Timeout of every group.
        order: Axes, smallest stride first.
        get_*embedding_ranks: Maps a pipeline group's ranks to the ranks that share the word (or position) embedding.
        create_gloo_process_groups: Also create gloo groups with the data-parallel ranks, for CPU tensors.
        high_priority_stream_groups: Groups such as 'tp' or 'ep_dp'. Like the next argument, only used with NCCL.
        nccl_communicator_config_path: YAML file with settings per group, described in ``core.groups.group_options``.
        watch_ranks: Start a thread in each process that names a rank that has died or hangs.
        pipeline_model_parallel_comm_backend, use_sharp, sharp_enabled_group: Not supported; must keep the default.
        hierarchical_context_parallel_sizes, hybrid_context_parallel: Not supported; must keep the default.
        gtp_remat, expert_gtp_remat, rank_offset, local_world_size: Not supported; must keep the default.

    Raises:
        RuntimeError: If sizes do not divide the world size, torch.distributed is not initialized, or groups exist.
        ValueError: If arguments are malformed or unsupported, or, on all ranks, if they differ between ranks.
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
    """Destroy the groups that ``initialize_model_parallel`` created and remove all overrides. May be called twice."""
    global _state
    groups, watch, _state = _state.groups, _state.watch, _ParallelState()
    use_watch(None)
    if watch is not None:
        watch.stop(sys.exc_info()[1])  # the error by which this rank ends, if this is called on its way out
    if groups is not None:
        groups.destroy()


def initialize_from_device_mesh(mesh: DeviceMesh, **options: Any) -> None:
    """Create the process groups from the sizes and the order of a ``DeviceMesh``.

    Use it if FSDP2 or DTensor code already describes the job with a mesh.

        mesh = init_device_mesh("cuda", (2, 4), mesh_dim_names=("dp", "tp"))
        initialize_from_device_mesh(mesh)

    This is a collective over the world. An unknown dimension, missing ranks, or an option that the mesh already sets
    raises ValueError before any group is created.

    Args:
        mesh: Over all ranks, largest stride first: 'pp', 'dp' (or 'dp_replicate', 'dp_shard' to shard in), 'cp', 'tp'.
        options: Further arguments of ``initialize_model_parallel``, such as expert sizes.
    """
    initialize_model_parallel(**arguments_of_mesh(mesh, options))


def model_parallel_is_initialized() -> bool:
    """Return ``True`` if ``initialize_model_parallel`` has succeeded and its groups were not destroyed since."""
    return _state.groups is not None


is_initialized = model_parallel_is_initialized  # the older name


def get_process_groups() -> ProcessGroups:
    """Return this rank's process groups, to pass as ``pg_collection``. Raises RuntimeError before initialization."""
    if _state.groups is None:
        raise RuntimeError(
            "model parallel groups are not initialized; call core.parallel_state.initialize_model_parallel first or "
            "pass pg_collection=ProcessGroups(...)."
        )
    return _state.groups


def get_rank_watch() -> RankWatch | None:
    """Return the watch that names lost ranks, or ``None`` if it is disabled or the job has only one rank."""
    return _state.watch


def get_rank_grid() -> RankGrid:
    """Return the grid that maps ranks to groups. Raises RuntimeError before initialization."""
    get_process_groups()
    assert _state.grid is not None, "groups are set only together with their grid"
    return _state.grid


def get_device_mesh(*, expert: bool = False) -> DeviceMesh:
    """Return a ``DeviceMesh`` over all ranks that reuses the existing groups.

    The dimensions are 'pp', 'dp', 'cp', 'tp', or with ``expert`` 'pp', 'expt_dp', 'ep', 'expt_tp', largest stride
    first. No communication. Raises RuntimeError before initialization.
    """
    return device_mesh_of(get_rank_grid(), get_process_groups(), expert=expert)


class ProcessGroupCollection(ProcessGroups):
    """``ProcessGroups`` under Megatron's name."""

    @classmethod
    def use_mpu_process_groups(cls, required_pgs: Sequence[str] | None = None) -> ProcessGroups:
        """Return this module's groups, or only ``required_pgs``. Raises ValueError for an unknown name."""
        wanted = FIELDS if required_pgs is None else tuple(required_pgs)
        unknown = [name for name in wanted if name not in FIELDS]
        if unknown:
            raise ValueError(f"Invalid process groups requested: {unknown}; known are {', '.join(FIELDS)}.")
        groups = get_process_groups()
        return cls(**{name: getattr(groups, name) for name in wanted})


def get_all_ranks() -> str:
    """Return this rank's indices as 'tp_dp_cp_pp_ep', such as '1_0_0_2_0', for the names of per-rank files."""
    return "_".join(str(get_process_groups().rank(name)) for name in ("tp", "dp", "cp", "pp", "ep"))


def get_global_memory_buffer() -> GlobalMemoryBuffer:
    """Return the scratch memory that layers share. Raises RuntimeError before initialization."""
    if _state.memory is None:
        raise RuntimeError("global memory buffer is not initialized; call initialize_model_parallel first.")
    return _state.memory


def destroy_global_memory_buffer() -> None:
    """Free the scratch memory. The next initialization creates a new one."""
    _state.memory = None


def update_pg_timeout(timeout: timedelta, pg_group: ProcessGroup | None = None) -> None:
    """Change the timeout of this rank's groups, for example before a first step that compiles kernels.

    Args:
        timeout (timedelta): New timeout.
        pg_group (ProcessGroup): Group to change. Defaults to every group that ``initialize_model_parallel`` created.
    """
    for group in get_process_groups().created if pg_group is None else (pg_group,):
        distributed_c10d._set_pg_timeout(timeout, group)


def create_group(ranks: Sequence[int] | None = None, *arguments: Any, **options: Any) -> ProcessGroup | None:
    """Create a group with the arguments of ``torch.distributed.new_group``. It survives ``destroy_model_parallel``."""
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
    """Return group ``name``. Without it, raise an error, or return ``None`` if not ``check_initialized``."""
    if check_initialized:
        return get_process_groups().require(name)
    return None if _state.groups is None else getattr(_state.groups, name)


def _group_getter(name: str, members: str) -> Callable[..., ProcessGroup | None]:
    def get(check_initialized: bool = True) -> ProcessGroup | None:
        return _group(name, check_initialized)

    get.__doc__ = f"Return the group of {members}"
    return get


get_tensor_model_parallel_group = _group_getter("tp", "ranks over which this rank's tensors are split.")
get_expert_tensor_parallel_group = _group_getter("expt_tp", "ranks over which each expert's tensors are split.")
get_context_parallel_group = _group_getter("cp", "ranks that split the sequence of one sample.")
get_expert_model_parallel_group = _group_getter("ep", "ranks over which experts are distributed.")
get_pipeline_model_parallel_group = _group_getter("pp", "stages of this rank's pipeline.")

get_model_parallel_group = _group_getter("mp", "ranks that hold one dense model replica: tensor x pipeline.")
get_tensor_and_context_parallel_group = _group_getter("tp_cp", "ranks that work on the same samples in one stage.")
get_embedding_group = _group_getter("embd", "stages that hold the tied word embedding; other ranks have none.")
get_position_embedding_group = _group_getter(
    "pos_embd", "stages that hold the position embedding; other ranks have none."
)
get_expert_tensor_and_model_parallel_group = _group_getter(
    "tp_ep", "ranks that hold one stage's experts: expert tensor x expert."
)
get_expert_tensor_model_pipeline_parallel_group = _group_getter(
    "tp_ep_pp", "ranks that hold all experts of the model once: expert tensor x expert x pipeline."
)
get_inter_partial_data_parallel_group = _group_getter(
    "inter_dp_cp", "ranks at this position in all optimizer instances; it all-reduces sharded dense gradients."
)
get_inter_partial_expert_data_parallel_group = _group_getter(
    "inter_expt_dp", "ranks at this position in all optimizer instances; it all-reduces sharded expert gradients."
)
get_intra_distributed_optimizer_instance_group = _group_getter(
    "intra_dist_opt", "all ranks of this optimizer instance; gradient statistics are reduced over it."
)
get_inter_distributed_optimizer_instance_group = _group_getter(
    "inter_dist_opt", "ranks at this position in every optimizer instance."
)


def get_data_parallel_group(
    with_context_parallel: bool = False, partial_data_parallel: bool = False, with_gtp_remat: bool = True
) -> ProcessGroup | None:
    """Return the group of ranks that hold a replica of this rank's dense parameters.

    Args:
        with_context_parallel: Include context-parallel ranks, over which gradients are reduced as well.
        partial_data_parallel: Return only the ranks of this optimizer instance. Requires ``with_context_parallel``.
        with_gtp_remat: No effect.
    """
    return _group(_data_group(with_context_parallel, partial_data_parallel))


def get_data_parallel_group_gloo(
    with_context_parallel: bool = False, partial_data_parallel: bool = False
) -> ProcessGroup | None:
    """Return the gloo group with the ranks of ``get_data_parallel_group``, for CPU tensors.

    Args:
        with_context_parallel, partial_data_parallel: As for ``get_data_parallel_group``.
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
    """Return the group of ranks that work on this rank's pipeline stage.

    Args:
        check_initialized (bool, optional): Raise RuntimeError if groups do not exist, instead of returning ``None``.
        with_context_parallel (bool, optional): Include ranks that hold other parts of the sequence.
    """
    return _group("tp_dp_cp" if with_context_parallel else "tp_dp", check_initialized)


def get_amax_reduction_group(
    with_context_parallel: bool = False, tp_only_amax_red: bool = False
) -> ProcessGroup | None:
    """Return the group of ranks that share an FP8 quantization scale.

    Args:
        with_context_parallel (bool, optional): Include context-parallel ranks.
        tp_only_amax_red (bool, optional): Exclude data-parallel ranks.
    """
    if tp_only_amax_red:
        return _group("tp_cp" if with_context_parallel else "tp")
    return _group("tp_dp_cp" if with_context_parallel else "tp_dp")


def get_expert_data_parallel_group(
    check_initialized: bool = True, partial_expert_data_parallel: bool = False
) -> ProcessGroup | None:
    """Return the group of ranks that hold a replica of this rank's experts.

    Args:
        check_initialized (bool, optional): Raise RuntimeError if groups do not exist, instead of returning ``None``.
        partial_expert_data_parallel (bool, optional): Return only the ranks of this optimizer instance.
    """
    return _group("intra_expt_dp" if partial_expert_data_parallel else "expt_dp", check_initialized)


def get_expert_data_parallel_group_gloo(partial_expert_data_parallel: bool = False) -> ProcessGroup | None:
    """Return the gloo group with the ranks of ``get_expert_data_parallel_group``, for CPU tensors."""
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

    get_world_size.__doc__ = f"Return the number of ranks in this rank's group '{name}'."
    get_rank.__doc__ = f"Return this rank's index in its group '{name}'."
    return get_world_size, get_rank


get_tensor_model_parallel_world_size, get_tensor_model_parallel_rank = _size_and_rank("tp")
get_expert_tensor_parallel_world_size, get_expert_tensor_parallel_rank = _size_and_rank("expt_tp")
get_context_parallel_world_size, get_context_parallel_rank = _size_and_rank("cp")
get_expert_model_parallel_world_size, get_expert_model_parallel_rank = _size_and_rank("ep")
get_pipeline_model_parallel_world_size, get_pipeline_model_parallel_rank = _size_and_rank("pp")
get_tensor_and_context_parallel_world_size, get_tensor_and_context_parallel_rank = _size_and_rank("tp_cp")
get_expert_tensor_and_model_parallel_world_size, get_expert_tensor_and_model_parallel_rank = _size_and_rank("tp_ep")


def get_data_parallel_world_size(with_context_parallel: bool = False, partial_data_parallel: bool = False) -> int:
    """Return the size of ``get_data_parallel_group``.

    Args:
        with_context_parallel, partial_data_parallel: As for ``get_data_parallel_group``.
    """
    return _size(_data_group(with_context_parallel, partial_data_parallel))


def get_data_parallel_rank(with_context_parallel: bool = False, partial_data_parallel: bool = False) -> int:
    """Return this rank's index in ``get_data_parallel_group``.

    Args:
        with_context_parallel, partial_data_parallel: As for ``get_data_parallel_group``.
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

    set_world_size.__doc__ = f"Override the size that the getter for group '{name}' returns, in tests."
    set_rank.__doc__ = f"Override the rank that the getter for group '{name}' returns, in tests."
    return set_world_size, set_rank


set_tensor_model_parallel_world_size, set_tensor_model_parallel_rank = _setters("tp")
set_expert_tensor_parallel_world_size, set_expert_tensor_parallel_rank = _setters("expt_tp")
set_expert_model_parallel_world_size, set_expert_model_parallel_rank = _setters("ep")
set_pipeline_model_parallel_world_size, set_pipeline_model_parallel_rank = _setters("pp")
_, set_data_parallel_rank = _setters("dp")  # with and without context parallelism


def set_virtual_pipeline_model_parallel_world_size(world_size: int | None) -> None:
    """Set the result of ``get_virtual_pipeline_model_parallel_world_size``."""
    _state.virtual_size = world_size


def set_virtual_pipeline_model_parallel_rank(rank: int | None) -> None:
    """Set the model chunk that this rank works on. New code should pass ``vp_stage`` instead."""
    _state.virtual_rank = rank


# --- position in the pipeline -----------------------------------------------------------------------------------------


def get_virtual_pipeline_model_parallel_world_size() -> int | None:
    """Return the number of model chunks per stage, or ``None`` without an interleaved schedule."""
    return _state.virtual_size


def get_virtual_pipeline_model_parallel_rank() -> int | None:
    """Return the model chunk that this rank works on, or ``None`` without an interleaved schedule."""
    return _state.virtual_rank


def is_pipeline_first_stage(ignore_virtual: bool = True, vp_stage: int | None = None) -> bool:
    """Return ``True`` if this rank is the first pipeline stage.

    Args:
        ignore_virtual (bool): If ``False``, the chunk must also be the stage's first one in an interleaved schedule.
        vp_stage (int): Model chunk. Defaults to ``get_virtual_pipeline_model_parallel_rank()``.
    """
    if not ignore_virtual and _state.virtual_size is not None and _chunk(vp_stage) != 0:
        return False
    return get_pipeline_model_parallel_rank() == 0


def is_pipeline_last_stage(ignore_virtual: bool = True, vp_stage: int | None = None) -> bool:
    """Return ``True`` if this rank is the last pipeline stage.

    Args:
        ignore_virtual, vp_stage: As for ``is_pipeline_first_stage``, with the stage's last chunk.
    """
    if not ignore_virtual and _state.virtual_size is not None and _chunk(vp_stage) != _state.virtual_size - 1:
        return False
    return get_pipeline_model_parallel_rank() == get_pipeline_model_parallel_world_size() - 1


def is_rank_in_embedding_group(ignore_virtual: bool = True, vp_stage: int | None = None) -> bool:
    """Return ``True`` if this rank holds the word embedding, whose gradient is reduced over the embedding group.

    Args:
        ignore_virtual (bool, optional): If ``False``, check the chunk as well: the first stage has the embedding in its
            first chunk, the last stage in its last chunk, and any other stage in every chunk.
        vp_stage (int, optional): Model chunk. Defaults to ``get_virtual_pipeline_model_parallel_rank()``.
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
    """Return ``True`` if this rank holds the position embedding."""
    return get_process_groups().pos_embd is not None


def _first_rank(name: str, meaning: str) -> Callable[[], int]:
    def get() -> int:
        return get_process_groups().ranks(name)[0]

    get.__doc__ = f"Return the global rank of {meaning}."
    return get


get_tensor_model_parallel_src_rank = _first_rank("tp", "the first member of this rank's tensor group; it broadcasts")
get_model_parallel_src_rank = _first_rank("mp", "the first member of this rank's model group")
get_expert_model_parallel_src_rank = _first_rank("ep", "the first member of this rank's expert group")
get_pipeline_model_parallel_first_rank = _first_rank("pp", "the first stage of this rank's pipeline")


def get_pipeline_model_parallel_last_rank() -> int:
    """Return the global rank of the last stage of this rank's pipeline."""
    return get_process_groups().ranks("pp")[-1]


def get_pipeline_model_parallel_next_rank() -> int:
    """Return the global rank of the next pipeline stage. The first stage follows the last one."""
    return _pipeline_neighbour(1)


def get_pipeline_model_parallel_prev_rank() -> int:
    """Return the global rank of the previous pipeline stage. The last stage precedes the first one."""
    return _pipeline_neighbour(-1)


def get_data_parallel_src_rank(with_context_parallel: bool = False) -> int:
    """Return the global rank of the first member of this rank's data-parallel group."""
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
