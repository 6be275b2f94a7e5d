"""Read the shape and dtype of a saved tensor without loading it.

torch.save writes a zip file: a small pickle that describes the tensor, and its bytes. The pickle is read here by rules
that know tensors alone. It runs no code, makes no tensor, and costs no more memory than it has bytes.
"""

from __future__ import annotations

import io
import pickle
import pickletools
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

import torch

from core.checkpoint.bounded_read import Archive, BadArchive

LONGEST_PICKLE = 16 << 10  # bytes; that of a tensor has some hundred
MOST_REMEMBERED = 1000  # values by number; an unpickler makes room up to the largest number
OPCODES = frozenset(
    (
        *("PROTO", "GLOBAL", "REDUCE", "STOP", "BINPERSID", "BINPUT", "LONG_BINPUT", "BINGET", "BINUNICODE"),
        *("BININT", "BININT1", "BININT2", "LONG1", "NONE", "NEWFALSE", "NEWTRUE"),
        *("MARK", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "EMPTY_TUPLE", "EMPTY_DICT"),
    )
)

STORAGES = {  # torch.save's names for dtypes; those that came later are named by themselves
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "ComplexDoubleStorage": torch.complex128,
    "ComplexFloatStorage": torch.complex64,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
}


@dataclass(frozen=True, slots=True)
class Described:
    """A tensor that a pickle describes."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    storage: str  # the name of its bytes in the zip file


def wrong_content(stream: BinaryIO, start: int, length: int, shape: Sequence[int], dtype: str) -> str | None:
    """Return how an item differs from the tensor in the manifest; None if it is that tensor."""
    try:
        with Archive(stream, start, length) as archive:
            found = described(archive.read("data.pkl", LONGEST_PICKLE))
            stored = archive.size(f"data/{found.storage}")
    except BadArchive as error:
        return str(error)
    except Exception as error:  # what a broken or hostile pickle raises is without end
        return f"describes no tensor ({error})"
    wanted = getattr(torch, dtype)
    if (found.shape, found.dtype) != (tuple(shape), wanted):
        return f"holds shape {list(found.shape)} of {found.dtype}, and {list(shape)} of {wanted} was saved"
    needed = torch.Size(shape).numel() * wanted.itemsize
    return None if stored == needed else f"has {stored} bytes for {needed} of a tensor"


def described(data: bytes) -> Described:
    """The tensor of torch.save's pickle. Raises for anything else."""
    for opcode, value, _ in pickletools.genops(data):
        if opcode.name not in OPCODES or (opcode.name == "LONG_BINPUT" and int(value or 0) > MOST_REMEMBERED):
            raise ValueError(f"{opcode.name} {value!r}"[:100])
    found = _Unpickler(io.BytesIO(data)).load()
    if not isinstance(found, Described) or not all(type(size) is int for size in found.shape):
        raise ValueError(f"a {type(found).__name__}")
    return found


@dataclass(frozen=True, slots=True)
class _Storage:
    dtype: torch.dtype | None  # None if the tensor says it
    name: str


def _rebuild_v2(storage: _Storage, offset: int, shape: tuple[int, ...], *rest: Any) -> Described:
    if storage.dtype is None or offset != 0:
        raise ValueError(f"a tensor at offset {offset} of a storage of {storage.dtype}")
    return Described(shape, storage.dtype, storage.name)


def _rebuild_v3(
    storage: _Storage, offset: int, shape: tuple[int, ...], stride: Any, grad: Any, hooks: Any, dtype: torch.dtype,
    *rest: Any,
) -> Described:  # fmt: skip
    if storage.dtype is not None or offset != 0:
        raise ValueError(f"a tensor at offset {offset} of a storage of {storage.dtype}")
    return Described(shape, dtype, storage.name)


class _Unpickler(pickle.Unpickler):
    """Knows what torch.save writes for a tensor; REDUCE can call the functions of this file alone."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        if module == "torch._utils" and name in ("_rebuild_tensor_v2", "_rebuild_tensor_v3"):
            return _rebuild_v2 if name.endswith("2") else _rebuild_v3
        kind = getattr(torch, name, None) if module == "torch" else None
        if isinstance(kind, torch.dtype):
            return kind
        if (module, name) == ("torch.storage", "UntypedStorage"):
            return _Storage(None, "")
        if module == "torch" and name in STORAGES:
            return _Storage(STORAGES[name], "")
        raise pickle.UnpicklingError(f"it names {module}.{name}")

    def persistent_load(self, pid: Any) -> _Storage:
        kind, storage, name, _, _ = pid
        if kind != "storage" or not isinstance(storage, _Storage) or not isinstance(name, str):
            raise pickle.UnpicklingError(f"{pid!r} is no storage")
        return _Storage(storage.dtype, name)
