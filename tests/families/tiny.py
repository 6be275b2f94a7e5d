"""Tiny random models of all families, in fp64, and the arguments of their forwards."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from core.hugging_face.read.tiny import (
    HIDDEN,
    SPECIAL,
    VOCABULARY,
    all_families,
    classes_of,
    container_of,
    families,
    families_with_policy,
    shrunk,
)
from core.hugging_face.read.transformers_plans import transformers_package

__all__ = [
    "INPUTS",
    "all_families",
    "families",
    "families_with_policy",
    "model_class",
    "tiny_config",
    "tiny_inputs",
    "tiny_model",
]
BATCH, TOKENS = 3, 12


def tiny_config(kind: type, overrides: Mapping[str, Any] | None = None) -> Any:
    """Create a small configuration of a class, or of the class that contains it if it is only a part of a model.

    Args:
        kind: Configuration class.
        overrides: Values that replace the table's.

    Returns:
        The configuration; nested configurations are small too.
    """
    return shrunk(kind if _class_or_none(kind) is not None else container_of(kind), overrides)


def model_class(kind: type) -> type:
    """Return the model class of a configuration class, preferably with a text head.

    Raises:
        LookupError: If transformers has no model class for it.
    """
    found = _class_or_none(kind)
    if found is None:
        raise LookupError(f"transformers ships no class of models for the configuration {kind.__name__}")
    return found


def _class_or_none(kind: type) -> type | None:
    family = kind.__module__.split(".")[2]
    try:
        models = classes_of(f"transformers.models.{family}.modeling_{family}")
    except ModuleNotFoundError:  # the family reuses another one's model; auto classes map it
        own: type | None = transformers_package().MODEL_FOR_CAUSAL_LM_MAPPING.get(kind, None)
        return own
    fitting = [name for name, found in models.items() if getattr(found, "config_class", None) is kind]
    endings = (*FIRST.get(kind.__name__, ()), *ENDINGS)
    order = [name for ending in endings for name in fitting if name.endswith(ending)]
    return next((models[name] for name in order if not name.endswith("PreTrainedModel")), None)


def tiny_model(config: Any) -> Any:
    """Create a model with random fp64 weights, biases, and norms, equal in every process.

    No tensor keeps its initial value, so that a parameter that is 0 or 1 initially is tested too.
    """
    torch.manual_seed(1234)
    model: Any = model_class(type(config))(config)
    model = model.double().train()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Some families leave memory uninitialized, so every value is set here.
            centre = 1.0 if "norm" in name and parameter.dim() == 1 else 0.0
            parameter.copy_(centre + 0.1 * torch.randn(parameter.shape, dtype=torch.float64))
    return model


def tiny_inputs(model: Any) -> dict[str, Any]:
    """Create arguments of a forward: random token ids, or the entry of `INPUTS` for the configuration's class.

    Raises:
        LookupError: If the model's main input is neither token ids nor in `INPUTS`.
    """
    generator, config = torch.Generator().manual_seed(7), model.config
    if type(config).__name__ in INPUTS:
        return INPUTS[type(config).__name__](generator)
    if model.main_input_name != "input_ids":
        raise LookupError(f"{type(model).__name__} takes {model.main_input_name!r}, and a small one is not made here")
    ids = _ids(generator, getattr(config.get_text_config(), "vocab_size", VOCABULARY))
    more: dict[str, Any] = {"decoder_input_ids": ids.flip(1)} if config.is_encoder_decoder else {"use_cache": False}
    return {"input_ids": ids, **more}


def _random(generator: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def _ids(generator: torch.Generator, vocabulary: int = VOCABULARY) -> torch.Tensor:
    return torch.randint(3, vocabulary, (BATCH, TOKENS), generator=generator)


# Families whose forward takes more than token ids. Patches are from one image of 4 by 4.
GRID = torch.tensor([[1, 4, 4]])
INPUTS: dict[str, Callable[[torch.Generator], dict[str, Any]]] = {
    "Dots3NoteVisionConfig": lambda g: {"pixel_values": _random(g, 16, 3 * 14 * 14), "grid_thw": GRID},
    "Ernie4_5_VLMoeVisionConfig": lambda g: {"hidden_states": _random(g, 16, 3 * 14 * 14), "grid_thw": GRID},
    "Gemma4VisionConfig": lambda g: {
        "pixel_values": _random(g, 1, 9, 3 * 16 * 16),
        "pixel_position_ids": torch.cartesian_prod(torch.arange(3), torch.arange(3)).unsqueeze(0),
    },
    "Llama4VisionConfig": lambda g: {"pixel_values": _random(g, BATCH, 3, 28, 28)},
    "MuseGlimmerVisionConfig": lambda g: {"pixel_values": _random(g, 16, 2 * 3 * 14 * 14), "grid_thw": GRID},
    "MuseGlimmerAssistantConfig": lambda g: {
        "noise_embeds": _random(g, BATCH, 4, HIDDEN),
        "context_hidden_states": _random(g, BATCH, TOKENS, 5 * HIDDEN),
    },
    "Blip2Config": lambda g: {
        "pixel_values": _random(g, BATCH, 3, 8, 8),
        "input_ids": torch.cat([torch.full((BATCH, 4), 2), _ids(g)], dim=1),
    },
    "SamConfig": lambda g: {
        "pixel_values": _random(g, BATCH, 3, 32, 32),
        "input_points": _random(g, BATCH, 1, 2, 2),
        "input_labels": torch.ones(BATCH, 1, 2, dtype=torch.long),
    },
    "ViTConfig": lambda g: {"pixel_values": _random(g, BATCH, 3, 8, 8)},
    "WhisperConfig": lambda g: {"input_features": _random(g, BATCH, 8, 16), "decoder_input_ids": _ids(g)},
    "Qwen3OmniMoeTalkerCodePredictorConfig": lambda g: {"input_ids": _ids(g), "generation_steps": 1},
    "Qwen3OmniMoeTalkerTextConfig": lambda g: {"inputs_embeds": _random(g, BATCH, TOKENS, HIDDEN)},
    "VoxtralRealtimeTextConfig": lambda g: {"input_ids": _ids(g), "t_cond": _random(g, 1, HIDDEN), "use_cache": False},
}
ENDINGS = ["ForCausalLM", "LMHeadModel", "ForMaskedLM", "ForConditionalGeneration", "TextModel", "VisionModel", "Model"]
# The causal model of these classes is only their decoder.
FIRST = dict.fromkeys(("WhisperConfig", "BartConfig", "MBartConfig", "PegasusConfig"), ("ForConditionalGeneration",))
# The causal model of these classes is a decoder without a causal mask, unless the config sets is_decoder.
FIRST |= dict.fromkeys(("RobertaConfig", "XLMRobertaConfig", "CamembertConfig"), ("ForMaskedLM",))
# Values of parts that no user's tiny model has.
SPECIAL.update(
    {
        "Blip2Config": {"num_query_tokens": 4, "image_token_index": 2},
        "Blip2VisionConfig": {"image_size": 8, "patch_size": 4},
        "SamVisionConfig": {
            **{"image_size": 32, "patch_size": 8, "window_size": 2, "global_attn_indexes": [1, 3], "mlp_ratio": 2.0},
            "num_pos_feats": HIDDEN // 2,
        },
        "SamPromptEncoderConfig": {"image_size": 32, "patch_size": 8},
        "SamMaskDecoderConfig": {"num_hidden_layers": 2, "iou_head_hidden_dim": 32},
        "ViTConfig": {"image_size": 8, "patch_size": 4},
        "WhisperConfig": {
            **{"num_mel_bins": 8, "max_source_positions": 8, "max_target_positions": 16},
            **{"decoder_start_token_id": 1, "begin_suppress_tokens": None},
        },
        "Dots3NoteVisionConfig": {
            "pyramid_num_routed": [-1, 4, 4, 4],
            "adapter_in_dim": HIDDEN,
            "adapter_out_dim": HIDDEN,
        },
        "Llama4VisionConfig": {"image_size": 28, "vision_output_dim": HIDDEN, "intermediate_size": 4 * HIDDEN},
        "MuseGlimmerAssistantConfig": {"block_size": 4},
    }
)
