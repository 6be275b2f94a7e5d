"""Full tensors by name in files that other programs read: a state_dict of torch.save, and safetensors with an index.

Tensors are read one at a time, so reading or writing safetensors never loads the full model into memory.
"""

from __future__ import annotations

import math
import os
import pickle
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from core.checkpoint.errors import CheckpointError, code_in
from core.checkpoint.pieces import MODEL, OPTIMIZER
from core.checkpoint.weights.index import model_names, open_files, write_index
from core.checkpoint.weights.one_file import check, save_safetensors, save_torch
from core.checkpoint.weights.sharded import runs_by_size, write_shards

SINGLE_NAME, INDEX_NAME = model_names(use_safetensors=True)
PLAIN_SUFFIXES = (".pt", ".pth", ".bin")
UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


@dataclass(frozen=True)
class Lazy:
    """Tensor of a file that is read on demand, contiguous, on the CPU, in unshared memory. ``nbytes`` does not
    read it.
    """

    nbytes: Callable[[], int]
    read: Callable[[], Tensor]

    @classmethod
    def of(cls, tensor: Tensor) -> Lazy:
        """Wrap a tensor that is in memory or in a mapped file. Reading copies it."""
        clone = partial(tensor.detach().clone, memory_format=torch.contiguous_format)
        return cls(lambda: tensor.nbytes, clone)


class WholeTensors(dict[str, Lazy]):
    """Tensors by their names in a checkpoint: 'model.<name>', 'optimizer.<key>.<name>'.

    ``tied`` has other names of shared parameters, which a module's own state_dict also lists.
    """

    tied: Mapping[str, str] | None = None


def open_state_dict(path: Path, *, trust: bool = False) -> WholeTensors:
    """Open a file of torch.save: a state_dict, or {'model': state_dict, 'optimizer': {name: {key: tensor}}}.

    ``trust`` allows a file with objects other than tensors, which can execute code while it is read. Raises
    CheckpointError for other files.
    """
    try:
        check(path)
        found = torch.load(path, map_location="cpu", weights_only=not trust, mmap=True)
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{path} is no file of torch.save with tensors only ({code_in(error)}); if you trust those who made "
            "it, add --trust-foreign-files, and code from it is run"
        ) from None
    except (RuntimeError, EOFError) as error:
        raise CheckpointError(f"{path} is no file of torch.save: {error}") from None
    return WholeTensors((name, Lazy.of(tensor)) for name, tensor in _flattened(path, found))


def _flattened(path: Path, found: Any) -> Iterator[tuple[str, Tensor]]:
    if not isinstance(found, Mapping):
        raise CheckpointError(f"{path} holds a {type(found).__name__}; expected a state_dict, names with tensors")
    whole = isinstance(found.get(MODEL), Mapping)
    weights = found[MODEL] if whole else found
    for name, value in weights.items():
        if not isinstance(value, Tensor):
            raise CheckpointError(
                f"{path}: {name!r} is a {type(value).__name__} and no tensor; expected a state_dict, or "
                "{'model': state_dict, 'optimizer': {name: {key: tensor}}}"
            )
        yield f"{MODEL}.{name}", value
    for name, state in found.get(OPTIMIZER, {}).items() if whole else ():
        for key, value in state.items():
            yield f"{OPTIMIZER}.{key}.{name}", value


def open_safetensors_files(path: Path) -> WholeTensors:
    """Open a safetensors file, or a directory of them with an index, as transformers' ``save_pretrained`` writes it."""
    if path.is_dir():
        path = next((path / name for name in (INDEX_NAME, SINGLE_NAME) if (path / name).exists()), path)
    if not path.is_file():
        raise CheckpointError(f"{path} holds neither {INDEX_NAME} nor {SINGLE_NAME}")
    try:
        opened = open_files(path).values()
    except FileNotFoundError as error:
        raise CheckpointError(str(error)) from None

    def nbytes(file: Any, name: str) -> int:
        found = file.get_slice(name)
        bits = re.search(r"\d+", found.get_dtype())  # 'BF16', 'F8_E4M3', 'BOOL'
        return math.prod(found.get_shape()) * (int(bits.group()) // 8 if bits else 1)

    return WholeTensors(
        (f"{MODEL}.{name}", Lazy(partial(nbytes, file, name), partial(file.get_tensor, name)))
        for file in opened
        for name in file.keys()  # noqa: SIM118
    )


def write_state_dict(path: Path, source: WholeTensors, *, optimizer: bool = False) -> None:
    """Write a state_dict with torch.save. The file appears complete or not at all. Needs memory for all tensors.

    ``optimizer`` writes {'model': state_dict, 'optimizer': {name: {key: tensor}}} instead.
    """
    weights = {key.partition(".")[2]: lazy.read() for key, lazy in source.items() if key.startswith(f"{MODEL}.")}
    weights |= {name: weights[kept] for name, kept in (source.tied or {}).items() if kept in weights}
    content: dict[str, Any] = dict(weights)
    if optimizer:
        state: dict[str, dict[str, Tensor]] = {}
        for key, lazy in source.items():
            if key.startswith(f"{OPTIMIZER}."):
                _, state_key, name = key.split(".", 2)
                state.setdefault(name, {})[state_key] = lazy.read()
        content = {MODEL: weights, OPTIMIZER: state}
    save_torch(path, content)


def write_safetensors(directory: Path, source: WholeTensors, *, max_shard_bytes: int) -> list[str]:
    """Write the model's tensors to safetensors files, with an index if there are several, and return the file names.

    The directory, absent or empty before, appears complete or not at all. Only one file's tensors are in memory at a
    time. A file exceeds ``max_shard_bytes`` only for a single larger tensor.
    """
    keys = [key for key in source if key.startswith(f"{MODEL}.")]
    sizes = {key: source[key].nbytes() for key in keys}
    runs = list(runs_by_size(keys, sizes.__getitem__, max_shard_bytes)) or [[]]
    count = len(runs)
    names = [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)] if count > 1 else [SINGLE_NAME]
    partial = directory.with_name(f".{directory.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    shards: Iterator[tuple[dict[str, Tensor], int]] = (
        ({key.partition(".")[2]: source[key].read() for key in run}, sum(map(sizes.__getitem__, run))) for run in runs
    )

    def save(number: int, tensors: dict[str, Tensor]) -> str:
        save_safetensors(partial / names[number - 1], tensors)
        return names[number - 1]

    weight_map, total_bytes = write_shards(shards, save)
    if count > 1:
        write_index(partial / INDEX_NAME, weight_map, {"total_size": total_bytes})
    if directory.exists():
        directory.rmdir()  # checked before: it is empty
    os.replace(partial, directory)
    return names


def parse_size(text: str) -> int:
    """Parse a size in bytes: '5GB' (decimal), '5GiB' or '5000000'. Raise ValueError for other texts and for 0."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    size = int(float(match[1]) * UNITS.get(match[2].upper(), 0)) if match else 0
    if size < 1:
        raise ValueError(f"{text!r} is no size; write for example 5GB, 500MiB or a number of bytes")
    return size
