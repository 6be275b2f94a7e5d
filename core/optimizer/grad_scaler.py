"""GradScaler: torch's dynamic loss scale for loops under autocast, for optimizers with sharded gradients."""

from __future__ import annotations

from typing import Any

import torch

from core.optimizer.optimizer import MegatronOptimizer


class GradScaler(torch.amp.GradScaler):
    """A ``torch.amp.GradScaler`` that checks the gradients of all ranks for overflow.

    A rank that holds a shard of the gradients cannot see an overflow in another rank's shard. torch's own class would
    therefore step on some ranks and skip on others, so optimizers of this package reject it.

        scaler = GradScaler("cuda")
        with torch.autocast("cuda", torch.float16):
            loss = loss_of(model, batch)
        scaler.scale(loss).backward()
        finalize_model_grads([model])
        scaler.step(optimizer)  # skipped on all ranks if a gradient on any rank is not finite
        scaler.update()

    Arguments and state dict are those of ``torch.amp.GradScaler``. Every rank must call ``unscale_``, ``step`` and
    ``update``. Optimizers of other packages are stepped as torch does.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._stand_ins: dict[int, torch.optim.Optimizer] = {}  # keyed by id of a MegatronOptimizer
        self._overflowed: dict[int, bool] = {}  # keyed by id; optimizers unscaled since the last update

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide an optimizer's reduced gradients by the scale, in memory.

        Call it before clipping, and at most once between two updates. For a MegatronOptimizer, every rank of the job
        must call it.

        Args:
            optimizer (torch.optim.Optimizer): Optimizer whose gradients are divided.

        Raises:
            SyncError: If the gradients are not reduced.
            ValueError: If the gradients are in fp16, or the optimizer has its own loss scale.
            RuntimeError: If it was already called since the last update.
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
        """Step an optimizer, or skip the step on all ranks if a gradient on any rank is not finite.

        Call it once between two updates, on every rank.

        Args:
            optimizer (torch.optim.Optimizer): Optimizer to step.
            *args: Passed to ``optimizer.step``.
            **kwargs: Passed to ``optimizer.step``.

        Returns:
            The result of ``optimizer.step()``, or ``None`` if the step was skipped.
        """
        if not self.is_enabled() or not isinstance(optimizer, MegatronOptimizer):
            return super().step(optimizer, *args, **kwargs)
        if id(optimizer) not in self._overflowed:
            self.unscale_(optimizer)
        super().step(self._stand_in(optimizer))  # raises for a second time
        if self._overflowed[id(optimizer)]:
            optimizer.steps_skipped += 1
            optimizer.record_step(skipped=True)
            return None
        return optimizer.step(*args, **kwargs)

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        """Reduce the scale after an overflow, and raise it after ``growth_interval`` steps without one.

        Args:
            new_scale (float | Tensor, optional): A scale that replaces the updated one, as in torch.
        """
        super().update(new_scale)
        self._overflowed.clear()

    def _stand_in(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Return an optimizer over one number whose gradient reports an overflow of ``optimizer`` to torch's class."""
        if id(optimizer) not in self._stand_ins:
            device = optimizer.meter.device if isinstance(optimizer, MegatronOptimizer) else "cpu"
            number = torch.zeros(1, device=device, requires_grad=True)
            self._stand_ins[id(optimizer)] = torch.optim.SGD([number], lr=0.0)
        return self._stand_ins[id(optimizer)]


def _check(optimizer: MegatronOptimizer) -> None:
    if optimizer.grad_scaler is not None:
        raise ValueError(
            "the optimizer already scales the loss (OptimizerConfig.fp16 or loss_scale), and GradScaler's step would "
            "unscale a second time; drop the GradScaler and call optimizer.scale_loss(loss).backward(), or drop the "
            "option"
        )
    for masters in optimizer.masters:
        if masters.grad.dtype is torch.float16:
            raise ValueError(
                f"the gradients of {masters.bucket.contracts[0].name!r} are kept in fp16, where dividing them by the "
                "scale would lose the small ones; keep the parameters in fp32 under autocast, or wrap the model with "
                "grad_reduce_in_fp32=True, or use OptimizerConfig(fp16=True) in place of a GradScaler"
            )
