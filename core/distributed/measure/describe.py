"""The table behind `ddp.describe()`: where every gradient lies and what will be done to it."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist

from core.distributed.buffer.bucket_pool import POOL_BUCKETS
from core.distributed.buffer.grad_buffer import GradBuffer
from core.distributed.buffer.memory_tier import MemoryTier
from core.distributed.layout.model_plan import ModelPlan
from core.distributed.sharded.param_unit import ParamUnit
from core.groups.process_groups import ProcessGroups


def describe_model(
    plan: ModelPlan,
    buffers: Sequence[GradBuffer],
    groups: ProcessGroups,
    reduce_microbatches: str,
    units: Sequence[ParamUnit],
) -> str:
    """Buffers, their buckets and their parameters as text, one line each."""
    lines = []
    for number, buffer in enumerate(buffers):
        key = buffer.layout.key
        ranks = dist.get_process_group_ranks(groups.require(key.data_group))
        where = f"sharded over {buffer.layout.shards}" if buffer.sharded else "replicated"
        nbytes = buffer.grad_data.element_size() * buffer.numel
        lines.append(
            f"buffer {number}: parameters {key.param_dtype}, gradients {key.grad_dtype}, {buffer.numel} elements "
            f"({nbytes} bytes), {where}, data group {key.data_group} {ranks}"
            + (", in memory that these ranks map from each other" if buffer.channels else "")
        )
        if buffer.pool is not None:
            lines += _sharded_gradients(buffer, nbytes, reduce_microbatches)
        for bucket in buffer.buckets:
            layout = bucket.layout
            padding = layout.numel - layout.numel_unpadded
            is_offloaded = any(bucket.owned_grad is part for part in buffer.offloaded)
            grads = "; gradients offloaded" if is_offloaded else ""
            scaled = "" if bucket.scale == 1.0 else f", x {bucket.scale:.6g} before"
            lines.append(
                f"  bucket {layout.index}: [{layout.start}, {layout.end}), {bucket.nbytes} bytes, {padding} "
                f"padding, {bucket.op}{scaled}{grads}{_below(bucket.state_tier, '; masters and moments')}"
            )
            for slot in layout.slots:
                contract = plan.contracts[slot.name]
                sharded = f", split over {', '.join(contract.sharded_over)}" if contract.sharded_over else ""
                lines.append(f"    {slot.name} {list(slot.shape)}{sharded}: {'; '.join(contract.reductions)}")
    lines += map(_sharded_parameters, units)
    for name, param in plan.frozen.items():
        lines.append(f"frozen: {name} {list(param.shape)}")
    return "\n".join(lines)


def _below(tier: MemoryTier | None, what: str) -> str:
    return "" if tier is None else f"{what} in {tier.place}"


def _sharded_parameters(unit: ParamUnit) -> str:
    if unit.tier is not None:
        how = f"is copied to the device around its use, and stays there {unit.keep_gathered.value}"
    elif unit.layout.shards == 1:
        how = "is whole on its only rank"
    elif unit.mapped is not None:
        how = "is always whole in memory that its ranks map from each other"
    else:
        how = f"is gathered around its use, and stays whole {unit.keep_gathered.value}"
    on = f"{unit.shard.nbytes} bytes on each of {unit.layout.shards} ranks{_below(unit.tier, ',')}"
    return f"{unit.name}: {on}; the bucket {how}"


def _sharded_gradients(buffer: GradBuffer, nbytes: int, chosen: str) -> list[str]:
    """Cost of a sharded gradient with each way of accumulating microbatches; `nbytes` of the whole buffer."""
    kept = nbytes // buffer.layout.shards
    pool = 0 if buffer.pool is None else buffer.pool.nbytes
    sent = nbytes - kept  # (shards - 1) / shards
    return [
        f"  kept {kept} bytes, and at most {pool} for {POOL_BUCKETS} buckets that fill and travel; accumulating k > 1 "
        f"microbatches, reduce_microbatches={chosen!r}:",
        f"    'last' keeps {nbytes} bytes more until the last and sends {sent} a step; 'every' keeps no more and sends "
        f"k x {sent}",
    ]
