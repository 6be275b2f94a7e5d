"""Checks of a Hugging Face model directory before anything is built: kinds of files, code, sizes, and weights."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from core.checkpoint.bounded_read import parse_json, read_bytes
from core.checkpoint.weights.index import is_index, model_names, open_files, read_index
from core.checkpoint.weights.one_file import SAFE_SUFFIX, check, in_turn
from core.hugging_face.read.transformers_plans import transformers_package

CONFIG, ADAPTER = "config.json", "adapter_config.json"
READ = (".json", ".safetensors", ".bin")  # suffixes that transformers opens
MOST_LAYERS = 65_536
# Names of layer counts in the families' configs.
LAYER_COUNTS = {"num_hidden_layers", "num_layers", "n_layer", "n_layers", "layers", "depth"}
LAYER_COUNTS |= {f"{side}_layers" for side in ("encoder", "decoder", "num_encoder", "num_decoder")}


def read_configuration(place: str | os.PathLike[str], *, trust_remote_code: bool = False) -> Any:
    """Read the transformers configuration of a config.json, or of a directory with one.

    Raises ValueError as ``look_at`` does. For other faults of the file, transformers raises its own errors.
    """
    look_at(place, trust_remote_code=trust_remote_code)
    auto = transformers_package().AutoConfig
    return auto.from_pretrained(os.fspath(place), trust_remote_code=trust_remote_code)


def look_at(place: str | os.PathLike[str], *, trust_remote_code: bool = False) -> None:
    """Reject a directory or config.json from which no model can be built. Builds nothing and reads no weights.

    The number of layers is limited because transformers lists all layers when it reads a configuration; a model of
    100,000 layers takes a minute. Raises ValueError for files that are not regular files, an adapter directory, a
    config.json that is not a JSON object or whose family is not a string, one that needs its own code, and more than
    MOST_LAYERS layers.
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
            f"transformers has no family {kind!r}, and the configuration loads code from its directory (auto_map), "
            "which no command of this project runs; if you trust it, call load_split(..., trust_remote_code=True) in "
            "your own program"
        )
    for name, count in _counts(content):
        if count > MOST_LAYERS:
            raise ValueError(f"its configuration says {name} {count}; expected 1 to {MOST_LAYERS:,}")


def check_files(directory: str | os.PathLike[str], rank: int = 0, world: int = 1) -> set[Path]:
    """Verify the files from which transformers would load a model, and return them. Does not communicate.

    The checksums are divided among ``world`` ranks. Raises ValueError as ``open_files`` of core.checkpoint.weights
    does.
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
    """Yield (name, number) of all layer counts in a configuration, including nested ones."""
    for name, value in content.items():
        if isinstance(value, dict):
            yield from _counts(value)
        elif name in LAYER_COUNTS and isinstance(value, (int, float)):
            yield name, value
