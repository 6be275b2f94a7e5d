"""DistributedOptimizer: each rank of a data group owns, updates and keeps the state of a shard of every bucket."""

from __future__ import annotations

from core.optimizer.optimizer import MegatronOptimizer


class DistributedOptimizer(MegatronOptimizer):
    """The sharded optimizer (ZeRO-1): state for 1 / data ranks of the parameters; updated shards are gathered."""

    def _publish(self) -> None:
        for chunk in self.model_chunks:
            chunk.start_param_sync()
