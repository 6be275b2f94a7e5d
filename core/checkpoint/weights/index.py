"""File names of a model or an optimizer: resolution of a path to files, and the index of their shards."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from core.checkpoint.bounded_read import file_name, parse_json, read_bytes
from core.checkpoint.durable_file import write_durably
from core.checkpoint.errors import CheckpointDamaged
from core.checkpoint.weights.one_file import SAFE_SUFFIX, checksum_in, in_turn, open_safetensors

INDEX_SUFFIX = ".index.json"
SAVING = ".saving-"  # prefix of the hidden directory of a save
FILES = "files_crc32"  # entry of an index's metadata: {file: checksum} of all files of the save
TORCH_SUFFIXES = (".bin", ".pt", ".pth")


class Names(NamedTuple):
    """The file names of one checkpoint in a directory."""

    whole: str
    index_file: str

    def shard(self, number: int) -> str:
        stem, suffix = self.whole.rsplit(".", 1)
        return f"{stem}-{number:05d}.{suffix}"


def model_names(prefix: str | None = None, use_safetensors: bool = False) -> Names:
    """Return the names pytorch_model.bin or model.safetensors, and its index, both after ``<prefix>.``."""
    return _names(prefix, "model.safetensors" if use_safetensors else "pytorch_model.bin")


def optimizer_names(prefix: str | None = None) -> Names:
    """Return the names pytorch_optim.bin and its index, both after ``<prefix>.``."""
    return _names(prefix, "pytorch_optim.bin")


def group_name(prefix: str | None = None) -> str:
    """Return the file name of a sharded optimizer's parameter groups."""
    return _names(prefix, "pytorch_optim_group.bin").whole


def _names(prefix: str | None, whole: str) -> Names:
    whole = f"{prefix}.{whole}" if prefix else whole
    return Names(whole, whole + INDEX_SUFFIX)


# -- files of a path --------------------------------------------------------------------------------------------------


def find_checkpoint(checkpoint: str | os.PathLike[str], *, optimizer: bool, prefix: str | None = None) -> Path:
    """Resolve a path to a single weight file or an index of a model, or of an optimizer.

    If a directory has a model both in safetensors and in torch files of another program, the safetensors are used, as
    in transformers. Raises FileNotFoundError if there is no such file, and ValueError if a directory has several.
    """
    path = committed(Path(checkpoint))
    if path.is_file():
        return path
    if not path.is_dir():
        raise FileNotFoundError(f"there is no checkpoint file or directory at {path.absolute()}")
    kinds = [optimizer_names(prefix)] if optimizer else [model_names(prefix), model_names(prefix, True)]
    found = [committed(path / name) for names in kinds for name in (names.index_file, names.whole)]
    found = [file for file in found if file.is_file()]
    if not found and prefix is None:  # saved with another prefix or by another program
        files = [
            file for place in ("", f"{SAVING}*/") for file in path.glob(f"{place}*{INDEX_SUFFIX}") if file.is_file()
        ]
        indices = sorted({file.name for file in files if ("optim" in file.name) == optimizer})
        found = [committed(path / name) for name in indices]
    found = [file for file in found if file.parent != path] or found  # a committed save replaces the others
    if not found:
        what = "an optimizer" if optimizer else "a model"
        raise FileNotFoundError(f"{path.absolute()} holds no checkpoint of {what}: {sorted(os.listdir(path))}")
    of_torch = [file for file in found if SAFE_SUFFIX not in file.suffixes]
    if len(of_torch) < len(found) and not any(map(_is_ours, of_torch)):
        found = [file for file in found if file not in of_torch]
    if len(found) > 1:
        raise ValueError(
            f"Found multiple index files in {path.absolute()}: {[file.name for file in found]}, please remove "
            "redundant ones, or give the path of one of them"
        )
    return found[0]


def _is_ours(file: Path) -> bool:
    """Return ``True`` if a weight file or an index carries a checksum."""
    return ("crc32" in read_names(file)[1]) if is_index(file) else checksum_in(file) is not None


def is_index(path: Path) -> bool:
    """Return ``True`` if the file has the name of an index."""
    return path.name.endswith(INDEX_SUFFIX) or path.suffix == ".json"


def weight_files(directory: Path) -> list[Path]:
    """Return the files of a model in a directory: a single file, or the shards of an index.

    Raises FileNotFoundError if there is no model or a shard is missing, ValueError if the directory has several models,
    and CheckpointDamaged as ``read_index`` does.
    """
    found = find_checkpoint(directory, optimizer=False)
    return sorted(set(read_index(found)[0].values())) if is_index(found) else [found]


def open_files(found: Path, rank: int = 0, world: int = 1) -> dict[Path, Any]:
    """Open a safetensors file, or the files of an index, and return them by path.

    Each file's checksum is verified by one of the ``world`` ranks that call this. Raises CheckpointDamaged as
    ``open_safetensors`` and ``read_index`` do, or if a file lacks a tensor that the index lists for it, and
    FileNotFoundError if a file is missing.
    """
    names = read_index(found)[0] if is_index(found) else {}
    opened = {}
    for file in sorted(set(names.values())) or [found]:
        opened[file] = open_safetensors(file, verify=in_turn(file, rank, world))
        _expect_names(file, {name for name, path in names.items() if path == file}, opened[file].keys())
    return opened


def journal_of(directory: Path, names: Names) -> Path:
    """Return the hidden directory of a save."""
    return directory / f"{SAVING}{names.index_file}"


def committed(index: Path) -> Path:
    """Return the index to read: in the hidden directory while a committed save is not fully moved, else itself."""
    pending = index.parent / f"{SAVING}{index.name}" / index.name
    return pending if pending.is_file() else index


# -- contents of an index ---------------------------------------------------------------------------------------------


def write_index(path: Path, weight_map: Mapping[str, str], metadata: Mapping[str, Any]) -> None:
    """Write the index of the files in its directory, from each tensor's file name.

    Its metadata stores its own checksum and the checksums of all files there, so that a file of another save is
    detected.
    """
    saved_with = {file.name: digits for file in path.parent.iterdir() if (digits := checksum_in(file))}
    content = {"metadata": {**metadata, FILES: saved_with}, "weight_map": dict(weight_map)}
    content["metadata"]["crc32"] = _crc32_of_index(content)
    write_durably(path, json.dumps(content, indent=2).encode() + b"\n", 0)


def read_names(path: Path) -> tuple[dict[str, str], dict[str, Any]]:
    """Read ({tensor: file name}, metadata) from an index without checking that its files exist.

    Raises CheckpointDamaged if the file is not an index, or names files outside its directory.
    """
    try:
        content = parse_json(read_bytes(path))
        weight_map, metadata = dict(content["weight_map"]), dict(content.get("metadata", {}))
        digits = metadata.get("crc32")
        if digits is not None and digits != _crc32_of_index(content):
            raise ValueError("has other bytes than were saved")
        for name in (*weight_map.values(), *dict(metadata.get(FILES, {})), metadata.get("param_groups", "-")):
            file_name(name)
    except (OSError, ValueError, TypeError, LookupError, AttributeError) as error:
        raise CheckpointDamaged(f"{path} is no index of tensors: {error}") from None
    return weight_map, metadata


def read_index(path: Path) -> tuple[dict[str, Path], dict[str, Any]]:
    """Read ({tensor: file}, metadata) from an index and check its files.

    An index written by another program has no checksums. Raises FileNotFoundError, naming the shard, if one is missing,
    and CheckpointDamaged if a shard belongs to another save, because its checksum differs from the index.
    """
    names, metadata = read_names(path)
    weight_map = {key: _next_to(path, name) for key, name in names.items()}
    files = dict.fromkeys(weight_map.values())
    if "param_groups" in metadata:
        files[groups_of(path, metadata)] = None
    missing = sorted({file.name for file in files if not file.is_file()})
    if missing:
        raise FileNotFoundError(f"{path.name} in {path.parent.absolute()} lists {missing}, which are not files there")
    saved_with = metadata.get(FILES, {})
    for file in files:
        expected, found = saved_with.get(file.name), checksum_in(file)
        if expected not in (None, found):
            raise CheckpointDamaged(
                f"{file} is not the file that {path.name} was saved with: its checksum is {found}, and the index says "
                f"{expected}. It is of another save, or a copy of another file; take all files of one save"
            )
    return weight_map, metadata


def groups_of(index: Path, metadata: Mapping[str, Any]) -> Path:
    """Return the param group file that an optimizer's index names. Raises CheckpointDamaged if it names none."""
    if "param_groups" not in metadata:
        raise CheckpointDamaged(f"{index} names no file of parameter groups, so it is no index of an optimizer")
    return _next_to(index, metadata["param_groups"])


def readers(
    weight_map: Mapping[str, Path],
    metadata: Mapping[str, Any],
    low_cpu_mem_mode: bool,
    num_threads: int,
    load: Callable[[Path], Any],
) -> list[Callable[[], Any]]:
    """Return one function per file that returns its contents by calling ``load``.

    The first two arguments are the results of ``read_index``. With ``low_cpu_mem_mode`` a file is read when its
    function is called; otherwise ``num_threads`` threads read all files now. The functions raise CheckpointDamaged if
    their file lacks a tensor that the index lists for it. Files with a checksum in the index need no such check.
    """
    known = metadata.get(FILES, {})
    keys: dict[Path, set[str]] = {}
    for key, path in weight_map.items():
        keys.setdefault(path, set()).add(key)

    def read(path: Path) -> Any:
        content = load(path)
        if path.name not in known:
            _expect_names(path, keys[path], content)
        return content

    if low_cpu_mem_mode:
        return [partial(read, path) for path in keys]
    with ThreadPoolExecutor(max(1, num_threads)) as threads:
        contents = list(threads.map(read, keys))
    return [lambda content=content: content for content in contents]  # type: ignore[misc]


def _expect_names(path: Path, expected: set[str], found: Iterable[Any]) -> None:
    lacking = expected - set(map(str, found))
    if lacking:
        raise CheckpointDamaged(
            f"{path} lacks {len(lacking)} tensors that the index names in it; take all files of one save"
        )


def _next_to(index: Path, name: str) -> Path:
    file = index.parent / file_name(name)
    return index.parent.parent / name if index.parent.name.startswith(SAVING) and not file.exists() else file


def _crc32_of_index(content: Mapping[str, Any]) -> str:
    rest = {**content, "metadata": {key: value for key, value in content["metadata"].items() if key != "crc32"}}
    return f"{zlib.crc32(json.dumps(rest, sort_keys=True).encode()):08x}"
