"""TorchAMPOptimizer: an optimizer with a loss scale for fp16 that skips a step on all ranks if a gradient overflows."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from core.distributed.buffer.grad_attribute import weakly
from core.interface import OptimizerWrapper
from core.optimizer.loss_scaler import DynamicLossScaler
from core.optimizer.step.scaled_backward import lacks_scale, scaled_backward, unscaled


class TorchAMPOptimizer(OptimizerWrapper):
    """Optimizer wrapper that scales the loss, unscales gradients once, and skips steps whose gradients overflow.

    Gradients are unscaled before the first clipping or the step. The scale changes only in ``step``, so all
    microbatches of an accumulated gradient have the same scale. The scaler's state is part of ``state_dict``, and
    therefore of checkpoints.

    Args:
        optim (Optimizer): A torch optimizer, or a plugin's wrapper.
        scaler (DynamicLossScaler): The loss scale.
    """

    def __init__(self, optim: Any, scaler: DynamicLossScaler) -> None:
        super().__init__(optim)
        self.scaler: DynamicLossScaler = scaler
        self.found_inf = False  # True if the last unscaled gradients overflowed
        self._unscaled = False
        self._without_scale: nn.Parameter | None = None  # first parameter in this step whose gradient lacks the scale
        if isinstance(optim, OptimizerWrapper):
            self.param_names = optim.param_names
        for param in self.parameters:
            if type(param) is nn.Parameter:  # FSDP's own classes get their gradients otherwise
                param.register_post_accumulate_grad_hook(weakly(self._check_scale))

    def _check_scale(self, param: nn.Parameter) -> None:
        if lacks_scale(self.scaler) and self._without_scale is None:
            self._without_scale = param

    def backward(self, loss: torch.Tensor, inputs: Any = None, retain_graph: bool = False, **kwargs: Any) -> None:
        """Accumulate the gradient of the scaled loss.

        Args:
            loss (Tensor): The loss, without the scale.
            inputs: As in torch.Tensor.backward.
            retain_graph (bool, optional): As in torch.Tensor.backward.
            **kwargs: As in torch.Tensor.backward.

        Raises:
            RuntimeError: If this step's gradients are already unscaled.
        """
        if self._unscaled:
            raise RuntimeError(
                "backward() came after this step's gradients were unscaled (by clipping or unscale_grad), so it would "
                "add scaled gradients to unscaled ones; call step() or zero_grad() first, and clip only before step()"
            )
        super().backward(self.scale_loss(loss), inputs=inputs, retain_graph=retain_graph, **kwargs)

    def backward_by_grad(
        self, tensor: torch.Tensor, grad: torch.Tensor, inputs: Any = None, retain_graph: bool = False
    ) -> None:
        """Continue a backward from a scaled gradient. See ``OptimizerWrapper.backward_by_grad``."""
        self._scaled = True
        with scaled_backward(self.scaler):
            super().backward_by_grad(tensor, grad, inputs=inputs, retain_graph=retain_graph)

    def unscale_grad(self) -> None:
        """Divide the gradients by the scale, once per step. Collective if ranks hold parts of a gradient.

        Raises:
            RuntimeError: If a gradient comes from a loss without the scale.
        """
        if self._unscaled:
            return
        grads = [_local(param.grad) for param in self.parameters if param.grad is not None]
        if grads and (self._without_scale is not None or not self._scaled):
            name = self.param_names.get(self._without_scale) if self._without_scale is not None else None
            raise RuntimeError(unscaled("a gradient" if name is None else f"the gradient of {name!r}", self.scaler))
        finite = True
        if grads:
            # A sum of maxima: inf or NaN anywhere is inf or NaN here, and one read from the device serves all.
            largest = torch.stack(
                [grad.abs().amax().float() for grad in grads if grad.numel()] or [torch.zeros((), device="cpu")]
            )
            finite = bool(largest.sum().isfinite())
            torch._foreach_mul_(grads, 1.0 / self.scaler.value)
        self.found_inf = self.agree_on_overflow(not finite)
        self._unscaled = True

    def clip_grad_by_norm(self, max_norm: float, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Clip the norm of the unscaled gradient. See ``OptimizerWrapper.clip_grad_by_norm``."""
        self.unscale_grad()
        return super().clip_grad_by_norm(max_norm, *args, **kwargs)

    def clip_grad_by_value(self, clip_value: float, *args: Any, **kwargs: Any) -> None:
        """Clip the elements of the unscaled gradient. See ``OptimizerWrapper.clip_grad_by_value``."""
        self.unscale_grad()
        super().clip_grad_by_value(clip_value, *args, **kwargs)

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """Update the parameters unless a gradient overflowed, and update the scale.

        Raises:
            TypeError: If there is an argument, such as a closure.
        """
        if args or kwargs:
            raise TypeError("step() takes no closure with fp16: a closure's backward would not scale the loss")
        self.unscale_grad()
        result = None if self.found_inf else self.optim.step()
        self.record_step(skipped=self.found_inf)
        self.scaler.update(self.found_inf)
        self._begin()
        return result

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Clear the gradients and begin a new step."""
        self._begin()
        self.optim.zero_grad(*args, **kwargs)

    def _begin(self) -> None:
        self._unscaled = self._scaled = False
        self._without_scale = None


def _local(tensor: Any) -> torch.Tensor:
    """Return this rank's part of a sharded tensor, or the tensor itself."""
    local: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local
