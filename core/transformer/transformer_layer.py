"""One pre-norm transformer layer."""

from __future__ import annotations

from torch import Tensor, nn

from core.context_parallel import PackedTokens
from core.groups.process_groups import ProcessGroups
from core.transformer.attention import SelfAttention
from core.transformer.dropout import hidden_dropout
from core.transformer.mlp import MLP
from core.transformer.norms import build_norm
from core.transformer.transformer_config import TransformerConfig


class TransformerLayer(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)); [s, b, hidden], the sequence split under sequence parallelism.

    number: the layer's, counted from 0 over the whole model; it says whether experts stand in the MLP's place.
    """

    def __init__(
        self,
        config: TransformerConfig,
        *,
        pg_collection: ProcessGroups | None = None,
        name: str | None = None,
        recompute_attention: bool = False,
        number: int = 0,
    ) -> None:
        super().__init__()
        self.config = config
        self.input_layernorm = build_norm(config, config.hidden_size)
        self.self_attention = SelfAttention(
            config,
            pg_collection=pg_collection,
            name=None if name is None else f"{name}.self_attention",
            recompute_core=recompute_attention,
        )
        self.pre_mlp_layernorm = build_norm(config, config.hidden_size)
        self.tp_size = self.self_attention.tp_size
        self.mlp = _build_mlp(config, pg_collection, None if name is None else f"{name}.mlp", number)

    def forward(self, hidden: Tensor, packed: PackedTokens | None = None) -> Tensor:
        """The next hidden state. packed: the tokens' documents and positions, where they are not one sequence."""
        hidden = hidden + self._dropout(self.self_attention(self.input_layernorm(hidden), packed))
        return hidden + self._dropout(self.mlp(self.pre_mlp_layernorm(hidden)))

    def _dropout(self, hidden: Tensor) -> Tensor:
        return hidden_dropout(
            hidden,
            self.config.hidden_dropout,
            training=self.training,
            tp_size=self.tp_size,
            is_split=self.config.sequence_parallel,
        )


def _build_mlp(
    config: TransformerConfig, pg_collection: ProcessGroups | None, name: str | None, number: int
) -> nn.Module:
    if not config.is_moe_layer(number):
        return MLP(config, pg_collection=pg_collection, name=name)
    from core.moe.moe_layer import MoELayer  # it is built from parts of this package, so it loads after them

    return MoELayer(config, pg_collection=pg_collection, name=name)
