"""What the tests of experts share: experts as a Python loop over tokens, and models that can be compared."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from core.distributed import DistributedDataParallel
from core.groups.process_groups import ProcessGroups
from core.moe import MoELayer
from core.tensor_parallel import draw_master, tensor_parallel_slice
from core.tensor_parallel.initialization import normal_init
from core.transformer import TransformerConfig

HIDDEN, FFN, EXPERTS = 6, 8, 4


def make_config(**changes: Any) -> TransformerConfig:
    """Four small experts in fp64, large weights, so that the choices differ and every gradient is far from zero."""
    settings: dict[str, Any] = dict(
        num_layers=2,
        hidden_size=HIDDEN,
        num_attention_heads=4,
        kv_channels=2,
        ffn_hidden_size=FFN,
        vocab_size=13,
        max_sequence_length=16,
        params_dtype=torch.float64,
        init_method_std=0.5,
        num_moe_experts=EXPERTS,
        moe_token_dispatcher_type="alltoall",
    )
    return TransformerConfig(**{**settings, **changes})


def add_noise(model: nn.Module, groups: ProcessGroups) -> None:
    """Biases that are not zero; the same ones in every layout."""
    for name, param in model.named_parameters():
        is_expert = not getattr(param, "allreduce", True)
        if "bias" not in name:
            continue
        tp, ep = ("expt_tp", groups.size("ep")) if is_expert else ("tp", 1)
        split = getattr(param, "tensor_model_parallel", False)
        shape = list(param.shape)
        shape[0] *= ep
        if split:
            shape[param.partition_dim] *= groups.size(tp)
        noise = draw_master(tuple(shape), normal_init(0.3), name, seed=5).to(param.dtype)
        param.data += my_slice(noise, param, groups)


def my_slice(whole: Tensor, param: nn.Parameter, groups: ProcessGroups) -> Tensor:
    """What this rank holds of a whole parameter or gradient."""
    is_expert = not getattr(param, "allreduce", True)
    tp = "expt_tp" if is_expert else "tp"
    if is_expert:
        whole = whole.chunk(groups.size("ep"), 0)[groups.rank("ep")]
    if getattr(param, "tensor_model_parallel", False):
        whole = tensor_parallel_slice(
            whole, param.partition_dim, groups.size(tp), groups.rank(tp), param.partition_stride
        )
    return whole


def tokens_of(rank: int, microbatch: int = 0, positions: int = 4, sequences: int = 2) -> Tensor:
    """[s, b, hidden], other ones on every rank and in every microbatch."""
    generator = torch.Generator().manual_seed(100 * rank + microbatch + 1)
    return torch.randn(positions, sequences, HIDDEN, generator=generator, dtype=torch.float64)


def loop_over_tokens(layer: MoELayer, hidden: Tensor, kept: Tensor | None = None) -> Tensor:
    """The layer's output token by token, from its weights; kept: choices [tokens, experts] that were not dropped."""
    config, weights = layer.config, layer.experts
    flat = hidden.reshape(-1, HIDDEN)
    rows = []
    for number, token in enumerate(flat):
        row = torch.zeros_like(token)
        for expert, weight in route(config, layer.router.weight @ token, layer.router.expert_bias):
            if kept is not None and not kept[number, expert]:
                continue
            wide = weights.weight1[expert] @ token
            wide = wide if weights.bias1 is None else wide + weights.bias1[expert]
            if config.activation == "swiglu":
                wide = F.silu(wide[:FFN]) * wide[FFN:]
            else:
                wide = F.gelu(wide)
            out = weights.weight2[expert] @ wide
            row = row + weight * (out if weights.bias2 is None else out + weights.bias2[expert])
        rows.append(row)
    return torch.stack(rows).view_as(hidden)


def route(config: TransformerConfig, logits: Tensor, bias: Tensor | None) -> list[tuple[int, Tensor]]:
    """(expert, weight) of one token, from sorting its scores."""
    k = config.moe_router_topk
    if config.moe_router_score_function == "sigmoid":
        scores = [1 / (1 + torch.exp(-logit)) for logit in logits]
        ranking = [float(s.detach()) + (0.0 if bias is None else float(bias[i])) for i, s in enumerate(scores)]
        best = sorted(range(len(scores)), key=lambda i: -ranking[i])[:k]
        total = sum(scores[i] for i in best) if k > 1 else 1.0
        weights = [scores[i] / total for i in best]
    else:
        best = sorted(range(len(logits)), key=lambda i: -float(logits[i].detach()))[:k]
        exps = [torch.exp(logit) for logit in logits]
        total = sum(exps) if config.moe_router_pre_softmax else sum(exps[i] for i in best)
        weights = [exps[i] / total for i in best]
    factor = config.moe_router_topk_scaling_factor or 1.0
    return [(expert, weight * factor) for expert, weight in zip(best, weights, strict=True)]


def balance_loss_by_hand(config: TransformerConfig, logits: Tensor) -> Tensor:
    """experts * sum over experts of (mean probability) * (share of the choices), of [tokens, experts]."""
    scores = torch.sigmoid(logits) if config.moe_router_score_function == "sigmoid" else torch.exp(logits)
    scores = scores / scores.sum(dim=1, keepdim=True)
    counts = [0] * EXPERTS
    for row in logits:
        for expert, _ in route(config, row, None):
            counts[expert] += 1
    mean = scores.mean(dim=0)
    return EXPERTS * sum(mean[i] * counts[i] / sum(counts) for i in range(EXPERTS))


def capacity_by_hand(config: TransformerConfig, logits: Tensor) -> Tensor:
    """Choices [tokens, experts] that fit, the most probable (or the first) ones of each expert."""
    factor = config.moe_expert_capacity_factor
    assert factor is not None
    limit = math.ceil(len(logits) * config.moe_router_topk / EXPERTS * factor)
    kept = torch.zeros(len(logits), EXPERTS, dtype=torch.bool)
    wishes: list[list[tuple[float, int]]] = [[] for _ in range(EXPERTS)]
    for number, row in enumerate(logits):
        for expert, weight in route(config, row, None):
            wishes[expert].append((-float(weight.detach()), number))
    for expert, wish in enumerate(wishes):
        if config.moe_token_drop_policy == "probs":
            wish.sort()
        for _, number in wish[:limit]:
            kept[number, expert] = True
    return kept


def assert_close(name: str, got: Tensor, expected: Tensor, *, moved: bool = True) -> None:
    """Equal to 1e-10 of the largest value, and the reference is no zero."""
    assert got.shape == expected.shape, f"{name}: {list(got.shape)} is not {list(expected.shape)}"
    error, scale = (got - expected).abs().max().item(), expected.abs().max().item()
    assert error <= 1e-10 * max(scale, 1e-3), f"{name}: off by {error:.3g}, largest value {scale:.3g}"
    assert not moved or scale > 1e-5, f"{name}: the reference itself is zero"


def assert_grads(
    ddp: DistributedDataParallel, grads: dict[str, Tensor], reference: nn.Module, still: tuple[str, ...] = ()
) -> None:
    """This rank's slices of the reference's gradients, by name; `still`: names that may have none."""
    groups = ddp.groups
    expected = dict(reference.named_parameters())
    assert grads.keys() == expected.keys()
    for name, param in ddp.module.named_parameters():
        whole = expected[name].grad
        whole = torch.zeros_like(expected[name]) if whole is None else whole
        moved = whole.abs().max().item() > 1e-5
        assert moved or any(part in name for part in still), f"{name}: the reference itself is zero"
        assert_close(name, grads[name], my_slice(whole, param, groups), moved=False)


def sum_over(tensor: Tensor, group: Any) -> Tensor:
    """The sum over a group, in new memory."""
    total = tensor.clone()
    dist.all_reduce(total, group=group)
    return total
