"""Mixture-of-experts layer, a replacement for a transformer layer's MLP."""

from __future__ import annotations

from collections.abc import Collection

from einops import rearrange
from torch import Tensor, nn

from core.groups.process_groups import ProcessGroups
from core.moe.experts import Experts
from core.moe.router import TopKRouter
from core.moe.shared_experts import SharedExpert
from core.moe.token_dispatcher import build_dispatcher
from core.tensor_parallel import checkpoint
from core.tensor_parallel.mappings import (
    gather_from_sequence_parallel_region,
    resolve_groups,
    scatter_to_sequence_parallel_region,
)
from core.transformer.transformer_config import TransformerConfig


class MoELayer(nn.Module):
    """Mixture-of-experts layer with a router, experts and token dispatch.

    Input and output have shape [s, b, hidden], or [s / tp, b, hidden] under sequence parallelism. Inside, every rank
    has different tokens: a sequence that is not yet split over tensor parallelism is split here. The experts'
    parallelism is therefore independent of tp, and any expt_tp * ep that divides the ranks of a stage works.

    Args:
        config (TransformerConfig): Configuration with ``num_moe_experts``.
        pg_collection (ProcessGroups): Process groups. Defaults to those of ``parallel_state``, if initialized.
        name (str): Module path in the full model, which seeds the weights.
        recompute_modules (Collection[str]): Parts that backward recomputes, from ``shared_experts`` and ``moe_act``.
    """

    def __init__(
        self,
        config: TransformerConfig,
        *,
        pg_collection: ProcessGroups | None = None,
        name: str | None = None,
        recompute_modules: Collection[str] = (),
    ) -> None:
        super().__init__()
        groups = resolve_groups(pg_collection)
        if config.num_moe_experts is None:
            raise ValueError("MoELayer needs config.num_moe_experts")
        _check_groups(config, groups)
        self.config = config

        def path(part: str) -> str | None:
            return None if name is None else f"{name}.{part}"

        self.router = TopKRouter(config, pg_collection=groups, name=path("router"))
        again = "moe_act" in recompute_modules
        self.experts = Experts(config, pg_collection=groups, name=path("experts"), recompute_activation=again)
        self.recompute_shared = "shared_experts" in recompute_modules
        self.shared_experts: SharedExpert | None = None
        if config.moe_shared_expert_intermediate_size is not None:
            self.shared_experts = SharedExpert(
                config, pg_collection=groups, name=path("shared_experts"), recompute_activation=again
            )
        self.dispatcher = build_dispatcher(config.moe_token_dispatcher_type, config.num_moe_experts, groups)
        # Without sequence parallelism each tensor-parallel rank has all tokens, and takes its part of them.
        self.splits_over = groups.tp if groups.size("tp") > 1 and not config.sequence_parallel else None

    def forward(self, hidden: Tensor) -> Tensor:
        """Combine each token's expert outputs, weighted by the router's probabilities.

        This is a collective over tp, and over the ranks that share the experts.
        """
        shared = None if self.shared_experts is None else self._shared(self.shared_experts, hidden)
        if self.splits_over is not None:
            hidden = scatter_to_sequence_parallel_region(hidden, self.splits_over)
        sequences = hidden.shape[1]
        tokens = rearrange(hidden, "s b h -> (s b) h")
        probs, choices = self.router(tokens, sequences)
        routed = self.dispatcher.dispatch(tokens, probs, choices)
        output = self.dispatcher.combine(self.experts(routed.tokens, routed.tokens_per_expert), routed)
        output = rearrange(output, "(s b) h -> s b h", b=sequences)
        if self.splits_over is not None:
            output = gather_from_sequence_parallel_region(output, False, self.splits_over)
        return output if shared is None else output + shared

    def _shared(self, experts: SharedExpert, hidden: Tensor) -> Tensor:
        output: Tensor = (
            checkpoint(experts, False, hidden) if self.recompute_shared and self.training else experts(hidden)
        )
        return output


def _check_groups(config: TransformerConfig, groups: ProcessGroups) -> None:
    for field, size, group in (
        ("expert_model_parallel_size", config.expert_model_parallel_size, "ep"),
        ("expert_tensor_parallel_size", config.expert_tensor_parallel, "expt_tp"),
    ):
        if groups.size(group) != size:
            raise ValueError(
                f"config.{field} is {size} and the group '{group}' has {groups.size(group)} ranks; call parallel_state."
                f"initialize_model_parallel with the same size, or pass pg_collection"
            )
