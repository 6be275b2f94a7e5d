"""Gradient handlers: reductions selected by name, which a loop calls between backward and the optimizer's step."""

from core.gradient_handler.base import BaseGradientHandler
from core.gradient_handler.handlers import (
    DataParallelGradientHandler,
    MoeGradientHandler,
    PipelineSharedModuleGradientHandler,
    SequenceParallelGradientHandler,
)
from core.gradient_handler.loose_gradients import GradientHandlerError
from core.gradient_handler.registry import GRADIENT_HANDLER, Registry, build_gradient_handler
from core.gradient_handler.zero import GradSyncUnsupported, SupportsGradSync, ZeROGradientHandler

__all__ = [
    "GRADIENT_HANDLER",
    "BaseGradientHandler",
    "DataParallelGradientHandler",
    "GradSyncUnsupported",
    "GradientHandlerError",
    "MoeGradientHandler",
    "PipelineSharedModuleGradientHandler",
    "Registry",
    "SequenceParallelGradientHandler",
    "SupportsGradSync",
    "ZeROGradientHandler",
    "build_gradient_handler",
]
