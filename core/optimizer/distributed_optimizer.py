"""DistributedOptimizer: each rank of a data group owns, updates and keeps the state of a shard of every bucket."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from core.optimizer.optimizer import MegatronOptimizer


class DistributedOptimizer(MegatronOptimizer):
    """The sharded optimizer (ZeRO-1): state for 1 / data ranks of the parameters; updated shards are gathered.

    Every bucket is gathered once a step, and all are complete when `step` returns. With the wrapper's
    `overlap_param_gather` or the optimizer's `overlap_param_gather_with_optimizer_step` a bucket sets out as soon as it
    is updated, while the next one is being stepped.
    """

    def _update(self, factors: Sequence[Mapping[str | None, float]]) -> None:
        wrapped = any(chunk.ddp_config.overlap_param_gather for chunk in self.model_chunks)
        if not (wrapped or self.config.overlap_param_gather_with_optimizer_step):
            super()._update(factors)
            return
        place = {id(masters.bucket): index for index, masters in enumerate(self.masters)}
        for chunk in self.model_chunks:
            for bucket in chunk.param_sync.order:
                index = place[id(bucket)]
                self._step_buckets([self.masters[index]], [factors[index]])
                chunk.start_bucket_param_sync(bucket)
        for chunk in self.model_chunks:
            chunk.finish_param_sync()

    def _publish(self) -> None:
        for chunk in self.model_chunks:
            chunk.start_param_sync()
