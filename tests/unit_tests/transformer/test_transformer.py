"""The transformer's parts against formulas written out, their dropout under tensor parallelism, and refused shapes."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from core import parallel_state
from core.distributed.contract.gradient_contract import read_contracts
from core.groups.process_groups import ProcessGroups
from core.model_parallel_config import ModelParallelConfig
from core.models import TransformerBlock
from core.tensor_parallel import get_rng_tracker, model_parallel_manual_seed
from core.tensor_parallel.mappings import gather_first, split_first
from core.transformer import (
    MLP,
    LanguageModelEmbedding,
    LayerNorm,
    RMSNorm,
    RotaryEmbedding,
    SelfAttention,
    TransformerConfig,
)
from core.transformer.dropout import hidden_dropout
from tests.unit_tests.ranks import ranks
from tests.unit_tests.tensor_parallel.test_tensor_parallel_layers import normal

ALONE = ProcessGroups()


def config(**changes: Any) -> TransformerConfig:
    settings: dict[str, Any] = dict(
        num_layers=2, hidden_size=16, num_attention_heads=4, vocab_size=13, max_sequence_length=16, init_method_std=0.3,
        params_dtype=torch.float64,
    )  # fmt: skip
    return TransformerConfig(**{**settings, **changes})


def test_layer_norm_and_rms_norm_are_their_formulas() -> None:
    x = normal(5, 3, 8)
    layer_norm, rms_norm = LayerNorm(config(), 8, eps=1e-3), RMSNorm(config(), 8, eps=1e-3)
    for param, seed in ((layer_norm.weight, 1), (layer_norm.bias, 2), (rms_norm.weight, 3)):
        param.data = normal(8, seed=seed)
    centred = x - x.mean(-1, keepdim=True)
    variance = centred.pow(2).mean(-1, keepdim=True)
    torch.testing.assert_close(layer_norm(x), centred / (variance + 1e-3).sqrt() * layer_norm.weight + layer_norm.bias)
    torch.testing.assert_close(rms_norm(x), x / (x.pow(2).mean(-1, keepdim=True) + 1e-3).sqrt() * rms_norm.weight)


def test_rotary_scores_depend_on_the_distance_only_and_lengths_stay() -> None:
    rotary = RotaryEmbedding(8)
    query, key = normal(1, 1, 1, 8).expand(6, 1, 1, 8), normal(1, 1, 1, 8, seed=1).expand(6, 1, 1, 8)
    turned_query, turned_key = rotary(query, key)
    scores = torch.einsum("ibnd,jbnd->ij", turned_query, turned_key)
    for distance in range(-5, 6):
        diagonal = scores.diagonal(distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal))
    assert (scores[0] - scores[0, 0]).abs().max() > 0.1
    torch.testing.assert_close(turned_query.norm(dim=-1), query.norm(dim=-1))
    torch.testing.assert_close(turned_query[0], query[0])  # position 0 is not turned


def test_rotary_turns_a_pair_by_the_position_times_its_frequency() -> None:
    x = torch.zeros(3, 1, 1, 4, dtype=torch.float64)
    x[..., 1] = 1.0  # the second pair is channels 1 and 3; its frequency is 100 ** (-2 / 4) = 0.1
    (turned,) = RotaryEmbedding(4, base=100.0)(x)
    for position in range(3):
        expected = torch.tensor([0.0, math.cos(0.1 * position), 0.0, math.sin(0.1 * position)], dtype=torch.float64)
        torch.testing.assert_close(turned[position, 0, 0], expected)


@pytest.mark.parametrize("groups", [4, 2, 1])
def test_attention_is_a_causal_softmax_of_scaled_products(groups: int) -> None:
    attention = SelfAttention(config(num_query_groups=groups), pg_collection=ALONE, name="attention")
    attention.linear_qkv.bias.data = normal(attention.linear_qkv.bias.numel(), seed=1)
    x, heads, size = normal(6, 2, 16), 4, 4
    mixed = F.linear(x, attention.linear_qkv.weight, attention.linear_qkv.bias).view(6, 2, groups, -1, size)

    context = torch.zeros(6, 2, heads, size, dtype=torch.float64)
    for b in range(2):
        for head in range(heads):
            group, place = divmod(head, heads // groups)
            query, key, value = mixed[:, b, group, place], mixed[:, b, group, -2], mixed[:, b, group, -1]
            for i in range(6):
                weights = torch.softmax(key[: i + 1] @ query[i] / size**0.5, dim=0)
                context[i, b, head] = weights @ value[: i + 1]
    projection = attention.linear_proj
    torch.testing.assert_close(attention(x), F.linear(context.flatten(2), projection.weight, projection.bias))


@pytest.mark.parametrize("groups", [4, 2])
def test_with_rotary_positions_backward_does_not_keep_the_projection(groups: int) -> None:
    """Values alone come from it unchanged, and as a view they would hold the memory of queries and keys too."""
    settings = config(num_query_groups=groups, position_embedding_type="rope")
    attention = SelfAttention(settings, pg_collection=ALONE, name="attention")
    weights = {param.untyped_storage().data_ptr() for param in attention.parameters()}
    saved: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        context = attention(normal(6, 2, 16).requires_grad_())
    projection = 6 * 2 * (4 + 2 * groups) * 4 * 8
    assert max(saved.values()) == context.nbytes < projection, sorted(saved.values())


@ranks(2)
@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["", "sp"])
def test_gradients_of_norms_over_split_heads_are_partial_whatever_the_modules_name(
    rank: int, world: int, sequence_parallel: bool
) -> None:
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=world)
    settings = config(tensor_model_parallel_size=world, sequence_parallel=sequence_parallel, qk_layernorm=True)
    attention = SelfAttention(settings, name="attention")
    others = ModelParallelConfig(tensor_model_parallel_size=world, sequence_parallel=sequence_parallel)
    norms = [*attention.q_layernorm.named_parameters(), *attention.k_layernorm.named_parameters()]
    assert len(norms) == 4
    for name, param in norms:
        contract = read_contracts([(name, param)], [], parallel_state.get_process_groups(), others)[name]
        assert contract.partial_over == ("tp",)
        assert not hasattr(param, "sequence_parallel"), "their partial gradients have nothing to do with the sequence"


def test_swiglu_multiplies_the_gated_half_by_the_other() -> None:
    mlp = MLP(config(activation="swiglu", ffn_hidden_size=6), pg_collection=ALONE, name="mlp")
    x = normal(6, 2, 16)
    gate, up = x @ mlp.linear_fc1.weight[:6].t(), x @ mlp.linear_fc1.weight[6:].t()
    torch.testing.assert_close(mlp(x), (gate * torch.sigmoid(gate) * up) @ mlp.linear_fc2.weight.t())


def test_gelu_is_the_exact_one() -> None:
    mlp = MLP(config(ffn_hidden_size=6), pg_collection=ALONE, name="mlp")
    x = normal(6, 2, 16)
    wide = x @ mlp.linear_fc1.weight.t()
    wide = wide * 0.5 * (1 + torch.erf(wide / 2**0.5))
    torch.testing.assert_close(mlp(x), wide @ mlp.linear_fc2.weight.t())


def test_embedding_adds_word_and_position() -> None:
    embedding = LanguageModelEmbedding(config(), pg_collection=ALONE, name="embedding")
    ids = torch.tensor([[3, 1, 3], [0, 12, 5]])
    word, position = embedding.word_embeddings.weight, embedding.position_embeddings.weight
    output = embedding(ids)
    for b in range(2):
        for s in range(3):
            torch.testing.assert_close(output[s, b], word[ids[b, s]] + position[s])
    with pytest.raises(ValueError, match="17 tokens; max_sequence_length: 16"):
        embedding(torch.zeros(1, 17, dtype=torch.long))


# -- dropout --------------------------------------------------------------------------------------------


def seeded(world: int) -> dist.ProcessGroup:
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=world)
    model_parallel_manual_seed(9)
    return parallel_state.get_tensor_model_parallel_group()


@ranks(2)
@pytest.mark.parametrize("split", [False, True], ids=["replicated", "split"])
def test_ranks_drop_the_same_of_a_replica_and_their_own_of_a_split(rank: int, world: int, split: bool) -> None:
    group = seeded(world)
    ones = torch.ones(8, 2, 16, dtype=torch.float64)
    dropped = hidden_dropout(ones, 0.5, training=True, tp_size=world, is_split=split)
    both = gather_first(dropped.unsqueeze(0), group)
    assert torch.equal(both[0], both[1]) is not split
    assert 0 < (dropped == 0).double().mean() < 1 and set(dropped.unique().tolist()) == {0.0, 2.0}
    assert hidden_dropout(ones, 0.5, training=False, tp_size=world, is_split=split) is ones


@ranks(2)
def test_ranks_drop_different_attention_weights(rank: int, world: int) -> None:
    group = seeded(world)
    attention = SelfAttention(config(tensor_model_parallel_size=world, attention_dropout=0.5), name="attention")
    ones = torch.ones(8, 2, 2, 4, dtype=torch.float64)
    both = gather_first(attention._attend(ones, ones, ones).unsqueeze(0), group)
    assert not torch.equal(both[0], both[1])
    attention.eval()
    torch.testing.assert_close(attention._attend(ones, ones, ones), torch.ones(8, 2, 8, dtype=torch.float64))


@ranks(2)
@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["", "sp"])
@pytest.mark.parametrize("granularity", ["full", "selective"])
def test_with_dropout_recomputed_layers_have_the_same_gradients(
    rank: int, world: int, sequence_parallel: bool, granularity: str
) -> None:
    def run(recompute: str | None) -> tuple[Tensor, Tensor, list[Tensor]]:
        model_parallel_manual_seed(9)
        settings = config(
            tensor_model_parallel_size=world, sequence_parallel=sequence_parallel, hidden_dropout=0.3,
            attention_dropout=0.3, recompute_granularity=recompute, activation="swiglu",
            recompute_modules=("core_attn", "layernorm", "mlp_act"),
        )  # fmt: skip
        block = TransformerBlock(settings, name="block")
        x = normal(8, 2, 16)
        x = (split_first(x, group) if sequence_parallel else x).requires_grad_()
        output = block(x)
        output.pow(2).sum().backward()
        return output.detach(), x.grad, [param.grad for param in block.parameters()]

    group = seeded(world)
    plain, recomputed = run(None), run(granularity)

    assert torch.equal(plain[0], recomputed[0])
    assert torch.equal(plain[1], recomputed[1])
    assert all(torch.equal(a, b) for a, b in zip(plain[2], recomputed[2], strict=True))
    assert all(grad.abs().max() > 1e-6 for grad in plain[2])
    if not sequence_parallel:
        both = gather_first(plain[0].unsqueeze(0), group)
        assert torch.equal(both[0], both[1]), "the replicated hidden state differs between ranks"


@ranks(2)
def test_dropout_over_ranks_without_seeded_streams_says_what_to_call(rank: int, world: int) -> None:
    get_rng_tracker().reset()
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=world)
    attention = SelfAttention(config(tensor_model_parallel_size=world, attention_dropout=0.5), name="attention")
    with pytest.raises(RuntimeError, match="model_parallel_manual_seed"):
        attention(normal(8, 2, 16))
    with pytest.raises(RuntimeError, match="model_parallel_manual_seed"):
        hidden_dropout(torch.ones(8, 2, 16), 0.5, training=True, tp_size=world, is_split=False)


def test_a_rank_alone_drops_as_its_user_has_seeded_it() -> None:
    get_rng_tracker().reset()
    ones = torch.ones(8, 2, 16)
    torch.manual_seed(4)
    expected = F.dropout(ones, 0.5)
    torch.manual_seed(4)
    assert torch.equal(hidden_dropout(ones, 0.5, training=True, tp_size=1, is_split=False), expected)


# -- configuration --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 18}, "hidden_size 18 is not divisible by num_attention_heads 4"),
        ({"num_query_groups": 3}, "num_attention_heads 4 is not divisible by num_query_groups 3"),
        ({"tensor_model_parallel_size": 4, "num_query_groups": 2}, r"num_query_groups 2 .*size 4.*\(2 / 4 = 0.5\)"),
        ({"tensor_model_parallel_size": 3}, "ffn_hidden_size 64 is not divisible by tensor_model_parallel_size 3"),
        ({"tensor_model_parallel_size": 8}, "num_attention_heads 4 is not divisible by tensor_model_parallel_size 8"),
        ({"normalization": "BatchNorm"}, "normalization is 'BatchNorm', expected one of"),
        ({"recompute_granularity": "some"}, "recompute_granularity is 'some'"),
        ({"num_layers": 0}, "num_layers must be an integer of at least 1, got 0"),
        ({"attention_dropout": 1.0}, "attention_dropout must be a number of at least 0 and below 1, got 1.0"),
        ({"hidden_size": 12, "position_embedding_type": "rope"}, "a head has 3, use an even size"),
        ({"sequence_parallel": True}, "sequence_parallel=True with tensor_model_parallel_size=1"),
    ],
)
def test_a_shape_that_does_not_fit_is_refused_with_the_arithmetic(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config(**changes)
