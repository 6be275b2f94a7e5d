"""Residency: which part of a bucket's gradients a rank keeps. A new sharding strategy is a row of RESIDENCIES."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Residency:
    """What a rank holds of a bucket whose gradients are reduced.

    sharded: True if each rank's optimizer updates its own shard, so that gradients are reduce-scattered. keeps_whole:
    True if the memory of whole gradients stays; otherwise the shard stays, and whole gradients borrow memory from a
    BucketPool while they fill and travel.
    """

    sharded: bool
    keeps_whole: bool

    def kept_by(self, shards: int) -> int:
        """The number of ranks over which the memory of gradients is spread, of `shards` ranks that hold the model."""
        return 1 if self.keeps_whole else shards


RESIDENCIES = {
    "no_shard": Residency(sharded=False, keeps_whole=True),
    "optim": Residency(sharded=True, keeps_whole=True),
    "optim_grads": Residency(sharded=True, keeps_whole=False),
}
