"""Parameters and buckets of wrapped chunks, and checks of a config against them before memory is allocated.

Names are those of the full model in every pipeline stage, as in a checkpoint. A stage counts its own layers from 0, and
its modules define their names in the full model (core.groups.global_names). If they do not, two stages use one name for
different parameters.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup

from core.distributed.buffer.bucket import Bucket
from core.distributed.buffer.memory_tier import HostTier
from core.distributed.contract.gradient_contract import GradientContract
from core.distributed.distributed_data_parallel import DistributedDataParallel
from core.distributed.finalize_model_grads import models_of
from core.groups import agree
from core.groups.global_names import global_name, namer
from core.groups.process_groups import CHAINS, ProcessGroups, world_chain
from core.groups.rank_grid import COPY_AXES
from core.optimizer.algorithms.names import Algorithm, undeclared, update_scope
from core.optimizer.masters.master_weights import LOW_PRECISION
from core.optimizer.optimizer_config import OptimizerConfig


def check_model(config: OptimizerConfig, model_chunks: Sequence[DistributedDataParallel]) -> bool:
    """Check that a config fits a model's strategy and dtypes, and return ``True`` if the model is sharded.

    Raises ValueError if options contradict each other, the strategy or the parameters' dtypes.
    """
    models_of(model_chunks)  # raises if a model lacks a chunk
    sharded = model_chunks[0].ddp_config.sharded
    for index, chunk in enumerate(model_chunks):
        if chunk.ddp_config.sharded != sharded:
            raise ValueError(
                f"use_distributed_optimizer is {sharded} for model chunk 0 and {not sharded} for chunk {index}; "
                "wrap all chunks of a model with the same value"
            )
    if config.use_distributed_optimizer not in (None, sharded):
        raise ValueError(
            f"OptimizerConfig.use_distributed_optimizer is {config.use_distributed_optimizer}, and the model was "
            f"wrapped with {sharded}; leave the option at None, or wrap the model with the same value"
        )
    if config.overlap_param_gather_with_optimizer_step and not sharded:
        raise ValueError(
            "overlap_param_gather_with_optimizer_step is True and the optimizer is not sharded, so it gathers nothing; "
            "wrap the model with use_distributed_optimizer=True, or set the option to False"
        )
    if config.overlap_param_gather_with_optimizer_step and any(c.ddp_config.shards_parameters for c in model_chunks):
        raise ValueError(
            "overlap_param_gather_with_optimizer_step is True, and with 'optim_grads_params' the step gathers nothing; "
            "set the option to False"
        )
    if config.fp16 and config.loss_scale is None and any(c.ddp_config.check_for_nan_in_grad for c in model_chunks):
        raise ValueError(
            "a dynamic loss scale finds its size by overflowing, and check_for_nan_in_grad=True would raise each time; "
            "wrap the model with record_nan_in_grad=True instead, which only notes where and when, or set loss_scale"
        )
    buckets = list(buckets_of(model_chunks))
    if config.optimizer_cpu_offload and any(places_states(chunk) for chunk in model_chunks):
        raise ValueError(
            "optimizer_cpu_offload keeps the optimizer's state on the CPU, and so, or in files, does the placement; "
            "choose one: set optimizer_cpu_offload=False, or Placement(offload_optim_frac=0.0)"
        )
    _check_parameters(config, buckets)
    for bucket in buckets if config.use_precision_aware_optimizer else ():  # main_grads_dtype: as in Megatron
        dtype = bucket.memory.owned_grad.dtype
        if bucket.params[0].dtype in LOW_PRECISION and dtype != config.main_grads_dtype:
            raise ValueError(
                f"OptimizerConfig.main_grads_dtype is {config.main_grads_dtype} and the gradients of "
                f"{bucket.contracts[0].name!r} are reduced in {dtype}; set main_grads_dtype to that, or wrap the model "
                f"with grad_reduce_in_fp32={config.main_grads_dtype == torch.float32}"
            )
    return sharded


def places_states(chunk: DistributedDataParallel) -> bool:
    """Return ``True`` if a wrapped model's placement decides where masters and moments are stored."""
    placement = chunk.ddp_config.placement
    return placement is not None and placement.offload_optim_frac > 0


def buckets_of(model_chunks: Sequence[DistributedDataParallel]) -> Iterator[Bucket]:
    """Yield all buckets, dense ones before expert ones in each chunk."""
    for chunk in model_chunks:
        for buffer in (*chunk.grad_buffers, *chunk.expert_parallel_buffers):
            yield from buffer.buckets


def params_of(
    model_chunks: Sequence[DistributedDataParallel],
) -> Iterator[tuple[int, nn.Parameter, GradientContract]]:
    """Yield (chunk index, parameter, contract) for all trainable parameters of wrapped chunks."""
    for number, chunk in enumerate(model_chunks):
        for bucket in buckets_of([chunk]):
            for param, contract in zip(bucket.params, bucket.contracts, strict=True):
                yield number, param, contract


def trainable_params(chunks: Sequence[DistributedDataParallel]) -> list[tuple[str, nn.Parameter, bool]]:
    """Return (name in the full model, parameter, is_expert) for each parameter that this rank trains."""
    namers = [namer(chunk.module) for chunk in chunks]
    return [(namers[number](contract.name), param, contract.is_expert) for number, param, contract in params_of(chunks)]


def frozen_params(chunks: Sequence[DistributedDataParallel]) -> list[tuple[str, nn.Parameter]]:
    """Return (name in the full model, parameter) for each frozen parameter."""
    namers = [namer(chunk.module) for chunk in chunks]
    return [
        (global_name(name), param)
        for global_name, chunk in zip(namers, chunks, strict=True)
        for name, param in chunk.module.named_parameters()
        if not param.requires_grad
    ]


def repeated_name(chunks: Sequence[DistributedDataParallel]) -> str | None:
    """Find a name that two pipeline stages use for different parameters. Collective over 'pp'.

    Return the name and the stages' ranks as text, or ``None`` if names are unique.
    """
    groups = chunks[0].groups
    if groups.size("pp") == 1:
        return None
    namers, models = [namer(chunk.module) for chunk in chunks], models_of(chunks)
    mine = {
        id(param): (models[number], namers[number](contract.name))
        for number, param, contract in params_of(chunks)
        if not contract.crosses_stages  # a copy of one weight, such as a tied embedding
    }
    holder: dict[tuple[int, str], int] = {}
    for rank, names in agree.gather(list(mine.values()), groups.require("pp"), "the names of stages").items():
        for key in names:
            if key in holder:
                return f"{key[1]!r} is the name of two parameters, of pipeline stages on ranks {holder[key]} and {rank}"
            holder[key] = rank
    return None


def _check_parameters(config: OptimizerConfig, buckets: Sequence[Bucket]) -> None:
    dtypes = {bucket.params[0].dtype: bucket.contracts[0].name for bucket in buckets}
    said = {
        "bf16 is True": torch.bfloat16 if config.bf16 else None,
        "fp16 is True": torch.float16 if config.fp16 else None,
        f"params_dtype is {config.params_dtype}": config.params_dtype,
    }
    for option, dtype in said.items():
        if dtype is not None and dtypes and dtype not in dtypes:
            first, name = next(iter(dtypes.items()))
            raise ValueError(
                f"OptimizerConfig.{option} and no parameter is in {dtype} (the first, {name!r}, is {first}); convert "
                f"the model with model.to({dtype}) before wrapping it, or leave the option out"
            )
    if torch.float16 in dtypes and not config.fp16 and config.loss_scale is None:
        raise ValueError(
            f"parameter {dtypes[torch.float16]!r} is in fp16 and there is no loss scale, so small gradients would "
            "become 0; set OptimizerConfig(fp16=True), or loss_scale=1.0 if that is meant"
        )
    for dtype, name in dtypes.items():
        if dtype in LOW_PRECISION and config.main_params_dtype not in (torch.float32, dtype):
            raise ValueError(
                f"main_params_dtype is {config.main_params_dtype} and parameter {name!r} is in {dtype}; its master can "
                "be kept in torch.float32, or be the parameter itself (the same dtype)"
            )


def split_parameter(
    model_chunks: Sequence[DistributedDataParallel], needs_whole: Callable[[nn.Parameter], str | None]
) -> str | None:
    """Find a parameter that tensor or expert parallelism splits although its algorithm needs it unsplit.

    ``needs_whole`` returns the algorithm of a parameter that must be unsplit, or ``None``. Muon gathers split matrices,
    so they are accepted on the device. Return the error text, or ``None``.
    """
    on_host = {id(p) for b in buckets_of(model_chunks) if isinstance(b.memory.state_tier, HostTier) for p in b.params}
    for number, param, contract in params_of(model_chunks):
        axes = split_axes(param, contract)
        algorithm = needs_whole(param) if axes else None
        if algorithm is not None and (algorithm != "muon" or id(param) in on_host):
            where = " on the device: Placement(offload_optim_frac=0.0)" if id(param) in on_host else ""
            chunk = model_chunks[number]
            name = global_name(chunk.module, contract.name)
            return (
                f"parameter {name!r} is split over the {chunk.groups.size(axes[0])} ranks of {axes[0]!r}, and "
                f"{algorithm} needs it whole: of slices it would make another update for each number of ranks. In "
                f"get_megatron_optimizer give it another algorithm, ParamKey(name={name!r}): {{'optimizer': 'adam'}}, "
                f"or 'muon', this package's own, which puts split matrices together{where}"
            )
    return None


def split_axes(param: nn.Parameter, contract: GradientContract) -> list[str]:
    """Return the parallel axes over which a parameter is split. 'ep' splits a stack of experts, not a single expert."""
    stacked = getattr(param, "expert_dim", None) is not None
    return [axis for axis in contract.sharded_over if axis in COPY_AXES or (axis == "ep" and stacked)]


def cut_by_shards(
    model_chunks: Sequence[DistributedDataParallel], needs_whole: Callable[[nn.Parameter], str | None]
) -> str | None:
    """Find a parameter that shards may cut although its algorithm needs it unsplit.

    Return the error text of the hardest case, or ``None``.
    """
    found: list[tuple[int, str]] = []
    for number, param, contract in params_of(model_chunks):
        chunk = model_chunks[number]
        several = max(chunk.groups.size("dp_cp"), chunk.groups.size("expt_dp")) > 1
        algorithm = needs_whole(param) if chunk.ddp_config.sharded and several else None
        if algorithm is None:
            continue
        what = f"parameter {global_name(chunk.module, contract.name)!r} is"
        wanted: bool | str = True if param.dim() >= 2 else "all"
        if getattr(param, "is_embedding_or_output_parameter", False):
            problem = (
                f"{what} an embedding or output layer, which shards cut, and {algorithm} needs it whole; in "
                "get_megatron_optimizer give it another algorithm, "
                "ParamKey(attr='is_embedding_or_output_parameter'): {'optimizer': 'adam'}"
            )
            found.append((2, problem))
        elif chunk.ddp_config.keep_params_whole not in (wanted, "all"):
            problem = (
                f"{what} updated by {algorithm}, which needs it whole, and shards may cut it; wrap the model with "
                f"DistributedDataParallelConfig(keep_params_whole={wanted!r})"
            )
            found.append((wanted == "all", problem))
    return max(found)[1] if found else None


def spread_group(model_chunks: Sequence[DistributedDataParallel], algorithms: Iterable[Algorithm]) -> str | None:
    """Return the error text if an algorithm that needs all of its parameters in one call would get only some of
    them.
    """
    coupled = next((each for each in algorithms if update_scope(each) == "group"), None)
    if coupled is None:
        return None
    groups = model_chunks[0].groups
    sharded = any(
        chunk.ddp_config.sharded and dist.get_world_size(bucket.groups.shard) > 1
        for chunk in model_chunks
        for bucket in buckets_of([chunk])
    )
    split = any(groups.size(axis) > 1 for _, _, contract in params_of(model_chunks) for axis in contract.sharded_over)
    return undeclared(coupled) if sharded or split or groups.size("pp") > 1 else None


def all_rank_groups(groups: ProcessGroups) -> list[ProcessGroup]:
    """Return groups to reduce over, one after the other, so that every rank of the model counts once.

    Raises ValueError if the job has more ranks than the groups reach, and it is unknown whether those ranks hold parts
    of the model.
    """
    chain = world_chain(groups)
    reached = math.prod(map(groups.size, chain))
    complete = any(all(getattr(groups, name) is not None for name in names) for names in CHAINS)
    if reached < dist.get_world_size() and not complete:
        missing = ", ".join(repr(name) for name in CHAINS[-1] if getattr(groups, name) is None)
        raise ValueError(
            f"the norm would be taken over {reached} of the job's {dist.get_world_size()} ranks, because the groups "
            f"lack {missing}; wrap the model with them too, with a group of one rank "
            "(torch.distributed.new_subgroups(1)) along an axis that it is not split over"
        )
    return [groups.require(name) for name in chain if groups.size(name) > 1]


def other_ranks(groups: ProcessGroups, wrapped: ProcessGroups) -> str | None:
    """Return the error text if ``groups`` reach other ranks than the groups that a model chunk was wrapped with."""
    reached, wrapped_with = (math.prod(map(each.size, world_chain(each))) for each in (groups, wrapped))
    for name in (name for chain in reversed(CHAINS) for name in chain):
        given, own = (None if getattr(each, name) is None else each.ranks(name) for each in (groups, wrapped))
        other_reach = (given and own) or (reached != wrapped_with and groups.size(name) != wrapped.size(name))
        if given != own and other_reach:
            return (
                f"pg_collection.{name} holds ranks {given}, and the model was wrapped with {own}: ranks would clip by "
                "different norms. Pass the groups it was wrapped with, or leave pg_collection out"
            )
    return None
