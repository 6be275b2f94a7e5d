"""Files of tensors: every damaged byte is found, and what is no such file is refused without being waited for."""

from __future__ import annotations

import json
import os
import random
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from core.checkpoint.errors import CheckpointDamaged, CheckpointError
from core.checkpoint.weights.index import read_names, write_index
from core.checkpoint.weights.one_file import (
    check,
    describe,
    is_kind_with_point,
    load,
    only_writer,
    save_safetensors,
    save_torch,
)

CONTENT = {"weight": torch.arange(5000.0), "step": torch.tensor(7)}
WRITERS = [save_torch, save_safetensors]


@pytest.fixture(params=WRITERS, ids=["torch", "safetensors"])
def write(request: pytest.FixtureRequest) -> Callable[[Path, Any], None]:
    if request.param is save_safetensors:
        pytest.importorskip("safetensors")
    return request.param


def test_a_flipped_bit_anywhere_is_found(tmp_path: Path, write: Callable[[Path, Any], None]) -> None:
    path = tmp_path / "model"
    write(path, CONTENT)
    intact = path.read_bytes()
    assert [file.name for file in tmp_path.iterdir()] == ["model"]
    assert {name: value.tolist() for name, value in load(path).items()} == {k: v.tolist() for k, v in CONTENT.items()}
    choose = random.Random(1)
    for place in [0, 8, len(intact) - 1, *choose.sample(range(len(intact)), 300)]:
        damaged = bytearray(intact)
        damaged[place] ^= 1 << choose.randrange(8)
        path.write_bytes(damaged)
        try:
            found = load(path)
        except CheckpointDamaged:
            continue
        # A bit of the words around the digits makes it a file without digits; its tensors are those that were saved.
        assert all(torch.equal(found[name], value) for name, value in CONTENT.items()), f"byte {place}"
        assert b"crc32" not in damaged or place > len(intact) - 18, f"byte {place} of {len(intact)}"
    for length in (0, 3, 30, len(intact) - 1):
        path.write_bytes(intact[:length])
        with pytest.raises(CheckpointDamaged):
            load(path)


def test_a_file_that_was_made_longer_is_refused_unread(tmp_path: Path, write: Callable[[Path, Any], None]) -> None:
    """Holes take no place on the disk, and hours to read where they are large enough."""
    path = tmp_path / "model"
    write(path, CONTENT)
    os.truncate(path, 1 << 30)
    with pytest.raises(CheckpointDamaged, match="is not a complete safetensors file|is no file of tensors|is cut"):
        load(path)


def save_legacy(path: Path, content: Any) -> None:
    """As torch wrote files before its version 1.6."""
    torch.save(content, path, _use_new_zipfile_serialization=False)


@pytest.mark.parametrize("writer", [save_torch, save_safetensors, save_legacy])
def test_a_file_of_either_kind_says_what_it_holds(tmp_path: Path, writer: Callable[[Path, Any], None]) -> None:
    if writer is save_safetensors:
        pytest.importorskip("safetensors")
    with_point = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64]
    whole = [torch.int64, torch.int8, torch.uint8, torch.bool]
    content = {str(dtype): torch.zeros(2, 3).to(dtype) for dtype in (*with_point, *whole)}
    writer(tmp_path / "model", content)
    found = describe(tmp_path / "model")
    assert all(found[name].shape == [2, 3] for name in content)
    assert {name for name, (_, kind) in found.items() if is_kind_with_point(kind)} == set(map(str, with_point))
    assert found.keys() == content.keys()


def test_a_file_is_described_without_its_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of torch is mapped, so that no value is read."""
    save_torch(tmp_path / "model.bin", CONTENT)
    options: list[dict[str, Any]] = []
    real = torch.load
    monkeypatch.setattr(torch, "load", lambda *args, **kwargs: options.append(kwargs) or real(*args, **kwargs))
    assert describe(tmp_path / "model.bin") == {"weight": ([5000], "float32"), "step": ([], "int64")}
    assert [each["mmap"] for each in options] == [True]


def test_torch_and_safetensors_alone_read_what_was_written(tmp_path: Path) -> None:
    save_torch(tmp_path / "model.pt", CONTENT)
    for mmap in (False, True):
        found = torch.load(tmp_path / "model.pt", weights_only=True, mmap=mmap)
        assert torch.equal(found["weight"], CONTENT["weight"])
    theirs = pytest.importorskip("safetensors.torch")
    save_safetensors(tmp_path / "model.safetensors", CONTENT)
    assert torch.equal(theirs.load_file(tmp_path / "model.safetensors")["weight"], CONTENT["weight"])
    theirs.save_file(CONTENT, tmp_path / "foreign.safetensors")
    torch.save(CONTENT, tmp_path / "foreign.pt")
    for name in ("foreign.safetensors", "foreign.pt"):
        assert torch.equal(load(tmp_path / name)["weight"], CONTENT["weight"])


def test_a_file_that_inflates_and_one_that_is_no_file_are_refused(tmp_path: Path) -> None:
    torch.save(CONTENT, tmp_path / "stored")
    with (
        zipfile.ZipFile(tmp_path / "stored") as source,
        zipfile.ZipFile(tmp_path / "inflates", "w", zipfile.ZIP_DEFLATED) as target,
    ):
        for entry in source.infolist():
            target.writestr(entry.filename, source.read(entry.filename))
    with pytest.raises(CheckpointDamaged, match="would inflate to more than its"):
        load(tmp_path / "inflates")
    os.mkfifo(tmp_path / "fifo")
    for path in (tmp_path / "fifo", Path("/dev/zero"), tmp_path):
        with pytest.raises(OSError, match=r"is no regular file|Is a directory"):
            check(path)


def test_two_writers_of_one_file_are_distinguished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("core.checkpoint.weights.one_file.LOCK_LIMIT_S", 0.1)
    refused = pytest.raises(CheckpointError, match=r"another process is writing .*\.model\.tmp")
    with only_writer(tmp_path / ".model.tmp", Path.touch), refused:
        save_torch(tmp_path / "model", CONTENT)
    save_torch(tmp_path / "model", CONTENT)


@pytest.mark.parametrize(
    "content",
    [
        b"[1]",
        b"{}",
        b'{"weight_map": 3}',
        b'{"weight_map": {"a": "../outside"}}',
        b'{"weight_map": {"a": "/etc/passwd"}}',
        b'{"weight_map": {"a": ".."}}',
        b'{"weight_map": {"a": "nul\\u0000"}}',
        b'{"weight_map": {"a": 3}}',
        b'{"weight_map": {"a": ["b"]}}',
        b"[" * 100_000,
        b'{"weight_map": {"a": ' + b"1" * 5000 + b"}}",
        b'{"weight_map": {}, "metadata": []',
        b"\xff\xfe",
    ],
    ids=lambda content: content[:40].decode(errors="replace"),
)
def test_an_index_that_is_none_or_names_files_elsewhere_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "model.safetensors.index.json"
    path.write_bytes(content)
    with pytest.raises(CheckpointDamaged, match="is no index of tensors"):
        read_names(path)


def test_an_index_that_never_ends_is_refused_unread(tmp_path: Path) -> None:
    with open(tmp_path / "sparse", "wb") as stream:
        stream.truncate(16 << 30)
    os.mkfifo(tmp_path / "fifo")
    for name, words in (("sparse", "has 17179869184 bytes"), ("fifo", "no regular file")):
        with pytest.raises(CheckpointDamaged, match=words):
            read_names(tmp_path / name)


def test_an_index_knows_its_own_bytes(tmp_path: Path) -> None:
    path = tmp_path / "index.json"
    write_index(path, {"a": "one", "b": "two"}, {"total_size": 8, "param_groups": "groups"})
    weight_map, metadata = read_names(path)
    assert weight_map == {"a": "one", "b": "two"} and metadata["total_size"] == 8
    path.write_text(path.read_text().replace("one", "two"))
    with pytest.raises(CheckpointDamaged, match="other bytes than were saved"):
        read_names(path)
    path.write_text(json.dumps({"weight_map": {"a": "theirs"}}))
    assert read_names(path) == ({"a": "theirs"}, {})
