"""What a rank holds between steps, to the byte: parameters, gradients, pools, masters and moments.

The layout is the wrapper's, and the optimizer's masters are made by its own code, on tensors of the meta device.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from core.distributed import DistributedDataParallelConfig
from core.distributed.buffer.bucket_pool import pool_numel
from core.distributed.buffer.grad_buffer import dtype_named
from core.distributed.contract.gradient_contract import GradientContract
from core.distributed.layout.model_plan import ModelPlan, shard_and_replica
from core.distributed.layout.param_layout import BucketLayout, BufferLayout
from core.distributed.reduce.residents import WINDOW
from core.global_names import namer
from core.optimizer import OptimizerConfig
from core.optimizer.algorithms.names import algorithm_needs_shapes
from core.optimizer.groups.param_groups import ParamGroups
from core.optimizer.masters.master_weights import BucketMasters
from core.optimizer.masters.memory import moments_of, scratch_bytes
from core.optimizer.masters.scratch import kept_dtype, scratch_numel
from core.process_groups import ProcessGroups

# Kinds of memory, in the order in which a table shows them.
PARAMETERS, GRADIENTS, POOL, GATHERED = "parameters", "gradients", "pools of whole buckets", "gathered parameters"
MASTERS, MOMENTS, SCRATCH = "master weights", "moments", "scratch of the optimizer"
STATE_KINDS = (PARAMETERS, GRADIENTS, POOL, GATHERED, MASTERS, MOMENTS, SCRATCH)


@dataclass(frozen=True)
class PlannedBucket:
    """What master weights read of a bucket, on the meta device."""

    layout: BucketLayout
    shard_range: tuple[int, int]
    params: Sequence[nn.Parameter]
    contracts: Sequence[GradientContract]
    owned_grad: torch.Tensor  # [owned]
    param_shard: torch.Tensor  # [owned]
    state_tier: None = None


def state_bytes(
    chunks: Sequence[tuple[nn.Module, ModelPlan]],
    ddp_config: DistributedDataParallelConfig,
    optimizer_config: OptimizerConfig,
    groups: ProcessGroups,
    *,
    on_cpu: bool,
    one_host: bool,
) -> Counter[str]:
    """Bytes by kind that a rank holds between steps, of all its chunks together.

    chunks: (module on the meta device, its plan). on_cpu: True for ranks on CPU. one_host: True if ranks on CPU map
    each other's buffers, so that a gather of parameters copies nothing.
    """
    held: Counter[str] = Counter()
    for _, plan in chunks:
        held += _of_buffers(plan, ddp_config, mapped=on_cpu and one_host and ddp_config.share_host_memory)
    held += _of_optimizer(chunks, ddp_config, optimizer_config, groups, on_cpu=on_cpu)
    return held


def _of_buffers(plan: ModelPlan, ddp_config: DistributedDataParallelConfig, *, mapped: bool) -> Counter[str]:
    """Parameters and gradients, whole or cut as the strategy says."""
    held: Counter[str] = Counter()
    residency = ddp_config.residency
    for layout in plan.layout.buffers:
        grad = dtype_named(layout.key.grad_dtype).itemsize
        held[GRADIENTS] += layout.numel // residency.kept_by(layout.shards) * grad
        if not residency.keeps_whole:
            held[POOL] += pool_numel([bucket.numel for bucket in layout.buckets]) * grad
        held[PARAMETERS] += _param_bytes(layout, keeps_whole=residency.keeps_params)
    for layout in plan.frozen_layout.buffers:
        held[PARAMETERS] += _param_bytes(layout, keeps_whole=False)
    in_buffers = {slot.name for layout in plan.frozen_layout.buffers for slot in layout.slots}
    held[PARAMETERS] += sum(param.nbytes for name, param in plan.frozen.items() if name not in in_buffers)
    if not residency.keeps_params and not mapped:
        held[GATHERED] += _gathered_bytes([*plan.layout.buffers, *plan.frozen_layout.buffers], list(plan.named))
    return held


def _param_bytes(layout: BufferLayout, *, keeps_whole: bool) -> int:
    return layout.numel // (1 if keeps_whole else layout.shards) * dtype_named(layout.key.param_dtype).itemsize


def _gathered_bytes(layouts: Sequence[BufferLayout], names: Sequence[str]) -> int:
    """Of sharded parameters: the buckets that are whole at a time, and the one that is gathered ahead."""
    position = {name: place for place, name in enumerate(names)}
    sizes = [
        (min(position[slot.name] for slot in bucket.slots), bucket.numel * dtype_named(layout.key.param_dtype).itemsize)
        for layout in layouts
        if layout.shards > 1
        for bucket in layout.buckets
    ]
    in_order = [nbytes for _, nbytes in sorted(sizes)]
    together = WINDOW + 1
    return max((sum(in_order[first : first + together]) for first in range(len(in_order))), default=0)


def _of_optimizer(
    chunks: Sequence[tuple[nn.Module, ModelPlan]],
    ddp_config: DistributedDataParallelConfig,
    config: OptimizerConfig,
    groups: ProcessGroups,
    *,
    on_cpu: bool,
) -> Counter[str]:
    """Masters and moments, made by the optimizer's own code from buckets of the meta device."""
    of_groups = ParamGroups(config, list(_trainable(chunks)), frozen=_frozen(chunks))
    if of_groups.problem is not None:
        raise ValueError(of_groups.problem)
    torch_groups = of_groups.torch_groups(config)
    shaped = [algorithm_needs_shapes(group["optimizer"]) for group in torch_groups]
    device = torch.device("cpu" if on_cpu else "cuda")
    held: Counter[str] = Counter()
    for _, plan in chunks:
        for bucket, kinds in _planned_buckets(plan, ddp_config, groups):
            stands_in: Any = bucket
            masters = BucketMasters(
                stands_in,
                of_groups.of,
                config,
                scratch_numel=None if config.optimizer_cpu_offload else scratch_numel(device),
                needs_shape=shaped.__getitem__,
                only_adam=all(group.get("optimizer") == "adam" for group in torch_groups),
            )
            held[MASTERS] += masters.kept.nbytes
            for segment in masters.segments:
                algorithm = torch_groups[segment.group]["optimizer"]
                dtypes = [kept_dtype(key, config) or masters.dtype for key in moments_of(config, algorithm)]
                held[MOMENTS] += segment.numel * sum(dtype.itemsize for dtype in dtypes)
            held[SCRATCH] = max(held[SCRATCH], scratch_bytes(config, **kinds, on_cpu=on_cpu))
    return held


def _planned_buckets(
    plan: ModelPlan, ddp_config: DistributedDataParallelConfig, groups: ProcessGroups
) -> Iterator[tuple[PlannedBucket, dict[str, torch.dtype]]]:
    for layout in plan.layout.buffers:
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
            yield PlannedBucket(bucket, owned, params, contracts, grad, shard), kinds


def _trainable(chunks: Sequence[tuple[nn.Module, ModelPlan]]) -> Iterator[tuple[str, nn.Parameter, bool]]:
    for module, plan in chunks:
        whole_name = namer(module)
        for name, param in plan.params.items():
            yield whole_name(name), param, plan.contracts[name].is_expert


def _frozen(chunks: Sequence[tuple[nn.Module, ModelPlan]]) -> Iterator[tuple[str, nn.Parameter]]:
    return itertools.chain.from_iterable(
        ((namer(module)(name), param) for name, param in plan.frozen.items()) for module, plan in chunks
    )
