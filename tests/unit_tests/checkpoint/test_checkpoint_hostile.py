"""Checkpoints that somebody forged: no code runs, nothing is waited for, memory is bounded, the step before is loaded.

Each case makes the newest step hostile, with checksums that fit: only what the bytes say is wrong.
"""

from __future__ import annotations

import dataclasses
import io
import json
import os
import pickle
import resource
import struct
import time
import warnings
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from core.checkpoint.directory import check_directory, find_intact
from core.checkpoint.errors import CheckpointError
from core.checkpoint.inspection import inspect, verify
from core.checkpoint.item_content import content_error
from core.checkpoint.manifest import CommitRecord
from core.checkpoint.root_directory import list_committed
from tests.unit_tests.checkpoint.checkpoint_saves import assert_is_step, loaded, save_alone

MEMORY_BYTES = 1 << 30  # that a check may add
SECONDS = 20.0


class Harmful:
    """A pickle that makes a file when it is read."""

    def __init__(self, place: Path) -> None:
        self.place = place

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.place,)


def vouch(directory: Path, manifest: bytes) -> None:
    """Put a manifest there, and a commit record that vouches for it."""
    (directory / "manifest.json").write_bytes(manifest)
    commit = CommitRecord.from_json((directory / "commit.json").read_bytes())
    commit = dataclasses.replace(commit, manifest_size=len(manifest), manifest_crc32=zlib.crc32(manifest))
    (directory / "commit.json").write_bytes(commit.to_json())


def edit(directory: Path, change: Callable[[dict[str, Any]], None]) -> None:
    tree = json.loads((directory / "manifest.json").read_bytes())
    change(tree)
    vouch(directory, json.dumps(tree).encode())


def segment_of(tree: dict[str, Any], name: str) -> tuple[dict[str, Any], int]:
    return next((file, n) for file in tree["files"] for n, part in enumerate(file["segments"]) if part[0] == name)


def with_weight(directory: Path, data: bytes) -> None:
    """Put other bytes in the place of a tensor's item, with checksums that fit."""

    def change(tree: dict[str, Any]) -> None:
        file, number = segment_of(tree, "rank0.weight")
        assert len(file["segments"]) == 1 and number == 0
        (directory / file["name"]).write_bytes(data)
        crc = f"{zlib.crc32(data):08x}"
        file |= {"size": len(data), "crc32": crc, "segments": [["rank0.weight", 0, len(data), crc]]}

    edit(directory, change)


# -- the cases -------------------------------------------------------------------------------------------------------


def a_fifo_for_any_file(directory: Path, name: str) -> None:
    (directory / name).unlink()
    os.mkfifo(directory / name)


def a_device_for_any_file(directory: Path, name: str) -> None:
    (directory / name).unlink()
    (directory / name).symlink_to("/dev/zero")


def sixteen_sparse_gib(directory: Path, name: str) -> None:
    os.truncate(directory / name, 16 << 30)


def nested_json(directory: Path) -> None:
    vouch(directory, b'{"format": 1, "meta": ' + b"[" * 100_000 + b"]" * 100_000 + b"}")


def a_number_of_5000_digits(directory: Path) -> None:
    vouch(directory, (directory / "manifest.json").read_bytes().replace(b'"step":2', b'"step":' + b"2" * 5000))


def a_number_of_1000_digits(directory: Path) -> None:
    edit(directory, lambda tree: tree["files"][0].update(size=10**1000))


def a_number_below_zero(directory: Path) -> None:
    edit(directory, lambda tree: tree["files"][0]["segments"][0].__setitem__(1, -5))


def a_fraction(directory: Path) -> None:
    edit(directory, lambda tree: tree.update(world_size=1.5))


def an_endless_number(directory: Path) -> None:
    edit(directory, lambda tree: tree["tensors"]["rank0.weight"].__setitem__(0, [float("inf")]))


def a_name_with_nul(directory: Path) -> None:
    edit(directory, lambda tree: tree["files"][0].update(name="rank\0"))


def a_name_outside(directory: Path) -> None:
    edit(directory, lambda tree: tree["files"][0].update(name="../../../etc/passwd"))


def a_dtype_that_is_a_function(directory: Path) -> None:
    edit(directory, lambda tree: tree["tensors"]["rank0.weight"].__setitem__(1, "load"))


def a_tensor_of_a_tebibyte(directory: Path) -> None:
    edit(directory, lambda tree: tree["tensors"].update({"rank0.weight": [[1 << 38], "float32"]}))


def a_part_of_a_tebibyte(directory: Path) -> None:
    def change(tree: dict[str, Any]) -> None:
        tree["tensors"]["rank0.weight"] = [[1 << 38], "float32"]
        file, number = segment_of(tree, "rank0.weight")
        file["boxes"][number] = [[0], [1 << 38]]

    edit(directory, change)


def a_part_next_to_its_tensor(directory: Path) -> None:
    def change(tree: dict[str, Any]) -> None:
        file, number = segment_of(tree, "rank0.weight")
        file["boxes"][number][0][0] += 1

    edit(directory, change)


def an_item_beyond_its_file(directory: Path) -> None:
    edit(directory, lambda tree: tree["files"][0]["segments"][0].__setitem__(2, 1 << 40))


def meta_that_is_a_list(directory: Path) -> None:
    edit(directory, lambda tree: tree.update(meta=[1, 2]))


def an_item_that_inflates(directory: Path) -> None:
    stored = io.BytesIO()
    torch.save(torch.zeros(1 << 24), stored)  # 64 MiB, 64 KiB when compressed
    deflated = io.BytesIO()
    with zipfile.ZipFile(stored) as source, zipfile.ZipFile(deflated, "w", zipfile.ZIP_DEFLATED) as target:
        for entry in source.infolist():
            target.writestr(entry.filename, source.read(entry.filename))
    with_weight(directory, deflated.getvalue())


def stored_zip(entries: dict[str, bytes]) -> bytes:
    """A zip file as torch.save writes it, with any content."""
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", zipfile.ZIP_STORED) as archive:
        for name, data in entries.items():
            archive.writestr(f"archive/{name}", data)
    return made.getvalue()


def saved_bytes(value: Any) -> bytes:
    made = io.BytesIO()
    torch.save(value, made)
    return made.getvalue()


def with_pickle(directory: Path, data: bytes) -> None:
    with_weight(directory, stored_zip({"data.pkl": data, "data/0": bytes(4096), "byteorder": b"little"}))


def another_shape(directory: Path) -> None:
    with_weight(directory, saved_bytes(torch.zeros(3, 1000)))


def another_dtype(directory: Path) -> None:
    with_weight(directory, saved_bytes(torch.zeros(31, 17, dtype=torch.int32)))


def a_dictionary_for_a_tensor(directory: Path) -> None:
    with_weight(directory, saved_bytes({"a": torch.zeros(1000)}))


def no_zip_at_all(directory: Path) -> None:
    with_weight(directory, b"\x80\x02" + bytes(9999))


def a_pickle_that_runs_code(directory: Path) -> None:
    with_pickle(directory, pickle.dumps(Harmful(directory.parent / "it ran"), protocol=2))


def a_pickle_that_allocates_16_gib(directory: Path) -> None:
    with_pickle(directory, b"\x80\x02cbuiltins\nbytearray\n(\x8a\x05\0\0\0\0\x04tR.")


def a_pickle_with_a_far_memo(directory: Path) -> None:
    with_pickle(directory, b"\x80\x02K\x01r\xf0\xff\xff\x7f.")


def a_long_pickle(directory: Path) -> None:
    with_pickle(directory, b"\x80\x02" + b"K\x010" * (20 << 20) + b"K\x01.")


def two_entries_of_one_name(directory: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = io.BytesIO()
        with zipfile.ZipFile(made, "w") as archive:
            for data in (b"one", b"two"):
                archive.writestr("archive/data.pkl", data)
    with_weight(directory, made.getvalue())


def sparse(directory: Path, size: int, end: bytes) -> None:
    """A data file of holes before its end, whose size and checksums fit."""

    def change(tree: dict[str, Any]) -> None:
        file, _ = segment_of(tree, "rank0.weight")
        os.truncate(directory / file["name"], 0)
        os.truncate(directory / file["name"], size - len(end))
        with (directory / file["name"]).open("ab") as stream:
            stream.write(end)
        crc = f"{zlib.crc32(bytes(size - len(end)) + end):08x}"
        file |= {"size": size, "crc32": crc, "segments": [["rank0.weight", 0, size, crc]]}

    edit(directory, change)


def a_zip_directory_of_many_mib(directory: Path) -> None:
    size, length = 1 << 29, 1 << 28
    record = struct.pack("<4sQHHIIQQQQ", b"PK\6\6", 44, 45, 45, 0, 0, 1, 1, length, size - length - 98)
    locator = struct.pack("<4sIQI", b"PK\6\7", 0, size - 98, 1)
    end = struct.pack("<4sHHHHIIH", b"PK\5\6", 0, 0, 65535, 65535, 0xFFFFFFFF, 0xFFFFFFFF, 0)
    sparse(directory, size, record + locator + end)


FILES = ("commit.json", "manifest.json", ".metadata", "rank_00000_000.distcp")
CASES: dict[str, Callable[[Path], None]] = {
    f"{case.__name__}: {name}": (lambda directory, case=case, name=name: case(directory, name))
    for case in (a_fifo_for_any_file, a_device_for_any_file, sixteen_sparse_gib)
    for name in FILES
}
CASES |= {
    case.__name__: case
    for case in (
        nested_json, a_number_of_5000_digits, a_number_of_1000_digits, a_number_below_zero, a_fraction,
        an_endless_number, a_name_with_nul, a_name_outside, a_dtype_that_is_a_function, a_tensor_of_a_tebibyte,
        a_part_of_a_tebibyte, a_part_next_to_its_tensor, an_item_beyond_its_file, meta_that_is_a_list,
        an_item_that_inflates, another_shape, another_dtype, a_dictionary_for_a_tensor, no_zip_at_all,
        a_pickle_that_runs_code, a_pickle_that_allocates_16_gib, a_pickle_with_a_far_memo, a_long_pickle,
        two_entries_of_one_name, a_zip_directory_of_many_mib,
    )
}  # fmt: skip


@pytest.mark.timeout(60)
@pytest.mark.parametrize("case", CASES)
def test_a_hostile_checkpoint_is_damaged_and_the_step_before_is_loaded(case: str, tmp_path: Path) -> None:
    save_alone(tmp_path, 1, 2)
    newest = list_committed(tmp_path)[-1].path
    assert check_directory(newest) == []
    CASES[case](newest)
    before, started_s = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.monotonic()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        directory = find_intact(tmp_path)
    assert directory.step == 1 and "Checkpoint of step 2" in directory.skipped[0]
    assert_is_step(loaded(directory, 0), 1, 0)
    assert not (tmp_path / "it ran").exists()
    lines: list[str] = []
    verify(tmp_path, None, lines.append)
    inspect(tmp_path, None, lines.append, with_files=True)
    assert any(line.startswith("DAMAGED") for line in lines)
    assert time.monotonic() - started_s < SECONDS
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 < MEMORY_BYTES


def test_torchs_index_is_never_unpickled(tmp_path: Path) -> None:
    root, ran = tmp_path / "root", tmp_path / "it ran"
    save_alone(root, 1)
    directory = list_committed(root)[-1].path
    data = pickle.dumps(Harmful(ran))
    (directory / ".metadata").write_bytes(data)

    def change(tree: dict[str, Any]) -> None:
        index = next(file for file in tree["files"] if file["name"] == ".metadata")
        index |= {"size": len(data), "crc32": f"{zlib.crc32(data):08x}"}

    edit(directory, change)
    found = find_intact(root)
    assert_is_step(loaded(found, 0), 1, 0)
    assert not ran.exists()

    def forget_boxes(tree: dict[str, Any]) -> None:
        for file in tree["files"]:
            file.pop("boxes", None)

    edit(directory, forget_boxes)
    with pytest.raises(CheckpointError, match="the parts of .* are not all of it"):
        find_intact(root, strict=True)
    assert not ran.exists()


EVERY_DTYPE = (
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex128, torch.complex64, torch.bool),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint64, torch.uint32, torch.uint16, torch.uint8),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu, torch.complex32),
)


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("dtype", EVERY_DTYPE, ids=str)
def test_every_tensor_that_torch_saves_is_described(dtype: torch.dtype) -> None:
    for shape in ((), (0, 3), (2, 3)):
        data = saved_bytes(torch.empty(shape, dtype=dtype))
        assert content_error(io.BytesIO(data), 0, len(data), shape, str(dtype).removeprefix("torch.")) is None
