"""Checks of checkpoints: arguments of saves and loads, and names, shapes and groups of a file against the model's."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from core.checkpoint.weights.index import TORCH_SUFFIXES
from core.checkpoint.weights.one_file import SAFE_SUFFIX

StrPath = str | os.PathLike[str]


def expect_model(model: Any, caller: str) -> None:
    """Raise TypeError, naming the calling method, for an argument that is not a module."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"{caller} got a {type(model).__name__}; pass boost's model")


def expect_optimizer(optimizer: Any, caller: str) -> None:
    """Raise TypeError, naming the calling method, for an argument that is not an optimizer."""
    if not hasattr(optimizer, "param_groups"):
        raise TypeError(f"{caller} got a {type(optimizer).__name__}; pass boost's optimizer")


def refuse_safetensors(path: Path) -> None:
    """Raise ValueError for a safetensors file, which can only store tensors and not an optimizer's state."""
    if path.suffix == SAFE_SUFFIX:
        raise ValueError(
            f"{path.name} is a safetensors file by its name, which holds tensors only, and an optimizer's state has "
            "numbers too; name it .bin, and save it in ColossalAI without use_async"
        )


def save_target(
    checkpoint: StrPath, *, shard: bool, prefix: str | None, size_per_shard: float, suffix: str | None
) -> Path:
    """Check the arguments of a save, and return the path.

    ``suffix`` is that of a model's file ('.safetensors' or '.bin'), or ``None`` for an optimizer. Raises ValueError if
    the size is not positive, if a file is in the place of a directory or the reverse, or if the suffix contradicts the
    format.
    """
    if prefix is not None and not isinstance(prefix, str):
        raise TypeError(f"prefix is {prefix!r}; it is text before the names of files, or None")
    size, path = size_per_shard, Path(checkpoint)
    if shard:
        if isinstance(size, bool) or not isinstance(size, (int, float)) or not size > 0:
            raise ValueError(f"size_per_shard is {size!r}; it is the size of a file in MiB and must be positive")
        if path.is_file():
            raise ValueError(f"shard=True writes a directory, and {path.absolute()} is a file; give a directory's path")
        return path
    if path.is_dir():
        raise ValueError(f"{path.absolute()} is a directory; give a file's path, or shard=True")
    if suffix is None:
        refuse_safetensors(path)
    elif path.suffix in TORCH_SUFFIXES if suffix == SAFE_SUFFIX else path.suffix == SAFE_SUFFIX:
        raise ValueError(
            f"{path.name} would be a file of {'safetensors' if suffix == SAFE_SUFFIX else 'torch.save'} under a name "
            "that says otherwise; name it .safetensors with use_safetensors=True, and .bin or .pt without"
        )
    return path


def check_names(own: Mapping[str, Any], found: set[str], strict: bool) -> None:
    """Raise ValueError if ``strict`` is set and a name is only in the checkpoint or only in the model.

    A tied weight may be stored under any of its names.
    """
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
    """Return all names of tied weights except the first of each, which Hugging Face's files omit."""
    first: dict[int, str] = {}
    own = model.state_dict(keep_vars=True)
    return {name for name, value in own.items() if first.setdefault(id(value), name) != name}


def check_shapes(own: Mapping[str, Any], found: Mapping[str, Any]) -> None:
    """Raise ValueError if a tensor does not have the model's shape, before anything is changed."""
    for name, value in found.items():
        mine, shape = own.get(name), getattr(value, "shape", None)
        if shape is not None and isinstance(mine, torch.Tensor) and shape != mine.shape:
            raise ValueError(f"{name!r} is {list(shape)} in the checkpoint and {list(mine.shape)} in the model")


def packed_groups(groups: Iterable[Mapping[str, Any]], names: Iterable[Sequence[str | None]]) -> list[dict[str, Any]]:
    """Return groups in the format of torch's state_dict: indices replace parameters, next to the parameters' names.

    A group with an unnamed parameter has no names in the result.
    """
    number = itertools.count()
    packed = [{key: v for key, v in group.items() if key not in ("params", "param_names")} for group in groups]
    for group, of_group in zip(packed, names, strict=True):
        group["params"] = [next(number) for _ in of_group]
        if None not in of_group:
            group["param_names"] = list(of_group)
    return packed


def match_groups(saved: list[dict[str, Any]], own: list[dict[str, Any]]) -> dict[int, int]:
    """Map each saved parameter index to this optimizer's: by name if both sides have names, else by position.

    Both are in the format of ``packed_groups``. Raises ValueError if the groups' sizes or names differ.
    """
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
