"""Fields of a model's configuration that layers and the gradient path read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from core.number_ranges import COUNT, NOT_NEGATIVE, check_ranges
from core.watch.warn_user import warn_user

RANGES = {
    **dict.fromkeys(("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"), COUNT),
    **dict.fromkeys(("virtual_pipeline_model_parallel_size", "expert_model_parallel_size"), COUNT),
    "expert_tensor_parallel_size": COUNT,
    "moe_router_bias_update_rate": NOT_NEGATIVE,
}


# Not frozen: users set the callbacks once optimizer and wrapper exist. Nothing in `core` writes to it.
@dataclass
class ModelParallelConfig:
    """Parallel sizes, dtypes and callbacks of a model; a model's own config extends it.

    tensor_model_parallel_size: ranks that share each layer.
    pipeline_model_parallel_size: stages of consecutive layers.
    virtual_pipeline_model_parallel_size: stages that one rank holds, of an interleaved pipeline.
    context_parallel_size: ranks that share each sequence.
    expert_model_parallel_size: ranks that share the experts of a layer.
    expert_tensor_parallel_size: ranks that share one expert; None for tensor_model_parallel_size.
    sequence_parallel: between split matrices, each tensor-parallel rank keeps its part of the sequence.
    params_dtype: of the parameters.
    fp16, bf16: other words for params_dtype; one of them with fp32 there is a warning, with other 16 bits rejected.
    perform_initialization: draw initial weights; False leaves what memory holds.
    use_cpu_initialization, has_cond_embedder: Megatron's names for what happens in any case; a warning where True.
    gradient_accumulation_fusion: split layers add weight gradients straight to the buffer.
    calculate_per_token_loss: a loss is a sum over tokens, and gradients are divided by the tokens of all ranks.
    deterministic_mode: as the wrapper's deterministic_reduction.
    qk_layernorm: normalize queries and keys of each head.
    moe_router_enable_expert_bias: balance experts by a bias in the choice, without a loss.
    moe_router_bias_update_rate: how far that bias moves in a step.
    timers: an object with the calls of Megatron's `Timers`; finalize_model_grads starts and stops timers of it.
    barrier_with_L1_time: those timers wait for all ranks first.
    no_sync_func: a context in which a backward reduces nothing; a list has one for each chunk.
    grad_sync_func, param_sync_func: called by a schedule when a chunk's gradients, or parameters, may travel.
    finalize_model_grads_func: called at the end of a schedule instead of finalize_model_grads.
    grad_scale_func: called by a schedule with each loss, and answers the loss to call backward on.

    Raises ValueError where fields contradict each other, naming both.
    """

    tensor_model_parallel_size: int = 1
    pipeline_model_parallel_size: int = 1
    virtual_pipeline_model_parallel_size: int | None = None
    context_parallel_size: int = 1
    expert_model_parallel_size: int = 1
    expert_tensor_parallel_size: int | None = None  # tensor_model_parallel_size where None
    sequence_parallel: bool = False

    params_dtype: torch.dtype = torch.float32
    fp16: bool = False
    bf16: bool = False
    perform_initialization: bool = True
    use_cpu_initialization: bool = False

    gradient_accumulation_fusion: bool = False
    calculate_per_token_loss: bool = False
    deterministic_mode: bool = False

    qk_layernorm: bool = False
    has_cond_embedder: bool = False
    moe_router_enable_expert_bias: bool = False
    moe_router_bias_update_rate: float = 1e-3

    timers: Any | None = None
    barrier_with_L1_time: bool = False

    no_sync_func: Callable[..., Any] | None = None
    grad_sync_func: Callable[..., Any] | None = None
    param_sync_func: Callable[..., Any] | None = None
    finalize_model_grads_func: Callable[..., Any] | None = None
    grad_scale_func: Callable[..., Any] | None = None

    def __post_init__(self) -> None:
        check_ranges(self, RANGES)
        if self.sequence_parallel and self.tensor_model_parallel_size == 1:
            raise ValueError(
                "sequence_parallel=True with tensor_model_parallel_size=1: the sequence is split over the tensor "
                "parallel ranks, so there must be at least 2; set sequence_parallel=False or a larger size."
            )
        if self.virtual_pipeline_model_parallel_size is not None and self.pipeline_model_parallel_size == 1:
            raise ValueError(
                f"virtual_pipeline_model_parallel_size={self.virtual_pipeline_model_parallel_size} with "
                f"pipeline_model_parallel_size=1: pipeline-model-parallel size should be greater than 1 with "
                f"interleaved schedule."
            )
        if self.fp16 and self.bf16:
            raise ValueError("fp16=True and bf16=True; choose one of them.")
        for name, dtype in (("fp16", torch.float16), ("bf16", torch.bfloat16)):
            if not getattr(self, name) or self.params_dtype == dtype:
                continue
            made = f"parameters are made in params_dtype={self.params_dtype}; set params_dtype={dtype}"
            if self.params_dtype != torch.float32:
                raise ValueError(f"{name}=True contradicts params_dtype: {made}, or leave {name} out.")
            _warn(name, f"{made}, or convert the model")
        if self.use_cpu_initialization:
            _warn("use_cpu_initialization", "weights are drawn whole in any case, in fp32 on the CPU")
        if self.has_cond_embedder:
            _warn("has_cond_embedder", "gradients of parameters with `param.pipeline_parallel = True` are summed over "
                  "the stages in any case")  # fmt: skip
        if self.moe_router_enable_expert_bias and not self.moe_router_bias_update_rate > 0:
            raise ValueError(
                f"moe_router_bias_update_rate must be above 0 with moe_router_enable_expert_bias=True, got "
                f"{self.moe_router_bias_update_rate}."
            )


def _warn(name: str, why: str) -> None:
    warn_user(f"{name}=True changes nothing here: {why}")
