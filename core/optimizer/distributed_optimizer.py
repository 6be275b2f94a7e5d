"""DistributedOptimizer: each rank of a data group owns, updates and keeps the state of a shard of every bucket."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from core.optimizer.optimizer import MegatronOptimizer


class DistributedOptimizer(MegatronOptimizer):
    """The sharded optimizer (ZeRO-1): state for 1 / data ranks of the parameters; updated shards are gathered.

    Every bucket is gathered once a step. With `overlap_param_gather_with_optimizer_step` it sets out as soon as it is
    updated, in the order in which the forward will read the buckets, while the next one is being stepped.
    """

    def _update(self, factors: Sequence[Mapping[str | None, float]]) -> None:
        if not self.config.overlap_param_gather_with_optimizer_step:
            super()._update(factors)
            return
        place = {id(masters.bucket): index for index, masters in enumerate(self.masters)}
        for chunk in self.model_chunks:
            for bucket in chunk.param_sync.order:
                index = place[id(bucket)]
                self._step_buckets([self.masters[index]], [factors[index]])
                chunk.start_bucket_param_sync(bucket)
        for chunk in self.model_chunks:
            if not chunk.ddp_config.overlap_param_gather:
                chunk.finish_param_sync()

    def _publish(self) -> None:
        for chunk in self.model_chunks:
            chunk.start_param_sync()
