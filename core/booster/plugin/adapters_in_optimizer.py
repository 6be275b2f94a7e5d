"""LoRA adapters in an optimizer created before them: each joins the param group of the weight that it adapts.

peft's copy of a fully trained module (``modules_to_save``) joins the groups of the original's parameters.
"""

from __future__ import annotations

import re
from typing import Any

from torch import nn

from core.watch.warn_user import warn_user

ADAPTER = re.compile(r"\.(lora_A|lora_B|lora_embedding_A|lora_embedding_B|lora_magnitude_vector)\.")
COPY = re.compile(r"\.modules_to_save\.[^.]+\.")


def add_adapters(model: nn.Module, optimizer: Any) -> None:
    """Add a peft model's trainable adapters that an optimizer lacks. Warns if their weight is in no group."""
    group_of = {id(param): group for group in optimizer.param_groups for param in group["params"]}
    named = dict(model.named_parameters())
    for name, param in named.items():
        if not param.requires_grad or id(param) in group_of:
            continue
        if match := ADAPTER.search(name):
            origin = named.get(name[: match.start()] + ".base_layer.weight")
        elif match := COPY.search(name):
            origin = named.get(COPY.sub(".original_module.", name))
        else:
            continue
        group = None if origin is None else group_of.get(id(origin))
        if group is None:
            warn_user(f"adapter {name!r} adapts a weight that is not in the optimizer and is not trained")
            continue
        group["params"].append(param)
        group_of[id(param)] = group
