"""GeneralCheckpointIO: files of one process. Plugins with several ranks change who writes, and what a tensor is.

A derived class says in five methods what is special; how files look is written here once:

    writes, agree                           which rank writes, and how ranks hear of an error
    model_tensors, place_tensor             whole tensors out of a model; a whole tensor as this rank holds it
    optimizer_groups, optimizer_states, load_optimizer_states
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from core.booster.checkpoint_io.async_writer import AsyncWriter
from core.booster.checkpoint_io.checkpoint_io_base import (
    CheckpointIO,
    SaveRequest,
    StrPath,
    expect_model,
    expect_optimizer,
    refuse_safetensors,
)
from core.checkpoint.tied_tensors import ShardedTensors, names_apart, refuse_apart, tied_names
from core.checkpoint.weights import index, one_file, sharded
from core.interface import AMPModelMixin, ModelWrapper

States = dict[int, dict[str, Any]]


class GeneralCheckpointIO(CheckpointIO):
    """Every process that calls it writes and reads alone: for training without a plugin, on one process."""

    def __init__(self) -> None:
        self._writer = AsyncWriter()
        self._copies: dict[tuple[str, Any], torch.Tensor] = {}  # memory of asynchronous saves, kept for the next one

    # -- what a plugin says otherwise -----------------------------------------------------------------------------

    def writes(self) -> bool:
        """True if this rank writes."""
        return True

    def agree(self, error: Exception | None, what: str) -> None:
        """Raise on every rank if any has an error. Collective: no rank continues before all have come here."""
        if error is not None:
            raise error

    def check_gather(self, gather_dtensor: bool) -> None:
        """Refuse to write parts of tensors where tensors have parts."""

    def model_tensors(self, model: nn.Module) -> Iterator[tuple[str, Any]]:
        """A model's whole tensors under the plain module's names, one after another. Collective."""
        yield from plain(model).state_dict().items()

    def whole_module(self, model: nn.Module) -> nn.Module:
        """A module with the whole model's names, ties and config."""
        return plain(model)

    def place_tensor(self, whole: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """A whole tensor as this rank holds the one it is for."""
        return whole

    def optimizer_groups(self, optimizer: Any) -> list[dict[str, Any]]:
        """Groups as torch's state_dict has them: numbers for parameters, and here their names too."""
        names = getattr(optimizer, "param_names", {})
        number = itertools.count()
        groups = []
        for group in _torch_optimizer(optimizer).param_groups:
            packed = {key: value for key, value in group.items() if key not in ("params", "param_names")}
            packed["params"] = [next(number) for _ in group["params"]]
            if all(param in names for param in group["params"]):
                packed["param_names"] = [names[param] for param in group["params"]]
            groups.append(packed)
        return groups

    def optimizer_states(self, optimizer: Any) -> Iterator[tuple[int, dict[str, Any]]]:
        """The whole state of each parameter by its number, one after another. Collective."""
        inner = _torch_optimizer(optimizer)
        for number, param in enumerate(param for group in inner.param_groups for param in group["params"]):
            if param in inner.state:
                yield number, inner.state[param]

    def place_state(self, optimizer: Any, number: int, state: dict[str, Any]) -> dict[str, Any]:
        """A parameter's whole state as this rank holds it."""
        return state

    def load_optimizer_states(self, optimizer: Any, groups: list[dict[str, Any]], states: States) -> None:
        """Take over groups, and states that `place_state` has given; both by this optimizer's numbers."""
        bare = [{key: value for key, value in group.items() if key != "param_names"} for group in groups]
        _torch_optimizer(optimizer).load_state_dict({"state": states, "param_groups": bare})

    # -- paths, which a rank may see otherwise than another -----------------------------------------------------------

    def target_of(self, checkpoint: StrPath, request: SaveRequest) -> Path:
        """The path of a save, when the one before has ended; an error of one rank is raised on every rank."""

        def begin() -> Path:
            path = super(GeneralCheckpointIO, self).target_of(checkpoint, request)
            self.check_gather(request.gather_dtensor)
            self._writer.wait()
            return path

        return self._checked(begin, checkpoint)

    def find(self, checkpoint: StrPath, *, optimizer: bool = False, prefix: str | None = None) -> Path:
        """The file or the index that a load means; an error on every rank where one has not got it."""
        return self._checked(
            lambda: super(GeneralCheckpointIO, self).find(checkpoint, optimizer=optimizer, prefix=prefix),
            checkpoint,
        )

    # -- models ---------------------------------------------------------------------------------------------------

    def save_unsharded_model(
        self, model: nn.Module, checkpoint: Path, gather_dtensor: bool, use_safetensors: bool, use_async: bool = False
    ) -> None:
        """Write one file."""
        content = self._collect("model", self.model_tensors(model), use_async)
        self._write(lambda: sharded.write(checkpoint, content, use_safetensors=use_safetensors), use_async, checkpoint)

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
        """Write shards and an index into a directory. Without use_async, one shard is in memory at a time."""
        names = index.model_names(prefix, use_safetensors)
        both = (index.model_names(prefix), index.model_names(prefix, True))
        tensors = self.model_tensors(model)
        if use_safetensors:
            repeated = second_names(self.whole_module(model))
            tensors = (item for item in tensors if item[0] not in repeated)
        if use_async:
            tensors = iter(self._collect("model", tensors, True).items())

        def finish(directory: Path) -> None:
            save_config(self.whole_module(model), directory)

        shards = sharded.shards_of(self._to_host(tensors), size_per_shard)
        writer = sharded.ShardWriter(checkpoint, names, both, use_safetensors, finish=finish)
        self._write_shards(writer, shards, use_async)

    def load_unsharded_model(self, model: nn.Module, checkpoint: Path, strict: bool) -> None:
        """Read one file."""

        def read() -> Mapping[str, Any]:
            content = self.read_file(checkpoint)
            self._refuse_apart(model, content, checkpoint)
            return content

        self._checked(lambda: self._load(model, [read], None, strict), checkpoint)

    def load_sharded_model(
        self, model: nn.Module, index_file: Path, strict: bool, low_cpu_mem_mode: bool = True, num_threads: int = 1
    ) -> None:
        """Read the shards of an index."""

        def load() -> None:
            weight_map, metadata = index.read_index(index_file)
            self._refuse_apart(model, ShardedTensors(weight_map, self.read_file), index_file.parent)
            readers = index.readers(weight_map, metadata, low_cpu_mem_mode, num_threads, self.read_file)
            self._load(model, readers, set(weight_map), strict)

        self._checked(load, index_file)

    def read_file(self, path: Path) -> Mapping[str, Any]:
        """The tensors of one file of a model, by name."""
        content: Mapping[str, Any] = one_file.load(path)
        return content

    def _refuse_apart(self, model: nn.Module, content: Mapping[str, Any], where: Path) -> None:
        """ValueError where a file holds a tied tensor under several names with different values."""
        expect_model(model, "load_model")
        refuse_apart(names_apart(self.tied_names(model), content), where)

    def tied_names(self, model: nn.Module) -> dict[tuple[str, ...], torch.dtype]:
        """The names that files may have for each tied parameter -> its dtype."""
        return tied_names(self.whole_module(model))

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

    def save_unsharded_optimizer(
        self, optimizer: Any, checkpoint: Path, gather_dtensor: bool, use_async: bool = False
    ) -> None:
        """Write one file, which torch's optimizer.load_state_dict takes too."""
        content = {
            "state": self._collect("optimizer", self.optimizer_states(optimizer), use_async),
            "param_groups": self.optimizer_groups(optimizer),
        }
        scaler = getattr(optimizer, "scaler", None)
        if scaler is not None:
            content["loss_scaler"] = scaler.state_dict()
        self._write(lambda: sharded.write(checkpoint, content), use_async, checkpoint)

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
        names = index.optimizer_names(prefix)
        groups = self.optimizer_groups(optimizer)
        metadata: dict[str, Any] = {"param_groups": index.group_name(prefix)}
        scaler = getattr(optimizer, "scaler", None)
        if scaler is not None:
            metadata["loss_scaler"] = scaler.state_dict()
        states = self.optimizer_states(optimizer)
        if use_async:
            states = iter(self._collect("optimizer", states, True).items())

        def finish(directory: Path) -> None:
            sharded.write(directory / index.group_name(prefix), groups)

        shards = sharded.shards_of(self._to_host(states), size_per_shard)
        self._write_shards(sharded.ShardWriter(checkpoint, names, (names,), False, metadata, finish), shards, use_async)

    def load_unsharded_optimizer(self, optimizer: Any, checkpoint: Path) -> None:
        """Read one file; also one that torch.save wrote of a torch optimizer's state_dict."""

        def load() -> None:
            content = one_file.load(checkpoint)
            if not (isinstance(content, dict) and {"param_groups", "state"} <= content.keys()):
                raise ValueError(
                    f"{checkpoint.absolute()} holds no state of an optimizer, which has 'param_groups' and 'state'; "
                    "was it written by save_model, or by ColossalAI with use_async?"
                )
            self._load_optimizer(optimizer, content["param_groups"], [lambda: content["state"]])
            _load_scaler(optimizer, content.get("loss_scaler"))

        self._checked(load, checkpoint)

    def load_sharded_optimizer(
        self, optimizer: Any, index_file: Path, low_cpu_mem_mode: bool = True, num_threads: int = 1
    ) -> None:
        """Read the shards of an index."""

        def load() -> None:
            weight_map, metadata = index.read_index(index_file)
            for file in dict.fromkeys(weight_map.values()):
                refuse_safetensors(file)
            groups = one_file.load(index.groups_of(index_file, metadata))
            readers = index.readers(weight_map, metadata, low_cpu_mem_mode, num_threads, one_file.load)
            self._load_optimizer(optimizer, groups, readers)
            _load_scaler(optimizer, metadata.get("loss_scaler"))

        self._checked(load, index_file)

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
        """Write a scheduler's state to a file."""
        self._write(lambda: sharded.write(Path(checkpoint), lr_scheduler.state_dict()), False, checkpoint)

    def load_lr_scheduler(self, lr_scheduler: Any, checkpoint: StrPath) -> None:
        """Read a scheduler's state."""
        self.synchronize()
        self._checked(lambda: lr_scheduler.load_state_dict(one_file.load(Path(checkpoint))), checkpoint)

    def save_lora_as_pretrained(self, model: nn.Module, checkpoint: StrPath, use_safetensors: bool = False) -> None:
        """Write the adapters of a peft model, and their configuration, into a directory."""
        module = self._checked(lambda: _adapted(self.whole_module(model)), checkpoint)
        trained = {name for name, param in module.named_parameters() if param.requires_grad or "lora_" in name}
        adapters = (item for item in self.model_tensors(model) if item[0] in trained)
        content = self._collect("adapters", adapters, False)
        path = str(checkpoint)
        self._write(
            lambda: module.save_pretrained(path, safe_serialization=use_safetensors, state_dict=content),
            False,
            checkpoint,
        )

    # -- writing --------------------------------------------------------------------------------------------------

    def synchronize(self) -> None:
        """Return when all files are complete, on every rank. Raises on every rank if one could not be written."""
        self._checked(self._writer.wait, Path("an asynchronous save"))

    def _collect(self, what: str, items: Iterator[tuple[Any, Any]], use_async: bool) -> dict[Any, Any]:
        """All items in host memory on the rank that writes; nothing elsewhere, though every rank goes through them."""
        content = {}
        for name, value in self._to_host(items):
            content[name] = self._kept_copy((what, name), value) if use_async else value
        return content

    def _to_host(self, items: Iterable[tuple[Any, Any]]) -> Iterator[tuple[Any, Any]]:
        for name, value in items:
            if self.writes():
                yield name, _on_host(value)

    def _kept_copy(self, key: tuple[str, Any], value: Any) -> Any:
        """A copy that training cannot change, in memory that the save before has used."""
        if isinstance(value, dict):
            return {name: self._kept_copy((key[0], (key[1], name)), inner) for name, inner in value.items()}
        if not isinstance(value, torch.Tensor):
            return value
        copy = self._copies.get(key)
        if copy is None or copy.shape != value.shape or copy.dtype != value.dtype:
            copy = self._copies[key] = torch.empty_like(value)
        return copy.copy_(value)

    def _write(self, job: Callable[[], None], use_async: bool, where: StrPath) -> None:
        """Run a job on the rank that writes, now or in the background, and let every rank know how it went."""
        self._checked(lambda: self._in_turn(job, use_async) if self.writes() else None, where)

    def _in_turn(self, job: Callable[[], None], use_async: bool) -> None:
        if use_async:
            self._writer.start(job)
        else:
            self._writer.wait()
            job()

    def _write_shards(
        self, writer: sharded.ShardWriter, shards: Iterator[tuple[dict[Any, Any], int]], use_async: bool
    ) -> None:
        if use_async:
            everything = list(shards)
            self._write(lambda: writer.all(everything), True, writer.directory)
        else:
            self._checked(lambda: writer.all(shards) if self.writes() else _exhaust(shards), writer.directory, shards)

    def _checked(self, act: Callable[[], Any], where: StrPath, rest: Iterator[Any] | None = None) -> Any:
        """Act, and answer; but raise on every rank if it failed on one. `rest`: collectives that the others are in."""
        error = answer = None
        try:
            answer = act()
        except Exception as caught:
            error = caught
            if rest is not None:
                _exhaust(rest)
        self.agree(error, str(where))
        return answer


def plain(model: nn.Module) -> nn.Module:
    """The user's own module."""
    return model.unwrap() if isinstance(model, ModelWrapper) else model


def save_config(model: nn.Module, directory: Path) -> None:
    """Save what from_pretrained needs to build a Hugging Face model, next to its shards."""
    for name in ("config", "generation_config"):
        config: Any = getattr(model, name, None)
        if hasattr(config, "save_pretrained"):
            config.save_pretrained(str(directory))


def check_names(own: Mapping[str, Any], found: set[str], strict: bool) -> None:
    """Refuse names that are on one side only, if strict. A tied weight may be there under any of its names."""
    if not strict:
        return
    loaded = {id(own[name]) for name in found & own.keys() if isinstance(own[name], torch.Tensor)}
    missing = [name for name in own if name not in found and id(own[name]) not in loaded]
    unexpected = sorted(found - own.keys())
    if missing or unexpected:
        raise ValueError(
            f"the checkpoint lacks {len(missing)} names that the model has {missing[:4]} and has {len(unexpected)} "
            f"that the model lacks {unexpected[:4]}; load it into the same model, or with strict=False"
        )


def second_names(model: nn.Module) -> set[str]:
    """Names of tied weights but for the first of each, as Hugging Face's files leave them out."""
    first: dict[int, str] = {}
    own = model.state_dict(keep_vars=True)
    return {name for name, value in own.items() if first.setdefault(id(value), name) != name}


def check_shapes(own: Mapping[str, Any], found: Mapping[str, Any]) -> None:
    """Refuse tensors of another shape, before anything is changed."""
    for name, value in found.items():
        mine, shape = own.get(name), getattr(value, "shape", None)
        if shape is not None and isinstance(mine, torch.Tensor) and shape != mine.shape:
            raise ValueError(f"{name!r} is {list(shape)} in the checkpoint and {list(mine.shape)} in the model")


def match_groups(saved: list[dict[str, Any]], own: list[dict[str, Any]]) -> dict[int, int]:
    """The number here of each saved parameter: by name where both sides have names, else by place."""
    sizes = [[len(group["params"]) for group in groups] for groups in (saved, own)]
    if sizes[0] != sizes[1]:
        raise ValueError(
            f"the saved optimizer has groups of {sizes[0]} parameters, and this one of {sizes[1]}; make it with the "
            "same groups"
        )
    numbers: dict[int, int] = {}
    for place, (theirs, mine) in enumerate(zip(saved, own, strict=True)):
        names = theirs.get("param_names"), mine.get("param_names")
        if names[0] and names[1]:
            here = dict(zip(names[1], mine["params"], strict=True))
            unknown = [name for name in names[0] if name not in here]
            if unknown:
                raise ValueError(f"parameter {unknown[0]!r} of the saved group {place} is not in this optimizer's")
            numbers |= {number: here[name] for number, name in zip(theirs["params"], names[0], strict=True)}
        else:
            numbers |= dict(zip(theirs["params"], mine["params"], strict=True))
    return numbers


def _adapted(module: nn.Module) -> Any:
    if not hasattr(module, "peft_config"):
        raise TypeError(f"save_lora_as_pretrained got a {type(module).__name__}; call booster.enable_lora first")
    return module


def _torch_optimizer(optimizer: Any) -> Any:
    return optimizer.unwrap() if hasattr(optimizer, "unwrap") else optimizer


def _load_scaler(optimizer: Any, state: Mapping[str, Any] | None) -> None:
    scaler = getattr(optimizer, "scaler", None)
    if scaler is not None and state is not None:
        scaler.load_state_dict(state)


def _on_host(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _on_host(inner) for name, inner in value.items()}
    if not isinstance(value, torch.Tensor):
        return value
    host = value.detach().cpu()
    # torch.save writes the whole memory that a tensor is a part of: a bucket, say.
    is_part = host.untyped_storage().nbytes() != host.numel() * host.element_size()
    return host.clone() if is_part else host


def _exhaust(items: Iterator[Any]) -> None:
    for _ in items:
        pass
