"""Pipelines: layers cut into stages by a layout, and steps through them under one of torch's schedules."""

from core.pipeline_parallel.forward_backward import get_forward_backward_func
from core.pipeline_parallel.gpt_stages import build_gpt_stages, gpt_activations, gpt_forward_step, wrap_stages
from core.pipeline_parallel.layout import PipelineLayout, StageSpec
from core.pipeline_parallel.runner import MicrobatchLoss, PipelineRunner, StepOutcome
from core.pipeline_parallel.schedules import SCHEDULES, plan_pipeline
from core.pipeline_parallel.stage import StageEvent

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
