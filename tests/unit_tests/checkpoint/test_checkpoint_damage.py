"""Every kind of damage to a checkpoint is refused by name of file, tensor and rank; the one before is loaded."""

import os
import random
import re
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from core.checkpoint.damage import damage_of, open_manifest
from core.checkpoint.directory import check_directory, find_intact
from core.checkpoint.errors import CheckpointDamaged
from core.checkpoint.manifest import Manifest
from core.checkpoint.root_directory import list_committed
from core.checkpoint.saver import CheckpointSaver
from tests.unit_tests.checkpoint.checkpoint_saves import (
    assert_is_step,
    bytes_of,
    contents,
    loaded,
    save_alone,
    save_step,
    state_of,
)
from tests.unit_tests.ranks import ranks

WORLD = 2


def newest(root: Path) -> Path:
    return list_committed(root)[-1].path


def manifest_of(directory: Path) -> Manifest:
    opened = open_manifest(directory)
    assert isinstance(opened, tuple), opened
    return opened[1]


def flip(path: Path, bit: int) -> None:
    data = bytearray(path.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)


def file_of(directory: Path, name: str) -> tuple[Path, int, int]:
    """(file, offset, length) of a tensor's only segment."""
    ((file, part),) = [
        (file, part) for file in manifest_of(directory).files for part in file.segments if part.name == name
    ]
    return directory / file.name, part.offset, part.length


def swap(first: Path, second: Path) -> None:
    kept = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(kept)


def tear(path: Path, start: int) -> None:
    """What a power cut leaves of a file whose pages were not written: its size, and zeros."""
    size = path.stat().st_size
    os.truncate(path, start)
    os.truncate(path, size)


def flipped_weight(directory: Path) -> list[str]:
    path, offset, length = file_of(directory, "rank1.weight")
    flip(path, 8 * (offset + length // 2) + 3)
    return [path.name, r"has other bytes than were saved", "'rank1.weight'", r"written by rank 1"]


def torn_weight(directory: Path) -> list[str]:
    path, offset, length = file_of(directory, "rank0.weight")
    tear(path, offset + length // 2)
    return [path.name, "has other bytes than were saved", "'rank0.weight'", "written by rank 0"]


def truncated_weight(directory: Path) -> list[str]:
    path, offset, length = file_of(directory, "rank1.weight")
    size = path.stat().st_size
    os.truncate(path, offset + length - 1)
    return [path.name, f"is truncated: {offset + length - 1} bytes, {size} were saved", "'rank1.weight'", "rank 1"]


def grown_file(directory: Path) -> list[str]:
    path, _, _ = file_of(directory, "rank0.half")
    with path.open("ab") as stream:
        stream.write(b"x")
    return [path.name, "is too long"]


def empty_file(directory: Path) -> list[str]:
    path, _, _ = file_of(directory, "rank0.half")
    path.write_bytes(b"")
    return [path.name, "is truncated: 0 bytes", "'rank0.half'"]


def missing_file(directory: Path) -> list[str]:
    path, _, _ = file_of(directory, "rank1.half")
    path.unlink()
    return [path.name, "is missing", "'rank1.half'", "written by rank 1"]


def swapped_files(directory: Path) -> list[str]:
    (first, _, _), (second, _, _) = file_of(directory, "rank0.weight"), file_of(directory, "rank1.weight")
    swap(first, second)
    return [
        f"{first.name} .*holds what was saved as {second.name}: files were exchanged",
        f"{second.name} .*holds what was saved as {first.name}: files were exchanged",
        "'rank0.weight'",
        "'rank1.weight'",
    ]


def flipped_index(directory: Path) -> list[str]:
    flip(directory / ".metadata", 1234)
    return [".metadata", "it is the index of all tensors"]


def missing_index(directory: Path) -> list[str]:
    (directory / ".metadata").unlink()
    return [".metadata .*is missing; it is the index of all tensors"]


def flipped_manifest(directory: Path) -> list[str]:
    flip(directory / "manifest.json", 999)
    return ["manifest.json has checksum .*, commit.json vouches for"]


def truncated_manifest(directory: Path) -> list[str]:
    os.truncate(directory / "manifest.json", 100)
    return ["manifest.json has 100 bytes, commit.json vouches for"]


def missing_manifest(directory: Path) -> list[str]:
    (directory / "manifest.json").unlink()
    return ["manifest.json is missing"]


def flipped_commit(directory: Path) -> list[str]:
    data = (directory / "commit.json").read_bytes()
    (directory / "commit.json").write_bytes(data.replace(b'"sequence": 2', b'"sequence": 3'))
    return ["commit.json does not have the checksum that it states of itself"]


def missing_commit(directory: Path) -> list[str]:
    (directory / "commit.json").unlink()
    return ["commit.json is missing"]


def other_directory(directory: Path) -> list[str]:
    """Somebody copied the checkpoint of step 1 over that of step 2."""
    older = list_committed(directory.parent)[0].path
    shutil.rmtree(directory)
    shutil.copytree(older, directory)
    return ["commit.json is of step 1, commit 1, not of this directory"]


KINDS: dict[str, Callable[[Path], list[str]]] = {
    function.__name__: function
    for function in (
        flipped_weight, torn_weight, truncated_weight, grown_file, empty_file, missing_file, swapped_files,
        flipped_index, missing_index, flipped_manifest, truncated_manifest, missing_manifest, flipped_commit,
        missing_commit, other_directory,
    )
}  # fmt: skip


@ranks(WORLD, timeout_s=120)
def test_every_kind_of_damage_is_named_and_the_step_before_is_loaded(rank: int, world: int, tmp_path: Path) -> None:
    with CheckpointSaver(tmp_path / "whole", file_bytes=1000) as saver:
        save_step(saver, 1)
        save_step(saver, 2)
    assert find_intact(tmp_path / "whole", strict=True).step == 2
    for kind, inflict in KINDS.items():
        root = tmp_path / kind
        hints: list[list[str]] = [[]]
        if rank == 0:
            shutil.copytree(tmp_path / "whole", root)
            hints = [inflict(newest(root))]
        dist.broadcast_object_list(hints)
        with warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter("always")
            directory = find_intact(root)
        assert directory.step == 1, kind
        assert_is_step(loaded(directory, rank), 1, rank)
        texts = [str(warning.message) for warning in heard]
        assert len(texts) == (1 if rank == 0 else 0), texts
        assert all(warning.filename == __file__ for warning in heard), "the caller's line is shown, not one of ours"
        (skipped,) = directory.skipped
        assert rank != 0 or texts[0] == f"{skipped} Loading step 1 from {directory.path} instead."
        for hint in hints[0]:
            assert re.search(hint, skipped), f"{kind}: no {hint!r} in {skipped}"
        assert f"step 2 in {newest(root)} is damaged" in skipped and "[found by rank" in skipped
        with pytest.raises(CheckpointDamaged) as error:
            find_intact(root, strict=True) if kind in ("swapped_files", "missing_commit") else find_intact(root, 2)
        assert str(error.value) == f"{skipped} Other steps here: 1."
        everybody = [""] * world
        dist.all_gather_object(everybody, str(error.value))
        assert everybody == [str(error.value)] * world


def test_where_nothing_is_intact_every_checkpoint_is_named(tmp_path: Path) -> None:
    save_alone(tmp_path, 1, 2)
    for committed in list_committed(tmp_path):
        (committed.path / "manifest.json").unlink()
    message = "No checkpoint in .* is intact. .*step 2 .*manifest.json is missing.*step 1"
    with pytest.raises(CheckpointDamaged, match=message):
        find_intact(tmp_path)


def test_flipping_any_bit_anywhere_is_noticed_and_blamed_on_the_right_tensor(tmp_path: Path) -> None:
    """All bits of the directory would take minutes: 400 of them at random, and the first and last of each file."""
    save_alone(tmp_path, 1, world=WORLD)
    directory = newest(tmp_path)
    manifest = manifest_of(directory)
    files = contents(directory)
    choose = random.Random(5)
    spots = [(name, bit) for name, data in files.items() for bit in (0, 8 * len(data) - 1)]
    for name in choose.choices(sorted(files), k=400):
        spots.append((name, choose.randrange(8 * len(files[name]))))
    for name, bit in spots:
        flip(directory / name, bit)
        damages = check_directory(directory)
        flip(directory / name, bit)
        assert [damage.file for damage in damages] == [name], f"bit {bit} of {name}"
        record = next((file for file in manifest.files if file.name == name), None)
        if record is not None and record.segments:
            hurt = tuple(part.name for part in record.segments if part.offset <= bit // 8 < part.end)
            assert damages[0].tensors == hurt and len(hurt) == 1
    assert contents(directory) == files and check_directory(directory) == []


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_plain_torch_reads_what_the_check_would_refuse(tmp_path: Path) -> None:
    """Why the check exists: torch's own reader loads the flipped bit without a word."""
    save_alone(tmp_path, 1)
    path, offset, length = file_of(newest(tmp_path), "rank0.weight")
    exact = {"rank0.weight": torch.zeros(31, 17)}
    dcp.load(exact, storage_reader=dcp.FileSystemReader(newest(tmp_path)), no_dist=True)
    assert torch.equal(exact["rank0.weight"], state_of(1, 0)["rank0.weight"])
    storage = bytes_of(state_of(1, 0)["rank0.weight"]).index(state_of(1, 0)["rank0.weight"].numpy().tobytes())
    flip(path, 8 * (offset + storage + 400) + 30)
    wrong = {"rank0.weight": torch.zeros(31, 17)}
    dcp.load(wrong, storage_reader=dcp.FileSystemReader(newest(tmp_path)), no_dist=True)
    assert (wrong["rank0.weight"] != exact["rank0.weight"]).sum() == 1
    with pytest.raises(CheckpointDamaged, match="'rank0.weight'"):
        find_intact(tmp_path)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("kind", ["flipped", "gone"])
def test_damage_that_comes_after_the_check_is_found_while_reading(kind: str, tmp_path: Path) -> None:
    save_alone(tmp_path, 1)
    directory = find_intact(tmp_path)
    path, offset, length = file_of(directory.path, "rank0.weight")
    match kind:
        case "flipped":
            flip(path, 8 * (offset + length // 2))
            words = "gives other bytes for 'rank0.weight' than were saved"
        case _:
            shutil.rmtree(directory.path)
            words = "Was the checkpoint deleted while it was read"
    with pytest.raises(CheckpointException) as error:
        loaded(directory, 0)
    failure = str(error.value.failures[0][0])
    assert words in failure and "rank 0" in failure and str(directory.path) in failure


def test_damage_of_the_index_after_the_check_harms_nothing(tmp_path: Path) -> None:
    """dcp.load would hide the reason, and fail on one rank alone; so the index is read with the check."""
    save_alone(tmp_path, 1)
    directory = find_intact(tmp_path)
    flip(directory.path / ".metadata", 800)
    assert_is_step(loaded(directory, 0), 1, 0)


def test_a_file_that_cannot_be_read_is_damage_not_a_crash(tmp_path: Path) -> None:
    save_alone(tmp_path, 1)
    directory = newest(tmp_path)
    path, _, _ = file_of(directory, "rank0.weight")
    size = path.stat().st_size
    path.unlink()
    path.mkdir()
    (record,) = [file for file in manifest_of(directory).files if file.name == path.name]
    assert record.size == size
    assert "is no regular file" in str(damage_of(directory, record, manifest_of(directory)))
    (directory / "manifest.json").unlink()
    (directory / "manifest.json").mkdir()
    assert "manifest.json cannot be read" in str(check_directory(directory)[0])
