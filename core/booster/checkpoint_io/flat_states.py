"""An optimizer's state as the tensors of one safetensors file, in ColossalAI's form of asynchronous saves.

    state.<number of a parameter>.<key>      a tensor of its state
    param_groups                             the groups, if they are in this file

A value that is no tensor is there as the bytes of its pickle. The metadata list these names, as JSON, under
`non_tensor_keys`. Such a pickle is read only if it holds numbers, text and containers of them.
"""

from __future__ import annotations

import io
import json
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from core.checkpoint import tensor_files
from core.checkpoint.errors import CheckpointDamaged
from core.optimizer.optimizer_state import plain_numbers

GROUPS, SCALER, PICKLED = "param_groups", "loss_scaler", "non_tensor_keys"


def save(path: Path, content: Mapping[str, Any]) -> None:
    """Write {'state': ..., 'param_groups': ...}; a loss scale goes to the metadata, where ColossalAI looks past it."""
    named = {f"state.{n}.{key}": value for n, state in content["state"].items() for key, value in state.items()}
    named = plain_numbers({**named, GROUPS: content[GROUPS]})
    named = {name: value for name, value in named.items() if value is not None}
    pickled = [name for name, value in named.items() if not isinstance(value, Tensor)]
    tensors = {name: _as_bytes(value) if name in pickled else value for name, value in named.items()}
    metadata = {PICKLED: json.dumps(pickled)}
    if SCALER in content:
        metadata[SCALER] = json.dumps(content[SCALER])
    tensor_files.save_safetensors(path, tensors, metadata)


def load(path: Path) -> Any:
    """The content of a file of tensors of either kind; one of this form as {'state', 'param_groups'}, or the states
    alone if it is a shard, which has no groups.
    """
    flat = tensor_files.load(path)
    names = list(flat) if isinstance(flat, dict) else []
    if not names or not all(name == GROUPS or str(name).startswith("state.") for name in names):
        return flat
    metadata = tensor_files.safetensors_metadata(path)
    values = {name: flat[name] for name in names}
    for name in json.loads(metadata.get(PICKLED, "[]")):
        values[name] = _from_bytes(path, name, flat[name])
    groups = values.pop(GROUPS, None)
    states: dict[int, dict[str, Any]] = {}
    for name, value in values.items():
        number, _, key = name.removeprefix("state.").partition(".")
        states.setdefault(int(number), {})[key] = value
    if groups is None:
        return states
    scaler = {SCALER: json.loads(metadata[SCALER])} if SCALER in metadata else {}
    return {"state": states, GROUPS: groups, **scaler}


class _PlainUnpickler(pickle.Unpickler):
    """Makes no objects of any class, so it runs no code."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"{module}.{name}")


def _as_bytes(value: Any) -> Tensor:
    return torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)


def _from_bytes(path: Path, name: str, content: Tensor) -> Any:
    try:
        return _PlainUnpickler(io.BytesIO(content.numpy().tobytes())).load()
    except Exception as error:  # pickle raises whatever its opcodes come to
        raise CheckpointDamaged(
            f"{path}: {name!r} holds other things than numbers, text and containers of them ({error}), and reading "
            "them could run code; save the optimizer again without use_async"
        ) from None
