"""Optimizers with ColossalAI's names, over torch's."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from core_compat.arguments import arguments

_ADVICE = {
    "bias_correction": "torch's kernel always corrects the bias of the moments; warm the learning rate up instead",
    "nvme_offload_fraction": "moments are kept on no disk; LowLevelZeroPlugin(cpu_offload=True) keeps them on the host",
    "wd_after_momentum": "torch's SGD decays before momentum; give weight_decay=0, and decay the weights yourself",
}
_ADAM = "lr=1e-3 !bias_correction=True betas=(0.9,0.999) eps=1e-8"


class FusedAdam(torch.optim.Adam):
    """Adam, or by default AdamW, because ``adamw_mode`` decouples the weight decay.

    With ``set_grad_none``, as in torch, ``zero_grad`` sets gradients to ``None``. Raises ValueError if bias correction
    is off.
    """

    @arguments(f"self params {_ADAM} adamw_mode=True weight_decay=0.0 amsgrad=False set_grad_none=True", _ADVICE)
    def __init__(self, params: Any, adamw_mode: bool, set_grad_none: bool, **options: Any) -> None:
        self.set_grad_none = set_grad_none
        super().__init__(params, decoupled_weight_decay=adamw_mode, **options)
        _use_fused_kernel(self)

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        super().zero_grad(self.set_grad_none if set_to_none is None else set_to_none)


class CPUAdam(FusedAdam):
    """Adam on the parameters' device. Moments on disk (nvme_offload_fraction above 0) are rejected."""

    @arguments(
        f"self model_params>params {_ADAM} weight_decay=0 adamw_mode=True !nvme_offload_fraction=0.0 "
        "-nvme_offload_dir=None",
        _ADVICE,
    )
    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, **options)


class HybridAdam(CPUAdam):
    """CPUAdam. With LowLevelZeroPlugin(cpu_offload=True) part of the state is on the host."""


class FusedSGD(torch.optim.SGD):
    """SGD. ``wd_after_momentum=True`` is rejected, because torch's kernel decays weights before momentum."""

    @arguments("self params lr momentum=0 dampening=0 weight_decay=0 nesterov=False !wd_after_momentum=False", _ADVICE)
    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, **options)
        _use_fused_kernel(self)


def _use_fused_kernel(optimizer: torch.optim.Optimizer) -> None:
    """Enable torch's fused kernel in the param groups if it supports the parameters' device."""
    for group in optimizer.param_groups:
        params: list[Tensor] = group["params"]
        if all(param.device.type in ("cpu", "cuda") and param.is_floating_point() for param in params):
            group.update(fused=True, foreach=False)
