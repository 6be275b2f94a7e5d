"""Random streams of one rank as bytes, and back: Python's, numpy's, torch's on CPU and GPU, the tracker's."""

from __future__ import annotations

import io
import random
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from core.checkpoint.pieces import RANDOM
from core.groups.process_groups import ProcessGroups
from core.groups.rank_grid import MODEL_AXES

if TYPE_CHECKING:
    from core.tensor_parallel import RNGStatesTracker


def random_key(groups: ProcessGroups) -> str:
    """Return the name of this rank's random state in the file, built from its position on each parallel axis."""
    places = ((axis, groups.rank(axis)) for axis in ("pp", "dp_cp", "tp"))
    others = ((axis, groups.rank(axis)) for axis in MODEL_AXES if axis not in ("pp", "tp"))
    return ".".join((RANDOM, *(f"{axis}_{rank}" for axis, rank in (*places, *others))))


def save_random_state() -> bytes:
    """Serialize the state of every random generator of this process."""
    kind, keys, position, has_gauss, gauss = np.random.get_state()
    state = {
        "python": random.getstate(),
        "numpy": (
            str(kind),
            torch.from_numpy(np.asarray(keys).astype(np.int64)),
            int(position),
            int(has_gauss),
            float(gauss),
        ),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None,
        "tracker": {name: dict(stream) for name, stream in _tracker().get_states().items()},
    }
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer.getvalue()


def read_random_state(blob: bytes) -> dict[str, Any]:
    """Deserialize random states without applying them."""
    state: dict[str, Any] = torch.load(io.BytesIO(blob), weights_only=True, map_location="cpu")
    return state


def set_random_state(state: dict[str, Any]) -> None:
    """Restore every random generator of this process. Generators that are not in ``state`` stay unchanged."""
    random.setstate(state["python"])
    kind, keys, position, has_gauss, gauss = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), position, has_gauss, gauss))
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
    tracker = _tracker()
    tracker.set_states({**tracker.get_states(), **state["tracker"]})


def _tracker() -> RNGStatesTracker:
    from core.tensor_parallel import get_rng_tracker  # loads all split layers, so not before a save

    return get_rng_tracker()
