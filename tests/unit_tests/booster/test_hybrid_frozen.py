"""HybridParallelPlugin with pipeline stages on which nothing is trained: steps, norms, checkpoints, adapters."""

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from core.booster import Booster
from core.booster.plugin import HybridParallelPlugin
from core.groups.agree import SyncError
from core.verify.in_double import InDouble
from tests.unit_tests.hugging_face.models import small, tokens
from tests.unit_tests.ranks import ranks

LAYERS, STEPS = 4, 3
LOWER = ("model.embed_tokens", "model.layers.0.", "model.layers.1.")
UPPER = ("model.layers.2.", "model.layers.3.", "model.norm", "lm_head")


def batch_of(step: int, data_rank: int = 0) -> dict[str, torch.Tensor]:
    ids = tokens(4, seed=10 * step + data_rank)
    return {"input_ids": ids, "labels": ids}


def llama(frozen: tuple[str, ...]) -> Any:
    model = small("llama", num_hidden_layers=LAYERS)
    for name, param in model.named_parameters():
        param.requires_grad_(not name.startswith(frozen))
    return model


def optimizer_of(model: Any, lr: float = 1e-2) -> torch.optim.Optimizer:
    return torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=lr, eps=1e-4)


def trained_alone(model: Any, data_ranks: int, steps: int = STEPS) -> tuple[list[float], list[float]]:
    """Losses, and norms before they are clipped to 0.5."""
    optimizer = optimizer_of(model)
    losses, norms = [], []
    for step in range(steps):
        optimizer.zero_grad()
        loss = torch.stack([model(**batch_of(step, rank)).loss for rank in range(data_ranks)]).mean()
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, norms


def boosted(model: Any, **options: Any) -> tuple[Booster, Any, Any]:
    stated = {"tp_size": 1, "pp_size": 2, "precision": "fp32", "num_microbatches": 2, "max_norm": 0.5, **options}
    booster = Booster(plugin=HybridParallelPlugin(**stated))
    model, optimizer, *_ = booster.boost(model, optimizer_of(model))
    return booster, model, optimizer


def steps_of(booster: Booster, model: Any, optimizer: Any, steps: range) -> tuple[list[float], list[float]]:
    losses, norms = [], []
    for step in steps:
        optimizer.zero_grad()
        batch = batch_of(step, booster.plugin.data_rank())
        losses.append(float(booster.execute_pipeline(iter([batch]), model, None, optimizer)["loss"]))
        optimizer.step()
        norms.append(optimizer.get_grad_norm())
    return losses, norms


def assert_weights(booster: Booster, model: Any, reference: Any, frozen: tuple[str, ...]) -> None:
    start = dict(llama(frozen).named_parameters())
    for name, value in booster.checkpoint_io.model_tensors(model):
        wanted = reference.get_parameter(name)
        torch.testing.assert_close(value.to(wanted), wanted.detach(), rtol=1e-7, atol=1e-8)
        assert torch.equal(wanted, start[name]) == name.startswith(frozen), name


@ranks(2)
@pytest.mark.parametrize("frozen", [LOWER, UPPER], ids=["first", "last"])
@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
@pytest.mark.in_suite()
def test_a_stage_without_trainable_parameters_trains_as_in_one_process(
    rank: int, world: int, frozen: tuple[str, ...], zero_stage: int, tmp_path: Path
) -> None:
    """Its second step once waited for a reduction that the other stage was not in. Files load where it trains."""
    reference = llama(frozen)
    with InDouble():
        losses, norms = trained_alone(reference, 1)
        booster, model, optimizer = boosted(llama(frozen), zero_stage=zero_stage)
        got = steps_of(booster, model, optimizer, range(2))
        booster.save_model(model, tmp_path / "model", shard=True, use_safetensors=True)
        booster.save_optimizer(optimizer, tmp_path / "optimizer", shard=True)
        last = steps_of(booster, model, optimizer, range(2, STEPS))
        assert [*got[0], *last[0]] == pytest.approx(losses, abs=1e-8)
        assert [*got[1], *last[1]] == pytest.approx(norms, rel=1e-7)
        assert_weights(booster, model, reference, frozen)
        booster.load_model(model, tmp_path / "model")
        booster.load_optimizer(optimizer, tmp_path / "optimizer")
        again = steps_of(booster, model, optimizer, range(2, STEPS))
    assert again[0] == pytest.approx(last[0], abs=1e-8)
    assert_weights(booster, model, reference, frozen)


@ranks(2)
@pytest.mark.parametrize("frozen", [LOWER, UPPER], ids=["first", "last"])
def test_a_second_step_of_the_same_gradients_is_refused_on_every_stage(
    rank: int, world: int, frozen: tuple[str, ...]
) -> None:
    booster, model, optimizer = boosted(llama(frozen))
    steps_of(booster, model, optimizer, range(1))
    with pytest.raises(SyncError, match="came a second time without a backward in between"):
        optimizer.step()
    steps_of(booster, model, optimizer, range(1))


@ranks(2)
def test_adapters_on_the_upper_layers_alone_train_as_in_one_process(rank: int, world: int, tmp_path: Path) -> None:
    """The lower stage has no adapter, and nothing to train. Its directory loads in peft, and back."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"], layers_to_transform=[2, 3])
    torch.manual_seed(3)
    reference = peft.get_peft_model(llama(()), config)
    with torch.no_grad():
        for name, param in reference.named_parameters():
            if "lora_B" in name:
                param.normal_(std=0.1)
    reference.save_pretrained(str(tmp_path / f"start{rank}"))
    with InDouble():
        booster = Booster(plugin=HybridParallelPlugin(1, 2, precision="fp32", num_microbatches=2, max_norm=0.5))
        model = booster.enable_lora(llama(()), pretrained_dir=str(tmp_path / f"start{rank}"))
        reference, model = reference.double(), model.double()
        start = {name: p.detach().clone() for name, p in reference.named_parameters() if p.requires_grad}
        losses, norms = trained_alone(reference, 1)
        model, optimizer, *_ = booster.boost(model, optimizer_of(model))
        got = steps_of(booster, model, optimizer, range(STEPS))
    assert got[0] == pytest.approx(losses, abs=1e-8)
    assert got[1] == pytest.approx(norms, rel=1e-7)
    booster.save_lora_as_pretrained(model, tmp_path / "end")
    torch.distributed.barrier()
    loaded = peft.PeftModel.from_pretrained(llama(()), tmp_path / "end")
    assert len(start) == 8
    for name, before in start.items():
        wanted = reference.get_parameter(name).detach()
        torch.testing.assert_close(loaded.get_parameter(name).double(), wanted, rtol=1e-5, atol=1e-6)
        assert float((wanted - before).abs().max()) > 1e-3
