"""Weight gradients written into the gradient buffer, against autograd's: the linear layers and the embedding of core.

Both arms are the same layer, with and without `gradient_accumulation_fusion`, on a parameter whose `.grad` is a kept
buffer, as the wrapper keeps it. Timed is the backward of the weight alone: the input needs no gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from benchmarks.workloads import SEED, Workload

AUTOGRAD, FUSED = "autograd", "fused"
BF16, FP32 = torch.bfloat16, torch.float32
# name -> (parameters and activations, gradient buffer)
DTYPES = {"fp32": (FP32, FP32), "bf16, fp32 buffer": (BF16, FP32), "bf16": (BF16, BF16)}
# Norm of the difference from fp64 over the norm. autograd rounds a bf16 gradient, and each sum in a bf16 buffer.
TOLERANCES = {"fp32": 1e-5, "bf16, fp32 buffer": 1e-2, "bf16": 1e-2}
CHECKED_BACKWARDS = 2


class WrongGradient(RuntimeError):
    """A gradient is not what fp64 on the CPU says."""


@dataclass(frozen=True)
class Shape:
    """A weight [out, into], or [vocabulary, width] of an embedding, and how many tokens come."""

    name: str
    out: int
    into: int
    tokens: int
    embedding: bool = False


def shapes_of(workload: Workload) -> list[Shape]:
    """Of one layer of a GPT, its output layer and its embedding."""
    width, tokens = workload.width, workload.samples * workload.tokens
    return [
        Shape("query, key, value", 3 * width, width, tokens),
        Shape("attention's output", width, width, tokens),
        Shape("mlp up", 4 * width, width, tokens),
        Shape("mlp down", width, 4 * width, tokens),
        Shape("output layer", workload.vocabulary, width, tokens),
        Shape("embedding", workload.vocabulary, width, tokens, embedding=True),
    ]


class Backward:
    """One layer after its forward; calling it adds the weight's gradient to `buffer` once more."""

    def __init__(self, shape: Shape, dtypes: str, *, fused: bool, device: torch.device) -> None:
        from core.groups.process_groups import ProcessGroups
        from core.model_parallel_config import ModelParallelConfig
        from core.tensor_parallel import ColumnParallelLinear, VocabParallelEmbedding
        from core.tensor_parallel.initialization import normal_init

        param_dtype, grad_dtype = DTYPES[dtypes]
        config = ModelParallelConfig(params_dtype=param_dtype, gradient_accumulation_fusion=fused)
        common: dict[str, Any] = {
            "config": config, "init_method": normal_init(0.02), "pg_collection": ProcessGroups(), "name": "weight",
        }  # fmt: skip
        self.layer: nn.Module
        generator = torch.Generator().manual_seed(SEED)
        if shape.embedding:
            self.layer = VocabParallelEmbedding(shape.out, shape.into, **common).to(device)
            self.input = torch.randint(shape.out, (1, shape.tokens), generator=generator).to(device)
        else:
            self.layer = ColumnParallelLinear(shape.into, shape.out, bias=False, **common).to(device)
            self.input = torch.randn(shape.tokens, shape.into, generator=generator).to(param_dtype).to(device)
        weight: Any = self.layer.weight
        self.buffer = torch.zeros(weight.shape, dtype=grad_dtype, device=device)
        weight.grad_dtype = grad_dtype
        weight.grad = weight.main_grad = self.buffer
        found = self.layer(self.input)
        self.output = found if isinstance(found, torch.Tensor) else found[0]
        self.grad = torch.randn(self.output.shape, generator=generator).to(param_dtype).to(device)

    def __call__(self) -> None:
        """Backward."""
        self.output.backward(self.grad, retain_graph=True)

    def expected(self) -> torch.Tensor:
        """One backward's gradient in fp64, on the CPU."""
        grad = self.grad.detach().cpu().double().reshape(-1, self.grad.shape[-1])
        if self.input.is_floating_point():
            return grad.t() @ self.input.cpu().double()
        return torch.zeros(self.buffer.shape, dtype=torch.float64).index_add_(0, self.input.cpu().view(-1), grad)


def check(name: str, backward: Backward, tolerance: float, call: Callable[[], None] | None = None) -> float:
    """Run `call` (the backward) twice and compare the buffer; raises WrongGradient beyond the tolerance."""
    backward.buffer.zero_()
    for _ in range(CHECKED_BACKWARDS):
        (call or backward)()
    want = CHECKED_BACKWARDS * backward.expected()
    off = float((backward.buffer.cpu().double() - want).norm() / want.norm())
    if not off <= tolerance:
        raise WrongGradient(
            f"{name}: the gradient of {CHECKED_BACKWARDS} backwards is {off:.1e} of its norm from fp64's, "
            f"{tolerance:.0e} allowed; its time would mean nothing"
        )
    return off


def pair(shape: Shape, dtypes: str, device: torch.device) -> Mapping[str, Backward]:
    """Both arms of a shape, checked."""
    arms = {name: Backward(shape, dtypes, fused=name == FUSED, device=device) for name in (AUTOGRAD, FUSED)}
    for name, backward in arms.items():
        check(f"{shape.name}, {dtypes}, {name}", backward, TOLERANCES[dtypes])
    return arms
