"""What a boosted model and a boosted optimizer look like to a loop, whichever plugin made them."""

from core.interface.model import AMPModelMixin, ModelWrapper
from core.interface.optimizer import OptimizerWrapper

__all__ = ["AMPModelMixin", "ModelWrapper", "OptimizerWrapper"]
