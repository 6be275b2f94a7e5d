"""Interface of boosted models and optimizers, equal for a training loop under every plugin."""

from core.interface.model import AMPModelMixin, ModelWrapper
from core.interface.optimizer import OptimizerWrapper

__all__ = ["AMPModelMixin", "ModelWrapper", "OptimizerWrapper"]
