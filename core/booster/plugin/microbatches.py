"""Microbatches of a pipeline's batch, and the joined outputs of all microbatches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch


def microbatches_of(
    batch: Mapping[str, Any], count: int | None, size: int | None, *, main: str = "input_ids", config: Any = None
) -> list[dict[str, Any]]:
    """Split a batch along its first dimension, into ``count`` parts or parts of ``size`` rows.

    Values that are not tensors go to every part. Patches of images and videos, and their grids, go to the part whose
    tokens mark them, for which ``config`` is read. Raises ValueError if the main input is missing, or the batch does
    not divide into equal parts.
    """
    tensors = {name: value for name, value in batch.items() if isinstance(value, torch.Tensor) and value.dim() > 0}
    if main not in tensors:
        raise ValueError(f"a pipeline's batch is a mapping with {main!r}, and this one has {sorted(batch)}")
    rows = len(tensors[main])
    size = None if count is not None else size
    count = count or max(1, rows // (size or 1))
    patches = _patches_of(batch, config, rows // count) if rows % count == 0 else {}
    tensors = {name: value for name, value in tensors.items() if name not in patches}
    odd = {name: list(value.shape) for name, value in tensors.items() if len(value) != rows}
    if odd:
        raise ValueError(
            f"a batch of {rows} rows is cut into microbatches by rows, and it has {odd}; expand them to rows"
        )
    if rows % count or (size is not None and rows != count * size):
        raise ValueError(
            f"a batch of {rows} rows does not divide into {count} microbatches" + (f" of {size}" if size else "")
        )
    parts = {name: value.chunk(count) for name, value in tensors.items()}
    rest = {name: value for name, value in batch.items() if name not in tensors}
    parts.update(patches)
    rest = {name: value for name, value in rest.items() if name not in parts}
    return [{**rest, **{name: part[number] for name, part in parts.items()}} for number in range(count)]


def _patches_of(batch: Mapping[str, Any], config: Any, rows: int) -> dict[str, Any]:
    """Return the patches and grids for each part of ``rows`` rows, with ``None`` for parts without images, or {}."""
    found: dict[str, Any] = {}
    for kind, pixels in (("image", "pixel_values"), ("video", "pixel_values_videos")):
        grids, values = batch.get(f"{kind}_grid_thw"), batch.get(pixels)
        mark = getattr(config, f"{kind}_token_id", None)
        if grids is None or values is None or mark is None:
            continue
        each = config.vision_config.spatial_merge_size**2
        sizes = grids.prod(-1).tolist()
        wanted = [int((ids == mark).sum()) * each for ids in batch["input_ids"].split(rows)]
        counts, first = [], 0
        for number in wanted:
            last, total = first, 0
            while last < len(sizes) and total < number:
                total += sizes[last]
                last += 1
            if total != number:
                raise ValueError(
                    f"{rows} rows of the batch mark {number // each} places of a {kind}, and the grids that follow "
                    f"have {total // each}; list the grids in the order of the rows"
                )
            counts.append(last - first)
            first = last
        lengths = [sum(part) for part in torch.tensor(sizes, device="cpu").split(counts)]
        found[f"{kind}_grid_thw"] = [part if len(part) else None for part in grids.split(counts)]
        found[pixels] = [part if len(part) else None for part in values.split([int(n) for n in lengths])]
    return found


def joined_outputs(outputs: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Join the outputs of all microbatches: rows are concatenated, and scalars are averaged."""
    joined = {}
    for name, first in outputs[0].items():
        values = [output[name] for output in outputs]
        joined[name] = torch.cat(values) if first.dim() else torch.stack(values).mean()
    return joined
