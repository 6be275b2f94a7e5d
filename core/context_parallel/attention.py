"""Context-parallel attention with a choice of communication, under Megatron's names."""

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
    """Return the context-parallel group, or ``None`` if there is only one rank.

    Args:
        config (ModelParallelConfig): Configuration whose ``context_parallel_size`` the group must have.
        pg_collection (ProcessGroups): Process groups. Defaults to those of ``parallel_state``.

    Raises:
        ValueError: If the config was created for a different context-parallel size.
    """
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
    """Compute causal attention between this rank's queries and the keys of the full sequence.

    This is a collective over ``group``, in forward and backward. The gradients of keys and values include the queries
    of all ranks.

    Args:
        query: [s / cp, b, heads, d], split like ``split_sequence`` does.
        key: [s / cp, b, groups, d], split the same way.
        value: [s / cp, b, groups, d], split the same way.
        group: Context-parallel group.
        comm_type: 'p2p' passes keys and values around a ring, 'all_gather' gathers them, and 'a2a' exchanges positions
            for heads.
        documents: [b, s], document numbers of the full sequence, on every rank. A token only sees its own document.

    Returns:
        Tensor of shape [s / cp, b, heads, d].

    Raises:
        ValueError: If ``comm_type`` is unknown.
    """
    if comm_type not in COMM_TYPES:
        raise ValueError(f"cp_comm_type is {comm_type!r}, expected one of {tuple(COMM_TYPES)}")
    return COMM_TYPES[comm_type](query, key, value, group, documents)
