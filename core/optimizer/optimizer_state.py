"""The optimizer's state by parameter name and slice, whatever buckets, runs and strategy hold it in memory.

An entry says which elements of the flattened parameter it covers, so a state that covers more than a rank needs (one
saved by the replicated optimizer) loads into a shard. Tensors are views of the live state, as in torch.

    {"param_groups": [{"lr": ..., ...}],
     "state": {"layer.weight": {"offset": 0, "numel": 6, "step": ..., "exp_avg": ...}, ...}}
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from core.optimizer.master_weights import BucketMasters, CopiedMasters, Run, Slice, is_per_element

MASTER = "master"  # an entry's fp32 weights, where the parameters are in 16 bits
GROUP_IDENTITY = ("name",)


def entry_of(masters: BucketMasters, run: Run, piece: Slice, state: Mapping[str, Any]) -> dict[str, Any]:
    """The state of one slice of a run."""
    low, high = piece.start - run.start, piece.end - run.start
    entry: dict[str, Any] = {"offset": piece.offset, "numel": piece.numel}
    if isinstance(masters, CopiedMasters):
        entry[MASTER] = masters.main[piece.start : piece.end]
    for key, value in state.items():
        entry[key] = value.reshape(-1)[low:high] if is_per_element(key, value, run.master) else value
    return entry


def needed_part(name: str, piece: Slice, entry: Mapping[str, Any]) -> dict[str, Any]:
    """What a saved entry holds of a slice; ValueError when it does not cover the slice."""
    skip = piece.offset - entry["offset"]
    if skip < 0 or skip + piece.numel > entry["numel"]:
        raise ValueError(
            f"the saved optimizer state of {name!r} covers elements [{entry['offset']}, "
            f"{entry['offset'] + entry['numel']}) and this rank needs [{piece.offset}, {piece.offset + piece.numel}); "
            "it was saved by another rank or with other data-parallel sizes. Load what this rank saved"
        )
    part = {}
    for key, value in entry.items():
        if key in ("offset", "numel"):
            continue
        whole = isinstance(value, torch.Tensor) and key != "step" and value.dim() == 1
        part[key] = value[skip : skip + piece.numel] if whole else value
    return part


def stretches_of_equal_steps(parts: list[dict[str, Any]]) -> list[int]:
    """Lengths of the neighbours whose state may share a run: the same keys, and equal step counts."""
    lengths: list[int] = []
    previous: Any = None
    for part in parts:
        common = {
            key: (float(value) if isinstance(value, torch.Tensor) and value.dim() == 0 else None)
            for key, value in part.items()
        }
        if lengths and common == previous:
            lengths[-1] += 1
        else:
            lengths.append(1)
        previous = common
    return lengths


def load_run(masters: BucketMasters, run: Run, parts: list[dict[str, Any]], *, fused: bool) -> dict[str, Any]:
    """The inner optimizer's state of a run from those of its slices; master weights are copied to where they live."""
    for piece, part in zip(run.slices, parts, strict=True):
        if isinstance(masters, CopiedMasters) and MASTER in part:
            masters.main[piece.start : piece.end].copy_(part[MASTER])
    state: dict[str, Any] = {}
    for key, value in parts[0].items():
        if key == MASTER:
            continue
        if isinstance(value, torch.Tensor) and key != "step" and value.dim() == 1:
            joined = torch.zeros(run.master.shape, dtype=value.dtype, device=run.master.device)
            flat = joined.view(-1)
            for piece, part in zip(run.slices, parts, strict=True):
                flat[piece.start - run.start : piece.end - run.start].copy_(part[key])
            state[key] = joined
        elif isinstance(value, torch.Tensor):
            # torch keeps the step count on the device for its fused kernels, and on the CPU otherwise.
            state[key] = value.detach().clone().to(run.master.device if fused else "cpu")
        else:
            state[key] = value
    return state


def save_groups(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The param groups without their tensors."""
    return [{key: value for key, value in group.items() if key != "params"} for group in groups]


def load_groups(groups: list[dict[str, Any]], saved: list[dict[str, Any]]) -> None:
    """Set learning rates, decay and the rest from the saved group of the same kind."""
    by_kind = {tuple(group[key] for key in GROUP_IDENTITY): group for group in saved}
    for group in groups:
        kind = tuple(group[key] for key in GROUP_IDENTITY)
        if kind not in by_kind:
            raise ValueError(
                f"the saved optimizer has no param group with {dict(zip(GROUP_IDENTITY, kind, strict=True))}; it has "
                f"{[dict(zip(GROUP_IDENTITY, other, strict=True)) for other in by_kind]}. Build the optimizer with the "
                "same weight decay and learning rate conditions"
            )
        group.update({key: value for key, value in by_kind[kind].items() if key not in ("fused", "foreach")})
