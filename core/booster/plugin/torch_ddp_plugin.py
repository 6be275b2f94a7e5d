"""TorchDDPPlugin: torch's DistributedDataParallel. Every rank keeps the full model, and gradients are averaged."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from core.booster.checkpoint_io import TorchDDPCheckpointIO
from core.booster.plugin.dp_plugin_base import DPPluginBase
from core.booster.plugin.label_mean import LabelMeanModel
from core.booster.plugin.one_backward import OneBackward
from core.booster.plugin.plugin_base import Boosted
from core.distributed.wire.fp8_communication import all_reduce as fp8_all_reduce
from core.interface import OptimizerWrapper
from core.watch.warn_user import warn_user

TorchDDP = nn.parallel.DistributedDataParallel
BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
OPTIONS = (
    *("broadcast_buffers", "bucket_cap_mb", "find_unused_parameters", "check_reduction", "gradient_as_bucket_view"),
    "static_graph",
)


class TorchDDPModel(LabelMeanModel):
    """Boosted model whose ``module`` is torch's DistributedDataParallel."""

    def __init__(self, module: nn.parallel.DistributedDataParallel) -> None:
        super().__init__(module)
        self.data_groups = [module.process_group]


class TorchDDPPlugin(DPPluginBase):
    """Plugin for data parallelism with torch's DistributedDataParallel.

    Each rank keeps the full model, so use it for models that fit on one device with their optimizer state. The options
    are arguments of torch.nn.parallel.DistributedDataParallel.

    Args:
        broadcast_buffers: Broadcast rank 0's buffers to all ranks at each forward.
        bucket_cap_mb: Gradient bucket size, in MiB.
        find_unused_parameters: Allow parameters that a forward does not use.
        check_reduction: No effect; accepted with a warning, because torch's reducer always checks.
        gradient_as_bucket_view: Make gradients views of buckets, which saves a copy.
        static_graph: True if the graph is the same in all iterations.
        fp8_communication: Send gradients in 8 bits, with one scale per 256 elements.
            core/distributed/wire/fp8_communication.py has the rounding errors.

    Raises:
        ValueError: If ``bucket_cap_mb`` is not positive.
        RuntimeError: If torch.distributed is not initialized.
    """

    def __init__(
        self,
        broadcast_buffers: bool = True,
        bucket_cap_mb: int = 25,
        find_unused_parameters: bool = False,
        check_reduction: bool = False,
        gradient_as_bucket_view: bool = False,
        static_graph: bool = False,
        fp8_communication: bool = False,
    ) -> None:
        given = locals()
        super().__init__()
        if bucket_cap_mb <= 0:
            raise ValueError(
                f"bucket_cap_mb is {bucket_cap_mb}; a bucket needs a positive size (torch's default is 25)"
            )
        self.ddp_kwargs = {name: given[name] for name in OPTIONS}
        self.fp8_communication = fp8_communication

    def supported_precisions(self) -> list[str]:
        """Return all precisions that the Booster knows."""
        return ["fp32", "fp16", "bf16", "fp8"]

    def control_precision(self) -> bool:
        """Return ``False``, because the Booster's ``mixed_precision`` applies."""
        return False

    def configure(
        self,
        model: nn.Module,
        optimizer: Any = None,
        criterion: Callable[..., Any] | None = None,
        dataloader: Any = None,
        lr_scheduler: Any = None,
    ) -> Boosted:
        """Move the model to the device, synchronize its batch norms, and wrap it. See ``Plugin.configure``."""
        device = self.device()
        in_8_bits = (n for n, p in model.named_parameters() if p.is_floating_point() and p.dtype.itemsize == 1)
        first = next(in_8_bits, None)
        if first is not None:
            raise ValueError(
                f"parameter {first!r} is of 8-bit floats, which torch's DDP cannot broadcast; use LowLevelZeroPlugin "
                "or HybridParallelPlugin"
            )
        model = with_common_batch_norm(model.to(device), self.world_size)
        options = dict(self.ddp_kwargs)
        if options["broadcast_buffers"]:
            del options["broadcast_buffers"]  # torch's default; newer versions warn if it is passed
        with warnings.catch_warnings():
            # The plugin's users know the two arguments by these names.
            warnings.filterwarnings("ignore", message=".*`broadcast_buffers` is deprecated")
            warnings.filterwarnings("ignore", message=".*`check_reduction` argument")
            ddp = TorchDDP(model, **options)
        if self.fp8_communication:
            # torch reads the hook's annotations, which are strings here; a lambda has no annotations.
            ddp.register_comm_hook(ddp.process_group, lambda group, bucket: average_in_fp8(group, bucket))
        OneBackward(ddp)
        boosted = TorchDDPModel(ddp)
        if optimizer is not None and not isinstance(optimizer, OptimizerWrapper):
            optimizer = OptimizerWrapper(optimizer)
            optimizer.name_parameters(model)
        return boosted, optimizer, criterion, dataloader, lr_scheduler

    def control_checkpoint_io(self) -> bool:
        """Return ``True``, because only one rank writes."""
        return True

    def get_checkpoint_io(self) -> TorchDDPCheckpointIO:
        """Return a CheckpointIO in which one rank writes and all ranks read."""
        return TorchDDPCheckpointIO()

    def support_no_sync(self) -> bool:
        """Return ``True``, because torch's wrapper has no_sync."""
        return True

    def no_sync(self, model: nn.Module, optimizer: Any = None) -> AbstractContextManager[None]:
        """Return a context manager that disables gradient reduction in forward and backward, as torch's ``no_sync``.

        Args:
            model (Module): The boosted model, which may have been wrapped further.
            optimizer: Ignored.

        Raises:
            ValueError: If the plugin has not boosted the model.
        """
        for module in () if model is None else model.modules():
            if isinstance(module, TorchDDP):
                context: AbstractContextManager[None] = module.no_sync()
                return context
        raise ValueError(
            f"no_sync got a {type(model).__name__} that TorchDDPPlugin has not boosted; pass boost's model"
        )


def average_in_fp8(group: dist.ProcessGroup, bucket: Any) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket of gradients in 8 bits, as a communication hook of torch's DDP.

    It blocks and returns a completed future, because collectives started from a future's callback could begin in a
    different order on another rank.
    """
    gradients = bucket.buffer()
    fp8_all_reduce(gradients, group, mean=True)
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    done.set_result(gradients)
    return done


def with_common_batch_norm(model: nn.Module, world_size: int) -> nn.Module:
    """Convert batch norms to SyncBatchNorm. On CPUs, where torch lacks it, warn that ranks keep separate statistics."""
    if not any(isinstance(module, BATCH_NORMS) for module in model.modules()):
        return model
    if next(model.parameters()).device.type == "cpu":
        if world_size > 1:
            warn_user(
                "torch has no SyncBatchNorm for CPUs, so each rank normalizes by the statistics of its own batch, "
                "unlike on GPUs; use a norm without batch statistics where that matters"
            )
        return model
    return nn.SyncBatchNorm.convert_sync_batchnorm(model)
