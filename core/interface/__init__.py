"""Interface of boosted models and optimizers: the same for a loop under every plugin."""

from core.interface.model import AMPModelMixin, ModelWrapper
from core.interface.optimizer import OptimizerWrapper

__all__ = ["AMPModelMixin", "ModelWrapper", "OptimizerWrapper"]
