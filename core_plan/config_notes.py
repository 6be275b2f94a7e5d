"""Entries of a config.json that a plan does not follow: misspelt keys, missing sizes, quantization.

transformers silently accepts any key, and a missing size has the default of its class. Real files contain keys that no
code reads. A warning therefore names an unknown key only if it resembles a known key, or has a number that no known key
has.
"""

from __future__ import annotations

import difflib
import inspect
import re
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from core.hugging_face.read.transformers_plans import transformers_package

SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
ALIKE = 0.8  # difflib's ratio: one letter missing or added, but no different word


def config_notes(content: Mapping[str, Any], configuration: Any) -> list[str]:
    """Return sentences about the content of a config.json.

    Args:
        content: The parsed file.
        configuration: The transformers configuration read from it.
    """
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
    """Yield keys that neither the class nor any code reads, each with a similar known key if there is a match."""
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
            elif is_number and value > 0 and value not in repeated:  # an old name of a size has the same value
                yield where + key


def _missing(content: Mapping[str, Any], configuration: Any, text: Any) -> Iterator[str]:
    """Yield sizes of the text model that are missing in the file, with their defaults."""
    given = next((part for key, part in content.items() if vars(configuration).get(key) is text), content)
    for size in SIZES:
        name = type(text).attribute_map.get(size, size)
        default = _defaults(type(text)).get(name)
        if default is not None and default == vars(text).get(name) and not {size, name} & given.keys():
            yield f"{name} ({default})"


def _defaults(kind: type) -> dict[str, Any]:
    """Return the arguments of a configuration class with their defaults."""
    return {name: argument.default for name, argument in inspect.signature(kind).parameters.items()}


def _code_of(configuration: Any) -> str:
    """Return the source code that reads a configuration: its class, the model, and rotary embeddings."""
    transformers = transformers_package()
    model = transformers.MODEL_FOR_CAUSAL_LM_MAPPING.get(type(configuration), None)
    kinds = [type(configuration), *[model] * (model is not None), transformers.modeling_rope_utils.RopeParameters]
    return "\n".join(inspect.getsource(sys.modules[kind.__module__]) for kind in kinds)
