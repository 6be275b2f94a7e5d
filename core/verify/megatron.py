"""Megatron Core's wrappers, groups, and optimizers, if a program has imported them. This module never imports it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import nn

WRAPPERS = (
    ("megatron.core.distributed.distributed_data_parallel", "DistributedDataParallel"),
    ("megatron.core.transformer.module", "Float16Module"),
)
OPTIMIZERS = ("FP32Optimizer", "MixedPrecisionOptimizer")  # other optimizers inherit or call their `prepare_grads`
OTHER_AXES = ("pipeline_model_parallel", "context_parallel", "expert_model_parallel")


def is_wrapper(part: nn.Module) -> bool:
    """True for Megatron Core's DistributedDataParallel and Float16Module."""
    return any((kind.__module__, kind.__name__) in WRAPPERS for kind in type(part).__mro__)


def places(outer: nn.Module) -> tuple[list[int], list[int]] | None:
    """Read Megatron Core's groups.

    Args:
        outer: Model as the loop calls it.

    Returns:
        The ranks with different data, and the ranks that split this replica; None without initialized groups.

    Raises:
        ValueError: For pipeline, context, and expert parallelism, and for its distributed optimizer, with which a rank
            holds complete gradients of its own shard only.
    """
    state = _imported("megatron.core.parallel_state")
    if state is None or not state.model_parallel_is_initialized():
        return None
    sizes = {axis: getattr(state, f"get_{axis}_world_size")() for axis in OTHER_AXES}
    others = [f"{axis}_size {size}" for axis, size in sizes.items() if size > 1]
    wrappers = [part for part in outer.modules() if is_wrapper(part) and hasattr(part, "ddp_config")]
    others += ["use_distributed_optimizer" for part in wrappers if part.ddp_config.use_distributed_optimizer][:1]
    if others:
        raise ValueError(
            f"Megatron Core runs with {' and '.join(others)}, but for Megatron's modules only tensor and data "
            "parallelism can be compared; use the import lines of core_compat.megatron to compare the other axes"
        )
    return (
        dist.get_process_group_ranks(state.get_data_parallel_group()),
        dist.get_process_group_ranks(state.get_tensor_model_parallel_group()),
    )


def before_optimizers() -> list[tuple[Any, str, Callable[[Any], list[Any]]]]:
    """Return (class, method that begins a step, optimizer -> its parameters) of Megatron Core's optimizers."""
    module = _imported("megatron.core.optimizer.optimizer")
    found = [] if module is None else [vars(module)[name] for name in OPTIMIZERS]
    return [(kind, "prepare_grads", _stepped) for kind in found]


def _stepped(optimizer: Any) -> list[Any]:
    """Return the model's parameters in an optimizer; mixed-precision optimizers hold copies of them."""
    copied = getattr(optimizer, "float16_groups", [])
    held = [] if optimizer.optimizer is None else [group["params"] for group in optimizer.optimizer.param_groups]
    return [param for params in (*copied, *held) for param in params]


def _imported(name: str) -> Any:
    """Return a module of Megatron Core that the program has imported; None for our module of that name."""
    module = sys.modules.get(name)
    return module if getattr(module, "__name__", "") == name else None
