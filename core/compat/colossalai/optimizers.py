"""Optimizers by ColossalAI's names. Where the update is Adam's or SGD's, torch's fused kernels make it.

`needs_shapes` tells the sharded optimizer which of them look at whole parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

Params = Iterable[Tensor] | Iterable[dict[str, Any]]
Betas = tuple[float, float]


class FusedAdam(torch.optim.Adam):
    """Adam; AdamW by default, as `adamw_mode` decouples the weight decay. Raises ValueError without bias correction.

    set_grad_none: True as in torch; gradients are set to None by `zero_grad`.
    """

    def __init__(
        self,
        params: Params,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: Betas = (0.9, 0.999),
        eps: float = 1e-8,
        adamw_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
    ) -> None:
        if not bias_correction:
            raise ValueError(
                f"{type(self).__name__}(bias_correction=False): torch's kernel always corrects the bias of the "
                "moments; leave the argument out, and warm the learning rate up instead"
            )
        self.set_grad_none = set_grad_none
        super().__init__(
            params,
            lr=lr,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            amsgrad=amsgrad,
            decoupled_weight_decay=adamw_mode,
        )
        _use_fused_kernel(self)

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Clear the gradients."""
        super().zero_grad(self.set_grad_none if set_to_none is None else set_to_none)


class CPUAdam(FusedAdam):
    """Adam on whatever device the parameters are. Moments on disk (nvme_offload_fraction above 0) are refused."""

    def __init__(
        self,
        model_params: Params,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: Betas = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        adamw_mode: bool = True,
        nvme_offload_fraction: float = 0.0,
        nvme_offload_dir: str | None = None,
    ) -> None:
        if nvme_offload_fraction:
            raise ValueError(
                f"{type(self).__name__}(nvme_offload_fraction={nvme_offload_fraction}): moments are kept on no disk; "
                "leave the argument out, and use LowLevelZeroPlugin(cpu_offload=True) to keep them on the host"
            )
        super().__init__(model_params, lr, bias_correction, betas, eps, adamw_mode, weight_decay)


class HybridAdam(CPUAdam):
    """CPUAdam; with LowLevelZeroPlugin(cpu_offload=True) a part of the state is on the host."""


class FusedSGD(torch.optim.SGD):
    """SGD. `wd_after_momentum=True` is refused, as torch's kernel decays before."""

    def __init__(
        self,
        params: Params,
        lr: float,
        momentum: float = 0,
        dampening: float = 0,
        weight_decay: float = 0,
        nesterov: bool = False,
        wd_after_momentum: bool = False,
    ) -> None:
        if wd_after_momentum:
            raise ValueError("FusedSGD(wd_after_momentum=True): torch's SGD decays before momentum; leave it out")
        super().__init__(params, lr, momentum, dampening, weight_decay, nesterov)
        _use_fused_kernel(self)


class WholeParameterOptimizer(torch.optim.Optimizer):
    """An optimizer whose update of a parameter depends on norms or means of the whole of it."""

    needs_shapes = True

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient."""
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
        """Update one parameter in place."""
        raise NotImplementedError


class Lamb(WholeParameterOptimizer):
    """LAMB (arXiv:1904.00962, version 3: moments without bias correction unless asked for).

    adam: True for a trust ratio of 1. The ratio |w| / |update| has no upper limit, as in ColossalAI.
    """

    def __init__(
        self,
        params: Params,
        lr: float = 1e-3,
        betas: Betas = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0,
        adam: bool = False,
        bias_correction: bool = False,
    ) -> None:
        _check(self, lr=lr, eps=eps, weight_decay=weight_decay)
        self.adam = adam
        super().__init__(
            params,
            {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "bias_correction": bias_correction},
        )

    def update(self, param: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        """One parameter's step along m / (sqrt(v) + eps) + decay * w, as long as the trust ratio says."""
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
        sizes = param.norm(), direction.norm()
        usable = (sizes[0] > 0) & (sizes[1] > 0)
        ratio = torch.where(usable, sizes[0] / sizes[1], 1.0) if not self.adam else 1.0
        param.sub_(direction * (lr * ratio))


class Lars(WholeParameterOptimizer):
    """LARS (arXiv:1708.03888): a parameter's rate is lr * eeta * |w| / (|g| + decay * |w| + epsilon), at most 50 lr.

    The decayed gradient is bounded to [-10, 10], as in ColossalAI.
    """

    def __init__(
        self,
        params: Params,
        lr: float = 1e-3,
        momentum: float = 0,
        eeta: float = 1e-3,
        weight_decay: float = 0,
        epsilon: float = 0.0,
    ) -> None:
        _check(self, lr=lr, momentum=momentum, eeta=eeta, weight_decay=weight_decay, epsilon=epsilon)
        options = {"lr": lr, "momentum": momentum, "eeta": eeta, "weight_decay": weight_decay, "epsilon": epsilon}
        super().__init__(params, options)

    def update(self, param: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        """One parameter's step."""
        decay = group["weight_decay"]
        sizes = param.norm(), grad.norm()
        rate = group["eeta"] * sizes[0] / (sizes[1] + decay * sizes[0] + group["epsilon"])
        rate = torch.where((sizes[0] > 0) & (sizes[1] > 0), rate, 1.0).clamp(0.0, 50.0)
        direction = (grad + decay * param).clamp(-10.0, 10.0)
        if group["momentum"]:
            if "momentum_buffer" in state:
                state["momentum_buffer"].mul_(group["momentum"]).add_(direction)
            else:
                state["momentum_buffer"] = direction
            direction = state["momentum_buffer"]
        param.sub_(direction * (group["lr"] * rate))


class CAME(WholeParameterOptimizer):
    """CAME (arXiv:2307.02047): Adafactor's update, divided by a factored measure of how unsteady it is.

    eps: added to squared gradients and to squared instabilities. betas: of the update, the squares, the instability.
    """

    def __init__(
        self,
        params: Params,
        lr: float | None = None,
        eps: Betas = (1e-30, 1e-16),
        clip_threshold: float = 1.0,
        betas: tuple[float, float, float] = (0.9, 0.999, 0.9999),
        weight_decay: float = 0.0,
    ) -> None:
        if lr is None:
            raise ValueError("CAME needs a learning rate; pass lr=2e-4, say")
        _check(self, lr=lr, clip_threshold=clip_threshold, weight_decay=weight_decay)
        options = {"lr": lr, "eps": eps, "clip_threshold": clip_threshold, "betas": betas}
        super().__init__(params, {**options, "weight_decay": weight_decay})

    def update(self, param: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        """One parameter's step; squares are kept by rows and columns of the last two dimensions."""
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
    """1 / sqrt of the moving average of squares; of matrices, from the averages of rows and of columns."""
    if squares.dim() < 2:
        average = state.setdefault(name, torch.zeros_like(squares)).lerp_(squares, 1 - beta)
        return average.rsqrt()
    rows, columns = squares.mean(-1), squares.mean(-2)
    rows = state.setdefault(f"{name}_row", torch.zeros_like(rows)).lerp_(rows, 1 - beta)
    columns = state.setdefault(f"{name}_col", torch.zeros_like(columns)).lerp_(columns, 1 - beta)
    by_row = (rows / rows.mean(-1, keepdim=True)).rsqrt()
    return by_row.unsqueeze(-1) * columns.rsqrt().unsqueeze(-2)


def _use_fused_kernel(optimizer: torch.optim.Optimizer) -> None:
    """Where torch has one for the parameters' device; it takes the flag of the groups."""
    for group in optimizer.param_groups:
        params: list[Tensor] = group["params"]
        if all(param.device.type in ("cpu", "cuda") and param.is_floating_point() for param in params):
            group.update(fused=True, foreach=False)


def _check(optimizer: object, **numbers: float) -> None:
    for name, value in numbers.items():
        if not value >= 0:
            raise ValueError(f"{type(optimizer).__name__}: {name} is {value!r}; it must not be negative")
