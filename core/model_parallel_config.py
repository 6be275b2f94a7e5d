"""What layers and the gradient path read of a model's configuration."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from core.number_ranges import COUNT, NOT_NEGATIVE, check_ranges

RANGES = {
    **dict.fromkeys(("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"), COUNT),
    **dict.fromkeys(("virtual_pipeline_model_parallel_size", "expert_model_parallel_size"), COUNT),
    "expert_tensor_parallel_size": COUNT,
    "moe_router_bias_update_rate": NOT_NEGATIVE,
}


@dataclass
class ModelParallelConfig:
    """Parallel sizes, dtypes and callbacks of a model; a model's own config extends it.

    Not frozen, because users set the callbacks once optimizer and wrapper exist; nothing in `core` writes to it.

    Parameters are made in params_dtype; fp16 and bf16 must agree with it. use_cpu_initialization and has_cond_embedder
    are Megatron's names for what happens in any case, and may only be False.

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
            if getattr(self, name) and self.params_dtype != dtype:
                raise ValueError(
                    f"{name}=True with params_dtype={self.params_dtype}: parameters are made in params_dtype; set "
                    f"params_dtype={dtype}, or leave {name} out."
                )
        if self.use_cpu_initialization:
            raise ValueError(
                "use_cpu_initialization=True changes nothing: weights are always drawn whole, in fp32 on the CPU, and "
                "each rank keeps its slice; leave it out."
            )
        if self.has_cond_embedder:
            raise ValueError(
                "has_cond_embedder=True changes nothing: set `param.pipeline_parallel = True` on the embedder's "
                "parameters before they are wrapped, which has their gradients summed over the stages; leave it out."
            )
        if self.moe_router_enable_expert_bias and not self.moe_router_bias_update_rate > 0:
            raise ValueError(
                f"moe_router_bias_update_rate must be above 0 with moe_router_enable_expert_bias=True, got "
                f"{self.moe_router_bias_update_rate}."
            )
