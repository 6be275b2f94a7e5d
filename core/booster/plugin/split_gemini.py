"""SplitGemini: GeminiPlugin with tp_size > 1. A model is cut over those ranks, and its slices are sharded."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import nn

from core import parallel_state
from core.booster.plugin.gemini_model import GeminiModel
from core.booster.plugin.hybrid_parallel_model import HybridParallelModel
from core.booster.plugin.hybrid_parallel_plugin import HybridParallelPlugin
from core.booster.plugin.plugin_base import Boosted
from core.distributed import DistributedDataParallelConfig
from core.distributed.materialize import MARK
from core.groups.process_groups import ProcessGroups
from core.optimizer.optimizer_config import OptimizerConfig

if TYPE_CHECKING:
    from core.booster.plugin.gemini_plugin import GeminiPlugin


class SplitGeminiModel(GeminiModel, HybridParallelModel):
    """A GeminiModel of this rank's slices. outputs_fp32: True if floating outputs of the forward become fp32."""

    def __init__(self, model: HybridParallelModel, *, outputs_fp32: bool) -> None:
        HybridParallelModel.__init__(
            self,
            *(model.chunks, model.layout, model.whole, model.groups, model.cast_to, model.engine, model.unread),
        )
        self.outputs_fp32 = outputs_fp32


class SplitGemini(HybridParallelPlugin):
    """HybridParallelPlugin's way to cut a model and to keep its files, with GeminiPlugin's chunks and their places.

    options: of HybridParallelPlugin. Raises ValueError for what cannot work.
    """

    def __init__(self, gemini: GeminiPlugin, **options: Any) -> None:
        super().__init__(
            gemini.tp_size,
            1,
            precision=gemini.precision,
            max_norm=gemini.max_norm,
            zero_stage=0 if gemini.replicates else 3,
            parallel_output=False,  # any criterion can read whole logits
            make_vocab_size_divisible_by=1,  # GeminiPlugin has no such option
            fp8_communication=gemini.fp8_communication,
            use_fp8=gemini.use_fp8,
            **gemini.scaler_options,
            **options,
        )
        self.gemini = gemini

    @property
    def _name(self) -> str:
        return "GeminiPlugin"

    def groups(self) -> ProcessGroups:
        """parallel_state's groups, made here at the first call if there are none. Collective then."""
        if not parallel_state.model_parallel_is_initialized():
            parallel_state.initialize_model_parallel(
                self.tp_size, num_distributed_optimizer_instances=self.gemini.extra_dp_size
            )
        return self.gemini.expect_instances(super().groups())

    def _wrapper_config(self, model: nn.Module, shaped: bool) -> DistributedDataParallelConfig:
        return self.gemini._wrapper_config(model, shaped)

    def _optimizer_config(self) -> OptimizerConfig:
        return self.gemini._optimizer_config()

    def configure(
        self,
        model: nn.Module,
        optimizer: Any = None,
        criterion: Callable[..., Any] | None = None,
        dataloader: Any = None,
        lr_scheduler: Any = None,
    ) -> Boosted:
        """As HybridParallelPlugin's; the model is a GeminiModel. Collective over the world."""
        if MARK in vars(model):
            raise ValueError(
                f"a model of materialize() is made module by module, and cannot be cut over tp_size={self.tp_size} "
                "ranks before; boost it on the meta device, and call booster.load_model"
            )
        split, wrapped, *rest = super().configure(model, optimizer, criterion, dataloader, lr_scheduler)
        assert isinstance(split, HybridParallelModel), "HybridParallelPlugin has made it"
        boosted = SplitGeminiModel(split, outputs_fp32=self.gemini.force_outputs_fp32)
        if wrapped is not None and self.gemini.verbose and self.rank == 0:
            print(
                f"{self.gemini._title}, tp {self.tp_size}, {self.precision}:\n{boosted.module.describe()}", flush=True
            )
            wrapped.verbose = True
        return boosted, wrapped, *rest
