"""Split layers, random streams and the split loss with Megatron's arguments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from core import agree
from core import tensor_parallel as ours
from core.moe.exchange import all_to_all_rows
from core.tensor_parallel import mappings
from core.tensor_parallel.mappings import divide, group_rank, group_size, resolve_groups
from core.tensor_parallel.random import DATA_PARALLEL_STREAM, EXPERT_PARALLEL_STREAM, RNGState


def _refuse(where: str, arguments: Mapping[str, Any]) -> None:
    """ValueError for an argument that is set: it is None, False, 0 or 1 where it is left out."""
    for name, value in arguments.items():
        if value is not None and value is not False and value not in (0, 1):
            raise ValueError(f"{where}({name}={value!r}) is not supported; leave it out")
        if value is True:
            raise ValueError(f"{where}({name}=True) is not supported; leave it out")


class ColumnParallelLinear(ours.ColumnParallelLinear):
    """core.tensor_parallel.ColumnParallelLinear, which says what its arguments do.

    tp_comm_buffer_name: names a buffer of TransformerEngine and has no part. is_expert: must be False, core.moe has
    experts. keep_master_weight_for_test, embedding_activation_buffer, grad_output_buffer, disable_grad_reduce,
    output_dtype: must be left out.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        config: Any,
        init_method: Any,
        bias: bool = True,
        gather_output: bool = False,
        stride: int = 1,
        keep_master_weight_for_test: bool = False,
        skip_bias_add: bool = False,
        skip_weight_param_allocation: bool = False,
        embedding_activation_buffer: list[Tensor] | None = None,
        grad_output_buffer: list[Tensor] | None = None,
        is_expert: bool = False,
        tp_comm_buffer_name: str | None = None,
        disable_grad_reduce: bool = False,
        output_dtype: torch.dtype | None = None,
        tp_group: dist.ProcessGroup | None = None,
        name: str | None = None,
    ) -> None:
        refused: dict[str, Any] = {"keep_master_weight_for_test": keep_master_weight_for_test, "is_expert": is_expert}
        refused |= {"disable_grad_reduce": disable_grad_reduce, "output_dtype": output_dtype}
        refused |= {
            "grad_output_buffer": grad_output_buffer,
            "embedding_activation_buffer": embedding_activation_buffer,
        }
        _refuse("ColumnParallelLinear", refused)
        super().__init__(
            input_size,
            output_size,
            config=config,
            init_method=init_method,
            bias=bias,
            gather_output=gather_output,
            stride=stride,
            skip_bias_add=skip_bias_add,
            skip_weight_param_allocation=skip_weight_param_allocation,
            tp_group=tp_group,
            name=name,
        )

    def forward(
        self, input_: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """(output, bias if it was not added). runtime_gather_output: in place of the constructor's gather_output."""
        output, bias = super().forward(input_, weight)
        gathers = self.gather_output if runtime_gather_output is None else runtime_gather_output
        if gathers is self.gather_output or self.tp_size == 1:
            return output, bias
        if not gathers:
            return mappings.scatter_to_tensor_model_parallel_region(output, self.tp_group), bias
        return mappings.gather_from_tensor_model_parallel_region(output, self.tp_group), bias


class RowParallelLinear(ours.RowParallelLinear):
    """core.tensor_parallel.RowParallelLinear; the further arguments as in ColumnParallelLinear."""

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        config: Any,
        init_method: Any,
        bias: bool = True,
        input_is_parallel: bool = True,
        skip_bias_add: bool = False,
        stride: int = 1,
        keep_master_weight_for_test: bool = False,
        is_expert: bool = False,
        tp_comm_buffer_name: str | None = None,
        tp_group: dist.ProcessGroup | None = None,
        name: str | None = None,
    ) -> None:
        refused = {"keep_master_weight_for_test": keep_master_weight_for_test, "is_expert": is_expert}
        _refuse("RowParallelLinear", refused)
        super().__init__(
            input_size,
            output_size,
            config=config,
            init_method=init_method,
            bias=bias,
            input_is_parallel=input_is_parallel,
            skip_bias_add=skip_bias_add,
            stride=stride,
            tp_group=tp_group,
            name=name,
        )


def linear_with_grad_accumulation_and_async_allreduce(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    gradient_accumulation_fusion: bool,
    allreduce_dgrad: bool,
    sequence_parallel: bool,
    grad_output_buffer: list[Tensor] | None = None,
    wgrad_deferral_limit: int | None = 0,
    tp_group: dist.ProcessGroup | None = None,
    gtp_remat_size: int = 1,
    output_dtype: torch.dtype | None = None,
) -> Tensor:
    """core.tensor_parallel's; grad_output_buffer, wgrad_deferral_limit, gtp_remat_size, output_dtype are refused."""
    refused = {"grad_output_buffer": grad_output_buffer, "wgrad_deferral_limit": wgrad_deferral_limit}
    _refuse("linear_with_grad...", {**refused, "gtp_remat_size": gtp_remat_size, "output_dtype": output_dtype})
    return ours.linear_with_grad_accumulation_and_async_allreduce(
        input,
        weight,
        bias,
        gradient_accumulation_fusion=gradient_accumulation_fusion,
        allreduce_dgrad=allreduce_dgrad,
        sequence_parallel=sequence_parallel,
        tp_group=resolve_groups(None).tp if tp_group is None else tp_group,
    )


def vocab_parallel_cross_entropy(
    vocab_parallel_logits: Tensor,
    target: Tensor,
    label_smoothing: float = 0.0,
    tp_group: dist.ProcessGroup | None = None,
) -> Tensor:
    """core.tensor_parallel's, for a vocabulary of equal parts without padding, as Megatron reads the logits.

    Logits that were gathered cannot be told from a rank's part: pass vocab_size to ours, which finds them out.
    """
    group = resolve_groups(None).tp if tp_group is None else tp_group
    size = vocab_parallel_logits.shape[-1] * group_size(group)
    return ours.vocab_parallel_cross_entropy(vocab_parallel_logits, target, label_smoothing, group, vocab_size=size)


# -- mappings --------------------------------------------------------------------------------------------------------


def gather_from_sequence_parallel_region(
    input_: Tensor,
    tensor_parallel_output_grad: bool = True,
    group: dist.ProcessGroup | None = None,
    output_split_sizes: Sequence[int] | None = None,
    use_global_buffer: bool = False,
) -> Tensor:
    """core.tensor_parallel's; rows of unequal number and a global buffer are refused."""
    refused = {"output_split_sizes": output_split_sizes, "use_global_buffer": use_global_buffer}
    _refuse("gather_from_sequence_parallel_region", refused)
    return ours.gather_from_sequence_parallel_region(input_, tensor_parallel_output_grad, group)


def reduce_scatter_to_sequence_parallel_region(
    input_: Tensor,
    group: dist.ProcessGroup | None = None,
    input_split_sizes: Sequence[int] | None = None,
    use_global_buffer: bool = False,
) -> Tensor:
    """core.tensor_parallel's; rows of unequal number and a global buffer are refused."""
    refused = {"input_split_sizes": input_split_sizes, "use_global_buffer": use_global_buffer}
    _refuse("reduce_scatter_to_sequence_parallel_region", refused)
    return ours.reduce_scatter_to_sequence_parallel_region(input_, group)


def all_to_all(
    group: dist.ProcessGroup,
    input_: Tensor,
    output_split_sizes_: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    use_nccl_stream: bool = False,
) -> Tensor:
    """Rows to every rank of a group and from it; equal parts where no sizes are given. Differentiable. Collective."""
    _refuse("all_to_all", {"use_nccl_stream": use_nccl_stream})
    size = group_size(group)
    even = [divide(input_.shape[0], size, "rows of all_to_all over the group")] * size if not input_split_sizes else []
    return all_to_all_rows(input_, input_split_sizes or even, output_split_sizes_ or even, group)


def all_gather_last_dim_from_tensor_parallel_region(input_: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """[..., n] of every rank as [..., n * size]; in backward the gradients of the ranks' uses add up."""
    first = input_.movedim(-1, 0).contiguous()
    return ours.gather_from_sequence_parallel_region(first, True, group).movedim(0, -1).contiguous()


def reduce_scatter_last_dim_to_tensor_parallel_region(input_: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """This rank's [..., n] of the sum of [..., n * size]."""
    first = input_.movedim(-1, 0).contiguous()
    return ours.reduce_scatter_to_sequence_parallel_region(first, group).movedim(0, -1).contiguous()


# -- random streams --------------------------------------------------------------------------------------------------


class _Places:
    """This rank's places, where a program says them itself."""

    def __init__(self, **ranks: int | None) -> None:
        self.ranks = ranks

    def rank(self, name: str) -> int:
        """The place that was said, or that of the groups."""
        said = self.ranks.get(name)
        return resolve_groups(None).rank(name) if said is None else said


def model_parallel_cuda_manual_seed(
    seed: int,
    te_rng_tracker: bool = False,
    inference_rng_tracker: bool = False,
    use_cudagraphable_rng: bool = False,
    tp_rank: int | None = None,
    ep_rank: int | None = None,
    etp_rank: int | None = None,
    force_reset_rng: bool = False,
    **more: Any,
) -> None:
    """core.tensor_parallel.model_parallel_manual_seed; the streams begin anew in any case."""
    refused = {"te_rng_tracker": te_rng_tracker, "inference_rng_tracker": inference_rng_tracker}
    _refuse("model_parallel_cuda_manual_seed", {**refused, "use_cudagraphable_rng": use_cudagraphable_rng, **more})
    places: Any = _Places(tp=tp_rank, ep=ep_rank, expt_tp=etp_rank)
    ours.model_parallel_manual_seed(seed, places)


def get_cuda_rng_tracker(
    use_te_rng_tracker: bool = False, inference_rng_tracker: bool = False, use_cudagraphable_rng: bool = False
) -> ours.RNGStatesTracker:
    """The random streams of this process."""
    refused = {"use_te_rng_tracker": use_te_rng_tracker, "inference_rng_tracker": inference_rng_tracker}
    _refuse("get_cuda_rng_tracker", {**refused, "use_cudagraphable_rng": use_cudagraphable_rng})
    return ours.get_rng_tracker()


def initialize_rng_tracker(
    use_te_rng_tracker: bool = False,
    inference_rng_tracker: bool = False,
    use_cudagraphable_rng: bool = False,
    force_reset: bool = False,
) -> None:
    """Forget all streams with force_reset; there is one tracker from the start."""
    tracker = get_cuda_rng_tracker(use_te_rng_tracker, inference_rng_tracker, use_cudagraphable_rng)
    if force_reset:
        tracker.reset()


def get_all_rng_states() -> dict[str, RNGState]:
    """Where every stream stands."""
    return ours.get_rng_tracker().get_states()


def get_expert_parallel_rng_tracker_name() -> str:
    """The stream of experts."""
    return EXPERT_PARALLEL_STREAM


def get_data_parallel_rng_tracker_name() -> str:
    """The stream that all ranks share."""
    return DATA_PARALLEL_STREAM


# -- tensors and vocabularies ----------------------------------------------------------------------------------------


def split_tensor_along_last_dim(
    tensor: Tensor, num_partitions: int, contiguous_split_chunks: bool = False
) -> tuple[Tensor, ...]:
    """Equal parts of the last dimension."""
    size = divide(tensor.shape[-1], num_partitions, "last dimension over num_partitions")
    parts = tensor.split(size, dim=-1)
    return tuple(part.contiguous() for part in parts) if contiguous_split_chunks else parts


def split_tensor_into_1d_equal_chunks(
    tensor: Tensor, new_buffer: bool = False, tp_group: dist.ProcessGroup | None = None
) -> Tensor:
    """This rank's part of the flattened tensor; a copy with new_buffer."""
    group = resolve_groups(None).tp if tp_group is None else tp_group
    part = tensor.view(-1).chunk(group_size(group))[group_rank(group)]
    return part.clone() if new_buffer else part


def gather_split_1d_tensor(tensor: Tensor, tp_group: dist.ProcessGroup | None = None) -> Tensor:
    """The parts of all ranks of a group, one after the other."""
    group = resolve_groups(None).tp if tp_group is None else tp_group
    return tensor if group_size(group) == 1 else mappings.gather_first(tensor, group)


class VocabUtility:
    """Which ids of a vocabulary a rank holds: [first, last)."""

    @staticmethod
    def vocab_range_from_per_partition_vocab_size(
        per_partition_vocab_size: int, rank: int, world_size: int
    ) -> tuple[int, int]:
        """Of equal parts of a known size."""
        return rank * per_partition_vocab_size, (rank + 1) * per_partition_vocab_size

    @staticmethod
    def vocab_range_from_global_vocab_size(global_vocab_size: int, rank: int, world_size: int) -> tuple[int, int]:
        """Of a vocabulary that divides. ValueError for another."""
        size = divide(global_vocab_size, world_size, "vocabulary over ranks")
        return rank * size, (rank + 1) * size


def broadcast_data(
    keys: Sequence[str], data: Mapping[str, Tensor] | None, datatype: torch.dtype, tp_group: Any = None
) -> dict[str, Tensor]:
    """The first rank's tensors on every rank of a tensor-parallel group. Collective over it.

    data: read on the first rank alone. ValueError, on all ranks, for a tensor of another dtype.
    """
    group = resolve_groups(None).tp if tp_group is None else tp_group
    given: Any = data if group_rank(group) == 0 else None
    table = None if given is None else {key: (tuple(given[key].shape), given[key].dtype) for key in keys}
    tables = agree.gather(table, [] if group is None else [group], "broadcast_data")
    known = next(found for found in tables.values() if found is not None)
    odd = {key: dtype for key, (_, dtype) in known.items() if dtype != datatype}
    if odd:
        raise ValueError(f"broadcast_data: {odd} where datatype is {datatype}; cast them, or broadcast them apart")
    on_gpu = group is not None and "nccl" in dist.get_backend_config(group)
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    sent = {
        key: torch.empty(shape, dtype=datatype, device=device) if given is None else given[key].to(device).contiguous()
        for key, (shape, _) in known.items()
    }
    for tensor in sent.values() if group is not None and group_size(group) > 1 else ():
        dist.broadcast(tensor, dist.get_process_group_ranks(group)[0], group=group)
    return sent


def copy_tensor_model_parallel_attributes(destination_tensor: Tensor, source_tensor: Tensor) -> None:
    """Say of a tensor that it is split as another one."""
    for name in ("tensor_model_parallel", "partition_dim", "partition_stride"):
        if hasattr(source_tensor, name):
            setattr(destination_tensor, name, getattr(source_tensor, name))


def set_defaults_if_not_set_tensor_model_parallel_attributes(tensor: Tensor) -> None:
    """Say of a tensor that it is not split, unless something is said already."""
    for name, value in {"tensor_model_parallel": False, "partition_dim": -1, "partition_stride": 1}.items():
        if not hasattr(tensor, name):
            setattr(tensor, name, value)


def param_is_not_tensor_parallel_duplicate(param: nn.Parameter, tp_group: Any = None) -> bool:
    """True on the ranks that count a parameter in a norm: all that hold a slice of it, or the first."""
    group = resolve_groups(None).tp if tp_group is None else tp_group
    return bool(getattr(param, "tensor_model_parallel", False)) or group_rank(group) == 0
