"""Parts of Megatron's layer specs: the fields of each layer's parts, and the parts that are no layers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from core import moe
from core.compat.megatron.faces.modules import IdentityFuncOp, IdentityOp
from core.compat.megatron.faces.refusals import arguments, never_made, refusal
from core.transformer.norms import build_norm


def _parts(name: str, fields: str, **defaults: Any) -> Any:
    made = [(key, Any, dataclasses.field(default=defaults.get(key))) for key in fields.split()]
    return dataclasses.make_dataclass(name, made, namespace={"__module__": __name__, "__doc__": f"{fields}: classes."})


SelfAttentionSubmodules = _parts(
    "SelfAttentionSubmodules", "linear_qkv core_attention linear_proj q_layernorm k_layernorm"
)
MLPSubmodules = _parts("MLPSubmodules", "linear_fc1 linear_fc2 activation_func")
MoESubmodules = _parts("MoESubmodules", "experts shared_experts router")
TransformerBlockSubmodules = _parts("TransformerBlockSubmodules", "layer_specs layer_norm")
_NOTHING = {
    **dict.fromkeys(("input_layernorm", "self_attention", "pre_mlp_layernorm", "mlp"), IdentityOp),
    **dict.fromkeys(("pre_cross_attn_layernorm", "cross_attention"), IdentityOp),
    **dict.fromkeys(("self_attn_bda", "cross_attn_bda", "mlp_bda"), IdentityFuncOp),
}
TransformerLayerSubmodules = _parts(
    "TransformerLayerSubmodules",
    "input_layernorm self_attention self_attn_bda pre_cross_attn_layernorm cross_attention cross_attn_bda "
    "pre_mlp_layernorm mlp mlp_bda sharded_state_dict_keys_map",
    **_NOTHING,
)


class WrappedTorchNorm:
    """Makes the norm that config.normalization names."""

    @arguments(
        "cls config hidden_size eps=1e-5 -persist_layer_norm=False !zero_centered_gamma=False -normalization=None"
    )
    def __new__(cls, config: Any, hidden_size: int, eps: float) -> Any:
        return build_norm(config.ours(layernorm_epsilon=eps), hidden_size)


class DotProductAttention:
    """Stands in specs for the attention that SelfAttention computes; it is not made alone."""

    __init__ = refusal(
        "DotProductAttention is a part of SelfAttention here; call torch.nn.functional.scaled_dot_product_attention"
    )


_BY_LAYER = "MoELayer(config) makes it, and core.moe has the class by our arguments"
Experts = never_made("Experts", moe.Experts, _BY_LAYER)
SharedExpertMLP = never_made("SharedExpertMLP", moe.SharedExpert, _BY_LAYER)
_WITH = f"{_BY_LAYER}, with dispatch() and combine()"
MoEAllGatherTokenDispatcher = never_made("MoEAllGatherTokenDispatcher", moe.AllGatherTokenDispatcher, _WITH)
MoEAlltoAllTokenDispatcher = never_made("MoEAlltoAllTokenDispatcher", moe.AllToAllTokenDispatcher, _WITH)


def get_bias_dropout_add(training: bool, fused: bool) -> Callable[..., Tensor]:
    """A function of ((x, bias or None), residual, probability): residual + dropout(x + bias)."""

    def add(x_with_bias: tuple[Tensor, Tensor | None], residual: Tensor, prob: float) -> Tensor:
        x, bias = x_with_bias
        return residual + F.dropout(x if bias is None else x + bias, prob, training)

    return add
