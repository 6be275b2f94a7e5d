"""ExpertConfig: configuration fields for a mixture of experts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from core.model_parallel_config import ModelParallelConfig
from core.number_ranges import COUNT, NOT_NEGATIVE, POSITIVE, either, nearest_divisors, nearest_multiples

EXPERT_CHOICES = {
    "moe_router_score_function": ("softmax", "sigmoid"),
    "moe_router_load_balancing_type": ("aux_loss", "seq_aux_loss", "global_aux_loss", "none"),
    "moe_router_dtype": (None, "fp32", "fp64"),
    "moe_token_dispatcher_type": ("allgather", "alltoall"),
    "moe_token_drop_policy": ("probs", "position"),
}

EXPERT_RANGES = {
    **dict.fromkeys(("num_moe_experts", "moe_ffn_hidden_size", "moe_router_topk"), COUNT),
    **dict.fromkeys(("moe_router_topk_scaling_factor", "moe_expert_capacity_factor"), POSITIVE),
    **dict.fromkeys(("moe_aux_loss_coeff", "moe_z_loss_coeff"), NOT_NEGATIVE),
    "moe_shared_expert_intermediate_size": COUNT,
}


@dataclass
class ExpertConfig(ModelParallelConfig):
    """Configures a mixture of experts, with Megatron's field names.

    None of these fields is read without ``num_moe_experts``.

    Args:
        moe_router_topk_scaling_factor: Multiplied with the probabilities of the chosen experts.
        num_moe_experts: Number of experts per layer, over all ranks.
        moe_layer_freq: Every n-th layer has experts, starting with the first; or a list of ones and zeros, one per
            layer.
        moe_ffn_hidden_size: Hidden size of one expert. Defaults to the hidden size of the dense layers.
        moe_router_topk: Number of experts per token.
        moe_router_pre_softmax: Apply softmax over all experts before top-k, instead of over the chosen ones after it.
        moe_router_score_function: 'softmax' or 'sigmoid'. 'sigmoid' scores each expert independently and normalizes the
            chosen scores to sum 1; it allows moe_router_enable_expert_bias.
        moe_router_dtype: Dtype of the router's matmul. Defaults to the dtype of its input.
        moe_router_load_balancing_type: Tokens over which the auxiliary loss measures the load. One data rank's
            microbatch ('aux_loss'), each sequence ('seq_aux_loss'), the microbatches of all data ranks
            ('global_aux_loss'), or 'none'.
        moe_aux_loss_coeff: Weight of the load-balancing loss.
        moe_z_loss_coeff: Weight of the z-loss.
        moe_expert_capacity_factor: Maximum tokens of an expert, as a multiple of its even share of a rank's tokens.
            Unlimited by default.
        moe_token_drop_policy: Keep the tokens with the highest probability ('probs'), or the first ones ('position').
        moe_token_dispatcher_type: 'alltoall' sends tokens to their experts, 'allgather' sends all tokens to all ranks.
        moe_shared_expert_intermediate_size: Hidden size of an MLP that processes every token.
        moe_shared_expert_gate: Weight the shared expert's output by a sigmoid of the token.
        moe_grouped_gemm: Use one kernel for all experts, if torch has it.
    """

    num_moe_experts: int | None = None
    moe_layer_freq: int | Sequence[int] = 1
    moe_ffn_hidden_size: int | None = None
    moe_router_topk: int = 2
    moe_router_pre_softmax: bool = False
    moe_router_score_function: str = "softmax"
    moe_router_topk_scaling_factor: float | None = None
    moe_router_dtype: str | None = None
    moe_router_load_balancing_type: str = "aux_loss"
    moe_aux_loss_coeff: float = 0.0
    moe_z_loss_coeff: float | None = None
    moe_expert_capacity_factor: float | None = None
    moe_token_drop_policy: str = "probs"
    moe_token_dispatcher_type: str = "allgather"
    moe_shared_expert_intermediate_size: int | None = None
    moe_shared_expert_gate: bool = False
    moe_grouped_gemm: bool = False

    @property
    def expert_tensor_parallel(self) -> int:
        """Number of ranks that one expert is split over."""
        size = self.expert_tensor_parallel_size
        return self.tensor_model_parallel_size if size is None else size

    def is_moe_layer(self, number: int) -> bool:
        """True if layer ``number``, counted from 0, has experts."""
        if self.num_moe_experts is None:
            return False
        if isinstance(self.moe_layer_freq, int):
            return number % self.moe_layer_freq == 0
        return bool(self.moe_layer_freq[number])

    def check_experts(self, num_layers: int, ffn_size: int) -> None:
        """Check that the experts can be built, given the number of layers and the hidden size of one expert.

        Raises ValueError with the arithmetic and the nearest valid values.
        """
        experts, ep, etp = self.num_moe_experts, self.expert_model_parallel_size, self.expert_tensor_parallel
        if experts is None:
            if ep > 1:
                raise ValueError(f"expert_model_parallel_size is {ep} and num_moe_experts is None; set num_moe_experts")
            return
        for field, choices in EXPERT_CHOICES.items():
            if getattr(self, field) not in choices:
                raise ValueError(f"{field} is {getattr(self, field)!r}, expected one of {choices}")
        if experts % ep:
            raise ValueError(
                f"num_moe_experts {experts} is not divisible by expert_model_parallel_size {ep} ({experts} / {ep} = "
                f"{experts / ep:g}). Use {either(nearest_multiples(experts, ep))} experts, or an expert-parallel size "
                f"of {either(nearest_divisors(experts, ep))}"
            )
        if not 1 <= self.moe_router_topk <= experts:
            raise ValueError(
                f"moe_router_topk is {self.moe_router_topk} and there are {experts} experts; a token goes to different "
                f"experts, so use 1 <= moe_router_topk <= {experts}"
            )
        if ffn_size % etp:
            raise ValueError(
                f"an expert's hidden size {ffn_size} is not divisible by its tensor-parallel size {etp} ({ffn_size} / "
                f"{etp} = {ffn_size / etp:g}); use {either(nearest_multiples(ffn_size, etp))}"
            )
        self._check_router()
        self._check_frequency(num_layers)
        self._check_shared_expert()

    def _check_router(self) -> None:
        softmax = self.moe_router_score_function == "softmax"
        if softmax and self.moe_router_topk == 1 and not self.moe_router_pre_softmax:
            raise ValueError(
                "moe_router_topk is 1 and the softmax comes after the choice: over one expert it is always 1, and the "
                "router would have no gradient. Set moe_router_pre_softmax=True"
            )
        if self.moe_router_pre_softmax and not softmax:
            raise ValueError("moe_router_pre_softmax=True with moe_router_score_function='sigmoid'; clear one of them")
        if self.moe_router_enable_expert_bias and softmax:
            raise ValueError(
                "moe_router_enable_expert_bias=True with moe_router_score_function='softmax': the bias needs "
                "independent scores between 0 and 1; set moe_router_score_function='sigmoid'"
            )

    def _check_frequency(self, num_layers: int) -> None:
        if not isinstance(self.moe_layer_freq, Sequence):
            if self.moe_layer_freq not in COUNT:
                raise ValueError(f"moe_layer_freq must be {COUNT}, or a list, got {self.moe_layer_freq!r}")
        elif len(self.moe_layer_freq) != num_layers or not set(self.moe_layer_freq) <= {0, 1}:
            raise ValueError(
                f"moe_layer_freq is {list(self.moe_layer_freq)}, expected one 0 or 1 for each of {num_layers} layers"
            )

    def _check_shared_expert(self) -> None:
        size, tp = self.moe_shared_expert_intermediate_size, self.tensor_model_parallel_size
        if size is None:
            if self.moe_shared_expert_gate:
                raise ValueError("moe_shared_expert_gate=True needs moe_shared_expert_intermediate_size")
        elif size < 1 or size % tp:
            raise ValueError(
                f"moe_shared_expert_intermediate_size {size} is not divisible by tensor_model_parallel_size {tp} "
                f"({size} / {tp} = {size / tp:g}); use {either(nearest_multiples(size, tp))}"
            )
