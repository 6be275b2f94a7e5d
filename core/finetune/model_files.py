"""The files of a model's directory: weights judged before ranks start, by their headers, and files that come out again.

What the base directory has, and training did not change, is in the directory that is written as it was.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import torch

from core.checkpoint.bounded_read import parse_json, read_bytes
from core.checkpoint.errors import CheckpointError
from core.checkpoint.weights.index import weight_files
from core.checkpoint.weights.one_file import SAFE_SUFFIX, Description, describe, is_kind_with_point
from core.hugging_face.transformers_plans import transformers_package
from core.training.errors import ConfigError

CONFIGURATION, GENERATION = "config.json", "generation_config.json"
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".msgpack", ".h5", ".ot", ".gguf", ".onnx", ".index.json")
CLASSES = ("id2label", "label2id")  # tables of a configuration, which are written whole
CARD, ADAPTER, STATE = "README.md", "adapter_config.json", "trainer_state.json"


# Auto classes of a causal model, and of one with a head of classes or a score; the end of such a class's name.
AUTO_CLASS = ("AutoModelForCausalLM", "AutoModelForSequenceClassification")
CLASSIFIER = "ForSequenceClassification"
ADAPTER_WEIGHTS = "adapter_model.safetensors"


def classifies(configuration: Any) -> bool:
    """True for the configuration of a directory whose model has a head of classes or a score."""
    return (configuration.architectures or [""])[0].endswith(CLASSIFIER)


def one_line(error: BaseException) -> str:
    """An error of another package in one line of at most 300 characters."""
    return " ".join(str(error).split())[:300] or repr(error)


def check_weights(where: str, directory: Path, model: Any, drawn: Collection[str] = ()) -> None:
    """ConfigError where files are missing or broken, or hold another model. model: of the configuration.

    where: what names the directory, in the error. drawn: names of parameters that may be missing.
    Transformers renames and fuses what some files hold. So a tensor is compared where it has a parameter's name, and
    one is missing for certain only where all names in the files are the model's.
    """
    try:
        files = weight_files(directory)
    except (OSError, ValueError, RuntimeError) as error:
        raise ConfigError(f"{where}: {one_line(error)}") from error
    stored: dict[str, Description] = {}
    for file in files:
        try:
            stored |= describe(file)
        except (OSError, CheckpointError) as error:
            reason = one_line(error)
            if file.suffix == SAFE_SUFFIX:
                size = f"{file.stat().st_size:,} bytes"
                reason = f"{file.name} has {size} and is no whole safetensors file ({reason}); copy it again"
            raise ConfigError(f"{where}: {reason}") from error
    params = dict(model.named_parameters())
    for name, found in ((name, stored[name]) for name in params if name in stored):
        if params[name].numel() != math.prod(found.shape):
            raise ConfigError(
                f"{where}: {name!r} has shape {found.shape} in its file, and "
                f"{list(params[name].shape)} by config.json; one of the two belongs to another model"
            )
        if not is_kind_with_point(found.kind):
            raise ConfigError(
                f"{where}: {name!r} is {found.kind} in its file, and only numbers with a point "
                "are read; give the model without its quantization"
            )
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    lacking = sorted(params.keys() - set(drawn) - stored.keys() - tied.keys() - set(tied.values()))
    if lacking and stored and stored.keys() <= model.state_dict().keys():
        refuse_missing(where, lacking)


def refuse_missing(where: str, names: list[str]) -> None:
    """ConfigError: transformers would draw these weights at random."""
    raise ConfigError(
        f"{where}: its files lack {len(names)} of the model's weights, the first {names[0]!r}; they are of a model "
        "with other sizes than config.json, or not all there"
    )


def model_of_files(
    kind: Any, directory: Path, drawn: Callable[[Any], set[str]] = lambda model: set(), **options: Any
) -> Any:
    """The model that `kind.from_pretrained` makes of a directory. ConfigError where it would draw a weight at random.

    drawn: parameters of the model that the directory may lack. options: of from_pretrained.
    """
    log = transformers_package().utils.logging
    said = log.get_verbosity()
    log.set_verbosity_error()  # transformers lists what is missing
    try:
        model, loading = kind.from_pretrained(directory, output_loading_info=True, **options)
    finally:
        log.set_verbosity(said)
    missing = sorted(set(loading["missing_keys"]) - drawn(model))
    if missing:
        refuse_missing(str(directory), missing)
    return model


def read_settings(directory: Path, name: str) -> dict[str, Any]:
    """A file of settings; empty where there is none. ConfigError for one that is no JSON object."""
    file = directory / name
    if not file.exists():
        return {}
    try:
        found = parse_json(read_bytes(file))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} cannot be read: {one_line(error)}") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{file} is {type(found).__name__}; expected a JSON object")
    return found


def add_heads(directory: Path, heads: Mapping[str, torch.Tensor]) -> None:
    """Give an adapter's directory the head that was trained whole, as peft writes `modules_to_save`."""
    if not heads:
        return
    import safetensors.torch

    file = directory / ADAPTER_WEIGHTS
    whole = {f"base_model.model.{name}": tensor.contiguous() for name, tensor in heads.items()}
    safetensors.torch.save_file({**safetensors.torch.load_file(file), **whole}, file, metadata={"format": "pt"})
    settings = read_settings(directory, ADAPTER)
    settings |= {"task_type": "SEQ_CLS", "exclude_modules": None}
    settings["modules_to_save"] = sorted({"pooler" if ".pooler." in name else name.split(".")[0] for name in heads})
    (directory / ADAPTER).write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def drop_merged(directory: Path) -> None:
    """Delete the merged model that a run has left where its adapter is now: transformers would load both."""
    for file in (directory / CONFIGURATION, *directory.glob("model*.safetensors*")):
        file.unlink(missing_ok=True)


def write_what_stays(base: Path, directory: Path, read: Callable[[Path], Mapping[str, Any]] | None) -> None:
    """Give a trained model's directory the files of its base that training did not change.

    Weights, folders, hidden files and the model card stay behind. read: the configuration in a directory as
    transformers understands it; None for a directory of adapters, which has no configuration of a model.
    """
    left_out = {CONFIGURATION, CARD, ADAPTER, STATE} | ({GENERATION} if read is None else set())
    for file in sorted(base.iterdir()):
        hidden = file.name.startswith(".")
        if not (hidden or file.name.endswith(WEIGHTS) or file.name in left_out) and file.is_file():
            shutil.copyfile(file, directory / file.name)
    if read is None:
        return
    before, after = read(base), read(directory)
    if before["model_type"] == after["model_type"]:  # else a part of the base was trained
        kept = json.dumps(merged(read_settings(base, CONFIGURATION), before, after), indent=2, ensure_ascii=False)
        (directory / CONFIGURATION).write_text(kept + "\n", encoding="utf-8")


def merged(written: Mapping[str, Any], before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """A base's configuration as it was written, with the values that training changed.

    before: the base's values with all defaults. after: those of the trained model.
    """
    kept = dict(written)
    for name, value in after.items():
        if name.startswith("_") or name == "transformers_version" or value == before.get(name):
            continue
        nested = isinstance(value, Mapping) and isinstance(before.get(name), Mapping) and name not in CLASSES
        kept[name] = merged(written.get(name) or {}, before[name], value) if nested else value
    if "dtype" in kept:
        kept.pop("torch_dtype", None)  # its older name
    return kept
