"""Bytes of the scratch memory, and the moments of an algorithm, for planning a run before there is an optimizer."""

from __future__ import annotations

import torch

from core.optimizer.algorithms.names import label
from core.optimizer.masters.master_storage import ParameterStorage, RemainderStorage
from core.optimizer.masters.master_weights import steps_16_bits, storage_of
from core.optimizer.masters.scratch import CPU_NUMEL, DEVICE_NUMEL, kept_dtype
from core.optimizer.optimizer_config import OptimizerConfig

MOMENTS: dict[str, tuple[str, ...]] = {
    "adam": ("exp_avg", "exp_avg_sq"),
    "lion": ("exp_avg",),
    "muon": ("momentum_buffer",),  # of matrices; the rest has those of muon_scalar_optimizer
    "sgd": ("momentum_buffer",),
}


def scratch_bytes(
    config: OptimizerConfig, *, param_dtype: torch.dtype, grad_dtype: torch.dtype, on_cpu: bool = False
) -> int:
    """Bytes of the scratch memory, once the segments of the model fill it."""
    device = torch.device("cpu" if on_cpu else "cuda")
    if label(config.optimizer) == "adam" and steps_16_bits(config, param_dtype, grad_dtype, device):
        return 0
    dtype = torch.promote_types(param_dtype, torch.float32)  # what steps are computed in
    moments = sum(kept_dtype(key, config) is not None for key in moments_of(config))
    storage = storage_of(config, param_dtype)
    masters = storage in (ParameterStorage, RemainderStorage)
    tensors = moments + masters + (grad_dtype != dtype or storage is RemainderStorage)
    return tensors * (CPU_NUMEL if on_cpu else DEVICE_NUMEL) * dtype.itemsize


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
