"""LowLevelZeroPlugin: optimizer state (stage 1) and reduced gradients (stage 2) sharded over data-parallel ranks."""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from torch import nn

from core.booster.plugin.adapters_in_optimizer import add_adapters
from core.booster.plugin.zero_plugin_base import MEGA, SCALER, WIRE_DTYPES, ZeroPluginBase


class LowLevelZeroPlugin(ZeroPluginBase):
    """Plugin for ZeRO stages 1 and 2 (arXiv:1910.02054), with replicated parameters and sharded optimizer state.

    Use it if the model fits on each rank but its optimizer state does not. Experts (parameters with allreduce = False)
    are reduced over the expert data group of ``core.parallel_state.initialize_model_parallel``, if that was called.

        booster = Booster(plugin=LowLevelZeroPlugin(stage=2, precision="bf16", max_norm=1.0))

    Args:
        stage: 1 shards masters and moments; 2 shards reduced gradients as well.
        precision: 'fp16', 'bf16', or 'fp32', which does not change the parameters' dtype.
        initial_scale, min_scale, growth_factor, backoff_factor, growth_interval, hysteresis, max_scale: Options of
            DynamicLossScaler, used with fp16 only.
        max_norm: Limit of the global gradient norm, applied inside ``step``. 0 disables clipping.
        norm_type: Order p of the norm.
        reduce_bucket_size_in_m: Gradient bucket size, in 1024 * 1024 elements.
        communication_dtype: Dtype of gradients in collectives. Defaults to the parameters' dtype.
        overlap_communication: Reduce buckets during backward.
        overlap_allgather: Step bucket by bucket, and gather a bucket's parameters while the next bucket is stepped.
        cpu_offload: Keep and step masters and moments on the CPU.
        master_weights: False to keep no fp32 copy of 16-bit parameters.
        verbose: Log how the model is wrapped.
        cast_inputs: Cast floating-point inputs to ``precision``.
        fp8_communication: Send gradients in 8 bits, with one scale per 256 elements.
        use_fp8: Multiply in 8 bits in linear layers, with 'bf16', on machines that support it.
        extra_dp_size: Number of replicas of the shards. An update gathers only within the world / extra_dp_size
            neighboring ranks of a replica.
        reduce_microbatches: Used with stage 2 and ``no_sync``: 'last' keeps unreduced gradients until the last
            microbatch, 'every' reduces each one, which needs less memory and more traffic.
        broadcast_buffers: Broadcast rank 0's buffers, such as BatchNorm statistics, to all ranks before forwards, for
            models that save any.

    Raises:
        ValueError: If an option is out of range, or options cannot be combined.
        RuntimeError: If torch.distributed is not initialized, or this machine cannot run ``use_fp8``.
    """

    def __init__(
        self,
        stage: int = 1,
        precision: str = "fp16",
        initial_scale: float = 2**32,
        min_scale: float = 1,
        growth_factor: float = 2,
        backoff_factor: float = 0.5,
        growth_interval: int = 1000,
        hysteresis: int = 2,
        max_scale: float = 2**32,
        max_norm: float = 0.0,
        norm_type: float = 2.0,
        reduce_bucket_size_in_m: float = 12,
        communication_dtype: torch.dtype | None = None,
        overlap_communication: bool = True,
        overlap_allgather: bool = False,
        cpu_offload: bool = False,
        master_weights: bool = True,
        verbose: bool = False,
        cast_inputs: bool = True,
        fp8_communication: bool = False,
        use_fp8: bool = False,
        extra_dp_size: int = 1,
        *,
        reduce_microbatches: Literal["last", "every"] = "last",
        broadcast_buffers: bool = True,
    ) -> None:
        given = locals()
        if stage not in (1, 2):
            raise ValueError(
                f"LowLevelZeroPlugin only supports stage 1/2 training, and stage is {stage!r}; for stage 3 use "
                "TorchFSDPPlugin or GeminiPlugin"
            )
        super().__init__(
            precision,
            {name: given[name] for name in SCALER},
            max_norm=max_norm,
            norm_type=norm_type,
            master_weights=master_weights,
            verbose=verbose,
            cast_inputs=cast_inputs,
            fp8_communication=fp8_communication,
            use_fp8=use_fp8,
            extra_dp_size=extra_dp_size,
        )
        self._check_numbers({"reduce_bucket_size_in_m": reduce_bucket_size_in_m})
        if not 0 < reduce_bucket_size_in_m < math.inf:
            raise ValueError(f"reduce_bucket_size_in_m is {reduce_bucket_size_in_m}; a bucket needs a positive size")
        if communication_dtype is not None and communication_dtype not in WIRE_DTYPES:
            raise ValueError(f"communication_dtype is {communication_dtype}; expected None or one of {WIRE_DTYPES}")
        if fp8_communication and communication_dtype is not None:
            raise ValueError(
                f"fp8_communication and communication_dtype={communication_dtype} both set the dtype of communication; "
                "pass one of them"
            )
        if reduce_microbatches not in ("last", "every"):
            raise ValueError(f"reduce_microbatches {reduce_microbatches!r} is none of last, every")
        if reduce_microbatches == "every" and stage == 1:
            raise ValueError("reduce_microbatches='every' adds to shards of gradients, which only stage=2 has")
        if cpu_offload and not master_weights and precision != "fp32":
            raise ValueError(
                f"cpu_offload keeps fp32 master weights on the CPU, but {precision} training with master_weights=False "
                "has no master weights; set master_weights=True"
            )
        self.stage = stage
        self.broadcast_buffers = broadcast_buffers
        self._set_configs(
            cpu_offload=cpu_offload,
            communication_dtype=communication_dtype,
            overlap_grad_reduce=overlap_communication,
            overlap_param_gather=overlap_allgather,
            bucket_size=max(1, int(reduce_bucket_size_in_m * MEGA)),
            data_parallel_sharding_strategy="optim" if stage == 1 else "optim_grads",
            reduce_microbatches=reduce_microbatches,
        )

    def add_lora_params_to_optimizer(self, model: nn.Module, optimizer: Any) -> None:
        """Add a peft model's adapters that the optimizer lacks, each to the group of the weight that it adapts.

        ``boost`` does this as well. An adapter whose weight is not in the optimizer is left out, with a warning.

        Args:
            model (Module): The peft model.
            optimizer (Optimizer): The torch optimizer, changed in place.
        """
        add_adapters(model, optimizer)

    @property
    def _title(self) -> str:
        return f"LowLevelZeroPlugin, stage {self.stage}"
