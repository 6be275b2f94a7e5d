"""Loss scaling: a factor on the loss that keeps small gradients representable in fp16.

All ranks apply the same rule to one shared decision, so their scales stay equal. The dynamic scale follows Megatron
Core's rule:

    a step overflowed   the count of good steps is reset and one of ``hysteresis`` lives is lost; with no life left the
                        scale is multiplied by ``backoff_factor``, but not below ``min_scale``
    a step was good     after ``growth_interval`` good steps in a row the scale is multiplied by ``growth_factor``, but
                        not above ``max_scale``, and all lives are restored

Lives are restored only when the scale grows. Overflows need not be consecutive to use them up, and with no life left
every further overflow reduces the scale.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from core.optimizer.optimizer_config import OptimizerConfig

FP32_MAX = float(torch.finfo(torch.float32).max)


class LossScaler:
    """Constant loss scale, and the interface of all loss scales. The factor must be positive and finite.

    A step that overflows is skipped, whether or not the factor changes.
    """

    def __init__(self, scale: float) -> None:
        _expect_scale("scale", scale)
        self.value = float(scale)
        self.has_scaled = False  # True if a loss of this step was multiplied by `scale_loss`
        self.is_passed_on = False  # True if a scaled loss of this step has reached no parameter
        self._is_read = False  # True if user code asked for the factor before the first step
        self._has_stepped = False

    @property
    def scale(self) -> torch.Tensor:
        """Return the factor as a tensor of shape [1] in fp32 on the CPU."""
        self._is_read = self._is_read or not self._has_stepped
        return torch.tensor([self.value], dtype=torch.float32, device="cpu")

    @property
    def is_by_hand(self) -> bool:
        """True if user code may multiply losses by the factor, or pass scaled gradients on, without ``scale_loss``."""
        return self._is_read or self.is_passed_on

    def update(self, found_inf: bool) -> None:
        """Record the end of a step. ``found_inf`` means that a gradient on any rank overflowed."""
        self._has_stepped, self.has_scaled, self.is_passed_on = True, False, False

    def state_dict(self) -> dict[str, Any]:
        return {"scale": self.value}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore saved numbers. A fixed factor ignores them."""


class ConstantLossScaler(LossScaler):
    """Constant loss scale, set by configuration. Its state is saved for the record and ignored on load."""


class DynamicLossScaler(LossScaler):
    """Loss scale that shrinks after overflows and grows in their absence. See the module docstring for the rule.

    ``growth_interval`` counts good steps in a row, and ``hysteresis`` the overflows since the last growth at which the
    scale is first reduced. Raises ValueError if a number is out of its range.
    """

    def __init__(
        self,
        initial_scale: float,
        min_scale: float = 1.0,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 1000,
        hysteresis: int = 2,
        max_scale: float | None = None,
    ) -> None:
        _expect_scale("initial_scale", initial_scale)
        _expect_scale("min_scale", min_scale)
        super().__init__(initial_scale)
        self.max_scale = FP32_MAX if max_scale is None else float(max_scale)
        if not min_scale <= initial_scale <= self.max_scale:
            raise ValueError(
                f"initial_scale is {initial_scale}; expected it between min_scale {min_scale} and max_scale "
                f"{self.max_scale:g}"
            )
        if growth_factor <= 1 or not 0 < backoff_factor < 1:
            raise ValueError(
                f"growth_factor is {growth_factor} and backoff_factor {backoff_factor}; the first must be above 1, the "
                "second between 0 and 1"
            )
        if growth_interval < 1 or hysteresis < 1:
            raise ValueError(
                f"growth_interval is {growth_interval} and hysteresis {hysteresis}; both must be at least 1"
            )
        self.min_scale = float(min_scale)
        self.growth_factor = growth_factor
        self.backoff_factor = backoff_factor
        self.growth_interval = growth_interval
        self.hysteresis = hysteresis
        self.good_steps = 0
        self.lives = hysteresis

    def update(self, found_inf: bool) -> None:
        super().update(found_inf)
        if found_inf:
            self.good_steps = 0
            self.lives -= 1
            if self.lives <= 0:
                self.value = max(self.value * self.backoff_factor, self.min_scale)
            return
        self.good_steps += 1
        if self.good_steps == self.growth_interval:
            self.good_steps = 0
            self.lives = self.hysteresis
            self.value = min(self.value * self.growth_factor, self.max_scale)

    def state_dict(self) -> dict[str, Any]:
        """Return the scale and the two counters, under Megatron's names."""
        return {"scale": self.value, "growth_tracker": self.good_steps, "hysteresis_tracker": self.lives}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the scale and the two counters, which may be one-element tensors. Limits are configured, never
        loaded.
        """
        scale = float(state_dict["scale"])
        _expect_scale("the saved scale", scale)
        self.value = min(max(scale, self.min_scale), self.max_scale)
        self.good_steps = int(state_dict.get("growth_tracker", 0))
        self.lives = int(state_dict.get("hysteresis_tracker", self.hysteresis))


def loss_scaler_of(config: OptimizerConfig) -> LossScaler | None:
    """Return the loss scale that a config selects, or ``None``.

    ``loss_scale`` selects a constant scale; otherwise ``fp16`` selects a dynamic one.
    """
    if config.loss_scale is not None:
        return ConstantLossScaler(config.loss_scale)
    if config.fp16:
        return DynamicLossScaler(
            initial_scale=config.initial_loss_scale,
            min_scale=config.min_loss_scale,
            growth_interval=config.loss_scale_window,
            hysteresis=config.hysteresis,
        )
    return None


def _expect_scale(name: str, value: float) -> None:
    if not 0 < value < math.inf:
        raise ValueError(f"{name} is {value}; it must be above 0 and finite")
