"""DistributedOptimizer: each rank of a data group owns, updates and keeps the state of a shard of every bucket."""

from __future__ import annotations

from collections.abc import Sequence

from core.optimizer.optimizer import MegatronOptimizer
from core.optimizer.step.inner_step import Factors, InnerStep


class DistributedOptimizer(MegatronOptimizer):
    """The sharded optimizer (ZeRO-1): state for 1 / data ranks of the parameters; updated shards are gathered.

    Every bucket is gathered once a step, and all are complete when `step` returns. With the wrapper's
    `overlap_param_gather` or the optimizer's `overlap_param_gather_with_optimizer_step` a bucket's gather starts
    once it is updated, while the next one is being stepped.
    """

    def _update(self, step: InnerStep, factors: Sequence[Factors]) -> None:
        for chunk in self.model_chunks:
            chunk.begin_param_update()
        wrapped = any(chunk.ddp_config.overlap_param_gather for chunk in self.model_chunks)
        if not (wrapped or self.config.overlap_param_gather_with_optimizer_step):
            super()._update(step, factors)
            for chunk in self.model_chunks:
                chunk.start_param_sync()
            return
        place = {id(masters.bucket): index for index, masters in enumerate(self.masters)}
        for chunk in self.model_chunks:
            for bucket in chunk.param_sync.buckets:
                index = place[id(bucket)]
                step.step_buckets([self.masters[index]], [factors[index]], self.scratch)
                chunk.start_bucket_param_sync(bucket)
        for chunk in self.model_chunks:
            chunk.finish_param_sync()
