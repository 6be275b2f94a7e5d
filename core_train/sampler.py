"""The windows that a step trains on: a function of the seed and the number of windows consumed, never of the layout."""

from __future__ import annotations

from typing import Any

import numpy as np

from core.number_ranges import whole


class GlobalBatchSampler:
    """Sampler of shuffled window indices in global batches.

    The global batch of a step is the same for every number of data ranks and every microbatch size. Every window comes
    once per epoch, in a new order each epoch; a batch may span two epochs.

        indices = sampler.next_global_batch()                   # [global_batch_size]
        for micro in microbatches(indices, dp_rank, dp, size):  # [size] each, of this rank
            ...
    """

    def __init__(self, num_windows: int, global_batch_size: int, seed: int) -> None:
        if num_windows < 1:
            raise ValueError("there is no window to sample: the text is shorter than one sequence and its label")
        self.num_windows = num_windows
        self.global_batch_size = global_batch_size
        self.seed = seed
        self.consumed = 0  # windows dealt so far, all epochs
        self._epoch = -1
        self._order = np.empty(0, dtype=np.int64)

    def next_global_batch(self) -> np.ndarray:
        """Return the next [global_batch_size] window indices."""
        parts = []
        missing = self.global_batch_size
        while missing > 0:
            epoch, offset = divmod(self.consumed, self.num_windows)
            part = self._order_of(epoch)[offset : offset + missing]
            self.consumed += len(part)
            missing -= len(part)
            parts.append(part)
        return np.concatenate(parts)

    def state_dict(self) -> dict[str, int]:
        """Return the position, and an identification of the data."""
        return {"consumed": self.consumed, "seed": self.seed, "num_windows": self.num_windows}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where another sampler stopped, possibly with another global batch size."""
        for name in ("seed", "num_windows"):
            if state[name] != getattr(self, name):
                raise ValueError(
                    f"the saved sampler position belongs to {name} {state[name]} and this sampler has "
                    f"{getattr(self, name)}; continue with the same text, sequence length and seed"
                )
        if state["consumed"] not in whole(0):
            raise ValueError(
                f"the saved sampler position is {state['consumed']!r}, expected the number of windows "
                "dealt so far; load another checkpoint"
            )
        self.consumed = state["consumed"]

    def _order_of(self, epoch: int) -> np.ndarray:
        if epoch != self._epoch:
            self._epoch = epoch
            self._order = np.random.default_rng([self.seed, epoch]).permutation(self.num_windows)
        return self._order


def microbatches(indices: np.ndarray, dp_rank: int, dp: int, micro_batch_size: int) -> list[np.ndarray]:
    """Split this data rank's slice of a global batch into microbatches. The sizes must divide."""
    share = len(indices) // dp
    mine = indices[dp_rank * share : (dp_rank + 1) * share]
    return [mine[start : start + micro_batch_size] for start in range(0, share, micro_batch_size)]
