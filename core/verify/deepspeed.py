"""DeepSpeed's engines, if a program has imported it. This module never imports it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

ENGINE = "deepspeed.runtime.engine", "DeepSpeedEngine"
UPDATE = "_take_model_step"  # the method that updates at the end of an accumulation


def is_engine(part: object) -> bool:
    """True for a DeepSpeedEngine."""
    return any((kind.__module__, kind.__name__) == ENGINE for kind in type(part).__mro__)


def full_shape(param: Tensor) -> tuple[int, ...]:
    """Return the shape of a parameter before ZeRO-3 partitions it."""
    return tuple(getattr(param, "ds_shape", param.shape))


def gradients(outer: nn.Module, params: Sequence[Any]) -> dict[int, Tensor]:
    """Return the reduced gradients that ZeRO stores outside the parameters, by the parameter's id. Collective.

    Args:
        outer: Model as the loop calls it.
        params: Its trained parameters, in the same order on all ranks.
    """
    if not is_engine(outer):
        return {}
    read = sys.modules["deepspeed.utils.tensor_fragment"].safe_get_full_grad
    found = {id(param): read(param) for param in params}
    scale = float(getattr(outer.optimizer, "cur_scale", 1.0))
    return {key: grad / scale for key, grad in found.items() if grad is not None}


@contextmanager
def gathered(params: Sequence[Any]) -> Iterator[None]:
    """Gather parameters that ZeRO-3 has partitioned inside the context. Collective."""
    partitioned = [param for param in params if hasattr(param, "ds_id")]
    if not partitioned:
        yield
        return
    with sys.modules["deepspeed.runtime.zero.partition_parameters"].GatheredParameters(partitioned):
        yield


def stores_gradient(param: Any) -> bool:
    """True if ZeRO stores a parameter's gradient in its own buffers."""
    return hasattr(param, "ds_id") or hasattr(param, "get_full_hp_grad")


def zero_optimizer(outer: nn.Module) -> Any:
    """Return the optimizer of ZeRO that shards the optimizer of an engine; None if there is none."""
    optimizer = outer.optimizer if is_engine(outer) else None
    return optimizer if isinstance(getattr(optimizer, "optimizer", None), torch.optim.Optimizer) else None


def groups_of(optimizer: Any) -> list[list[Any]]:
    """Return the model's parameters in each group of an optimizer of ZeRO."""
    kinds = (getattr(optimizer, kind, None) for kind in ("bit16_groups", "fp16_groups", "bf16_groups"))
    return [list(group) for group in next(filter(None, kinds), ())]


@contextmanager
def around_updates(engine: Any, begin: Callable[[], None], end: Callable[[float | None], None]) -> Iterator[None]:
    """Call ``begin`` before an engine updates, and ``end`` afterwards with the norm of the gradients that it
    computed.
    """
    take = vars(sys.modules[ENGINE[0]])[ENGINE[1]].__dict__[UPDATE]

    def take_between(*args: Any, **kwargs: Any) -> Any:
        begin()
        result = take(engine, *args, **kwargs)
        norm = engine.get_global_grad_norm()
        end(None if norm is None else float(norm))
        return result

    with mock.patch.object(engine, UPDATE, take_between):
        yield
