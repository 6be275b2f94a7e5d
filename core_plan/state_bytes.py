"""State of a rank between steps, exact to the byte: parameters, gradients, pools, master weights and moments.

Layout and placement of buckets come from the wrapper, and the optimizer's own code creates its master weights, on
tensors of the meta device.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import nn

from core.distributed import DistributedDataParallelConfig
from core.distributed.buffer.bucket_pool import pool_numel
from core.distributed.buffer.grad_buffer import dtype_named
from core.distributed.contract.gradient_contract import GradientContract
from core.distributed.layout.model_plan import ModelPlan, shard_and_replica
from core.distributed.layout.param_layout import BucketLayout, BufferLayout
from core.distributed.layout.places import Places, Where, places_of
from core.distributed.sharded.eviction import WINDOW
from core.groups.global_names import namer
from core.groups.process_groups import ProcessGroups
from core.groups.rank_grid import DATA_KINDS
from core.optimizer import OptimizerConfig
from core.optimizer.algorithms.names import update_scope
from core.optimizer.groups.offload import GroupOf, buckets_on_host
from core.optimizer.groups.param_groups import ParamGroups
from core.optimizer.masters.master_weights import BucketMasters
from core.optimizer.masters.memory import moments_of, scratch_bytes
from core.optimizer.masters.scratch import kept_dtype, scratch_numel
from core_plan.job.errors import ConfigError

# Kinds of memory, in the order in which a table shows them.
PARAMETERS, GRADIENTS, POOL, GATHERED = "parameters", "gradients", "pools of whole buckets", "gathered parameters"
MASTERS, MOMENTS, SCRATCH = "master weights", "moments", "scratch of the optimizer"
STATE_KINDS = (PARAMETERS, GRADIENTS, POOL, GATHERED, MASTERS, MOMENTS, SCRATCH)


class PlannedMemory(NamedTuple):
    """A bucket's memory on the meta device."""

    owned_grad: torch.Tensor  # [owned]
    param_shard: torch.Tensor  # [owned]
    state_tier: None = None


@dataclass(frozen=True)
class PlannedBucket:
    """A bucket on the meta device, with the attributes that master weights read."""

    layout: BucketLayout
    shard_range: tuple[int, int]
    params: Sequence[nn.Parameter]
    contracts: Sequence[GradientContract]
    memory: PlannedMemory
    steps_apart: bool  # True if exactly one of parameters and optimizer state is on the host


class TierBytes(NamedTuple):
    """Bytes by kind on each tier."""

    device: Counter[str]
    offloaded: Counter[str]  # to files, or with a GPU to the host

    def add(self, kind: str, nbytes: int, *, offloaded: bool = False) -> None:
        """Count some bytes."""
        (self.offloaded if offloaded else self.device)[kind] += nbytes


def state_bytes(
    chunks: Sequence[tuple[nn.Module, ModelPlan]],
    ddp_config: DistributedDataParallelConfig,
    optimizer_config: OptimizerConfig,
    groups: ProcessGroups,
    *,
    on_cpu: bool,
    one_host: bool,
) -> TierBytes:
    """Count the bytes by kind of a rank between steps, for all its chunks together.

    Args:
        chunks: (module on the meta device, its plan) of each chunk.
        ddp_config: Configuration of the wrapper.
        optimizer_config: Configuration of the optimizer.
        groups: Process groups of the rank.
        on_cpu: True for ranks on CPU.
        one_host: True if ranks on CPU map each other's buffers, so that an all-gather of parameters copies nothing.
    """
    found = TierBytes(Counter(), Counter())
    _check_placement(ddp_config, on_cpu=on_cpu)
    for _, plan in chunks:
        places = places_of(plan, ddp_config)
        _add_buffers(found, plan, ddp_config, groups, places)
        mapped = on_cpu and one_host and ddp_config.share_host_memory
        found.add(GATHERED, _gathered_bytes(plan, ddp_config, places, mapped=mapped, on_cpu=on_cpu))
    _add_optimizer(found, chunks, ddp_config, optimizer_config, groups, on_cpu=on_cpu)
    return found


def _check_placement(ddp_config: DistributedDataParallelConfig, *, on_cpu: bool) -> None:
    placement = ddp_config.placement
    if placement is None:
        return
    if placement.memory_budget_bytes is not None:
        raise ConfigError(
            f"placement.memory_budget_bytes is {placement.memory_budget_bytes}, but the buckets that stay unsharded "
            "under a budget are only known after the first step, so this cannot be planned; plan with fractions such "
            "as offload_param_frac, or without a placement"
        )
    try:
        placement.check_for("cpu" if on_cpu else "cuda")
    except ValueError as error:
        raise ConfigError(str(error)) from None


def _add_buffers(
    found: TierBytes,
    plan: ModelPlan,
    ddp_config: DistributedDataParallelConfig,
    groups: ProcessGroups,
    places: Places,
) -> None:
    """Count parameters and gradients, full or sharded by the strategy, on the tiers of the placement."""
    residency = ddp_config.residency

    def count(kind: str, layout: BufferLayout, bucket: BucketLayout, itemsize: int, cut: bool, offloaded: bool) -> None:
        rank = groups.rank(shard_and_replica(layout.key.data_group, ddp_config)[0])
        begin, end = bucket.shard_of(rank) if cut else (0, bucket.numel)
        found.add(kind, (end - begin) * itemsize, offloaded=offloaded)

    for number, layout in enumerate(plan.layout.buffers):
        grad = dtype_named(layout.key.grad_dtype).itemsize
        for bucket in layout.buckets:
            offloaded = (number, bucket.index) in places.grads
            count(GRADIENTS, layout, bucket, grad, not residency.keeps_whole, offloaded)
        if not residency.keeps_whole:
            found.add(POOL, pool_numel([bucket.numel for bucket in layout.buckets]) * grad)
    for number, layout in enumerate([*plan.layout.buffers, *plan.frozen_layout.buffers]):
        for bucket in layout.buckets:
            offloaded = (number, bucket.index) in places.params
            count(PARAMETERS, layout, bucket, _param_itemsize(layout), not residency.keeps_params, offloaded)
    in_buffers = {slot.name for layout in plan.frozen_layout.buffers for slot in layout.slots}
    for name, param in plan.frozen.items():
        if name not in in_buffers:
            found.add(PARAMETERS, param.nbytes)


def full_gradients(plan: ModelPlan) -> int:
    """Return the bytes of full gradients of a chunk, which are in ``.grad`` if a rank keeps only its shard."""
    return sum(
        (slot.end - slot.start) * dtype_named(layout.key.grad_dtype).itemsize
        for layout in plan.layout.buffers
        for bucket in layout.buckets
        for slot in bucket.slots
    )


def _param_itemsize(layout: BufferLayout) -> int:
    return dtype_named(layout.key.param_dtype).itemsize


def _gathered_bytes(
    plan: ModelPlan, ddp_config: DistributedDataParallelConfig, places: Places, *, mapped: bool, on_cpu: bool
) -> int:
    """Return the bytes of unsharded buckets in addition to their shards, including a prefetched bucket.

    ``mapped`` is True if ranks map each other's shards; then an all-gather copies only buckets in files.
    """
    if ddp_config.residency.keeps_params:
        return 0
    position = {name: place for place, name in enumerate(plan.named)}
    staying, moving, goes_ahead = 0, [], False
    for number, layout in enumerate([*plan.layout.buffers, *plan.frozen_layout.buffers]):
        for bucket in layout.buckets:
            where, nbytes = (number, bucket.index), bucket.numel * _param_itemsize(layout)
            if where not in places.params and (mapped or layout.shards == 1):
                continue
            goes_ahead |= (not mapped and layout.shards > 1) or (where in places.params and not on_cpu)
            if where in places.params_stay or not ddp_config.reshard_after_forward:
                staying += nbytes
            else:
                moving.append((min(position[slot.name] for slot in bucket.slots), nbytes))
    in_order = [nbytes for _, nbytes in sorted(moving)]
    waits = ddp_config.placement is not None and ddp_config.placement.prefetch == 0
    together = WINDOW + (goes_ahead and not waits)
    return staying + max((sum(in_order[first : first + together]) for first in range(len(in_order))), default=0)


def _add_optimizer(
    found: TierBytes,
    chunks: Sequence[tuple[nn.Module, ModelPlan]],
    ddp_config: DistributedDataParallelConfig,
    config: OptimizerConfig,
    groups: ProcessGroups,
    *,
    on_cpu: bool,
) -> None:
    """Count master weights and moments, created by the optimizer's own code from buckets on the meta device."""
    of_groups = ParamGroups(config, list(_trainable(chunks)), frozen=_frozen(chunks))
    if of_groups.problem is not None:
        raise ValueError(of_groups.problem)
    torch_groups = of_groups.torch_groups(config)
    shaped = [update_scope(group["optimizer"]) != "element" for group in torch_groups]
    moments = [moments_of(config, group["optimizer"]) for group in torch_groups]
    device = torch.device("cpu" if on_cpu else "cuda")
    on_host = [] if on_cpu else _on_host(chunks, config, lambda param: torch_groups[of_groups.of(param)])
    for _, plan in chunks:
        places = places_of(plan, ddp_config)
        if on_host:  # optimizer_cpu_offload excludes a placement of states
            places = replace(places, states=frozenset(where for of, where in on_host if of is plan))
        for number, bucket, kinds in _planned_buckets(plan, ddp_config, groups, places, on_cpu=on_cpu):
            stands_in: Any = bucket
            offloaded = (number, bucket.layout.index) in places.states
            masters = BucketMasters(
                stands_in,
                of_groups.of,
                config,
                scratch_numel=lambda _: scratch_numel(device),
                needs_shape=shaped.__getitem__,
                only_adam=all(group.get("optimizer") == "adam" for group in torch_groups),
            )
            found.add(MASTERS, masters.kept.nbytes, offloaded=offloaded)
            in_files = offloaded and on_cpu
            most = 0
            for segment in masters.segments:
                dtypes = [kept_dtype(key, config) or masters.dtype for key in moments[segment.group]]
                each = sum(dtype.itemsize for dtype in dtypes)
                found.add(MOMENTS, 0 if in_files else segment.numel * each, offloaded=offloaded)
                most = max(most, each)
            # In files a moment has the bucket's length.
            found.add(MOMENTS, masters.grad.numel() * most if in_files else 0, offloaded=offloaded)
            hosted = offloaded and not on_cpu
            if hosted and (number, bucket.layout.index) not in places.grads:
                found.add(GRADIENTS, masters.grad.nbytes, offloaded=True)  # a copy, for the step
            place = found.offloaded if hosted else found.device
            place[SCRATCH] = max(place[SCRATCH], scratch_bytes(config, **kinds, on_cpu=on_cpu or hosted))


def _on_host(
    chunks: Sequence[tuple[nn.Module, ModelPlan]], config: OptimizerConfig, group_of: GroupOf
) -> list[tuple[ModelPlan, Where]]:
    """Return the buckets whose state is on the host because of optimizer_cpu_offload."""
    listed = [
        (plan, number, bucket)
        for _, plan in chunks
        for kind in DATA_KINDS  # dense buckets of a chunk come before its experts'
        for number, layout in enumerate(plan.layout.buffers)
        if layout.key.data_group == kind
        for bucket in layout.buckets
    ]
    buckets = [(bucket.numel, [plan.params[slot.name] for slot in bucket.slots]) for plan, _, bucket in listed]
    chosen = (listed[index] for index in buckets_on_host(config, buckets, group_of))
    return [(plan, (number, bucket.index)) for plan, number, bucket in chosen]


def _planned_buckets(
    plan: ModelPlan,
    ddp_config: DistributedDataParallelConfig,
    groups: ProcessGroups,
    places: Places,
    *,
    on_cpu: bool,
) -> Iterator[tuple[int, PlannedBucket, dict[str, torch.dtype]]]:
    for number, layout in enumerate(plan.layout.buffers):
        rank = groups.rank(shard_and_replica(layout.key.data_group, ddp_config)[0])
        kinds = {"param_dtype": dtype_named(layout.key.param_dtype), "grad_dtype": dtype_named(layout.key.grad_dtype)}
        for bucket in layout.buckets:
            owned = bucket.shard_of(rank) if ddp_config.sharded else (0, bucket.numel)
            grad, shard = (
                torch.empty(owned[1] - owned[0], dtype=kinds[kind], device="meta")
                for kind in ("grad_dtype", "param_dtype")
            )
            params = [plan.params[slot.name] for slot in bucket.slots]
            contracts = [plan.contracts[slot.name] for slot in bucket.slots]
            here = (number, bucket.index)
            apart = not on_cpu and (here in places.params) != (here in places.states)
            yield number, PlannedBucket(bucket, owned, params, contracts, PlannedMemory(grad, shard), apart), kinds


def _trainable(chunks: Sequence[tuple[nn.Module, ModelPlan]]) -> Iterator[tuple[str, nn.Parameter, bool]]:
    for module, plan in chunks:
        full_name = namer(module)
        for name, param in plan.params.items():
            yield full_name(name), param, plan.contracts[name].is_expert


def _frozen(chunks: Sequence[tuple[nn.Module, ModelPlan]]) -> Iterator[tuple[str, nn.Parameter]]:
    return itertools.chain.from_iterable(
        ((namer(module)(name), param) for name, param in plan.frozen.items()) for module, plan in chunks
    )
