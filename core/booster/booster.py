"""Booster: takes a plain model, optimizer and loss, and wraps them for the chosen plugin and precision."""

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
    """Wraps the objects of a training loop for a plugin and a precision.

    A loop that is written once then runs in a single process, under data parallelism, under ZeRO or over pipeline
    stages, and switching between them only changes the plugin.

        booster = Booster(plugin=TorchDDPPlugin(), mixed_precision="bf16")
        model, optimizer, criterion, dataloader, lr_scheduler = booster.boost(
            model, optimizer, criterion, dataloader, lr_scheduler
        )
        for inputs, targets in dataloader:
            optimizer.zero_grad()
            booster.backward(criterion(model(inputs), targets), optimizer)
            optimizer.clip_grad_by_norm(1.0)
            optimizer.step()

    Every rank creates a Booster with the same arguments.

    Args:
        device (str | torch.device, optional): Device of the model. Defaults to the accelerator, or to the CPU if there
            is none. Ignored with a warning if the plugin controls the device.
        mixed_precision (MixedPrecision | str, optional): 'fp32', 'fp16', 'bf16', 'fp8' or a MixedPrecision. Ignored
            with a warning if the plugin controls the precision.
        plugin (Plugin, optional): Form of parallelism. Defaults to training in this process only.

    Raises:
        TypeError: If ``plugin`` or ``mixed_precision`` has a wrong type.
        ValueError: If this machine lacks the device, or the plugin does not support the device or the precision.
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

        Every rank must call it. Use the returned objects instead of the originals.

        Args:
            model (Module): The plain model.
            optimizer (Optimizer, optional): A torch optimizer, created with the model's parameters before this call.
            criterion (Callable[..., Any], optional): The loss function.
            dataloader (DataLoader[Any], optional): The loop's dataloader.
            lr_scheduler (LRScheduler, optional): A scheduler of ``optimizer``. If it was created before this call, it
                follows the wrapped optimizer.

        Returns:
            The wrapped (model, optimizer, criterion, dataloader, lr_scheduler). ``None`` stays ``None``.

        Raises:
            TypeError: If arguments are in another order.
            RuntimeError: If the model or the optimizer is already boosted.
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

        Use it instead of ``loss.backward()``, so that one loop works with and without loss scaling.

        Args:
            loss (Tensor): Scalar loss.
            optimizer (OptimizerWrapper): The boosted optimizer.
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
        """Run forward and backward of one batch through a pipeline. Every rank must call it.

            outputs = booster.execute_pipeline(iter(dataloader), model, criterion, optimizer)
            optimizer.step()

        Args:
            data_iter (Iterable[Any]): Iterator over batches.
            model (Module): The boosted model.
            criterion (Callable[[Any, Any], Any]): Function of (outputs, batch) that returns a microbatch's loss.
            optimizer (OptimizerWrapper, optional): The boosted optimizer, or ``None`` to run only the forward.
            return_loss (bool, optional): Return the loss.
            return_outputs (bool, optional): Return the outputs.

        Returns:
            A dict with keys 'loss' and 'outputs'.

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
        """Context manager in which backward accumulates gradients without reducing them.

        The first backward outside of it reduces the accumulated gradients.

        Args:
            model (Module, optional): The boosted model.
            optimizer (OptimizerWrapper, optional): The boosted optimizer.

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
        """Add LoRA adapters with peft. Call it before ``boost``.

        The optimizer may already exist, because ``boost`` adds the adapters to it.

        Args:
            model (Module): The plain model.
            pretrained_dir (str, optional): Directory of saved adapters. Defaults to new adapters.
            lora_config (peft.LoraConfig): Required without ``pretrained_dir``.
            bnb_quantization_config: Not supported; must be ``None``.
            quantize (bool, optional): Not supported; must be ``False``.

        Returns:
            The model with adapters.

        Raises:
            NotImplementedError: If quantized base weights are requested.
            RuntimeError: If the plugin does not support LoRA, or the model is already boosted.
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
        """Load a model's weights from a file or a directory. Every rank must call it.

        Checkpoints are independent of the plugin that wrote them, and files of Hugging Face models load as well.

        Args:
            model (Module): The boosted model.
            checkpoint (StrPath): Path of a file, or of a directory with shards, in torch's format or safetensors.
            strict (bool, optional): Require the same names in the checkpoint and in the model.
            low_cpu_mem_mode (bool, optional): Read one file at a time.
            num_threads (int, optional): Number of threads that read files if ``low_cpu_mem_mode`` is ``False``.

        Raises:
            ValueError: On every rank, if names or shapes do not match.
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
        """Save a model's weights under the plain module's names. Every rank must call it.

        Args:
            model (Module): The boosted model.
            checkpoint (StrPath): Path of a file, or of a directory if ``shard`` is ``True``.
            shard (bool): Write a directory with several files, an index, and the config of a Hugging Face model. For a
                model with adapters, the directory only gets the adapters, as peft's ``save_pretrained`` writes them.
            gather_dtensor (bool): Write full tensors. Plugins that shard parameters reject ``False``.
            prefix (str): Prefix of the file names in the directory.
            size_per_shard (float): File size in MiB.
            use_safetensors (bool): Write safetensors instead of using torch.save.
            use_async (bool): Return once the weights are copied, and write files in the background. They are complete
                after ``checkpoint_io.synchronize``, the next save or the next load.
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
        """Load an optimizer's state from a file or a directory. Every rank must call it.

        Args:
            optimizer (OptimizerWrapper): The boosted optimizer.
            checkpoint (StrPath): Path of a file, or of a directory with shards. Accepts a saved state dict of a torch
                optimizer too.
            low_cpu_mem_mode (bool, optional): Read one file at a time.
            num_threads (int, optional): Number of threads that read files if ``low_cpu_mem_mode`` is ``False``.

        Raises:
            ValueError: On every rank, if parameters or groups do not match.
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
        """Save an optimizer's state, parameter groups and loss scale. Every rank must call it.

        Args:
            optimizer (OptimizerWrapper): The boosted optimizer.
            checkpoint (StrPath): Path of a file, or of a directory if ``shard`` is ``True``.
            shard (bool, optional): Write a directory with several files and an index.
            gather_dtensor (bool, optional): Write full tensors. Plugins that shard parameters reject ``False``.
            prefix (str, optional): Prefix of the file names in the directory.
            size_per_shard (float, optional): File size in MiB.
            use_async (bool, optional): Return once the state is copied, and write files in the background.
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
        """Save a scheduler's state to a file. Every rank must call it.

        Args:
            lr_scheduler (LRScheduler): The scheduler.
            checkpoint (StrPath): Path of the file.
        """
        self.checkpoint_io.save_lr_scheduler(lr_scheduler, checkpoint)

    def load_lr_scheduler(self, lr_scheduler: Any, checkpoint: StrPath) -> None:
        """Load a scheduler's state from a file. Every rank must call it.

        Args:
            lr_scheduler (LRScheduler): The scheduler.
            checkpoint (StrPath): Path of the file.
        """
        self.checkpoint_io.load_lr_scheduler(lr_scheduler, checkpoint)

    def save_lora_as_pretrained(self, model: nn.Module, checkpoint: StrPath, use_safetensors: bool = False) -> None:
        """Save a model's adapters to a directory that peft can load. Every rank must call it.

        Args:
            model (Module): A boosted model with adapters from ``enable_lora``.
            checkpoint (StrPath): Path of the directory.
            use_safetensors (bool, optional): Write safetensors instead of using torch.save.
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
