"""Plugin: the interface between the Booster and a form of parallelism. Derive from it to add one."""

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
    """Base class of plugins, which decide how a model is wrapped, placed and saved, and how its gradients are reduced.

    Abstract methods must be implemented. The others raise an error with the plugin's name until they are overridden.
    """

    @abstractmethod
    def supported_devices(self) -> list[str]:
        """Return the device types that the plugin runs on, such as 'cpu' and 'cuda'."""

    @abstractmethod
    def supported_precisions(self) -> list[str]:
        """Return the names of the precisions that the plugin supports."""

    @abstractmethod
    def control_precision(self) -> bool:
        """Return ``True`` if the plugin controls the precision, so that the Booster's ``mixed_precision`` is
        ignored.
        """

    @abstractmethod
    def control_device(self) -> bool:
        """Return ``True`` if the plugin moves the model to its device, so that the Booster's ``device`` is ignored."""

    @abstractmethod
    def configure(
        self,
        model: nn.Module,
        optimizer: Any = None,
        criterion: Callable[..., Any] | None = None,
        dataloader: Any = None,
        lr_scheduler: Any = None,
    ) -> Boosted:
        """Wrap the objects of a training loop. Every rank calls it. ``None`` stays ``None``.

        Args:
            model (Module): The plain model.
            optimizer (Optimizer, optional): A torch optimizer.
            criterion (Callable[..., Any], optional): The loss function.
            dataloader (DataLoader, optional): The loop's dataloader.
            lr_scheduler (LRScheduler, optional): A scheduler of the optimizer.

        Returns:
            (model, optimizer, criterion, dataloader, lr_scheduler)
        """

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
        """Create a dataloader over this rank's part of a dataset. See ``DPPluginBase.prepare_dataloader``."""

    def agree(self, error: Exception | None, model: Any, optimizer: Any) -> None:
        """Check the arguments of ``boost`` before ``configure``, and raise if they are rejected on this rank.

        A plugin with several ranks must raise on all of them. Otherwise the others would wait in the collectives of
        ``configure`` for a rank that has left.

        Args:
            error (Exception): Error that the Booster has found on this rank, or ``None``.
            model (Module): The plain model.
            optimizer (Optimizer, optional): The torch optimizer.
        """
        if error is not None:
            raise error

    def control_checkpoint_io(self) -> bool:
        """Return ``True`` if the plugin saves and loads with ``get_checkpoint_io``. Otherwise plain files are
        written.
        """
        return False

    def get_checkpoint_io(self) -> CheckpointIO:
        """Return the CheckpointIO that saves and loads this plugin's models."""
        from core.booster.checkpoint_io import GeneralCheckpointIO

        return GeneralCheckpointIO()

    def support_no_sync(self) -> bool:
        """Return ``True`` if gradient reduction can be postponed."""
        return False

    def no_sync(self, model: nn.Module, optimizer: Any = None) -> AbstractContextManager[None]:
        """Context manager in which backward accumulates this rank's gradients without reducing them.

        Args:
            model (Module): The boosted model.
            optimizer (OptimizerWrapper, optional): The boosted optimizer.
        """
        raise NotImplementedError(f"{type(self).__name__} does not support no_sync; accumulate with reductions instead")

    def support_lora(self) -> bool:
        """Return ``True`` if the plugin trains models with LoRA adapters."""
        return False

    def enable_lora(
        self,
        model: nn.Module,
        pretrained_dir: str | None = None,
        lora_config: Any = None,
        bnb_quantization_config: Any = None,
    ) -> nn.Module:
        """Add LoRA adapters to a model, either new ones or saved ones. Called before ``configure``.

        Args:
            model (Module): The plain model.
            pretrained_dir (str, optional): Directory of saved adapters. Defaults to new adapters.
            lora_config: A peft.LoraConfig.
            bnb_quantization_config: Not supported by the plugins here.
        """
        raise NotImplementedError(f"{type(self).__name__} does not support LoRA; use TorchDDPPlugin")

    def backward(self, loss: torch.Tensor, optimizer: OptimizerWrapper) -> None:
        """Accumulate the gradient of a loss as the optimizer needs it.

        Args:
            loss (Tensor): The loss.
            optimizer (OptimizerWrapper): The boosted optimizer.
        """
        optimizer.backward(loss)


class PipelinePluginBase(Plugin):
    """Base class of plugins that run pipeline schedules."""

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
        """Run forward and backward of one batch through all stages. See ``Booster.execute_pipeline`` for the
        arguments.
        """
