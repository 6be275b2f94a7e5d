"""TransformerConfig: shape of a transformer, its experts, and the fields that affect gradients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from core.context_parallel import COMM_TYPES, check_heads
from core.number_ranges import BELOW_ONE, COUNT, NOT_NEGATIVE, POSITIVE, check_ranges, whole
from core.transformer.expert_config import EXPERT_RANGES, ExpertConfig

CHOICES = {
    "normalization": ("LayerNorm", "RMSNorm"),
    "activation": ("gelu", "swiglu"),
    "position_embedding_type": ("learned_absolute", "rope"),
    "cp_comm_type": tuple(COMM_TYPES),
    "recompute_granularity": (None, "full", "selective"),
}
RECOMPUTED_PARTS = ("core_attn", "mlp", "mlp_act", "layernorm", "moe", "moe_act", "shared_experts")
OF_EXPERTS = {"moe": "num_moe_experts", "moe_act": "num_moe_experts"}
OF_EXPERTS["shared_experts"] = "moe_shared_expert_intermediate_size"
RANGES = {
    **dict.fromkeys(("num_layers", "hidden_size", "num_attention_heads", "num_query_groups", "kv_channels"), COUNT),
    **dict.fromkeys(("ffn_hidden_size", "vocab_size", "max_sequence_length"), COUNT),
    **dict.fromkeys(("hidden_dropout", "attention_dropout"), BELOW_ONE),
    **dict.fromkeys(("init_method_std", "rotary_base"), POSITIVE),
    "layernorm_epsilon": NOT_NEGATIVE,
    "recompute_num_layers": whole(0),
    "logits_chunk": whole(0),
    "init_seed": whole(),
}


@dataclass
class TransformerConfig(ExpertConfig):
    """Configures a transformer: its shape, variants and initialization.

        TransformerConfig(num_layers=2, hidden_size=256, num_attention_heads=8)

    Args:
        num_layers: Number of transformer layers.
        hidden_size: Width of the residual stream.
        num_attention_heads: Number of query heads.
        num_query_groups: Number of key/value heads. Defaults to one per query head.
        kv_channels: Size of a head. Defaults to hidden_size / num_attention_heads.
        ffn_hidden_size: Hidden size of the MLP. Defaults to 4 * hidden_size.
        vocab_size: Number of token ids, without padding.
        max_sequence_length: Longest sequence, which is the number of learned positions.
        normalization: 'LayerNorm' or 'RMSNorm'.
        layernorm_epsilon: Epsilon of all norms.
        activation: 'gelu' or 'swiglu'.
        position_embedding_type: 'learned_absolute' or 'rope'.
        rotary_base: Base of the rotary frequencies.
        add_bias_linear: Give linear layers a bias.
        share_embeddings_and_output_weights: Tie the output layer to the word embedding.
        hidden_dropout: Dropout probability of the residual branches and of the embedding.
        attention_dropout: Dropout probability of attention weights.
        init_method_std: Standard deviation of every weight. For weights that write to the residual stream, it is
            divided by sqrt(2 * num_layers).
        init_seed: Seed of the weights, together with each parameter's name. Weights are equal in every layout and
            dtype.
        cp_comm_type: Communication of keys and values between context-parallel ranks. 'p2p' uses a ring, 'all_gather'
            gathers all of them, 'a2a' exchanges positions for heads and needs enough heads.
        recompute_granularity: 'full' recomputes layers in backward, 'selective' only the parts in recompute_modules.
        recompute_num_layers: Recompute only this many first layers of each stage. Defaults to all.
        recompute_modules: Parts to recompute. 'core_attn' (attention without its projections), 'mlp', 'moe' and
            'shared_experts' save the input of the part. 'layernorm' (the norms of a layer), 'mlp_act' and 'moe_act'
            (the activation functions of MLPs and of experts) save the input of a cheap function, and free its output
            until backward.
        logits_chunk: Tokens per chunk of logits and their loss, recomputed in backward. 0 for one chunk. None for
            chunks if there are more than 2**28 logits on a rank.

    Raises:
        ValueError: If sizes do not fit together. The message has the arithmetic.
    """

    num_layers: int = 1
    hidden_size: int = 64
    num_attention_heads: int = 4
    num_query_groups: int | None = None
    kv_channels: int | None = None
    ffn_hidden_size: int | None = None
    vocab_size: int = 256
    max_sequence_length: int = 256

    normalization: str = "LayerNorm"
    layernorm_epsilon: float = 1e-5
    activation: str = "gelu"
    position_embedding_type: str = "learned_absolute"
    rotary_base: float = 10000.0
    add_bias_linear: bool = True
    share_embeddings_and_output_weights: bool = True
    hidden_dropout: float = 0.0
    attention_dropout: float = 0.0

    init_method_std: float = 0.02
    init_seed: int = 1234

    cp_comm_type: str = "p2p"

    recompute_granularity: str | None = None
    recompute_num_layers: int | None = None
    logits_chunk: int | None = None
    recompute_modules: Sequence[str] = ("core_attn",)

    @property
    def recomputed_parts(self) -> frozenset[str]:
        """Parts of a layer that backward recomputes. Empty unless the granularity is 'selective'."""
        return frozenset(self.recompute_modules if self.recompute_granularity == "selective" else ())

    @property
    def query_groups(self) -> int:
        """Number of key/value heads."""
        return self.num_attention_heads if self.num_query_groups is None else self.num_query_groups

    @property
    def head_size(self) -> int:
        """Channels of one head."""
        return self.hidden_size // self.num_attention_heads if self.kv_channels is None else self.kv_channels

    @property
    def ffn_size(self) -> int:
        """Hidden channels of the MLP."""
        return 4 * self.hidden_size if self.ffn_hidden_size is None else self.ffn_hidden_size

    @property
    def expert_ffn_size(self) -> int:
        """Hidden channels of one expert."""
        return self.ffn_size if self.moe_ffn_hidden_size is None else self.moe_ffn_hidden_size

    @property
    def output_init_method_std(self) -> float:
        """Standard deviation of weights that write to the residual stream (GPT-2, section 2.3)."""
        return self.init_method_std / (2.0 * self.num_layers) ** 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        check_ranges(self, {**EXPERT_RANGES, **RANGES})
        for field, choices in CHOICES.items():
            if getattr(self, field) not in choices:
                raise ValueError(f"{field} is {getattr(self, field)!r}, expected one of {choices}")
        self._check_recomputed()
        tp = self.tensor_model_parallel_size
        if self.kv_channels is None:
            self._divides("hidden_size", self.hidden_size, "num_attention_heads", self.num_attention_heads)
        self._divides("num_attention_heads", self.num_attention_heads, "num_query_groups", self.query_groups)
        self._divides("ffn_hidden_size", self.ffn_size, "tensor_model_parallel_size", tp)
        self._divides("num_attention_heads", self.num_attention_heads, "tensor_model_parallel_size", tp)
        if self.query_groups % tp:
            raise ValueError(
                f"num_query_groups {self.query_groups} is not divisible by tensor_model_parallel_size {tp} "
                f"({self.query_groups} / {tp} = {self.query_groups / tp:g}), and key/value heads cannot be split. Use "
                f"a tensor-parallel size that divides {self.query_groups}, or more query groups"
            )
        cp = self.context_parallel_size
        if cp > 1 and self.attention_dropout > 0.0:
            raise ValueError(
                f"attention_dropout is {self.attention_dropout} with context_parallel_size {cp}: no rank has all "
                "shares of a token's attention; use attention_dropout=0.0"
            )
        if self.cp_comm_type == "a2a":
            check_heads(self.num_attention_heads // tp, self.query_groups // tp, cp)
        if self.position_embedding_type == "rope" and self.head_size % 2:
            raise ValueError(f"rotary positions turn pairs of channels; a head has {self.head_size}, use an even size")
        self.check_experts(self.num_layers, self.expert_ffn_size)

    def _check_recomputed(self) -> None:
        for part in self.recompute_modules:
            if part not in RECOMPUTED_PARTS:
                raise ValueError(
                    f"recompute_modules has {part!r}, and layers have {', '.join(RECOMPUTED_PARTS)}; use some of these"
                )
        for part in self.recomputed_parts:
            needed = OF_EXPERTS.get(part)
            if needed is not None and getattr(self, needed) is None:
                raise ValueError(f"recompute_modules has {part!r}, and {needed} is None; leave {part!r} out")

    @staticmethod
    def _divides(what: str, numerator: int, by: str, denominator: int) -> None:
        if denominator < 1 or numerator % denominator:
            raise ValueError(f"{what} {numerator} is not divisible by {by} {denominator}")
