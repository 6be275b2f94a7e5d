"""Word and learned position embeddings."""

from __future__ import annotations

import torch
from einops import rearrange
from torch import Tensor, nn

from core.context_parallel import context_parallel_group, positions_on_rank
from core.groups.process_groups import ProcessGroups
from core.tensor_parallel import VocabParallelEmbedding, draw_master
from core.tensor_parallel.initialization import normal_init
from core.tensor_parallel.mappings import divide, group_rank, group_size
from core.transformer.dropout import hidden_dropout
from core.transformer.transformer_config import TransformerConfig


class LanguageModelEmbedding(nn.Module):
    """Embeds token ids [b, s] to [s, b, hidden], or to [s / tp, b, hidden] under sequence parallelism.

    Under context parallelism s is this rank's part of the sequence. Under sequence parallelism the ranks' partial word
    embeddings are reduce-scattered, with half the traffic of an all-reduce. Each rank then adds its own positions, so
    the gradient of a position is on one rank and zero on the others.

    Args:
        config (TransformerConfig): Model configuration.
        pg_collection (ProcessGroups): Process groups. Defaults to those of ``parallel_state``, if initialized.
        name (str): Module path in the full model, which seeds its weights.
    """

    def __init__(
        self, config: TransformerConfig, *, pg_collection: ProcessGroups | None = None, name: str | None = None
    ) -> None:
        super().__init__()
        self.config = config
        cp_group = context_parallel_group(config, pg_collection)
        self.cp_size, self.cp_rank = group_size(cp_group), group_rank(cp_group)
        self.word_embeddings = VocabParallelEmbedding(
            config.vocab_size,
            config.hidden_size,
            init_method=normal_init(config.init_method_std),
            config=config,
            reduce_scatter_embeddings=config.sequence_parallel,
            pg_collection=pg_collection,
            name=None if name is None else f"{name}.word_embeddings",
        )
        self.sequence_split_over = self.word_embeddings.tp_size if config.sequence_parallel else 1
        self.position_embeddings: nn.Embedding | None = None
        if config.position_embedding_type == "learned_absolute":
            shape = (config.max_sequence_length, config.hidden_size)
            weight = torch.empty(shape, dtype=config.params_dtype)
            if config.perform_initialization:
                full_name = None if name is None else f"{name}.position_embeddings.weight"
                weight.copy_(draw_master(shape, normal_init(config.init_method_std), full_name, config.init_seed))
            self.position_embeddings = nn.Embedding.from_pretrained(weight, freeze=False)
            self.position_embeddings.weight.sequence_parallel = config.sequence_parallel

    def forward(self, input_ids: Tensor, positions: Tensor | None = None) -> Tensor:
        """Embed token ids at their positions.

        Args:
            input_ids (Tensor): [b, s].
            positions (Tensor): [b, s]. Defaults to this rank's positions, counted from 0 through the sequence.

        Raises:
            ValueError: If the sequence is too long for the default positions.
        """
        length = input_ids.shape[1]
        whole = length * self.cp_size
        if positions is None and whole > self.config.max_sequence_length:
            raise ValueError(f"a sequence has {whole} tokens; max_sequence_length: {self.config.max_sequence_length}")
        hidden = self.word_embeddings(input_ids)
        if not self.config.sequence_parallel:
            hidden = rearrange(hidden, "b s h -> s b h").contiguous()
        if self.position_embeddings is not None:
            kept = divide(length, self.sequence_split_over, "sequence length over tensor-parallel size")
            first = self.word_embeddings.tp_rank * kept if self.sequence_split_over > 1 else 0
            # Call the module instead of reading its weight: the wrapper's hooks wait for weights in flight.
            if positions is None:
                positions = positions_on_rank(length, self.cp_size, self.cp_rank, input_ids.device).unsqueeze(0)
            embedded = self.position_embeddings(positions[:, first : first + kept])
            hidden = hidden + rearrange(embedded, "b s h -> s b h")
        return hidden_dropout(
            hidden,
            self.config.hidden_dropout,
            training=self.training,
            tp_size=self.word_embeddings.tp_size,
            is_split=self.config.sequence_parallel,
        )
