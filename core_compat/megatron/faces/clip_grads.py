"""Megatron's functions on gradients in ``.grad``, for custom optimizers.

get_megatron_optimizer clips gradients itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from core.booster.accelerator import device_of_group
from core.groups import agree
from core.watch.waiting import waiting
from core_compat.megatron.faces.mappings import param_is_not_tensor_parallel_duplicate
from core_compat.megatron.faces.modules import param_is_not_shared
from core_compat.megatron.faces.refusals import arguments


def get_grad_norm_fp32(
    grads_for_norm: Tensor | Sequence[Tensor], norm_type: float = 2, grad_stats_parallel_group: Any = None
) -> float:
    """Compute the norm of tensors on all ranks of a group, by default the world, as one fp32 vector. Collective."""
    grads = _listed(grads_for_norm)
    exponent = float(norm_type)
    norms = [torch.linalg.vector_norm(grad.detach(), exponent, dtype=torch.float32) for grad in grads]
    together = torch.stack(norms) if norms else torch.zeros(1)
    if exponent == float("inf"):
        largest = agree.gather(float(together.max()), grad_stats_parallel_group, "the largest gradient")
        return max(largest.values())
    total = together.to(device_of_group(grad_stats_parallel_group)).pow(exponent).sum()
    return float(_added(total, grad_stats_parallel_group, "the gradients' norm")) ** (1.0 / exponent)


@arguments("parameters max_norm total_norm !use_decoupled_grad=False")
def clip_grad_by_total_norm_fp32(parameters: Tensor | Iterable[Tensor], max_norm: float, total_norm: float) -> None:
    """Multiply every ``.grad`` by max_norm / total_norm if that is below 1."""
    torch.nn.utils.clip_grads_with_norm_(_listed(parameters), max_norm, torch.tensor(float(total_norm)))


@arguments("parameters grad_stats_parallel_group !use_decoupled_grad=False tp_group=None -expert_tp_group=None")
def count_zeros_fp32(parameters: Tensor | Iterable[Tensor], grad_stats_parallel_group: Any, tp_group: Any) -> float:
    """Count the zeros of all ``.grad`` on the ranks of a group. Collective.

    Copies of a parameter count once. A parameter without a gradient has no zeros.
    """
    zeros = torch.zeros(1, dtype=torch.int64, device=device_of_group(grad_stats_parallel_group))
    for param in _listed(parameters):
        counts = param_is_not_shared(param) and param_is_not_tensor_parallel_duplicate(param, tp_group)
        if param.grad is not None and counts:
            zeros += int(param.grad.numel() - torch.count_nonzero(param.grad))
    return float(_added(zeros, grad_stats_parallel_group, "the number of zeros"))


def _added(numbers: Tensor, group: Any, what: str) -> Tensor:
    with waiting(what, group or dist.group.WORLD):
        dist.all_reduce(numbers, group=group)
    return numbers


def _listed(tensors: Tensor | Iterable[Tensor]) -> list[Tensor]:
    return [tensors] if isinstance(tensors, Tensor) else list(tensors)
