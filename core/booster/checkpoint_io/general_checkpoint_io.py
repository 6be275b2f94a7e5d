"""CheckpointIO: saving and loading for the Booster in one process. Plugins with several ranks derive from it.

The file format is defined here. Subclasses decide which rank writes, and how tensors are gathered and sliced.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from core.booster.checkpoint_io.adapters import CONFIG as ADAPTER_CONFIG
from core.booster.checkpoint_io.adapters import is_adapted, names_to_save, read_adapters, save_config, write_adapters
from core.booster.checkpoint_io.checks import (
    StrPath,
    check_names,
    check_shapes,
    expect_model,
    expect_optimizer,
    match_groups,
    packed_groups,
    refuse_safetensors,
    save_target,
    second_names,
)
from core.checkpoint.snapshot import with_own_storage
from core.checkpoint.tied_tensors import ShardedTensors, names_apart, refuse_apart, tied_names
from core.checkpoint.weights import index, one_file, sharded
from core.checkpoint.weights.one_file import SAFE_SUFFIX
from core.interface import AMPModelMixin, ModelWrapper

States = dict[int, dict[str, Any]]


class CheckpointIO:
    """Saves and loads models, optimizers and schedulers.

    Every rank calls each method with the same arguments, and files must be readable by all ranks. This class itself is
    for training without a plugin, where each process writes and reads independently.
    """

    def __init__(self) -> None:
        self._writing: Future[None] | None = None  # the save that a thread writes in the background
        self._copies: dict[tuple[str, Any], torch.Tensor] = {}  # memory of asynchronous saves, reused by the next one

    # -- methods that plugins override -----------------------------------------------------------------------------

    def writes(self) -> bool:
        """Return ``True`` if this rank writes files."""
        return True

    def agree(self, error: Exception | None, what: str) -> None:
        """Raise on every rank if any has an error. Collective: no rank continues before all have called it.

        Args:
            error (Exception): Error found on this rank, or ``None``.
            what (str): Description of the operation, for the message.
        """
        if error is not None:
            raise error

    def check_gather(self, gather_dtensor: bool) -> None:
        """Raise an error instead of writing parts of tensors, if tensors are sharded."""

    def full_value(self, model: nn.Module, value: Any) -> Any:
        """Return the unsharded value of a state dict entry. Collective if tensors are sharded."""
        return value

    def model_tensors(self, model: nn.Module) -> Iterator[tuple[str, Any]]:
        """Yield a model's full tensors one by one under the plain module's names. Collective.

        A tied tensor is one tensor in host memory under all of its names, so that files preserve the tie.
        """
        tensors = plain(model).state_dict(keep_vars=True)
        uses = Counter(map(id, tensors.values()))
        tied: dict[int, Any] = {}
        for name, value in tensors.items():
            if id(value) in tied:
                yield name, tied[id(value)]
                continue
            full = self.full_value(model, value)
            if uses[id(value)] > 1:
                full = tied[id(value)] = _on_host(full)
            yield name, full

    def full_module(self, model: nn.Module) -> nn.Module:
        """Return a module with the full model's names, ties and config."""
        return plain(model)

    def place_tensor(self, whole: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of a full tensor, sharded as ``like``."""
        return whole

    def optimizer_groups(self, optimizer: Any) -> list[dict[str, Any]]:
        """Return groups in the format of torch's state_dict, with indices and also names of parameters."""
        names, groups = getattr(optimizer, "param_names", {}), _torch_optimizer(optimizer).param_groups
        return packed_groups(groups, [[names.get(param) for param in group["params"]] for group in groups])

    def optimizer_states(self, optimizer: Any) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yield the full state of each parameter with its index, one by one. Collective."""
        inner = _torch_optimizer(optimizer)
        for number, param in enumerate(param for group in inner.param_groups for param in group["params"]):
            if param in inner.state:
                yield number, inner.state[param]

    def place_state(self, optimizer: Any, number: int, state: dict[str, Any]) -> dict[str, Any]:
        """Return this rank's part of a parameter's full state."""
        return state

    def load_optimizer_states(self, optimizer: Any, groups: list[dict[str, Any]], states: States) -> None:
        """Load groups, and states from ``place_state``, both by this optimizer's indices."""
        bare = [{key: value for key, value in group.items() if key != "param_names"} for group in groups]
        _torch_optimizer(optimizer).load_state_dict({"state": states, "param_groups": bare})

    # -- models ---------------------------------------------------------------------------------------------------

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
        """Save a model's weights. See ``Booster.save_model`` for the arguments.

        Without ``use_async`` only one shard is in memory at a time.
        """

        def begin() -> Path:
            expect_model(model, "save_model")
            suffix = SAFE_SUFFIX if use_safetensors else ".bin"
            path = save_target(checkpoint, shard=shard, prefix=prefix, size_per_shard=size_per_shard, suffix=suffix)
            return self._ready_for(path, gather_dtensor)

        path = self._checked(begin, checkpoint)
        if shard and is_adapted(self.full_module(model)):
            self._save_adapters(model, path, use_safetensors, use_async)
            return
        tensors = self.model_tensors(model)
        if not shard:
            content = self._collect("model", tensors, use_async)
            self._write(lambda: sharded.write(path, content, use_safetensors=use_safetensors), use_async, path)
            return
        names = index.model_names(prefix, use_safetensors)
        both = (index.model_names(prefix), index.model_names(prefix, True))
        if use_safetensors:
            repeated = second_names(self.full_module(model))
            tensors = (item for item in tensors if item[0] not in repeated)
        if use_async:
            tensors = iter(self._collect("model", tensors, True).items())

        def finish(directory: Path) -> None:
            save_config(self.full_module(model), directory)

        shards = sharded.shards_of(self._to_host(tensors), size_per_shard)
        write = partial(sharded.save_shards, path, names, both, use_safetensors=use_safetensors, finish=finish)
        self._write_shards(write, shards, use_async, path)

    def load_model(
        self,
        model: nn.Module,
        checkpoint: StrPath,
        strict: bool = True,
        low_cpu_mem_mode: bool = True,
        num_threads: int = 1,
    ) -> nn.Module:
        """Load a model's weights and return the model. See ``Booster.load_model`` for the arguments.

        A directory of adapters loads into a model with these adapters.
        """
        path = self._find(checkpoint, optimizer=False, prefix=None)
        if path.name == ADAPTER_CONFIG:
            return self._load_adapters(model, path.parent)

        def load() -> None:
            if index.is_index(path):
                weight_map, metadata = index.read_index(path)
                self._refuse_apart(model, ShardedTensors(weight_map, self.read_file), path.parent)
                readers = index.readers(weight_map, metadata, low_cpu_mem_mode, num_threads, self.read_file)
                self._load(model, readers, set(weight_map), strict)
            else:
                self._load(model, [read], None, strict)

        def read() -> Mapping[str, Any]:
            content = self.read_file(path)
            self._refuse_apart(model, content, path)
            return content

        self._checked(load, path)
        return model

    def read_file(self, path: Path) -> Mapping[str, Any]:
        """Return the tensors of one model file by name."""
        content: Mapping[str, Any] = one_file.load(path)
        return content

    def _refuse_apart(self, model: nn.Module, content: Mapping[str, Any], where: Path) -> None:
        """Raise ValueError if a file has different values under several names of a tied tensor."""
        expect_model(model, "load_model")
        refuse_apart(names_apart(self.tied_names(model), content), where)

    def tied_names(self, model: nn.Module) -> dict[tuple[str, ...], torch.dtype]:
        """Return the dtype of each tied parameter, keyed by the names that files may use for it."""
        return tied_names(self.full_module(model))

    def _load(
        self, model: nn.Module, readers: Iterable[Callable[[], Any]], names: set[str] | None, strict: bool
    ) -> None:
        expect_model(model, "load_model")
        module = plain(model)
        own = module.state_dict(keep_vars=True)
        if names is not None:
            check_names(own, names, strict)
        for read in readers:
            content: Mapping[str, Any] = read()
            if names is None:
                check_names(own, set(content), strict)
            check_shapes(own, content)
            placed = {
                name: self.place_tensor(value, own[name]) if isinstance(value, torch.Tensor) else value
                for name, value in content.items()
                if name in own
            }
            module.load_state_dict(placed, strict=False)
        for wrapper in model.modules():
            if isinstance(wrapper, AMPModelMixin):
                wrapper.update_master_params()

    # -- optimizers -----------------------------------------------------------------------------------------------

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
        """Save an optimizer's state, parameter groups and loss scale. See ``Booster.save_optimizer`` for the
        arguments.

        torch's ``optimizer.load_state_dict`` also accepts the content of a single file.
        """

        def begin() -> Path:
            expect_optimizer(optimizer, "save_optimizer")
            path = save_target(checkpoint, shard=shard, prefix=prefix, size_per_shard=size_per_shard, suffix=None)
            return self._ready_for(path, gather_dtensor)

        path = self._checked(begin, checkpoint)
        scaler = getattr(optimizer, "scaler", None)
        scale = {} if scaler is None else {"loss_scaler": scaler.state_dict()}
        states = self.optimizer_states(optimizer)
        if not shard:
            state = self._collect("optimizer", states, use_async)
            content = {"state": state, "param_groups": self.optimizer_groups(optimizer), **scale}
            self._write(lambda: sharded.write(path, content), use_async, path)
            return
        names, groups = index.optimizer_names(prefix), self.optimizer_groups(optimizer)
        metadata = {"param_groups": index.group_name(prefix), **scale}
        if use_async:
            states = iter(self._collect("optimizer", states, True).items())

        def finish(directory: Path) -> None:
            sharded.write(directory / index.group_name(prefix), groups)

        shards = sharded.shards_of(self._to_host(states), size_per_shard)
        write = partial(sharded.save_shards, path, names, (names,), metadata=metadata, finish=finish)
        self._write_shards(write, shards, use_async, path)

    def load_optimizer(
        self,
        optimizer: Any,
        checkpoint: StrPath,
        prefix: str | None = None,
        low_cpu_mem_mode: bool = True,
        num_threads: int = 1,
    ) -> None:
        """Load an optimizer's state. See ``Booster.load_optimizer`` for the arguments; ``prefix`` is the save's.

        The file may also be a torch optimizer's saved state dict. Saved options of the groups (lr, ...) replace the
        current ones.
        """
        path = self._find(checkpoint, optimizer=True, prefix=prefix)

        def load() -> None:
            if index.is_index(path):
                weight_map, metadata = index.read_index(path)
                for file in dict.fromkeys(weight_map.values()):
                    refuse_safetensors(file)
                groups, scale = one_file.load(index.groups_of(path, metadata)), metadata.get("loss_scaler")
                readers = index.readers(weight_map, metadata, low_cpu_mem_mode, num_threads, one_file.load)
            else:
                content = one_file.load(path)
                if not (isinstance(content, dict) and {"param_groups", "state"} <= content.keys()):
                    raise ValueError(
                        f"{path.absolute()} holds no state of an optimizer, which has 'param_groups' and 'state'; "
                        "was it written by save_model, or by ColossalAI with use_async?"
                    )
                groups, scale = content["param_groups"], content.get("loss_scaler")
                readers = [lambda: content["state"]]
            self._load_optimizer(optimizer, groups, readers)
            scaler = getattr(optimizer, "scaler", None)
            if scaler is not None and scale is not None:
                scaler.load_state_dict(scale)

        self._checked(load, path)

    def _load_optimizer(
        self, optimizer: Any, groups: list[dict[str, Any]], readers: Iterable[Callable[[], Any]]
    ) -> None:
        expect_optimizer(optimizer, "load_optimizer")
        own = self.optimizer_groups(optimizer)
        numbers = match_groups(groups, own)
        states: States = {}
        for read in readers:
            for number, state in read().items():
                here = numbers[int(number)]
                states[here] = self.place_state(optimizer, here, state)
        loaded = [
            {**group, "params": mine["params"], "param_names": mine.get("param_names")}
            for group, mine in zip(groups, own, strict=True)
        ]
        self.load_optimizer_states(optimizer, loaded, states)

    # -- schedulers and adapters ----------------------------------------------------------------------------------

    def save_lr_scheduler(self, lr_scheduler: Any, checkpoint: StrPath) -> None:
        """Save a scheduler's state to a file."""
        self._write(lambda: sharded.write(Path(checkpoint), lr_scheduler.state_dict()), False, checkpoint)

    def load_lr_scheduler(self, lr_scheduler: Any, checkpoint: StrPath) -> None:
        """Load a scheduler's state from a file."""
        self.synchronize()
        self._checked(lambda: lr_scheduler.load_state_dict(one_file.load(Path(checkpoint))), checkpoint)

    def save_lora_as_pretrained(self, model: nn.Module, checkpoint: StrPath, use_safetensors: bool = False) -> None:
        """Save a peft model's adapters and their configuration to a directory."""
        self._checked(lambda: _expect_adapters(self.full_module(model)), checkpoint)
        self._save_adapters(model, Path(checkpoint), use_safetensors, use_async=False)

    def _save_adapters(self, model: nn.Module, path: Path, use_safetensors: bool, use_async: bool) -> None:
        """Write the files of peft's ``save_pretrained``. Collective."""
        module: Any = self.full_module(model)
        names = self._checked(lambda: names_to_save(module), path)
        adapters = (item for item in self.model_tensors(model) if item[0] in names)
        content = self._collect("adapters", adapters, use_async)
        write = partial(write_adapters, module, content, str(path), use_safetensors=use_safetensors)
        self._write(write, use_async, path)

    def _load_adapters(self, model: nn.Module, directory: Path) -> nn.Module:
        """Load a directory of adapters. Collective."""
        self.synchronize()

        def load() -> None:
            expect_model(model, "load_model")
            module = self.full_module(model)
            if not is_adapted(module):
                raise ValueError(
                    f"{directory} contains adapters, but the model has no adapters; boost PeftModel.from_pretrained("
                    "base, directory, is_trainable=True), or call booster.enable_lora before boost"
                )
            content = read_adapters(module, directory)
            self._load(model, [lambda: content], None, False)

        self._checked(load, directory)
        return model

    # -- writing --------------------------------------------------------------------------------------------------

    def _ready_for(self, path: Path, gather_dtensor: bool) -> Path:
        """Return the path of a save, after the previous save has completed."""
        self.check_gather(gather_dtensor)
        self._wait()
        return path

    def _find(self, checkpoint: StrPath, *, optimizer: bool, prefix: str | None) -> Path:
        """Return the file or the index to load, or the configuration of adapters. An error is raised on all ranks."""
        self.synchronize()

        def find() -> Path:
            adapters = Path(checkpoint) / ADAPTER_CONFIG
            has_adapters = not optimizer and adapters.is_file()
            return adapters if has_adapters else index.find_checkpoint(checkpoint, optimizer=optimizer, prefix=prefix)

        found: Path = self._checked(find, checkpoint)
        return found

    def synchronize(self) -> None:
        """Wait until all files are complete on every rank. Raises on every rank if one could not be written."""
        self._checked(self._wait, Path("an asynchronous save"))

    def _wait(self) -> None:
        """Wait for pending writes, and raise the error of the background save, once."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def _collect(self, what: str, items: Iterator[tuple[Any, Any]], use_async: bool) -> dict[Any, Any]:
        """Return all items in host memory on the writing rank. Other ranks iterate too, and return nothing."""
        content = {}
        for name, value in self._to_host(items):
            content[name] = self._kept_copy((what, name), value) if use_async else value
        return content

    def _to_host(self, items: Iterable[tuple[Any, Any]]) -> Iterator[tuple[Any, Any]]:
        for name, value in items:
            if self.writes():
                yield name, _on_host(value)

    def _kept_copy(self, key: tuple[str, Any], value: Any) -> Any:
        """Copy a value so that training cannot change it, reusing the memory of the previous save."""
        if isinstance(value, dict):
            return {name: self._kept_copy((key[0], (key[1], name)), inner) for name, inner in value.items()}
        if not isinstance(value, torch.Tensor):
            return value
        copy = self._copies.get(key)
        if copy is None or copy.shape != value.shape or copy.dtype != value.dtype:
            copy = self._copies[key] = torch.empty_like(value)
        return copy.copy_(value)

    def _write(self, job: Callable[[], None], use_async: bool, where: StrPath) -> None:
        """Run a job on the writing rank, now or in the background, and report its error to all ranks."""

        def begin() -> None:
            self._wait()
            if use_async:
                self._writing = ThreadPoolExecutor(1, "checkpoint-writer").submit(job)  # Python waits for it at exit
            else:
                job()

        self._checked(begin if self.writes() else lambda: None, where)

    def _write_shards(
        self, write: Callable[..., None], shards: Iterator[tuple[dict[Any, Any], int]], use_async: bool, where: Path
    ) -> None:
        if use_async:
            self._write(partial(write, list(shards)), True, where)
        else:
            self._checked(lambda: write(shards) if self.writes() else deque(shards, 0), where, shards)

    def _checked(self, act: Callable[[], Any], where: StrPath, rest: Iterator[Any] | None = None) -> Any:
        """Return the result of ``act``. If it failed on a rank, raise on all ranks after the collectives of
        ``rest``.
        """
        error = answer = None
        try:
            answer = act()
        except Exception as caught:
            error = caught
            if rest is not None:
                deque(rest, 0)
        self.agree(error, str(where))
        return answer


GeneralCheckpointIO = CheckpointIO  # ColossalAI's name of the base class of plugins' checkpoint IO


def plain(model: nn.Module) -> nn.Module:
    """Return the user's module inside any wrappers."""
    return model.unwrap() if isinstance(model, ModelWrapper) else model


def _expect_adapters(module: nn.Module) -> None:
    if not hasattr(module, "peft_config"):
        raise TypeError(f"save_lora_as_pretrained got a {type(module).__name__}; call booster.enable_lora first")


def _torch_optimizer(optimizer: Any) -> Any:
    return optimizer.unwrap() if hasattr(optimizer, "unwrap") else optimizer


def _on_host(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _on_host(inner) for name, inner in value.items()}
    return with_own_storage(value) if isinstance(value, torch.Tensor) else value
