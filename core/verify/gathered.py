"""Reassemble tensors that a layout has split: data-group shards, tensor and expert slices, and pipeline stages."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from core.checkpoint.boxes import Box, Index
from core.checkpoint.global_slices import GlobalSlice, buffer_slices, global_slices
from core.distributed import DistributedDataParallel
from core.distributed.buffer.bucket import Bucket
from core.distributed.contract.gradient_contract import GradientContract
from core.groups import agree
from core.interface.model import all_of
from core.watch.waiting import waiting

BIAS = "expert_bias"  # router buffer that finalize_model_grads updates


@dataclass(frozen=True)
class Held:
    """This rank's part of one tensor of the full model.

    Attributes:
        place: Position of the part in the full tensor.
        chunk: Index of the model chunk that holds it.
        tensor: The local tensor.
        contract: Gradient contract; None if the tensor is not trained.
    """

    place: GlobalSlice
    chunk: int
    tensor: Tensor
    contract: GradientContract | None = None

    @property
    def name(self) -> str:
        """Name in the full model."""
        return self.place.name

    @property
    def key(self) -> tuple[int, str]:
        """Key that is unique among this rank's tensors, replicas included."""
        return self.chunk, self.place.local_name

    def slice_of(self, whole: Tensor) -> Tensor:
        """Return this rank's part of a tensor with the full shape; padding is zero."""
        return slice_of(self.place, whole)


def slice_of(place: GlobalSlice, whole: Tensor) -> Tensor:
    """Return a rank's slice of a full tensor; padding is zero."""
    part = whole.new_zeros(place.local_shape)
    for box in place.boxes:
        part[_area(box.local_offset, box)] = whole[_area(box.global_offset, box)]
    return part


def _area(offset: Index, box: Box) -> tuple[slice, ...]:
    return tuple(slice(start, start + length) for start, length in zip(offset, box.size, strict=True))


class WrappedModel:
    """The wrapped chunks of one rank, and their parts of the full model.

    Attributes:
        computes_in: Dtype to which forwards cast the weights; None if they do not.
        held: Parts of parameters.
        biases: Parts of router biases.
    """

    computes_in: torch.dtype | None = None

    def __init__(self, chunks: Sequence[DistributedDataParallel]) -> None:
        self.chunks = list(chunks)
        self.groups = chunks[0].groups
        self.device = chunks[0].plan.device
        self.held: list[Held] = []
        self.biases: list[Held] = []
        for number, chunk in enumerate(chunks):
            params = dict(chunk.module.named_parameters())
            for name, place in global_slices(chunk.module, self.groups).items():
                self.held.append(Held(place, number, params[name], chunk.contracts.get(name)))
            for name, place in buffer_slices(chunk.module, self.groups).items():
                if name.rpartition(".")[2] == BIAS:
                    self.biases.append(Held(place, number, chunk.module.get_buffer(name)))

    @property
    def trained(self) -> list[Held]:
        """Parameters with gradients, in order of chunks and of registration."""
        return [held for held in self.held if held.contract is not None]

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Gather sharded parameters inside the context. Collective."""
        with all_of(chunk.gathered() for chunk in self.chunks):
            yield

    @property
    def dtype(self) -> torch.dtype:
        """Dtype in which forwards compute: ``computes_in``, else the first parameter's dtype."""
        return self.computes_in or next((held.tensor.dtype for held in self.held), torch.float32)

    def record_dtype(self, module: nn.Module) -> None:
        """Record the dtype of a module that is about to run, possibly with cast weights."""

    @property
    def is_split(self) -> bool:
        """True if this rank holds only a part of some parameter."""
        return any(held.place.shape != held.place.local_shape for held in self.held)

    def split_weights(self, chunk: int | None = None) -> dict[str, GlobalSlice]:
        """Return the positions of split weights by their module's full name, of one chunk or of all."""
        return {
            held.name.removesuffix(".weight"): held.place
            for held in self.held
            if held.name.endswith(".weight")
            and held.place.shape != held.place.local_shape
            and chunk in (None, held.chunk)
        }

    def gradients(self) -> dict[tuple[int, str], Tensor]:
        """Return copies of the reduced gradients by ``Held.key``, gathered if they are sharded. Collective."""
        grads: dict[tuple[int, str], Tensor] = {}
        for number, chunk in enumerate(self.chunks):
            for bucket in buckets_of(chunk):
                flat = _full_bucket(bucket)
                for slot in bucket.layout.slots:
                    start = slot.start - bucket.layout.start
                    grads[number, slot.name] = flat[start : start + slot.end - slot.start].view(slot.shape)
        return {held.key: grads[held.key] for held in self.trained}

    def own_gradient(self, held: Held) -> Tensor:
        """Return this rank's gradient from backward, before any reduction; zeros if it is not available."""
        if self.chunks[held.chunk].ddp_config.reduces_every_microbatch:
            return torch.zeros(held.place.local_shape)
        param: Any = held.tensor
        own: Tensor = param.main_grad if param.grad is None else param.grad
        return own

    def valid_mask(self, held: Held) -> Tensor:
        """Return which elements of a parameter's reduced gradient this rank holds, [numel] bool on the CPU."""
        for bucket in buckets_of(self.chunks[held.chunk]):
            for slot in bucket.layout.slots:
                if slot.name == held.place.local_name:
                    low, high = bucket.valid_range
                    place = torch.arange(slot.start, slot.end) - bucket.layout.start
                    return (place >= low) & (place < high)
        raise KeyError(f"parameter {held.place.local_name!r} is in no bucket")

    def full_weights(self) -> dict[str, Tensor]:
        """Gather full parameters and router biases by name on rank 0's CPU; other ranks return an empty dict.

        Collective over the world.

        Raises:
            ValueError: On all ranks, if replicas of a parameter differ or elements are missing.
        """
        first = [held for held in (*self.held, *self.biases) if held.place.replica == 0]
        with self.gathered():
            everyone = _on_rank_zero([(held.place, held.tensor.detach().cpu()) for held in first])
        with agree.together(None, "the weights of the whole model", ValueError):
            return {} if everyone is None else _assembled(everyone)

    def whole(self, values: Mapping[tuple[int, str], Tensor]) -> dict[str, Tensor]:
        """Gather full tensors of trained parameters by name on rank 0's CPU; other ranks return an empty dict.

        Collective over the world. Copies may differ; the first rank's counts.
        """
        first = [held for held in self.trained if held.place.replica == 0]
        everyone = _on_rank_zero([(held.place, values[held.key].detach().cpu()) for held in first])
        return {} if everyone is None else _assembled(reversed(everyone), equal=False)


def _on_rank_zero(mine: list[Any]) -> list[Any] | None:
    """Return every rank's list on rank 0, and None on other ranks."""
    everyone: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    with waiting("the weights of all ranks", dist.group.WORLD):
        dist.gather_object(mine, everyone, dst=0)
    return everyone


def _assembled(everyone: Iterable[Iterable[tuple[GlobalSlice, Tensor]]], *, equal: bool = True) -> dict[str, Tensor]:
    weights: dict[str, Tensor] = {}
    written: dict[str, Tensor] = {}
    for rank, pieces in enumerate(everyone):
        for place, tensor in pieces:
            whole = weights.setdefault(place.name, torch.zeros(place.shape, dtype=tensor.dtype))
            known = written.setdefault(place.name, torch.zeros(place.shape, dtype=torch.bool))
            for box in place.boxes:
                there, values = _area(box.global_offset, box), tensor[_area(box.local_offset, box)]
                if equal and bool((known[there] & (whole[there] != values)).any()):
                    raise ValueError(
                        f"rank {rank}: the copy of parameter {place.name!r} has other values than the one of an "
                        "earlier stage; start all copies alike"
                    )
                whole[there], known[there] = values, True
    for name, known in written.items():
        if not bool(known.all()):
            raise ValueError(f"no rank holds some elements of parameter {name!r}: see core.checkpoint.global_slices")
    return weights


def buckets_of(ddp: DistributedDataParallel) -> Iterator[Bucket]:
    """Yield all buckets, dense and expert."""
    for buffer in (*ddp.grad_buffers, *ddp.expert_parallel_buffers):
        yield from buffer.buckets


def _full_bucket(bucket: Bucket) -> Tensor:
    """Return the bucket's full gradients, gathered from all shards, with every scale that is left to the optimizer."""
    if bucket.step.is_full_grad:
        return bucket.memory.grad * bucket.step.pending_scale
    mine = bucket.memory.owned_grad.to(bucket.device).contiguous()
    shards = [torch.empty_like(mine) for _ in range(dist.get_world_size(bucket.groups.shard))]
    with waiting("the shards of a bucket", bucket.groups.shard):
        dist.all_gather(shards, mine, group=bucket.groups.shard)
    return torch.cat(shards) * bucket.step.pending_scale


def load_full_weights(reference: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Copy full weights into an unsplit model.

    Raises:
        ValueError: If names or shapes differ.
    """
    params = dict(reference.named_parameters())
    biases = {name: buffer for name, buffer in reference.named_buffers() if name.rpartition(".")[2] == BIAS}
    targets = {**params, **biases}
    if targets.keys() != weights.keys():
        lacking = [name for name in targets if name not in weights]
        more = sorted(weights.keys() - targets.keys())
        parts = [f"no rank of the layout holds {lacking[0]!r} ({len(lacking)} in all)"] if lacking else []
        parts += [f"the reference has no {more[0]!r} ({len(more)} in all)"] if more else []
        raise ValueError(
            f"the parameters differ: {', and '.join(parts)}; reference_fn must build the same model without any "
            "splitting, and stages and experts must set global_names, their parameters' names in it"
        )
    with torch.no_grad():
        for name, target in targets.items():
            if weights[name].shape != target.shape:
                raise ValueError(
                    f"parameter {name!r} has shape {list(weights[name].shape)} gathered from the ranks and "
                    f"{list(target.shape)} in the reference; set the dimension along which ranks hold slices "
                    "(partition_dim, or declare_splits), and its length without padding (partition_length)"
                )
            target.copy_(weights[name])


def on_tensors(function: Callable[[Tensor], Any], batch: Any) -> Any:
    """Apply a function to every tensor of nested tuples, lists, and dictionaries."""
    if isinstance(batch, Tensor):
        return function(batch)
    if isinstance(batch, Mapping):
        return {key: on_tensors(function, value) for key, value in batch.items()}
    if isinstance(batch, (tuple, list)):
        values = [on_tensors(function, value) for value in batch]
        return type(batch)(*values) if hasattr(batch, "_fields") else type(batch)(values)
    return batch


def kept(batch: Any) -> Any:
    """Return a copy with cloned tensors, because a loop may reuse the memory of its inputs."""
    return on_tensors(lambda tensor: tensor.detach().clone(), batch)


def first_tensor(batch: Any) -> Tensor:
    """Return the first tensor of a batch; ValueError if there is none."""
    found: list[Tensor] = []
    on_tensors(found.append, batch)
    if not found:
        raise ValueError("the batch holds no tensor; pass the global batch")
    return found[0]


def cast(tensor: Tensor, dtype: torch.dtype | None, device: torch.device) -> Tensor:
    """Move a tensor to a device; floating-point tensors are also cast if a dtype is given."""
    return tensor.to(device, dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype)


def piece_of(batch: Any, pieces: int, number: int) -> Any:
    """Return one of several equal parts of a batch, along the first dimension of its tensors.

    Raises:
        ValueError: If a tensor cannot be divided.
    """

    def cut(tensor: Tensor) -> Tensor:
        if tensor.dim() == 0 or tensor.shape[0] % pieces:
            raise ValueError(
                f"a tensor of the batch has shape {list(tensor.shape)}; its first dimension must divide into {pieces} "
                "= data-parallel ranks x microbatches equal parts"
            )
        length = tensor.shape[0] // pieces
        return tensor[number * length : (number + 1) * length]

    return on_tensors(cut, batch)
