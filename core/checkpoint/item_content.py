"""Shape and dtype of a saved tensor, read without loading it.

torch.save writes a zip file: a small pickle that describes the tensor, and its bytes. The pickle is read by torch's
safe unpickler, which runs no code, onto the device 'meta', where a tensor has no memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, BinaryIO

import torch

from core.checkpoint.bounded_read import BadArchive, Part, entries_of
from core.checkpoint.errors import code_in

LONGEST_PICKLE = 16 << 10  # bytes; a tensor's pickle has a few hundred


def content_error(stream: BinaryIO, start: int, length: int, shape: Sequence[int], dtype: str) -> str | None:
    """Describe how an item differs from the tensor in the manifest, or return ``None`` if it matches."""
    try:
        sizes = entries_of(stream, start, length)
        if sizes.get("data.pkl", 0) > LONGEST_PICKLE:
            return f"has {sizes['data.pkl']} bytes in its pickle, and at most {LONGEST_PICKLE} are read"
        found: Any = torch.load(Part.of(stream, start, length), map_location="meta", weights_only=True)
    except BadArchive as error:
        return str(error)
    except Exception as error:  # a broken or hostile pickle can raise any exception
        return f"describes no tensor ({code_in(error)})"
    wanted = getattr(torch, dtype)
    if not isinstance(found, torch.Tensor):
        return f"describes no tensor (a {type(found).__name__})"
    if (found.shape, found.dtype) != (torch.Size(shape), wanted):
        return f"holds shape {list(found.shape)} of {found.dtype}, and {list(shape)} of {wanted} was saved"
    needed, stored = found.numel() * wanted.itemsize, sizes.get("data/0", 0)
    return None if stored == needed else f"has {stored} bytes for {needed} of a tensor"
