"""Workloads of the arms of `python -m benchmarks steps`: two GPTs and a stack of 2005 tiny tensors, in plain torch.

Tokens are random and fixed: step `s` of rank `r` sees the same ones under every arm, and one process that is given the
microbatches of all ranks sees the global batch. A few batches come round again, so that there is something to learn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

SEED = 1234
DIFFERENT_BATCHES = 4


class Block(nn.Module):
    """A pre-norm transformer block with causal attention."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[samples, tokens, width] -> the same."""
        samples, tokens, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(samples, tokens, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(samples, tokens, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class TinyLayer(nn.Module):
    """Five small tensors: norm, projection, scale."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(width), nn.Linear(width, width)
        self.scale = nn.Parameter(torch.full((width,), 0.1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[samples, tokens, width] -> the same."""
        return x + self.scale * self.linear(self.norm(x)).relu()


class Tower(nn.Sequential):
    """Layers that are used one after another, one unit for tools that shard module by module."""


class LanguageModel(nn.Module):
    """Embedding, units, output; called with inputs and targets it returns the mean loss."""

    def __init__(self, vocabulary: int, tokens: int, width: int, units: Sequence[nn.Module]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.positions = nn.Parameter(0.02 * torch.randn(tokens, width))
        self.units = nn.ModuleList(units)
        self.norm = nn.LayerNorm(width)
        self.output = nn.Linear(width, vocabulary, bias=False)
        nn.init.normal_(self.embedding.weight, std=0.02)
        nn.init.normal_(self.output.weight, std=0.02)

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """[samples, tokens] of token numbers, twice -> the mean cross entropy."""
        x = self.embedding(inputs) + self.positions
        for unit in self.units:
            x = unit(x)
        return F.cross_entropy(self.output(self.norm(x)).flatten(0, 1), targets.flatten())


@dataclass(frozen=True)
class Workload:
    """A model and its batches.

    units x layers: so many towers of so many layers. heads: of attention; 0 for a stack of tiny layers without it.
    samples: of one microbatch of one rank, each of `tokens` tokens. rounds: turns that every arm has in one start of
    `python -m benchmarks steps`, so that all workloads take it about as long.
    """

    name: str
    units: int
    layers: int
    width: int
    heads: int
    vocabulary: int
    tokens: int
    samples: int
    rounds: int = 3

    def model(self) -> LanguageModel:
        """The model, with the same weights wherever it is made."""
        with torch.random.fork_rng():
            torch.manual_seed(SEED)
            return LanguageModel(self.vocabulary, self.tokens, self.width, [self._unit() for _ in range(self.units)])

    def _unit(self) -> nn.Module:
        if self.heads:
            layers: list[nn.Module] = [Block(self.width, self.heads) for _ in range(self.layers)]
        else:
            layers = [TinyLayer(self.width) for _ in range(self.layers)]
        return layers[0] if len(layers) == 1 else Tower(*layers)

    def microbatches(self, step: int, rank: int, accumulation: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Batches of a rank in a step: `accumulation` pairs of inputs and targets, [samples, tokens] each."""
        generator = torch.Generator().manual_seed(SEED + step % DIFFERENT_BATCHES + DIFFERENT_BATCHES * rank)
        shape = (accumulation, self.samples, self.tokens + 1)
        drawn = torch.randint(self.vocabulary, shape, generator=generator)
        return [(row[:, :-1].contiguous(), row[:, 1:].contiguous()) for row in drawn]

    def numel(self) -> int:
        """Parameters of the model."""
        with torch.device("meta"):
            return sum(param.numel() for param in self.model().parameters())

    def passing_numel(self, ranks: int) -> int:
        """Elements of the two longest neighbouring buckets where gradients are sharded, at the default bucket size."""
        from core.distributed.buffer.bucket_pool import pool_numel
        from core.distributed.layout.param_layout import BufferKey, ParamSpec, plan_buffer, resolve_bucket_size

        key = BufferKey("float32", "float32", "dp_cp")
        with torch.device("meta"):
            specs = [ParamSpec(name, tuple(param.shape), key) for name, param in self.model().named_parameters()]
        size = resolve_bucket_size(
            *(None, None),
            numel=sum(spec.numel for spec in specs),
            data_ranks=ranks,
            overlap=False,
            one_bucket=False,
            shards_gradients=True,
        )
        layout = plan_buffer(specs, bucket_size=size, shards=ranks, sharded=True, strict_size=True)
        return pool_numel([bucket.numel for bucket in layout.buckets])

    def tensors(self) -> int:
        """Tensors among them."""
        with torch.device("meta"):
            return len(list(self.model().parameters()))

    def sizes(self) -> str:
        """Sizes as the table shows them."""
        return (
            f"{self.numel() / 1e6:.1f} M parameters in {self.tensors()} tensors, width {self.width}, "
            f"{self.units * self.layers} layers, vocabulary {self.vocabulary}, "
            f"{self.samples} x {self.tokens} tokens a rank and microbatch"
        )


WORKLOADS: dict[str, Workload] = {
    workload.name: workload
    for workload in (
        Workload("gpt10m", units=8, layers=1, width=256, heads=4, vocabulary=8192, tokens=64, samples=4),
        Workload("gpt51m", units=12, layers=1, width=512, heads=8, vocabulary=12544, tokens=64, samples=3, rounds=1),
        Workload("tiny", units=20, layers=20, width=64, heads=0, vocabulary=256, tokens=32, samples=4),
        Workload("test", units=2, layers=2, width=16, heads=2, vocabulary=32, tokens=8, samples=2),
    )
}
TABLE = ("gpt10m", "gpt51m", "tiny")  # the columns of the table
