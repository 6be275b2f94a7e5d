"""Booster: plain model, optimizer and loss in, wrapped for the chosen plugin and precision out."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from core.booster.accelerator import Accelerator, default_device
from core.booster.checkpoint_io import GeneralCheckpointIO
from core.booster.lora import check_config, refuse_quantized
from core.booster.mixed_precision import MixedPrecision, mixed_precision_factory
from core.booster.mixed_precision.mixed_precision_base import as_wrapped, as_wrapped_optimizer
from core.booster.plugin import PipelinePluginBase, Plugin
from core.interface import ModelWrapper, OptimizerWrapper
from core.interface.whole import about_to_change
from core.watch.warn_user import warn_user

StrPath = str | os.PathLike[str]


class Booster:
    """One training loop for every plugin.

    A loop written once runs on one process, under data parallelism, ZeRO or a pipeline. Only the plugin changes.

        booster = Booster(plugin=TorchDDPPlugin(), mixed_precision="bf16")
        model, optimizer, criterion, dataloader, lr_scheduler = booster.boost(
            model, optimizer, criterion, dataloader, lr_scheduler
        )
        for inputs, targets in dataloader:
            optimizer.zero_grad()
            booster.backward(criterion(model(inputs), targets), optimizer)
            optimizer.clip_grad_by_norm(1.0)
            optimizer.step()

    Every rank creates its own Booster, with the same arguments.

    Args:
        device: Device of the model; None for the accelerator, or the CPU if there is none. Ignored with a warning if
            the plugin decides the device.
        mixed_precision: 'fp32', 'fp16', 'bf16', 'fp8' or a MixedPrecision. Ignored with a warning if the
            plugin decides the precision.
        plugin: The way of training; None for training on this process alone.

    Raises:
        TypeError: If `plugin` or `mixed_precision` has a wrong type.
        ValueError: If this machine does not have the device, or the plugin does not support the device or the
            precision.
    """

    def __init__(
        self,
        device: str | torch.device | None = None,
        mixed_precision: MixedPrecision | str | None = None,
        plugin: Plugin | None = None,
    ) -> None:
        if plugin is not None and not isinstance(plugin, Plugin):
            raise TypeError(f"plugin must be a Plugin, an object of it, and is {plugin!r}")
        self.plugin = plugin
        self.accelerator: Accelerator | None = None
        if plugin is None or not plugin.control_device():
            self.accelerator = Accelerator(default_device() if device is None else device)
            if plugin is not None and self.accelerator.device.type not in plugin.supported_devices():
                raise ValueError(
                    f"{type(plugin).__name__} does not run on {self.accelerator.device.type!r}; pass a device of "
                    f"{plugin.supported_devices()}"
                )
        elif device is not None:
            warn_user(f"{type(plugin).__name__} decides the device, so device={device!r} is ignored")
        self.mixed_precision: MixedPrecision | None = None
        if plugin is not None and plugin.control_precision():
            if mixed_precision is not None:
                warn_user(
                    f"{type(plugin).__name__} decides the precision, so mixed_precision={mixed_precision!r} is ignored"
                )
        elif isinstance(mixed_precision, str):
            if plugin is not None and mixed_precision not in plugin.supported_precisions():
                raise ValueError(
                    f"{type(plugin).__name__} does not train in {mixed_precision!r}, only in "
                    f"{plugin.supported_precisions()}"
                )
            self.mixed_precision = mixed_precision_factory(mixed_precision)
        elif isinstance(mixed_precision, MixedPrecision):
            self.mixed_precision = mixed_precision
        elif mixed_precision is not None:
            raise TypeError(f"mixed_precision must be a name or a MixedPrecision, and is {mixed_precision!r}")
        own_io = plugin is not None and plugin.control_checkpoint_io()
        self.checkpoint_io = plugin.get_checkpoint_io() if plugin is not None and own_io else GeneralCheckpointIO()

    # -- training -------------------------------------------------------------------------------------------------

    def boost(
        self,
        model: nn.Module,
        optimizer: Any = None,
        criterion: Callable[..., Any] | None = None,
        dataloader: DataLoader[Any] | None = None,
        lr_scheduler: Any = None,
    ) -> tuple[Any, Any, Any, Any, Any]:
        """Wrap the objects of a training loop for the plugin and the precision.

        Collective: every rank must call it.

        Args:
            model: The plain model.
            optimizer: A torch optimizer, created with the model's parameters before this call.
            criterion: The loss function.
            dataloader: The loop's dataloader.
            lr_scheduler: A scheduler of `optimizer`. A scheduler created before this call follows the wrapped
                optimizer.

        Returns:
            (model, optimizer, criterion, dataloader, lr_scheduler), wrapped; None stays None.

        Raises:
            TypeError: If arguments are in another order.
            RuntimeError: If the model or the optimizer is boosted already.
        """
        error: Exception | None = None
        try:
            _check_boosted(model, optimizer, criterion, dataloader)
        except (TypeError, RuntimeError) as refusal:
            error = refusal
        if self.plugin is not None:
            self.plugin.agree(error, model, optimizer)
        elif error is not None:
            raise error
        about_to_change(model)
        if self.plugin is not None:
            model, optimizer, criterion, dataloader, lr_scheduler = self.plugin.configure(
                model, optimizer, criterion, dataloader, lr_scheduler
            )
        if self.accelerator is not None:
            model = self.accelerator.configure_model(model)
        if self.mixed_precision is not None:
            model, optimizer, criterion = self.mixed_precision.configure(model, optimizer, criterion)
        if self.plugin is None:
            model, optimizer = as_wrapped(model), as_wrapped_optimizer(optimizer)
        return model, optimizer, criterion, dataloader, lr_scheduler

    def backward(self, loss: torch.Tensor, optimizer: OptimizerWrapper) -> None:
        """Accumulate the gradient of a loss, with the loss scale or reduction that the optimizer needs.

        Args:
            loss: The loss, a scalar.
            optimizer: The boosted optimizer.
        """
        if self.plugin is None:
            optimizer.backward(loss)
        else:
            self.plugin.backward(loss, optimizer)

    def execute_pipeline(
        self,
        data_iter: Iterable[Any],
        model: nn.Module,
        criterion: Callable[[Any, Any], Any],
        optimizer: OptimizerWrapper | None = None,
        return_loss: bool = True,
        return_outputs: bool = False,
    ) -> dict[str, Any]:
        """Run forward and backward of one batch through a pipeline.

        Collective: every rank must call it.

        Args:
            data_iter: Iterator over batches.
            model: The boosted model.
            criterion: Function of (outputs, batch) that returns a microbatch's loss.
            optimizer: The boosted optimizer; None for a forward pass alone.
            return_loss: True to return the loss.
            return_outputs: True to return the outputs.

        Returns:
            {'loss': ..., 'outputs': ...}

        Raises:
            RuntimeError: If the plugin has no pipeline.
        """
        if not isinstance(self.plugin, PipelinePluginBase):
            raise RuntimeError(
                f"The plugin {self._plugin_name()} does not support pipeline. Call the model and booster.backward, or "
                "use a plugin with pipeline parallelism"
            )
        return self.plugin.execute_pipeline(data_iter, model, criterion, optimizer, return_loss, return_outputs)

    def no_sync(
        self, model: nn.Module | None = None, optimizer: OptimizerWrapper | None = None
    ) -> AbstractContextManager[None]:
        """Return a context in which backward adds to gradients without reducing them.

        The first backward outside of it reduces the sum.

        Args:
            model: The boosted model.
            optimizer: The boosted optimizer.

        Raises:
            RuntimeError: If the plugin does not support it.
        """
        if self.plugin is None or not self.plugin.support_no_sync():
            raise RuntimeError(
                f"The plugin {self._plugin_name()} does not support no_sync. Call backward for every microbatch; the "
                "sum is the same, only communication is not saved"
            )
        return self.plugin.no_sync(model, optimizer)

    def enable_lora(
        self,
        model: nn.Module,
        pretrained_dir: str | None = None,
        lora_config: Any = None,
        bnb_quantization_config: Any = None,
        quantize: bool = False,
    ) -> nn.Module:
        """Add LoRA adapters with peft. Call it before `boost`.

        An optimizer of the model may already exist: `boost` adds the adapters to it.

        Args:
            model: The plain model.
            pretrained_dir: Directory of saved adapters; None for new ones.
            lora_config: A peft.LoraConfig; required without `pretrained_dir`.
            bnb_quantization_config: Not supported; must be None.
            quantize: Not supported; must be False.

        Returns:
            The model with adapters.

        Raises:
            NotImplementedError: If quantized base weights are requested.
            RuntimeError: If the plugin does not support LoRA, or the model is boosted.
        """
        refuse_quantized(quantize or bnb_quantization_config is not None)
        if self.plugin is None or not self.plugin.support_lora():
            raise RuntimeError(f"The plugin {self._plugin_name()} does not support LoRA; use TorchDDPPlugin")
        if isinstance(model, ModelWrapper):
            raise RuntimeError("enable_lora comes before boost, and this model is boosted")
        if pretrained_dir is None:
            check_config(lora_config)
        return self.plugin.enable_lora(model, pretrained_dir, lora_config, bnb_quantization_config)

    # -- checkpoints ----------------------------------------------------------------------------------------------

    def load_model(
        self,
        model: nn.Module,
        checkpoint: StrPath,
        strict: bool = True,
        low_cpu_mem_mode: bool = True,
        num_threads: int = 1,
    ) -> None:
        """Load a model's weights from a file or a directory.

        Collective: every rank must call it.

        Args:
            model: The boosted model.
            checkpoint: Path of a file, or of a directory with shards; torch's format or safetensors.
            strict: True if the checkpoint and the model must have the same names.
            low_cpu_mem_mode: True to read one file at a time.
            num_threads: Threads that read files if `low_cpu_mem_mode` is False.

        Raises:
            ValueError: On every rank, if names or shapes do not fit.
        """
        self.checkpoint_io.load_model(model, checkpoint, strict, low_cpu_mem_mode, num_threads)

    def save_model(
        self,
        model: nn.Module,
        checkpoint: StrPath,
        shard: bool = False,
        gather_dtensor: bool = True,
        prefix: str | None = None,
        size_per_shard: float = 1024,
        use_safetensors: bool = False,
        use_async: bool = False,
    ) -> None:
        """Save a model's weights under the plain module's names.

        Collective: every rank must call it.

        Args:
            model: The boosted model.
            checkpoint: Path of a file, or of a directory if `shard` is True.
            shard: True to write a directory with several files, an index, and the config of a Hugging Face model. For a
                model with adapters, the directory gets the adapters alone, as peft's `save_pretrained` writes them.
            gather_dtensor: True to write full tensors. Plugins that shard parameters reject False.
            prefix: Text before the names of the directory's files.
            size_per_shard: Size of a file, in MiB.
            use_safetensors: True for safetensors, False for torch.save.
            use_async: True to return after the weights are copied, and to write files in the background. They are
                complete after `checkpoint_io.synchronize`, the next save or the next load.
        """
        self.checkpoint_io.save_model(
            model,
            checkpoint,
            shard,
            gather_dtensor,
            prefix=prefix,
            size_per_shard=size_per_shard,
            use_safetensors=use_safetensors,
            use_async=use_async,
        )

    def load_optimizer(
        self, optimizer: Any, checkpoint: StrPath, low_cpu_mem_mode: bool = True, num_threads: int = 1
    ) -> None:
        """Load an optimizer's state from a file or a directory.

        Collective: every rank must call it.

        Args:
            optimizer: The boosted optimizer.
            checkpoint: Path of a file, or of a directory with shards. Also the state_dict of a torch optimizer.
            low_cpu_mem_mode: True to read one file at a time.
            num_threads: Threads that read files if `low_cpu_mem_mode` is False.

        Raises:
            ValueError: On every rank, if parameters or groups do not fit.
        """
        self.checkpoint_io.load_optimizer(
            optimizer, checkpoint, low_cpu_mem_mode=low_cpu_mem_mode, num_threads=num_threads
        )

    def save_optimizer(
        self,
        optimizer: Any,
        checkpoint: StrPath,
        shard: bool = False,
        gather_dtensor: bool = True,
        prefix: str | None = None,
        size_per_shard: float = 1024,
        use_async: bool = False,
    ) -> None:
        """Save an optimizer's state, parameter groups and loss scale.

        Collective: every rank must call it.

        Args:
            optimizer: The boosted optimizer.
            checkpoint: Path of a file, or of a directory if `shard` is True.
            shard: True to write a directory with several files and an index.
            gather_dtensor: True to write full tensors. Plugins that shard parameters reject False.
            prefix: Text before the names of the directory's files.
            size_per_shard: Size of a file, in MiB.
            use_async: True to return after the state is copied, and to write files in the background.
        """
        self.checkpoint_io.save_optimizer(
            optimizer,
            checkpoint,
            shard,
            gather_dtensor,
            prefix=prefix,
            size_per_shard=size_per_shard,
            use_async=use_async,
        )

    def save_lr_scheduler(self, lr_scheduler: Any, checkpoint: StrPath) -> None:
        """Save a scheduler's state to a file. Collective: every rank must call it.

        Args:
            lr_scheduler: The scheduler.
            checkpoint: Path of the file.
        """
        self.checkpoint_io.save_lr_scheduler(lr_scheduler, checkpoint)

    def load_lr_scheduler(self, lr_scheduler: Any, checkpoint: StrPath) -> None:
        """Load a scheduler's state from a file. Collective: every rank must call it.

        Args:
            lr_scheduler: The scheduler.
            checkpoint: Path of the file.
        """
        self.checkpoint_io.load_lr_scheduler(lr_scheduler, checkpoint)

    def save_lora_as_pretrained(self, model: nn.Module, checkpoint: StrPath, use_safetensors: bool = False) -> None:
        """Save the adapters of a model to a directory that peft can load. Collective: every rank must call it.

        Args:
            model: A boosted model with adapters of `enable_lora`.
            checkpoint: Path of the directory.
            use_safetensors: True for safetensors, False for torch.save.
        """
        self.checkpoint_io.save_lora_as_pretrained(model, checkpoint, use_safetensors)

    def _plugin_name(self) -> str:
        return "None" if self.plugin is None else type(self.plugin).__name__


def _check_boosted(model: Any, optimizer: Any, criterion: Any, dataloader: Any) -> None:
    """Raise for arguments in another order, as on some of ColossalAI's pages, and for boosted objects."""
    order = "boost(model, optimizer, criterion, dataloader, lr_scheduler) returns five values in this order"
    if not isinstance(model, nn.Module):
        raise TypeError(f"boost got a {type(model).__name__} for the model; {order}")
    if isinstance(model, ModelWrapper) or isinstance(optimizer, OptimizerWrapper):
        raise RuntimeError("boost got a model or an optimizer that is boosted already; boost the plain ones, once")
    if isinstance(criterion, DataLoader) or (criterion is not None and not callable(criterion)):
        raise TypeError(f"boost got a {type(criterion).__name__} for the criterion; {order}")
    if isinstance(dataloader, nn.Module):
        raise TypeError(f"boost got a {type(dataloader).__name__} for the dataloader; {order}")
    if optimizer is not None and not hasattr(optimizer, "param_groups"):
        raise TypeError(f"boost got a {type(optimizer).__name__} for the optimizer; {order}")
