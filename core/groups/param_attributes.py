"""Attributes of a parameter that name its process groups: Megatron's tags of experts and of copies between stages."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import nn

from core.groups.rank_grid import DATA_KINDS

# Groups across pipeline stages whose ranks may hold copies of a parameter, and the attributes that say so.
STAGE_COPIES = {
    "pp": ("pipeline_parallel", "flextron_router_pp_sync"),
    "embd": ("shared_embedding",),
    "pos_embd": ("shared_position_embedding",),
}


def data_group_of(param: nn.Parameter) -> str:
    """Return the data-parallel group of a parameter. Experts have ``allreduce = False`` and a separate group."""
    return DATA_KINDS[0] if getattr(param, "allreduce", True) else DATA_KINDS[1]


def embeddings_of(modules: Iterable[nn.Module]) -> dict[int, str]:
    """Find embeddings that modules name as Megatron's models do, as id of a weight -> 'embd' or 'pos_embd'."""
    found: dict[int, str] = {}
    for part in modules:
        position = getattr(getattr(part, "position_embeddings", None), "weight", None)
        if isinstance(position, torch.Tensor):
            found[id(position)] = "pos_embd"
        shares = getattr(part, "share_embeddings_and_output_weights", False)
        if shares and hasattr(part, "shared_embedding_or_output_weight"):
            word = part.shared_embedding_or_output_weight()
            if isinstance(word, torch.Tensor):
                found[id(word)] = "embd"
    return found


def copies_across_stages(param: nn.Parameter, embeddings: Mapping[int, str]) -> tuple[str, ...]:
    """Return the groups across pipeline stages whose ranks hold copies of a parameter."""
    named = embeddings.get(id(param))
    return tuple(
        [
            group
            for group, tags in STAGE_COPIES.items()
            if group == named or any([getattr(param, tag, False) for tag in tags])
        ]
    )
