"""Mappings, random streams and the split loss with Megatron's arguments."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from core import tensor_parallel as ours
from core.moe.exchange import all_to_all_rows
from core.tensor_parallel import mappings
from core.tensor_parallel.mappings import divide, group_rank, group_size, resolve_groups
from core.tensor_parallel.random import DATA_PARALLEL_STREAM, EXPERT_PARALLEL_STREAM
from core_compat.megatron.faces.refusals import arguments


def _group(given: dist.ProcessGroup | None) -> Any:
    return resolve_groups(None).tp if given is None else given


def vocab_parallel_cross_entropy(
    vocab_parallel_logits: Tensor, target: Tensor, label_smoothing: float = 0.0, tp_group: Any = None
) -> Tensor:
    """Call core.tensor_parallel's loss for a vocabulary of equal parts without padding, as Megatron reads the logits.

    Gathered logits cannot be distinguished from a rank's part. core.tensor_parallel's function detects them by
    vocab_size.
    """
    group = _group(tp_group)
    size = vocab_parallel_logits.shape[-1] * group_size(group)
    return ours.vocab_parallel_cross_entropy(vocab_parallel_logits, target, label_smoothing, group, vocab_size=size)


gather_from_sequence_parallel_region = arguments(
    "input_ tensor_parallel_output_grad=True group=None !output_split_sizes=None !use_global_buffer=False"
)(ours.gather_from_sequence_parallel_region)
reduce_scatter_to_sequence_parallel_region = arguments(
    "input_ group=None !input_split_sizes=None !use_global_buffer=False"
)(ours.reduce_scatter_to_sequence_parallel_region)


@arguments("group input_ output_split_sizes_=None input_split_sizes=None !use_nccl_stream=False")
def all_to_all(group: Any, input_: Tensor, output_split_sizes_: Any, input_split_sizes: Any) -> Tensor:
    """Exchange rows with every rank of a group, in equal parts if no sizes are given. Differentiable. Collective."""
    size = group_size(group)
    even = [divide(input_.shape[0], size, "rows of all_to_all over the group")] * size if not input_split_sizes else []
    return all_to_all_rows(input_, input_split_sizes or even, output_split_sizes_ or even, group)


def _last_dim(of_first: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Apply a mapping of the first dimension to the last one."""

    def mapping(input_: Tensor, group: Any = None) -> Tensor:
        return of_first(input_.movedim(-1, 0).contiguous(), group=group).movedim(0, -1).contiguous()

    return mapping


all_gather_last_dim_from_tensor_parallel_region = _last_dim(ours.gather_from_sequence_parallel_region)
reduce_scatter_last_dim_to_tensor_parallel_region = _last_dim(ours.reduce_scatter_to_sequence_parallel_region)


@arguments(
    "seed !te_rng_tracker=False !inference_rng_tracker=False !use_cudagraphable_rng=False tp_rank=None ep_rank=None "
    "etp_rank=None -force_reset_rng=False !gtp_remat_rank=None|0 !egtp_remat_rank=None|0 !gtp_remat_world_size=None|1 "
    "!egtp_remat_world_size=None|1"
)
def model_parallel_cuda_manual_seed(seed: int, tp_rank: Any, ep_rank: Any, etp_rank: Any) -> None:
    """Call core.tensor_parallel.model_parallel_manual_seed. The streams always restart."""
    said = {"tp": tp_rank, "ep": ep_rank, "expt_tp": etp_rank}

    def rank(axis: str) -> int:
        return resolve_groups(None).rank(axis) if said.get(axis) is None else int(said[axis])

    ours.model_parallel_manual_seed(seed, SimpleNamespace(rank=rank))  # type: ignore[arg-type]


_TRACKER = "!use_te_rng_tracker=False !inference_rng_tracker=False !use_cudagraphable_rng=False"
get_cuda_rng_tracker = arguments(_TRACKER)(ours.get_rng_tracker)


@arguments(f"{_TRACKER} force_reset=False")
def initialize_rng_tracker(force_reset: bool) -> None:
    """Remove all streams if ``force_reset`` is True. There is one tracker from the start."""
    if force_reset:
        ours.get_rng_tracker().reset()


get_all_rng_states = ours.get_rng_tracker().get_states
get_expert_parallel_rng_tracker_name = functools.partial(str, EXPERT_PARALLEL_STREAM)
get_data_parallel_rng_tracker_name = functools.partial(str, DATA_PARALLEL_STREAM)


def split_tensor_along_last_dim(
    tensor: Tensor, num_partitions: int, contiguous_split_chunks: bool = False
) -> tuple[Tensor, ...]:
    """Split the last dimension into equal parts."""
    parts = tensor.split(divide(tensor.shape[-1], num_partitions, "last dimension over num_partitions"), dim=-1)
    return tuple(part.contiguous() for part in parts) if contiguous_split_chunks else parts


def split_tensor_into_1d_equal_chunks(tensor: Tensor, new_buffer: bool = False, tp_group: Any = None) -> Tensor:
    """Return this rank's part of the flattened tensor, as a copy if ``new_buffer`` is ``True``."""
    part = tensor.view(-1).chunk(group_size(_group(tp_group)))[group_rank(_group(tp_group))]
    return part.clone() if new_buffer else part


def gather_split_1d_tensor(tensor: Tensor, tp_group: Any = None) -> Tensor:
    """Concatenate the parts of all ranks of a group. Collective."""
    group = _group(tp_group)
    return tensor if group_size(group) == 1 else mappings.gather_first(tensor, group)


class VocabUtility:
    """Range [first, last) of vocabulary ids stored by a rank."""

    vocab_range_from_per_partition_vocab_size = staticmethod(
        arguments("per_partition_vocab_size>size rank -world_size")(lambda size, rank: (rank * size, (rank + 1) * size))
    )

    @staticmethod
    def vocab_range_from_global_vocab_size(global_vocab_size: int, rank: int, world_size: int) -> tuple[int, int]:
        size = divide(global_vocab_size, world_size, "vocabulary over ranks")
        return rank * size, (rank + 1) * size


_DEFAULTS = {"tensor_model_parallel": False, "partition_dim": -1, "partition_stride": 1}


def copy_tensor_model_parallel_attributes(destination_tensor: Tensor, source_tensor: Tensor) -> None:
    """Copy the attributes of a split tensor to another tensor."""
    vars(destination_tensor).update({name: value for name, value in vars(source_tensor).items() if name in _DEFAULTS})


def set_defaults_if_not_set_tensor_model_parallel_attributes(tensor: Tensor) -> None:
    """Mark a tensor as not split, unless it has the attributes already."""
    vars(tensor).update(_DEFAULTS | vars(tensor))


def param_is_not_tensor_parallel_duplicate(param: nn.Parameter, tp_group: Any = None) -> bool:
    """Return ``True`` on ranks that count a parameter in a norm: all ranks with a slice of it, else the first."""
    return bool(getattr(param, "tensor_model_parallel", False)) or group_rank(_group(tp_group)) == 0
