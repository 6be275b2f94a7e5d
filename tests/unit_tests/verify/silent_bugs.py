"""A user's decoder, split by hand over tensor, sequence, context and pipeline ranks, with mistakes to plant in it.

The mistakes are the fourteen silent bugs of TTrace (arXiv 2506.09280), each at one line that asks for its name. Nothing
here uses our layers: a user has written it all, collectives included.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from core import parallel_state
from core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    declare_gradient,
    finalize_model_grads,
)
from core.pipeline_parallel import PipelineRunner, plan_pipeline, wrap_stages
from core.verify import GradientReport, check_gradients

VOCABULARY, HIDDEN, HEADS, LENGTH, SAMPLES = 12, 16, 4, 8, 8


@dataclass(frozen=True)
class Split:
    """How the decoder is split, and the one mistake in it. `Split()` is the whole decoder on one process."""

    tp: int = 1
    cp: int = 1
    dp: int = 1
    pp: int = 1
    sp: bool = False
    bug: str = ""
    layers: int = 2
    recompute: bool = False
    words: int = VOCABULARY

    @property
    def world(self) -> int:
        """Ranks."""
        return self.tp * self.cp * self.dp * self.pp


# --- collectives that autograd knows ----------------------------------------------------------------------------------


class Copy(torch.autograd.Function):
    """Into a split product: the same tensor on all ranks, whose gradients are added."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any, bug: str) -> Tensor:
        ctx.group, ctx.bug = group, bug
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        grad = grad.clone()
        if ctx.bug == "overlap":  # what has been launched is used before it has come
            total = grad.clone()
            dist.all_reduce(total, group=ctx.group, async_op=True).wait()
            return grad, None, None
        group = parallel_state.get_data_parallel_group() if ctx.bug == "wrong group" else ctx.group
        dist.all_reduce(grad, group=group)
        return grad, None, None


class Sum(torch.autograd.Function):
    """Out of a split product: the ranks' partial sums are added."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        return grad, None


class Gather(torch.autograd.Function):
    """All ranks' positions, [b, s, ...] of [b, s / n, ...]; each rank gets its positions' gradient from all of them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any, bug: str) -> Tensor:
        ctx.group, ctx.bug = group, bug
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts, dim=1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        grad = grad.contiguous().clone()
        if ctx.bug != "gather of keys":
            dist.all_reduce(grad, group=ctx.group)
        return grad.chunk(dist.get_world_size(ctx.group), dim=1)[dist.get_rank(ctx.group)], None, None


class SumScatter(torch.autograd.Function):
    """Partial sums of all positions -> this rank's positions, added."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x.chunk(dist.get_world_size(group), dim=1)[dist.get_rank(group)].contiguous()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        parts = [torch.empty_like(grad) for _ in range(dist.get_world_size(ctx.group))]
        dist.all_gather(parts, grad.contiguous(), group=ctx.group)
        return torch.cat(parts, dim=1), None


# --- the decoder ------------------------------------------------------------------------------------------------------


def split_param(param: Any, dim: int, stride: int = 1) -> None:
    """Each rank has other values, and says along which dimension it has a part."""
    param.tensor_model_parallel, param.partition_dim, param.partition_stride = True, dim, stride
    generator = torch.Generator().manual_seed(parallel_state.get_tensor_model_parallel_rank())
    param.data.mul_(0.5 + torch.rand(param.shape, generator=generator))


class Part(nn.Module):
    """What all layers of the decoder know: how it is split, and its groups."""

    def __init__(self, split: Split) -> None:
        super().__init__()
        self.split = split
        self.tp_group = parallel_state.get_tensor_model_parallel_group() if split.tp > 1 else None
        self.cp_group = parallel_state.get_context_parallel_group() if split.cp > 1 else None

    def into_split(self, x: Tensor) -> Tensor:
        if self.tp_group is None:
            return x
        if self.split.sp:
            return Gather.apply(x, self.tp_group, "")  # type: ignore[no-any-return]
        return Copy.apply(x, self.tp_group, self.split.bug)  # type: ignore[no-any-return]

    def out_of_split(self, x: Tensor) -> Tensor:
        if self.tp_group is None:
            return x
        return (SumScatter if self.split.sp else Sum).apply(x, self.tp_group)  # type: ignore[no-any-return]


class Embedding(Part):
    """Each tensor-parallel rank has a part of the words; the others' words give zeros."""

    def __init__(self, split: Split) -> None:
        super().__init__(split)
        generator = torch.Generator().manual_seed(3)  # copies on two stages start alike
        self.weight = nn.Parameter(torch.randn(split.words // split.tp, HIDDEN, generator=generator))
        if split.tp > 1:
            split_param(self.weight, 0)

    def forward(self, tokens: Tensor) -> Tensor:
        first = 0 if self.tp_group is None else dist.get_rank(self.tp_group) * len(self.weight)
        here = tokens - first
        mine = (here >= 0) & (here < len(self.weight))
        x = nn.functional.embedding(here.clamp(0, len(self.weight) - 1), self.weight)
        if self.split.bug != "embedding mask":
            x = x * mine.unsqueeze(-1)
        return self.out_of_split(x)


class Norm(nn.LayerNorm):
    """Over what this rank has of the sequence."""

    def __init__(self, split: Split, place: str) -> None:
        super().__init__(HIDDEN)
        for param in self.parameters():
            nn.init.normal_(param, 1.0, 0.2)
            if split.sp:
                param.sequence_parallel = split.bug != f"norm: {place}"  # type: ignore[attr-defined]


class Column(Part):
    """A linear layer whose outputs are split."""

    def __init__(self, split: Split, inputs: int, outputs: int, stride: int = 1) -> None:
        super().__init__(split)
        self.weight = nn.Parameter(torch.randn(outputs // split.tp, inputs) / inputs**0.5)
        self.bias = nn.Parameter(torch.randn(outputs // split.tp) * 0.1)
        if split.tp > 1:
            split_param(self.weight, 0, stride)
            split_param(self.bias, 0, stride)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(self.into_split(x), self.weight, self.bias)


class Row(Part):
    """A linear layer whose inputs are split."""

    def __init__(self, split: Split, inputs: int, outputs: int) -> None:
        super().__init__(split)
        self.weight = nn.Parameter(torch.randn(outputs, inputs // split.tp) / inputs**0.5)
        if split.tp > 1:
            split_param(self.weight, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.out_of_split(nn.functional.linear(x, self.weight))


class Attention(Part):
    """Causal, with a norm of queries; keys and values of all context-parallel ranks are gathered."""

    def __init__(self, split: Split) -> None:
        super().__init__(split)
        self.linear_qkv = Column(split, HIDDEN, 3 * HIDDEN, stride=3)
        self.q_norm = nn.LayerNorm(HIDDEN // HEADS)
        self.linear_proj = Row(split, HIDDEN, HIDDEN)
        if split.tp > 1:
            for param in self.q_norm.parameters():
                declare_gradient(param, partial_over=() if split.bug == "norm of queries" else ("tp",))

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (
            part.unflatten(-1, (HEADS // self.split.tp, HIDDEN // HEADS)) for part in self.linear_qkv(x).chunk(3, -1)
        )
        query = self.q_norm(query)
        first = 0
        if self.cp_group is not None:
            key, value = (Gather.apply(part, self.cp_group, self.split.bug) for part in (key, value))
            first = dist.get_rank(self.cp_group) * query.shape[1]
        positions = first + torch.arange(query.shape[1])
        seen = positions.unsqueeze(1) >= torch.arange(key.shape[1])
        query, key, value = (part.transpose(1, 2) for part in (query, key, value))
        attended = nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=seen)
        return self.linear_proj(attended.transpose(1, 2).flatten(2))


class Mlp(Part):
    """With a gate for each token, which a router gives."""

    def __init__(self, split: Split) -> None:
        super().__init__(split)
        self.router = nn.Linear(HIDDEN, 1)
        for param in self.router.parameters():
            if split.sp:
                param.sequence_parallel = split.bug != "router"
            elif split.tp > 1:
                declare_gradient(param)
        self.up = Column(split, HIDDEN, 4 * HIDDEN)
        self.down = Row(split, 4 * HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(nn.functional.gelu(self.up(x))) * self.router(x).sigmoid()


class Layer(Part):
    def __init__(self, split: Split) -> None:
        super().__init__(split)
        self.norm_1 = Norm(split, "norm_1")
        self.attention = Attention(split)
        self.norm_2 = Norm(split, "norm_2")
        self.mlp = Mlp(split)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm_1(x))
        return x + self.mlp(self.norm_2(x))


class Head(nn.Linear):
    """Logits; all ranks compute all of them."""

    def __init__(self, split: Split) -> None:
        super().__init__(HIDDEN, split.words, bias=False)
        self.low = split.bug == "cast"

    def forward(self, x: Tensor) -> Tensor:
        logits = super().forward(x)
        return logits.bfloat16().to(logits.dtype) if self.low else logits


class Decoder(Part):
    """Tokens and labels [b, s] -> the mean loss. A stage of a pipeline has some of the layers, and perhaps the ends."""

    def __init__(self, split: Split, numbers: tuple[int, ...] | None = None) -> None:
        super().__init__(split)
        numbers = tuple(range(split.layers)) if numbers is None else numbers
        self.is_first, self.is_last = 0 in numbers, split.layers - 1 in numbers
        torch.manual_seed(2)
        if self.is_first:
            self.embedding = Embedding(split)
        self.layers = nn.ModuleList(Layer(split) for _ in numbers)
        self.global_names = {f"layers.{here}": f"layers.{there}" for here, there in enumerate(numbers)}
        if self.is_last:
            self.norm = Norm(split, "norm")
            self.head = Head(split)
        if split.bug == "untied" and split.pp > 1 and self.is_last:  # a copy that says nothing of the other one
            self.tied = Embedding(split)
            self.global_names["tied"] = "embedding"
        elif split.bug == "untied" and self.is_last:
            self.tied = self.embedding

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Tensor:
        if self.is_first:
            x = self.embedding(x)
        for number, layer in enumerate(self.layers):
            if self.split.recompute:
                before = x
                x = checkpoint(layer, before, use_reentrant=False)
                if self.split.bug == "stale input" and number == 1:
                    before.data.mul_(0.5)  # memory that looks free
            else:
                x = layer(x)
        if not self.is_last or labels is None:
            return x
        x = self.norm(x)
        if self.split.sp:
            x = Gather.apply(x, self.tp_group, "gather of keys")  # what comes next is the same on all ranks
        logits = x @ self.tied.weight.T if self.split.bug == "untied" else self.head(x)
        if self.split.bug == "untied":
            logits = logits + 0 * self.head(x)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        if self.split.bug == "loss over dp":
            loss = loss / self.split.dp
        if self.split.bug == "loss over cp":
            loss = loss / self.split.cp
        return loss


# --- training and the check -------------------------------------------------------------------------------------------


def loss_of(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    loss: Tensor = model(batch["tokens"], batch["labels"])
    return loss


def batch_of(samples: int = SAMPLES, words: int = VOCABULARY, seed: int = 7) -> dict[str, Tensor]:
    tokens = torch.randint(0, words, (samples, LENGTH + 1), generator=torch.Generator().manual_seed(seed))
    return {"tokens": tokens[:, :-1], "labels": tokens[:, 1:]}


def positions_of_this_rank(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Contiguous parts of the sequence."""
    cp, rank = parallel_state.get_context_parallel_world_size(), parallel_state.get_context_parallel_rank()
    return {name: tensor.chunk(cp, dim=1)[rank] for name, tensor in batch.items()}


def stages_of(split: Split, dtype: torch.dtype) -> PipelineRunner:
    layout = plan_pipeline(split.layers, split.pp, microbatches=2)
    rank = parallel_state.get_pipeline_model_parallel_rank()
    count = split.layers // split.pp
    numbers = tuple(range(rank * count - (split.bug == "a layer on two stages" and rank > 0), (rank + 1) * count))
    stage = Decoder(split, numbers).to(dtype)
    if split.bug == "stage division" and rank == 1:  # one layer of the stage before runs here again
        stage.layers[0].forward = twice(stage.layers[0].forward)
    chunks = wrap_stages(None, DistributedDataParallelConfig(), [stage])

    def step(chunk: nn.Module, batch: dict[str, Tensor], hidden: Tensor | None) -> Any:
        return chunk(batch["tokens"] if hidden is None else hidden, batch["labels"])

    hidden = torch.empty(SAMPLES // 2, LENGTH, HIDDEN, dtype=dtype, device="meta")
    return PipelineRunner(chunks, layout, step, [hidden])


def twice(forward: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda x: forward(forward(x))


def train(
    split: Split,
    dtype: torch.dtype = torch.float32,
    optimizer_of: Callable[[nn.Module], Any] = lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
    before: Callable[[Any], None] = lambda model: None,
) -> Iterator[None]:
    """A user's loop with no option set; yields after `finalize_model_grads`. Groups are up already.

    before: called with the wrapped model or the PipelineRunner right before the first step.
    """

    def microbatches(step: int) -> list[dict[str, Tensor]]:
        data_rank = parallel_state.get_data_parallel_rank()
        halves = [batch_of(SAMPLES // 2, split.words, 100 * step + 10 * data_rank + number) for number in range(2)]
        return [positions_of_this_rank(half) for half in halves]

    runner = stages_of(split, dtype) if split.pp > 1 else None
    if runner is not None:
        model = runner.chunks[0]
    else:
        model = DistributedDataParallel(None, DistributedDataParallelConfig(), Decoder(split).to(dtype))
    optimizer = optimizer_of(model)
    before(runner or model)
    for step in range(10):
        if runner is not None:
            runner.step(microbatches(step))
        else:
            for number, part in enumerate(microbatches(step)):
                with nullcontext() if number else model.no_sync():
                    (loss_of(model, part) / 2).backward()
            finalize_model_grads([model])
        yield
        optimizer.step()
        optimizer.zero_grad()


def check(split: Split, dtype: torch.dtype = torch.float64, **options: Any) -> GradientReport:
    """The report on one split. Collective over `split.world` ranks."""
    # In the reference a mistake of the layout has nothing to be wrong about, except one that one process makes too.
    shared = split.bug in ("untied", "stale input")
    shared_bug = split.bug if shared else ""
    whole = Split(layers=split.layers, recompute=split.recompute, words=split.words, bug=shared_bug)
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=split.tp,
        context_parallel_size=split.cp,
        pipeline_model_parallel_size=split.pp,
    )
    try:
        return check_gradients(
            lambda: stages_of(split, dtype) if split.pp > 1 else Decoder(split),
            loss_of,
            batch_of(words=split.words),
            reference_fn=lambda: Decoder(whole),
            dtype=dtype,
            split_fn=positions_of_this_rank if split.cp > 1 else None,
            microbatches=2 if split.pp > 1 else 1,
            **options,
        )
    finally:
        parallel_state.destroy_model_parallel()
