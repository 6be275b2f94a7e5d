"""Check that all ranks hold the same model before it is sharded."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from core.booster.plugin.dp_plugin_base import SAME_MODEL
from core.groups import agree
from core.watch.warn_user import warn_user


def agree_on_model(model: nn.Module, group: dist.ProcessGroup, plugin: str, *, warn_of_values: bool) -> None:
    """Check that names, shapes and dtypes of parameters are the same on all ranks of a group. Collective.

    ``warn_of_values`` warns if values differ, because shards of different models do not form one model. Raises
    ValueError on every rank if names, shapes or dtypes differ.
    """
    params = dict(model.named_parameters())
    table = [f"{name!r} {list(param.shape)} {param.dtype}" for name, param in params.items()]
    agree.same([(plugin, group, table)], kind=ValueError, advice=SAME_MODEL)
    answers = agree.gather(list(map(_total, params.values())), group, f"the weights of {plugin}")
    (first_rank, first), *others = answers.items()
    for rank, totals in others:
        unlike = [name for name, here, there in zip(params, first, totals, strict=True) if here != there]
        if unlike and warn_of_values:
            warn_user(
                f"{plugin}: {len(unlike)} parameters, the first {unlike[0]!r}, have other values on rank {rank} than "
                f"on rank {first_rank}, so the sharded model will be pieces of both; seed all ranks alike, or set "
                "sync_module_states=True"
            )
            return


def _total(param: torch.Tensor) -> float | None:
    """Return the sum of a parameter's elements, or ``None`` on the meta device."""
    return None if param.is_meta else float(param.detach().sum(dtype=torch.float64))
