"""Functions that programs import from megatron.core.utils."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from core.context_parallel import get_batch_on_this_cp_rank as our_batch_on_this_cp_rank
from core.distributed import DistributedDataParallel
from core.groups.agree import SyncError
from core.tensor_parallel import initialization, mappings
from core_compat.megatron.faces.refusals import arguments

# A remainder raises ValueError.
divide = ensure_divisibility = functools.partial(mappings.divide, what="divide")
init_method_normal = arguments("sigma>std")(initialization.normal_init)
get_torch_version = functools.partial(str, torch.__version__)
get_default_pg_collection = functools.partial(mappings.resolve_groups, None)


def scaled_init_method_normal(sigma: float, num_layers: int, multiplier: float = 2.0) -> Callable[[Tensor], object]:
    """Return a normal initializer with sigma / sqrt(multiplier * num_layers), for layers before a residual addition."""
    return initialization.normal_init(sigma / (multiplier * num_layers) ** 0.5)


def make_viewless_tensor(inp: Tensor, requires_grad: bool, keep_graph: bool) -> Tensor:
    """Return the tensor itself, because activation memory is not freed during autograd here."""
    return inp if keep_graph else inp.detach().requires_grad_(requires_grad)


def is_torch_min_version(version: str, check_equality: bool = True) -> bool:
    """Return ``True`` if torch has at least this version, or without check_equality a later one."""
    found = torch.torch_version.TorchVersion(torch.__version__.partition("+")[0])
    return bool(found >= version if check_equality else found > version)


def is_te_min_version(version: str, check_equality: bool = True) -> bool:
    """Return ``False``, because TransformerEngine's layers are not used in any version."""
    return False


def log_single_rank(logger: logging.Logger, *args: Any, rank: int = 0, **kwargs: Any) -> None:
    """Call logger.log on one rank."""
    if not dist.is_initialized() or dist.get_rank() == rank:
        logger.log(*args, **kwargs)


def get_tensor_model_parallel_group_if_none(
    tp_group: Any, is_expert: bool = False, check_initialized: bool = True
) -> Any:
    """Return the given group, or by default the tensor-parallel group, or the experts' tensor-parallel group."""
    if tp_group is not None or not dist.is_initialized():
        return tp_group
    return getattr(get_default_pg_collection(), "expt_tp" if is_expert else "tp")


@arguments(
    "batch cp_group=None !is_hybrid_cp=False !hybrid_cp_group_func=None !use_per_sequence_balancing=False "
    "!local_cp_size=None|1"
)
def get_batch_on_this_cp_rank(batch: dict[str, Any], cp_group: Any) -> dict[str, Any]:
    """Call core.context_parallel.get_batch_on_this_cp_rank.

    ``cp_group`` may be False, 0.19's is_hybrid_cp in its position.
    """
    return our_batch_on_this_cp_rank(batch, cp_group or None)


def check_param_hashes_across_dp_replicas(model: Sequence[nn.Module], cross_check: bool = False) -> bool:
    """Return ``True`` if all copies of every weight are equal.

    Collective. ``cross_check`` is ignored, because all ranks get the result.
    """
    plain = [type(chunk).__name__ for chunk in model if not isinstance(chunk, DistributedDataParallel)]
    if plain:
        raise SyncError(f"a {plain[0]} is not wrapped; pass the DistributedDataParallel chunks")
    findings: list[Any] = [chunk.unequal_weights() for chunk in model]
    return all(finding is None for finding in findings)
