"""State of expert routers that changes once in each global batch, ours and Megatron Core's (0.16 to 0.20).

Megatron's routers count tokens in buffers, and rely on Megatron's finalize_model_grads to read and clear them. A
counter that nothing clears gives a wrong auxiliary loss from the second step on, without any error.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from core.distributed.wire.collectives import Collectives
from core.groups.process_groups import ProcessGroups

MEGATRONS_EXPERTS = "megatron.core.transformer.moe."
# Buffers that `update_routers` reads and clears, and copies of weights for inference, which no training step changes.
KNOWN_BUFFERS = frozenset(
    {"expert_bias", "local_tokens_per_expert", "global_tokens_per_expert", "ga_steps"}
    | {"qb_beta", "qb_beta_accum", "qb_beta_count", "_fc1_weight", "_fc2_weight"}
)
# A module with one of these is a router; the wrap finds them once, since absent attributes are slow to look up.
ROUTER_STATE = ("expert_bias", "qb_beta_accum", "reset_global_aux_loss_tracker")
BALANCING = frozenset({"none", "sinkhorn", "aux_loss", "seq_aux_loss", "global_aux_loss", "quantile_balancing"})


def refuse_unknown_state(modules: Mapping[str, nn.Module], config: Any) -> None:
    """Reject expert layers of Megatron Core with state that ``update_routers`` does not know.

    Raises ValueError if a buffer, or the way of load balancing, is unknown.
    """
    experts = {name: part for name, part in modules.items() if type(part).__module__.startswith(MEGATRONS_EXPERTS)}
    for name, part in experts.items():
        unknown = sorted({buffer for buffer, _ in part.named_buffers(recurse=False)} - KNOWN_BUFFERS)
        if unknown:
            raise ValueError(
                f"module {name!r} is a {type(part).__name__} of Megatron Core with the buffer {unknown[0]!r}, and it "
                "is unknown whether Megatron's finalize_model_grads updates it in each step; use megatron-core "
                "0.16 to 0.20, or finalize with Megatron's own function"
            )
    named = getattr(config, "moe_router_load_balancing_type", "none") if experts else "none"
    unknown = sorted(set([named] if isinstance(named, str) else named) - BALANCING)
    if unknown:
        raise ValueError(
            f"moe_router_load_balancing_type is {unknown[0]!r} with Megatron Core's expert layers, and "
            f"finalize_model_grads knows {', '.join(sorted(BALANCING))}; choose one of these"
        )


def update_routers(routers: Sequence[Any], config: Any, collectives: Collectives, groups: ProcessGroups) -> None:
    """Update the biases of all routers from the tokens of the global batch, and clear what the step counted.

    Collective over 'tp_dp_cp' if the config enables expert biases, and over 'dp_cp' with quantile balancing.
    """
    if getattr(config, "moe_router_enable_expert_bias", False):
        _move_expert_biases(routers, config.moe_router_bias_update_rate, collectives, groups)
    _set_quantile_biases(routers, config, collectives, groups)
    for router in routers:
        if getattr(router, "reset_global_aux_loss_tracker", None) is not None:
            router.reset_global_aux_loss_tracker()


def _move_expert_biases(parts: Sequence[Any], rate: float, collectives: Collectives, groups: ProcessGroups) -> None:
    """Move every router's bias towards an even load (DeepSeek-V3, arXiv:2412.19437, section 2.1.2).

    A router module in training mode has ``expert_bias`` [experts] and ``local_tokens_per_expert`` [experts]. The latter
    counts this rank's tokens since the last update. Counts are added over all ranks that route different tokens, then
    set to zero.
    """
    routers = [part for part in parts if getattr(part, "expert_bias", None) is not None]
    routers = [part for part in routers if part.training and not getattr(part, "frozen_expert_bias", False)]
    if not routers:
        return
    counts = torch.cat([router.local_tokens_per_expert for router in routers])
    collectives.all_reduce(counts, groups.require("tp_dp_cp"), "the counts of the router's experts").wait()
    sizes = [router.local_tokens_per_expert.numel() for router in routers]
    for router, tokens in zip(routers, counts.split(sizes), strict=True):
        underloaded = tokens.float().mean() - tokens.float()
        router.expert_bias.add_(torch.sign(underloaded), alpha=rate)
        router.local_tokens_per_expert.zero_()


def _set_quantile_biases(parts: Sequence[Any], config: Any, collectives: Collectives, groups: ProcessGroups) -> None:
    """Set every router's bias to the mean of the quantiles that the step's microbatches found.

    A router has ``qb_beta`` [experts], their sum ``qb_beta_accum`` [experts] and their number ``qb_beta_count`` [].
    Each quantile is over the tokens of all tensor and context parallel ranks, so only data ranks differ.
    """
    routers = [part for part in parts if getattr(part, "qb_beta_accum", None) is not None]
    training = [router for router in routers if router.training]
    if training:
        found = [router.qb_beta_accum / router.qb_beta_count.clamp(min=1) for router in training]
        means = torch.cat(found)
        collectives.all_reduce(means, groups.require("dp_cp"), "the quantiles of the router's experts").wait()
        means /= groups.size("dp_cp")
        kept = getattr(config, "moe_router_quantile_balancing_ema", 0.0)
        for router, mean in zip(training, means.split([part.numel() for part in found]), strict=True):
            moved = router.qb_beta.lerp(mean.to(router.qb_beta.dtype), 1.0 - kept)
            router.qb_beta.copy_(moved - moved.mean())
    for router in routers:
        router.qb_beta_accum.zero_()
        router.qb_beta_count.zero_()
