"""CheckpointIO: what the Booster asks of a plugin's saving and loading."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from core.checkpoint.weights.index import TORCH_SUFFIXES, find_checkpoint, is_index
from core.checkpoint.weights.one_file import SAFE_SUFFIX

StrPath = str | os.PathLike[str]


class CheckpointIO(ABC):
    """Saves and loads models, optimizers and schedulers. The public methods distinguish whole from sharded.

    Every rank calls each method, with the same arguments; files lie where all ranks can read them.
    """

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
        """Write a model's weights under the names of the plain module.

        checkpoint: a file; with `shard` a directory, which gets files of about `size_per_shard` MiB, an index, and the
        config of a Hugging Face model. prefix: before the names of these files. use_async: return as soon as the
        weights are copied; files are complete after `synchronize`, the next save or the next load.
        """
        path = self.target_of(
            checkpoint,
            SaveRequest(model, shard, gather_dtensor, prefix, size_per_shard, use_safetensors, optimizer=False),
        )
        if shard:
            self.save_sharded_model(model, path, gather_dtensor, prefix, size_per_shard, use_safetensors, use_async)
        else:
            self.save_unsharded_model(model, path, gather_dtensor, use_safetensors, use_async)

    def load_model(
        self,
        model: nn.Module,
        checkpoint: StrPath,
        strict: bool = True,
        low_cpu_mem_mode: bool = True,
        num_threads: int = 1,
    ) -> nn.Module:
        """Read a model's weights, whole or sharded, torch's or safetensors; `checkpoint` is a file or a directory.

        strict: names must be the same on both sides. low_cpu_mem_mode: one file at a time; otherwise files are read
        by `num_threads` threads. Returns the model.
        """
        self.synchronize()
        path = self.find(checkpoint)
        if is_index(path):
            self.load_sharded_model(model, path, strict, low_cpu_mem_mode, num_threads)
        else:
            self.load_unsharded_model(model, path, strict)
        return model

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
        """Write an optimizer's state, parameter groups and loss scale. Arguments as for `save_model`."""
        path = self.target_of(
            checkpoint, SaveRequest(optimizer, shard, gather_dtensor, prefix, size_per_shard, False, optimizer=True)
        )
        if shard:
            self.save_sharded_optimizer(optimizer, path, gather_dtensor, prefix, size_per_shard, use_async)
        else:
            self.save_unsharded_optimizer(optimizer, path, gather_dtensor, use_async)

    def load_optimizer(
        self,
        optimizer: Any,
        checkpoint: StrPath,
        prefix: str | None = None,
        low_cpu_mem_mode: bool = True,
        num_threads: int = 1,
    ) -> None:
        """Read an optimizer's state; options of the groups (lr, ...) become those that were saved."""
        self.synchronize()
        path = self.find(checkpoint, optimizer=True, prefix=prefix)
        if is_index(path):
            self.load_sharded_optimizer(optimizer, path, low_cpu_mem_mode, num_threads)
        else:
            self.load_unsharded_optimizer(optimizer, path)

    def target_of(self, checkpoint: StrPath, request: SaveRequest) -> Path:
        """The path of a save; refused where it cannot be written, or where an argument of the save is wrong."""
        request.check()
        return checked_target(checkpoint, request)

    def find(self, checkpoint: StrPath, *, optimizer: bool = False, prefix: str | None = None) -> Path:
        """The file or the index that a load means."""
        return find_checkpoint(checkpoint, optimizer=optimizer, prefix=prefix)

    @abstractmethod
    def save_lr_scheduler(self, lr_scheduler: Any, checkpoint: StrPath) -> None:
        """Write a scheduler's state to a file."""

    @abstractmethod
    def load_lr_scheduler(self, lr_scheduler: Any, checkpoint: StrPath) -> None:
        """Read a scheduler's state."""

    @abstractmethod
    def synchronize(self) -> None:
        """Return when all files are complete, on every rank. Raises on every rank if one could not be written."""

    @abstractmethod
    def save_sharded_model(
        self,
        model: nn.Module,
        checkpoint: Path,
        gather_dtensor: bool,
        prefix: str | None,
        size_per_shard: float,
        use_safetensors: bool,
        use_async: bool = False,
    ) -> None:
        """Write shards and an index into a directory."""

    @abstractmethod
    def save_unsharded_model(
        self, model: nn.Module, checkpoint: Path, gather_dtensor: bool, use_safetensors: bool, use_async: bool = False
    ) -> None:
        """Write one file."""

    @abstractmethod
    def load_sharded_model(
        self, model: nn.Module, index_file: Path, strict: bool, low_cpu_mem_mode: bool = True, num_threads: int = 1
    ) -> None:
        """Read the shards of an index."""

    @abstractmethod
    def load_unsharded_model(self, model: nn.Module, checkpoint: Path, strict: bool) -> None:
        """Read one file."""

    @abstractmethod
    def save_sharded_optimizer(
        self,
        optimizer: Any,
        checkpoint: Path,
        gather_dtensor: bool,
        prefix: str | None,
        size_per_shard: float,
        use_async: bool = False,
    ) -> None:
        """Write shards, a file of parameter groups and an index into a directory."""

    @abstractmethod
    def save_unsharded_optimizer(
        self, optimizer: Any, checkpoint: Path, gather_dtensor: bool, use_async: bool = False
    ) -> None:
        """Write one file."""

    @abstractmethod
    def load_sharded_optimizer(
        self, optimizer: Any, index_file: Path, low_cpu_mem_mode: bool = True, num_threads: int = 1
    ) -> None:
        """Read the shards of an index."""

    @abstractmethod
    def load_unsharded_optimizer(self, optimizer: Any, checkpoint: Path) -> None:
        """Read one file."""

    @abstractmethod
    def save_lora_as_pretrained(self, model: nn.Module, checkpoint: StrPath, use_safetensors: bool = False) -> None:
        """Write the adapters of a peft model, and their configuration, into a directory."""


def expect_model(model: Any, caller: str) -> None:
    """TypeError where it is none."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"{caller} got a {type(model).__name__}; pass boost's model")


def expect_optimizer(optimizer: Any, caller: str) -> None:
    """TypeError where it is none."""
    if not hasattr(optimizer, "param_groups"):
        raise TypeError(f"{caller} got a {type(optimizer).__name__}; pass boost's optimizer")


@dataclass(frozen=True)
class SaveRequest:
    """Arguments of a save on this rank."""

    content: Any  # the model or the optimizer
    shard: bool
    gather_dtensor: bool
    prefix: str | None
    size_per_shard: float
    use_safetensors: bool
    optimizer: bool

    def check(self) -> None:
        """Refuse what is wrong of itself, before any rank waits for another."""
        if self.optimizer:
            expect_optimizer(self.content, "save_optimizer")
        else:
            expect_model(self.content, "save_model")
        if self.prefix is not None and not isinstance(self.prefix, str):
            raise TypeError(f"prefix is {self.prefix!r}; it is text before the names of files, or None")
        size = self.size_per_shard
        if self.shard and (isinstance(size, bool) or not isinstance(size, (int, float)) or not size > 0):
            raise ValueError(f"size_per_shard is {size!r}; it is the size of a file in MiB and must be positive")


def refuse_safetensors(path: Path) -> None:
    """ValueError for an optimizer's file of a kind that holds tensors only."""
    if path.suffix == SAFE_SUFFIX:
        raise ValueError(
            f"{path.name} is a safetensors file by its name, which holds tensors only, and an optimizer's state has "
            "numbers too; name it .bin, and save it in ColossalAI without use_async"
        )


def checked_target(checkpoint: StrPath, request: SaveRequest) -> Path:
    """A path that can be written: a file whose suffix fits, or with `shard` a directory. ValueError otherwise."""
    path = Path(checkpoint)
    if request.shard:
        if path.is_file():
            raise ValueError(f"shard=True writes a directory, and {path.absolute()} is a file; give a directory's path")
        return path
    if path.is_dir():
        raise ValueError(f"{path.absolute()} is a directory; give a file's path, or shard=True")
    named_safe, named_torch = path.suffix == SAFE_SUFFIX, path.suffix in TORCH_SUFFIXES
    if request.optimizer:
        refuse_safetensors(path)
        return path
    if named_torch if request.use_safetensors else named_safe:
        raise ValueError(
            f"{path.name} would be a file of {'safetensors' if request.use_safetensors else 'torch.save'} under a name "
            "that says otherwise; name it .safetensors with use_safetensors=True, and .bin or .pt without"
        )
    return path
