"""Text about a wrapped model: the table of ``ddp.describe()``, and the sentence of ``ddp.where(name)``."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch.distributed as dist

from core.distributed.buffer.bucket import Bucket, BucketState
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
    """Return buffers, their buckets and their parameters as text, one line each."""
    lines = []
    for number, buffer in enumerate(buffers):
        key = buffer.layout.key
        ranks = dist.get_process_group_ranks(groups.require(key.data_group))
        where = f"sharded over {buffer.layout.shards}" if buffer.buckets[0].sharded else "replicated"
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
            padding = layout.end - max(slot.end for slot in layout.slots)
            is_offloaded = any(bucket.memory.owned_grad is part for part in buffer.offloaded)
            grads = "; gradients offloaded" if is_offloaded else ""
            scaled = "" if bucket.scale == 1.0 else f", x {bucket.scale:.6g} before"
            lines.append(
                f"  bucket {layout.index}: [{layout.start}, {layout.end}), {bucket.nbytes} bytes, {padding} "
                f"padding, {bucket.op}{scaled}{grads}{_below(bucket.memory.state_tier, '; masters and moments')}"
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
        how = f"is copied to the device around its use, and stays there {unit.keep_unsharded.value}"
    elif unit.layout.shards == 1:
        how = "is whole on its only rank"
    elif unit.mapped is not None:
        how = "is always whole in memory that its ranks map from each other"
    else:
        how = f"is gathered around its use, and stays whole {unit.keep_unsharded.value}"
    on = f"{unit.shard.nbytes} bytes on each of {unit.layout.shards} ranks{_below(unit.tier, ',')}"
    return f"{unit.name}: {on}; the bucket {how}"


def _sharded_gradients(buffer: GradBuffer, nbytes: int, chosen: str) -> list[str]:
    """Describe the cost of a sharded gradient for both ways of accumulation, from the unsharded buffer's bytes."""
    kept = nbytes // buffer.layout.shards
    pool = 0 if buffer.pool is None else buffer.pool.memory.nbytes
    sent = nbytes - kept  # (shards - 1) / shards
    return [
        f"  kept {kept} bytes, and at most {pool} for {POOL_BUCKETS} buckets that fill and travel; accumulating k > 1 "
        f"microbatches, reduce_microbatches={chosen!r}:",
        f"    'last' keeps {nbytes} bytes more until the last and sends {sent} a step; 'every' keeps no more and sends "
        f"k x {sent}",
    ]


def where(name: str, buffers: Sequence[GradBuffer], frozen: Collection[str]) -> str:
    """Describe the location of a parameter's gradient in one sentence; ValueError if no parameter has this name."""
    for number, buffer in enumerate(buffers):
        for bucket in buffer.buckets:
            for index, contract in enumerate(bucket.contracts):
                if contract.name == name:
                    place = f"bucket {bucket.layout.index} of buffer {number}"
                    return f"the gradient of {name!r} {_state_of(bucket, index, place)}"
    if name in frozen:
        return f"{name!r} was frozen when the model was wrapped, so it has no gradient"
    raise ValueError(f"no parameter is called {name!r}; use a name from ddp.module.named_parameters()")


def _state_of(bucket: Bucket, index: int, place: str) -> str:
    if not bucket.params[index].requires_grad:
        return "does not exist: the parameter is frozen (requires_grad is False)"
    if bucket.step.state is BucketState.ACCUMULATING:
        return _accumulating(bucket, index, place)
    if bucket.step.state is BucketState.IN_FLIGHT:
        return _in_flight(bucket, index, place)
    if not bucket.used[index]:
        return "does not exist: no rank used the parameter in this step, so `.grad` is None until a backward uses it"
    words = (
        f"is final in {place}"
        if bucket.step.state is BucketState.FINAL
        else f"is reduced in {place}, before sync rules"
    )
    return f"{words}; {_held(bucket, index)}; {_shown(bucket, index)}"


def _accumulating(bucket: Bucket, index: int, place: str) -> str:
    grad = bucket.params[index].grad
    if bucket.attribute.collected[index]:
        return f"accumulates in borrowed memory of {place}; `.grad` is a placeholder until finalize_model_grads"
    if bucket.memory.views and grad is bucket.memory.views[index]:
        came = "accumulates" if bucket.used[index] else "has not come in this step; it will accumulate"
        return f"{came} in {place}, and `.grad` is that memory"
    if grad is not None:
        return f"accumulates in `.grad`, a tensor of its own, which moves into {place} before that bucket is launched"
    if bucket.step.sums and bucket.used[index]:
        return (
            f"of earlier microbatches is reduced in {place}; {_held(bucket, index)}; `.grad` is None until a backward"
        )
    return f"has not come in this step, so `.grad` is None; the next backward makes it, for {place}"


def _in_flight(bucket: Bucket, index: int, place: str) -> str:
    if bucket.attribute.take(index) is not None:
        return f"came after {place} was launched; it is kept in `.grad`, and finalize_model_grads reduces and adds it"
    if bucket.attribute.collected[index]:
        return f"is in flight in {place}; `.grad` is a placeholder until finalize_model_grads"
    return f"is in flight in {place}, as zeros: none had come here; `.grad` is None until finalize_model_grads"


def _held(bucket: Bucket, index: int) -> str:
    """Name the part of the gradient that is stored on this rank."""
    numel = bucket.params[index].numel()
    start, end = bucket.ranges[index]
    low, high = (max(min(bound, end), start) - start for bound in bucket.valid_range)
    return (
        f"this rank holds all {numel} elements"
        if high - low == numel
        else f"this rank holds [{low}, {high}) of {numel}"
    )


def _shown(bucket: Bucket, index: int) -> str:
    """Describe ``.grad`` of a reduced gradient."""
    grad = bucket.params[index].grad
    if grad is None:
        return "you have set `.grad` to None; the next backward makes a new gradient"
    if bucket.memory.views and grad is bucket.memory.views[index]:
        return "`.grad` is that memory"
    if grad is bucket.attribute.shown[index]:
        due = "it is sharded" if not bucket.step.is_full_grad else "the optimizer has still to scale it"
        return f"`.grad` is a placeholder, because {due}"
    return "you have put another tensor into `.grad`, which the optimizer's step takes or refuses"
