"""Entries of a config.json that a plan does not follow: misspelt keys, sizes that are left out, quantization.

transformers takes any key in silence, and a size that is not given is the default of its class. Real files have keys
that no code reads. So a warning names an unknown key only if it resembles a known one, or has a number of its own.
"""

from __future__ import annotations

import difflib
import inspect
import re
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from core.hugging_face.transformers_plans import transformers_package

SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
ALIKE = 0.8  # by difflib's ratio: a letter too few or too many, not another word


def config_notes(content: Mapping[str, Any], configuration: Any) -> list[str]:
    """Sentences on the content of a config.json. configuration: what transformers has read from it."""
    notes = []
    unknown = list(_unknown(content, configuration, _code_of(configuration), ""))
    if unknown:
        kind = type(configuration).__name__
        notes.append(f"config.json has keys that {kind} does not know, which are not counted: {', '.join(unknown)}")
    text = configuration.get_text_config()
    missing = list(_missing(content, configuration, text))
    if missing:
        kind = type(text).__name__
        notes.append(f"config.json does not say {', '.join(missing)}; this is what {kind} has by default")
    if "quantization_config" in content:
        notes.append("quantization_config is not planned: parameters are counted in the dtype that they are trained in")
    return notes


def _unknown(content: Mapping[str, Any], configuration: Any, code: str, where: str) -> Iterator[str]:
    """Keys that neither the class nor any code reads, each with the key that is meant where one is alike."""
    transformers = transformers_package()
    kind = type(configuration)
    names = {*_defaults(kind), *kind.attribute_map}
    known = content.keys() & {*names, *dir(kind), *vars(transformers.GenerationConfig())}
    repeated = {content[key] for key in known if isinstance(content[key], int)}
    for key, value in content.items():
        own = vars(configuration).get(key)
        if isinstance(value, dict) and isinstance(own, transformers.PreTrainedConfig):
            yield from _unknown(value, own, code, f"{where}{key}.")
        elif key not in known and not re.search(rf"\b{re.escape(key)}\b", code):
            meant = difflib.get_close_matches(key, names - content.keys(), 1, ALIKE)
            is_number = isinstance(value, int) and not isinstance(value, bool)
            if meant:
                yield f"{where}{key} (is it {meant[0]}?)"
            elif is_number and value > 0 and value not in repeated:  # an older name of a size repeats it
                yield where + key


def _missing(content: Mapping[str, Any], configuration: Any, text: Any) -> Iterator[str]:
    """Sizes of the text model that the file leaves out, with the default that is taken."""
    given = next((part for key, part in content.items() if vars(configuration).get(key) is text), content)
    for size in SIZES:
        name = type(text).attribute_map.get(size, size)
        default = _defaults(type(text)).get(name)
        if default is not None and default == vars(text).get(name) and not {size, name} & given.keys():
            yield f"{name} ({default})"


def _defaults(kind: type) -> dict[str, Any]:
    """The arguments of a class of configurations, and what they are by default."""
    return {name: argument.default for name, argument in inspect.signature(kind).parameters.items()}


def _code_of(configuration: Any) -> str:
    """The code that reads a configuration: of its class, of the model, and of rotary embeddings."""
    transformers = transformers_package()
    model = transformers.MODEL_FOR_CAUSAL_LM_MAPPING.get(type(configuration), None)
    kinds = [type(configuration), *[model] * (model is not None), transformers.modeling_rope_utils.RopeParameters]
    return "\n".join(inspect.getsource(sys.modules[kind.__module__]) for kind in kinds)
