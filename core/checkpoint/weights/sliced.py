"""Slices of safetensors files: each rank reads only its part of a tensor, on demand."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from core.checkpoint.weights.one_file import open_safetensors
from core.groups.process_groups import ProcessGroups
from core.tensor_parallel.initialization import rows_on_rank

# (group, dimension, sections of the dimension that are split separately, divisor of a rank's part)
Cut = tuple[str, int, int, int]


class SlicedTensor:
    """Tensor of a safetensors file of which only this rank's part is read, by indexing with ``...``.

    ``source`` is the result of ``safe_open(...).get_slice(name)``. Splits over a group with one rank are ignored. The
    number of bytes read is appended to ``read``.
    """

    def __init__(self, source: Any, cuts: Iterable[Cut], groups: ProcessGroups, read: list[int]) -> None:
        self.source, self.groups, self.read = source, groups, read
        self.cuts = [cut for cut in cuts if groups.size(cut[0]) > 1]

    def __getitem__(self, index: Any) -> Tensor:
        if index is not Ellipsis:
            raise TypeError("a SlicedTensor supports reading the full tensor only; use [...]")
        shape = self.source.get_shape()
        place, dim, missing = [[slice(None)]] * len(shape), 0, 0
        for axis, dim, blocks, multiple in self.cuts:  # only the last cut may have several blocks or padding
            size, rank, length = self.groups.size(axis), self.groups.rank(axis), shape[dim] // blocks
            rows = rows_on_rank(length, size, multiple)
            start, stop = min(rank * rows, length), min((rank + 1) * rows, length)
            if start == stop:  # padding alone; a file has no empty slices
                first = self.source[tuple([slice(None)] * dim + [slice(0, 1)])]
                return first.new_zeros([rows * blocks if d == dim else n for d, n in enumerate(first.shape)])
            place[dim] = [slice(block * length + start, block * length + stop) for block in range(blocks)]
            missing = blocks * (rows - stop + start)
        parts = [self.source[where or ...] for where in itertools.product(*place)]
        self.read.extend(part.numel() * part.element_size() for part in parts)
        if missing:  # the end of a vocabulary that is padded
            parts.append(parts[0].new_zeros([missing if d == dim else n for d, n in enumerate(parts[0].shape)]))
        return torch.cat(parts, dim) if len(parts) > 1 else parts[0].contiguous()


class FileTensor:
    """Full tensor of a file. Nothing is read until ``part`` is called."""

    def __init__(self, source: Any) -> None:
        self.source = source
        self.shape = torch.Size(source.get_shape())

    def get_shape(self) -> list[int]:
        return list(self.shape)

    def __getitem__(self, rows: slice) -> Tensor:
        part: Tensor = self.source[rows]
        return part

    def part(self, cuts: Iterable[Cut], groups: ProcessGroups, read: list[int]) -> Tensor:
        """Read this rank's slice to the CPU, and append the number of bytes read to ``read``."""
        return SlicedTensor(self.source, cuts, groups, read)[...]


class SlicedFile(Mapping[str, FileTensor]):
    """Tensors of a safetensors file by name.

    ``verify`` compares the checksum if the file carries one. Raises CheckpointDamaged if it differs or the file is not
    a regular, complete safetensors file.
    """

    def __init__(self, path: Path, *, verify: bool = True) -> None:
        self.path = path
        self.file = open_safetensors(path, verify=verify)
        self.names = dict.fromkeys(self.file.keys())

    def __getitem__(self, name: str) -> FileTensor:
        return FileTensor(self.file.get_slice(name))

    def __contains__(self, name: object) -> bool:
        return name in self.names

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)
