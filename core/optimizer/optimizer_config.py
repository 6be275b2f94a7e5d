"""OptimizerConfig: the algorithm that updates the parameters, and its options. Frozen."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

import torch

from core.number_ranges import BELOW_ONE, COUNT, NOT_NEGATIVE, POSITIVE, POSITIVE_OR_INFINITE, Range, check_ranges
from core.optimizer.algorithms.names import Algorithm, label

BACKENDS = ("auto", "fused", "foreach", "single")
MUON_SCALE_MODES = ("spectral", "shape_scaling", "unit_rms_norm", "none")
MUON_COEFFICIENTS = ("simple", "quintic", "polar_express")
MUON_TP_MODES = ("duplicated", "blockwise")
RANGES = {
    **dict.fromkeys(("lr", "min_lr", "decoupled_lr", "decoupled_min_lr", "weight_decay", "adam_eps"), NOT_NEGATIVE),
    **dict.fromkeys(("adam_beta1", "adam_beta2", "lion_beta1", "lion_beta2", "muon_momentum"), BELOW_ONE),
    **dict.fromkeys(("loss_scale", "initial_loss_scale", "min_loss_scale", "muon_extra_scale_factor"), POSITIVE),
    **dict.fromkeys(("loss_scale_window", "hysteresis", "muon_num_ns_steps"), COUNT),
    **dict.fromkeys(("grad_norm_type", "grad_norm_skip_threshold"), POSITIVE_OR_INFINITE),
    "sgd_momentum": BELOW_ONE,
    "clip_grad": Range(Real, 0, math.inf),  # inf, as 0, clips nothing
    "optimizer_offload_fraction": Range(Real, 0, 1),
}
MOMENT_DTYPES = (torch.float32, torch.bfloat16)
KEPT_DTYPES = {  # fp16 holds gradients, and parameters that are their own masters; moments in it would need a scale
    "main_grads_dtype": (*MOMENT_DTYPES, torch.float16),
    "main_params_dtype": (*MOMENT_DTYPES, torch.float16),
    "exp_avg_dtype": MOMENT_DTYPES,
    "exp_avg_sq_dtype": MOMENT_DTYPES,
}


@dataclass(frozen=True)
class OptimizerConfig:
    """Configures the optimizer, with the names and defaults of Megatron Core.

    The options that each algorithm reads are listed in docs/source/optimizer.md.

        OptimizerConfig(lr=3e-4, weight_decay=0.1, adam_beta2=0.95, clip_grad=1.0, bf16=True)

    Args:
        optimizer: 'adam', 'sgd', 'lion', 'muon' (with ``muon_scalar_optimizer`` for parameters that are not matrices),
            or a torch.optim class or its name.
        optimizer_kwargs: Arguments of a torch.optim class.
        optimizer_backend: Kernels of Adam and SGD: 'fused', 'foreach', 'single', or 'auto' for the first of them that
            torch supports.
        lr: Initial learning rate of each group. Required.
        min_lr: Learning rate at which a scheduler ends.
        decoupled_lr, decoupled_min_lr: The same for parameters that are tagged is_embedding_or_output_parameter.
        weight_decay: Weight decay. Biases and one-dimensional parameters do not decay by default.
        apply_wd_to_qk_layernorm: Let query and key norms decay, although they are vectors.
        decoupled_weight_decay: True for AdamW's decay of the weights themselves, False to add the decay to the
            gradient, as Adam does. SGD always adds it to the gradient.
        adam_beta1, adam_beta2: Coefficients of the running averages of gradients and squared gradients.
        adam_eps: Number added to the root of the squares.
        sgd_momentum: Fraction of the last update in the next one.
        lion_beta1, lion_beta2: Weights of the momentum in the update, and in the next momentum.
        muon_momentum: Coefficient of the running average of gradients.
        muon_nesterov: Add the gradient once more to the update.
        muon_split_qkv: Orthogonalize queries, keys and values of a fused weight separately.
        muon_scale_mode: Update factor computed from the matrix shape: 'spectral', 'shape_scaling', 'unit_rms_norm', or
            'none'.
        muon_extra_scale_factor: A further factor of the update.
        muon_coefficient_type, muon_num_ns_steps: Coefficients and number of the Newton-Schulz steps.
        muon_fp32_matmul_prec: torch's precision for fp32 matmuls within the step.
        muon_tp_mode: 'duplicated' gathers matrices that are split over tensor parallelism; 'blockwise' orthogonalizes
            each rank's part.
        muon_scalar_optimizer: 'adam' or 'lion', for parameters that are not matrices.
        fp16, bf16, params_dtype: Dtype of the model's parameters, which is checked. 16-bit parameters get fp32 master
            weights.
        overlap_param_gather_with_optimizer_step: For sharded optimizers, step bucket by bucket and gather a bucket's
            updated parameters while the next bucket is stepped. ``overlap_param_gather`` of the wrapper does the same.
        optimizer_cpu_offload: Store and step part of the state on the CPU, in complete buckets. No effect for a model
            on the CPU.
        optimizer_offload_fraction: Fraction of the state that ``optimizer_cpu_offload`` moves.
        overlap_cpu_optimizer_d2h_h2d: Copy gradients from the device while other buckets are stepped.
        pin_cpu_grads, pin_cpu_params: Store offloaded gradients and masters in pinned memory, which a device reads
            faster.
        loss_scale: A constant loss scale. None selects a dynamic one with ``fp16``, and no scale otherwise.
        initial_loss_scale, min_loss_scale, loss_scale_window, hysteresis: Options of DynamicLossScaler.
        clip_grad: Largest global gradient norm. 0 and math.inf disable clipping.
        grad_norm_type: Order p of the norm that is reported, clipped and compared with the threshold. math.inf uses the
            largest magnitude.
        grad_norm_skip_threshold: Skip a step whose global norm is above this value.
        log_num_zeros_in_grad: Count the zeros among all gradients.
        use_distributed_optimizer: None follows the wrapped model; a value must agree with it.
        use_precision_aware_optimizer: Store masters and moments in the dtypes below. Arithmetic stays in fp32.
        main_grads_dtype: Dtype of the wrapped model's gradients, which is checked. Only used with
            ``use_precision_aware_optimizer``.
        main_params_dtype: Dtype of the masters of 16-bit parameters: fp32, or the parameters' dtype for no masters.
        exp_avg_dtype, exp_avg_sq_dtype: Dtype of first moments (momentum) and second moments: fp32 or bf16.
        store_param_remainders: Store 16 more bits of a bf16 parameter, which restore its fp32 master, instead of a full
            copy.

    Raises:
        ValueError: If a number is out of its range, or options contradict each other.
    """

    optimizer: Algorithm = "adam"
    optimizer_kwargs: Mapping[str, Any] = field(default_factory=dict)
    optimizer_backend: str = "auto"
    lr: float | None = None
    min_lr: float | None = None
    decoupled_lr: float | None = None
    decoupled_min_lr: float | None = None
    apply_wd_to_qk_layernorm: bool = False
    weight_decay: float = 0.01
    decoupled_weight_decay: bool = True

    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    adam_eps: float = 1e-8
    sgd_momentum: float = 0.9
    lion_beta1: float = 0.95
    lion_beta2: float = 0.98

    muon_momentum: float = 0.95
    muon_nesterov: bool = False
    muon_split_qkv: bool = True
    muon_scale_mode: str = "spectral"
    muon_extra_scale_factor: float = 1.0
    muon_coefficient_type: str = "quintic"
    muon_num_ns_steps: int = 5
    muon_fp32_matmul_prec: str = "medium"
    muon_tp_mode: str = "duplicated"
    muon_scalar_optimizer: str = "adam"

    overlap_param_gather_with_optimizer_step: bool = False

    optimizer_cpu_offload: bool = False
    optimizer_offload_fraction: float = 0.0
    overlap_cpu_optimizer_d2h_h2d: bool = False
    pin_cpu_grads: bool = True
    pin_cpu_params: bool = True

    fp16: bool = False
    bf16: bool = False
    params_dtype: torch.dtype | None = None

    loss_scale: float | None = None
    initial_loss_scale: float = 2.0**32
    min_loss_scale: float = 1.0
    loss_scale_window: int = 1000
    hysteresis: int = 2

    clip_grad: float = 1.0
    grad_norm_type: float = 2.0
    grad_norm_skip_threshold: float = math.inf
    log_num_zeros_in_grad: bool = False
    use_distributed_optimizer: bool | None = None

    use_precision_aware_optimizer: bool = False
    main_grads_dtype: torch.dtype = torch.float32
    main_params_dtype: torch.dtype = torch.float32
    exp_avg_dtype: torch.dtype = torch.float32
    exp_avg_sq_dtype: torch.dtype = torch.float32
    store_param_remainders: bool = True

    def __post_init__(self) -> None:
        check_ranges(self, RANGES)
        self._check_algorithm()
        if self.fp16 and self.bf16:
            raise ValueError("fp16 and bf16 are both True; parameters have one dtype, set one of the two")
        if self.min_loss_scale > self.initial_loss_scale:
            raise ValueError(
                f"min_loss_scale is {self.min_loss_scale} and initial_loss_scale {self.initial_loss_scale}; the scale "
                "starts at the second and never falls below the first"
            )
        self._check_precision()

    def _check_algorithm(self) -> None:
        own = label(self.optimizer) in ("adam", "sgd", "lion", "muon")
        if own and self.optimizer_kwargs:
            raise ValueError(
                f"optimizer_kwargs {dict(self.optimizer_kwargs)} are for torch.optim classes; set the options of "
                f"{self.optimizer!r} as fields of OptimizerConfig"
            )
        choices = {
            "optimizer_backend": BACKENDS,
            "muon_scale_mode": MUON_SCALE_MODES,
            "muon_coefficient_type": MUON_COEFFICIENTS,
            "muon_tp_mode": MUON_TP_MODES,
            "muon_scalar_optimizer": ("adam", "lion"),
            "muon_fp32_matmul_prec": ("highest", "high", "medium"),
        }
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} is {getattr(self, name)!r}; it must be one of {', '.join(allowed)}")
        if self.optimizer_offload_fraction > 0 and not self.optimizer_cpu_offload:
            raise ValueError(
                f"optimizer_offload_fraction is {self.optimizer_offload_fraction} and optimizer_cpu_offload is False; "
                "set it to True, or the fraction to 0"
            )

    def _check_precision(self) -> None:
        for name, known in KEPT_DTYPES.items():
            dtype = getattr(self, name)
            if dtype not in known:
                raise ValueError(f"{name} is {dtype}; it must be one of {', '.join(map(str, known))}")
            if dtype != torch.float32 and not self.use_precision_aware_optimizer:
                raise ValueError(
                    f"{name} is {dtype} and use_precision_aware_optimizer is False, so it would not be used; set "
                    "use_precision_aware_optimizer=True as well"
                )
