"""Sources of records: lines of JSON, a JSON list, parquet, and directories of these or of `datasets`.

Nothing is said here about what a record holds.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from core.checkpoint.bounded_read import read_bytes
from core.training.errors import ConfigError
from core.training.extras import require
from core.training.hub import cached_data, how_to_download

Part = Literal["train", "validation"]
Records = Iterator[tuple[str, dict[str, Any]]]
LINES, PARQUET = (".jsonl", ".json", ".ndjson"), ".parquet"
# How the name of a split begins, the first choice first.
SPLITS: dict[Part, tuple[str, ...]] = {"train": ("train",), "validation": ("valid", "dev", "eval", "test")}
UTF_16 = codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE  # how a file in UTF-16 begins
LONGEST_LIST = 1 << 31  # bytes; lines are read one by one
ONE_DATASET, SEVERAL = "dataset_info.json", "dataset_dict.json"  # as datasets.save_to_disk writes them
FIX = "give lines of JSON, a parquet file, or a directory of datasets.save_to_disk"


def read_source(place: Path, part: Part, flag: str) -> Records:
    """(where it stands, record) of each record of a file or a directory. ConfigError names the option `flag`.

    part: which split of a directory is read.
    """
    place = Path(cached_data(str(place)))
    try:
        if place.is_dir():
            yield from _read_directory(place, part, flag)
        elif place.is_file():
            yield from _read_file(place, flag)
        else:
            hub = how_to_download(str(place), "dataset")
            raise ConfigError(f"{flag} {place} is no file and no directory (from {Path.cwd()}); {FIX}{hub}")
    except (OSError, ValueError) as error:  # a name with a NUL is a ValueError, and so are errors of pyarrow
        if isinstance(error, ConfigError):
            raise
        reason = " ".join(str(error).split())[:300]
        raise ConfigError(f"{flag} {str(place)[:300]!r} cannot be read: {reason}") from error


def _read_directory(place: Path, part: Part, flag: str) -> Records:
    if (place / SEVERAL).is_file():
        splits = sorted(inner.name for inner in place.iterdir() if (inner / ONE_DATASET).is_file())
        chosen = _of_split(splits, part)
        if len(chosen) != 1:
            raise ConfigError(
                f"{flag} {place} has the splits {', '.join(splits) or 'none'}; give the directory of one of them, such "
                f"as {place / (splits or ['train'])[0]}"
            )
        place = place / chosen[0]
    if (place / ONE_DATASET).is_file():
        yield from _read_dataset(place)
        return
    visible = (path.relative_to(place) for path in sorted(place.rglob("*")) if path.is_file())
    found = [
        path
        for path in visible
        if path.suffix in (".jsonl", ".ndjson", PARQUET) or (path.suffix == ".json" and _is_list(place / path))
    ]
    found = [path for path in found if not any(name.startswith(".") for name in path.parts)]
    names = {str(path): path for path in found}
    chosen = _of_split(list(names), part)
    if len({(names[name].parent, names[name].suffix) for name in chosen}) != 1:
        listed = ", ".join(chosen or list(names)) or "none"
        raise ConfigError(
            f"{flag} {place} is a directory, and its files of one split are not plain to see; {FIX}. Its files of data "
            f"are {listed[:300]}"
        )
    for name in chosen:
        yield from _read_file(place / name, flag)


def _of_split(names: Sequence[str], part: Part) -> list[str]:
    """The names of a split: those of which a folder or the file begins with its word. Without any, a single name."""
    for word in SPLITS[part]:
        found = [name for name in names if any(piece.startswith(word) for piece in Path(name).parts)]
        if found:
            return found
    return list(names) if len(names) == 1 else []


def _read_file(file: Path, flag: str) -> Records:
    count = 0
    for where, record in _read_parquet(file) if file.suffix == PARQUET else _read_json(file):
        count += 1
        yield where, record
    if count == 0:
        raise ConfigError(f"{flag} {file} holds no line")


def _read_json(file: Path) -> Records:
    with file.open("rb") as opened:
        if opened.read(2) in UTF_16:
            raise ConfigError(f"{file}, line 1 begins as UTF-16 text does; write the file in UTF-8")
    if _is_list(file):
        for number, record in enumerate(_parsed(read_bytes(file, LONGEST_LIST), str(file)), start=1):
            yield f"{file}, item {number}", _object(record, f"{file}, item {number}")
        return
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                where = f"{file}, line {number}"
                yield where, _object(_parsed(line, where), where)


def _is_list(file: Path) -> bool:
    """True for a file whose text begins with a JSON list."""
    with file.open("rb") as opened:
        return opened.read(4096).lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"[")


def _read_parquet(file: Path) -> Records:
    parquet = require("pyarrow.parquet", f"reading {file}", "data")
    number = 0
    with parquet.ParquetFile(file) as opened:
        for batch in opened.iter_batches(1024):
            for record in batch.to_pylist():
                number += 1
                yield f"{file}, row {number}", record


def _read_dataset(place: Path) -> Records:
    datasets = require("datasets", f"reading {place}", "data")
    datasets.disable_progress_bars()
    try:
        for number, record in enumerate(datasets.load_from_disk(str(place)), start=1):
            yield f"{place}, row {number}", record
    except (KeyError, RuntimeError, ImportError, TypeError) as error:  # what the package raises for broken files
        raise ValueError(str(error)) from error


def _object(record: Any, where: str) -> dict[str, Any]:
    if not isinstance(record, dict):
        raise ConfigError(f"{where} is {type(record).__name__}; expected a JSON object")
    return record


def _parsed(line: bytes, where: str) -> Any:
    """The JSON in some bytes. ConfigError for what no tokenizer could read, and for a name that is there twice."""
    try:
        text = line.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{where} is no UTF-8 text: {error}") from None
    try:
        found = json.loads(text, object_pairs_hook=_each_once)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where} is no JSON: {error}") from None
    if "\\ud" in text.lower():  # the escape of half a character, which no tokenizer takes alone
        try:
            json.dumps(found, ensure_ascii=False).encode("utf-8")
        except UnicodeEncodeError as error:
            half = f"\\u{ord(error.object[error.start]):04x}"
            raise ConfigError(
                f"{where} has the escape {half} alone, which is half of a character; give both halves, or take it out"
            ) from None
    return found


def _each_once(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON. ValueError for a name that it has twice: one of the two values would be lost."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in found if names.count(name) > 1)
        raise ValueError(f"an object has the name {twice!r} twice")
    return found
