"""GradScaler: torch's dynamic loss scale in a loop under autocast, for optimizers whose gradients lie in shards."""

from __future__ import annotations

from typing import Any

import torch

from core.optimizer.optimizer import MegatronOptimizer


class GradScaler(torch.amp.GradScaler):
    """torch.amp.GradScaler, with its arguments and its state dict, that asks all ranks whether a gradient overflowed.

        scaler = GradScaler("cuda")
        with torch.autocast("cuda", torch.float16):
            loss = loss_of(model, batch)
        scaler.scale(loss).backward()
        finalize_model_grads([model])
        scaler.step(optimizer)  # skipped on all ranks where a gradient of any is not finite
        scaler.update()

    A rank that holds a shard of the gradients sees no overflow in another's, so torch's own class would step on some
    ranks and skip on others; optimizers of this package refuse it. Every rank calls `unscale_`, `step` and `update`.
    Any other optimizer is stepped as torch does.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._stand_ins: dict[int, torch.optim.Optimizer] = {}  # by id of an optimizer of ours
        self._overflowed: dict[int, bool] = {}  # of those that were unscaled since the last update

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide an optimizer's reduced gradients by the scale, in memory: before clipping, at most once an update.

        Collective for an optimizer of ours. Raises SyncError where its gradients are not reduced, ValueError where they
        are in 16 bits or it has a loss scale of its own.
        """
        if not self.is_enabled() or not isinstance(optimizer, MegatronOptimizer):
            super().unscale_(optimizer)
            return
        stand_in = self._stand_in(optimizer)
        if id(optimizer) not in self._overflowed:
            _check(optimizer)
            self._overflowed[id(optimizer)] = optimizer.unscale_grads(self.get_scale())
        (param,) = stand_in.param_groups[0]["params"]
        param.grad = torch.full_like(param, float("inf") if self._overflowed[id(optimizer)] else 0.0)
        super().unscale_(stand_in)  # raises for a second time

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Step an optimizer, or skip it on all ranks where a gradient of any rank is not finite. Once an update.

        Returns what `optimizer.step()` returns, None for a step that was skipped.
        """
        if not self.is_enabled() or not isinstance(optimizer, MegatronOptimizer):
            return super().step(optimizer, *args, **kwargs)
        if id(optimizer) not in self._overflowed:
            self.unscale_(optimizer)
        super().step(self._stand_in(optimizer))  # raises for a second time
        if self._overflowed[id(optimizer)]:
            optimizer.steps_skipped += 1
            optimizer.note_step(skipped=True)
            return None
        return optimizer.step(*args, **kwargs)

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        """Let the scale follow: it falls after an overflow, and grows after `growth_interval` steps without one."""
        super().update(new_scale)
        self._overflowed.clear()

    def _stand_in(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """An optimizer of one number, whose gradient shows torch's class whether `optimizer`'s overflowed."""
        if id(optimizer) not in self._stand_ins:
            device = optimizer.meter.device if isinstance(optimizer, MegatronOptimizer) else "cpu"
            number = torch.zeros(1, device=device, requires_grad=True)
            self._stand_ins[id(optimizer)] = torch.optim.SGD([number], lr=0.0)
        return self._stand_ins[id(optimizer)]


def _check(optimizer: MegatronOptimizer) -> None:
    if optimizer.grad_scaler is not None:
        raise ValueError(
            "the optimizer has a loss scale of its own (OptimizerConfig.fp16 or loss_scale), and its step would divide "
            "a second time; leave the GradScaler out and call optimizer.scale_loss(loss).backward(), or leave the "
            "option out"
        )
    for masters in optimizer.masters:
        if masters.grad.dtype is torch.float16:
            raise ValueError(
                f"the gradients of {masters.bucket.contracts[0].name!r} are kept in fp16, where dividing them by the "
                "scale would lose the small ones; keep the parameters in fp32 under autocast, or wrap the model with "
                "grad_reduce_in_fp32=True, or use OptimizerConfig(fp16=True) in place of a GradScaler"
            )
