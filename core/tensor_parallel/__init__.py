"""Tensor and sequence parallelism: parallel layers, their collectives, the vocabulary-parallel loss and RNG streams."""

from core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
from core.tensor_parallel.data import broadcast_data
from core.tensor_parallel.initialization import draw_master, tensor_parallel_join, tensor_parallel_slice
from core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    linear_with_grad_accumulation_and_async_allreduce,
    padded_vocab_size,
    set_tensor_model_parallel_attributes,
)
from core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    gather_from_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
    scatter_to_sequence_parallel_region,
    scatter_to_tensor_model_parallel_region,
)
from core.tensor_parallel.random import (
    CudaRNGStatesTracker,
    RNGStatesTracker,
    checkpoint,
    get_cuda_rng_tracker,
    get_rng_tracker,
    model_parallel_cuda_manual_seed,
    model_parallel_manual_seed,
)

__all__ = [
    "ColumnParallelLinear",
    "CudaRNGStatesTracker",
    "RNGStatesTracker",
    "RowParallelLinear",
    "VocabParallelEmbedding",
    "broadcast_data",
    "checkpoint",
    "copy_to_tensor_model_parallel_region",
    "draw_master",
    "gather_from_sequence_parallel_region",
    "gather_from_tensor_model_parallel_region",
    "get_cuda_rng_tracker",
    "get_rng_tracker",
    "linear_with_grad_accumulation_and_async_allreduce",
    "model_parallel_cuda_manual_seed",
    "model_parallel_manual_seed",
    "padded_vocab_size",
    "reduce_from_tensor_model_parallel_region",
    "reduce_scatter_to_sequence_parallel_region",
    "scatter_to_sequence_parallel_region",
    "scatter_to_tensor_model_parallel_region",
    "set_tensor_model_parallel_attributes",
    "tensor_parallel_join",
    "tensor_parallel_slice",
    "vocab_parallel_cross_entropy",
]
