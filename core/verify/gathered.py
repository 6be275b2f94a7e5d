"""Put together again what a layout has split: shards of the data group, slices of the tensor-parallel group."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from core.distributed import DistributedDataParallel
from core.distributed.bucket import Bucket
from core.distributed.gradient_contract import data_group_of
from core.tensor_parallel import tensor_parallel_join, tensor_parallel_slice


def buckets_of(ddp: DistributedDataParallel) -> Iterator[Bucket]:
    """All buckets, dense and expert."""
    for buffer in (*ddp.buffers, *ddp.expert_parallel_buffers):
        yield from buffer.buckets


def whole_gradients(ddp: DistributedDataParallel) -> dict[str, Tensor]:
    """Reduced gradients by name, copied; where they are sharded, from all ranks' shards. Collective."""
    grads: dict[str, Tensor] = {}
    for bucket in buckets_of(ddp):
        flat = bucket.grad.clone()
        if not bucket.full:
            low, high = bucket.shard_range
            shards = [torch.empty_like(flat[low:high]) for _ in range(dist.get_world_size(bucket.groups.shard))]
            dist.all_gather(shards, flat[low:high].contiguous(), group=bucket.groups.shard)
            flat = torch.cat(shards)
        for slot in bucket.layout.slots:
            start = slot.start - bucket.layout.start
            grads[slot.name] = flat[start : start + slot.end - slot.start].view(slot.shape)
    return {name: grads[name] for name in ddp.contracts}


def valid_mask(ddp: DistributedDataParallel, name: str) -> Tensor:
    """[numel] bool on the CPU: the elements of a parameter whose reduced gradient this rank holds."""
    for bucket in buckets_of(ddp):
        for slot in bucket.layout.slots:
            if slot.name == name:
                low, high = bucket.valid_range
                place = torch.arange(slot.start, slot.end) - bucket.layout.start
                return (place >= low) & (place < high)
    raise KeyError(f"parameter {name!r} is in no bucket")


def slicing_axis(ddp: DistributedDataParallel, name: str, param: nn.Parameter) -> str | None:
    """The group whose ranks hold different slices of a parameter, frozen ones included: 'tp', 'expt_tp' or None."""
    axis = "tp" if data_group_of(param) == "dp_cp" else "expt_tp"
    if name in ddp.contracts:
        return axis if axis in ddp.contracts[name].sharded_over else None
    sliced = getattr(param, "tensor_model_parallel", False) and ddp.groups.size(axis) > 1
    return axis if sliced else None


def whole_weights(ddp: DistributedDataParallel) -> dict[str, Tensor]:
    """Weights by name, tensor-parallel slices joined; padding is still at the end. Collective over that group."""
    weights = {}
    for name, param in ddp.module.named_parameters():
        weight = param.detach()
        axis = slicing_axis(ddp, name, param)
        if axis is not None:
            group = ddp.groups.require(axis)
            slices = [torch.empty_like(weight) for _ in range(dist.get_world_size(group))]
            dist.all_gather(slices, weight.contiguous(), group=group)
            weight = tensor_parallel_join(slices, _split_dim(param, name), getattr(param, "partition_stride", 1))
        weights[name] = weight
    return weights


def own_slice(ddp: DistributedDataParallel, name: str, param: nn.Parameter, whole: Tensor) -> Tensor:
    """This rank's tensor-parallel slice of something that has the whole parameter's shape."""
    axis = slicing_axis(ddp, name, param)
    if axis is None:
        return whole
    size, rank = ddp.groups.size(axis), ddp.groups.rank(axis)
    return tensor_parallel_slice(whole, _split_dim(param, name), size, rank, getattr(param, "partition_stride", 1))


def _split_dim(param: nn.Parameter, name: str) -> int:
    dim = getattr(param, "partition_dim", -1)
    if dim is None or not 0 <= dim < param.dim():
        raise ValueError(
            f"parameter {name!r} is tensor_model_parallel and its partition_dim is {dim!r}; to put it together the "
            f"oracle needs the dimension it is split along, 0 to {param.dim() - 1}"
        )
    return int(dim)


def load_whole_weights(reference: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Copy weights into a model that splits nothing; what padding added at the end of a dimension is left out."""
    params = dict(reference.named_parameters())
    if params.keys() != weights.keys():
        odd = sorted(params.keys() ^ weights.keys())
        raise ValueError(
            f"the reference and the model differ in parameter {odd[0]!r} ({len(odd)} names in all); reference_fn must "
            "build the same model without any splitting"
        )
    with torch.no_grad():
        for name, param in params.items():
            weight = weights[name]
            if weight.dim() != param.dim() or any(w < p for w, p in zip(weight.shape, param.shape, strict=True)):
                raise ValueError(
                    f"parameter {name!r} is {list(weight.shape)} put together and {list(param.shape)} in the reference"
                )
            for dim, length in enumerate(param.shape):
                weight = weight.narrow(dim, 0, length)
            param.copy_(weight)


def on_tensors(function: Callable[[Tensor], Any], batch: Any) -> Any:
    """Apply a function to every tensor of nested tuples, lists and dictionaries."""
    if isinstance(batch, Tensor):
        return function(batch)
    if isinstance(batch, Mapping):
        return {key: on_tensors(function, value) for key, value in batch.items()}
    if isinstance(batch, (tuple, list)):
        return type(batch)(on_tensors(function, value) for value in batch)
    return batch


def cast(tensor: Tensor, dtype: torch.dtype | None, device: torch.device) -> Tensor:
    """A tensor on a device; in the given dtype if it is a floating point one and a dtype is given."""
    return tensor.to(device, dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype)
