"""CPU offload of the masters and moments of some buckets, which are also stepped on the host."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn

from core.distributed.buffer.memory_tier import HostTier
from core.distributed.contract.placement import first_of
from core.distributed.distributed_data_parallel import DistributedDataParallel
from core.optimizer.groups.model_check import buckets_of, places_states
from core.optimizer.optimizer_config import OptimizerConfig
from core.watch.warn_user import warn_user

logger = logging.getLogger(__name__)

GroupOf = Callable[[nn.Parameter], Mapping[str, Any]]  # the param group of a parameter


def put_states_on_host(
    config: OptimizerConfig, model_chunks: Sequence[DistributedDataParallel], group_of: GroupOf
) -> None:
    """Choose where each bucket's masters and moments are stored, if the model's placement does not.

    A model on the CPU is left unchanged, because its state is already on the host.
    """
    buckets = list(buckets_of([chunk for chunk in model_chunks if not places_states(chunk)]))
    for bucket in buckets:
        bucket.memory.state_tier = None  # an earlier optimizer of this model may have chosen
    if not buckets or buckets[0].device.type == "cpu":
        return
    chosen = buckets_on_host(config, [(bucket.layout.numel, bucket.params) for bucket in buckets], group_of)
    tier = HostTier(buckets[0].device, pin_memory=config.pin_cpu_grads, pin_masters=config.pin_cpu_params)
    for index in chosen:
        buckets[index].memory.state_tier = tier
    if config.optimizer_cpu_offload:
        part = sum(buckets[index].layout.numel for index in chosen) / sum(bucket.layout.numel for bucket in buckets)
        logger.info("%.1f %% of the optimizer's state is on the CPU", 100 * part)


def buckets_on_host(
    config: OptimizerConfig, buckets: Sequence[tuple[int, Sequence[nn.Parameter]]], group_of: GroupOf
) -> set[int]:
    """Choose the buckets whose state is stored on the host: the first in launch order, whose gradients are ready first.

    ``buckets`` has (number of elements, parameters) for each bucket. The chosen ones have optimizer_offload_fraction of
    the elements to within half a bucket, and at least one is chosen. Buckets with Muon's matrices stay on the device,
    where matrices are gathered.
    """
    fraction = config.optimizer_offload_fraction if config.optimizer_cpu_offload else 0.0
    if fraction == 0 or not buckets:
        return set()
    may = [
        index
        for index, (_, params) in enumerate(buckets)
        if not any(group_of(param).get("optimizer") == "muon" for param in params)
    ]
    if not may:
        warn_user(
            f"optimizer_offload_fraction is {fraction} and nothing is offloaded: each bucket has matrices of Muon, "
            "which stay on the device; use smaller buckets (bucket_size), or another optimizer"
        )
        return set()
    chosen = first_of([buckets[index][0] for index in may], fraction) or {0}
    return {may[number] for number in chosen}
