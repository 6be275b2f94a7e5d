"""Causal self-attention with heads split over tensor parallelism and positions over context parallelism."""

from __future__ import annotations

import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from core.context_parallel import (
    PackedTokens,
    context_parallel_attention,
    context_parallel_group,
    visible_tokens,
)
from core.distributed.contract.gradient_contract import declare_gradient
from core.groups.process_groups import ProcessGroups
from core.tensor_parallel import ColumnParallelLinear, RowParallelLinear, checkpoint
from core.tensor_parallel.initialization import normal_init
from core.tensor_parallel.mappings import group_rank, group_size
from core.transformer.dropout import dropout_stream
from core.transformer.norms import build_norm
from core.transformer.rotary import RotaryEmbedding
from core.transformer.transformer_config import TransformerConfig


class SelfAttention(nn.Module):
    """Causal self-attention: QKV projection, scaled dot-product attention, and output projection.

    Input and output have shape [s, b, hidden], or [s / tp, b, hidden] under sequence parallelism. A query group is one
    key/value head with its query heads. Rank r has groups / tp of them, starting at r * groups / tp. Under context
    parallelism s is this rank's part of the sequence, and attention is the only layer that communicates over it.

    Args:
        config (TransformerConfig): Model configuration.
        pg_collection (ProcessGroups): Process groups. Defaults to those of ``parallel_state``, if initialized.
        name (str): Module path in the full model, which seeds its weights.
        recompute_core (bool): Recompute attention without its projections in backward.
    """

    def __init__(
        self, config: TransformerConfig, *, pg_collection: ProcessGroups | None = None, name: str | None = None,
        recompute_core: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        self.config = config
        self.cp_group = context_parallel_group(config, pg_collection)
        self.recompute_core = recompute_core
        self.heads_per_group = config.num_attention_heads // config.query_groups
        # The rows of one query group are contiguous: its queries, its key, its value. So a slice has complete groups.
        self.linear_qkv = ColumnParallelLinear(
            config.hidden_size,
            config.query_groups * (self.heads_per_group + 2) * config.head_size,
            config=config,
            init_method=normal_init(config.init_method_std),
            bias=config.add_bias_linear,
            pg_collection=pg_collection,
            name=None if name is None else f"{name}.linear_qkv",
        )
        # An optimizer of matrices may treat the three apart.
        group_rows = (self.heads_per_group * config.head_size, config.head_size, config.head_size)
        self.linear_qkv.weight.qkv_split_rows = group_rows  # type: ignore[union-attr]
        self.linear_proj = RowParallelLinear(
            config.num_attention_heads * config.head_size,
            config.hidden_size,
            config=config,
            init_method=normal_init(config.output_init_method_std),
            bias=config.add_bias_linear,
            pg_collection=pg_collection,
            name=None if name is None else f"{name}.linear_proj",
        )
        self.tp_size = self.linear_qkv.tp_size
        self.rotary: RotaryEmbedding | None = None
        if config.position_embedding_type == "rope":
            place = group_size(self.cp_group), group_rank(self.cp_group)
            self.rotary = RotaryEmbedding(config.head_size, config.rotary_base, *place)
        self.q_layernorm: nn.Module | None = None
        self.k_layernorm: nn.Module | None = None
        if config.qk_layernorm:
            self.q_layernorm = build_norm(config, config.head_size)
            self.k_layernorm = build_norm(config, config.head_size)
            for param in (*self.q_layernorm.parameters(), *self.k_layernorm.parameters()):
                # They see all positions but only this rank's heads, with sequence parallelism and without.
                del param.sequence_parallel
                if self.tp_size > 1:
                    declare_gradient(param, partial_over=("tp",))

    def forward(self, hidden: Tensor, packed: PackedTokens | None = None) -> Tensor:
        """Compute causal attention, within each document if documents are packed.

        Args:
            hidden (Tensor): [s, b, hidden], or [s / tp, b, hidden] under sequence parallelism.
            packed (PackedTokens, optional): Documents and positions of the tokens, if they are not one sequence each.
        """
        documents, positions = (None, None) if packed is None else (packed.documents, packed.positions)
        mixed, _ = self.linear_qkv(hidden)
        rows = self.heads_per_group + 2
        mixed = rearrange(mixed, "s b (groups rows d) -> s b groups rows d", rows=rows, d=self.config.head_size)
        query, key, value = mixed.split([self.heads_per_group, 1, 1], dim=3)
        query = rearrange(query, "s b groups heads d -> s b (groups heads) d")
        key, value = key.squeeze(3), value.squeeze(3)
        if self.q_layernorm is not None and self.k_layernorm is not None:
            query, key = self.q_layernorm(query), self.k_layernorm(key)
        if self.rotary is not None:
            query, key = self.rotary(query, key, positions=positions)
            if self.q_layernorm is None:  # a view would keep all of `mixed` for backward, which needs no more of it
                value = value.contiguous()
        if self.recompute_core and self.training:
            context = checkpoint(self._attend, False, query, key, value, documents)
        else:
            context = self._attend(query, key, value, documents)
        output, _ = self.linear_proj(context)
        return output

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, documents: Tensor | None = None) -> Tensor:
        """Compute attention of query, key and value [s, b, heads, d] to [s, b, heads * d]."""
        if self.cp_group is not None and group_size(self.cp_group) > 1:
            comm_type = self.config.cp_comm_type
            context = context_parallel_attention(query, key, value, self.cp_group, comm_type, documents)
            return rearrange(context, "s b n d -> s b (n d)")
        query, key, value = (rearrange(part, "s b n d -> b n s d") for part in (query, key, value))
        dropout = self.config.attention_dropout if self.training else 0.0
        with dropout_stream(dropout, self.tp_size, is_split=True):
            context = F.scaled_dot_product_attention(
                query,
                key,
                value,
                attn_mask=None if documents is None else visible_tokens(documents),
                dropout_p=dropout,
                is_causal=documents is None,
                enable_gqa=self.heads_per_group > 1,
            )
        return rearrange(context, "b n s d -> s b (n d)")
