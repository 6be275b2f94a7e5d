"""LAMB, LARS and CAME: torch optimizers that scale an update by norms or means over the full parameter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class WholeParameterOptimizer(torch.optim.Optimizer):
    """Base class of optimizers whose update depends on norms or means over the full parameter.

    Subclasses implement ``update``. Such an optimizer cannot step a shard of a parameter.
    """

    needs_shapes = True
    couples_parameters = False

    def __init__(self, params: Any, **options: Any) -> None:
        for name, value in options.items():
            if isinstance(value, (int, float)) and not value >= 0:
                raise ValueError(f"{type(self).__name__}: {name} is {value!r}; it must not be negative")
        super().__init__(params, options)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    if param.grad.is_sparse:
                        raise RuntimeError(f"{type(self).__name__} takes no sparse gradients; use torch's SparseAdam")
                    self.update(param, param.grad, self.state[param], group)
        return loss

    def update(self, param: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        """Update one parameter in place.

        Args:
            param (Tensor): The parameter.
            grad (Tensor): Its gradient.
            state (dict[str, Any]): Its state, empty before the first step.
            group (dict[str, Any]): Its param group.
        """
        raise NotImplementedError


class Lamb(WholeParameterOptimizer):
    """Implements LAMB (arXiv:1904.00962): Adam's direction, with its learning rate scaled by |w| / |update|.

    The ratio has no upper limit, as in ColossalAI.

    Args:
        params (Iterable): Parameters or param groups.
        lr (float, optional): Learning rate.
        betas (tuple[float, float], optional): Coefficients of the running averages of gradients and squared gradients.
        eps (float, optional): Added to the root of the squares.
        weight_decay (float, optional): Added to the direction, times the weight.
        adam (bool, optional): Use a ratio of 1.
        bias_correction (bool, optional): Apply Adam's bias correction to the averages.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        adam: bool = False,
        bias_correction: bool = False,
    ) -> None:
        self.adam = adam
        options = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, **options, bias_correction=bias_correction)

    def update(self, param: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        if not state:
            state.update(step=0, exp_avg=torch.zeros_like(param), exp_avg_sq=torch.zeros_like(param))
        state["step"] += 1
        beta1, beta2 = group["betas"]
        state["exp_avg"].lerp_(grad, 1 - beta1)
        state["exp_avg_sq"].mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        lr = group["lr"]
        if group["bias_correction"]:
            lr = lr * (1 - beta2 ** state["step"]) ** 0.5 / (1 - beta1 ** state["step"])
        direction = state["exp_avg"] / (state["exp_avg_sq"].sqrt() + group["eps"]) + group["weight_decay"] * param
        weight, change = param.norm(), direction.norm()
        ratio = torch.where((weight > 0) & (change > 0), weight / change, 1.0) if not self.adam else 1.0
        param.sub_(direction * (lr * ratio))


class Lars(WholeParameterOptimizer):
    """Implements LARS (arXiv:1708.03888), whose rate is lr * eeta * |w| / (|g| + decay * |w| + epsilon), at most 50 lr.

    The decayed gradient is clamped to [-10, 10], as in ColossalAI.

    Args:
        params (Iterable): Parameters or param groups.
        lr (float, optional): Learning rate.
        momentum (float, optional): Factor of the previous direction, or 0 for no momentum.
        eeta (float, optional): Trust coefficient of the rate.
        weight_decay (float, optional): Added to the gradient, times the weight.
        epsilon (float, optional): Added to the divisor of the rate.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        momentum: float = 0.0,
        eeta: float = 1e-3,
        weight_decay: float = 0.0,
        epsilon: float = 0.0,
    ) -> None:
        super().__init__(params, lr=lr, momentum=momentum, eeta=eeta, weight_decay=weight_decay, epsilon=epsilon)

    def update(self, param: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        decay, weight, size = group["weight_decay"], param.norm(), grad.norm()
        rate = group["eeta"] * weight / (size + decay * weight + group["epsilon"])
        rate = torch.where((weight > 0) & (size > 0), rate, 1.0).clamp(0.0, 50.0)
        direction = (grad + decay * param).clamp(-10.0, 10.0)
        if group["momentum"]:
            before = state.get("momentum_buffer")
            direction = direction if before is None else before.mul_(group["momentum"]).add_(direction)
            state["momentum_buffer"] = direction
        param.sub_(direction * (group["lr"] * rate))


class CAME(WholeParameterOptimizer):
    """Implements CAME (arXiv:2307.02047): Adafactor's update, divided by a factored estimate of its instability.

    Args:
        params (Iterable): Parameters or param groups.
        lr: Learning rate. Required.
        eps: Added to squared gradients, and to squared instabilities.
        clip_threshold: Largest root mean square of an update.
        betas: Coefficients of the running averages of updates, squared gradients, and instability.
        weight_decay: Decoupled weight decay.

    Raises:
        ValueError: If ``lr`` is ``None``.
    """

    def __init__(
        self,
        params: Any,
        lr: float | None = None,
        eps: tuple[float, float] = (1e-30, 1e-16),
        clip_threshold: float = 1.0,
        betas: tuple[float, float, float] = (0.9, 0.999, 0.9999),
        weight_decay: float = 0.0,
    ) -> None:
        if lr is None:
            raise ValueError("CAME needs a learning rate; pass lr=2e-4, say")
        options = {"lr": lr, "eps": eps, "clip_threshold": clip_threshold, "betas": betas}
        super().__init__(params, **options, weight_decay=weight_decay)

    def update(self, param: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        beta1, beta2, beta3 = group["betas"]
        if not state:
            state.update(step=0, exp_avg=torch.zeros_like(grad))
        state["step"] += 1
        update = grad * _inverse_root(state, "exp_avg_sq", grad.square() + group["eps"][0], beta2)
        update /= (update.square().mean().sqrt() / group["clip_threshold"]).clamp(min=1.0)
        average = state["exp_avg"].lerp_(update, 1 - beta1)
        if grad.dim() >= 2:
            unsteady = (update - average).square() + group["eps"][1]
            average = average * _inverse_root(state, "exp_avg_res", unsteady, beta3)
        param.mul_(1 - group["lr"] * group["weight_decay"])
        param.sub_(average, alpha=group["lr"])


def _inverse_root(state: dict[str, Any], name: str, squares: Tensor, beta: float) -> Tensor:
    """Return 1 / sqrt of the moving average of squares. For matrices it is computed from row and column averages."""
    if squares.dim() < 2:
        return state.setdefault(name, torch.zeros_like(squares)).lerp_(squares, 1 - beta).rsqrt()
    rows, columns = squares.mean(-1), squares.mean(-2)
    rows = state.setdefault(f"{name}_row", torch.zeros_like(rows)).lerp_(rows, 1 - beta)
    columns = state.setdefault(f"{name}_col", torch.zeros_like(columns)).lerp_(columns, 1 - beta)
    by_row = (rows / rows.mean(-1, keepdim=True)).rsqrt()
    return by_row.unsqueeze(-1) * columns.rsqrt().unsqueeze(-2)
