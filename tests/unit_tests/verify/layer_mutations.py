"""Forty mistakes in our own layers, each a patch of one function; the reference, which rank 0 runs, is untouched.

Collectives are no part of the reference. What it runs too is spoilt on rank 1 alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from core.context_parallel import all_gather, all_to_all, ring
from core.context_parallel.blocks import Block
from core.distributed import declare_gradient
from core.moe import exchange, experts, moe_layer, router, token_dispatcher
from core.tensor_parallel import cross_entropy, layers, mappings
from core.transformer import attention, language_model_embedding, mlp, norms, rotary
from tests.layouts.layouts import Layout

Spoilt = Callable[[], AbstractContextManager[Any]]

TP, SP = Layout(tp=2), Layout(tp=2, sp=True)
MODERN = Layout(tp=2, model="modern")
RING, GATHERED, EXCHANGED = (Layout(cp=2, cp_comm=kind) for kind in ("p2p", "all_gather", "a2a"))
ROTARY = Layout(cp=2, cp_comm="p2p", model="modern")
EP, EP_GATHERED = (Layout(dp=2, ep=2, experts=kind) for kind in ("alltoall", "allgather"))
EXPERT_TP = Layout(tp=2, etp=2, experts="alltoall")
MOE_TP = Layout(tp=2, etp=1, ep=2, experts="alltoall", shared=True)


@dataclass(frozen=True)
class Mutation:
    """A patch in a layout."""

    name: str
    layout: Layout
    spoil: Spoilt


def patch(owner: Any, name: str, new: Any) -> Spoilt:
    return lambda: mock.patch.object(owner, name, new)


def forward_of(function: type, new: Callable[..., Any]) -> Spoilt:
    return patch(function, "forward", staticmethod(new))


def backward_of(function: type, new: Callable[..., Any]) -> Spoilt:
    return patch(function, "backward", staticmethod(new))


def on_rank_1(owner: Any, name: str, change: Callable[..., Any]) -> Spoilt:
    """change: (the right result, then the arguments) -> what rank 1 gets."""
    right = getattr(owner, name)

    def spoilt(*args: Any, **kwargs: Any) -> Any:
        result = right(*args, **kwargs)
        return change(result, *args) if dist.get_rank() == 1 else result

    return patch(owner, name, spoilt)


class Done:
    """A collective that has done nothing but this."""

    def __init__(self, result: Tensor) -> None:
        self.result = result

    def wait(self) -> Tensor:
        return self.result


def remember(function: Callable[[Tensor, Any], Tensor]) -> Callable[..., Tensor]:
    def forward(ctx: Any, tensor: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return function(tensor, group)

    return forward


def turned(parts: Tensor) -> Tensor:
    """Two ranks' parts in the other order."""
    return torch.cat(list(reversed(parts.chunk(2))))


def without_mask(self: Any, ids: Tensor) -> Tensor:
    row = (ids - self.vocab_start_index).clamp(0, self.num_embeddings_per_partition - 1)
    return mappings.reduce_from_tensor_model_parallel_region(torch.nn.functional.embedding(row, self.weight))


def only_in_layout(right: Callable[..., Any], spoilt: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, *args: (spoilt if self.tp_size > 1 else right)(self, *args)


def bias_of_each_rank(self: Any, input_: Tensor) -> Any:
    output, bias = right_row(self, input_)
    more = 0 if self.bias is None or self.skip_bias_add else self.tp_size - 1
    return output + more * (0 if self.bias is None else self.bias), bias


def local_sums(tensor: Tensor, group: Any, op: Any = dist.ReduceOp.SUM) -> Tensor:
    return tensor.clone() if op == dist.ReduceOp.SUM else all_reduce(tensor, group, op)


def tagged(owner: type, of_config: bool) -> Spoilt:
    """All parameters of a module say that they see the whole sequence, or that they do not."""
    build = owner.__init__

    def spoilt(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        build(self, config, *args, **kwargs)
        for param in self.parameters(recurse=False):
            if config.tensor_model_parallel_size > 1:
                param.sequence_parallel = of_config

    return patch(owner, "__init__", spoilt)


def whole_bias(self: Any, *args: Any, **kwargs: Any) -> None:
    build_row(self, *args, **kwargs)
    if self.bias is not None:
        self.bias.sequence_parallel = False


def block_with(change: Callable[[Block, int, int, int], Block]) -> Callable[..., Block]:
    def spoilt(length: int, rank: int, source: int) -> Block:
        return change(ring_block(length, rank, source), length, rank, source)

    return spoilt


def gradients_of_queries_alone(totals: Sequence[Tensor], *args: Any) -> None:
    lost = torch.zeros_like(totals[1]), torch.zeros_like(totals[2])
    add_gradients((totals[0], *lost), *args)


def contiguous(length: int, cp: int, rank: int, device: Any = None) -> Tensor:
    return torch.arange(length * cp, device=device).chunk(cp)[rank]


def gather_that_forgets(tensor: Tensor, tensor_parallel_output_grad: bool = True, group: Any = None) -> Tensor:
    return mappings.gather_from_sequence_parallel_region(tensor, False, group)


def gather_that_adds(tensor: Tensor, tensor_parallel_output_grad: bool = True, group: Any = None) -> Tensor:
    return mappings.gather_from_sequence_parallel_region(tensor, True, group)


def unsorted(self: Any, output: Tensor, way: Any) -> Tensor:
    rows = token_dispatcher.all_to_all_rows(output, way.received, way.sent, self.ep)
    return token_dispatcher._weighted_sum(rows, way).to(output.dtype)


def own_rows(rows: Tensor, counts: Sequence[int], group: Any) -> Tensor:
    return rows if group is None else rows.split(list(counts))[dist.get_rank(group)]


def declared_whole(param: Any, **declared: Any) -> None:
    declare_gradient(param)


def undeclared(param: Any, **declared: Any) -> None:
    """A router says nothing of its gradient."""
    param.sequence_parallel = False


right_row, build_row = layers.RowParallelLinear.forward, layers.RowParallelLinear.__init__
all_reduce, ring_block, add_gradients = mappings.all_reduce, ring.ring_block, ring.add_gradients
embed = layers.VocabParallelEmbedding.forward
exchanged = exchange._AllToAll.backward
summed = mappings.reduce_scatter_first

MUTATIONS = [
    # tensor parallelism
    Mutation("column: gradient not summed", TP, patch(layers, "start_all_reduce", lambda t, g: Done(t))),
    Mutation(
        "column: gradient summed twice", TP, patch(layers, "start_all_reduce", lambda t, g: Done(2 * all_reduce(t, g)))
    ),
    Mutation(
        "column: gradient averaged", TP, patch(layers, "start_all_reduce", lambda t, g: Done(all_reduce(t, g) / 2))
    ),
    Mutation("row: not summed", TP, forward_of(mappings._Reduce, remember(lambda t, g: t.clone()))),
    Mutation("row: averaged", TP, forward_of(mappings._Reduce, remember(lambda t, g: all_reduce(t, g) / 2))),
    Mutation(
        "row: the largest", TP, forward_of(mappings._Reduce, remember(lambda t, g: all_reduce(t, g, dist.ReduceOp.MAX)))
    ),
    Mutation(
        "row: gradient summed", TP, backward_of(mappings._Reduce, lambda ctx, grad: (all_reduce(grad, ctx.group), None))
    ),
    Mutation("row: bias on each rank", TP, patch(layers.RowParallelLinear, "forward", bias_of_each_rank)),
    Mutation(
        "embedding: no mask", TP, patch(layers.VocabParallelEmbedding, "forward", only_in_layout(embed, without_mask))
    ),
    Mutation(
        "embedding: a row further",
        TP,
        on_rank_1(layers.VocabParallelEmbedding, "forward", lambda out, *_: out.roll(1, 0)),
    ),
    Mutation("loss: sums of a rank", TP, patch(cross_entropy, "all_reduce", local_sums)),
    Mutation("weight gradient halved on a rank", TP, on_rank_1(layers, "_weight_gradient", lambda grad, *_: grad / 2)),
    Mutation("norm scaled on a rank", TP, on_rank_1(norms.LayerNorm, "forward", lambda out, *_: out * 1.01)),
    Mutation("GELU twice on a rank", TP, on_rank_1(mlp.F, "gelu", lambda out, *_: out + 0.1 * out.square())),
    Mutation("SwiGLU without its gate on a rank", MODERN, on_rank_1(mlp.F, "silu", lambda out, x: x)),
    Mutation(
        "attention scaled on a rank", TP, on_rank_1(attention.SelfAttention, "forward", lambda out, *_: out * 1.01)
    ),
    Mutation("rotary: the other way round on a rank", MODERN, on_rank_1(rotary, "_quarter_turn", lambda out, *_: -out)),
    Mutation("norm of queries declared whole", MODERN, patch(attention, "declare_gradient", declared_whole)),
    # sequence parallelism
    Mutation(
        "sp: gather, gradient not summed",
        SP,
        patch(layers, "start_reduce_scatter_first", lambda t, g: Done(mappings.split_first(t, g).contiguous())),
    ),
    Mutation(
        "sp: gather in another order",
        SP,
        patch(layers, "gather_first", lambda t, g: turned(mappings.gather_first(t, g))),
    ),
    Mutation(
        "sp: gathered again in another order",
        SP,
        patch(layers, "start_gather_first", lambda t, g: Done(turned(mappings.gather_first(t, g)))),
    ),
    Mutation(
        "sp: scatter without the sum",
        SP,
        forward_of(mappings._ReduceScatterFirst, remember(lambda t, g: mappings.split_first(t, g).contiguous())),
    ),
    Mutation(
        "sp: scatter to the other rank",
        SP,
        forward_of(mappings._ReduceScatterFirst, remember(lambda t, g: summed(turned(t), g))),
    ),
    Mutation(
        "sp: scatter, gradient doubled",
        SP,
        backward_of(mappings._ReduceScatterFirst, lambda ctx, grad: (2 * mappings.gather_first(grad, ctx.group), None)),
    ),
    Mutation("sp: norm tagged whole", SP, tagged(norms.LayerNorm, False)),
    Mutation("sp: bias of a row tagged whole", SP, patch(layers.RowParallelLinear, "__init__", whole_bias)),
    # context parallelism
    Mutation(
        "ring: own keys of the future",
        RING,
        patch(ring, "ring_block", block_with(lambda b, n, r, s: Block(b.queries, b.keys) if r == s else b)),
    ),
    Mutation(
        "ring: the tail of earlier keys",
        RING,
        patch(ring, "ring_block", block_with(lambda b, n, r, s: Block(b.queries, slice(n // 2, n)) if s < r else b)),
    ),
    Mutation("ring: gradients of keys lost", RING, patch(ring, "add_gradients", gradients_of_queries_alone)),
    Mutation("cp: positions cut contiguously", RING, patch(language_model_embedding, "positions_on_rank", contiguous)),
    Mutation("cp: rotary positions cut contiguously", ROTARY, patch(rotary, "positions_on_rank", contiguous)),
    Mutation(
        "cp: gathered keys forget gradients",
        GATHERED,
        patch(all_gather, "gather_from_sequence_parallel_region", gather_that_forgets),
    ),
    Mutation(
        "cp: gathered keys in the order of ranks",
        GATHERED,
        patch(all_gather, "join_sequence", lambda parts, dim, cp: parts),
    ),
    Mutation(
        "cp: heads in the order of ranks", EXCHANGED, patch(all_to_all, "join_sequence", lambda parts, dim, cp: parts)
    ),
    Mutation(
        "cp: exchange without its backward",
        EXCHANGED,
        backward_of(all_to_all._Exchange, lambda ctx, grad: (grad, None)),
    ),
    # experts
    Mutation(
        "experts: half of a gradient",
        EP,
        backward_of(exchange._AllToAll, lambda ctx, grad: (exchanged(ctx, grad)[0] / 2, None, None, None)),
    ),
    Mutation(
        "experts: rows not brought back in order",
        EP,
        patch(token_dispatcher.AllToAllTokenDispatcher, "combine", unsorted),
    ),
    Mutation(
        "experts: weights forgotten on a rank",
        EP_GATHERED,
        on_rank_1(token_dispatcher, "_weighted_sum", lambda out, *_: out * 1.1),
    ),
    Mutation(
        "experts: other ranks' rows not added", EP_GATHERED, patch(token_dispatcher, "reduce_scatter_rows", own_rows)
    ),
    Mutation(
        "experts: bias under tp declared whole", EXPERT_TP, patch(experts, "declare_gradient", lambda param, **_: None)
    ),
    Mutation("router declared whole under tp", MOE_TP, patch(router, "declare_gradient", undeclared)),
    Mutation(
        "experts: tokens gathered, gradients added",
        MOE_TP,
        patch(moe_layer, "gather_from_sequence_parallel_region", gather_that_adds),
    ),
]

# The module that the report names: where the first wrong output is, or the last wrong gradient.
PLACES = {
    "column: gradient not summed": ("backward", "decoder.final_layernorm"),
    "column: gradient summed twice": ("backward", "decoder.final_layernorm"),
    "column: gradient averaged": ("backward", "decoder.final_layernorm"),
    "row: not summed": ("forward", "embedding.word_embeddings"),
    "row: averaged": ("forward", "embedding.word_embeddings"),
    "row: the largest": ("forward", "embedding.word_embeddings"),
    "row: gradient summed": ("backward", "decoder.layers.1.mlp.linear_fc2"),
    "row: bias on each rank": ("forward", "decoder.layers.0.self_attention.linear_proj"),
    "embedding: no mask": ("forward", "embedding.word_embeddings"),
    "embedding: a row further": ("forward", "embedding.word_embeddings"),
    "loss: sums of a rank": ("forward", ""),
    "weight gradient halved on a rank": ("backward", "decoder.layers.1.mlp.linear_fc2"),
    "norm scaled on a rank": ("forward", "decoder.layers.0.input_layernorm"),
    "GELU twice on a rank": ("forward", "decoder.layers.0.mlp.linear_fc2"),
    "SwiGLU without its gate on a rank": ("forward", "decoder.layers.0.mlp.linear_fc2"),
    "attention scaled on a rank": ("forward", "decoder.layers.0.self_attention"),
    "rotary: the other way round on a rank": ("forward", "decoder.layers.0.self_attention.rotary"),
    "sp: gather, gradient not summed": ("backward", "decoder.final_layernorm"),
    "sp: gather in another order": ("forward", "decoder.layers.0.self_attention.linear_qkv"),
    "sp: gathered again in another order": ("backward", "decoder.layers.1.mlp.linear_fc1"),
    "sp: scatter without the sum": ("forward", "embedding.word_embeddings"),
    "sp: scatter to the other rank": ("forward", "embedding.word_embeddings"),
    "sp: scatter, gradient doubled": ("backward", "decoder.layers.1.mlp.linear_fc2"),
    "sp: norm tagged whole": ("backward", "decoder.final_layernorm"),
    "sp: bias of a row tagged whole": ("backward", "decoder.layers.1.mlp.linear_fc2"),
    "ring: own keys of the future": ("forward", "decoder.layers.0.self_attention.linear_proj"),
    "ring: the tail of earlier keys": ("forward", "decoder.layers.0.self_attention.linear_proj"),
    "ring: gradients of keys lost": ("backward", "decoder.layers.1.self_attention.linear_qkv"),
    "cp: positions cut contiguously": ("forward", "embedding"),
    "cp: rotary positions cut contiguously": ("forward", "decoder.layers.0.self_attention.rotary"),
    "cp: gathered keys forget gradients": ("backward", "decoder.layers.1.self_attention.linear_qkv"),
    "cp: gathered keys in the order of ranks": ("forward", "decoder.layers.0.self_attention.linear_proj"),
    "cp: heads in the order of ranks": ("forward", "decoder.layers.0.self_attention.linear_proj"),
    "cp: exchange without its backward": ("backward", "decoder.layers.1.self_attention.linear_qkv"),
    "experts: half of a gradient": ("backward", "decoder.layers.0.pre_mlp_layernorm"),
    "experts: rows not brought back in order": ("forward", "decoder.layers.0.mlp"),
    "experts: weights forgotten on a rank": ("forward", "decoder.layers.0.mlp"),
    "experts: other ranks' rows not added": ("forward", "decoder.layers.0.mlp"),
    "router declared whole under tp": ("backward", "decoder.layers.0.mlp.router"),
    "experts: tokens gathered, gradients added": ("backward", "decoder.layers.0.mlp.router"),
    "norm of queries declared whole": ("backward", "decoder.layers.1.self_attention.k_layernorm"),
}
