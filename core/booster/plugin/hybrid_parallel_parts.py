"""Parts of models and batches for HybridParallelPlugin: names of a part's parameters, parts of a batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from core.checkpoint.tied_tensors import tied_names
from core.hugging_face.plan import Split
from core.hugging_face.stages import find_cut, stage_of
from core.pipeline_parallel import PipelineLayout


def find_layers(model: Any, layout: PipelineLayout | None) -> Sequence[str]:
    """The names of the lists of a transformers model's layers."""
    return stage_of(model).cut.lists if layout is not None else find_cut(model).lists


def ties_of(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """For each name of a tied parameter all of its names, the first one first."""
    return {name: names for names in tied_names(model) for name in names}


def splits_of(part: Any) -> Mapping[str, Split]:
    """Splits of a part's parameters over tensor and expert parallelism."""
    report = getattr(part, "split_report", None)
    if report is None or not hasattr(part, "peft_config"):
        return {} if report is None else report.plan.splits
    below = part.get_base_model().split_report.plan.splits  # of the layers that adapters belong to
    names = [name for name, _ in part.named_parameters(remove_duplicate=False)]
    return {**report.plan.splits, **{n: below[name_in_base(n)] for n in names if name_in_base(n) in below}}


def name_in_base(name: str) -> str:
    """The name that a parameter of a model with adapters has in the model without them."""
    return name.removeprefix("base_model.model.").replace(".base_layer.", ".")


def parameters_here(
    parts: Sequence[nn.Module], tied: Mapping[str, tuple[str, ...]]
) -> dict[str, tuple[nn.Parameter, Split | None]]:
    """Name in the whole model, the first one of a tied parameter -> this rank's parameter and how it is cut."""
    here: dict[str, tuple[nn.Parameter, Split | None]] = {}
    for part in parts:
        splits = splits_of(part)
        for name, param in part.named_parameters():
            here.setdefault(tied.get(name, (name,))[0], (param, splits.get(name)))
    return here


def microbatches_of(
    batch: Mapping[str, Any], count: int | None, size: int | None, *, main: str = "input_ids", config: Any = None
) -> list[dict[str, Any]]:
    """A batch in `count` equal parts along its first dimension, or in parts of `size` rows where no count is given.
    Values that are no tensors go to all. main: the name of the model's main input. config: of the model; images and
    films that come as patches with their grids go with the rows whose tokens mark them.
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
    """Patches and grids of each `rows` rows; nothing for a batch without grids. A part without images has None."""
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
            last, held = first, 0
            while last < len(sizes) and held < number:
                held += sizes[last]
                last += 1
            if held != number:
                raise ValueError(
                    f"{rows} rows of the batch mark {number // each} places of a {kind}, and the grids that follow "
                    f"have {held // each}; list the grids in the order of the rows"
                )
            counts.append(last - first)
            first = last
        lengths = [sum(part) for part in torch.tensor(sizes, device="cpu").split(counts)]
        found[f"{kind}_grid_thw"] = [part if len(part) else None for part in grids.split(counts)]
        found[pixels] = [part if len(part) else None for part in values.split([int(n) for n in lengths])]
    return found


def joined_outputs(outputs: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """The batch's outputs: rows one after another, numbers as their mean."""
    joined = {}
    for name, first in outputs[0].items():
        values = [output[name] for output in outputs]
        joined[name] = torch.cat(values) if first.dim() else torch.stack(values).mean()
    return joined
