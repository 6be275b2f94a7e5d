"""fp16: autocast with a dynamic loss scale, or NVIDIA's apex."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from core.booster.mixed_precision.autocast import AutocastModel, under_autocast
from core.booster.mixed_precision.loss_scaled_optimizer import TorchAMPOptimizer
from core.booster.mixed_precision.mixed_precision_base import Configured, MixedPrecision, as_wrapped
from core.interface import OptimizerWrapper
from core.optimizer.loss_scaler import DynamicLossScaler


class FP16TorchMixedPrecision(MixedPrecision):
    """fp16 through autocast, with a dynamic loss scale.

    The first four arguments and their defaults are torch's and ColossalAI's. The defaults of the others give the
    behavior of those two.

    Args:
        init_scale: First factor of the loss.
        growth_factor: Factor of the scale after `growth_interval` steps without overflow.
        backoff_factor: Factor of the scale after an overflow.
        growth_interval: Steps without overflow before the scale grows.
        min_scale: Lower limit of the scale.
        max_scale: Upper limit of the scale; None for the largest fp32 number.
        hysteresis: Number of overflows since the last growth at which the scale is first reduced.

    Raises:
        ValueError: If a number is out of its range.
    """

    def __init__(
        self,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        *,
        min_scale: float = 2.0**-24,
        max_scale: float | None = None,
        hysteresis: int = 1,
    ) -> None:
        self.scaler_options: dict[str, Any] = {
            "initial_scale": init_scale,
            "min_scale": min_scale,
            "growth_factor": growth_factor,
            "backoff_factor": backoff_factor,
            "growth_interval": growth_interval,
            "hysteresis": hysteresis,
            "max_scale": max_scale,
        }
        self.new_scaler()  # raises for numbers out of range

    def new_scaler(self) -> DynamicLossScaler:
        """Create a loss scaler with these options."""
        return DynamicLossScaler(**self.scaler_options)

    def configure(
        self, model: nn.Module, optimizer: Any = None, criterion: Callable[..., Any] | None = None
    ) -> Configured:
        """Wrap the model and the criterion in autocast, and the optimizer with the loss scale.

        Args:
            model: The model, or a plugin's wrapper of it.
            optimizer: The optimizer, or None.
            criterion: The loss function, or None.

        Returns:
            (model, optimizer, criterion)
        """
        boosted = AutocastModel(model, torch.float16)
        if optimizer is not None:
            optimizer = TorchAMPOptimizer(optimizer, self.new_scaler())
        if criterion is not None:
            criterion = under_autocast(criterion, boosted, torch.float16)
        return boosted, optimizer, criterion


class FP16ApexMixedPrecision(MixedPrecision):
    """fp16 through NVIDIA's apex, with the options of `apex.amp.initialize`. Needs apex built from source, and a GPU.

    Raises:
        ImportError: If apex is not installed.
    """

    def __init__(
        self,
        opt_level: str = "O1",
        cast_model_type: torch.dtype | None = None,
        patch_torch_functions: bool | None = None,
        keep_batchnorm_fp32: bool | str | None = None,
        master_weights: bool | None = None,
        loss_scale: float | str | None = None,
        cast_model_outputs: Any = None,
        num_losses: int = 1,
        verbosity: int = 1,
        min_loss_scale: float | None = None,
        max_loss_scale: float = 2.0**24,
    ) -> None:
        self.options = {name: value for name, value in locals().items() if name != "self"}
        try:
            from apex import amp
        except ImportError as error:
            raise ImportError(
                "mixed precision 'fp16_apex' needs NVIDIA's apex with its `apex.amp` (the package `apex` that pip "
                "finds is another one); build it from its source, or use 'fp16', which needs nothing and does the same"
            ) from error
        self.amp = amp

    def configure(
        self, model: nn.Module, optimizer: Any = None, criterion: Callable[..., Any] | None = None
    ) -> Configured:
        """Let apex configure the model and the optimizer, in place.

        Args:
            model: The model, or a plugin's wrapper of it.
            optimizer: The optimizer, or None.
            criterion: The loss function, or None; returned unchanged.

        Returns:
            (model, optimizer, criterion)
        """
        inner = optimizer.unwrap() if isinstance(optimizer, OptimizerWrapper) else optimizer
        plain = model.unwrap() if hasattr(model, "unwrap") else model
        self.amp.initialize(plain, inner, **self.options)  # changes both in place
        return as_wrapped(model), None if optimizer is None else ApexOptimizer(inner, self.amp), criterion


class ApexOptimizer(OptimizerWrapper):
    """Wrapper of an optimizer that apex has configured."""

    def __init__(self, optim: Any, amp: Any) -> None:
        super().__init__(optim)
        self.amp = amp

    def backward(self, loss: torch.Tensor, inputs: Any = None, retain_graph: bool = False, **kwargs: Any) -> None:
        """Accumulate the gradient of the loss with apex's loss scale, which apex divides out at the end.

        Args:
            loss: The loss.
            inputs: As in torch.Tensor.backward.
            retain_graph: As in torch.Tensor.backward.
            **kwargs: As in torch.Tensor.backward.
        """
        with self.amp.scale_loss(loss, self.optim) as scaled:
            scaled.backward(inputs=inputs, retain_graph=retain_graph, **kwargs)

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """Update the parameters. After an overflow apex has replaced the next step by one that does nothing.

        Args:
            *args: Passed to the optimizer.
            **kwargs: Passed to the optimizer.
        """
        skipped = bool(getattr(getattr(self.optim, "_amp_stash", None), "already_patched", False))
        result = self.optim.step(*args, **kwargs)
        self.note_step(skipped=skipped)
        return result
