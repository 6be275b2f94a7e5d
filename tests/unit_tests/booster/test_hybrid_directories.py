"""HybridParallelPlugin: models on the meta device, directories read in slices, and adapters of models that are cut."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("transformers")

from core import parallel_state
from core.booster import Booster
from core.booster.plugin import HybridParallelPlugin, MoeHybridParallelPlugin
from tests.unit_tests.booster.booster_reference import sequence
from tests.unit_tests.booster.test_hybrid_parallel import LAYERS, NIGHTLY, batch_of, steps_of
from tests.unit_tests.hugging_face.models import small
from tests.unit_tests.ranks import ranks

FP64 = torch.float64


def booster_of(tp: int, pp: int, **options: Any) -> Booster:
    kind = MoeHybridParallelPlugin if "ep_size" in options else HybridParallelPlugin
    micro = {"num_microbatches": 2} if pp > 1 else {}
    return Booster(plugin=kind(tp, pp, precision="fp32", **{**micro, **options}))


def losses_alone(model: Any, optimizer: torch.optim.Optimizer, data_ranks: int, steps: int) -> list[float]:
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = torch.stack([model(**batch_of(step, rank)).loss for rank in range(data_ranks)]).mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def mean_losses(booster: Booster, model: Any, optimizer: Any, steps: int, pp: int) -> list[float]:
    groups = parallel_state.get_process_groups()
    total = torch.tensor(steps_of(booster, model, optimizer, groups.rank("dp"), range(steps), pp)[0], dtype=FP64)
    dist.all_reduce(total, dist.ReduceOp.AVG, group=groups.dp)
    found: list[float] = total.tolist()
    return found


def saved_once(model: Any, directory: Path, rank: int) -> int:
    """Save in transformers' own form; the bytes of all tensors."""
    if rank == 0:
        model.save_pretrained(directory)
    dist.barrier()
    return sum(file.stat().st_size for file in directory.glob("*.safetensors"))


@ranks(4)
@pytest.mark.parametrize(
    ("family", "tp", "pp", "options", "most"),
    [
        ("llama", 2, 2, {"zero_stage": 3}, 0.36),  # and norms, and the embedding's share of two stages
        pytest.param("llama", 4, 1, {"zero_stage": 1}, 0.30, marks=pytest.mark.nightly),
        ("qwen3_moe", 2, 1, {"zero_stage": 3, "ep_size": 2}, 0.45),  # experts 1 / 4, the rest 1 / 2
    ],
)
def test_a_model_without_memory_reads_its_slices_of_a_directory(
    rank: int, world: int, family: str, tp: int, pp: int, options: dict[str, Any], most: float, tmp_path: Path
) -> None:
    reference = small(family, FP64, num_hidden_layers=LAYERS, **NIGHTLY[family])
    size = saved_once(reference, tmp_path / "model", rank)
    with torch.device("meta"):
        model = type(reference)(copy.deepcopy(reference.config)).to(FP64)
    booster = booster_of(tp, pp, **options)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.05)
    model, optimizer, *_ = booster.boost(model, optimizer)
    with pytest.raises(RuntimeError, match=r"has no values|have no values yet; call booster.load_model"):
        mean_losses(booster, model, optimizer, 1, pp)
    booster.load_model(model, tmp_path / "model")
    assert 0 < model.bytes_read < most * size, model.bytes_read / size
    data_ranks = parallel_state.get_process_groups().size("dp")
    expected = losses_alone(reference, torch.optim.SGD(reference.parameters(), lr=0.05), data_ranks, 3)
    assert mean_losses(booster, model, optimizer, 3, pp) == pytest.approx(expected, abs=2e-6)
    assert expected[0] - expected[-1] > 1e-3
    for name, value in booster.checkpoint_io.model_tensors(model):
        torch.testing.assert_close(value, reference.get_parameter(name).detach(), rtol=1e-5, atol=1e-6)


@ranks(2)
def test_a_directory_that_is_another_model_s_is_refused_on_all_ranks(rank: int, world: int, tmp_path: Path) -> None:
    saved_once(small("llama", torch.float32, hidden_size=64), tmp_path / "wide", rank)
    saved_once(small("llama", torch.float32, vocab_size=98), tmp_path / "one word more", rank)  # where padding lies
    saved_once(small("llama", torch.float32, num_hidden_layers=1), tmp_path / "short", rank)
    saved_once(small("llama", torch.float32, num_hidden_layers=4), tmp_path / "long", rank)
    booster = booster_of(2, 1)
    before = small("llama", torch.float32)
    model, *_ = booster.boost(copy.deepcopy(before))
    with pytest.raises(ValueError, match=r"18 that the model lacks.*layers\.2.*with strict=False"):
        booster.load_model(model, tmp_path / "long")
    for name, value in booster.checkpoint_io.model_tensors(model):
        assert torch.equal(value, before.get_parameter(name)), name
    booster.load_model(model, tmp_path / "long", strict=False)
    with pytest.raises(ValueError, match="lacks|size mismatch|is \\[") as short:
        booster.load_model(model, tmp_path / "short")
    assert "layers.1" in str(short.value)
    with pytest.raises((ValueError, RuntimeError)):
        booster.load_model(model, tmp_path / "wide")
    with pytest.raises(ValueError, match=r"weight' is \[98, 32\] in the files and \[97, 32\] in the model"):
        booster.load_model(model, tmp_path / "one word more")


# -- adapters -------------------------------------------------------------------------------------------------------


def lora_config(**values: Any) -> Any:
    import peft

    targets = ["q_proj", "o_proj", "down_proj"]
    return peft.LoraConfig(r=4, lora_alpha=8, target_modules=targets, task_type="CAUSAL_LM", **values)


def with_adapters(booster: Booster | None, model: Any) -> Any:
    import peft

    config = lora_config()
    model = peft.get_peft_model(model, config) if booster is None else booster.enable_lora(model, lora_config=config)
    torch.manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:  # the second matrix begins at zero otherwise
                parameter.copy_(0.1 * torch.randn(parameter.shape))
    return model


@ranks(4)
@pytest.mark.parametrize(
    ("tp", "pp", "options"),
    [
        (1, 2, {"zero_stage": 3}),
        (2, 1, sequence("split_gather", zero_stage=1)),
        pytest.param(2, 2, {"zero_stage": 0}, marks=pytest.mark.nightly),
        pytest.param(2, 1, {"zero_stage": 3}, marks=pytest.mark.nightly),
        pytest.param(1, 1, sequence("ring_attn", sp_size=2, zero_stage=3), marks=pytest.mark.nightly),
    ],
)
@pytest.mark.in_suite(1)
def test_adapters_of_a_model_that_is_cut_train_as_in_one_process(
    rank: int, world: int, tp: int, pp: int, options: dict[str, Any], tmp_path: Path
) -> None:
    peft = pytest.importorskip("peft")
    base = small("llama", FP64, num_hidden_layers=LAYERS, tie_word_embeddings=True)
    reference = with_adapters(None, copy.deepcopy(base)).to(FP64)
    start = {name: p.detach().clone() for name, p in reference.named_parameters() if p.requires_grad}
    booster = booster_of(tp, pp, **options)
    model = with_adapters(booster, copy.deepcopy(base)).to(FP64)
    optimizer: Any = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    model, optimizer, *_ = booster.boost(model, optimizer)
    data_ranks = parallel_state.get_process_groups().size("dp")
    trained = torch.optim.SGD([p for p in reference.parameters() if p.requires_grad], lr=0.1)
    expected = losses_alone(reference, trained, data_ranks, 3)
    assert mean_losses(booster, model, optimizer, 3, pp) == pytest.approx(expected, abs=2e-6)
    booster.save_lora_as_pretrained(model, tmp_path / "adapter", use_safetensors=True)
    loaded = peft.PeftModel.from_pretrained(copy.deepcopy(base), str(tmp_path / "adapter"))
    found = dict(loaded.named_parameters())
    for name, value in start.items():
        wanted = reference.get_parameter(name).detach()
        torch.testing.assert_close(found[name].detach().to(FP64), wanted, rtol=1e-5, atol=1e-6)
        assert float((wanted - value).abs().max()) > 1e-4, name
    for name, value in booster.checkpoint_io.model_tensors(model):
        torch.testing.assert_close(value, reference.state_dict()[name], rtol=1e-5, atol=1e-6)


@ranks(2)
@pytest.mark.parametrize(("tp", "pp"), [(2, 1), pytest.param(1, 2, marks=pytest.mark.nightly)])
def test_adapters_of_another_name_train_and_are_saved_under_it(
    rank: int, world: int, tp: int, pp: int, tmp_path: Path
) -> None:
    peft = pytest.importorskip("peft")
    base = small("llama", FP64, num_hidden_layers=LAYERS)
    torch.manual_seed(3)
    whole = peft.get_peft_model(copy.deepcopy(base), lora_config(init_lora_weights=False), adapter_name="mine").to(FP64)
    booster, reference = booster_of(tp, pp), copy.deepcopy(whole)
    optimizer: Any = torch.optim.SGD([p for p in whole.parameters() if p.requires_grad], lr=1.0)
    model, optimizer, *_ = booster.boost(whole, optimizer)
    expected = losses_alone(reference, torch.optim.SGD(reference.parameters(), 1.0), 1, 2)
    assert mean_losses(booster, model, optimizer, 2, pp) == pytest.approx(expected, abs=2e-6)
    assert abs(expected[1] - expected[0]) > 1e-3
    booster.save_lora_as_pretrained(model, tmp_path / "adapter")
    loaded = peft.PeftModel.from_pretrained(copy.deepcopy(base), tmp_path / "adapter" / "mine", adapter_name="mine")
    for name, value in reference.state_dict().items():
        torch.testing.assert_close(loaded.state_dict()[name].to(FP64), value, rtol=1e-5, atol=1e-6)


@ranks(2)
def test_a_second_adapter_of_a_model_in_stages_is_refused_by_its_name(rank: int, world: int) -> None:
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(small("llama"), lora_config(), adapter_name="mine")
    model.add_adapter("other", lora_config())
    with pytest.raises(
        ValueError, match="has the adapters mine, other, active .*mine.*; one is active .* stages have one"
    ):
        booster_of(1, 2).boost(model, torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 1.0))


@ranks(2)
@pytest.mark.parametrize("tp", [1, 2])
def test_adapters_of_a_model_without_memory_read_the_base_model_s_directory(
    rank: int, world: int, tp: int, tmp_path: Path
) -> None:
    pytest.importorskip("peft")
    base = small("llama", FP64, num_hidden_layers=LAYERS)
    saved_once(base, tmp_path / "base", rank)
    booster = booster_of(tp, 1, zero_stage=3)
    with torch.device("meta"):
        model = type(base)(copy.deepcopy(base.config)).to(FP64)
    model = booster.enable_lora(model, lora_config=lora_config())
    optimizer: Any = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    model, optimizer, *_ = booster.boost(model, optimizer)
    booster.load_model(model, tmp_path / "base")
    first = steps_of(booster, model, optimizer, 0, range(2), 1)[0]
    expected = float(base(**batch_of(0, 0)).loss)  # new adapters add nothing
    assert first[0] == pytest.approx(expected, abs=2e-6) and first[1] != first[0]
