"""KernelAdam: Adam by a `multi_tensor_adam` kernel, which TransformerEngine and apex both have under that name.

Their own optimizer classes keep one step count a param group. Here every run has its own, as in torch, because runs
may be frozen and thawed apart from each other, and because checkpoints hold it by parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

# (chunk size, overflow flag, [gradients, parameters, first moments, second moments], lr, beta1, beta2, eps, step,
#  1 for decoupled weight decay, 1 for bias correction, weight decay)
MultiTensorAdam = Callable[..., None]

CHUNK_ELEMENTS = 2048 * 32  # what one block of threads takes; the value both packages' optimizers pass


class KernelAdam(torch.optim.Optimizer):
    """Adam and AdamW with torch's state and formulas; the arithmetic is the kernel's."""

    state_keys = ("step", "exp_avg", "exp_avg_sq")

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        *,
        kernel: MultiTensorAdam,
        betas: tuple[float, float],
        eps: float,
        decoupled_weight_decay: bool,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self.kernel = kernel
        self.decoupled_weight_decay = decoupled_weight_decay
        self._no_overflow: dict[torch.device, torch.Tensor] = {}

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update every parameter that has a gradient; one kernel call a group, device and step count."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            together: dict[tuple[torch.device, torch.dtype, int], list[torch.Tensor]] = {}
            for param in group["params"]:
                if param.grad is not None:
                    state = self.state[param]
                    if "step" not in state:
                        state["step"] = torch.zeros((), dtype=torch.float32)
                        state["exp_avg"] = torch.zeros_like(param)
                        state["exp_avg_sq"] = torch.zeros_like(param)
                    state["step"] += 1
                    key = param.device, param.grad.dtype, int(state["step"])
                    together.setdefault(key, []).append(param)
            for (device, _, count), params in together.items():
                self._call(group, device, count, params)
        return loss

    def _call(self, group: dict[str, Any], device: torch.device, count: int, params: list[torch.Tensor]) -> None:
        flag = self._no_overflow.get(device)
        if flag is None:
            flag = self._no_overflow[device] = torch.zeros(1, dtype=torch.int32, device=device)
        states = [self.state[param] for param in params]
        self.kernel(
            CHUNK_ELEMENTS,
            flag,
            [
                [param.grad for param in params],
                [param.detach() for param in params],
                [state["exp_avg"] for state in states],
                [state["exp_avg_sq"] for state in states],
            ],
            group["lr"],
            *group["betas"],
            group["eps"],
            count,
            int(self.decoupled_weight_decay),
            1,
            group["weight_decay"],
        )
