"""Processor time of operators in a model, by name and size: the CPU part of a device file.

Memory bandwidth and matrix product speed do not determine an operator's time on a CPU: exp() is not memory-bound, many
small products are slower than one large one, and the kernel must first clear the pages of a new result. Therefore a
small model with common layer operators runs forward and backward, and each operator is timed at its call. Processor
time excludes time in which other ranks use the core.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# A public module of torch that has the class; the module that defines it has a private name.
from torch.fx.experimental.proxy_tensor import TorchDispatchMode

from core_plan.live_memory import Work

SIZES = ((2, 32, 32), (4, 64, 128), (8, 128, 256))  # rows, tokens of a row, width
VOCABULARY, HEADS = 1024, 8


class SampleLayers(nn.Module):
    """Operators of GPT, llama and related models, in one layer each. Input ids have shape [rows, tokens]."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.norm = nn.LayerNorm(width)
        self.scale = nn.Parameter(torch.ones(width))
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.up, self.gate, self.down = (
            nn.Linear(width, 4 * width),
            nn.Linear(width, 4 * width),
            nn.Linear(4 * width, width),
        )
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def attend(self, hidden: Tensor, *, in_parts: bool) -> Tensor:
        """Apply attention to [rows, tokens, width]. `in_parts` uses separate product, softmax and product."""
        rows, tokens, width = hidden.shape
        shape = rows, tokens, HEADS, width // HEADS
        query, key, value = (part(hidden).view(shape).transpose(1, 2) for part in (self.query, self.key, self.value))
        angles = torch.arange(tokens, dtype=hidden.dtype)[:, None].expand(tokens, shape[-1])
        first, second = query.chunk(2, -1)
        query = query * angles.cos() + torch.cat((-second, first), -1) * angles.sin()
        if in_parts:
            scores = query @ key.transpose(-1, -2) * shape[-1] ** -0.5
            allowed = torch.ones(tokens, tokens, dtype=torch.bool).tril()
            scores = scores.masked_fill(~allowed, -1e4)
            mixed = F.dropout(F.softmax(scores, -1), 0.1) @ value
        else:
            mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return mixed.transpose(1, 2).reshape(rows, tokens, width)

    def forward(self, ids: Tensor) -> Tensor:
        """Return the loss."""
        hidden = self.embedding(ids)
        hidden = hidden + self.attend(self.norm(hidden), in_parts=False)
        normed = hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + 1e-6) * self.scale
        hidden = hidden + self.down(F.silu(self.gate(normed)) * self.up(normed))
        hidden = hidden + self.attend(self.norm(hidden), in_parts=True)
        hidden = hidden + self.down(
            F.relu(F.gelu(self.up(self.norm(hidden))) + F.gelu(self.gate(hidden), approximate="tanh"))
        )
        logits = self.head(hidden).float()
        exact = F.cross_entropy(logits.flatten(0, 1), ids.flatten())
        shifted = logits - logits.amax(-1, keepdim=True)
        by_parts = shifted.exp().sum(-1).log() - shifted.gather(-1, ids[..., None]).squeeze(-1)
        return exact + by_parts.mean()


class TimedOperators(TorchDispatchMode):
    """Processor seconds of each operator that creates a tensor: (name and dtype) -> size -> [calls, seconds]."""

    def __init__(self) -> None:
        super().__init__()
        self.taken: defaultdict[str, defaultdict[int, list[float]]] = defaultdict(lambda: defaultdict(lambda: [0, 0.0]))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        begun = time.thread_time()
        result = func(*args, **(kwargs or {}))
        seconds = time.thread_time() - begun
        work = Work.of(func, args, kwargs or {}, result)
        if work is not None:
            sample = self.taken[operator_key(work)][work_size(work)]
            sample[0] += 1
            sample[1] += seconds
        return result

    def total(self) -> float:
        """Return the seconds of all operators together."""
        return sum(seconds for sizes in self.taken.values() for _, seconds in sizes.values())

    def table(self) -> dict[str, list[list[float]]]:
        """Return [size, seconds of a call] by name, sorted by size."""
        return {
            name: [[size, seconds / calls] for size, (calls, seconds) in sorted(sizes.items())]
            for name, sizes in self.taken.items()
        }


def sample_sizes(share: float) -> Sequence[tuple[int, int, int]]:
    """Return the sizes to measure if the measurement takes this share of the usual time."""
    return SIZES if share > 0.1 else SIZES[:2]


def operator_key(work: Work) -> str:
    """Return the name of an operator in a device file."""
    return f"{work.name} {str(work.dtype).removeprefix('torch.')}"


def work_size(work: Work) -> int:
    """Return the size of an operator's work: its floating-point operations, or bytes if it has no operations."""
    return work.flops or work.nbytes


def sample_step(dtype: torch.dtype, rows: int, tokens: int, width: int) -> tuple[SampleLayers, Tensor]:
    """Return the model and its token ids."""
    torch.manual_seed(0)
    model = SampleLayers(width).to(dtype)
    return model, torch.randint(0, VOCABULARY, (rows, tokens))
