"""Pipeline parallelism: a layout assigns layers to stages, and a runner executes steps under torch's schedules.

Names are imported lazily, because torch's schedules take a second to import and planning a layout does not need them.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from core.pipeline_parallel.forward_backward import get_forward_backward_func
    from core.pipeline_parallel.gpt_stages import build_gpt_stages, gpt_activations, gpt_forward_step, wrap_stages
    from core.pipeline_parallel.layout import PipelineLayout, StageSpec
    from core.pipeline_parallel.runner import MicrobatchLoss, PipelineRunner, StepOutcome
    from core.pipeline_parallel.schedules import SCHEDULES, plan_pipeline
    from core.pipeline_parallel.stage import StageEvent

_PLACES = {
    "forward_backward": ("get_forward_backward_func",),
    "gpt_stages": ("build_gpt_stages", "gpt_activations", "gpt_forward_step", "wrap_stages"),
    "layout": ("PipelineLayout", "StageSpec"),
    "runner": ("MicrobatchLoss", "PipelineRunner", "StepOutcome"),
    "schedules": ("SCHEDULES", "plan_pipeline"),
    "stage": ("StageEvent",),
}

__all__ = [
    "SCHEDULES",
    "MicrobatchLoss",
    "PipelineLayout",
    "PipelineRunner",
    "StageEvent",
    "StageSpec",
    "StepOutcome",
    "build_gpt_stages",
    "get_forward_backward_func",
    "gpt_activations",
    "gpt_forward_step",
    "plan_pipeline",
    "wrap_stages",
]


def __getattr__(name: str) -> Any:
    for module, names in _PLACES.items():
        if name in names:
            return getattr(importlib.import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}; known are {', '.join(__all__)}")
