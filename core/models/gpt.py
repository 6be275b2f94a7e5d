"""GPT model: embeddings, layers, and logits or per-token losses."""

from __future__ import annotations

from collections.abc import Sequence

from einops import rearrange
from torch import Tensor, nn

from core.context_parallel import context_parallel_group, pack_tokens
from core.groups.process_groups import ProcessGroups
from core.models.transformer_block import TransformerBlock
from core.tensor_parallel import vocab_parallel_cross_entropy
from core.tensor_parallel.chunked_loss import OutputLayer, chunk_of
from core.tensor_parallel.initialization import normal_init
from core.tensor_parallel.mappings import resolve_groups, tensor_parallel_group
from core.transformer.language_model_embedding import LanguageModelEmbedding
from core.transformer.transformer_config import TransformerConfig


class GPTModel(nn.Module):
    """Decoder-only language model, or one pipeline stage of it.

        sizes = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4}
        model = GPTModel(TransformerConfig(**sizes, vocab_size=256))
        loss = model(tokens, labels=labels).mean()

    Args:
        config (TransformerConfig): Model configuration.
        pg_collection (ProcessGroups, optional): Process groups. Defaults to those of ``parallel_state``. Without any,
            this rank has the full model.
        pre_process (bool, optional): True if this stage has the embeddings.
        post_process (bool, optional): True if this stage computes the logits.
        layer_numbers (Sequence[int], optional): Layers of this stage, counted over the full model. Defaults to all.
        tied_weight (Parameter, optional): Word embedding of another chunk on this rank. A last stage without embeddings
            uses it for the logits instead of a copy.

    Raises:
        ValueError: If the config is for other group sizes, or for a pipeline that this model is not a stage of.
    """

    def __init__(
        self,
        config: TransformerConfig,
        pg_collection: ProcessGroups | None = None,
        *,
        pre_process: bool = True,
        post_process: bool = True,
        layer_numbers: Sequence[int] | None = None,
        tied_weight: nn.Parameter | None = None,
    ) -> None:
        super().__init__()
        groups = resolve_groups(pg_collection)
        if config.pipeline_model_parallel_size > 1 and pre_process and post_process:
            raise ValueError(
                f"config.pipeline_model_parallel_size is {config.pipeline_model_parallel_size}, but this GPTModel "
                "would hold every layer; pass pre_process, post_process and layer_numbers of its stage"
            )
        tensor_parallel_group(config, groups)  # rejects a config made for another size
        self.cp_group = context_parallel_group(config, groups)
        self.config = config
        self.vocab_size = config.vocab_size
        self.pg_collection = groups
        self.pre_process = pre_process
        self.post_process = post_process
        self.share_embeddings_and_output_weights = config.share_embeddings_and_output_weights
        self._input: Tensor | None = None
        # A tuple hides it from nn.Module: if both chunks registered it, two wrappers would reduce it.
        self.borrowed_weights = () if tied_weight is None else (tied_weight,)

        if pre_process:
            self.embedding = LanguageModelEmbedding(config, pg_collection=groups, name="embedding")
        self.decoder = TransformerBlock(
            config, layer_numbers=layer_numbers, post_process=post_process, pg_collection=groups, name="decoder"
        )
        if post_process:
            tied = self.share_embeddings_and_output_weights
            self.output_layer = OutputLayer(
                config.hidden_size,
                config.vocab_size,
                config=config,
                init_method=normal_init(config.init_method_std),
                bias=False,
                skip_weight_param_allocation=tied and (pre_process or tied_weight is not None),
                allow_padding=True,
                pg_collection=groups,
                # A copy on the last stage is drawn as the embedding on the first one is.
                name="embedding.word_embeddings" if tied else "output_layer",
            )
        self._tag_embeddings()

    def _tag_embeddings(self) -> None:
        if self.pre_process:
            self.embedding.word_embeddings.weight.is_embedding_or_output_parameter = True
        if self.post_process and self.output_layer.weight is not None:
            self.output_layer.weight.is_embedding_or_output_parameter = True
        if self.share_embeddings_and_output_weights:
            self.global_names = {"output_layer.weight": "embedding.word_embeddings.weight"}
        has_copies = self.share_embeddings_and_output_weights and not self.borrowed_weights
        if has_copies and self.pre_process != self.post_process:
            weight = self.shared_embedding_or_output_weight()
            weight.shared_embedding = True  # type: ignore[union-attr]
            weight.shared = self.post_process  # type: ignore[union-attr]  # the copy: norms count the first stage's

    def shared_embedding_or_output_weight(self) -> nn.Parameter | None:
        """Return the word embedding's weight if this stage has it, else the output layer's, or ``None``."""
        if self.pre_process:
            return self.embedding.word_embeddings.weight
        if self.borrowed_weights:
            return self.borrowed_weights[0]
        return self.output_layer.weight if self.post_process else None

    def set_input_tensor(self, hidden: Tensor | None) -> None:
        """Set the previous stage's hidden state for the next forward of a stage without embeddings."""
        self._input = hidden

    def forward(
        self,
        input_ids: Tensor,
        labels: Tensor | None = None,
        *,
        position_ids: Tensor | None = None,
        document_ids: Tensor | None = None,
    ) -> Tensor:
        """Compute per-token losses if labels are given, else logits.

        This is a collective over the tensor- and context-parallel groups. Logits of padding columns (beyond vocab_size,
        on the last ranks) come from zero rows, and the loss ignores them.

        Args:
            input_ids (Tensor): [b, s], the same on all ranks of a tensor-parallel group. Under context parallelism s is
                this rank's part of the sequence, from get_batch_on_this_cp_rank.
            labels (Tensor, optional): [b, s], like ``input_ids``.
            position_ids (Tensor, optional): [b, s]. Defaults to positions counted from 0 through the sequence.
            document_ids (Tensor, optional): [b, s], one number per token. A token only sees itself and earlier tokens
                with the same number. If one rank passes position_ids or document_ids, all ranks must.

        Returns:
            Losses [b, s], or logits [s, b, padded vocab / tp], or hidden states before the last stage.
        """
        packed = pack_tokens(document_ids, position_ids, self.cp_group)
        if self.pre_process:
            hidden = self.embedding(input_ids, position_ids)
        elif self._input is not None:
            hidden = self._input
        else:
            raise RuntimeError("GPTModel without embeddings (pre_process=False): call set_input_tensor before forward")
        hidden = self.decoder(hidden, packed)
        if not self.post_process:
            return hidden
        tied = self.shared_embedding_or_output_weight() if self.share_embeddings_and_output_weights else None
        if labels is None:
            logits, _ = self.output_layer(hidden, tied)
            return logits
        target = rearrange(labels, "b s -> s b")
        chunk = chunk_of(self.config.logits_chunk, target.numel(), self.output_layer.output_size_per_partition)
        if chunk:
            loss, _ = self.output_layer(hidden, tied, target=target, chunk=chunk)
        else:
            logits, _ = self.output_layer(hidden, tied)
            loss = vocab_parallel_cross_entropy(
                logits, target, pg_collection=self.pg_collection, vocab_size=self.vocab_size
            )
        return rearrange(loss, "s b -> b s").contiguous()  # loss functions of Megatron's users call `.view(-1)`
