"""DPPluginBase: common base of plugins whose ranks all train the same model on different data."""

from __future__ import annotations

import functools
import inspect
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset

from core.booster.accelerator import device_of_group
from core.booster.lora import add_lora
from core.booster.plugin.adapters_in_optimizer import add_adapters
from core.booster.plugin.plugin_base import Plugin
from core.groups import agree

SAME_MODEL = "All ranks must build the same model"


class World(NamedTuple):
    """Rank, world size, and the device on which a rank trains."""

    rank: int
    size: int
    device: torch.device


_PLANNED: ContextVar[World | None] = ContextVar("the world that is planned", default=None)


@contextmanager
def planned_world(rank: int, size: int, device: torch.device) -> Iterator[None]:
    """Create plugins inside for a rank of a world that does not run. They can describe a run, but not start it."""
    token = _PLANNED.set(World(rank, size, device))
    try:
        yield
    finally:
        _PLANNED.reset(token)


class DPPluginBase(Plugin):
    """Base class of plugins in which every rank of the world is a data-parallel rank with its own device.

    Raises:
        RuntimeError: If torch.distributed is not initialized.
    """

    def __init__(self) -> None:
        self._planned = _PLANNED.get()
        if self._planned is not None:
            self.rank, self.world_size, _ = self._planned
            return
        if not (dist.is_available() and dist.is_initialized()):
            raise RuntimeError(
                f"{type(self).__name__} trains on the ranks of torch.distributed, which is not started; call "
                "torch.distributed.init_process_group() first (under torchrun, with 'nccl' on GPUs or 'gloo' on CPUs)"
            )
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()

    def supported_devices(self) -> list[str]:
        """Return torch's device types that have collectives."""
        return ["cpu", "cuda", "npu", "xpu"]

    def control_device(self) -> bool:
        """Return ``True``, because the device follows from the process group's collectives."""
        return True

    def device(self) -> torch.device:
        """Return the device of models. Raises RuntimeError if the plugin does not run on it."""
        device = device_of_group() if self._planned is None else self._planned.device
        if device.type not in self.supported_devices():
            raise RuntimeError(
                f"{type(self).__name__} does not run on {device.type!r}, only on {self.supported_devices()}; start "
                "torch.distributed with the backend of one of those"
            )
        return device

    def complete_optimizer(self, model: nn.Module, optimizer: Any) -> None:
        """Add adapters created after the optimizer, and check that the optimizer trains parameters of the model.

        Args:
            model (Module): The plain model.
            optimizer (Optimizer): The torch optimizer.

        Raises:
            ValueError: If a parameter is not the model's, so that no rank would reduce its gradient, or if the
                optimizer would train nothing.
        """
        add_adapters(model, optimizer)
        known = {id(param) for param in model.parameters()}
        for number, group in enumerate(optimizer.param_groups):
            for place, param in enumerate(group["params"]):
                if id(param) not in known:
                    raise ValueError(
                        f"{type(self).__name__}: parameter {place} (shape {list(param.shape)}) of the optimizer's "
                        f"group {number} is not a parameter of the model, so ranks would not share its gradient. Make "
                        "it part of the model's module, and make the optimizer after the model has its final parameters"
                    )

        params = [param for group in optimizer.param_groups for param in group["params"]]
        if not any(param.requires_grad for param in params):
            trained = [name for name, param in model.named_parameters() if param.requires_grad]
            others = f", and those that train, the first {trained[0]!r}, are not in it" if trained else ""
            raise ValueError(
                f"{type(self).__name__}: the optimizer's {len(params)} parameters are frozen in the model{others}; it "
                "would change nothing. Make it of the parameters that shall train, after the model has its final ones"
            )

    def agree(self, error: Exception | None, model: Any, optimizer: Any) -> None:
        """Raise on every rank if any rank rejects its arguments, or if the ranks' ``facts_of`` differ.

        This is a collective over the world.

        Args:
            error (Exception): Error that the Booster has found on this rank, or ``None``.
            model (Module): The plain model.
            optimizer (Optimizer, optional): The torch optimizer.

        Raises:
            ValueError: If facts differ, or this rank's arguments are rejected.
        """
        facts: list[str] = []
        if error is None:
            try:
                if optimizer is not None:
                    self.complete_optimizer(model, optimizer)
                facts = self.facts_of(model, optimizer)
            except ValueError as refusal:
                error = refusal
        agree.refuse(error, None, "boost")
        if facts:
            agree.same([("the model", dist.group.WORLD, facts)], kind=ValueError, advice=SAME_MODEL)

    def facts_of(self, model: nn.Module, optimizer: Any) -> list[str]:
        """Return lines that must be the same on all ranks. Does not communicate.

        Every rank returns lines, or none does. Subclasses raise ValueError for models that cannot be trained.

        Args:
            model (Module): The plain model.
            optimizer (Optimizer, optional): The torch optimizer.
        """
        return []

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
        """Create a dataloader over this rank's part of a dataset.

        Call its ``sampler.set_epoch(epoch)`` at the start of each epoch, or every epoch has the same order.

        Args:
            dataset (Dataset[Any]): The full dataset, with a length.
            batch_size (int): Number of samples per rank.
            shuffle (bool, optional): Shuffle the samples.
            seed (int, optional): Shuffle seed, the same on all ranks. Each worker's Python, NumPy and torch get a
                different seed from it.
            drop_last (bool, optional): Drop the last samples, instead of repeating some or making a smaller batch.
            pin_memory (bool, optional): As in torch's DataLoader.
            num_workers (int, optional): As in torch's DataLoader.
            distributed_sampler_cls: Class or function called as (dataset, num_replicas=, rank=,
                shuffle=), and with seed and drop_last if it accepts them. Defaults to torch's DistributedSampler.
            **kwargs: Other options of torch's DataLoader.

        Raises:
            TypeError: If the dataset is an IterableDataset, or a sampler is passed.
        """
        if isinstance(dataset, IterableDataset):
            raise TypeError(
                "prepare_dataloader cannot split an IterableDataset between ranks; let its __iter__ give rank r its "
                "part (torch.distributed.get_rank()), and make the DataLoader yourself"
            )
        for name in ("sampler", "batch_sampler"):
            if kwargs.get(name) is not None:
                raise TypeError(
                    f"prepare_dataloader makes the sampler; pass its class as distributed_sampler_cls rather than "
                    f"{name}"
                )
        rank, replicas = self.data_rank(), self.data_size()
        sampler_class = distributed_sampler_cls or DistributedSampler
        wanted = {"num_replicas": replicas, "rank": rank, "shuffle": shuffle}
        wanted |= _accepted(sampler_class, {"seed": seed, "drop_last": drop_last})
        seed_worker = functools.partial(
            _seed_worker, seed=seed + rank * num_workers, then=kwargs.pop("worker_init_fn", None)
        )
        return DataLoader(
            dataset,
            batch_size=batch_size,
            sampler=sampler_class(dataset, **wanted),
            worker_init_fn=seed_worker,
            drop_last=drop_last,
            pin_memory=pin_memory,
            num_workers=num_workers,
            **kwargs,
        )

    def prepare_train_dataloader(self, *args: Any, **kwargs: Any) -> DataLoader[Any]:
        """Call ``prepare_dataloader``. Some of ColossalAI's pages use this name."""
        return self.prepare_dataloader(*args, **kwargs)

    def data_rank(self) -> int:
        """Return the index of this rank's part of the data."""
        return self.rank

    def data_size(self) -> int:
        """Return the number of parts of the data."""
        return self.world_size

    def support_lora(self) -> bool:
        """Return ``True``, because adapters are ordinary parameters."""
        return True

    def enable_lora(
        self,
        model: nn.Module,
        pretrained_dir: str | None = None,
        lora_config: Any = None,
        bnb_quantization_config: Any = None,
    ) -> nn.Module:
        """Add LoRA adapters with peft. See ``Booster.enable_lora`` for the arguments."""
        return add_lora(model, pretrained_dir, lora_config, bnb_quantization_config)


def _accepted(function: Callable[..., Any], options: dict[str, Any]) -> dict[str, Any]:
    parameters = inspect.signature(function).parameters
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    return {name: value for name, value in options.items() if takes_any or name in parameters}


def _seed_worker(worker: int, *, seed: int, then: Callable[[int], None] | None) -> None:
    random.seed(seed + worker)
    np.random.seed((seed + worker) % 2**32)
    torch.manual_seed(seed + worker)
    if then is not None:
        then(worker)
