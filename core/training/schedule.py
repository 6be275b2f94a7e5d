"""The learning rate as a function of the step."""

from __future__ import annotations

import math

from core.training.config import OptimizerOptions


def learning_rate(options: OptimizerOptions, step: int, steps: int) -> float:
    """Rate of step 0 .. steps - 1: linear warmup to lr over warmup_steps, then a cosine to min_lr at the last step."""
    if step < options.warmup_steps:
        return options.lr * (step + 1) / options.warmup_steps
    decay_steps = max(1, steps - 1 - options.warmup_steps)
    progress = min(1.0, (step - options.warmup_steps) / decay_steps)
    return options.min_lr + (options.lr - options.min_lr) * 0.5 * (1.0 + math.cos(math.pi * progress))
