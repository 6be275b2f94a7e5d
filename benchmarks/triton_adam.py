"""A candidate for core.optimizer: Adam in one pass over memory, as a Triton kernel. No GPU has measured it yet.

This file is imported only by the function that launches the kernel. Each element is read once: gradient, moments and
master in the dtypes that they are kept in. All arithmetic is in fp32. Each element is written once: moments, master,
and the model's parameter. A master is one of

    the parameter itself        fp32, or 16-bit without a master
    an additional copy          fp32 or bf16, of which the parameter is a rounded copy
    a remainder                 the 16 bits that a bf16 parameter lacks (stored_values.RemainderValues)
"""

from __future__ import annotations

from contextlib import nullcontext

import torch
import triton
import triton.language as tl

from benchmarks.optimizer_arms import AdamNumbers

BLOCK = 1024  # elements of one program: 8 a thread, 16 bytes of the narrowest dtype


@triton.jit
def _rounded(value: tl.tensor, like: tl.constexpr) -> tl.tensor:
    # To bf16 in integers, ties to even, as the hardware rounds: Triton's interpreter cuts the bits off instead.
    if like == tl.bfloat16:
        bits = value.to(tl.int32, bitcast=True)
        nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        nearest = tl.where(value != value, 0x7FC0, nearest)
        result = nearest.to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        result = value.to(like)
    return result


@triton.jit
def _adam(
    grad_at: tl.tensor,
    param_at: tl.tensor,
    master_at: tl.tensor,
    first_at: tl.tensor,
    second_at: tl.tensor,
    numel: tl.tensor,
    factor: tl.tensor,
    second_factor: tl.tensor,
    lr: tl.tensor,
    decay: tl.tensor,
    beta2: tl.tensor,
    one_less_beta1: tl.tensor,
    one_less_beta2: tl.tensor,
    eps: tl.tensor,
    correction1: tl.tensor,
    root_of_correction2: tl.tensor,
    DECOUPLED: tl.constexpr,
    COPY: tl.constexpr,
    REMAINDER: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < numel
    grad = tl.load(grad_at + at, mask=inside).to(tl.float32) * factor * second_factor
    first = tl.load(first_at + at, mask=inside).to(tl.float32)
    second = tl.load(second_at + at, mask=inside).to(tl.float32)
    if COPY:
        weight = tl.load(master_at + at, mask=inside).to(tl.float32)
    elif REMAINDER:
        upper = tl.load(param_at + at, mask=inside).to(tl.int16, bitcast=True).to(tl.int32)
        bits = (upper << 16) + tl.load(master_at + at, mask=inside).to(tl.int32)
        weight = bits.to(tl.float32, bitcast=True)
    else:
        weight = tl.load(param_at + at, mask=inside).to(tl.float32)

    if DECOUPLED:
        weight *= 1.0 - lr * decay
    else:
        grad += decay * weight
    first += one_less_beta1 * (grad - first)
    second = beta2 * second + one_less_beta2 * grad * grad
    size = tl.div_rn(tl.sqrt_rn(second), root_of_correction2) + eps
    weight -= lr * tl.div_rn(tl.div_rn(first, correction1), size)

    tl.store(first_at + at, _rounded(first, first_at.dtype.element_ty), mask=inside)
    tl.store(second_at + at, _rounded(second, second_at.dtype.element_ty), mask=inside)
    if COPY:
        kept = _rounded(weight, master_at.dtype.element_ty)
        tl.store(master_at + at, kept, mask=inside)
        tl.store(param_at + at, _rounded(kept.to(tl.float32), param_at.dtype.element_ty), mask=inside)
    elif REMAINDER:
        bits = weight.to(tl.int32, bitcast=True)
        upper = ((bits + 0x8000) >> 16).to(tl.int16)
        tl.store(param_at + at, upper.to(tl.bfloat16, bitcast=True), mask=inside)
        tl.store(master_at + at, bits.to(tl.int16), mask=inside)
    else:
        tl.store(param_at + at, _rounded(weight, param_at.dtype.element_ty), mask=inside)


def adam(
    grad: torch.Tensor,
    param: torch.Tensor,
    master: torch.Tensor | None,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    numbers: AdamNumbers,
) -> None:
    """One step of Adam, in place; all tensors flat, contiguous, [numel], on one device.

    master: None for the parameter itself; int16 for a remainder.
    """
    numel = param.numel()
    if numel == 0:
        return
    for name, tensor in (("grad", grad), ("master", master), ("exp_avg", exp_avg), ("exp_avg_sq", exp_avg_sq)):
        if tensor is not None and (tensor.shape != param.shape or not tensor.is_contiguous()):
            raise ValueError(
                f"triton adam: {name} is {list(tensor.shape)} with strides {tensor.stride()}, expected contiguous "
                f"{list(param.shape)} as the parameter is"
            )
    with torch.cuda.device(param.device) if param.is_cuda else nullcontext():
        _adam[(triton.cdiv(numel, BLOCK),)](
            grad,
            param,
            param if master is None else master,
            exp_avg,
            exp_avg_sq,
            numel,
            *numbers.factors,
            numbers.lr,
            numbers.weight_decay,
            numbers.beta2,
            1.0 - numbers.beta1,
            1.0 - numbers.beta2,
            numbers.eps,
            1.0 - numbers.beta1**numbers.step,
            (1.0 - numbers.beta2**numbers.step) ** 0.5,
            DECOUPLED=numbers.decoupled,
            COPY=master is not None and master.dtype != torch.int16,
            REMAINDER=master is not None and master.dtype == torch.int16,
            BLOCK=BLOCK,
            enable_fp_fusion=False,  # products and sums rounded apart: every form makes the same bits, and the CPU too
        )


def is_interpreted() -> bool:
    """True if Triton's interpreter runs the kernel on the CPU: TRITON_INTERPRET=1 when this file was imported."""
    return not isinstance(_adam, triton.runtime.JITFunction)
