"""Several files written atomically: tensors grouped into shards, and a save that replaces an older one.

A save writes its files into a hidden directory, the index last: that commits it. Then the files move to their places,
again the index last. A save that is killed before its commit has changed nothing. After the commit readers find each
file in the hidden directory or in its place, and the next save moves the remaining files.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch

from core.checkpoint.durable_file import sync_directory
from core.checkpoint.weights.index import Names, journal_of, read_names, write_index
from core.checkpoint.weights.one_file import only_writer, save_safetensors, save_torch
from core.optimizer.optimizer_state import plain_numbers

Item = TypeVar("Item")
MIB = 1024 * 1024


def save_shards(
    directory: Path,
    names: Names,
    replaced: tuple[Names, ...],
    shards: Iterable[tuple[dict[Any, Any], int]],
    *,
    use_safetensors: bool = False,
    metadata: Mapping[str, Any] | None = None,
    finish: Callable[[Path], None] = lambda directory: None,
) -> None:
    """Write shards and then their index next to existing files, and replace saves of the ``replaced`` kinds at once.

    ``shards`` yields (contents, bytes), ``metadata`` has additional entries of the index, and ``finish`` writes
    additional files into the directory it is called with.
    """
    directory.mkdir(parents=True, exist_ok=True)
    journal = journal_of(directory, names)

    def save(number: int, content: dict[Any, Any]) -> str:
        name = names.shard(number)
        write(journal / name, content, use_safetensors=use_safetensors)
        return name

    with contextlib.ExitStack() as stack:
        for kind in replaced:
            hidden = journal_of(directory, kind)
            stack.enter_context(only_writer(hidden, lambda place: place.mkdir(exist_ok=True)))
            stack.callback(hidden.rmdir)
            install(directory, kind, replaced)  # finish a save that was killed
        try:
            weight_map, total_bytes = write_shards(shards, save)
            finish(journal)
            write_index(journal / names.index_file, weight_map, {"total_size": total_bytes, **(metadata or {})})
        finally:
            install(directory, names, replaced)


def write_shards(
    shards: Iterable[tuple[dict[Any, Any], int]], save: Callable[[int, dict[Any, Any]], str]
) -> tuple[dict[str, str], int]:
    """Save (contents, bytes) shards one after another, and return each tensor's file name and the bytes of all tensors.

    ``save`` writes shard number 1, 2, ... and returns its file name.
    """
    weight_map: dict[str, str] = {}
    number = total_bytes = 0
    for content, size in shards:
        number, total_bytes = number + 1, total_bytes + size
        weight_map |= dict.fromkeys(map(str, content), save(number, content))
        del content  # free it before the next one is created
    return weight_map, total_bytes


def install(directory: Path, names: Names, replaced: Iterable[Names]) -> None:
    """Move a committed save to its place, remove older saves of the kinds ``replaced``, and empty its journal."""
    journal = journal_of(directory, names)
    if (journal / names.index_file).is_file():
        kept = set(read_names(journal / names.index_file)[0].values())
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
    for file in journal.iterdir():  # files of a save killed before its commit
        file.unlink()


def write(path: Path, content: Any, *, use_safetensors: bool = False) -> None:
    """Write a dictionary to a file that appears under its name once it is complete."""
    if not use_safetensors:
        save_torch(path, plain_numbers(content))
        return
    odd = [name for name, value in content.items() if not isinstance(value, torch.Tensor)]
    if odd:
        raise ValueError(f"{path.name}: safetensors holds tensors only, and {odd[0]!r} is none; use_safetensors=False")
    save_safetensors(path, dict(without_duplicates(content)))


def without_duplicates(content: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield tied weights once, under their first name, as in Hugging Face's files."""
    seen: set[tuple[Any, ...]] = set()
    for name, value in content.items():
        if value.numel():
            memory = (value.data_ptr(), value.shape, value.stride(), value.dtype)
            if memory in seen:
                continue
            seen.add(memory)
        yield name, value


def runs_by_size(items: Iterable[Item], size_of: Callable[[Item], int], limit: float) -> Iterator[list[Item]]:
    """Group items in order into lists whose sizes fit the limit. A larger item gets its own list."""
    run: list[Item] = []
    used = 0
    for item in items:
        size = size_of(item)
        if run and used + size > limit:
            yield run
            run, used = [], 0
        run.append(item)
        used += size
    if run:
        yield run


def shards_of(items: Iterable[tuple[Any, Any]], limit_mib: float) -> Iterator[tuple[dict[Any, Any], int]]:
    """Group items in order into (items, bytes) shards within ``limit_mib``. A larger item gets its own shard."""
    for run in runs_by_size(items, lambda item: bytes_of(item[1]), limit_mib * MIB):
        shard = dict(run)
        yield shard, bytes_of(shard)


def bytes_of(value: Any) -> int:
    """Return the bytes of the tensors in a value."""
    if isinstance(value, torch.Tensor):
        return int(value.numel() * value.element_size())
    return sum(map(bytes_of, value.values())) if isinstance(value, dict) else 0
