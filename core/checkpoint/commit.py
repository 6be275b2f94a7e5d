"""Parts of a save: the files each rank has written, the location of their items, and checkpoints known to be intact."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.storage import WriteResult

from core.checkpoint.directory import check_directory
from core.checkpoint.durable_file import write_durably
from core.checkpoint.errors import CheckpointError
from core.checkpoint.manifest import FileRecord, part_from_json, part_to_json
from core.checkpoint.save_points import reach

LONGEST_PAUSE_S = 0.5

Part = tuple[FileRecord, ...]


def part_path(saving: Path, rank: int) -> Path:
    """Return the path of the file by which a rank reports that its data files are durable."""
    return saving / f"part-{rank:05d}.json"


def write_part(saving: Path, rank: int, records: Sequence[FileRecord]) -> None:
    """Report that this rank's data files are durable, and list them."""
    reach("before part", rank)
    write_durably(part_path(saving, rank), part_to_json(records), rank, half_point="half a part")


def wait_for_parts(saving: Path, world: int, give_up: Callable[[], str | None]) -> list[Part]:
    """Poll until the parts of all ranks are in the directory, and return them ordered by rank.

    ``give_up`` is called at each poll. If it returns a reason to stop waiting, that is raised as CheckpointError.
    """
    parts: dict[int, Part] = {}
    pause_s = 0.002
    while True:
        for rank in range(world):
            if rank not in parts and (data := _bytes_of(part_path(saving, rank))) is not None:
                parts[rank] = part_from_json(data)
        if len(parts) == world:
            return [parts[rank] for rank in range(world)]
        if (reason := give_up()) is not None:
            missing = [rank for rank in range(world) if rank not in parts]
            raise CheckpointError(f"the files of ranks {missing} are not there: {reason}")
        time.sleep(pause_s)
        pause_s = min(pause_s * 1.5, LONGEST_PAUSE_S)


class KnownIntact:
    """Directories that this process has written or verified, with the sizes and times of their files.

    A checkpoint's bytes are read again only if its files may have changed.
    """

    def __init__(self) -> None:
        self._checked: dict[Path, list[tuple[str, int, int]]] = {}

    def add(self, directory: Path) -> None:
        self._checked[directory] = _sizes_and_times(directory)

    def is_intact(self, directory: Path) -> bool:
        now = _sizes_and_times(directory)
        if self._checked.get(directory) != now and check_directory(directory):
            return False
        self._checked[directory] = now
        return True


def _sizes_and_times(directory: Path) -> list[tuple[str, int, int]]:
    return sorted((entry.name, entry.stat().st_size, entry.stat().st_mtime_ns) for entry in os.scandir(directory))


def places(parts: Sequence[Part], results: Sequence[Sequence[WriteResult]]) -> dict[Any, _StorageInfo]:
    """Map each item of the index to its file and offset. A rank's results and its segments have the same order."""
    found: dict[Any, _StorageInfo] = {}
    for rank, (part, rank_results) in enumerate(zip(parts, results, strict=True)):
        segments = [(record.name, segment) for record in part for segment in record.segments]
        if [segment.name for _, segment in segments] != [result.index.fqn for result in rank_results]:
            raise CheckpointError(f"rank {rank} has written other items than were planned; this is our error.")
        for (file_name, segment), result in zip(segments, rank_results, strict=True):
            found[result.index] = _StorageInfo(file_name, segment.offset, segment.length)
    return found


def check_size(saving: Path, record: FileRecord) -> None:
    """Raise CheckpointError unless rank 0 sees a file with the size that another rank wrote."""
    try:
        size = os.stat(saving / record.name).st_size
    except FileNotFoundError:
        size = None
    if size != record.size:
        raise CheckpointError(
            f"{record.name}, which rank {record.rank} wrote with {record.size} bytes, "
            f"{'is not there' if size is None else f'has {size} bytes'} as rank 0 sees it"
        )


def _bytes_of(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None
