"""Adapters of a model that is split: what was set on them is carried over, and what cannot be split is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from core import parallel_state
from core.booster import Booster
from core.booster.plugin import HybridParallelPlugin, LowLevelZeroPlugin, TorchDDPPlugin
from tests.unit_tests.booster.test_adapter_directories import IDS, LAYERS, adapted, base
from tests.unit_tests.ranks import ranks

peft = pytest.importorskip("peft")


def scale(model: Any) -> None:
    for layer in lora_layers(model)[:2]:
        layer.set_scale("default", 5.0)


def no_dropout(model: Any) -> None:
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0


def one_layer_off(model: Any) -> None:
    no_dropout(model)
    lora_layers(model)[0].enable_adapters(False)


def in_evaluation(model: Any) -> None:
    model.eval()


def lora_layers(model: Any) -> list[Any]:
    return [module for module in model.modules() if isinstance(module, peft.tuners.lora.LoraLayer)]


def model_of(change: Callable[[Any], None]) -> Any:
    torch.manual_seed(1)
    dropout = 0.0 if change is scale else 0.5
    config = peft.LoraConfig(r=2, target_modules=LAYERS, lora_dropout=dropout, init_lora_weights=False)
    model = peft.get_peft_model(base().train(), config)
    change(model)
    return model


@ranks(2)
@pytest.mark.parametrize("change", [scale, no_dropout, one_layer_off, in_evaluation])
@pytest.mark.parametrize("pp", [1, 2])
@pytest.mark.in_suite()
def test_what_was_set_on_adapters_is_carried_over(
    rank: int, world: int, pp: int, change: Callable[[Any], None]
) -> None:
    """The split makes adapters again by their configuration: scales and dropout went back to it without a word."""
    model = model_of(change)
    expected = copy.deepcopy(model)(input_ids=IDS, labels=IDS).loss
    plain = model_of(lambda model: None)(input_ids=IDS, labels=IDS).loss
    assert (expected - plain).abs() > 1e-3, "the change changes nothing"
    micro = {"num_microbatches": 2} if pp > 1 else {}
    booster = Booster(plugin=HybridParallelPlugin(2 // pp, pp, precision="fp32", **micro))
    optimizer = torch.optim.SGD([param for param in model.parameters() if param.requires_grad], lr=0.1)
    boosted, optimizer, *_ = booster.boost(model, optimizer)
    if pp > 1:
        batch = {"input_ids": IDS, "labels": IDS}
        found = booster.execute_pipeline(iter([batch]), boosted, None, optimizer)["loss"]
    else:
        found = boosted(input_ids=IDS, labels=IDS).loss
    torch.testing.assert_close(found.detach(), expected.detach(), atol=1e-5, rtol=0)


@ranks(2)
@pytest.mark.parametrize(
    ("method", "pp"), [("saved modules", 1), ("saved modules", 2), ("prompt", 1), ("p-tuning", 1), ("prefix", 1)]
)
def test_new_modules_and_virtual_tokens_train_as_on_one_process(
    rank: int, world: int, method: str, pp: int, tmp_path: Path
) -> None:
    """Modules that are saved next to adapters, such as a new head, prompts and prefixes were refused when split."""
    model, micro = adapted(method), {"num_microbatches": 2} if pp > 1 else {}
    reference, batch = copy.deepcopy(model), {"input_ids": IDS, "labels": IDS}
    plain = torch.optim.SGD([param for param in reference.parameters() if param.requires_grad], lr=0.5)
    booster = Booster(plugin=HybridParallelPlugin(2 // pp, pp, precision="fp32", parallel_output=True, **micro))
    optimizer = torch.optim.SGD([param for param in model.parameters() if param.requires_grad], lr=0.5)
    boosted, optimizer, *_ = booster.boost(model, optimizer)
    for _ in range(2):
        expected = reference(**batch).loss
        expected.backward()
        plain.step()
        plain.zero_grad()
        if pp > 1:
            found = booster.execute_pipeline(iter([batch]), boosted, None, optimizer)["loss"]
        else:
            found = boosted(**batch).loss
            booster.backward(found, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        torch.testing.assert_close(found.detach(), expected.detach(), atol=1e-5, rtol=0)
    booster.save_model(boosted, tmp_path, shard=True, use_safetensors=True)
    torch.distributed.barrier()
    found, before = peft.utils.load_peft_weights(str(tmp_path), device="cpu"), adapted(method)
    wanted, start = (peft.get_peft_model_state_dict(each) for each in (reference, before))
    assert found.keys() == wanted.keys() and any("lora_" not in name for name in wanted)
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, atol=1e-5, rtol=0)
        assert (value - start[name]).abs().max() > 1e-3


def with_two_adapters(active: str) -> Any:
    """LoRA of two names and ranks."""
    model = model_of(no_dropout)
    model.add_adapter("other", peft.LoraConfig(r=3, target_modules=LAYERS[:2], init_lora_weights=False))
    model.set_adapter(active)
    return model.eval()


@ranks(2)
@pytest.mark.parametrize("active", ["default", "other"])
def test_two_adapters_are_split_switched_and_saved(rank: int, world: int, active: str, tmp_path: Path) -> None:
    """DPO of adapters answers with a second one, the reference."""
    model, idle = with_two_adapters(active), "other" if active == "default" else "default"
    reference, batch = copy.deepcopy(model), {"input_ids": IDS, "labels": IDS}
    plain = torch.optim.SGD([param for param in reference.parameters() if param.requires_grad], lr=0.5)
    booster = Booster(plugin=HybridParallelPlugin(2, 1, precision="fp32"))
    optimizer = torch.optim.SGD([param for param in model.parameters() if param.requires_grad], lr=0.5)
    boosted, optimizer, *_ = booster.boost(model, optimizer)
    start = reference(**batch).loss.detach()
    for _ in range(2):
        losses = []
        for each in (reference, boosted.unwrap()):
            each.set_adapter(idle)
            with torch.no_grad():
                losses.append(each(**batch).loss)
            each.set_adapter(active)
        assert float(losses[1]) == pytest.approx(float(losses[0]), abs=1e-5) and abs(losses[0] - start) > 1e-3
        expected = reference(**batch).loss
        expected.backward()
        plain.step()
        plain.zero_grad()
        found = boosted(**batch).loss
        booster.backward(found, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        torch.testing.assert_close(found.detach(), expected.detach(), atol=1e-5, rtol=0)
    assert (expected - start).abs() > 1e-2
    booster.save_model(boosted, tmp_path, shard=True, use_safetensors=True)
    torch.distributed.barrier()
    again = peft.PeftModel.from_pretrained(base(), tmp_path).eval()
    again.load_adapter(tmp_path / "other", "other")
    for name in ("default", "other"):
        again.set_adapter(name)
        reference.set_adapter(name)
        torch.testing.assert_close(again(**batch).loss, reference(**batch).loss, atol=1e-5, rtol=0)
    booster.load_model(boosted, tmp_path)


@ranks(2)
def test_adapters_that_cannot_be_split_are_refused(rank: int, world: int) -> None:
    model = with_two_adapters("default")
    model.base_model.set_adapter(["default", "other"])
    with pytest.raises(ValueError, match=r"default, other, active \['default', 'other'\]; one is active in a split"):
        Booster(plugin=HybridParallelPlugin(2, 1, precision="fp32")).boost(model)
    parallel_state.destroy_model_parallel()
    model = adapted("ia3")
    optimizer = torch.optim.SGD([param for param in model.parameters() if param.requires_grad], lr=0.1)
    with pytest.raises(ValueError, match="adapters of type IA3, and only LoRA adapters can be split") as caught:
        Booster(plugin=HybridParallelPlugin(2, 1, precision="fp32")).boost(model, optimizer)
    assert "\n" not in str(caught.value)


@ranks(2)
def test_an_adapter_that_is_merged_into_the_weights_is_refused(rank: int, world: int) -> None:
    model = model_of(no_dropout)
    model.merge_adapter()
    optimizer = torch.optim.SGD([param for param in model.parameters() if param.requires_grad], lr=0.1)
    with pytest.raises(ValueError, match="q_proj', and would be added a second time; call model.unmerge_adapter"):
        Booster(plugin=HybridParallelPlugin(2, 1, precision="fp32")).boost(model, optimizer)


def with_table(rank: int) -> Any:
    model = base()
    values = torch.full((4, 4), 2.0 - rank).to(torch.float8_e4m3fn)
    model.model.layers[0].mlp.register_parameter("table", torch.nn.Parameter(values, requires_grad=False))
    return model


@ranks(2)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_frozen_weight_of_8_bits_is_rank_0_s_and_stays(rank: int, world: int, precision: str) -> None:
    """`Invalid scalar type`, out of a broadcast."""
    for make in (lambda: HybridParallelPlugin(2, 1, precision=precision), lambda: LowLevelZeroPlugin(precision="fp32")):
        model = with_table(rank)
        optimizer = torch.optim.SGD([param for param in model.parameters() if param.requires_grad], lr=0.1)
        boosted, *_ = Booster(plugin=make()).boost(model, optimizer)
        (found,) = [param for name, param in boosted.named_parameters() if name.endswith("table")]
        assert found.dtype is torch.float8_e4m3fn and bool((found.float() == 2.0).all())
        if parallel_state.model_parallel_is_initialized():
            parallel_state.destroy_model_parallel()
    with pytest.raises(ValueError, match="mlp.table' is of 8-bit floats, which torch's DDP cannot broadcast; use Low"):
        Booster(plugin=TorchDDPPlugin()).boost(with_table(0))


@ranks(2)
def test_a_boosted_model_has_what_is_right_on_a_part(rank: int, world: int) -> None:
    model = base()
    config = model.config
    boosted, *_ = Booster(plugin=HybridParallelPlugin(2, 1, precision="fp32")).boost(
        model, torch.optim.SGD(model.parameters(), lr=0.1)
    )
    assert boosted.config is config and boosted.dtype is torch.float32 and boosted.device.type == "cpu"
    assert boosted.generation_config is model.generation_config
    assert boosted.get_input_embeddings()(IDS).shape == (*IDS.shape, 16)
    with pytest.raises(AttributeError, match=r"write this rank's part of it; call booster.save_model\(model, dir"):
        boosted.save_pretrained("nowhere")
    with pytest.raises(AttributeError, match="does not pass on 'resize_token_embeddings' of LlamaForCausalLM"):
        boosted.resize_token_embeddings(50)
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = boosted.nothing
