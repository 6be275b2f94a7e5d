"""Bytes that parameters, gradients and the optimizer's state take on a rank, as a formula: memory.py measures them.

    parameters      their dtype; under 'optim_grads_params' divided by the ranks of a shard group
    gradients       the reduced dtype; under 'optim_grads' and 'optim_grads_params' divided too
    masters         4, or what they are kept in; 0 where the parameter is the master; 2 for a remainder
    moments         one number a moment in its dtype

Where the optimizer is sharded, masters and moments are divided by the ranks of a shard group. In addition a rank holds
padding (below 1 percent of a model of normal size), scratch (`scratch_bytes`, the same for a model of any size) and,
under 'optim_grads', two whole buckets of gradients; under 'optim_grads_params' two of parameters too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from core.distributed.distributed_data_parallel_config import DistributedDataParallelConfig, Strategy
from core.optimizer import OptimizerConfig
from core.optimizer.masters.master_storage import CopyStorage, RemainderStorage
from core.optimizer.masters.master_weights import storage_of
from core.optimizer.masters.memory import moments_of
from core.optimizer.masters.scratch import kept_dtype

MASTER_BYTES: dict[Any, int] = {CopyStorage: torch.float32.itemsize, RemainderStorage: torch.int16.itemsize}


@dataclass(frozen=True, slots=True)
class BytesPerParameter:
    """Bytes a rank holds, divided by the number of parameters of its model chunk."""

    parameters: float
    gradients: float
    masters: float
    moments: float

    @property
    def total(self) -> float:
        return self.parameters + self.gradients + self.masters + self.moments


def bytes_per_parameter(
    config: OptimizerConfig,
    *,
    param_dtype: torch.dtype,
    grad_dtype: torch.dtype,
    strategy: Strategy = "no_shard",
    shard_ranks: int = 1,
) -> BytesPerParameter:
    """Bytes per parameter under the strategy and dtypes. ValueError for an algorithm whose moments are not known.

    strategy: DistributedDataParallelConfig.data_parallel_sharding_strategy. shard_ranks: the ranks that share one copy
    of the optimizer's state, data ranks / optimizer instances.

        bytes_per_parameter(
            OptimizerConfig(bf16=True), param_dtype=torch.bfloat16, grad_dtype=torch.float32,
            strategy="optim", shard_ranks=8,
        ).total  # 2 + 4 + (4 + 8) / 8
    """
    spread = DistributedDataParallelConfig(data_parallel_sharding_strategy=strategy).residency.spread(shard_ranks)
    computed_in = torch.promote_types(param_dtype, torch.float32)
    moments = [kept_dtype(key, config) or computed_in for key in moments_of(config)]
    return BytesPerParameter(
        parameters=param_dtype.itemsize / spread.params,
        gradients=grad_dtype.itemsize / spread.grads,
        masters=MASTER_BYTES.get(storage_of(config, param_dtype), 0) / spread.states,
        moments=sum(dtype.itemsize for dtype in moments) / spread.states,
    )
