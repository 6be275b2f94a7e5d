"""OptimizerWrapper: optimizer returned by a plugin, with backward, clipping and step."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from core.optimizer.loss_scaler import LossScaler
from core.optimizer.norm.clip_loose import clip_loose_gradients
from core.optimizer.optimizer_state import plain_numbers
from core.optimizer.step.scaled_backward import scale_loss


class OptimizerWrapper:
    """Wrapper with a torch optimizer, or another wrapper, as ``optim``.

    Parameter groups are the inner optimizer's objects, so a scheduler created before ``boost`` keeps working; after
    ``boost``, create one with ``unwrap()``. A plugin overrides ``clip_grad_by_norm`` and ``agree_on_overflow`` if a
    rank has only a part of each gradient, and ``inner_state`` and ``load_inner_state`` if the state is not torch's.
    """

    scaler: LossScaler | None = None  # the loss scale, for fp16

    def __init__(self, optim: Any) -> None:
        self.optim = optim
        self._scaled = False  # True if a loss of this step was scaled
        self.param_names: dict[nn.Parameter, str] = {}
        self._grad_norm: float | None = None

    @property
    def parameters(self) -> list[nn.Parameter]:
        """All parameters, in the order of the groups."""
        return [param for group in self.param_groups for param in group["params"]]

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Parameter groups of the inner optimizer."""
        groups: list[dict[str, Any]] = self.optim.param_groups
        return groups

    @property
    def defaults(self) -> dict[str, Any]:
        """Default options of the inner optimizer."""
        defaults: dict[str, Any] = self.optim.defaults
        return defaults

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to the inner optimizer."""
        self.optim.add_param_group(param_group)

    def unwrap(self) -> Any:
        """Return the torch optimizer under all wrappers."""
        return self.optim.unwrap() if isinstance(self.optim, OptimizerWrapper) else self.optim

    # -- one step, in order ---------------------------------------------------------------------------------------

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Clear the gradients."""
        self.optim.zero_grad(*args, **kwargs)

    def backward(self, loss: torch.Tensor, inputs: Any = None, retain_graph: bool = False, **kwargs: Any) -> None:
        """Accumulate the gradient of ``loss``.

        Args:
            loss (Tensor): Scalar loss.
            inputs: See torch.Tensor.backward.
            retain_graph (bool, optional): See torch.Tensor.backward.
            kwargs: Further arguments of the inner backward.
        """
        if isinstance(self.optim, OptimizerWrapper):
            self.optim.backward(loss, inputs=inputs, retain_graph=retain_graph, **kwargs)
        else:
            loss.backward(inputs=inputs, retain_graph=retain_graph, **kwargs)

    def backward_by_grad(
        self, tensor: torch.Tensor, grad: torch.Tensor, inputs: Any = None, retain_graph: bool = False
    ) -> None:
        """Run backward from a gradient, for example from the next pipeline stage. It is never scaled.

        Args:
            tensor (Tensor): Output to differentiate.
            grad (Tensor): Gradient of the output.
            inputs: See torch.autograd.backward.
            retain_graph (bool, optional): See torch.autograd.backward.
        """
        if isinstance(self.optim, OptimizerWrapper):
            self.optim.backward_by_grad(tensor, grad, inputs=inputs, retain_graph=retain_graph)
        else:
            torch.autograd.backward(tensor, grad, inputs=inputs, retain_graph=retain_graph)

    def clip_grad_by_value(self, clip_value: float, *args: Any, **kwargs: Any) -> None:
        """Clamp each element of the gradient to [-clip_value, clip_value]."""
        nn.utils.clip_grad_value_(self.parameters, clip_value, *args, **kwargs)

    def clip_grad_by_norm(
        self,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        *args: Any,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Scale the full gradient so that its norm is at most ``max_norm``.

        Args:
            max_norm: Maximum norm, positive (0 would zero every gradient; to disable clipping, do not call this).
            norm_type: Order of the norm.
            error_if_nonfinite: Raise if the norm is not finite.
            args: Further arguments of the inner optimizer.
            kwargs: Further arguments of the inner optimizer.

        Returns:
            The norm before clipping.

        Raises:
            ValueError: If ``max_norm`` is not positive.
            RuntimeError: If the norm is not finite and ``error_if_nonfinite`` is ``True``.
        """
        check_max_norm(max_norm)
        if isinstance(self.optim, OptimizerWrapper):
            norm = self.optim.clip_grad_by_norm(max_norm, norm_type, error_if_nonfinite, *args, **kwargs)
        else:
            norm = clip_loose_gradients(self.parameters, max_norm, norm_type, error_if_nonfinite, *args, **kwargs)
        self._grad_norm = float(norm)
        return norm

    def get_grad_norm(self, norm_type: float = 2.0, **kwargs: Any) -> float | None:
        """Return the norm of the full, unscaled gradient before the last clipping, or ``None`` before the first."""
        return self._grad_norm

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """Update the parameters."""
        return self.optim.step(*args, **kwargs)

    @property
    def step_was_skipped(self) -> bool:
        """True if the last ``step`` was skipped because a gradient overflowed."""
        return bool(getattr(self.unwrap(), "step_was_skipped", False))

    def record_step(self, *, skipped: bool) -> None:
        """Set ``step_was_skipped`` on the torch optimizer, because LR schedulers keep a reference to it."""
        self.unwrap().step_was_skipped = skipped

    # -- scaled losses --------------------------------------------------------------------------------------------

    def scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
        """Multiply the loss by the loss scale, in fp32 because a scale exceeds fp16's range. Only with fp16."""
        if self.scaler is None:
            raise NotImplementedError(
                f"{type(self).__name__} has no loss scale; scale_loss is for fp16 mixed precision"
            )
        self._scaled = True
        return scale_loss(loss.float(), self.scaler)

    def unscale_grad(self) -> None:
        """Divide the gradients by the loss scale. Only with fp16."""
        raise NotImplementedError(f"{type(self).__name__} has no loss scale; unscale_grad is for fp16 mixed precision")

    def agree_on_overflow(self, found: bool) -> bool:
        """Return ``True`` if any rank with a part of the gradient found Inf or NaN. Here each rank has all of it."""
        return self.optim.agree_on_overflow(found) if isinstance(self.optim, OptimizerWrapper) else found

    # -- state ----------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the optimizer's state, with ``loss_scaler`` for fp16."""
        scale = {} if self.scaler is None else {"loss_scaler": self.scaler.state_dict()}
        return {**self.inner_state(), **scale}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore a state from ``state_dict``. Without ``loss_scaler`` in it, the scale is unchanged."""
        inner = dict(state_dict)
        scale = None if self.scaler is None else inner.pop("loss_scaler", None)
        self.load_inner_state(inner)
        if self.scaler is not None and scale is not None:
            self.scaler.load_state_dict(scale)

    def inner_state(self) -> dict[str, Any]:
        """Return the inner optimizer's state, with numpy numbers converted to Python's."""
        state: dict[str, Any] = plain_numbers(self.optim.state_dict())
        return state

    def load_inner_state(self, state_dict: dict[str, Any]) -> None:
        """Restore a state from ``inner_state``."""
        self.optim.load_state_dict(state_dict)

    def name_parameters(self, model: nn.Module) -> None:
        """Record each parameter's name in the plain module, for checkpoints and errors."""
        self.param_names = {param: name for name, param in model.named_parameters()}


def is_number(value: Any) -> bool:
    """Return ``True`` if the value can be compared with a number, as a tensor of one element can."""
    return isinstance(value, (int, float)) or (isinstance(value, torch.Tensor) and value.numel() == 1)


def check_max_norm(max_norm: float) -> None:
    """Raise ValueError unless ``max_norm`` is a positive number."""
    if not is_number(max_norm) or not max_norm > 0:
        raise ValueError(
            f"max_norm is {max_norm!r}; it must be a positive number (0 would make every gradient 0). To train without "
            "clipping, leave out clip_grad_by_norm"
        )


def check_clip_value(clip_value: float) -> None:
    """Raise ValueError unless ``clip_value`` is a positive number."""
    if not is_number(clip_value) or not clip_value > 0:
        raise ValueError(f"clip_value is {clip_value!r}; it must be a positive number")
