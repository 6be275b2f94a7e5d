"""Copies of unsplit models without memory for their weights, and models rebuilt from them."""

from __future__ import annotations

import copy
import dataclasses
import importlib.util
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from core.groups.process_groups import ProcessGroups
from core.models import GPTModel
from core.models.transformers_layouts import LAYOUTS, layout_of
from core.verify.transformers_reference import TransformersGPT

WHOLE: dict[str, Any] = {
    "tensor_model_parallel_size": 1,
    "sequence_parallel": False,
    "pipeline_model_parallel_size": 1,
    "virtual_pipeline_model_parallel_size": None,
    "context_parallel_size": 1,
    "expert_model_parallel_size": 1,
    "expert_tensor_parallel_size": 1,
    "gradient_accumulation_fusion": False,
    "recompute_granularity": None,
}


def structure_of(model: nn.Module) -> nn.Module:
    """Return a copy whose parameters are on the meta device. Buffers are copied."""
    return _with_zeros(model, "meta")


def _with_zeros(model: nn.Module, device: str) -> nn.Module:
    """Return a copy with zero parameters on a device; ties are kept."""
    memo = {
        id(param): nn.Parameter(torch.zeros_like(param, device=device), param.requires_grad)
        for param in model.parameters()
    }
    copied: nn.Module = copy.deepcopy(model, memo)
    return copied


def buffers_without_values(structure: nn.Module) -> list[str]:
    """Return the names of buffers on the meta device, as in models boosted there."""
    return [name for name, buffer in structure.named_buffers() if buffer.is_meta]


def with_memory(structure: nn.Module, buffers: Mapping[str, Tensor]) -> nn.Module:
    """Build a model with this structure, whose parameters have memory but no values yet.

    Raises:
        ValueError: If a buffer has no value.
    """
    model = _with_zeros(structure, "cpu")
    for name in buffers_without_values(model):
        if name not in buffers:
            raise ValueError(f"no rank has values of the buffer {name!r}, so the unsplit model cannot be built")
        path, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(path), leaf, buffers[name].clone())
    return model.train()


State = tuple[dict[str, bool], dict[str, Tensor]]  # a module's flags and buffers


def state_of(module: nn.Module) -> dict[str, State]:
    """Return the flags (bool attributes, ``training`` among them) and copies of the buffers of each module by name."""
    return {
        name: (
            {key: value for key, value in vars(part).items() if isinstance(value, bool)},
            {key: b.detach().cpu().clone() for key, b in part.named_buffers(recurse=False) if not b.is_meta},
        )
        for name, part in module.named_modules()
    }


def initialized_modules(before: Mapping[str, State], after: Mapping[str, State]) -> set[str]:
    """Return the modules that have initialised themselves from their first input in a step.

    Their flags, or buffers of integers, have changed.
    """
    found = set()
    for name in before.keys() & after.keys():
        (flags, buffers), (known_flags, known) = after[name], before[name]
        numbers = [key for key, value in known.items() if not value.is_floating_point()]
        if flags != known_flags or any(not torch.equal(known[key], buffers[key]) for key in numbers):
            found.add(name)
    return found


def with_state(model: nn.Module, before: Mapping[str, State], after: Mapping[str, State]) -> nn.Module:
    """Set the flags and buffers that the program's model had in a step.

    Buffers are those from before the step, because forwards may write them. A module whose flags have changed in the
    step has initialised itself from its first input, and must not do so again.
    """
    started = initialized_modules(before, after)
    for name, part in model.named_modules():
        if name in before and name in after:
            flags, buffers = after[name]
            vars(part).update(flags)
            own = dict(part.named_buffers(recurse=False))
            for key, value in (buffers if name in started else before[name][1]).items():
                if key in own and own[key].shape == value.shape:
                    setattr(part, key, value.clone())
    return model


def builder_of(module: nn.Module) -> tuple[Callable[[], nn.Module], str] | None:
    """Return a function that builds our GPT unsplit from a rank's part, and a description; None for any other model.

    It builds the transformers model if that is installed and supports the config, because it shares no layer with ours.
    """
    if type(module) is not GPTModel:
        return None
    config = dataclasses.replace(module.config, **WHOLE)
    try:
        layout = layout_of(config)
        if importlib.util.find_spec("transformers") is not None:
            return lambda: TransformersGPT(config), f"reference: {LAYOUTS[layout]} of transformers"
        reason = "transformers is not installed"
    except ValueError as error:
        reason = str(error)
    same = f"reference of the same classes, so a layer that is wrong in both is not seen: {reason}"
    return lambda: GPTModel(config, ProcessGroups()), same
