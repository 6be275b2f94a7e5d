"""Examples that prove a split: arguments of one small forward, created from a model's main input and config.

An example is longer than every token count in the config (windows, chunks, floors) if a forward of that length is
cheap: at most PRODUCTS multiplications, and ELEMENTS logits. Otherwise it exceeds as many of these counts as it can, or
has 8 tokens, and ``unreached`` names the counts that it does not exceed.
"""

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
from core.hugging_face.read.plan import PlanError, family_of
from core.hugging_face.read.quiet import in_mode

IMAGE_FEATURES, GRIDS = "get_image_features", "image_grid_thw"
ROWS, CHOICES, SAMPLES = 2, 2, 2000
PRODUCTS = {"cpu": 2**30, "other": 2**45}  # about 0.1 s on a core, and on a GPU
ELEMENTS = 2**28
# Config names of token counts beyond which a model computes differently.
REACHES = (
    *("sliding_window", "sliding_window_size", "window_size", "attention_window_size", "local_attention"),
    *("attention_chunk_size", "chunk_size", "mamba_chunk_size", "max_window_size"),
    *("floor_scale", "log_scaling_n_floor", "index_topk", "index_block_size", "indexer_budget"),
)
# Class-name endings: labels are token ids, or one number below `num_labels` per token or row.
OF_TOKENS = ("ForCausalLM", "LMHeadModel", "ForMaskedLM", "ForConditionalGeneration")
OF_CLASSES = {"ForTokenClassification": 2, "ForSequenceClassification": 1, "ForImageClassification": 1}
PASS = "example=, the arguments of a small forward, equal on all ranks, to the plugin, split_model or load_split"


def example_of(
    model: Any, groups: ProcessGroups, example: Mapping[str, Any] | None = None, *, with_images: bool = False
) -> dict[str, Any]:
    """Return the example on the model's device, or create one from the model's main input: tokens, pixels, or audio.

    The rows of a created example differ. Its sequences have 8 tokens, or more if more ranks may cut them, and exceed
    the model's windows if that is cheap. It turns off the KV cache. ``with_images`` puts an image before each row of
    tokens, for models that take both. Raises PlanError if no example can be created for the model's input.
    """
    if example is not None:
        return tree.tree_map_only(Tensor, partial(_as_inputs, model), dict(example))
    takes = inspect.signature(type(model).forward).parameters
    length = _length(model, math.lcm(8, groups.size("tp"), 2 * groups.size("cp")))
    made = _main_input(model, length)
    if with_images and "pixel_values" in takes and "input_ids" in made and "pixel_values" not in made:
        made.update(_with_images(model, made["input_ids"]))
    if model.config.is_encoder_decoder or "decoder_input_ids" in takes:
        made["decoder_input_ids"] = _ids(model, length)
    passes_on = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in takes.values())
    if "use_cache" in takes or (passes_on and hasattr(model.config.get_text_config(), "use_cache")):
        made["use_cache"] = False  # layers other than attention have no such cache
    return made


def with_labels(model: Any, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Add labels to the arguments if the model's class computes a loss of tokens or classes.

    Some of the tokens are ignored (-100), so that masking is tested too.
    """
    names = [kind.__name__ for kind in type(model).__mro__]
    tokens = arguments.get("decoder_input_ids", arguments.get("input_ids"))
    given = next((value for value in arguments.values() if isinstance(value, Tensor)), None)
    if "labels" not in inspect.signature(type(model).forward).parameters or given is None or "labels" in arguments:
        return dict(arguments)
    if any(name.endswith(OF_TOKENS) for name in names) and tokens is not None:
        return {**arguments, "labels": tokens.masked_fill(tokens % 5 == 0, -100)}
    for ending, dims in OF_CLASSES.items():
        is_one = any(name.endswith(ending) for name in names)
        if is_one and getattr(model.config, "problem_type", None) is None and model.config.num_labels > 1:
            numbers = torch.arange(math.prod(given.shape[:dims]), device=given.device) % model.config.num_labels
            return {**arguments, "labels": numbers.view(given.shape[:dims])}
    return dict(arguments)


def unreached(model: Any, arguments: Mapping[str, Any]) -> dict[str, int]:
    """Return the token counts in the config (such as windows) that the example's sequences do not exceed, by name."""
    ids = arguments.get("decoder_input_ids", arguments.get("input_ids"))
    return {} if ids is None else {name: number for name, number in _reaches(model).items() if ids.shape[-1] <= number}


def _reaches(model: Any) -> dict[str, int]:
    """Return the token counts in the config of a text model, by name."""
    config, layers = model.config.get_text_config(), layer_configurations(model)
    found = {name: [getattr(layer, name, None) for layer in layers] for name in REACHES}
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") == "longrope":  # longer sequences use other frequencies
        found["original_max_position_embeddings"] = [rope.get("original_max_position_embeddings")]
    counts = {name: [each for each in values if isinstance(each, int) and each > 0] for name, values in found.items()}
    return {name: max(values) for name, values in counts.items() if values}


def layer_configurations(model: Any) -> list[Any]:
    """Return the config of each layer if they differ, else the model's config."""
    config = model.config.get_text_config()
    return list(config.per_layer_config) if getattr(config, "is_heterogeneous", False) else [config]


def _length(model: Any, multiple: int) -> int:
    """Return an example's number of tokens: a multiple of ``multiple``, beyond each cheap token count of the config.

    It only depends on the config, so that ranks with different parts of the model agree.
    """
    config = model.config.get_text_config()
    found = [getattr(config, name, None) for name in ("hidden_size", "num_hidden_layers", "vocab_size")]
    sizes = [size for size in found if isinstance(size, int)]
    if len(sizes) < len(found):
        return multiple
    hidden, layers, vocabulary = sizes
    most = getattr(config, "max_position_embeddings", None)
    length = multiple
    for reach in sorted(_reaches(model).values()):
        longer = (reach // multiple + 1) * multiple
        products = ROWS * longer * (12 * layers * hidden**2 + vocabulary * hidden + longer * layers * hidden)
        cheap = products <= PRODUCTS.get(model.device.type, PRODUCTS["other"])
        if cheap and ROWS * longer * vocabulary <= ELEMENTS and longer <= (most or longer):
            length = max(length, longer)
    return length


def _as_inputs(model: Any, value: Tensor) -> Tensor:
    """Move a tensor to the model's device, and floating-point values also to its dtype."""
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
    raise PlanError(f"{type(model).__name__} takes {name!r}, and no example input can be generated for it; pass {PASS}")


def _ids(model: Any, length: int) -> Tensor:
    """Return rows of consecutive token ids, rotated by one per row so that rows have equally many special tokens."""
    text = model.config.get_text_config()
    ids = torch.arange(length, device=model.device) % getattr(text, "vocab_size", 8)
    # A sequence classifier reads the last non-padding token, and rejects several rows without a padding token.
    alone = type(model).__name__.endswith("SequenceClassification") and getattr(text, "pad_token_id", None) is None
    return torch.stack([ids.roll(row) for row in range(1 if alone else ROWS)])


def _pixels(model: Any) -> Tensor:
    config = getattr(model.config, "vision_config", model.config)
    size = getattr(config, "image_size", None)
    if size is None:
        raise PlanError(f"{type(model).__name__}: its config names no image_size to make an example of; pass {PASS}")
    height, width = (size, size) if isinstance(size, int) else size
    return _random(model, ROWS, getattr(config, "num_channels", 3), height, width)


def _with_images(model: Any, ids: Tensor) -> dict[str, Tensor]:
    """Return one image per row, and ids with its placeholder tokens, or {} if the model splits images otherwise."""
    mark = getattr(model.config, "image_token_id", getattr(model.config, "image_token_index", None))
    vision = getattr(model.config, "vision_config", None)
    takes = inspect.signature(type(model).forward).parameters
    if mark is None or vision is None or not hasattr(model, IMAGE_FEATURES):
        return {}
    images = _patches(model, vision) if GRIDS in takes else {"pixel_values": _pixels(model)}
    with torch.no_grad(), in_mode(model, training=False):
        features = model.get_image_features(**images).pooler_output
    places = sum(part.numel() for part in features) // (ROWS * model.config.get_text_config().hidden_size)
    marks = ids.new_full((len(ids), places), mark)
    joined = torch.cat([marks, ids.masked_fill(ids == mark, (mark + 1) % 8)], dim=1)
    kinds = (name for name in ("token_type_ids", "mm_token_type_ids") if name in takes)
    return {**images, "input_ids": joined, **dict.fromkeys(kinds, (joined == mark).long())}


def _patches(model: Any, vision: Any) -> dict[str, Tensor]:
    """Return one image per row as a flat list of patches, the format of qwen2_vl and its successors."""
    side = 2 * vision.spatial_merge_size
    width = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    grids = torch.tensor([[1, side, side]] * ROWS, device=model.device)
    return {"pixel_values": _random(model, ROWS * side**2, width), GRIDS: grids}


def _after_images(model: Any, ids: Tensor) -> Tensor:
    """Prepend an image's placeholder tokens to the token ids."""
    mark = getattr(model.config, "image_token_index", getattr(model.config, "image_token_id", None))
    places = getattr(model.config, "num_query_tokens", None)
    if mark is None or places is None:
        raise PlanError(f"{family_of(model)}: how many tokens an image takes is unknown here; pass {PASS}")
    rest = ids.masked_fill(ids == mark, (mark + 1) % 8)
    return torch.cat([ids.new_full((len(ids), places), mark), rest], dim=1)


def _random(model: Any, *shape: int) -> Tensor:
    generator = torch.Generator("cpu").manual_seed(7)
    return torch.randn(shape, generator=generator, device="cpu").to(model.device, model.dtype)
