"""A Hugging Face model's directory, looked at before anything is built: kinds of files, code, sizes, weights."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from core.checkpoint.bounded_read import parse_json, read_bytes
from core.checkpoint.weights.index import is_index, model_names, open_files, read_index
from core.checkpoint.weights.one_file import SAFE_SUFFIX, check, in_turn
from core.hugging_face.transformers_plans import transformers_package

CONFIG, ADAPTER = "config.json", "adapter_config.json"
READ = (".json", ".safetensors", ".bin")  # what transformers opens on its own
MOST_LAYERS = 65_536
# What families call a number of layers in their files.
LAYER_COUNTS = {"num_hidden_layers", "num_layers", "n_layer", "n_layers", "layers", "depth"}
LAYER_COUNTS |= {f"{side}_layers" for side in ("encoder", "decoder", "num_encoder", "num_decoder")}


def read_configuration(place: str | os.PathLike[str], *, trust_remote_code: bool = False) -> Any:
    """The configuration of a config.json, or of a directory with one. ValueError as `look_at` raises it.

    What else is wrong with a file, transformers says in its own words.
    """
    look_at(place, trust_remote_code=trust_remote_code)
    auto = transformers_package().AutoConfig
    return auto.from_pretrained(os.fspath(place), trust_remote_code=trust_remote_code)


def look_at(place: str | os.PathLike[str], *, trust_remote_code: bool = False) -> None:
    """ValueError for a directory, or a config.json, of which no model is built. Builds nothing, and reads no weights.

    Refused are files that are no regular ones, a directory of adapters, a config.json that is no JSON object or names
    its family by no text, one that needs code of its own, and more than MOST_LAYERS layers: transformers makes a list
    of all layers when it reads a configuration, and a model of 100,000 layers takes a minute.
    """
    path = Path(place)
    if path.is_dir():
        for file in path.iterdir():
            if file.suffix in READ and not file.is_file() and not file.is_dir():
                raise ValueError(f"{file} is no regular file, nor a link to one; copy it again")
        if (path / ADAPTER).is_file():
            raise ValueError(
                f"{path} is a directory of adapters ({ADAPTER}), on the base model "
                f"{_object_in(path / ADAPTER).get('base_model_name_or_path')!r}; load the base model's directory, and "
                "the adapters by add_lora(model, directory=...)"
            )
        path = path / CONFIG
    if not path.exists():
        return
    content = _object_in(path)
    kind = content.get("model_type")
    if not isinstance(kind, str | None):
        raise ValueError(f"its configuration says model_type {kind!r}; expected a family's name")
    if content.get("auto_map") and not trust_remote_code and kind not in transformers_package().CONFIG_MAPPING:
        raise ValueError(
            f"its configuration needs code of its own directory (auto_map): transformers has no family {kind!r}. "
            "No command of this project runs such code; if you trust it, call "
            "load_split(..., trust_remote_code=True) in your own program"
        )
    for name, count in _counts(content):
        if count > MOST_LAYERS:
            raise ValueError(f"its configuration says {name} {count}; expected 1 to {MOST_LAYERS:,}")


def check_files(directory: str | os.PathLike[str], rank: int = 0, world: int = 1) -> set[Path]:
    """The files that transformers would read a model from, checked. Local, and empty where there is none.

    Each checksum that a file carries is compared by one of `world` ranks, of which this is `rank`. Raises as
    `open_files` of core.checkpoint.weights does.
    """
    for name in (*model_names(use_safetensors=True), *model_names()):
        found = Path(directory) / name
        if found.exists() and SAFE_SUFFIX in found.suffixes:
            return set(open_files(found, rank, world))
        if found.exists():
            files = set(read_index(found)[0].values()) if is_index(found) else {found}
            for file in files:
                if in_turn(file, rank, world):
                    check(file)
            return files
    return set()


def _object_in(path: Path) -> dict[str, Any]:
    try:
        content = parse_json(read_bytes(path))
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ValueError(f"{path} is no JSON: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"it is no configuration; expected a JSON object, got {str(content)[:60]}")
    return content


def _counts(content: dict[str, Any]) -> Iterator[tuple[str, float]]:
    """(name, number) of all layers that a configuration and the configurations inside it ask for."""
    for name, value in content.items():
        if isinstance(value, dict):
            yield from _counts(value)
        elif name in LAYER_COUNTS and isinstance(value, (int, float)):
            yield name, value
