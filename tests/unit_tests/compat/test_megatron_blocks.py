"""Megatron's layers by its signatures, and layer specs that programs write themselves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from core.compat.megatron.fusions.fused_bias_dropout import get_bias_dropout_add
from core.compat.megatron.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from core.compat.megatron.models.gpt.gpt_model import GPTModel
from core.compat.megatron.packed_seq_params import PackedSeqParams
from core.compat.megatron.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from core.compat.megatron.transformer.attention import SelfAttention, SelfAttentionSubmodules
from core.compat.megatron.transformer.dot_product_attention import DotProductAttention
from core.compat.megatron.transformer.enums import AttnMaskType
from core.compat.megatron.transformer.identity_op import IdentityOp
from core.compat.megatron.transformer.mlp import MLP, MLPSubmodules
from core.compat.megatron.transformer.moe.experts import SequentialMLP
from core.compat.megatron.transformer.moe.moe_layer import MoELayer, MoESubmodules
from core.compat.megatron.transformer.moe.router import TopKRouter
from core.compat.megatron.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from core.compat.megatron.transformer.spec_utils import ModuleSpec, build_module
from core.compat.megatron.transformer.torch_norm import WrappedTorchNorm
from core.compat.megatron.transformer.transformer_block import TransformerBlock, TransformerBlockSubmodules
from core.compat.megatron.transformer.transformer_config import TransformerConfig
from core.compat.megatron.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from torch import Tensor, nn

import core.compat.megatron as mcore
from core import moe
from core.groups.process_groups import ProcessGroups
from core.transformer import TransformerLayer as OurLayer
from tests.unit_tests.ranks import ranks

SHAPE: dict[str, Any] = dict(num_layers=2, hidden_size=16, num_attention_heads=4, hidden_dropout=0.0)
SHAPE |= {"attention_dropout": 0.0, "init_method_std": 0.2}
EXPERTS: dict[str, Any] = dict(
    num_moe_experts=2, moe_router_topk=1, moe_router_pre_softmax=True, moe_token_dispatcher_type="alltoall"
)
ATTENTION = SelfAttentionSubmodules(
    linear_qkv=ColumnParallelLinear, core_attention=DotProductAttention, linear_proj=RowParallelLinear
)
FEED_FORWARD = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
CAUSAL = {"attn_mask_type": AttnMaskType.causal}


def written_spec(**changed: Any) -> ModuleSpec:
    """A local layer spec as programs write it."""
    parts: dict[str, Any] = dict(
        input_layernorm=WrappedTorchNorm,
        self_attention=ModuleSpec(module=SelfAttention, params=CAUSAL, submodules=ATTENTION),
        self_attn_bda=get_bias_dropout_add,
        pre_mlp_layernorm=WrappedTorchNorm,
        mlp=ModuleSpec(module=MLP, submodules=FEED_FORWARD),
        mlp_bda=get_bias_dropout_add,
        sharded_state_dict_keys_map={"input_layernorm.": "self_attention.linear_qkv.layer_norm_"},
    )
    return ModuleSpec(module=TransformerLayer, submodules=TransformerLayerSubmodules(**{**parts, **changed}))


def hidden_state() -> Tensor:
    """[s, b, h]."""
    return torch.randn(8, 1, 16, generator=torch.Generator().manual_seed(3))


@ranks(2)
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_a_split_layer_is_the_whole_one(rank: int, world: int, sequence_parallel: bool) -> None:
    mcore.mpu.initialize_model_parallel(2)
    alone = ProcessGroups()
    whole = OurLayer(TransformerConfig(**SHAPE).ours(alone), pg_collection=alone, name="a", number=1)
    # Without sequence parallelism the size is left out: it is the group's, as in Megatron.
    split = {"tensor_model_parallel_size": 2, "sequence_parallel": True} if sequence_parallel else {}
    config = TransformerConfig(**SHAPE, **split)
    layer = build_module(written_spec(), config=config, layer_number=2, name="a")
    part = slice(4 * rank, 4 * rank + 4) if sequence_parallel else slice(None)
    given, other = hidden_state().requires_grad_(), hidden_state().requires_grad_()
    mask = torch.ones(1, 1, 8, 8, dtype=torch.bool).triu(1)
    output, context = layer(given[part], attention_mask=mask)
    expected = whole(other)
    assert context is None and layer.layer_number == 2 and isinstance(layer.config.ffn_size, int)
    torch.testing.assert_close(output, expected[part], atol=1e-6, rtol=1e-5)
    weights = torch.randn(8, 1, 16, generator=torch.Generator().manual_seed(4))
    (output * weights[part]).sum().backward()
    (expected * weights).sum().backward()
    torch.testing.assert_close(given.grad[part], other.grad[part], atol=1e-5, rtol=1e-5)
    rows = whole.mlp.linear_fc2.weight.grad.chunk(2, 1)[rank]
    torch.testing.assert_close(layer.mlp.linear_fc2.weight.grad, rows, atol=1e-5, rtol=1e-5)
    assert float((expected - hidden_state()).detach().abs().max()) > 0.1 < float(rows.abs().max())
    ends = PackedSeqParams("thd", cu_seqlens_q=torch.tensor([0, 3, 8], dtype=torch.int32))
    packed, _ = layer(hidden_state()[part], packed_seq_params=ends)
    apart = torch.cat([whole(document) for document in hidden_state().split([3, 5])])
    torch.testing.assert_close(packed, apart[part], atol=1e-6, rtol=1e-5)


def test_parts_put_together_by_hand_are_the_layer() -> None:
    for options in ({}, {"normalization": "RMSNorm"}):
        config = TransformerConfig(**SHAPE, **options)
        layer = TransformerLayer(config, written_spec().submodules, name="a")
        attention = SelfAttention(config, ATTENTION, layer_number=1, **CAUSAL, name="a.self_attention")
        mlp, norm = MLP(config, FEED_FORWARD, name="a.mlp"), WrappedTorchNorm(config, 16, eps=config.layernorm_epsilon)
        add = get_bias_dropout_add(training=True, fused=False)
        hidden = add(attention(norm(hidden_state()), None), hidden_state(), 0.0)
        hidden = add(mlp(norm(hidden)), hidden, 0.0)
        assert torch.equal(hidden, layer(hidden_state(), None)[0])
    config = TransformerConfig(**SHAPE, **EXPERTS)
    submodules = MoESubmodules(experts=ModuleSpec(SequentialMLP, submodules=FEED_FORWARD), router=TopKRouter)
    experts = MoELayer(config, submodules, layer_number=1, name="b")
    found, bias = experts(hidden_state())
    assert bias is None and torch.equal(found, moe.MoELayer(config.ours(), name="b")(hidden_state()))
    router = TopKRouter(config, name="b.router")
    probs, choices = router(hidden_state())
    expected = experts.router(hidden_state().flatten(0, 1))
    assert torch.equal(probs, expected[0]) and torch.equal(choices, expected[1]) and choices.sum() == 8
    assert isinstance(experts.router, TopKRouter) and isinstance(experts.experts, SequentialMLP)
    assert isinstance(experts.dispatcher, MoEAlltoAllTokenDispatcher)
    assert not torch.equal(*(MLP(config, FEED_FORWARD).linear_fc1.weight for _ in range(2))), "drawn apart"


class OwnLayer(TransformerLayer):
    """A layer of a program's own."""


def test_a_block_and_a_gpt_take_a_spec_that_is_written_by_hand() -> None:
    config = TransformerConfig(**SHAPE)
    blocks = [TransformerBlock(config, spec) for spec in (written_spec(), get_gpt_layer_local_spec())]
    blocks[1].load_state_dict(blocks[0].state_dict())
    blocks[1].pre_process = False
    blocks[1].set_input_tensor(hidden_state())
    assert torch.equal(blocks[0](hidden_state(), None), blocks[1](None, None)) and len(blocks[0].layers) == 2
    assert list(blocks[0].sharded_state_dict(prefix="x."))[0].startswith("x.layers.0.")
    tokens = torch.arange(6).view(1, 6)
    specs: list[Any] = [written_spec(), get_gpt_layer_local_spec()]
    specs.append(TransformerBlockSubmodules(layer_specs=specs[:2], layer_norm=WrappedTorchNorm))
    logits = [GPTModel(config, spec, 32, 16)(tokens, None, None) for spec in specs]
    assert torch.equal(logits[0], logits[1]) and torch.equal(logits[0], logits[2])
    mixed = TransformerConfig(**SHAPE, **EXPERTS, moe_layer_freq=[0, 1])
    both = TransformerBlockSubmodules([get_gpt_layer_local_spec(), get_gpt_layer_local_spec(2)], WrappedTorchNorm)
    model = GPTModel(mixed, both, 32, 16)
    assert [type(layer.mlp).__name__ for layer in model.decoder.layers] == ["MLP", "MoELayer"]
    layers = model.decoder.layers
    assert isinstance(model.decoder, TransformerBlock) and all(isinstance(layer, TransformerLayer) for layer in layers)
    assert isinstance(layers[0].mlp, MLP) and isinstance(layers[1].mlp, MoELayer)
    assert not isinstance(layers[0], OwnLayer) and isinstance(OwnLayer(config, written_spec().submodules), OwnLayer)
    assert isinstance(layers[0].self_attention, SelfAttention) and not isinstance(layers[0].mlp, MoELayer)


class Own(nn.Module):
    """An attention of a program's own."""


REFUSED: list[tuple[Callable[[TransformerConfig], Any], str]] = [
    (lambda c: GPTModel(c, written_spec(self_attention=ModuleSpec(module=Own)), 32, 16),
     "self_attention is Own, and with this config our layer has SelfAttention there; put a layer of your own"),
    (lambda c: GPTModel(c, written_spec(input_layernorm=IdentityOp), 32, 16), "input_layernorm is IdentityOp"),
    (lambda c: GPTModel(c, written_spec(mlp=ModuleSpec(MoELayer)), 32, 16), "mlp is MoELayer, .* our layer has MLP"),
    (lambda c: GPTModel(c, written_spec(self_attention=ModuleSpec(SelfAttention, submodules=ATTENTION)), 32, 16),
     r"attn_mask_type=None\) is not what our layer does: it has AttnMaskType.causal"),
    (lambda c: GPTModel(c, TransformerBlockSubmodules([written_spec()], WrappedTorchNorm), 32, 16),
     "1 layers and this stage 2"),
    (lambda c: GPTModel(c, TransformerBlockSubmodules([written_spec()] * 2), 32, 16), "layer_norm is None, and"),
    (lambda c: SelfAttention(c, ATTENTION, 1), "it has AttnMaskType.causal"),
    (lambda c: MLP(c, MLPSubmodules(linear_fc1=Own, linear_fc2=RowParallelLinear)), "MLP: linear_fc1 is Own"),
    (lambda c: MLP(c, FEED_FORWARD, is_expert=True), r"MLP\(is_expert=True\) is not supported.* MoELayer"),
    (lambda c: TransformerLayer(c, written_spec().submodules, is_mtp_layer=True), "multi-token prediction"),
    (lambda c: TopKRouter(c, is_mtp_layer=True), r"TopKRouter\(is_mtp_layer=True\) is not supported.*multi-token"),
    (lambda c: TransformerLayer(c, None), "must come from get_gpt_layer_local_spec"),
    (lambda c: TransformerBlock(c, written_spec())(hidden_state(), None, rotary_pos_emb=torch.ones(1)),
     r"TransformerBlock.forward\(rotary_pos_emb=...\) is not supported.*position_embedding_type='rope'"),
    (lambda c: TransformerLayer(c, written_spec().submodules)(hidden_state(), torch.ones(8, 8).bool()),
     "is not the causal one"),
]  # fmt: skip


@pytest.mark.parametrize(("made", "says"), REFUSED)
def test_what_our_layers_do_not_have_is_refused_by_name(made: Callable[[TransformerConfig], Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        made(TransformerConfig(**SHAPE))


def test_an_attention_without_its_layer_says_what_to_call() -> None:
    with pytest.raises(NotImplementedError, match="scaled_dot_product_attention"):
        DotProductAttention(None, 1, AttnMaskType.causal, "self")
    for made, says in (
        (lambda: MoEAlltoAllTokenDispatcher(2, [0, 1], TransformerConfig(**SHAPE)), "MoELayer.config. makes it"),
        (lambda: SequentialMLP(2, TransformerConfig(**SHAPE), FEED_FORWARD), "MoELayer.config. makes it"),
        (lambda: mcore.optimizer.MegatronOptimizer(None, None), "call get_megatron_optimizer"),
    ):
        with pytest.raises(NotImplementedError, match=f"cannot be made by Megatron's arguments: {says}"):
            made()
    with pytest.raises(ImportError, match="cross attention is not built"):
        exec("from core.compat.megatron.transformer.attention import CrossAttention")
