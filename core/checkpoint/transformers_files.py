"""A complete GPT as a directory of Hugging Face's transformers, and back: config.json and safetensors files."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from core.checkpoint.bounded_read import parse_json, read_bytes
from core.checkpoint.pieces import MODEL
from core.checkpoint.plain_files import Lazy, WholeTensors, open_safetensors_files, write_safetensors
from core.checkpoint.tied_tensors import names_apart
from core.models.transformers_layouts import (
    EMBEDDINGS,
    HEAD,
    config_for_transformers,
    config_from_transformers,
    from_transformers,
    layout_of,
    to_transformers,
)
from core.transformer.transformer_config import TransformerConfig
from core.watch.warn_user import warn_user

CONFIG = "config.json"
SHARD_BYTES = 5 * 10**9
# Fields that may differ between two configurations of one model: they affect training, not the model.
FREE = {"params_dtype", "bf16", "fp16", "init_method_std", "hidden_dropout", "attention_dropout"}


def is_of_transformers(place: Path) -> bool:
    """Return ``True`` for a directory whose config.json has a model_type."""
    if not (place / CONFIG).is_file():
        return False
    content = parse_json(read_bytes(place / CONFIG))
    return isinstance(content, dict) and "model_type" in content


def write_transformers(
    target: Path,
    config: TransformerConfig,
    state: Mapping[str, Tensor],
    *,
    more: Mapping[str, Any] | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> tuple[int, int]:
    """Write a complete GPT's state_dict, and return the numbers of tensors and files.

    ``more`` has additional entries of config.json. Raises ValueError if no model type of transformers can represent the
    configuration.
    """
    entries = config_for_transformers(config) | dict(more or {})
    theirs = to_transformers(config, state)
    weights = WholeTensors((f"{MODEL}.{name}", Lazy.of(tensor)) for name, tensor in theirs.items())
    files = write_safetensors(target, weights, max_shard_bytes=shard_bytes)
    (target / CONFIG).write_text(json.dumps(entries, indent=2) + "\n")
    return len(theirs), len(files)


def read_transformers(source: Path) -> tuple[TransformerConfig, dict[str, Tensor]]:
    """Read the configuration and the state_dict of a GPTModel.

    Raises ValueError, naming the part, if the files have something without a counterpart in GPTModel.
    """
    config = config_from_transformers(json.loads((source / CONFIG).read_text()))
    given = {key.removeprefix(f"{MODEL}."): lazy.read() for key, lazy in open_safetensors_files(source).items()}
    for name, tensor in given.items():
        if name.endswith(".weight") and not tensor.is_floating_point():  # a mask may be an integer tensor
            raise ValueError(
                f"{source}: {name!r} is {tensor.dtype} in its files; only numbers with a point are read, so write the "
                "model without its quantization first"
            )
    if config.share_embeddings_and_output_weights:
        pairs = names_apart({(EMBEDDINGS[layout_of(config)], HEAD): config.params_dtype}, given)
        for first, other in pairs:
            warn_user(
                f"{source}: its {CONFIG} ties {other!r} to {first!r}, and its files hold different values for them, so "
                "they are two parameters here, as in transformers"
            )
        config = dataclasses.replace(config, share_embeddings_and_output_weights=not pairs)
    return config, from_transformers(config, given)


def check_same_model(ours: TransformerConfig, theirs: TransformerConfig) -> None:
    """Raise ValueError, naming the field, unless two configurations compute the same model."""
    ours = config_from_transformers(config_for_transformers(ours))
    for field in dataclasses.fields(TransformerConfig):
        here, there = getattr(ours, field.name), getattr(theirs, field.name)
        if field.name not in FREE and here != there and not isinstance(here, torch.dtype):
            raise ValueError(f"{field.name} is {here!r} in the model and {there!r} in the files; build it as they say")


def save_pretrained(model: Any, directory: str | os.PathLike[str]) -> None:
    """Write a GPTModel for Hugging Face's transformers, as llama, gpt2 or arcee. One process with the complete model.

    Raises ValueError if the model is only a part, or no model type of transformers can represent it.
    """
    write_transformers(Path(directory), _config_of_whole(model, "save_pretrained"), model.state_dict())


def load_pretrained(model: Any, directory: str | os.PathLike[str]) -> None:
    """Load a directory written by transformers into a GPTModel. One process with the complete model.

    Raises ValueError if the model is only a part, or config.json describes a different model.
    """
    ours = _config_of_whole(model, "load_pretrained")
    config, state = read_transformers(Path(directory))
    check_same_model(ours, config)
    model.load_state_dict(state)


def _config_of_whole(model: Any, what: str) -> TransformerConfig:
    if not (model.pre_process and model.post_process and model.output_layer.tp_size == 1):
        raise ValueError(
            f"{what} needs a complete model, and this is a part of one; save with save_checkpoint (or Megatron's "
            "dist_checkpointing.save), which loads at any layout, then load it in one process"
        )
    config: TransformerConfig = model.config
    return config
