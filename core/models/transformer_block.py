"""Transformer layers of one pipeline stage, with activation recomputation."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from core.context_parallel import PackedTokens
from core.groups.process_groups import ProcessGroups
from core.models.transformer_layer import TransformerLayer
from core.tensor_parallel import checkpoint
from core.transformer.norms import build_norm
from core.transformer.transformer_config import TransformerConfig


class TransformerBlock(nn.Module):
    """Transformer layers of one stage, and the final norm on the last stage.

    Args:
        config (TransformerConfig): Model configuration.
        layer_numbers (Sequence[int]): Layers, counted from 0 over all stages. Defaults to all.
        post_process (bool): True on the last stage.
        pg_collection (ProcessGroups): Process groups. Defaults to those of ``parallel_state``, if initialized.
        name (str): Module path in the full model, which seeds its weights.
    """

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
        """Apply all layers.

        Args:
            hidden (Tensor): [s, b, hidden], with the sequence split under sequence and context parallelism.
            packed (PackedTokens, optional): Documents of the tokens, if they are packed.
        """
        for position, layer in enumerate(self.layers):
            if position < self.num_full_recompute and self.training:
                hidden = checkpoint(layer, False, hidden, packed)
            else:
                hidden = layer(hidden, packed)
        return hidden if self.final_layernorm is None else self.final_layernorm(hidden)
