"""Read the configuration of a Hugging Face model, after a look at how many layers its file asks for."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from core.hugging_face.transformers_plans import transformers_package

MOST_LAYERS = 65_536
# What families call a number of layers in their files.
LAYER_COUNTS = {"num_hidden_layers", "num_layers", "n_layer", "n_layers", "layers", "depth"}
LAYER_COUNTS |= {f"{side}_layers" for side in ("encoder", "decoder", "num_encoder", "num_decoder")}


def read_configuration(place: str | os.PathLike[str]) -> Any:
    """The configuration of a config.json, or of a directory with one. ValueError as `check_layers` raises it.

    What else is wrong with a file, transformers says in its own words.
    """
    check_layers(place)
    return transformers_package().AutoConfig.from_pretrained(os.fspath(place))


def check_layers(place: str | os.PathLike[str]) -> None:
    """ValueError for a file that holds no JSON object, or asks for more than MOST_LAYERS layers. Builds nothing.

    Transformers makes a list of all layers when it reads a configuration, and a model of 100,000 layers takes a minute.
    """
    path = Path(place)
    try:
        content = json.loads((path / "config.json" if path.is_dir() else path).read_bytes())
    except (OSError, ValueError, RecursionError):
        return
    if not isinstance(content, dict):
        raise ValueError(f"it is no configuration; expected a JSON object, got {str(content)[:60]}")
    for name, count in _counts(content):
        if count > MOST_LAYERS:
            raise ValueError(f"its configuration says {name} {count}; expected 1 to {MOST_LAYERS:,}")


def _counts(content: dict[str, Any]) -> Iterator[tuple[str, float]]:
    """(name, number) of all layers that a configuration and the configurations inside it ask for."""
    for name, value in content.items():
        if isinstance(value, dict):
            yield from _counts(value)
        elif name in LAYER_COUNTS and isinstance(value, (int, float)):
            yield name, value
