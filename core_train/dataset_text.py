"""Text from a data set of Hugging Face's package `datasets`: one column of its rows, in their order."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from core.extras import require
from core_plan.job.config import DataOptions
from core_train.text import digest_of

FILE_KINDS = ("json", "csv", "parquet", "text", "arrow")


@dataclass(frozen=True)
class DatasetText:
    """Rows as documents. `rows` can be iterated many times; a streamed dataset is read again each time."""

    name: str
    rows: Any
    column: str
    limit: int | None

    def documents(self) -> Iterator[bytes]:
        """The column of every row, in order."""
        for number, row in enumerate(self.rows):
            if number == self.limit:
                return
            if self.column not in row:
                raise ValueError(
                    f"--data.column {self.column!r} is not in the rows of {self.name}; they have {', '.join(row)}"
                )
            value = row[self.column]
            if not isinstance(value, str):
                raise ValueError(
                    f"row {number} of {self.name} has a {type(value).__name__} in --data.column {self.column!r}; "
                    "expected text"
                )
            yield value.encode()

    def digest(self) -> str:
        """A hash of the documents and their order."""
        return digest_of(self.documents())


def open_dataset(options: DataOptions) -> DatasetText:
    """The data set that the options name. MissingExtra without the package; ValueError, by the option, else."""
    datasets = require("datasets", "--data.dataset", "data")
    datasets.disable_progress_bars()
    assert options.dataset is not None, "only called for a data set"
    try:
        rows = _rows(datasets, options)
    except (OSError, ValueError, KeyError, RuntimeError, ImportError) as error:  # what the package raises
        said = " ".join(str(error).split())[:300]
        raise ValueError(f"--data.dataset {options.dataset} cannot be opened: {said}") from error
    if not hasattr(rows, "__iter__") or isinstance(rows, dict):
        known = ", ".join(rows) if isinstance(rows, dict) else "none"
        raise ValueError(f"--data.split {options.split!r} is not in {options.dataset}; it has {known}")
    text = DatasetText(f"{options.dataset} [{options.split}]", rows, options.column, options.documents)
    if not any(text.documents()):
        raise ValueError(f"{text.name} is empty: no row has text in --data.column {options.column!r}")
    return text


def _rows(datasets: Any, options: DataOptions) -> Any:
    name = str(options.dataset)
    if Path(name).is_dir() and any(
        (Path(name) / file).is_file() for file in ("dataset_info.json", "dataset_dict.json")
    ):
        found = datasets.load_from_disk(name)
        if not isinstance(found, datasets.DatasetDict):
            return found.to_iterable_dataset() if options.streaming else found
        if options.split not in found:
            return dict(found)
        return found[options.split].to_iterable_dataset() if options.streaming else found[options.split]
    files = {"data_files": {options.split: [str(file) for file in options.text]}} if name in FILE_KINDS else {}
    return datasets.load_dataset(name, split=options.split, streaming=options.streaming, **files)
