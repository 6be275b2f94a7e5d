"""Sizes of scratch memory and moments, for planning a run before an optimizer exists."""

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
    "muon": ("momentum_buffer",),  # for matrices; other parameters have the moments of muon_scalar_optimizer
    "sgd": ("momentum_buffer",),
}


def scratch_bytes(
    config: OptimizerConfig, *, param_dtype: torch.dtype, grad_dtype: torch.dtype, on_cpu: bool = False
) -> int:
    """Return the bytes of scratch memory, for a model large enough to fill it."""
    device = torch.device("cpu" if on_cpu else "cuda")
    if label(config.optimizer) == "adam" and steps_16_bits(config, param_dtype, grad_dtype, device):
        return 0
    dtype = torch.promote_types(param_dtype, torch.float32)  # dtype of a step's arithmetic
    moments = sum(kept_dtype(key, config) is not None for key in moments_of(config))
    storage = storage_of(config, param_dtype)
    masters = storage in (ParameterStorage, RemainderStorage)
    tensors = moments + masters + (grad_dtype != dtype or storage is RemainderStorage)
    return tensors * (CPU_NUMEL if on_cpu else DEVICE_NUMEL) * dtype.itemsize


def moments_of(config: OptimizerConfig, algorithm: str | None = None) -> tuple[str, ...]:
    """Return the names of the per-element state that an algorithm keeps. Raises ValueError if they are not known
    here.
    """
    name = algorithm or label(config.optimizer)
    if name not in MOMENTS:
        raise ValueError(f"how many moments {name!r} keeps is not known here; known are {', '.join(MOMENTS)}")
    if name == "sgd" and config.sgd_momentum == 0:
        return ()
    return MOMENTS[name]
