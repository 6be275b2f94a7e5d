"""Lion: sign of an interpolated momentum, with decoupled weight decay."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

# One update is held for this many elements at a time: enough for a kernel, little beside the state.
BATCH_ELEMENTS = 1 << 24


class Lion(torch.optim.Optimizer):
    """Algorithm 2 of Chen et al., Symbolic Discovery of Optimization Algorithms (arXiv:2302.06675).

        update = sign(beta1 * m + (1 - beta1) * g)
        p = p - lr * (update + weight_decay * p)
        m = beta2 * m + (1 - beta2) * g

    Element by element, so it may see any flat part of a parameter. State: 'exp_avg', m in the parameter's dtype.
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
        """Update every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for params in batches(param for param in group["params"] if param.grad is not None):
                self._update(params, group)
        return loss

    def _update(self, params: list[torch.Tensor], group: dict[str, Any]) -> None:
        beta1, beta2 = group["betas"]
        grads = [param.grad for param in params]
        momenta = []
        for param in params:
            state = self.state[param]
            if "exp_avg" not in state:
                state["exp_avg"] = torch.zeros_like(param, memory_format=torch.preserve_format)
            momenta.append(state["exp_avg"])
        if group["weight_decay"] != 0:
            torch._foreach_mul_(params, 1 - group["lr"] * group["weight_decay"])
        updates = torch._foreach_lerp(momenta, grads, 1 - beta1)
        torch._foreach_sign_(updates)
        torch._foreach_add_(params, updates, alpha=-group["lr"])
        torch._foreach_lerp_(momenta, grads, 1 - beta2)


def batches(params: Iterable[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """The parameters in lists of about BATCH_ELEMENTS elements and of one device and dtype, as foreach wants them."""
    waiting: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for param in params:
        batch = waiting.setdefault((param.device, param.dtype), [])
        batch.append(param)
        if sum(each.numel() for each in batch) >= BATCH_ELEMENTS:
            yield waiting.pop((param.device, param.dtype))
    yield from waiting.values()
