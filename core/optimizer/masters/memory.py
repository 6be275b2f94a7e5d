"""Bytes that parameters, gradients and the optimizer's state take on a rank: a formula, for planning a run.

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
from core.optimizer.algorithms.names import label
from core.optimizer.masters.master_storage import CopyStorage, ParameterStorage, RemainderStorage
from core.optimizer.masters.master_weights import steps_16_bits, storage_of
from core.optimizer.masters.scratch import CPU_NUMEL, DEVICE_NUMEL, kept_dtype
from core.optimizer.optimizer_config import OptimizerConfig

MOMENTS: dict[str, tuple[str, ...]] = {
    "adam": ("exp_avg", "exp_avg_sq"),
    "lion": ("exp_avg",),
    "muon": ("momentum_buffer",),  # of matrices; the rest has those of muon_scalar_optimizer
    "sgd": ("momentum_buffer",),
}
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
    """Bytes per parameter under the strategy and dtypes. ValueError for an algorithm whose moments are not known here.

    strategy: DistributedDataParallelConfig.data_parallel_sharding_strategy. shard_ranks: the ranks that share one copy
    of the optimizer's state, data ranks / optimizer instances.

        bytes_per_parameter(
            OptimizerConfig(bf16=True), param_dtype=torch.bfloat16, grad_dtype=torch.float32,
            strategy="optim", shard_ranks=8,
        ).total  # 2 + 4 + (4 + 8) / 8
    """
    spread = DistributedDataParallelConfig(data_parallel_sharding_strategy=strategy).residency.spread(shard_ranks)
    moments = [kept_dtype(key, config) or _computed_in(param_dtype) for key in moments_of(config)]
    return BytesPerParameter(
        parameters=param_dtype.itemsize / spread.params,
        gradients=grad_dtype.itemsize / spread.grads,
        masters=MASTER_BYTES.get(storage_of(config, param_dtype), 0) / spread.states,
        moments=sum(dtype.itemsize for dtype in moments) / spread.states,
    )


def scratch_bytes(
    config: OptimizerConfig, *, param_dtype: torch.dtype, grad_dtype: torch.dtype, on_cpu: bool = False
) -> int:
    """Bytes of the scratch memory, once the segments of the model fill it."""
    device = torch.device("cpu" if on_cpu else "cuda")
    if label(config.optimizer) == "adam" and steps_16_bits(config, param_dtype, grad_dtype, device):
        return 0
    dtype = _computed_in(param_dtype)
    moments = sum(kept_dtype(key, config) is not None for key in moments_of(config))
    storage = storage_of(config, param_dtype)
    masters = storage in (ParameterStorage, RemainderStorage)
    tensors = moments + masters + (grad_dtype != dtype or storage is RemainderStorage)
    return tensors * (CPU_NUMEL if on_cpu else DEVICE_NUMEL) * dtype.itemsize


def _computed_in(param_dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(param_dtype, torch.float32)


def moments_of(config: OptimizerConfig, algorithm: str | None = None) -> tuple[str, ...]:
    """Names of what an algorithm keeps for each element; the configured one by default.

    ValueError for an algorithm whose moments are not known here.
    """
    name = algorithm or label(config.optimizer)
    if name not in MOMENTS:
        raise ValueError(f"how many moments {name!r} keeps is not known here; known are {', '.join(MOMENTS)}")
    if name == "sgd" and config.sgd_momentum == 0:
        return ()
    return MOMENTS[name]
