"""Ties that a config.json asks for and a checkpoint's files contradict: undone, as transformers does when it loads.

A merged adapter leaves such files: the output layer has values of its own, and the config still calls it tied.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from core.checkpoint.tied_tensors import names_apart
from core.checkpoint.weights.one_file import SAFE_SUFFIX, open_safetensors

Stored = dict[tuple[str, str | None], dict[str, Any]]


def stored_tensors(model: Any, files: Mapping[str, bool], mapping: Sequence[Any]) -> Stored:
    """The tensors of safetensors files by the parameter that they become, or a part of: {key: open file}.

    files: with True the checksum of a file is compared. mapping: transformers' conversions of the model. The pattern of
    a conversion is a part of the key here; None where a tensor becomes a parameter alone.
    """
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    known = model.state_dict()
    stored: Stored = {}
    for file, verify in files.items():
        opened = open_safetensors(Path(file), verify=verify)
        for key in opened.keys():  # noqa: SIM118  it is no mapping
            target = rename_source_key(key, renamings, converters, model.base_model_prefix, known)
            stored.setdefault(target, {})[key] = opened
    return stored


def untie_by_files(model: Any, directory: Path, files: Sequence[Path]) -> list[str]:
    """Untie what the safetensors files of a directory hold with different values. Returns the names. Local.

    model: of the directory's config, in the dtype of training; it may be on the meta device. Files of other kinds are
    left to the load itself, which refuses them.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping

    if not ties_of(model) or any(file.suffix != SAFE_SUFFIX for file in files):
        return []
    unread = {str(file): False for file in files}  # the load compares checksums
    return untie_as_stored(model, stored_tensors(model, unread, get_model_conversion_mapping(model)), directory)


def untie_as_stored(model: Any, stored: Stored, where: object) -> list[str]:
    """Give each name of a tied parameter a parameter of its own if the files hold another value for it; with a warning.

    Returns the names. Every rank of a job that reads the same files gets the same names.
    """
    names = {name: key for (name, pattern), keys in stored.items() if pattern is None for key in keys}
    in_ties = {name for pair in ties_of(model).items() for name in pair}
    found = {name: stored[name, None][key].get_slice(key) for name, key in names.items() if name in in_ties}
    tied: dict[tuple[str, ...], Any] = {(s, n): model.get_parameter(s).dtype for n, s in ties_of(model).items()}
    pairs = names_apart(tied, found)
    for source, name in pairs:
        warnings.warn(
            f"{where}: its config.json ties {name!r} to {source!r}, and its files hold different values for them, so "
            "they are two parameters here, as in transformers; set tie_word_embeddings to false in config.json",
            stacklevel=3,
        )
    untie(model, [name for _, name in pairs])
    return [name for _, name in pairs]


def untie(model: Any, names: Iterable[str]) -> None:
    """Make each of these names a parameter of its own, with the values that it has."""
    for name in names:
        source = model.all_tied_weights_keys.pop(name)
        param = model.get_parameter(name)
        if param is model.get_parameter(source):  # not so while transformers loads a model
            owner, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(owner), leaf, nn.Parameter(param.detach().clone(), param.requires_grad))


def ties_of(model: Any) -> Mapping[str, str]:
    """Name of a tied parameter -> the name that it is tied to, by transformers' account."""
    return getattr(model, "all_tied_weights_keys", None) or {}
