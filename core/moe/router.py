"""Top-k router: a linear layer that chooses the experts of a token, with load-balancing losses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from core.distributed.contract.gradient_contract import declare_gradient
from core.groups.process_groups import ProcessGroups
from core.moe.auxiliary_loss import MoEAuxLossAutoScaler
from core.moe.routing import balance_scores, choose, drop_overflow, expert_capacity, load_balancing_loss, z_loss
from core.tensor_parallel import draw_master
from core.tensor_parallel.initialization import normal_init
from core.tensor_parallel.mappings import resolve_groups
from core.transformer.transformer_config import TransformerConfig
from core.watch.waiting import waiting

DTYPES = {"fp32": torch.float32, "fp64": torch.float64}


class TopKRouter(nn.Module):
    """Router that maps tokens [tokens, hidden] to probabilities and choices [tokens, experts].

    See ``core.moe.routing`` for the choice. The tensor-parallel ranks route different tokens, so the gradient of the
    weight is partial there. After a forward, ``losses`` has this rank's part of the auxiliary losses by name,
    multiplied by their coefficients. The sum over the ranks of 'tp_cp' is the loss of their data rank.

    Args:
        config (TransformerConfig): Configuration with ``num_moe_experts``.
        pg_collection (ProcessGroups): Process groups. Defaults to those of ``parallel_state``, if initialized.
        name (str): Module path in the full model, which seeds the weight.
    """

    expert_bias: Tensor | None
    local_tokens_per_expert: Tensor | None

    def __init__(
        self, config: TransformerConfig, *, pg_collection: ProcessGroups | None = None, name: str | None = None
    ) -> None:
        super().__init__()
        if config.num_moe_experts is None:
            raise ValueError("TopKRouter needs config.num_moe_experts")
        self.config = config
        self.num_experts: int = config.num_moe_experts
        self.groups = resolve_groups(pg_collection)
        shape = (self.num_experts, config.hidden_size)
        self.weight = nn.Parameter(torch.empty(shape, dtype=config.params_dtype))
        if config.perform_initialization:
            full_name = None if name is None else f"{name}.weight"
            with torch.no_grad():
                self.weight.copy_(draw_master(shape, normal_init(config.init_method_std), full_name, config.init_seed))
        self.weight.sequence_parallel = config.sequence_parallel
        if self.groups.size("tp") > 1:
            declare_gradient(self.weight, partial_over=("tp",))
        has_bias = config.moe_router_enable_expert_bias
        self.register_buffer("expert_bias", torch.zeros(self.num_experts) if has_bias else None)
        counts = torch.zeros(self.num_experts, dtype=torch.int64) if has_bias else None
        self.register_buffer("local_tokens_per_expert", counts, persistent=False)
        self.sharing = 1
        if self.groups.size("tp") * self.groups.size("cp") > 1:
            self.groups.require("tp_cp")
            self.sharing = self.groups.size("tp_cp")
        self.losses: dict[str, Tensor] = {}

    def forward(self, tokens: Tensor, sequences: int = 1) -> tuple[Tensor, Tensor]:
        """Choose the experts of each token. Collective over the ranks that balance their load together.

        Args:
            tokens (Tensor): [positions * sequences, hidden].
            sequences (int, optional): Number of sequences among the tokens.

        Returns:
            Probabilities and choices, [tokens, experts] each.
        """
        config = self.config
        dtype = DTYPES[config.moe_router_dtype] if config.moe_router_dtype else tokens.dtype
        logits = F.linear(tokens.to(dtype), self.weight.to(dtype))
        if logits.dtype in (torch.float16, torch.bfloat16):
            logits = logits.float()
        probs, choices = choose(
            logits,
            config.moe_router_topk,
            score_function=config.moe_router_score_function,
            pre_softmax=config.moe_router_pre_softmax,
            expert_bias=self.expert_bias,
            scaling_factor=config.moe_router_topk_scaling_factor,
        )
        # Without gradients it is an evaluation, or the first run of a checkpoint, whose second run comes here again.
        if self.training and torch.is_grad_enabled():
            if self.local_tokens_per_expert is not None:
                probs = _count(probs, self.local_tokens_per_expert, choices.sum(dim=0))
            probs = self._with_losses(probs, logits, choices, sequences)
        if config.moe_expert_capacity_factor is not None:
            capacity = expert_capacity(
                tokens.shape[0], config.moe_router_topk, self.num_experts, config.moe_expert_capacity_factor
            )
            probs, choices = drop_overflow(probs, choices, capacity, config.moe_token_drop_policy)
        return probs, choices

    def _with_losses(self, probs: Tensor, logits: Tensor, choices: Tensor, sequences: int) -> Tensor:
        config = self.config
        tokens = logits.shape[0] * self.sharing
        losses: dict[str, Tensor] = {}
        if config.moe_aux_loss_coeff > 0.0 and config.moe_router_load_balancing_type != "none":
            kind = config.moe_router_load_balancing_type
            losses[kind] = config.moe_aux_loss_coeff * self._balance(kind, logits, choices, sequences)
        if config.moe_z_loss_coeff:
            losses["z_loss"] = config.moe_z_loss_coeff * z_loss(logits, tokens)
        self.losses = {name: loss.detach() for name, loss in losses.items()}
        # Gradients are added over tp and cp, and then divided by all data ranks, cp among them, or by the tokens.
        scale = tokens if config.calculate_per_token_loss else self.groups.size("cp")
        for loss in losses.values():
            probs = MoEAuxLossAutoScaler.apply(probs, loss * scale)
        return probs

    def _balance(self, kind: str, logits: Tensor, choices: Tensor, sequences: int) -> Tensor:
        scores = balance_scores(logits, self.config.moe_router_score_function)
        if kind == "seq_aux_loss":
            by_sequence = "(position sequence) expert -> position sequence expert"
            score_sums = rearrange(scores, by_sequence, sequence=sequences).sum(dim=0)
            counts = self._total(rearrange(choices, by_sequence, sequence=sequences).sum(dim=0), "tp_cp")
            return load_balancing_loss(score_sums, logits.shape[0] // sequences * self.sharing, counts).mean()
        counts = self._total(choices.sum(dim=0), "tp_dp_cp" if kind == "global_aux_loss" else "tp_cp")
        return load_balancing_loss(scores.sum(dim=0), logits.shape[0] * self.sharing, counts)

    def _total(self, counts: Tensor, axes: str) -> Tensor:
        """Sum the counts over the ranks whose tokens share one load balance."""
        several = any(self.groups.size(axis) > 1 for axis in axes.split("_"))
        if several:
            group = self.groups.require(axes)
            with waiting("the sum of the experts' loads", group):
                dist.all_reduce(counts, group=group)
        return counts

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> TopKRouter:
        """Convert the module but keep the expert bias in fp32, because bf16 would round its small updates away."""
        before = self.expert_bias
        super()._apply(fn, recurse)
        if before is not None and self.expert_bias is not None:
            self.expert_bias = before.to(self.expert_bias.device)
        return self


def _count(probs: Tensor, total: Tensor, counts: Tensor) -> Tensor:
    """Return ``probs``, and add ``counts`` to ``total`` once, in backward.

    A checkpoint runs the forward twice (with gradients enabled both times if it is not reentrant), but backward only
    once. If no gradient is needed so far, the counts are added immediately.
    """
    if probs.requires_grad:
        counted: Tensor = _CountInBackward.apply(probs, total, counts)
        return counted
    total += counts
    return probs


class _CountInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, probs: Tensor, total: Tensor, counts: Tensor) -> Tensor:
        ctx.total, ctx.counts = total, counts
        return probs.view_as(probs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        if ctx.counts is not None:  # a second loss of the same forward comes here again
            ctx.total += ctx.counts
            ctx.counts = None
        return grad, None, None
