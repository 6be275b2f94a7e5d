"""Plugin: what the Booster asks of a way of training. Derive from it to add one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

if TYPE_CHECKING:
    from core.booster.checkpoint_io import CheckpointIO
    from core.interface import OptimizerWrapper

Boosted = tuple[nn.Module, Any, Callable[..., Any] | None, Any, Any]


class Plugin(ABC):
    """A way of training: how a model is wrapped, where it lies, how its gradients meet, how it is saved.

    Methods without a body must be written. The others answer "no", by the plugin's name, until they are.
    """

    @abstractmethod
    def supported_devices(self) -> list[str]:
        """Device types it runs on: 'cpu', 'cuda', ..."""

    @abstractmethod
    def supported_precisions(self) -> list[str]:
        """Names of precisions it runs in."""

    @abstractmethod
    def control_precision(self) -> bool:
        """Does it decide the precision itself? Then the Booster's `mixed_precision` is ignored, with a warning."""

    @abstractmethod
    def control_device(self) -> bool:
        """Does it move the model itself? Then the Booster's `device` is ignored, with a warning."""

    @abstractmethod
    def configure(
        self,
        model: nn.Module,
        optimizer: Any = None,
        criterion: Callable[..., Any] | None = None,
        dataloader: Any = None,
        lr_scheduler: Any = None,
    ) -> Boosted:
        """Wrap what `boost` was given. Returns the same five; what was None stays None. Every rank calls it."""

    @abstractmethod
    def prepare_dataloader(
        self,
        dataset: Dataset[Any],
        batch_size: int,
        shuffle: bool = False,
        seed: int = 1024,
        drop_last: bool = False,
        pin_memory: bool = False,
        num_workers: int = 0,
        distributed_sampler_cls: Any = None,
        **kwargs: Any,
    ) -> DataLoader[Any]:
        """A loader that gives this rank its part of a dataset."""

    def agree(self, error: Exception | None, model: Any, optimizer: Any) -> None:
        """Before `configure`, with what `boost` was given: raise where the arguments are refused on this rank.

        error: what the Booster has found already. A plugin of several ranks raises on all of them, or the others would
        wait in the collectives of `configure` for a rank that has left.
        """
        if error is not None:
            raise error

    def control_checkpoint_io(self) -> bool:
        """Does it save and load itself, with `get_checkpoint_io`? Otherwise plain files are written."""
        return False

    def get_checkpoint_io(self) -> CheckpointIO:
        """Checkpoint IO that saves and loads models of this plugin."""
        from core.booster.checkpoint_io import GeneralCheckpointIO

        return GeneralCheckpointIO()

    def support_no_sync(self) -> bool:
        """True if the reduction of gradients can be postponed."""
        return False

    def no_sync(self, model: nn.Module, optimizer: Any = None) -> AbstractContextManager[None]:
        """Inside, backward adds to this rank's gradients without reducing them."""
        raise NotImplementedError(f"{type(self).__name__} does not support no_sync; accumulate with reductions instead")

    def support_lora(self) -> bool:
        """True if it trains models with LoRA adapters."""
        return False

    def enable_lora(
        self,
        model: nn.Module,
        pretrained_dir: str | None = None,
        lora_config: Any = None,
        bnb_quantization_config: Any = None,
    ) -> nn.Module:
        """The model with LoRA adapters, new or from a directory. Called before `configure`."""
        raise NotImplementedError(f"{type(self).__name__} does not support LoRA; use TorchDDPPlugin")

    def backward(self, loss: torch.Tensor, optimizer: OptimizerWrapper) -> None:
        """Accumulate the gradient of a loss as the optimizer needs it."""
        optimizer.backward(loss)


class PipelinePluginBase(Plugin):
    """A plugin that runs pipeline schedules."""

    @abstractmethod
    def execute_pipeline(
        self,
        data_iter: Iterable[Any],
        model: nn.Module,
        criterion: Callable[[Any, Any], Any],
        optimizer: Any = None,
        return_loss: bool = True,
        return_outputs: bool = False,
    ) -> dict[str, Any]:
        """Forward and backward of one batch through all stages. Returns {'loss': ..., 'outputs': ...}."""
