"""The ways in which context-parallel ranks see each other's keys and values, by Megatron's names."""

from __future__ import annotations

from collections.abc import Callable

import torch.distributed as dist
from torch import Tensor

from core.context_parallel.all_gather import all_gather_attention
from core.context_parallel.all_to_all import all_to_all_attention
from core.context_parallel.ring import ring_attention
from core.groups.process_groups import ProcessGroups
from core.model_parallel_config import ModelParallelConfig
from core.tensor_parallel.mappings import group_size, resolve_groups

COMM_TYPES: dict[str, Callable[[Tensor, Tensor, Tensor, dist.ProcessGroup, Tensor | None], Tensor]] = {
    "p2p": ring_attention,
    "all_gather": all_gather_attention,
    "a2a": all_to_all_attention,
}


def context_parallel_group(
    config: ModelParallelConfig, pg_collection: ProcessGroups | None
) -> dist.ProcessGroup | None:
    """The context-parallel group; None where there is one rank. ValueError if the config was made for another size."""
    group = resolve_groups(pg_collection).cp
    if group_size(group) != config.context_parallel_size:
        raise ValueError(
            f"config.context_parallel_size is {config.context_parallel_size} and the context-parallel group has "
            f"{group_size(group)} ranks; call parallel_state.initialize_model_parallel with the same size, or pass "
            "pg_collection"
        )
    return group


def context_parallel_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    group: dist.ProcessGroup,
    comm_type: str,
    documents: Tensor | None = None,
) -> Tensor:
    """Causal attention of this rank's queries to the whole sequence's keys: [s / cp, b, heads, d].

    query: [s / cp, b, heads, d], key and value: [s / cp, b, groups, d], split as `split_sequence` does. documents:
    [b, s] of the whole sequence, on every rank; a token sees its own document only. Collective over `group`, forward
    and backward; the gradients of keys and values are those of all ranks' queries.
    """
    if comm_type not in COMM_TYPES:
        raise ValueError(f"cp_comm_type is {comm_type!r}, expected one of {tuple(COMM_TYPES)}")
    return COMM_TYPES[comm_type](query, key, value, group, documents)
