"""The unsplit structure of a model that torch or a framework on torch has sharded or split in place."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from core.groups.global_names import TRANSPARENT
from core.verify.deepspeed import full_shape, stores_gradient

# Packages whose hooks and forwards gather, split, or convert tensors, and so have no place in one process.
DISTRIBUTING = ("torch.distributed", "torchtitan.distributed", "transformers.distributed", "deepspeed")
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
STATE = "__composable"  # prefix of the keys under which `fully_shard` stores its state in a module


def is_changed(model: nn.Module) -> bool:
    """True if torch.distributed or a framework has changed a model's parameters or modules in place."""
    return any(isinstance(param, DTensor) or stores_gradient(param) for param in model.parameters()) or any(
        type(part).__module__.startswith(DISTRIBUTING) or _inside(part) is not part for part in model.modules()
    )


def unsplit_structure(model: nn.Module) -> nn.Module:
    """Copy a model without the changes that ``fully_shard`` and tensor parallelism have made to its modules.

    A program usually has no function that builds the model without splitting it. DTensors know their full shapes, and
    ``fully_shard`` and ``replicate`` put a class in front of a module's own, so the unsplit model can be derived from a
    rank's part.

    Returns:
        The copy. Parameters have full shapes and are on the meta device; buffers have values.
    """
    memo: dict[int, Any] = {}
    for param in model.parameters():
        full = torch.empty(full_shape(param), dtype=param.dtype, device="meta")
        memo[id(param)] = nn.Parameter(full, param.requires_grad)
    for buffer in model.buffers():
        if isinstance(buffer, DTensor):
            memo[id(buffer)] = buffer.full_tensor()
    parts = [part for part in model.modules() if _inside(part) is part]
    for part in parts:
        kinds: Any = [kind for kind in type(part).__mro__ if issubclass(kind, nn.Module)]
        kind = next(kind for kind in kinds if not kind.__module__.startswith(DISTRIBUTING))
        if kind is nn.Module and not isinstance(part, FSDPModule):  # a class of torch.distributed, or a bare container
            kind = kinds[0]
        memo[id(part)] = kind.__new__(kind)
        memo |= {id(value): value for value in vars(part).values() if isinstance(value, DeviceMesh)}
    memo |= {id(part): memo[id(_inside(part))] for part in model.modules()}
    for part in parts:
        vars(memo[id(part)]).update(copy.deepcopy(_own_state(part), memo))
    return memo[id(model)]


def _inside(part: nn.Module) -> nn.Module:
    """Return the module inside the wrappers of activation checkpoints and torch.compile, which names leave out."""
    inner = next((part._modules[name] for name in TRANSPARENT if part._modules.get(name) is not None), None)
    return part if inner is None else _inside(inner)


def _own_state(part: nn.Module) -> dict[str, Any]:
    state = {key: value for key, value in vars(part).items() if not key.startswith(STATE)}
    if _distributes(state.get("forward")):
        del state["forward"]
    for kind in HOOKS:
        state[kind] = type(state[kind])((key, hook) for key, hook in state[kind].items() if not _distributes(hook))
    return state


def _distributes(function: Callable[..., Any] | None) -> bool:
    return str(getattr(getattr(function, "func", function), "__module__", "")).startswith(DISTRIBUTING)
