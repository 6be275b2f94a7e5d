"""The main job on Megatron's .bin/.idx and on a data set of Hugging Face: the losses of the same tokens from text."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np
import pytest
import torch.distributed as dist

pytest.importorskip("tyro")

from core_plan.job.config import DataOptions
from core_plan.job.config_file import load_config
from core_plan.job.errors import ConfigError
from core_train.job import job_tokens
from core_train.main import main
from core_train.text import open_dataset
from core_train.tokens import describe_pair, open_tokens, prepare_tokens, read_index
from tests.unit_tests.core_train.training_reference import TINY, losses_on_ranks
from tests.unit_tests.ranks import ranks

WORDS = [
    "a",
    "quick",
    "brown",
    "fox",
    "jumps",
    "over",
    "the",
    "lazy",
    "dog",
    "and",
    "runs",
    "away",
    "from",
    "seventeen",
    "hungry",
    "wolves",
]
CODES = {"uint8": 1, "uint16": 8, "int32": 4, "int64": 5}
STEPS = 4
SHORT = [
    *TINY,
    "--tp",
    "1",
    "--run.steps",
    str(STEPS),
    "--optimizer.warmup-steps",
    "2",
    "--run.validation-windows",
    "4",
]
SHORT += ["--model.vocab-size", "256"]  # whatever the largest token is


def documents(count: int = 400) -> list[str]:
    draws = np.random.default_rng(5)
    return [" ".join(draws.choice(WORDS, int(draws.integers(5, 60)))) for _ in range(count)]


def write_pair(prefix: Path, parts: list[np.ndarray], dtype: str = "uint8") -> None:
    """As the format says: magic, version, code, numbers of sequences and marks; lengths, places, marks."""
    lengths = np.array([len(part) for part in parts], "<i4")
    places = np.concatenate([[0], np.cumsum(lengths[:-1], dtype="<i8") * np.dtype(dtype).itemsize]).astype("<i8")
    marks = np.arange(len(parts) + 1, dtype="<i8")
    head = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, CODES[dtype], len(parts), len(marks))
    prefix.with_suffix(".idx").write_bytes(head + lengths.tobytes() + places.tobytes() + marks.tobytes())
    prefix.with_suffix(".bin").write_bytes(b"".join(part.astype(dtype).tobytes() for part in parts))


def as_bytes(texts: list[str]) -> list[np.ndarray]:
    return [np.frombuffer(text.encode() + b"\0", np.uint8) for text in texts]


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """Flags for the same documents as text, as a pair of files, and as rows."""
    folder = tmp_path_factory.mktemp("sources")
    texts = documents()
    (folder / "all.txt").write_text("\0".join(texts))  # one file: the order of several is mixed
    write_pair(folder / "pair", as_bytes(texts), "uint16")
    (folder / "rows.jsonl").write_text("".join(json.dumps({"body": text, "n": 1}) + "\n" for text in texts))
    cache = ["--data.cache", str(folder / "cache")]
    rows = ["--data.dataset", "json", "--data.text", str(folder / "rows.jsonl"), "--data.column", "body"]
    return {
        "text": [*cache, "--data.text", str(folder / "all.txt")],
        "megatron": [*cache, "--data.megatron", str(folder / "pair")],
        "dataset": [*cache, *rows],
        "streamed": [*cache, *rows, "--data.streaming"],
    }


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "hf"))


def test_tokens_of_a_pair_are_the_files_and_are_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = [np.array([3, 1, 4, 1, 5]), np.array([9, 70000]), np.array([6])]
    write_pair(tmp_path / "pair", parts, "int32")
    options = DataOptions(megatron=tmp_path / "pair.bin", cache=tmp_path / "cache", validation_fraction=0.25)
    path = prepare_tokens(options)
    tokens = open_tokens(options, path)
    assert np.array_equal(tokens.train, [3, 1, 4, 1, 5, 9]) and np.array_equal(tokens.validation, [70000, 6])
    assert isinstance(tokens.train, np.memmap), "nothing is copied"
    header = tokens.header
    assert (header.files, header.tokens, header.vocab_size, header.loss_unit) == (3, 8, 70001, "nats per token")
    assert header.describe() == "tokens: pair, 3 documents, 8 tokens of int32 (vocabulary 70001)"
    with monkeypatch.context() as patch:
        patch.setattr("core_train.tokens._scanned", None)
        assert describe_pair(tmp_path / "pair.idx", tmp_path / "cache") == path
    write_pair(tmp_path / "pair", parts[::-1], "int32")
    assert describe_pair(tmp_path / "pair", tmp_path / "cache") != path, "other tokens have another digest"


def test_a_bad_pair_is_refused_by_the_files_name(tmp_path: Path) -> None:
    parts = [np.array([3, 1, 4]), np.array([1, 5])]
    index = tmp_path / "pair.idx"

    def expect(words: str) -> None:
        with pytest.raises((ValueError, OSError), match=words):
            read_index(tmp_path / "pair")

    expect("there is no file .*pair.bin")
    write_pair(tmp_path / "pair", parts, "uint16")
    good, tokens = index.read_bytes(), (tmp_path / "pair.bin").read_bytes()
    assert read_index(tmp_path / "pair")[1] == 5
    for content, words in (
        (b"", "is no index of Megatron's"),
        (good[:20], "is no index of Megatron's"),
        (b"x" * 100, "is no index of Megatron's"),
        (good[:9] + struct.pack("<Q", 2) + good[17:], "has version 2 of the format, and 1 is known"),
        (good[:17] + b"\6" + good[18:], "code 6 is no dtype of tokens"),
        (good[:-1], "has 81 bytes, and its 2 sequences and 3 marks of documents take 82"),
        (good + b"\0\0", r"take 82 \(a file with modes, of more than text, is not read\)"),
        (good[:34] + struct.pack("<i", -3) + good[38:], "holds a sequence of -3 tokens"),
        (good[:42] + struct.pack("<qq", 4, 0) + good[58:], "are not contiguous in pair.bin"),
    ):
        index.write_bytes(content)
        expect(words)
    index.write_bytes(good)
    (tmp_path / "pair.bin").write_bytes(tokens[:-1])
    expect("pair.bin has 9 bytes, and pair.idx counts 5 tokens of uint16, 10 bytes")
    write_pair(tmp_path / "pair", [np.array([3, -1])], "int32")
    with pytest.raises(ValueError, match="token 1 is -1; tokens count from 0"):
        describe_pair(tmp_path / "pair", tmp_path / "cache")
    write_pair(tmp_path / "pair", [np.array([], np.int64)], "int32")
    expect("holds no token")


@pytest.mark.parametrize("source", ["megatron", "dataset", "streamed"])
@pytest.mark.in_suite(1)
def test_the_losses_are_those_of_the_same_tokens_from_text(
    tmp_path: Path, sources: dict[str, list[str]], source: str
) -> None:
    if source != "megatron":
        pytest.importorskip("datasets")
    expected = losses_on_ranks(2, [*SHORT, *sources["text"]], tmp_path / "text")
    losses = losses_on_ranks(2, [*SHORT, *sources[source]], tmp_path / source)
    texts = documents()
    tokens = sum(len(text.encode()) + 1 for text in texts)
    # As one text the marks between documents are bytes of it; as rows they are not, and a pair has tokens alone.
    per_unit = {"megatron": 1.0}.get(source, (tokens - len(texts)) / tokens) / ((tokens - 1) / tokens)
    assert losses == pytest.approx([loss / per_unit for loss in expected], rel=1e-12)
    assert expected[-1] < expected[0] - 0.2


@pytest.mark.parametrize("source", ["megatron", "streamed"])
@pytest.mark.in_suite(1)
def test_a_run_in_two_parts_goes_on_at_the_right_sample(
    tmp_path: Path, sources: dict[str, list[str]], source: str
) -> None:
    if source != "megatron":
        pytest.importorskip("datasets")
    flags = [*SHORT, *sources[source]]
    whole = losses_on_ranks(2, flags, tmp_path / "whole")
    saved = ["--checkpoint.dir", str(tmp_path / "checkpoints")]
    first = losses_on_ranks(2, [*flags, *saved, "--run.stop-after", "2"], tmp_path / "parts")
    assert first == whole[:2]
    assert losses_on_ranks(2, [*flags, *saved, "--checkpoint.resume"], tmp_path / "parts") == whole


@ranks(2)
def test_a_file_that_breaks_after_the_check_is_refused_on_all_ranks(rank: int, world: int, tmp_path: Path) -> None:
    if rank == 0:
        write_pair(tmp_path / "pair", as_bytes(documents(3)))
        (tmp_path / "pair.bin").write_bytes(b"cut off")
    dist.barrier()
    flags = [*SHORT, "--data.megatron", str(tmp_path / "pair"), "--data.cache", str(tmp_path / "cache")]
    with pytest.raises(ConfigError, match="rank 0 could not prepare the text: --data.megatron .*pair.bin has 7 bytes"):
        job_tokens(load_config(flags), prepares_data=rank == 0)


def test_options_that_cannot_be_obeyed_are_refused_by_name_before_ranks_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("core_train.main.start_ranks", lambda _: 77)
    write_pair(tmp_path / "pair", as_bytes(documents()))
    (tmp_path / "rows.jsonl").write_text('{"text": "one"}\n{"text": 3}\n')
    cases = [
        (["--data.megatron", "pair", "--data.text", "rows.jsonl"], "--data.text and --data.megatron both set"),
        (["--data.megatron", "other"], "there is no file other.bin"),
        (["--data.megatron", "pair", "--data.tokenizer", "bpe"], "bpe is trained on text, and --data.megatron gives"),
        (["--data.streaming"], "--data.streaming speaks of a data set, and none is given"),
        (["--data.split", "test"], "--data.split speaks of a data set"),
    ]
    try:
        import datasets  # noqa: F401

        cases += [
            (["--data.dataset", "json"], "--data.dataset json reads files, and none are given"),
            (["--data.dataset", "no/where"], "--data.dataset no/where cannot be opened"),
            (
                ["--data.dataset", "json", "--data.text", "rows.jsonl", "--data.column", "body"],
                "--data.column 'body' is not in the rows of json [train]; they have text",
            ),
        ]
    except ImportError:
        cases.append((["--data.dataset", "json", "--data.text", "rows.jsonl"], "needs the package 'datasets'"))
    for flags, words in cases:
        assert main([*TINY, "--logging.no-plots", *flags]) == 2, flags
        said = capsys.readouterr().err
        assert words in said and said.count("\n") == 1, said


def test_documents_are_rows_of_text_up_to_a_number(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_dict({"text": ["one", "", "three"], "n": [1, 2, 3]})
    rows.save_to_disk(str(tmp_path / "rows"))
    datasets.DatasetDict({"test": rows}).save_to_disk(str(tmp_path / "splits"))
    for streaming in (False, True):
        options = {"streaming": streaming, "documents": 2}
        one = open_dataset(DataOptions(dataset=str(tmp_path / "rows"), **options))
        two = open_dataset(DataOptions(dataset=str(tmp_path / "splits"), split="test", **options))
        assert list(one.documents()) == list(two.documents()) == list(one.documents()) == [b"one", b""]
        assert one.digest() == two.digest()
    with pytest.raises(ValueError, match="--data.split 'train' is not in .*splits; it has test"):
        open_dataset(DataOptions(dataset=str(tmp_path / "splits")))
    with pytest.raises(ValueError, match="row 0 of .* has a int in --data.column 'n'; expected text"):
        open_dataset(DataOptions(dataset=str(tmp_path / "rows"), column="n"))
