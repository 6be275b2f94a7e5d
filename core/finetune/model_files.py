"""The files of a model's weights, judged before ranks start: by their headers, without reading a tensor."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from core.booster.checkpoint_io.files import weight_files
from core.checkpoint.tensor_files import safetensors
from core.training.errors import ConfigError


def one_line(error: BaseException) -> str:
    """An error of another package in one line of at most 300 characters."""
    return " ".join(str(error).split())[:300] or repr(error)


def check_weights(directory: Path, model: Any) -> None:
    """ConfigError where files are missing or broken, or hold another model. model: of the configuration, on `meta`.

    Transformers renames and fuses what some files hold. So a tensor is compared where it has a parameter's name, and
    one is missing for certain only where all names in the files are the model's.
    """
    try:
        files = weight_files(directory)
    except (OSError, ValueError, RuntimeError) as error:
        raise ConfigError(f"--model.path {directory}: {one_line(error)}") from error
    files = [file for file in files if file.suffix == ".safetensors"]
    sizes: dict[str, list[int]] = {}
    for file in files:
        try:
            with safetensors("safetensors").safe_open(str(file), framework="pt") as opened:
                sizes.update({name: opened.get_slice(name).get_shape() for name in opened.keys()})  # noqa: SIM118
        except Exception as error:  # a class of the package that is no public name
            raise ConfigError(
                f"--model.path {directory}: {file.name} has {file.stat().st_size:,} bytes and is no whole safetensors "
                f"file ({one_line(error)}); copy it again"
            ) from error
    params = dict(model.named_parameters())
    for name, param in params.items():
        if name in sizes and param.numel() != math.prod(sizes[name]):
            raise ConfigError(
                f"--model.path {directory}: {name!r} has shape {sizes[name]} in its file, and "
                f"{list(param.shape)} by config.json; one of the two belongs to another model"
            )
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    lacking = sorted(params.keys() - sizes.keys() - tied.keys() - set(tied.values()))
    if lacking and sizes and sizes.keys() <= model.state_dict().keys():
        refuse_missing(directory, lacking)


def refuse_missing(directory: Path, names: list[str]) -> None:
    """ConfigError: transformers would draw these weights at random."""
    raise ConfigError(
        f"--model.path {directory}: its files lack {len(names)} of the model's weights, the first {names[0]!r}; they "
        "are of a model with other sizes than config.json, or not all there"
    )
