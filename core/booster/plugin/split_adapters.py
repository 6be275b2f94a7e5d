"""LoRA adapters of a model that is cut, or has no memory: taken off before, and put onto its parts after."""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from core.booster.lora import peft_package
from core.booster.plugin.hybrid_parallel_parts import splits_of
from core.groups.process_groups import ProcessGroups
from core.hugging_face import add_lora
from core.hugging_face.slices import slice_of
from core.hugging_face.split import REPORT

MARK = "lora_"  # in the names of parameters of adapters


@dataclass(frozen=True)
class Adapters:
    """Adapters of a whole model. config: a peft.LoraConfig. values: the adapters' parameters by their names there."""

    config: Any
    values: Mapping[str, nn.Parameter]


def take_off(model: Any) -> tuple[Any, Adapters | None]:
    """(the model without adapters, its adapters); a model that has none is returned unchanged. ValueError for
    several, and for one of experts' fused weights.
    """
    if not hasattr(model, "peft_config"):
        return model, None
    if len(model.peft_config) != 1:
        raise ValueError(
            f"the model has the adapters {', '.join(model.peft_config)}, and one is split with a model; delete the "
            "others before boost"
        )
    (config,) = model.peft_config.values()
    fused = getattr(config, "target_parameters", None)
    if fused:  # peft turns names of linear layers into these where a family's experts are fused
        raise ValueError(
            f"the adapters are for the fused weights {', '.join(sorted(fused))} of experts, which are not split with "
            "adapters; name linear layers outside of the experts in target_modules, such as q_proj and v_proj"
        )
    values = {name: param for name, param in model.named_parameters() if MARK in name}
    base = model.unload()
    if hasattr(base, "peft_config"):
        del base.peft_config
    return base, Adapters(config, values)


@torch.no_grad()
def put_on(
    parts: Sequence[Any], adapters: Adapters, learning: Collection[str], groups: ProcessGroups, *, staged: bool
) -> list[Any]:
    """The parts of the model with adapters cut as their layers are. Collective, as `add_lora` is.

    Those on the meta device begin as peft draws them. learning: names of the whole model's parameters that train.
    """
    config = copy.deepcopy(adapters.config)
    with torch.enable_grad():
        if getattr(parts[0], REPORT, None) is None:  # one rank has the model whole
            adapted = [peft_package().get_peft_model(parts[0], config)]
        elif staged:
            adapted = add_lora(list(parts), config, pg_collection=groups)
        else:
            adapted = [add_lora(parts[0], config, pg_collection=groups)]
    for part in adapted:
        splits = splits_of(part)
        for name, param in part.named_parameters():
            whole = adapters.values.get(name)
            if whole is not None and not whole.is_meta:
                param.data = slice_of(whole.detach().to(param.device), splits.get(name), groups).clone()
            param.requires_grad_(name in learning)
    return list(adapted)
