"""Groups of wrapped chunks that are parts of one model: a tied weight has copies there, of the same name.

Two chunks of one model that hold a parameter of one name across stages hold two copies of one weight: their gradients
are added, and their sum counts once in a norm. In two models the same name means two weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from core import parallel_state


def models_of(chunks: Sequence[Any]) -> list[int]:
    """For each chunk the number of its model, by position: a virtual pipeline's chunks lie next to one another.

    chunks: wrapped, of one rank, in the model's order; all ranks have equally many. Raises ValueError, on all ranks
    alike, where there are several models and some of a model's chunks are missing.

        models_of([encoder, decoder])  # [0, 1]
        models_of([chunk0, chunk1])    # [0, 0] with virtual_pipeline_model_parallel_size=2
    """
    size = _virtual_size(chunks)
    if len(chunks) > size and len(chunks) % size:
        raise ValueError(
            f"{len(chunks)} model chunks were given and virtual_pipeline_model_parallel_size is {size}, so it is not "
            f"known which of them are one model; pass all {size} chunks of each model, next to one another"
        )
    return [number // size for number in range(len(chunks))]


def _virtual_size(chunks: Sequence[Any]) -> int:
    sizes = [getattr(getattr(chunk, "config", None), "virtual_pipeline_model_parallel_size", None) for chunk in chunks]
    known = [size for size in sizes if size is not None]
    return known[0] if known else parallel_state.get_virtual_pipeline_model_parallel_world_size() or 1
