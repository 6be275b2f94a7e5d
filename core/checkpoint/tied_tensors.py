"""Names of tied tensors in a checkpoint's files, compared before a model loads several of them as one tensor."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

COMPARED_ELEMENTS = 4 * 1024 * 1024  # compared at a time


class ShardedTensors(Mapping[str, Any]):
    """Tensors by name, each read from the file listed in an index. Only one file is open at a time."""

    def __init__(self, weight_map: Mapping[str, Path], read: Callable[[Path], Mapping[str, Any]]) -> None:
        self.weight_map, self.read = weight_map, read
        self._last: tuple[Path, Mapping[str, Any]] | None = None

    def __getitem__(self, name: str) -> Any:
        path = self.weight_map[name]
        if self._last is None or self._last[0] != path:
            self._last = path, self.read(path)
        return self._last[1][name]

    def __contains__(self, name: object) -> bool:
        return name in self.weight_map  # without reading the file

    def __iter__(self) -> Iterator[str]:
        return iter(self.weight_map)

    def __len__(self) -> int:
        return len(self.weight_map)


def tied_names(model: nn.Module) -> dict[tuple[str, ...], torch.dtype]:
    """Map all names of each tied parameter, the first name first, to its dtype."""
    by_id: dict[int, list[str]] = {}
    params = dict(model.named_parameters(remove_duplicate=False))
    for name, param in params.items():
        by_id.setdefault(id(param), []).append(name)
    return {tuple(names): params[names[0]].dtype for names in by_id.values() if len(names) > 1}


def names_apart(tied: Mapping[tuple[str, ...], torch.dtype], found: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return pairs of names of one tied tensor for which the files have different values.

    ``tied`` maps the names of a tensor to a dtype, and values that round to the same number in it are equal. ``found``
    may have slices of a safetensors file, which are read in parts.
    """
    pairs = []
    for names, dtype in tied.items():
        first, *others = [name for name in names if name in found] or [""]
        pairs += [(first, name) for name in others if not _are_equal(found[first], found[name], dtype)]
    return pairs


def refuse_apart(pairs: Sequence[tuple[str, str]], where: object) -> None:
    """Raise ValueError for files that have different values for one parameter of the model."""
    if pairs:
        first, other = pairs[0]
        raise ValueError(
            f"{where} holds {first!r} and {other!r} with different values, and they are one tied parameter of the "
            "model. Make the model with tie_word_embeddings=False, or by from_pretrained of this directory, before it "
            "is boosted"
        )


def _are_equal(one: Any, other: Any, dtype: torch.dtype) -> bool:
    shape = _shape_of(one)
    if shape != _shape_of(other):
        return False
    if isinstance(one, Tensor) and isinstance(other, Tensor) and one.data_ptr() == other.data_ptr():
        return True
    rows = max(1, COMPARED_ELEMENTS // max(1, math.prod(shape[1:])))
    parts = (slice(start, start + rows) for start in range(0, shape[0], rows))
    return all(torch.equal(one[part].to(dtype), other[part].to(dtype)) for part in parts)


def _shape_of(value: Any) -> list[int]:
    return list(value.shape if isinstance(value, Tensor) else value.get_shape())
