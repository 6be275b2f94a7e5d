"""MFU, model FLOP/s utilization: a step's arithmetic as a share of a device's peak. Pure numbers.

6 N + 12 L H T operations a token, forward and backward (Chowdhery et al. 2022, PaLM, appendix B). N: weights that a
token is multiplied by; L, H: layers and their width; T: tokens of a sequence. As in the paper, attention counts as
if it were not causal, and recomputation does not count.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from core_plan.job.config import ModelOptions
from core_plan.job.sizes import count_parameters

PEAK_SOURCE = "NVIDIA's data sheets, bf16 on tensor cores: half of what they give with sparsity"
# By what is in the device's name, the longest that is; TFLOP/s.
PEAKS = {"H200": 1979 / 2, "H100": 1979 / 2, "H100 PCIe": 1513 / 2, "A100": 624 / 2, "L40S": 733 / 2}


def peak_tflops(device_name: str, given: float | None) -> float | None:
    """Return the device's peak TFLOP/s: the given number, or the table's. None if neither is known."""
    if given is not None:
        return given
    known = [name for name in PEAKS if name in device_name]
    return PEAKS[max(known, key=len)] if known else None


def peak_of(device: torch.device, dtype: str, given: float | None) -> float | None:
    """Return the peak of a rank's device for a model in ``dtype``, in TFLOP/s. None if it is unknown."""
    if given is not None or device.type != "cuda" or dtype not in ("bfloat16", "float16"):
        return given
    return peak_tflops(torch.cuda.get_device_name(device), None)


def flops_of_token(model: ModelOptions, vocab_size: int) -> float:
    """Count the operations for one token of the GPT, forward and backward; only the token's experts count."""
    width = model.hidden_size
    weights = count_parameters(replace(model, vocab_size=vocab_size), model.moe_router_topk)
    if model.num_experts is not None:
        shared = (3 if model.activation == "swiglu" else 2) * (model.moe_shared_expert_intermediate_size or 0)
        weights += math.ceil(model.num_layers / model.moe_layer_freq) * width * (shared + model.num_experts)
    return 6.0 * weights + 12 * model.num_layers * width * model.sequence_length
