"""Fine-tuning by torch's own DistributedDataParallel and FSDP: what the trainer asks of a model and an optimizer."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from core.booster import Booster
from core.booster.checkpoint_io import TorchFSDPCheckpointIO
from core.booster.plugin import TorchDDPPlugin, TorchFSDPPlugin
from core.booster.plugin.low_level_zero_model import LowLevelZeroModel
from core.distributed.reduce.grad_reducer import StepReport
from core.hugging_face.cut_model import CutModel
from core.hugging_face.cut_places import find_cut
from core.interface import ModelWrapper, OptimizerWrapper


class TorchEngine:
    """The optimizer of a plugin of torch. max_norm: as `clip_grad`, 0 for no clipping."""

    def __init__(self, boosted: OptimizerWrapper, max_norm: float) -> None:
        self.engine = self  # what a boosted optimizer calls its own
        self.boosted = boosted
        self.max_norm = max_norm or math.inf

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The torch optimizer's."""
        return self.boosted.param_groups

    def get_loss_scale(self) -> torch.Tensor:
        """Parameters are in fp32, whose losses are not scaled."""
        return torch.ones(())

    def step(self) -> tuple[bool, float, None]:
        """(True, the norm before clipping, None). Collective. RuntimeError for a norm that is not finite."""
        norm = float(self.boosted.clip_grad_by_norm(self.max_norm, error_if_nonfinite=True))
        self.boosted.step()
        return True, norm, None


class TorchModel(LowLevelZeroModel):
    """A model that torch wraps, as the one chunk of a run. No collective of it is counted or timed."""

    def __init__(self, boosted: ModelWrapper, engine: TorchEngine, plugin: TorchDDPPlugin | TorchFSDPPlugin) -> None:
        whole = boosted.unwrap()
        super().__init__(CutModel(whole, [whole]), [boosted], None, None, outputs_fp32=False)
        self.chunks = [self]
        self.plugin = plugin
        self.optimizer = engine
        self.param_sync = SimpleNamespace(events=list)  # torch does not say when it gathers

    def no_sync(self) -> Any:
        """Inside, backward adds to this rank's gradients without reducing them."""
        return self.plugin.no_sync(self.module)

    def zero_grad_buffer(self) -> None:
        """Begin a step."""
        self.optimizer.boosted.zero_grad()

    def step_report(self) -> StepReport:
        """Nothing: torch does not say."""
        return StepReport()

    def describe(self) -> str:
        """For the run's directory."""
        return f"{type(self.plugin).__name__}: torch reduces the gradients"

    def whole_tensors(self) -> dict[str, Any]:
        """The plain module's tensors by name, gathered where they are sharded. Collective."""
        return dict(TorchFSDPCheckpointIO().model_tensors(self.parts()[0]))


def boosted_by_torch(
    plugin: TorchDDPPlugin | TorchFSDPPlugin, model: nn.Module, optimizer: torch.optim.Optimizer, max_norm: float
) -> tuple[TorchModel, TorchEngine]:
    """Model and optimizer for the trainer. Collective. FSDP gathers one layer at a time."""
    if isinstance(plugin, TorchFSDPPlugin):
        layer = model.get_submodule(find_cut(model).layers[0])
        plugin.auto_wrap_policy = {type(layer)}
    wrapped, boosted, *_ = Booster(plugin=plugin).boost(model, optimizer)
    engine = TorchEngine(boosted, max_norm)
    return TorchModel(wrapped, engine, plugin), engine
