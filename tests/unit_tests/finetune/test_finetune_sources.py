"""Files and directories of data: each gives the records that were written, as often as its weight says."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")
pytest.importorskip("tyro")

from core.finetune.config import TunedData, load_config
from core.finetune.model import byte_tokenizer
from core.finetune.plan import plan_tuning
from core.finetune.records import read_records
from core.finetune.windows import open_windows, prepare_windows, read_documents
from core.training.errors import ConfigError
from core.training.extras import MissingExtra

CHATS: list[dict[str, Any]] = [
    {"messages": [{"role": "user", "content": f"é {n}?"}, {"role": "assistant", "content": str(n)}], "id": n}
    for n in range(5)
]


def write_lines(file: Path, records: list[dict[str, Any]]) -> None:
    file.write_text("".join(json.dumps(record) + "\n\n" for record in records))


def write_list(file: Path, records: list[dict[str, Any]]) -> None:
    file.write_text("\ufeff \n" + json.dumps(records, indent=2))


def write_parquet(file: Path, records: list[dict[str, Any]]) -> None:
    pytest.importorskip("pyarrow")
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), file, row_group_size=2)


def save_to_disk(place: Path, records: list[dict[str, Any]]) -> None:
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_list(records).save_to_disk(place)


def save_splits(place: Path, records: list[dict[str, Any]]) -> None:
    datasets = pytest.importorskip("datasets")
    splits = {"train": datasets.Dataset.from_list(records), "test": datasets.Dataset.from_list(CHATS[:1])}
    datasets.DatasetDict(splits).save_to_disk(place)


def write_files(place: Path, records: list[dict[str, Any]]) -> None:
    """As `hf download --local-dir` leaves a repository."""
    (place / "data").mkdir(parents=True)
    (place / "README.md").write_text("[a card]")
    write_list(place / "dataset_infos.json", [])
    write_parquet(place / "data" / "train-00000-of-00002.parquet", records[:2])
    write_parquet(place / "data" / "train-00001-of-00002.parquet", records[2:])
    write_parquet(place / "data" / "validation.parquet", CHATS[:1])


@pytest.mark.parametrize(
    ("name", "write"),
    [
        ("a.jsonl", write_lines),
        ("b.json", write_list),
        ("c.parquet", write_parquet),
        ("saved", save_to_disk),
        ("splits", save_splits),
        ("downloaded", write_files),
    ],
)
def test_each_kind_of_source_gives_the_records_that_were_written(
    name: str, write: Callable[[Path, list[dict[str, Any]]], None], tmp_path: Path
) -> None:
    write(tmp_path / name, CHATS)
    found = list(read_records(tmp_path / name, None))
    assert [record for _, record in found] == CHATS
    assert all(where.startswith(str(tmp_path / name)) for where, _ in found)
    assert len(list(read_records(tmp_path / name, 3))) == 3
    if name in ("splits", "downloaded"):
        assert [record for _, record in read_records(tmp_path / name, None, part="validation")] == CHATS[:1]


def test_a_weight_says_how_often_documents_are_trained_on(tmp_path: Path) -> None:
    files = tuple(tmp_path / name for name in ("one.jsonl", "two.jsonl", "three.jsonl"))
    for number, file in enumerate(files):
        write_lines(file, [{"text": f"{number}{letter}"} for letter in "abcd"])
    options = TunedData(file=files, weights=(2.5, 0.5, 1.0), limit=4, validation_fraction=0.25, cache=tmp_path / "c")
    found = [(record["text"], held_out) for _, record, held_out in read_documents(options)]
    trained = ["0a", "0a", "0b", "0b", "0b", "0c", "0c", "1b", "2a", "2b", "2c"]
    assert [text for text, held_out in found if not held_out] == trained
    assert [text for text, held_out in found if held_out] == ["0d", "1d", "2d"]  # once each
    windows = open_windows(options.cache / prepare_windows(options, 16, byte_tokenizer()))
    assert windows.header.text == f"{files[0]} x 2.5, {files[1]} x 0.5, {files[2]}"
    assert windows.header.documents == len(trained) + 3
    others = TunedData(file=files, limit=4, validation_fraction=0.25, cache=options.cache)
    assert prepare_windows(others, 16, byte_tokenizer()) != windows.header.digest


def test_a_flag_that_is_given_twice_names_two_files() -> None:
    words = ["--data", "a.jsonl", "--tp", "2", "--data=b c.parquet", "--data.weights", "2", "0.5"]
    data = load_config(words).data
    assert data.file == (Path("a.jsonl"), Path("b c.parquet")) and data.weights == (2.0, 0.5)
    assert load_config(["--data", "a", "b", "--data", "c"]).data.file == (Path("a"), Path("b"), Path("c"))
    assert load_config([]).data.file == ()
    with pytest.raises(ConfigError, match=r"--data\.file"):
        load_config(["--data", "--tp", "2"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--data.weights 1", "--data.weights has 1 numbers, and --data names 0 files; give one weight for each"),
        ("--data a --data b --data.weights 1", "has 1 numbers, and --data names 2 files"),
        ("--data a --data.weights 0", "--data.weights 0: expected numbers above 0, and at most 100"),
        ("--data a --data.weights nan", "--data.weights nan: expected numbers above 0, and at most 100"),
    ],
)
def test_weights_that_do_not_fit_are_refused(words: str, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        plan_tuning(load_config(words.split()), 2)


def broken_parquet(place: Path) -> Path:
    (place / "a.parquet").write_bytes(b"PAR1 cut")
    return place / "a.parquet"


def folders(place: Path) -> Path:
    for name in ("main", "socratic"):
        (place / name).mkdir()
        write_lines(place / name / "train.jsonl", [{"text": name}])
    return place


def splits_alone(place: Path) -> Path:
    datasets = pytest.importorskip("datasets")
    datasets.DatasetDict({name: datasets.Dataset.from_list(CHATS) for name in "ab"}).save_to_disk(place / "saved")
    return place / "saved"


def broken_dataset(place: Path) -> Path:
    save_to_disk(place / "saved", CHATS)
    next((place / "saved").glob("*.arrow")).write_bytes(b"cut")
    return place / "saved"


def item(place: Path) -> Path:
    (place / "a.json").write_text('[{"text": "x"}, 3]')
    return place / "a.json"


def no_text(place: Path) -> Path:
    write_parquet(place / "a.parquet", [{"text": "x"}, {"text": None}])
    return place / "a.parquet"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (broken_parquet, "a.parquet' cannot be read: "),
        (
            folders,
            "its files of one split are not plain to see; give lines of JSON, a parquet file, or a directory of ",
        ),
        (folders, "are main/train.jsonl, socratic/train.jsonl"),
        (splits_alone, "saved has the splits a, b; give the directory of one of them, such as "),
        (broken_dataset, "saved' cannot be read: "),
        (item, "a.json, item 2 is int; expected a JSON object"),
        (no_text, "a.parquet, row 2 has the fields none; expected "),
    ],
)
def test_a_source_that_cannot_be_read_is_refused_by_its_name(
    make: Callable[[Path], Path], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        list(read_records(make(tmp_path), None))


@pytest.mark.parametrize(
    ("package", "name", "write"), [("pyarrow.parquet", "a.parquet", write_parquet), ("datasets", "saved", save_to_disk)]
)
def test_a_package_that_is_not_installed_is_named(
    package: str, name: str, write: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / name, CHATS)
    monkeypatch.setitem(__import__("sys").modules, package, None)
    with pytest.raises(MissingExtra, match=rf"reading .*{name} needs the package '{package.partition('.')[0]}'"):
        list(read_records(tmp_path / name, None))
