"""Megatron's names of gradient buffers: classes for isinstance, and functions that programs import."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import Enum
from typing import Any

from torch import Tensor

from core.distributed.buffer.bucket import Bucket
from core.distributed.buffer.grad_buffer import GradBuffer
from core.tensor_parallel.mappings import divide
from core_compat.megatron.faces.refusals import arguments, never_made

_ADVICE = "DistributedDataParallel makes the buffers of a model; read them from ddp.buffers"
ParamAndGradBuffer: Any = never_made("ParamAndGradBuffer", GradBuffer, _ADVICE)
ParamAndGradBucket: Any = never_made("ParamAndGradBucket", Bucket, _ADVICE)
ParamAndGradBucketGroup: Any = never_made("ParamAndGradBucketGroup", Bucket, _ADVICE)  # each bucket is one group
BufferType = Enum("BufferType", "PARAM GRAD")


class BufferMemory(Tensor):
    """The memory of a buffer."""

    def storage(self) -> Any:
        """Return the storage. Programs free buffers by its ``resize_(0)``, which is rejected."""
        return _Storage(super().storage())


class _Storage:
    """A storage that cannot be resized."""

    def __init__(self, storage: Any) -> None:
        self._storage = storage

    def __getattr__(self, name: str) -> Any:
        return getattr(self._storage, name)

    def __len__(self) -> int:
        return len(self._storage)

    def resize_(self, size: int) -> None:
        raise RuntimeError(
            f"a buffer's storage cannot be resized to {size} elements: parameters or `.grad` are views of it, and "
            "ranks of one host may map it. To free it, save optimizer.state_dict() on all ranks, delete the wrapper "
            "and the optimizer, and make both again later. Buffers are smaller with data_parallel_sharding_strategy="
            "'optim_grads' or 'optim_grads_params'"
        )


class BufferList(list[GradBuffer]):
    """Gradient buffers, as Megatron's ``ddp.buffers``.

    Calling it returns the module's own buffers, like torch's method.
    """

    def __init__(self, buffers: Iterable[GradBuffer], method: Callable[[bool], Iterator[Tensor]]) -> None:
        super().__init__(buffers)
        for buffer in self:
            buffer.grad_data = buffer.grad_data.as_subclass(BufferMemory)
            if buffer.param_data is not None:
                buffer.param_data = buffer.param_data.as_subclass(BufferMemory)
        self._method = method

    def __call__(self, recurse: bool = True) -> Iterator[Tensor]:
        return self._method(recurse)


@arguments("buffer data_parallel_world_size>count")
def shard_buffer(buffer: Tensor, count: int) -> list[Tensor]:
    """Return views of ``count`` equal parts of a flat tensor. Raises ValueError if its size is not divisible."""
    return list(buffer.split(divide(buffer.numel(), count, "shard_buffer")))


@arguments("buffers -force_single_bucket_group=False")
def partition_buckets(buffers: Sequence[GradBuffer]) -> list[Bucket]:
    """Return the buckets of buffers, each as its own group."""
    return [bucket for buffer in buffers for bucket in buffer.buckets]
