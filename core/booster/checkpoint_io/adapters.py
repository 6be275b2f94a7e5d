"""Files as ``save_pretrained`` writes them: adapters of every peft method, and the config of a Hugging Face model."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from core.checkpoint.tied_tensors import tied_names

CONFIG, DEFAULT = "adapter_config.json", "default"


def is_adapted(module: nn.Module) -> bool:
    """Return ``True`` if a module is a peft model."""
    return hasattr(module, "peft_config") and hasattr(module, "active_peft_config")


def folders_of(module: Any, directory: Path) -> dict[str, Path]:
    """Return each adapter's directory: the checkpoint's for "default", and a subdirectory of it for others."""
    return {name: directory if name == DEFAULT else directory / name for name in module.peft_config}


def names_to_save(module: Any) -> set[str]:
    """Return the names of the tensors in a directory of adapters, and possibly some more."""
    own = _placeholders(module)
    prefixes = {getattr(getattr(module, "base_model", None), "prefix", "") or "lora_", "prompt_encoder."}
    trained = {name for name, param in module.named_parameters() if param.requires_grad}
    found = {name for name in own if any(prefix in name for prefix in prefixes)} | trained
    for adapter in module.peft_config:
        if not _is_prompt(module, adapter):
            found |= set(_names_in_file(module, adapter, own).values())
    return found


def write_adapters(module: Any, content: dict[str, Any], directory: str, *, use_safetensors: bool) -> None:
    """Write the directories of all adapters. The one for "default" is ``directory``.

    ``content`` has the tensors of ``names_to_save``. The module's parameters may be on the meta device, or shards.
    """
    for names in tied_names(module):  # peft's file has a tensor that layers share under each of its names
        content |= {name: content[names[0]] for name in names if names[0] in content}
    shadow = module
    if any(_is_prompt(module, adapter) for adapter in module.peft_config):  # peft runs the prompt's encoder
        shadow = copy.copy(module)
        encoder = copy.deepcopy(module.prompt_encoder).to_empty(device="cpu")
        prefix = "prompt_encoder."
        encoder.load_state_dict({n.removeprefix(prefix): v for n, v in content.items() if n.startswith(prefix)})
        shadow._modules = {**module._modules, "prompt_encoder": encoder}
    shadow.save_pretrained(directory, safe_serialization=use_safetensors, state_dict=content)


def read_adapters(module: Any, directory: Path) -> dict[str, torch.Tensor]:
    """Read the directories of all adapters of a model, and return full tensors by their names in the model.

    Raises ValueError if an adapter is missing, has other tensors than the model's, or cannot be trained further.
    """
    from peft.utils.save_and_load import load_peft_weights

    own = _placeholders(module)
    found: dict[str, torch.Tensor] = {}
    for adapter, folder in folders_of(module, directory).items():
        if not (folder / CONFIG).is_file():
            raise ValueError(f"{folder} has no {CONFIG}, and the model has the adapter {adapter!r}")
        stored = load_peft_weights(str(folder), device="cpu")
        if _is_prompt(module, adapter):
            places = {"prompt_embeddings": f"prompt_encoder.{adapter}.embedding.weight"}
            if len(list(module.prompt_encoder[adapter].parameters())) > 1:
                raise ValueError(
                    f"{folder}: peft saves of {_kind(module, adapter)} the prompt that its encoder computes, and not "
                    "the encoder; it can be used, and not trained further"
                )
        else:
            places = _names_in_file(module, adapter, own)
        if stored.keys() != places.keys():
            lacks, more = sorted(places.keys() - stored.keys()), sorted(stored.keys() - places.keys())
            raise ValueError(
                f"{folder} lacks {len(lacks)} tensors of the model's adapter {adapter!r} {lacks[:3]} and has "
                f"{len(more)} that it lacks {more[:3]}; make the model with the adapter that was saved"
            )
        found |= {places[key]: value for key, value in stored.items()}
    return found


def save_config(model: nn.Module, directory: Path) -> None:
    """Write the config files that from_pretrained needs, as ``save_pretrained`` does. No-op for other models."""
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "save_pretrained"):
        return
    whole: Any = model
    if hasattr(whole, "save_pretrained"):
        config = copy.deepcopy(config)
        config.dtype = str(whole.dtype).removeprefix("torch.")
        config.architectures = [type(whole).__name__]
        if getattr(whole, "is_remote_code", bool)():  # its class is defined in the model's directory
            from transformers.dynamic_module_utils import custom_object_save

            custom_object_save(whole, str(directory), config=config)
    config.save_pretrained(str(directory))
    generation: Any = getattr(model, "generation_config", None)
    if hasattr(generation, "save_pretrained"):
        generation.save_pretrained(str(directory))


def _is_prompt(module: Any, adapter: str) -> bool:
    return bool(module.peft_config[adapter].is_prompt_learning)


def _kind(module: Any, adapter: str) -> str:
    return str(getattr(module.peft_config[adapter].peft_type, "value", module.peft_config[adapter].peft_type))


def _placeholders(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return a tensor without memory for each name in the model's state dict."""
    tensors = {name: value for name, value in module.state_dict(keep_vars=True).items() if hasattr(value, "shape")}
    return {name: torch.empty(value.shape, dtype=value.dtype, device="meta") for name, value in tensors.items()}


def _names_in_file(module: Any, adapter: str, own: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Return the name in the model for each key in an adapter's file, as peft maps them."""
    from peft import get_peft_model_state_dict

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peft repeats the warning when the file is written
        stored = get_peft_model_state_dict(module, dict(own), adapter)
    names = {id(value): name for name, value in own.items()}
    return {key: names[id(value)] for key, value in stored.items() if id(value) in names}
