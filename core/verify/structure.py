"""The structure of a whole model without memory for its weights, and a model made of it again."""

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
    """A copy whose parameters are on the meta device. Buffers are copied."""
    return _with_zeros(model, "meta")


def _with_zeros(model: nn.Module, device: str) -> nn.Module:
    """A copy whose parameters are zeros on a device; tied ones stay tied."""
    memo = {
        id(param): nn.Parameter(torch.zeros_like(param, device=device), param.requires_grad)
        for param in model.parameters()
    }
    copied: nn.Module = copy.deepcopy(model, memo)
    return copied


def buffers_without_values(structure: nn.Module) -> list[str]:
    """Buffers on the meta device, as of a model that was boosted there."""
    return [name for name, buffer in structure.named_buffers() if buffer.is_meta]


def with_memory(structure: nn.Module, buffers: Mapping[str, Tensor]) -> nn.Module:
    """A model with this structure. Its parameters have memory and no values yet.

    buffers: values of those that have none in it. ValueError for one that is not among them.
    """
    model = _with_zeros(structure, "cpu")
    for name in buffers_without_values(model):
        if name not in buffers:
            raise ValueError(
                f"no rank has values of the buffer {name!r}, so the whole model cannot be made of its parts"
            )
        path, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(path), leaf, buffers[name].clone())
    return model.train()


def builder_of(module: nn.Module) -> tuple[Callable[[], nn.Module], str] | None:
    """Function that builds our GPT whole, from a rank's part, and its kind in words; None for any other model.

    It is the model of transformers where that is installed and has such a one: it shares no layer with ours.
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
