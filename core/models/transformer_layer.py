"""One pre-norm transformer layer."""

from __future__ import annotations

from collections.abc import Collection
from functools import partial

from torch import Tensor, nn

from core.context_parallel import PackedTokens
from core.groups.process_groups import ProcessGroups
from core.moe import MoELayer
from core.tensor_parallel import checkpoint
from core.tensor_parallel.unsaved_output import run_unsaved
from core.transformer.attention import SelfAttention
from core.transformer.dropout import hidden_dropout
from core.transformer.mlp import MLP
from core.transformer.norms import build_norm
from core.transformer.transformer_config import TransformerConfig


class TransformerLayer(nn.Module):
    """Pre-norm layer: x + attention(norm(x)), then x + mlp(norm(x)).

    Input and output have shape [s, b, hidden], with the sequence split under sequence parallelism.

    Args:
        config (TransformerConfig): Model configuration.
        pg_collection (ProcessGroups): Process groups. Defaults to those of ``parallel_state``, if initialized.
        name (str): Module path in the full model, which seeds its weights.
        recompute_attention (bool): Same as 'core_attn' in ``recompute_modules``.
        number (int): Layer index in the full model, which decides if experts replace the MLP.
        recompute_modules (Collection[str]): Parts that backward recomputes, named as in TransformerConfig.
    """

    def __init__(
        self,
        config: TransformerConfig,
        *,
        pg_collection: ProcessGroups | None = None,
        name: str | None = None,
        recompute_attention: bool = False,
        number: int = 0,
        recompute_modules: Collection[str] = (),
    ) -> None:
        super().__init__()
        self.config = config
        norms_again = "layernorm" in recompute_modules
        self.input_layernorm = build_norm(config, config.hidden_size, recompute=norms_again)
        self.self_attention = SelfAttention(
            config,
            pg_collection=pg_collection,
            name=None if name is None else f"{name}.self_attention",
            recompute_core=recompute_attention or "core_attn" in recompute_modules,
        )
        self.pre_mlp_layernorm = build_norm(config, config.hidden_size, recompute=norms_again)
        self.tp_size = self.self_attention.tp_size
        self.recompute_mlp = ("moe" if config.is_moe_layer(number) else "mlp") in recompute_modules
        # Parts inside a checkpoint are recomputed already.
        inner = () if self.recompute_mlp else recompute_modules
        self.mlp = _build_mlp(config, pg_collection, None if name is None else f"{name}.mlp", number, inner)

    def forward(self, hidden: Tensor, packed: PackedTokens | None = None) -> Tensor:
        """Compute the next hidden state.

        Args:
            hidden (Tensor): [s, b, hidden].
            packed (PackedTokens, optional): Documents and positions of the tokens, if they are not one sequence each.
        """
        normed = self.input_layernorm(hidden)
        output = run_unsaved(self.self_attention, normed, packed)
        del normed
        hidden = hidden + self._dropout(output)
        normed = self.pre_mlp_layernorm(hidden)
        again = self.recompute_mlp and self.training
        output = run_unsaved(partial(checkpoint, self.mlp, False) if again else self.mlp, normed)
        del normed
        return hidden + self._dropout(output)

    def _dropout(self, hidden: Tensor) -> Tensor:
        return hidden_dropout(
            hidden,
            self.config.hidden_dropout,
            training=self.training,
            tp_size=self.tp_size,
            is_split=self.config.sequence_parallel,
        )


def _build_mlp(
    config: TransformerConfig,
    pg_collection: ProcessGroups | None,
    name: str | None,
    number: int,
    recompute_modules: Collection[str],
) -> nn.Module:
    if not config.is_moe_layer(number):
        again = "mlp_act" in recompute_modules
        return MLP(config, pg_collection=pg_collection, name=name, recompute_activation=again)
    return MoELayer(config, pg_collection=pg_collection, name=name, recompute_modules=recompute_modules)
