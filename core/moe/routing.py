"""Choice of experts for each token, their weights, and load-balancing losses: pure functions of logits.

Logits, probabilities and choices are [tokens, experts]. A choice is a boolean; a probability is 0 if not chosen.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def choose(
    logits: Tensor,
    topk: int,
    *,
    score_function: str = "softmax",
    pre_softmax: bool = False,
    expert_bias: Tensor | None = None,
    scaling_factor: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Choose the ``topk`` experts of each token from logits [tokens, experts]. Return probabilities and choices.

    ``expert_bias`` [experts] (DeepSeek-V3, arXiv:2412.19437, section 2.1.2) is added to sigmoid scores for the choice
    only. The weight of an expert is its unbiased score, so the bias needs no gradient. ``pre_softmax`` applies softmax
    over all experts before the choice, instead of over the chosen ones after it.
    """
    if score_function == "sigmoid":
        scores = torch.sigmoid(logits)
        ranking = scores if expert_bias is None else scores + expert_bias
        experts = ranking.detach().topk(topk, dim=-1).indices
        chosen = scores.gather(-1, experts)
        if topk > 1:
            chosen = chosen / (chosen.sum(dim=-1, keepdim=True) + 1e-20)
    elif pre_softmax:
        chosen, experts = torch.softmax(logits, dim=-1).topk(topk, dim=-1)
    else:
        chosen, experts = logits.topk(topk, dim=-1)
        chosen = torch.softmax(chosen, dim=-1)
    if scaling_factor is not None:
        chosen = chosen * scaling_factor
    probs = torch.zeros_like(logits).scatter(-1, experts, chosen)
    choices = torch.zeros_like(logits, dtype=torch.bool).scatter(-1, experts, True)
    return probs, choices


def balance_scores(logits: Tensor, score_function: str) -> Tensor:
    """Return each token's differentiable scores of all experts, normalized to sum 1."""
    if score_function == "sigmoid":
        scores = torch.sigmoid(logits)
        return scores / (scores.sum(dim=-1, keepdim=True) + 1e-20)
    return torch.softmax(logits, dim=-1)


def expert_capacity(tokens: int, topk: int, experts: int, factor: float) -> int:
    """Return the maximum number of tokens that an expert accepts from one rank: ``factor`` times an even share."""
    return math.ceil(tokens * topk / experts * factor)


def drop_overflow(probs: Tensor, choices: Tensor, capacity: int, policy: str) -> tuple[Tensor, Tensor]:
    """Keep at most ``capacity`` choices of each expert, and return the remaining probabilities and choices.

    Policy 'position' keeps the first tokens; otherwise the most probable choices are kept. A dropped choice contributes
    nothing, and the other weights of the token are unchanged.
    """
    if capacity >= choices.shape[0]:
        return probs, choices
    if policy == "position":
        kept = choices & (choices.cumsum(dim=0) <= capacity)
    else:
        ranking = probs.detach().masked_fill(~choices, -1.0)
        best = ranking.topk(capacity, dim=0).indices
        kept = choices & torch.zeros_like(choices).scatter(0, best, True)
    return probs * kept, kept


def load_balancing_loss(score_sums: Tensor, tokens: int, counts: Tensor) -> Tensor:
    """Compute Switch Transformer's loss (arXiv:2101.03961, equation 4) per row of [..., experts]. 1 for an even load.

    Args:
        score_sums: ``balance_scores`` summed over this rank's tokens.
        tokens: Number of tokens on all ranks that share the loss. Their values sum to it.
        counts: Choices of each expert over everything that the load is measured on, without a gradient.
    """
    share = counts / counts.sum(dim=-1, keepdim=True).clamp(min=1)
    return counts.shape[-1] * (score_sums / max(tokens, 1) * share).sum(dim=-1)


def z_loss(logits: Tensor, tokens: int) -> Tensor:
    """Compute this rank's part of the mean squared log-sum-exp (ST-MoE, arXiv:2202.08906, equation 5).

    ``tokens`` is the number of tokens on all ranks that share the loss.
    """
    return torch.logsumexp(logits, dim=-1).square().sum() / max(tokens, 1)
