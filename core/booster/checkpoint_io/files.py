"""Files of checkpoints as ColossalAI and Hugging Face name and arrange them: whole, or shards with an index."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from core.bounded_read import file_name
from core.checkpoint import tensor_files
from core.checkpoint.durable_file import sync_directory
from core.checkpoint.errors import CheckpointDamaged
from core.checkpoint.tensor_files import runs_by_size, save_safetensors, save_torch
from core.optimizer.optimizer_state import plain_numbers

INDEX_SUFFIX = ".index.json"
SAVING = ".saving-"  # how the hidden directory of a save begins
TORCH_SUFFIXES = (".bin", ".pt", ".pth")
MIB = 1024 * 1024


class Names(NamedTuple):
    """The names of one checkpoint in a directory."""

    whole: str
    index_file: str

    def shard(self, number: int) -> str:
        """The name of a shard; the first is number 1."""
        stem, suffix = self.whole.rsplit(".", 1)
        return f"{stem}-{number:05d}.{suffix}"


def model_names(prefix: str | None = None, use_safetensors: bool = False) -> Names:
    """pytorch_model.bin or model.safetensors, and its index; `<prefix>.` before both."""
    return _names(prefix, "model.safetensors" if use_safetensors else "pytorch_model.bin")


def optimizer_names(prefix: str | None = None, use_safetensors: bool = False) -> Names:
    """pytorch_optim.bin, or what ColossalAI names asynchronous saves: optimizer.safetensors; and its index."""
    return _names(prefix, "optimizer.safetensors" if use_safetensors else "pytorch_optim.bin")


def group_name(prefix: str | None = None) -> str:
    """The file of a sharded optimizer's parameter groups."""
    return _names(prefix, "pytorch_optim_group.bin").whole


def _names(prefix: str | None, whole: str) -> Names:
    whole = f"{prefix}.{whole}" if prefix else whole
    return Names(whole, whole + INDEX_SUFFIX)


def find_checkpoint(checkpoint: str | os.PathLike[str], *, optimizer: bool, prefix: str | None = None) -> Path:
    """The whole file or the index that a path means: itself, or the one in a directory.

    Raises FileNotFoundError when there is none, ValueError when a directory has several.
    """
    path = committed(Path(checkpoint))
    if path.is_file():
        return path
    if not path.is_dir():
        raise FileNotFoundError(f"there is no checkpoint at {path.absolute()}")
    names = optimizer_names if optimizer else model_names
    kinds = [names(prefix), names(prefix, True)]
    found = [committed(path / name) for names in kinds for name in (names.index_file, names.whole)]
    found = [file for file in found if file.is_file()]
    if not found and prefix is None:  # under another prefix, or written by somebody else
        files = [
            file for place in ("", f"{SAVING}*/") for file in path.glob(f"{place}*{INDEX_SUFFIX}") if file.is_file()
        ]
        indices = sorted({file.name for file in files if ("optim" in file.name) == optimizer})
        found = [committed(path / name) for name in indices]
    found = [file for file in found if file.parent != path] or found  # a save that is committed replaces the others
    if not found:
        what = "an optimizer" if optimizer else "a model"
        raise FileNotFoundError(f"{path.absolute()} holds no checkpoint of {what}: {sorted(os.listdir(path))}")
    if len(found) > 1:
        raise ValueError(
            f"Found multiple index files in {path.absolute()}: {[file.name for file in found]}, please remove "
            "redundant ones, or give the path of one of them"
        )
    return found[0]


def weight_files(directory: Path) -> list[Path]:
    """The files that hold a model in a directory: one, or the shards of an index. Raises as `find_checkpoint` does."""
    found = find_checkpoint(directory, optimizer=False)
    return sorted(set(read_index(found)[0].values())) if is_index(found) else [found]


# -- a save of several files in one step --------------------------------------------------------------------------
#
# A save writes its files into a hidden directory, the index last: that commits it. Then the files move to their
# places, the index last again. A save that is killed before its commit has touched nothing; after it, readers find the
# files in the hidden directory or in their places, and the next save moves the rest.


def journal_of(directory: Path, names: Names) -> Path:
    """The hidden directory of a save."""
    return directory / f"{SAVING}{names.index_file}"


def committed(index: Path) -> Path:
    """The index itself, or that of a committed save whose files are not all in their places."""
    pending = index.parent / f"{SAVING}{index.name}" / index.name
    return pending if pending.is_file() else index


def beside(index: Path, name: str) -> Path:
    """A file that an index from `committed` names."""
    file = index.parent / file_name(name)
    return index.parent.parent / name if index.parent.name.startswith(SAVING) and not file.exists() else file


def install(directory: Path, names: Names, replaced: Iterable[Names]) -> None:
    """Move a committed save to its place, and remove older ones of the kinds `replaced`; empty its hidden directory."""
    journal = journal_of(directory, names)
    if (journal / names.index_file).is_file():
        kept = set(tensor_files.read_index(journal / names.index_file)[0].values())
        for file in journal.iterdir():
            if file.name != names.index_file:
                os.replace(file, directory / file.name)
        sync_directory(directory)
        for kind in replaced:
            if kind != names:
                (directory / kind.index_file).unlink(missing_ok=True)
        os.replace(journal / names.index_file, directory / names.index_file)
        sync_directory(directory)
        for kind in replaced:
            stem, suffix = kind.whole.rsplit(".", 1)
            for file in directory.glob(f"{stem}-*.{suffix}"):
                if file.name not in kept and re.fullmatch(rf"{re.escape(stem)}-\d{{5}}\.{suffix}", file.name):
                    file.unlink()
    for file in journal.iterdir():  # of a save that was killed before its commit
        file.unlink()


def is_index(path: Path) -> bool:
    """Is it the index of a sharded checkpoint?"""
    return path.name.endswith(INDEX_SUFFIX) or path.suffix == ".json"


def read_index(path: Path) -> tuple[dict[str, Path], dict[str, Any]]:
    """(file of each key, metadata).

    Raises FileNotFoundError, with names, where a shard is missing, and CheckpointDamaged where one is of another save.
    """
    names, metadata = tensor_files.read_index(path)
    weight_map = {key: beside(path, name) for key, name in names.items()}
    missing = sorted({file.name for file in weight_map.values() if not file.is_file()})
    if missing:
        raise FileNotFoundError(f"{path.name} in {path.parent.absolute()} lists {missing}, which are not there")
    others = [beside(path, metadata["param_groups"])] if "param_groups" in metadata else []
    tensor_files.check_saved_together(path, metadata, [*dict.fromkeys(weight_map.values()), *others])
    return weight_map, metadata


def readers(
    weight_map: Mapping[str, Path],
    metadata: Mapping[str, Any],
    low_cpu_mem_mode: bool,
    num_threads: int,
    load: Callable[[Path], Any],
) -> list[Callable[[], Any]]:
    """One function per file that reads it: when it is called, or all together by threads before.

    weight_map, metadata: of `read_index`. Each function raises CheckpointDamaged where a file lacks a tensor that the
    index names in it. A file whose checksum the index has needs no such look.
    """
    known = metadata.get(tensor_files.FILES, {})
    keys: dict[Path, set[str]] = {}
    for key, path in weight_map.items():
        keys.setdefault(path, set()).add(key)

    def read(path: Path) -> Any:
        content = load(path)
        lacking = sorted(keys[path] - set(map(str, content)))
        if lacking and path.name not in known:
            raise CheckpointDamaged(
                f"{path} lacks {len(lacking)} tensors that the index names in it; take all files of one save"
            )
        return content

    if low_cpu_mem_mode:
        return [partial(read, path) for path in keys]
    with ThreadPoolExecutor(max(1, num_threads)) as threads:
        contents = list(threads.map(read, keys))
    return [lambda content=content: content for content in contents]  # type: ignore[misc]


def write(path: Path, content: Any, *, use_safetensors: bool = False) -> None:
    """Write a dictionary to a file that appears under its name when it is complete."""
    if not use_safetensors:
        save_torch(path, plain_numbers(content))
        return
    odd = [name for name, value in content.items() if not isinstance(value, torch.Tensor)]
    if odd:
        raise ValueError(f"{path.name}: safetensors holds tensors only, and {odd[0]!r} is none; use_safetensors=False")
    save_safetensors(path, dict(without_duplicates(content)))


def without_duplicates(content: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """Tied weights once, under the first of their names, as Hugging Face's files have them."""
    seen: set[tuple[Any, ...]] = set()
    for name, value in content.items():
        if value.numel():
            memory = (value.data_ptr(), value.shape, value.stride(), value.dtype)
            if memory in seen:
                continue
            seen.add(memory)
        yield name, value


def shards_of(items: Iterable[tuple[Any, Any]], limit_mib: float) -> Iterator[tuple[dict[Any, Any], int]]:
    """Items in order, as many together as fit into the limit: (items, bytes). A larger one is alone."""
    for run in runs_by_size(items, lambda item: bytes_of(item[1]), limit_mib * MIB):
        shard = dict(run)
        yield shard, bytes_of(shard)


def bytes_of(value: Any) -> int:
    """Bytes of the tensors in a value."""
    if isinstance(value, torch.Tensor):
        return int(value.numel() * value.element_size())
    return sum(map(bytes_of, value.values())) if isinstance(value, dict) else 0
