"""Broadcast of a batch within a tensor-parallel group."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from core.groups import agree
from core.tensor_parallel.mappings import group_rank, group_size, resolve_groups
from core.watch.waiting import waiting


def broadcast_data(
    keys: Sequence[str], data: Mapping[str, Tensor] | None, datatype: torch.dtype, tp_group: Any = None
) -> dict[str, Tensor]:
    """Broadcast the first rank's tensors over a tensor-parallel group, so that only one rank needs a data loader.

    All ranks of the group must call it.

        batch = broadcast_data(["tokens", "labels"], data, torch.int64)

    Args:
        keys (Sequence[str]): Names of the tensors to send.
        data (Mapping[str, Tensor]): The batch. Read only on the first rank.
        datatype (torch.dtype): Dtype of all tensors.
        tp_group (ProcessGroup, optional): Tensor-parallel group. Defaults to the group of ``parallel_state``.

    Returns:
        The tensors by name, on every rank.

    Raises:
        ValueError: On all ranks, if the dtype of any tensor differs from ``datatype``.
    """
    group = resolve_groups(None).tp if tp_group is None else tp_group
    given: Any = data if group_rank(group) == 0 else None
    table = None if given is None else {key: (tuple(given[key].shape), given[key].dtype) for key in keys}
    tables = agree.gather(table, [] if group is None else [group], "broadcast_data")
    known = next(found for found in tables.values() if found is not None)
    odd = {key: dtype for key, (_, dtype) in known.items() if dtype != datatype}
    if odd:
        raise ValueError(f"broadcast_data: {odd} where datatype is {datatype}; cast them, or broadcast them apart")
    device = torch.device("cpu") if group is None else agree.device_of(group)
    sent = {
        key: torch.empty(shape, dtype=datatype, device=device) if given is None else given[key].to(device).contiguous()
        for key, (shape, _) in known.items()
    }
    for tensor in sent.values() if group is not None and group_size(group) > 1 else ():
        with waiting("the data of the first rank", group):
            dist.broadcast(tensor, dist.get_process_group_ranks(group)[0], group=group)
    return sent
