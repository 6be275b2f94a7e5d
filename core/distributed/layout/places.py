"""Places: the buckets that stay unsharded, and the offloaded ones. Computed from a plan and its options only."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch

from core.distributed.contract.placement import MemStats, first_of
from core.distributed.distributed_data_parallel_config import DistributedDataParallelConfig
from core.distributed.layout.model_plan import ModelPlan
from core.distributed.layout.param_layout import BucketLayout

# (buffer, index of the bucket in it); buffers of frozen parameters come after buffers of trained ones.
Where: TypeAlias = tuple[int, int]


@dataclass(frozen=True)
class Places:
    """Buckets with a special placement: parameters that stay unsharded, and shards that are offloaded."""

    params_stay: frozenset[Where] = frozenset()
    params: frozenset[Where] = frozenset()
    grads: frozenset[Where] = frozenset()
    states: frozenset[Where] = frozenset()


def places_of(plan: ModelPlan, ddp_config: DistributedDataParallelConfig) -> Places:
    """Return the places of a model's buckets under its placement.

    Buckets are ordered by their first use in an earlier run, and then by the registration of their parameters. Raises
    ValueError if memstats belong to another model.
    """
    placement = ddp_config.placement
    if placement is None:
        return Places()
    trained, every = [
        [(number, bucket) for number, layout in enumerate(layouts) for bucket in layout.buckets]
        for layouts in (plan.layout.buffers, (*plan.layout.buffers, *plan.frozen_layout.buffers))
    ]
    position = {name: place for place, name in enumerate(plan.named)}
    keys = [layout.key for layout in (*plan.layout.buffers, *plan.frozen_layout.buffers)]
    used = _first_uses(placement.memstats, [(number, bucket.index) for number, bucket in every])

    def turn(item: tuple[int, BucketLayout]) -> tuple[float, int]:
        number, bucket = item
        return used.get((number, bucket.index), math.inf), min(position[slot.name] for slot in bucket.slots)

    def chosen(buckets: Sequence[tuple[int, BucketLayout]], kind: str, fraction: float, last: bool) -> frozenset[Where]:
        order = sorted(buckets, key=turn, reverse=last)
        nbytes = [bucket.numel * getattr(torch, getattr(keys[number], kind)).itemsize for number, bucket in order]
        return frozenset((order[place][0], order[place][1].index) for place in first_of(nbytes, fraction))

    sharded = every if ddp_config.shards_parameters else []
    return Places(
        chosen(sharded, "param_dtype", 1 - placement.shard_param_frac, False),
        chosen(sharded, "param_dtype", placement.offload_param_frac, True),
        chosen(trained, "grad_dtype", placement.offload_grad_frac, True),
        chosen(trained, "grad_dtype", placement.offload_optim_frac, True),
    )


def _first_uses(stats: MemStats | None, buckets: Sequence[Where]) -> dict[Where, int]:
    """Return the position of each used bucket in the order of first uses. ``buckets`` are ordered by their number."""
    uses = () if stats is None else stats.uses
    unknown = sorted(set(uses) - set(range(len(buckets))))
    if unknown:
        raise ValueError(
            f"memstats has a bucket of number {unknown[0]}, and the model has {len(buckets)}; they are of another "
            "model, or of other sizes of buckets. Leave them out"
        )
    return {buckets[number]: place for place, number in enumerate(dict.fromkeys(uses))}
