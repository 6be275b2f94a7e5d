"""SlicedFile: a safetensors file of which each rank reads its own slices, when it asks for them."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from core.checkpoint import tensor_files

if TYPE_CHECKING:
    from core.hugging_face.plan import Split
    from core.process_groups import ProcessGroups


class FileTensor:
    """One whole tensor of a file. Nothing of it is read until `part` is called."""

    def __init__(self, source: Any) -> None:
        self.source = source
        self.shape = torch.Size(source.get_shape())

    def get_shape(self) -> list[int]:
        """The shape, as a slice of the file gives it."""
        return list(self.shape)

    def __getitem__(self, rows: slice) -> torch.Tensor:
        """Some rows, on the CPU."""
        part: torch.Tensor = self.source[rows]
        return part

    def part(self, split: Split | None, groups: ProcessGroups, read: list[int]) -> torch.Tensor:
        """This rank's slice, on the CPU. read: gets the number of bytes that were read."""
        from core.hugging_face.checkpoint import SlicedTensor

        return SlicedTensor(self.source, () if split is None else split.cuts, groups, read)[...]


class SlicedFile(Mapping[str, FileTensor]):
    """The tensors of a safetensors file by their names.

    The file's checksum, where it has one, is compared by one rank of the job. Raises CheckpointDamaged there.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        if zlib.crc32(path.name.encode()) % dist.get_world_size() == dist.get_rank():
            tensor_files.check(path)
        self.file = tensor_files.safetensors("safetensors").safe_open(str(path), framework="pt", device="cpu")
        self.names = dict.fromkeys(self.file.keys())

    def __getitem__(self, name: str) -> FileTensor:
        return FileTensor(self.file.get_slice(name))

    def __contains__(self, name: object) -> bool:
        return name in self.names

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)
