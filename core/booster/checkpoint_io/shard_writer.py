"""ShardWriter: a checkpoint of several files, which takes the place of an older one in one step."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from core.booster.checkpoint_io import files
from core.checkpoint import tensor_files


class ShardWriter:
    """Writes shards one after another, then the index; all of them appear in one step."""

    def __init__(
        self,
        directory: Path,
        names: files.Names,
        replaced: tuple[files.Names, ...],
        use_safetensors: bool,
        metadata: dict[str, Any] | None = None,
        finish: Callable[[Path], None] = lambda directory: None,
    ) -> None:
        self.directory = directory
        self.names = names
        self.replaced = replaced
        self.use_safetensors = use_safetensors
        self.metadata = metadata
        self.finish = finish

    def all(self, shards: Iterable[tuple[dict[Any, Any], int]]) -> None:
        """Everything, beside what is there; then it takes the place of that."""
        self.directory.mkdir(parents=True, exist_ok=True)
        journal = files.journal_of(self.directory, self.names)
        with contextlib.ExitStack() as stack:
            for kind in self.replaced:
                hidden = files.journal_of(self.directory, kind)
                stack.enter_context(tensor_files.only_writer(hidden, lambda place: place.mkdir(exist_ok=True)))
                stack.callback(hidden.rmdir)
                files.install(self.directory, kind, self.replaced)  # of a save that was killed
            try:
                self._write(journal, shards)
            finally:
                files.install(self.directory, self.names, self.replaced)

    def _write(self, journal: Path, shards: Iterable[tuple[dict[Any, Any], int]]) -> None:
        weight_map: dict[str, str] = {}
        total_bytes = 0
        for number, (content, size) in enumerate(shards, start=1):
            name = self.names.shard(number)
            files.write(journal / name, content, use_safetensors=self.use_safetensors)
            weight_map |= {str(key): name for key in content}
            total_bytes += size
        self.finish(journal)
        metadata = {"total_size": total_bytes, **(self.metadata or {})}
        tensor_files.write_index(journal / self.names.index_file, weight_map, metadata)
