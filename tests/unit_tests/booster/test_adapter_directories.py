"""`booster.save_model` of a model with adapters writes what peft's `save_pretrained` writes, and reads it back."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from core.booster import Booster
from core.booster.plugin import HybridParallelPlugin, LowLevelZeroPlugin, TorchDDPPlugin
from tests.unit_tests.ranks import ranks

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

LAYERS = ["q_proj", "v_proj", "down_proj"]
METHODS: dict[str, Callable[[], Any]] = {
    "lora": lambda: peft.LoraConfig(r=2, target_modules=LAYERS, task_type="CAUSAL_LM"),
    "saved modules": lambda: peft.LoraConfig(r=2, target_modules=LAYERS, modules_to_save=["embed_tokens", "lm_head"]),
    "dora": lambda: peft.LoraConfig(r=2, target_modules=LAYERS, use_dora=True, modules_to_save=["lm_head"]),
    "ia3": lambda: peft.IA3Config(target_modules=LAYERS, feedforward_modules=["down_proj"]),
    "loha": lambda: peft.LoHaConfig(r=2, target_modules=LAYERS),
    "lokr": lambda: peft.LoKrConfig(r=2, target_modules=LAYERS),
    "vera": lambda: peft.VeraConfig(r=2, target_modules=["q_proj", "v_proj"]),
    "oft": lambda: peft.OFTConfig(r=0, oft_block_size=4, target_modules=LAYERS),
    "adalora": lambda: peft.AdaLoraConfig(target_modules=LAYERS, total_step=10),
    "vblora": lambda: peft.VBLoRAConfig(r=2, target_modules=LAYERS, num_vectors=6, vector_length=8),
    "lily": lambda: peft.LilyConfig(r=2, target_modules=["q_proj", "v_proj"]),  # layers share a parameter
    "fourierft": lambda: peft.FourierFTConfig(n_frequency=5, target_modules=["q_proj", "v_proj"]),
    "prompt": lambda: peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
    "prefix": lambda: peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
    "p-tuning": lambda: peft.PromptEncoderConfig(task_type="CAUSAL_LM", num_virtual_tokens=3, encoder_hidden_size=8),
}
ENCODED = ("p-tuning",)  # peft saves what the encoder computes


def base() -> Any:
    torch.manual_seed(0)
    sizes = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=2, initializer_range=0.3)
    return transformers.AutoModelForCausalLM.from_config(config).eval()


def adapted(method: str) -> Any:
    torch.manual_seed(1)
    model = peft.get_peft_model(base(), METHODS[method]())
    with torch.no_grad():
        for param in model.parameters():
            if param.requires_grad:
                param.add_(0.1 * torch.randn_like(param))
    return model.eval()


def plugin_of(layout: str) -> Any:
    if layout == "zero":
        return LowLevelZeroPlugin(stage=2, precision="fp32")
    if layout == "ddp":
        return TorchDDPPlugin()
    tp, pp, stage = {"zero 3": (1, 1, 3), "tp": (2, 1, 1), "pp": (1, 2, 1)}[layout]
    return HybridParallelPlugin(
        tp, pp, precision="fp32", zero_stage=stage, **({"num_microbatches": 1} if pp > 1 else {})
    )


IDS = torch.arange(12).view(2, 6)
CASES = [(method, "zero 3") for method in METHODS] + [("ia3", "zero"), ("oft", "ddp"), ("prompt", "zero")]


SAVED = [("saved modules", "tp"), ("saved modules", "pp"), ("prompt", "tp"), ("p-tuning", "tp"), ("prefix", "tp")]


@ranks(2)
@pytest.mark.parametrize(("method", "layout"), [*CASES, ("lora", "tp"), ("lora", "pp"), *SAVED])
@pytest.mark.in_suite(6)
def test_a_directory_of_adapters_is_the_one_that_peft_writes_and_is_read_back(
    rank: int, world: int, method: str, layout: str, tmp_path: Path
) -> None:
    """The base's config.json and names of peft's wrappers were written: from_pretrained drew all weights anew."""
    model = adapted(method)
    expected_folder, folder = tmp_path / f"expected{rank}", tmp_path / "found"
    model.save_pretrained(str(expected_folder))
    wanted = model(input_ids=IDS).logits.detach()
    booster = Booster(plugin=plugin_of(layout))
    optimizer = torch.optim.SGD([param for param in model.parameters() if param.requires_grad], lr=0.1)
    boosted, optimizer, *_ = booster.boost(model, optimizer)
    booster.save_model(boosted, folder, shard=True, use_safetensors=True)
    dist.barrier()
    expected = peft.utils.load_peft_weights(str(expected_folder), device="cpu")
    found = peft.utils.load_peft_weights(str(folder), device="cpu")
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, atol=1e-6, rtol=0)
    settings = [json.loads((each / "adapter_config.json").read_text()) for each in (folder, expected_folder)]
    for each in settings:  # peft writes sets, whose order differs between processes
        each.update({name: sorted(value) for name, value in each.items() if isinstance(value, list)})
    assert {k: v for k, v in settings[0].items() if k != "inference_mode"} == {
        k: v for k, v in settings[1].items() if k != "inference_mode"
    }
    assert not (folder / "config.json").exists()
    again = peft.PeftModel.from_pretrained(base(), str(folder)).eval()
    torch.testing.assert_close(again(input_ids=IDS).logits.detach(), wanted, atol=1e-5, rtol=0)
    if method in ENCODED:
        with pytest.raises(ValueError, match="peft saves of P_TUNING the prompt that its encoder computes"):
            booster.load_model(boosted, folder)
        return
    other = adapted(method)
    with torch.no_grad():
        for param in other.parameters():
            if param.requires_grad:
                param.mul_(1.5)
    optimizer = torch.optim.SGD([param for param in other.parameters() if param.requires_grad], lr=0.1)
    second = Booster(plugin=plugin_of(layout))
    boosted, optimizer, *_ = second.boost(other, optimizer)
    second.load_model(boosted, folder)
    second.save_model(boosted, tmp_path / "again", shard=True, use_safetensors=True)
    dist.barrier()
    for name, value in peft.utils.load_peft_weights(str(tmp_path / "again"), device="cpu").items():
        torch.testing.assert_close(value, expected[name], atol=1e-6, rtol=0)


@ranks(2)
def test_a_directory_of_other_adapters_is_refused_on_every_rank(rank: int, world: int, tmp_path: Path) -> None:
    booster = Booster(plugin=LowLevelZeroPlugin(stage=1, precision="fp32"))
    adapted("ia3").save_pretrained(str(tmp_path / f"ia3 {rank}"))
    model = adapted("lora")
    optimizer = torch.optim.SGD([param for param in model.parameters() if param.requires_grad], lr=0.1)
    boosted, *_ = booster.boost(model, optimizer)
    with pytest.raises(ValueError, match="lacks 12 tensors of the model's adapter 'default'"):
        booster.load_model(boosted, tmp_path / f"ia3 {rank}")
    plain, *_ = Booster(plugin=LowLevelZeroPlugin(stage=1, precision="fp32")).boost(base())
    with pytest.raises(
        ValueError, match="contains adapters, but the model has no adapters; boost PeftModel.from_pretrained"
    ):
        booster.load_model(plain, tmp_path / f"ia3 {rank}")


@ranks(2)
@pytest.mark.parametrize("layout", ["zero", "tp", "pp"])
def test_the_config_is_the_one_that_save_pretrained_writes(rank: int, world: int, layout: str, tmp_path: Path) -> None:
    """A classifier made of a causal directory kept the causal class, and was read as that."""
    base().save_pretrained(tmp_path / "causal")  # the first rank writes
    dist.barrier()
    kind = transformers.LlamaForSequenceClassification
    with torch.random.fork_rng():
        torch.manual_seed(2)
        model = kind.from_pretrained(tmp_path / "causal", num_labels=3, pad_token_id=0)
    reference = copy.deepcopy(model)
    reference.save_pretrained(tmp_path / "expected")
    booster = Booster(plugin=plugin_of(layout))
    boosted, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    booster.save_model(boosted, tmp_path / "found", shard=True, use_safetensors=True)
    dist.barrier()
    found, expected = (json.loads((tmp_path / name / "config.json").read_text()) for name in ("found", "expected"))
    assert found == expected and found["architectures"] == ["LlamaForSequenceClassification"]
    assert found["dtype"] == "float32" and model.config.architectures == ["LlamaForCausalLM"]
