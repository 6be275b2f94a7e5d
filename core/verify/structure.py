"""The structure of a whole model without memory for its weights, and a model made of it again."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from core.groups.process_groups import ProcessGroups
from core.models import GPTModel

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
    """A copy whose parameters are on the meta device. Buffers are copied."""
    memo = {
        id(param): nn.Parameter(torch.empty_like(param, device="meta"), param.requires_grad)
        for param in model.parameters()
    }
    structure: nn.Module = copy.deepcopy(model, memo)
    return structure


def with_memory(structure: nn.Module) -> nn.Module:
    """A model with this structure. Its parameters have memory and no values yet."""
    model = copy.deepcopy(structure)
    made: dict[int, nn.Parameter] = {}
    for module in list(model.modules()):
        for name, param in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if id(param) not in made:  # tied ones stay tied
                made[id(param)] = nn.Parameter(torch.zeros_like(param, device="cpu"), param.requires_grad)
            setattr(module, name, made[id(param)])
    return model.train()


def builder_of(module: nn.Module) -> Callable[[], nn.Module] | None:
    """Function that builds our own model whole, from a rank's part; None for any other model."""
    if not isinstance(module, GPTModel):
        return None
    config = dataclasses.replace(module.config, **WHOLE)
    return lambda: GPTModel(config, ProcessGroups())
