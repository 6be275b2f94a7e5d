"""The example that proves a split: arguments of one small forward, made from a model's own main input and config."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as tree

from core.groups.process_groups import ProcessGroups
from core.hugging_face.plan import PlanError, family_of

ROWS, CHOICES, SAMPLES = 2, 2, 2000
PASS = "example=, the arguments of a small forward, equal on all ranks, to the plugin, split_model or load_split"


def example_of(model: Any, groups: ProcessGroups, example: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The example; without one, rows that differ of what the model's `main_input_name` says: tokens, pixels or sound.

    Sequences have 8 tokens, or more where more ranks may cut them. No cache of keys and values is asked for.
    Raises PlanError for a model whose input is unknown here.
    """
    if example is not None:
        return tree.tree_map_only(Tensor, partial(_as_inputs, model), dict(example))
    takes = inspect.signature(type(model).forward).parameters
    length = math.lcm(8, groups.size("tp"), 2 * groups.size("cp"))
    made = _main_input(model, length)
    if model.config.is_encoder_decoder or "decoder_input_ids" in takes:
        made["decoder_input_ids"] = _ids(model, length)
    passes_on = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in takes.values())
    if "use_cache" in takes or (passes_on and hasattr(model.config.get_text_config(), "use_cache")):
        made["use_cache"] = False  # layers of other kinds than attention have no such cache
    return made


def _as_inputs(model: Any, value: Tensor) -> Tensor:
    """A tensor on the model's device; fractions in its dtype."""
    return value.to(model.device, model.dtype if value.is_floating_point() else value.dtype)


def _main_input(model: Any, length: int) -> dict[str, Any]:
    name, takes = model.main_input_name, inspect.signature(type(model).forward).parameters
    if name == "input_ids":
        ids = _ids(model, length)
        several = type(model).__name__.endswith("MultipleChoice")
        return {name: torch.stack([ids.roll(shift, 1) for shift in range(CHOICES)], 1) if several else ids}
    if name == "pixel_values":
        made = {name: _pixels(model)}
        if "input_ids" in takes:
            made["input_ids"] = _after_images(model, _ids(model, length))
        return made
    if name == "input_features" and hasattr(model.config, "max_source_positions"):
        return {name: _random(model, ROWS, model.config.num_mel_bins, 2 * model.config.max_source_positions)}
    if name == "input_values":
        return {name: _random(model, ROWS, SAMPLES)}
    raise PlanError(f"{type(model).__name__} takes {name!r}, and no example of it is made here; pass {PASS}")


def _ids(model: Any, length: int) -> Tensor:
    """The numbers from 0, turned by one from row to row, so that each row has each special token as often."""
    text = model.config.get_text_config()
    ids = torch.arange(length, device=model.device) % getattr(text, "vocab_size", 8)
    # A classifier of rows looks for the last token that is no padding, and refuses several rows without a token for it.
    alone = type(model).__name__.endswith("SequenceClassification") and getattr(text, "pad_token_id", None) is None
    return torch.stack([ids.roll(row) for row in range(1 if alone else ROWS)])


def _pixels(model: Any) -> Tensor:
    config = getattr(model.config, "vision_config", model.config)
    size = getattr(config, "image_size", None)
    if size is None:
        raise PlanError(f"{type(model).__name__}: its config names no image_size to make an example of; pass {PASS}")
    height, width = (size, size) if isinstance(size, int) else size
    return _random(model, ROWS, getattr(config, "num_channels", 3), height, width)


def _after_images(model: Any, ids: Tensor) -> Tensor:
    """Token ids behind the places that an image takes."""
    mark = getattr(model.config, "image_token_index", getattr(model.config, "image_token_id", None))
    places = getattr(model.config, "num_query_tokens", None)
    if mark is None or places is None:
        raise PlanError(f"{family_of(model)}: how many tokens an image takes is unknown here; pass {PASS}")
    rest = ids.masked_fill(ids == mark, (mark + 1) % 8)
    return torch.cat([ids.new_full((len(ids), places), mark), rest], dim=1)


def _random(model: Any, *shape: int) -> Tensor:
    generator = torch.Generator("cpu").manual_seed(7)
    return torch.randn(shape, generator=generator, device="cpu").to(model.device, model.dtype)
