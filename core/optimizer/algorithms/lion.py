"""Lion: the sign of an interpolated momentum, with decoupled weight decay."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch


class Lion(torch.optim.Optimizer):
    """Lion, algorithm 2 of Chen et al., Symbolic Discovery of Optimization Algorithms (arXiv:2302.06675).

        update = sign(beta1 * m + (1 - beta1) * g)
        p = p - lr * (update + weight_decay * p)
        m = beta2 * m + (1 - beta2) * g

    The update is elementwise, so it may step any flat part of a parameter. The state 'exp_avg' is m in the parameter's
    dtype. Raises ValueError if a beta is outside [0, 1).
    """

    state_keys = ("exp_avg",)

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.95, 0.98),
        weight_decay: float = 0.0,
    ) -> None:
        if not (0 <= betas[0] < 1 and 0 <= betas[1] < 1):
            raise ValueError(f"betas are {betas}; both must be in [0, 1)")
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if "exp_avg" not in state:
                    state["exp_avg"] = torch.zeros_like(param, memory_format=torch.preserve_format)
                if group["weight_decay"] != 0:
                    param.mul_(1 - group["lr"] * group["weight_decay"])
                update = state["exp_avg"].lerp(param.grad, 1 - beta1).sign_()
                param.add_(update, alpha=-group["lr"])
                state["exp_avg"].lerp_(param.grad, 1 - beta2)
        return loss
