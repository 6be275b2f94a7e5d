"""MFU, model FLOP/s utilization: what share of a device's peak a step's arithmetic needs. Pure numbers.

6 N + 12 L H T operations a token, forward and backward (Chowdhery et al. 2022, PaLM, appendix B). N: weights that a
token is multiplied by; L, H: layers and their width; T: tokens of a sequence. Attention counts as if it were not causal
and nothing as if it were computed twice, as there.
"""

from __future__ import annotations

import torch

from core.training.config import ModelOptions

PEAK_SOURCE = "NVIDIA's data sheets, bf16 on tensor cores: half of what they give with sparsity"
# By what is in the device's name, the longest that is; TFLOP/s.
PEAKS = {"H200": 1979 / 2, "H100": 1979 / 2, "H100 PCIe": 1513 / 2, "A100": 624 / 2, "L40S": 733 / 2}


def peak_tflops(device_name: str, given: float | None) -> float | None:
    """Peak TFLOP/s of the device: as given, or from the table; None if neither has it."""
    if given is not None:
        return given
    known = [name for name in PEAKS if name in device_name]
    return PEAKS[max(known, key=len)] if known else None


def peak_of(device: torch.device, dtype: str, given: float | None) -> float | None:
    """The peak, in TFLOP/s, of a rank's device for a model in `dtype`; None where it is not known."""
    if given is not None or device.type != "cuda" or dtype not in ("bfloat16", "float16"):
        return given
    return peak_tflops(torch.cuda.get_device_name(device), None)


def flops_of_token(model: ModelOptions, vocab_size: int) -> float:
    """Operations for one token of the GPT, forward and backward; of experts those that the token goes to."""
    width, heads = model.hidden_size, model.num_attention_heads
    attention = width * width * (2 + 2 * model.query_groups / heads)
    factors = 3 if model.activation == "swiglu" else 2
    dense = factors * width * model.ffn_width
    layers_with_experts = 0
    experts = 0.0
    if model.num_experts is not None:
        layers_with_experts = -(-model.num_layers // model.moe_layer_freq)
        shared = model.moe_shared_expert_intermediate_size or 0
        experts = factors * width * (model.moe_router_topk * model.expert_width + shared) + width * model.num_experts
    weights = model.num_layers * attention + (model.num_layers - layers_with_experts) * dense
    weights += layers_with_experts * experts + width * vocab_size
    return 6 * weights + 12 * model.num_layers * width * model.sequence_length
