"""The layers of one pipeline stage, with recomputation."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from core.context_parallel import PackedTokens
from core.groups.process_groups import ProcessGroups
from core.tensor_parallel import checkpoint
from core.transformer.norms import build_norm
from core.transformer.transformer_config import TransformerConfig
from core.transformer.transformer_layer import TransformerLayer


class TransformerBlock(nn.Module):
    """Layers `layer_numbers` of the model, counted from 0 over all stages, and the last norm on the last stage."""

    def __init__(
        self,
        config: TransformerConfig,
        *,
        layer_numbers: Sequence[int] | None = None,
        post_process: bool = True,
        pg_collection: ProcessGroups | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__()
        numbers = range(config.num_layers) if layer_numbers is None else layer_numbers
        recomputed = len(numbers) if config.recompute_num_layers is None else config.recompute_num_layers
        self.num_full_recompute = recomputed if config.recompute_granularity == "full" else 0
        self.layers = nn.ModuleList(
            TransformerLayer(
                config,
                pg_collection=pg_collection,
                name=None if name is None else f"{name}.layers.{number}",
                recompute_modules=config.recomputed_parts if position < recomputed else (),
                number=number,
            )
            for position, number in enumerate(numbers)
        )
        self.global_names = {f"layers.{position}": f"layers.{number}" for position, number in enumerate(numbers)}
        self.final_layernorm = build_norm(config, config.hidden_size) if post_process else None

    def forward(self, hidden: Tensor, packed: PackedTokens | None = None) -> Tensor:
        """[s, b, hidden], the sequence split under sequence and context parallelism. packed: the tokens' documents."""
        for position, layer in enumerate(self.layers):
            if position < self.num_full_recompute and self.training:
                hidden = checkpoint(layer, False, hidden, packed)
            else:
                hidden = layer(hidden, packed)
        return hidden if self.final_layernorm is None else self.final_layernorm(hidden)
