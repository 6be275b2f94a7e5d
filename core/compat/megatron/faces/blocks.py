"""TransformerBlock, TransformerLayer and their parts with Megatron's arguments, over our layers.

A part that a spec names must be one that our layer has in its place; any other is refused by its name. `forward` gives
back what Megatron's does: (hidden [s, b, h], None) of a layer, (output, None) of a part, whose bias is added already.
attention_mask: None, or the causal one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from core import moe
from core import transformer as ours
from core.compat.megatron.faces import parts
from core.compat.megatron.faces.enums import AttnMaskType
from core.compat.megatron.faces.groups import layers_of_stage
from core.compat.megatron.faces.layers import ColumnParallelLinear, RowParallelLinear
from core.compat.megatron.faces.modules import IdentityFuncOp, IdentityOp, MegatronModule, ModuleSpec, get_module
from core.compat.megatron.faces.packed import check_causal, packed_documents
from core.compat.megatron.faces.refusals import Face, arguments
from core.context_parallel import PackedTokens, context_parallel_group, pack_tokens
from core.groups.process_groups import ProcessGroups
from core.tensor_parallel.mappings import resolve_groups
from core.transformer.transformer_layer import TransformerLayer as OurLayer

_OWN = "put a layer of your own into a module of your own, with the layers of tensor_parallel"
_ROTARIES = "!rotary_pos_emb=None !rotary_pos_cos=None !rotary_pos_sin=None !rotary_pos_cos_sin=None"
_INPUTS = f"{_ROTARIES} !attention_bias=None !inference_context=None packed_seq_params=None !sequence_len_offset=None"


def _path(name: str | None) -> str:
    """Name by which weights are drawn: the one given, or one from torch's CPU generator, seeded alike on all ranks."""
    return f"drawn.{int(torch.randint(2**60, ()))}" if name is None else name


def _seen(mask: Any, packed: Any, cp_group: Any, hidden: Tensor, split_over: int) -> PackedTokens | None:
    """The documents of a row whose tokens are `hidden` [s / split_over, b, h]; None where there is none.

    ValueError for an attention mask that is not None or the causal one.
    """
    check_causal(mask)
    if packed is None:
        return None
    documents, positions = packed_documents(packed, cp_group, hidden.shape[1], hidden.shape[0] * split_over)
    return pack_tokens(documents, positions, cp_group)


class SelfAttention(ours.SelfAttention, MegatronModule, metaclass=Face):
    """core.transformer.SelfAttention. attn_mask_type: causal, or ValueError. Draws its weights by `name`."""

    @arguments(
        "self config submodules layer_number=1 attn_mask_type=None cp_comm_type=None pg_collection=None "
        "-pp_layer_offset=None name=None"
    )
    def __init__(self, config: Any, submodules: Any, attn_mask_type: Any, cp_comm_type: Any, **more: Any) -> None:
        causal = _parts_of(config).self_attention
        check_parts("SelfAttention", submodules, causal.submodules)
        check_params("SelfAttention", {"attn_mask_type": attn_mask_type}, causal.params)
        number, more["name"] = more.pop("layer_number"), _path(more["name"])
        own = config.ours(more["pg_collection"], cp_comm_type=cp_comm_type)
        more["recompute_core"] = "core_attn" in own.recomputed_parts
        ours.SelfAttention.__init__(self, own, **more)
        self.layer_number = number

    @arguments(
        f"self hidden_states attention_mask=None !key_value_states=None !inference_context=None {_ROTARIES} "
        "!attention_bias=None packed_seq_params=None !sequence_len_offset=None * !inference_params=None"
    )
    def forward(self, hidden_states: Tensor, attention_mask: Any, packed_seq_params: Any) -> tuple[Tensor, None]:
        split = self.tp_size if self.config.sequence_parallel else 1
        packed = _seen(attention_mask, packed_seq_params, self.cp_group, hidden_states, split)
        return ours.SelfAttention.forward(self, hidden_states, packed), None


class MLP(ours.MLP, MegatronModule, metaclass=Face):
    """core.transformer.MLP. Draws its weights by `name`."""

    @arguments("self config submodules !is_expert=False !input_size=None ffn_hidden_size=None tp_group=None name=None")
    def __init__(self, config: Any, submodules: Any, ffn_hidden_size: Any, tp_group: Any, name: str | None) -> None:
        check_parts("MLP", submodules, _parts_of(config).mlp.submodules)
        groups = None if tp_group is None else ProcessGroups(tp=tp_group)
        own = config.ours(groups, ffn_hidden_size=ffn_hidden_size)
        ours.MLP.__init__(self, own, pg_collection=groups, name=_path(name))
        self.config = config

    @arguments("self hidden_states !per_token_scale=None")
    def forward(self, hidden_states: Tensor) -> tuple[Tensor, None]:
        return ours.MLP.forward(self, hidden_states), None


class MoELayer(moe.MoELayer, MegatronModule, metaclass=Face):
    """core.moe.MoELayer. Draws its weights by `name`."""

    @arguments("self config submodules=None -layer_number=None pg_collection=None !is_mtp_layer=False name=None")
    def __init__(self, config: Any, submodules: Any, pg_collection: Any, name: str | None) -> None:
        check_parts("MoELayer", submodules, _parts_of(config, has_experts=True).mlp.submodules)
        own, name = config.ours(pg_collection), _path(name)
        more = {"pg_collection": pg_collection, "name": name, "recompute_modules": own.recomputed_parts}
        moe.MoELayer.__init__(self, own, **more)

    @arguments("self hidden_states !intermediate_tensors=None !padding_mask=None")
    def forward(self, hidden_states: Tensor) -> tuple[Tensor, None]:
        return moe.MoELayer.forward(self, hidden_states), None


class TopKRouter(moe.TopKRouter, MegatronModule, metaclass=Face):
    """core.moe.TopKRouter. Draws its weights by `name`. Auxiliary losses are attached to what forward returns."""

    @arguments("self config pg_collection=None !is_mtp_layer=False name=None")
    def __init__(self, config: Any, pg_collection: Any, name: str | None) -> None:
        moe.TopKRouter.__init__(self, config.ours(pg_collection), pg_collection=pg_collection, name=_path(name))

    @arguments("self input !padding_mask=None")
    def forward(self, input: Tensor) -> tuple[Tensor, Tensor]:
        """Probabilities and choices [s * b, experts] of tokens [s, b, h]. Collective over the balanced ranks."""
        return moe.TopKRouter.forward(self, input.flatten(0, 1), input.shape[1])


class TransformerLayer(OurLayer, MegatronModule, metaclass=Face):
    """core.transformer.TransformerLayer. layer_number: from 1, over the stage, whose offset is added to it.

    config decides whether experts stand in the MLP's place. Draws its weights by `name`.
    """

    @arguments(
        "self config submodules layer_number=1 hidden_dropout=None pg_collection=None vp_stage=None "
        "!is_mtp_layer=False add_layer_offset=True pp_layer_offset=None name=None"
    )
    def __init__(self, config: Any, submodules: Any, layer_number: int, **given: Any) -> None:
        groups, offset = given["pg_collection"], given["pp_layer_offset"]
        if given["add_layer_offset"] and offset is None:
            offset = layers_of_stage(config, resolve_groups(groups).rank("pp"), given["vp_stage"]).start
        number = layer_number - 1 + (offset or 0)
        check_spec(ModuleSpec(TransformerLayer, submodules=submodules), config, [number])
        own = config.ours(groups, hidden_dropout=given["hidden_dropout"])
        more = {"recompute_modules": own.recomputed_parts, "number": number}
        OurLayer.__init__(self, own, pg_collection=groups, name=_path(given["name"]), **more)
        self.layer_number = number + 1

    @arguments(
        f"self hidden_states attention_mask=None !context=None !context_mask=None {_INPUTS} !padding_mask=None * "
        "!inference_params=None"
    )
    def forward(self, hidden_states: Tensor, attention_mask: Any, packed_seq_params: Any) -> tuple[Tensor, None]:
        group, split = self.self_attention.cp_group, self.tp_size if self.config.sequence_parallel else 1
        packed = _seen(attention_mask, packed_seq_params, group, hidden_states, split)
        return OurLayer.forward(self, hidden_states, packed), None


class TransformerBlock(ours.TransformerBlock, MegatronModule, metaclass=Face):
    """core.transformer.TransformerBlock: the layers of this rank's stage, and the last norm on the last one."""

    @arguments(
        "self config spec !post_layer_norm=True pre_process=True post_process=True pg_collection=None vp_stage=None"
    )
    def __init__(self, config: Any, spec: Any, pre_process: bool, vp_stage: int | None, **own: Any) -> None:
        numbers = layers_of_stage(config, resolve_groups(own["pg_collection"]).rank("pp"), vp_stage)
        check_spec(spec, config, numbers)
        inner = config.ours(own["pg_collection"])
        ours.TransformerBlock.__init__(self, inner, layer_numbers=numbers, name=_path(None), **own)
        self.config, self.pre_process, self.post_process = config, pre_process, own["post_process"]
        self.cp_group = context_parallel_group(config, own["pg_collection"])
        self.input_tensor: Tensor | None = None

    def set_input_tensor(self, input_tensor: Tensor | None) -> None:
        """Set the input of a stage that is not the first, in place of its forward's hidden_states."""
        self.input_tensor = input_tensor

    @arguments(
        f"self hidden_states attention_mask=None !context=None !context_mask=None {_INPUTS} !padding_mask=None "
        "!extract_layer_indices=None * !inference_params=None -dynamic_inference_decode_only=None"
    )
    def forward(self, hidden_states: Tensor, attention_mask: Any, packed_seq_params: Any) -> Tensor:
        hidden = hidden_states if self.pre_process or self.input_tensor is None else self.input_tensor
        split = self.config.tensor_model_parallel_size if self.config.sequence_parallel else 1
        packed = _seen(attention_mask, packed_seq_params, self.cp_group, hidden, split)
        return ours.TransformerBlock.forward(self, hidden, packed)


# What our layer has -> what a spec may name in its place, because the config decides or nothing is computed.
ALIKE = {
    IdentityOp: (None,),
    IdentityFuncOp: (parts.get_bias_dropout_add,),
    parts.SharedExpertMLP: (None,),
    TopKRouter: (None,),
}


def local_layer(*, has_experts: bool, qk_layernorm: bool, shared_expert_gate: bool = False) -> ModuleSpec:
    """The spec of our layer, as Megatron's programs write it."""
    norm = parts.WrappedTorchNorm if qk_layernorm else IdentityOp
    mlp = parts.MLPSubmodules(ColumnParallelLinear, RowParallelLinear)
    shared = ModuleSpec(parts.SharedExpertMLP, {"gate": shared_expert_gate}, mlp)
    experts = parts.MoESubmodules(ModuleSpec(parts.Experts, submodules=mlp), shared, TopKRouter)
    attention = parts.SelfAttentionSubmodules(
        ColumnParallelLinear, parts.DotProductAttention, RowParallelLinear, norm, norm
    )
    layer = parts.TransformerLayerSubmodules(
        input_layernorm=parts.WrappedTorchNorm,
        self_attention=ModuleSpec(SelfAttention, {"attn_mask_type": AttnMaskType.causal}, attention),
        self_attn_bda=parts.get_bias_dropout_add,
        pre_mlp_layernorm=parts.WrappedTorchNorm,
        mlp=ModuleSpec(MoELayer, submodules=experts) if has_experts else ModuleSpec(MLP, submodules=mlp),
        mlp_bda=parts.get_bias_dropout_add,
    )
    return ModuleSpec(TransformerLayer, submodules=layer)


def _parts_of(config: Any, *, has_experts: bool = False) -> Any:
    gate = config.moe_shared_expert_gate
    return local_layer(has_experts=has_experts, qk_layernorm=config.qk_layernorm, shared_expert_gate=gate).submodules


def check_spec(spec: Any, config: Any, numbers: Sequence[int]) -> None:
    """ValueError for a spec of a stage's layers that is not one of ours, or says otherwise than the config.

    spec: of every layer, or TransformerBlockSubmodules with one for each. numbers: the layers, over the whole model.
    """
    if isinstance(spec, ModuleSpec) and spec.module is TransformerBlock:
        spec = spec.submodules
    layers, experts = [spec], [config.num_moe_experts is not None]
    if isinstance(spec, parts.TransformerBlockSubmodules):
        check_parts(
            "TransformerBlock", spec, parts.TransformerBlockSubmodules(spec.layer_specs, parts.WrappedTorchNorm)
        )
        layers, experts = spec.layer_specs or [], [config.ours().is_moe_layer(number) for number in numbers]
        if len(layers) != len(numbers):
            raise ValueError(f"the spec has {len(layers)} layers and this stage {len(numbers)}; make them agree")
    for layer, has_experts in zip(layers, experts, strict=True):
        if not isinstance(layer, ModuleSpec) or layer.module is not TransformerLayer or layer.submodules is None:
            raise ValueError(
                "transformer_layer_spec must come from get_gpt_layer_local_spec() or a function near it: GPTModel is "
                f"built of our layers; {_OWN}"
            )
        for name, value in layer.metainfo.items():
            if getattr(config, name) != value:
                raise ValueError(
                    f"the layer spec says {name}={value!r} and the config {getattr(config, name)!r}; make them agree, "
                    "the config decides"
                )
        check_parts("TransformerLayer", layer.submodules, _parts_of(config, has_experts=has_experts))


def check_parts(where: str, given: Any, ours: Any) -> None:
    """ValueError for a part of a spec that is not the one of our layer, or has other arguments. None names no parts."""
    names = vars(ours).keys() - {"sharded_state_dict_keys_map", "layer_specs"} if given is not None else ()
    for name in sorted(names):
        value, own = getattr(given, name), getattr(ours, name)
        own = own if isinstance(own, ModuleSpec) else ModuleSpec(own)
        found, known = get_module(value), (own.module, *ALIKE.get(own.module, ()))
        if found not in known:
            words = " or ".join(getattr(kind, "__name__", repr(kind)) for kind in known)
            raise ValueError(
                f"{where}: {name} is {getattr(found, '__name__', repr(found))}, and with this config our layer has "
                f"{words} there; {_OWN}"
            )
        if isinstance(value, ModuleSpec):
            check_params(f"{where}.{name}", value.params, own.params)
            check_parts(f"{where}.{name}", value.submodules, own.submodules)


def check_params(where: str, params: dict[str, Any], obeyed: dict[str, Any]) -> None:
    """ValueError for arguments that our layer would not obey."""
    for name, value in {**dict.fromkeys(obeyed), **params}.items():
        if name not in obeyed or value != obeyed[name]:
            raise ValueError(f"{where}({name}={value}) is not what our layer does: it has {obeyed.get(name)}; {_OWN}")
