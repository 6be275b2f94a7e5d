"""Shared expert: an MLP that processes every token, in addition to the routed experts."""

from __future__ import annotations

import dataclasses

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from core.groups.process_groups import ProcessGroups
from core.tensor_parallel import draw_master
from core.tensor_parallel.initialization import normal_init
from core.transformer.mlp import MLP
from core.transformer.transformer_config import TransformerConfig


class SharedExpert(nn.Module):
    """Dense MLP split over tensor parallelism, with an optional sigmoid gate per token.

    Under sequence parallelism a rank's gate only sees its own positions, so its gradient is partial.

    Args:
        config (TransformerConfig): Configuration with ``moe_shared_expert_intermediate_size``.
        pg_collection (ProcessGroups): Process groups. Defaults to those of ``parallel_state``, if initialized.
        name (str): Module path in the full model, which seeds the weights.
        recompute_activation (bool): See ``core.transformer.MLP``.
    """

    def __init__(
        self,
        config: TransformerConfig,
        *,
        pg_collection: ProcessGroups | None = None,
        name: str | None = None,
        recompute_activation: bool = False,
    ) -> None:
        super().__init__()
        size = config.moe_shared_expert_intermediate_size
        shape = dataclasses.replace(
            config,
            ffn_hidden_size=size,
            num_moe_experts=None,
            expert_model_parallel_size=1,
            expert_tensor_parallel_size=None,
            recompute_granularity=None,
        )
        self.mlp = MLP(
            shape,
            pg_collection=pg_collection,
            name=None if name is None else f"{name}.mlp",
            recompute_activation=recompute_activation,
        )
        self.gate_weight: nn.Parameter | None = None
        if config.moe_shared_expert_gate:
            weight = torch.empty(1, config.hidden_size, dtype=config.params_dtype)
            if config.perform_initialization:
                full_name = None if name is None else f"{name}.gate_weight"
                weight.copy_(
                    draw_master(tuple(weight.shape), normal_init(config.init_method_std), full_name, config.init_seed)
                )
            self.gate_weight = nn.Parameter(weight)
            self.gate_weight.sequence_parallel = config.sequence_parallel

    def forward(self, hidden: Tensor) -> Tensor:
        """Apply the MLP to [s, b, hidden], or to [s / tp, b, hidden] under sequence parallelism."""
        output: Tensor = self.mlp(hidden)
        return output if self.gate_weight is None else output * torch.sigmoid(F.linear(hidden, self.gate_weight))
