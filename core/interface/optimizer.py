"""OptimizerWrapper: an optimizer as a plugin returns it; the loop calls it for backward, clipping and the step."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from core.optimizer.loss_scaler import LossScaler
from core.optimizer.norm.clip_loose import clip_loose_gradients
from core.optimizer.optimizer_state import plain_numbers
from core.optimizer.step.scaled_backward import scale_loss


class OptimizerWrapper:
    """Holds a torch optimizer, or another wrapper, as `optim`.

    Parameter groups are the inner optimizer's own objects, so a scheduler made before `boost` keeps working; make one
    after `boost` with `unwrap()`. A plugin overrides `clip_grad_by_norm` and `agree_on_overflow` where a rank holds
    only a part of each gradient, and `inner_state` and `load_inner_state` where the state is not torch's.
    """

    scaler: LossScaler | None = None  # the loss scale, of fp16

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
        """The inner optimizer's."""
        groups: list[dict[str, Any]] = self.optim.param_groups
        return groups

    @property
    def defaults(self) -> dict[str, Any]:
        """The inner optimizer's."""
        defaults: dict[str, Any] = self.optim.defaults
        return defaults

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to the inner optimizer."""
        self.optim.add_param_group(param_group)

    def unwrap(self) -> Any:
        """The torch optimizer under all wrappers."""
        return self.optim.unwrap() if isinstance(self.optim, OptimizerWrapper) else self.optim

    # -- one step, in order ---------------------------------------------------------------------------------------

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Clear the gradients."""
        self.optim.zero_grad(*args, **kwargs)

    def backward(self, loss: torch.Tensor, inputs: Any = None, retain_graph: bool = False, **kwargs: Any) -> None:
        """Accumulate the gradient of `loss`."""
        if isinstance(self.optim, OptimizerWrapper):
            self.optim.backward(loss, inputs=inputs, retain_graph=retain_graph, **kwargs)
        else:
            loss.backward(inputs=inputs, retain_graph=retain_graph, **kwargs)

    def backward_by_grad(
        self, tensor: torch.Tensor, grad: torch.Tensor, inputs: Any = None, retain_graph: bool = False
    ) -> None:
        """Continue with a gradient from elsewhere, for example from the next pipeline stage. It is never scaled."""
        if isinstance(self.optim, OptimizerWrapper):
            self.optim.backward_by_grad(tensor, grad, inputs=inputs, retain_graph=retain_graph)
        else:
            torch.autograd.backward(tensor, grad, inputs=inputs, retain_graph=retain_graph)

    def clip_grad_by_value(self, clip_value: float, *args: Any, **kwargs: Any) -> None:
        """Bound each element of the gradient to [-clip_value, clip_value]."""
        nn.utils.clip_grad_value_(self.parameters, clip_value, *args, **kwargs)

    def clip_grad_by_norm(
        self,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        *args: Any,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Scale the whole gradient so that its norm is at most `max_norm`; return the norm before.

        Raises ValueError when max_norm is not positive (0 would make every gradient 0: leave the call out to train
        without clipping), RuntimeError for a norm that is not finite where error_if_nonfinite.
        """
        check_max_norm(max_norm)
        if isinstance(self.optim, OptimizerWrapper):
            norm = self.optim.clip_grad_by_norm(max_norm, norm_type, error_if_nonfinite, *args, **kwargs)
        else:
            norm = clip_loose_gradients(self.parameters, max_norm, norm_type, error_if_nonfinite, *args, **kwargs)
        self._grad_norm = float(norm)
        return norm

    def get_grad_norm(self, norm_type: float = 2.0, **kwargs: Any) -> float | None:
        """The norm of the last clipping: of the whole, unscaled gradient, before it was clipped. None before that."""
        return self._grad_norm

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """Update the parameters."""
        return self.optim.step(*args, **kwargs)

    @property
    def step_was_skipped(self) -> bool:
        """True if the last `step` left the parameters alone because a gradient overflowed."""
        return bool(getattr(self.unwrap(), "step_was_skipped", False))

    def note_step(self, *, skipped: bool) -> None:
        """Leave the mark on the torch optimizer, which is what a scheduler holds."""
        self.unwrap().step_was_skipped = skipped

    # -- scaled losses --------------------------------------------------------------------------------------------

    def scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss times the loss scale, in fp32: a scale is larger than fp16's numbers. Only with fp16."""
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
        """Did any rank that holds a part of this gradient find inf or NaN? Here every rank holds the whole."""
        return self.optim.agree_on_overflow(found) if isinstance(self.optim, OptimizerWrapper) else found

    # -- state ----------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The state of the optimizer, and `loss_scaler` with fp16."""
        scale = {} if self.scaler is None else {"loss_scaler": self.scaler.state_dict()}
        return {**self.inner_state(), **scale}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue where `state_dict` was called. Without `loss_scaler` in it, the scale is unchanged."""
        inner = dict(state_dict)
        scale = None if self.scaler is None else inner.pop("loss_scaler", None)
        self.load_inner_state(inner)
        if self.scaler is not None and scale is not None:
            self.scaler.load_state_dict(scale)

    def inner_state(self) -> dict[str, Any]:
        """The inner optimizer's, without numbers of numpy."""
        state: dict[str, Any] = plain_numbers(self.optim.state_dict())
        return state

    def load_inner_state(self, state_dict: dict[str, Any]) -> None:
        """Continue where `inner_state` was called."""
        self.optim.load_state_dict(state_dict)

    def name_parameters(self, model: nn.Module) -> None:
        """Remember each parameter's name in the plain module, for checkpoints and errors."""
        self.param_names = {param: name for name, param in model.named_parameters()}


def is_number(value: Any) -> bool:
    """Can it be compared with a number? So can a tensor of one element; text and None cannot."""
    return isinstance(value, (int, float)) or (isinstance(value, torch.Tensor) and value.numel() == 1)


def check_max_norm(max_norm: float) -> None:
    """Refuse a norm that gradients cannot be clipped to."""
    if not is_number(max_norm) or not max_norm > 0:
        raise ValueError(
            f"max_norm is {max_norm!r}; it must be a positive number (0 would make every gradient 0). To train without "
            "clipping, leave out clip_grad_by_norm"
        )


def check_clip_value(clip_value: float) -> None:
    """Refuse a bound that would leave no gradient."""
    if not is_number(clip_value) or not clip_value > 0:
        raise ValueError(f"clip_value is {clip_value!r}; it must be a positive number")
