"""Manifests and commit records: what they promise survives the way through JSON, and any changed bit is noticed."""

import json
import zlib

import pytest

from core.checkpoint.damage import shares
from core.checkpoint.manifest import (
    CommitRecord,
    FileRecord,
    ItemBytes,
    Manifest,
    ManifestError,
    TensorRecord,
    part_from_json,
    part_to_json,
    read_manifest,
)

SEGMENTS = (ItemBytes("a", 0, 40, 1, ((0, 0), (2, 5))), ItemBytes("ü b", 40, 0, 0), ItemBytes("c", 40, 60, 3))
FILE = FileRecord("rank_00001_000.distcp", 1, 100, 77, SEGMENTS)
MANIFEST = Manifest(12, 2, (FILE,), {"a": TensorRecord((2, 5), "float32")}, {"layout": {"tp": 2}, "list": [1, None]})


def commit_for(data: bytes, step: int = 12) -> CommitRecord:
    return CommitRecord(step, 3, "2026-01-01T00:00:00+00:00", len(data), zlib.crc32(data))


def test_a_manifest_comes_back_as_it_was_written() -> None:
    data = MANIFEST.to_json()
    assert read_manifest(commit_for(data), data) == MANIFEST
    assert part_from_json(part_to_json([FILE, FILE])) == (FILE, FILE)
    assert MANIFEST.total_bytes == 100
    assert MANIFEST.tensors["a"].bytes == 2 * 5 * 4


def test_a_commit_record_comes_back_as_it_was_written() -> None:
    commit = commit_for(b"abc")
    assert CommitRecord.from_json(commit.to_json()) == commit


def test_no_flipped_bit_of_the_commit_record_or_the_manifest_is_believed() -> None:
    manifest = MANIFEST.to_json()
    commit = commit_for(manifest)
    for data, read in (
        (commit.to_json(), CommitRecord.from_json),
        (manifest, lambda data: read_manifest(commit, data)),
    ):
        for bit in range(8 * len(data)):
            flipped = bytearray(data)
            flipped[bit // 8] ^= 1 << bit % 8
            try:
                believed = read(bytes(flipped))
            except ManifestError:
                continue
            # A changed space or letter case may leave the same values; another value may not come through.
            assert believed == read(data), f"bit {bit} of {data!r}"


@pytest.mark.parametrize("length", [0, 1, 50])
def test_a_truncated_record_is_refused(length: int) -> None:
    data = MANIFEST.to_json()
    commit = commit_for(data)
    with pytest.raises(ManifestError, match=f"has {length} bytes, commit.json vouches for {len(data)}"):
        read_manifest(commit, data[:length])
    with pytest.raises(ManifestError):
        CommitRecord.from_json(commit.to_json()[:length])


def test_records_of_another_version_step_or_kind_are_refused_with_the_reason() -> None:
    tree = json.loads(MANIFEST.to_json())
    newer = json.dumps({**tree, "format": 2}).encode()
    with pytest.raises(ManifestError, match="is of format 2; this version reads format 1"):
        read_manifest(commit_for(newer), newer)
    with pytest.raises(ManifestError, match="is of step 12, commit.json of step 13"):
        read_manifest(commit_for(MANIFEST.to_json(), step=13), MANIFEST.to_json())
    outside = json.dumps({**tree, "files": [{**tree["files"][0], "name": "../../etc/passwd"}]}).encode()
    with pytest.raises(ManifestError, match="another kind"):
        read_manifest(commit_for(outside), outside)
    for data in (b"[]", b"", b"\xff\xfe", b'{"format": 1}', b'{"format": 1, "files": 3}'):
        with pytest.raises(ManifestError):
            Manifest.from_json(data)


def test_the_items_of_a_byte_range_are_those_with_a_byte_in_it() -> None:
    assert FILE.names() == ("a", "c")  # 'ü b' has no bytes
    assert FILE.names(start=40) == ("c",)
    assert FILE.names(start=39) == ("a", "c")
    assert FILE.names(end=40) == ("a",)
    assert FILE.names(start=100) == ()


def test_a_segment_is_found_by_its_first_byte_only() -> None:
    segments = tuple(ItemBytes(f"t{i}", 10 * i, 10, i) for i in range(5))
    file = FileRecord("f", 0, 50, 0, segments)
    assert [file.segment_at(offset) for offset in (0, 20, 40)] == [segments[0], segments[2], segments[4]]
    assert file.segment_at(21) is None and file.segment_at(50) is None


@pytest.mark.parametrize("world", [1, 2, 3, 7])
def test_every_file_is_checked_by_one_rank_and_the_bytes_are_about_even(world: int) -> None:
    files = [FileRecord(f"f{i}", 0, size, 0) for i, size in enumerate([50, 1, 1, 30, 20, 0, 49])]
    parts = shares(files, world)
    assert sorted(file.name for part in parts for file in part) == sorted(file.name for file in files)
    loads = [sum(file.size for file in part) for part in parts]
    assert max(loads) - min(loads) <= 50
