"""recompute_modules: gradients to the bit those without, and only the bytes that are named are kept for backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from core import parallel_state
from core.distributed import finalize_model_grads
from core.groups.process_groups import ProcessGroups
from core.models import GPTModel
from core.tensor_parallel import checkpoint, model_parallel_manual_seed
from core.transformer import TransformerConfig
from core.transformer.transformer_config import RECOMPUTED_PARTS
from core_plan.live_memory import LiveMemory
from tests.unit_tests.ranks import ranks
from tests.unit_tests.reference import whole_grads, wrap

S, B, H, FFN, LAYERS = 16, 2, 32, 96, 2
EXPERTS = {
    "num_moe_experts": 4,
    "moe_layer_freq": 2,
    "moe_ffn_hidden_size": 48,
    "moe_shared_expert_intermediate_size": 24,
    "moe_token_dispatcher_type": "alltoall",
    "moe_aux_loss_coeff": 0.1,
}
SWIGLU = {"activation": "swiglu", "normalization": "RMSNorm", "add_bias_linear": False}
ALL_CHEAP = ("layernorm", "mlp_act", "moe_act")
EVERY = {
    **{part: (part,) for part in RECOMPUTED_PARTS},
    "cheap": ALL_CHEAP,
    "all": RECOMPUTED_PARTS,
    "cheap and core": (*ALL_CHEAP, "core_attn"),
}


def config_of(parts: tuple[str, ...] | None, **more: Any) -> TransformerConfig:
    given: dict[str, Any] = {} if parts is None else {"recompute_granularity": "selective", "recompute_modules": parts}
    sizes = dict(num_layers=LAYERS, hidden_size=H, num_attention_heads=4, ffn_hidden_size=FFN, vocab_size=11)
    return TransformerConfig(**{**sizes, "max_sequence_length": S, "init_method_std": 0.3, **more, **given})


def batch() -> Tensor:
    return torch.randint(0, 11, (B, S), generator=torch.Generator().manual_seed(3))


def step(config: TransformerConfig, groups: ProcessGroups) -> tuple[Tensor, dict[str, Tensor], int]:
    """Loss of each token, every gradient, and the bytes that the forward left for backward."""
    model_parallel_manual_seed(5, groups)
    model = GPTModel(config, groups)
    tokens = batch()
    with LiveMemory([*model.parameters(), tokens]) as live:
        loss = model(tokens, labels=tokens)
        saved = live.live
    (loss.sum() * 3).backward()
    gradients = {name: param.grad for name, param in model.named_parameters() if param.grad is not None}
    return loss.detach(), gradients, saved


def assert_same_bits(found: tuple[Any, ...], expected: tuple[Any, ...]) -> None:
    assert torch.equal(found[0], expected[0])
    assert found[1].keys() == expected[1].keys()
    for name, gradient in expected[1].items():
        assert gradient.abs().max() > 0 and torch.equal(found[1][name], gradient), name


@pytest.mark.parametrize("parts", EVERY)
@pytest.mark.parametrize("variant", [{}, SWIGLU], ids=["gelu", "swiglu"])
def test_gradients_are_those_without_recomputation_to_the_bit(parts: str, variant: dict[str, Any]) -> None:
    dropout = {"hidden_dropout": 0.2, "attention_dropout": 0.1}
    shape = {**variant, **EXPERTS, **dropout, "params_dtype": torch.bfloat16}
    expected = step(config_of(None, **shape), ProcessGroups())
    found = step(config_of(EVERY[parts], **shape), ProcessGroups())
    assert_same_bits(found, expected)
    assert found[2] < expected[2], "and fewer bytes are kept"


def test_the_output_of_a_norm_and_of_an_activation_is_not_kept() -> None:
    """fp32: two norms a layer, whose outputs are [s, b, h]; an activation gives [s, b, ffn]."""
    plain = step(config_of(None), ProcessGroups())[2]
    norms, act = (step(config_of((part,)), ProcessGroups())[2] for part in ("layernorm", "mlp_act"))
    both = step(config_of(("layernorm", "mlp_act")), ProcessGroups())[2]
    # A norm that is not run again keeps a mean and a deviation of each token next to its input.
    assert plain - norms == LAYERS * 2 * (S * B * H + 2 * S * B) * 4
    assert plain - act == LAYERS * S * B * FFN * 4
    assert plain - both == (plain - norms) + (plain - act)


def test_swiglu_keeps_gate_and_value_alone() -> None:
    """Without recomputation silu(gate) and the product are there too: of four [s, b, ffn] two stay."""
    shape = {"activation": "swiglu"}
    plain, act = (step(config_of(parts, **shape), ProcessGroups())[2] for parts in (None, ("mlp_act",)))
    assert plain - act == LAYERS * 2 * S * B * FFN * 4


def test_the_first_layers_alone_are_run_again() -> None:
    plain, all_of, one = (
        step(config_of(parts, **more), ProcessGroups())[2]
        for parts, more in ((None, {}), (ALL_CHEAP[:2], {}), (ALL_CHEAP[:2], {"recompute_num_layers": 1}))
    )
    assert plain - all_of == LAYERS * (plain - one) > 0


def test_a_part_that_layers_do_not_have_is_refused() -> None:
    with pytest.raises(ValueError, match="recompute_modules has 'mla_up_proj', and layers have core_attn, mlp"):
        config_of(("mla_up_proj",))
    with pytest.raises(ValueError, match="recompute_modules has 'moe_act', and num_moe_experts is None"):
        config_of(("moe_act",))
    with pytest.raises(ValueError, match="'shared_experts', and moe_shared_expert_intermediate_size is None"):
        config_of(("shared_experts",), num_moe_experts=2)


@pytest.mark.parametrize("around", ["ours", "torch's", "reentrant"])
def test_a_layer_inside_a_checkpoint_of_ones_own_is_right_too(around: str) -> None:
    def run(parts: tuple[str, ...] | None, is_around: bool) -> list[Tensor]:
        layer = GPTModel(config_of(parts), ProcessGroups()).decoder.layers[0]
        hidden = torch.randn(S, B, H, generator=torch.Generator().manual_seed(1)).requires_grad_()
        if not is_around:
            output = layer(hidden)
        elif around == "ours":
            output = checkpoint(layer, False, hidden)
        else:
            output = torch.utils.checkpoint.checkpoint(layer, hidden, use_reentrant=around == "reentrant")
        (output**2).sum().backward()
        return [hidden.grad, *(param.grad for param in layer.parameters())]

    for found, expected in zip(run(ALL_CHEAP[:2], True), run(None, False), strict=True):
        assert torch.equal(found, expected)


def test_a_graph_that_is_kept_gives_the_same_gradients_again() -> None:
    """Of every part: users take a penalty's gradient first, or try a step again."""
    model = GPTModel(config_of(RECOMPUTED_PARTS, **SWIGLU, **EXPERTS, hidden_dropout=0.2), ProcessGroups())
    model_parallel_manual_seed(5, ProcessGroups())
    loss = model(batch(), labels=batch()).sum()
    first, second = (torch.autograd.grad(loss, [*model.parameters()], retain_graph=True) for _ in range(2))
    assert all(gradient.abs().max() > 0 for gradient in first)
    assert all(map(torch.equal, first, second))


@pytest.mark.parametrize("kept_as", ["output", "view", "data"])
def test_what_a_users_hook_keeps_of_a_norm_or_an_activation_stays_as_it_was(kept_as: str) -> None:
    """Users log activations so. Memory that is given back under them would end the process when they read it."""
    keep = {"output": lambda out: out, "view": lambda out: out.flatten()[3:], "data": lambda out: out.data}[kept_as]
    layer = GPTModel(config_of(ALL_CHEAP[:2]), ProcessGroups()).decoder.layers[0]
    kept: list[Tensor] = []
    copies: list[Tensor] = []

    def hook(_: nn.Module, args: tuple[Tensor, ...], output: Any = None) -> None:
        tensor = keep(args[0] if output is None else output)
        kept.append(tensor)
        copies.append(tensor.clone())

    layer.input_layernorm.register_forward_hook(hook)
    layer.mlp.linear_fc2.register_forward_pre_hook(hook)
    output = layer(torch.randn(S, B, H, requires_grad=True))
    assert len(kept) == 2 and all(map(torch.equal, kept, copies))
    (output**2).sum().backward()
    assert all(map(torch.equal, kept, copies))


def test_a_hook_that_writes_the_output_of_a_norm_has_its_gradient() -> None:
    def gradients(parts: tuple[str, ...] | None) -> list[Tensor]:
        layer = GPTModel(config_of(parts), ProcessGroups()).decoder.layers[0]
        layer.input_layernorm.register_forward_hook(lambda _, args, output: write(output))
        hidden = torch.randn(S, B, H, generator=torch.Generator().manual_seed(1)).requires_grad_()
        (layer(hidden) ** 2).sum().backward()
        return [hidden.grad, *(param.grad for param in layer.parameters())]

    def write(output: Tensor) -> None:
        with torch.no_grad():
            output.mul_(3)

    plain = gradients(None)
    assert all(map(torch.equal, gradients(("layernorm",)), plain))


def test_a_write_to_what_the_consumer_of_a_norm_has_saved_is_refused() -> None:
    """torch compares no versions of what passes through hooks on saved tensors, so these must."""
    layer = GPTModel(config_of(("layernorm",)), ProcessGroups()).decoder.layers[0]
    wide: list[Tensor] = []
    layer.mlp.linear_fc1.register_forward_hook(lambda _, args, output: wide.append(output[0].detach()))
    output = layer(torch.randn(S, B, H, requires_grad=True))
    wide[0].mul_(3)
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation: a tensor of shape \[16, 2, 96\]"):
        output.sum().backward()


@ranks(2)
@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["tp", "sp"])
@pytest.mark.in_suite(1)
def test_gradients_of_split_layers_are_equal_to_the_bit(rank: int, world: int, sequence_parallel: bool) -> None:
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=world)
    groups = parallel_state.get_process_groups()
    shape: dict[str, Any] = {**SWIGLU, **EXPERTS, "hidden_dropout": 0.2, "attention_dropout": 0.1}
    shape |= {"tensor_model_parallel_size": world, "sequence_parallel": sequence_parallel}
    expected = step(config_of(None, **shape), groups)
    for parts in (ALL_CHEAP, RECOMPUTED_PARTS):
        found = step(config_of(parts, **shape), groups)
        assert_same_bits(found, expected)
        assert found[2] < expected[2]


@ranks(2)
@pytest.mark.in_suite(1)
def test_gradients_of_sharded_parameters_are_equal_to_the_bit(rank: int, world: int) -> None:
    """A norm is computed again while the backward of its consumer runs, whose bucket is another one."""
    parallel_state.initialize_model_parallel()
    tokens = batch().roll(rank, 1)

    def gradients(parts: tuple[str, ...] | None) -> dict[str, Tensor]:
        model = GPTModel(config_of(parts, **SWIGLU), parallel_state.get_process_groups())
        ddp = wrap(model, data_parallel_sharding_strategy="optim_grads_params", bucket_size=500)
        ddp(tokens, labels=tokens).mean().backward()
        finalize_model_grads([ddp])
        return whole_grads(ddp)

    expected = gradients(None)
    for parts in (ALL_CHEAP[:2], ("core_attn", "mlp", "layernorm")):
        for name, gradient in gradients(parts).items():
            assert expected[name].abs().max() > 0 and torch.equal(gradient, expected[name]), (parts, name)
