"""where(): a sentence that says where a parameter's gradient is now, and what `.grad` holds."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from core.distributed.buffer.bucket import Bucket, BucketState
from core.distributed.buffer.grad_buffer import GradBuffer


def where(name: str, buffers: Sequence[GradBuffer], frozen: Collection[str]) -> str:
    """Say where the gradient of the parameter `name` is. frozen: names of parameters that were frozen at the wrap."""
    for number, buffer in enumerate(buffers):
        for bucket in buffer.buckets:
            for index, contract in enumerate(bucket.contracts):
                if contract.name == name:
                    place = f"bucket {bucket.layout.index} of buffer {number}"
                    return f"the gradient of {name!r} {_state_of(bucket, index, place)}"
    if name in frozen:
        return f"{name!r} was frozen when the model was wrapped, so it has no gradient"
    raise ValueError(f"no parameter is called {name!r}; names are those of ddp.module.named_parameters()")


def _state_of(bucket: Bucket, index: int, place: str) -> str:
    if not bucket.params[index].requires_grad:
        return "does not exist: the parameter is frozen (requires_grad is False)"
    if bucket.state is BucketState.ACCUMULATING:
        return _accumulating(bucket, index, place)
    if bucket.state is BucketState.IN_FLIGHT:
        return _in_flight(bucket, index, place)
    if not bucket.used[index]:
        return "does not exist: no rank used the parameter in this step, so `.grad` is None until a backward uses it"
    words = f"is final in {place}" if bucket.state is BucketState.FINAL else f"is reduced in {place}, before sync rules"
    return f"{words}; {_held(bucket, index)}; {_shown(bucket, index)}"


def _accumulating(bucket: Bucket, index: int, place: str) -> str:
    grad = bucket.params[index].grad
    if bucket.attribute.collected[index]:
        return f"accumulates in borrowed memory of {place}; `.grad` is a placeholder until finalize_model_grads"
    if bucket.views and grad is bucket.views[index]:
        came = "accumulates" if bucket.used[index] else "has not come in this step; it will accumulate"
        return f"{came} in {place}, and `.grad` is that memory"
    if grad is not None:
        return f"accumulates in `.grad`, a tensor of its own, which moves into {place} before that bucket is launched"
    if bucket.sums and bucket.used[index]:
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
    """Name the part of the gradient that this rank holds."""
    numel = bucket.params[index].numel()
    start, end = bucket.ranges[index]
    low, high = (max(min(bound, end), start) - start for bound in bucket.valid_range)
    return (
        f"this rank holds all {numel} elements"
        if high - low == numel
        else f"this rank holds [{low}, {high}) of {numel}"
    )


def _shown(bucket: Bucket, index: int) -> str:
    """Describe `.grad` of a gradient that is reduced."""
    grad = bucket.params[index].grad
    if grad is None:
        return "you have set `.grad` to None; the next backward makes a new gradient"
    if bucket.views and grad is bucket.views[index]:
        return "`.grad` is that memory"
    if grad is bucket.attribute.shown[index]:
        due = "it is sharded" if not bucket.whole else "the optimizer has still to scale it"
        return f"`.grad` is a placeholder, because {due}"
    return "you have put another tensor into `.grad`, which the optimizer's step takes or refuses"
