"""Undo ties that a config.json requests but the checkpoint's files contradict, as transformers does at loading.

Merging an adapter leaves such files: the output layer has its own values, but the config still ties it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from core.checkpoint.tied_tensors import names_apart
from core.checkpoint.weights.one_file import SAFE_SUFFIX, open_safetensors
from core.watch.warn_user import warn_user

Stored = dict[tuple[str, str | None], dict[str, Any]]


def stored_tensors(model: Any, files: Mapping[str, bool], mapping: Sequence[Any]) -> Stored:
    """Group the tensors of safetensors files by the parameter that each becomes, or becomes a part of.

    ``files`` maps each file to True if its checksum must be verified, and ``mapping`` has transformers' weight
    conversions. Return (parameter, pattern of the conversion) -> {key in the file: open file}. The pattern is ``None``
    if a single tensor becomes the parameter.
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
    """Untie parameters for which the safetensors files of a directory hold different values, and return their names.

    The model is in the training dtype and may be on the meta device. Files of other formats are left to the loader,
    which rejects them. Does not communicate.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping

    if not ties_of(model) or any(file.suffix != SAFE_SUFFIX for file in files):
        return []
    unread = {str(file): False for file in files}  # loading verifies the checksums
    return untie_as_stored(model, stored_tensors(model, unread, get_model_conversion_mapping(model)), directory)


def untie_as_stored(model: Any, stored: Stored, where: object) -> list[str]:
    """Give tied names their own parameter, with a warning, if files hold different values. Return these names.

    All ranks that read the same files get the same names. ``where`` is the source of the files, for the warning.
    """
    names = {name: key for (name, pattern), keys in stored.items() if pattern is None for key in keys}
    in_ties = {name for pair in ties_of(model).items() for name in pair}
    found = {name: stored[name, None][key].get_slice(key) for name, key in names.items() if name in in_ties}
    tied: dict[tuple[str, ...], Any] = {(s, n): model.get_parameter(s).dtype for n, s in ties_of(model).items()}
    pairs = names_apart(tied, found)
    for source, name in pairs:
        warn_user(
            f"{where}: its config.json ties {name!r} to {source!r}, and its files hold different values for them, so "
            "they are two parameters here, as in transformers; set tie_word_embeddings to false in config.json"
        )
    untie(model, [name for _, name in pairs])
    return [name for _, name in pairs]


def untie(model: Any, names: Iterable[str]) -> None:
    """Replace each of these tied names by a separate parameter with the same values."""
    for name in names:
        source = model.all_tied_weights_keys.pop(name)
        param = model.get_parameter(name)
        if param is model.get_parameter(source):  # not yet tied while transformers loads a model
            owner, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(owner), leaf, nn.Parameter(param.detach().clone(), param.requires_grad))


def ties_of(model: Any) -> Mapping[str, str]:
    """Return tied parameter -> the name that it is tied to, as transformers lists them."""
    return getattr(model, "all_tied_weights_keys", None) or {}
