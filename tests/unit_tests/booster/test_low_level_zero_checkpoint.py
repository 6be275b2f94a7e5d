"""Checkpoints of LowLevelZeroPlugin: other plugins, torch and other numbers of ranks read them, and it reads theirs."""

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from core.booster import Booster
from core.booster.plugin import GeminiPlugin, LowLevelZeroPlugin
from tests.unit_tests.booster.booster_reference import (
    BOUNDS,
    assert_same_training,
    full_weights,
    mean_loss,
    new_optimizer,
    run_steps,
    train,
    trained_on_one_process,
)
from tests.unit_tests.booster.test_booster_checkpoint import FORMS, other_start, save, shared
from tests.unit_tests.booster.test_booster_training import new_plugin as new_other_plugin
from tests.unit_tests.booster.test_gemini import TINY_CHUNKS
from tests.unit_tests.booster.test_low_level_zero import TINY_BUCKETS
from tests.unit_tests.ranks import ranks, run_on_ranks
from tests.unit_tests.reference import make_net

NAMES = ("torch_ddp", "torch_fsdp", "zero1", "zero2", "gemini")


def new_plugin(name: str, precision: str = "fp32", **options: Any) -> Any:
    if name == "gemini":
        return GeminiPlugin(precision=precision, **TINY_CHUNKS, **options)
    if not name.startswith("zero"):
        return new_other_plugin(name)
    return LowLevelZeroPlugin(int(name[4:]), precision, reduce_bucket_size_in_m=TINY_BUCKETS, **options)


def goes_on(name: str, rank: int, world: int, folder: Path, saved: dict[str, torch.Tensor]) -> None:
    """Load into a new model and optimizer with other values; weights are the saved bits; train the last two steps."""
    booster = Booster(plugin=new_plugin(name))
    model = other_start()
    optimizer = new_optimizer(model)
    for group in optimizer.param_groups:
        group["lr"] = 100.0  # the saved one must come back
    model, optimizer, criterion, _, _ = booster.boost(model, optimizer, mean_loss)
    booster.load_model(model, folder / "model")
    booster.load_optimizer(optimizer, folder / "optimizer")
    loaded = full_weights(model)
    assert all(torch.equal(loaded[key], value) for key, value in saved.items())
    run_steps(booster, model, optimizer, criterion, rank, steps=range(3, 5))
    assert_same_training(model, trained_on_one_process(world, 1, False)[0], BOUNDS["fp32"])


def check_pair(writer: str, reader: str, rank: int, world: int, folder: Path, forms: Any) -> None:
    booster = Booster(plugin=new_plugin(writer))
    model, optimizer, _ = train(booster, rank, steps=range(3))
    for form in forms:
        save(booster, model, optimizer, folder / form, form)
    booster.checkpoint_io.synchronize()
    saved = {name: weight.clone() for name, weight in full_weights(model).items()}
    for form in forms:
        goes_on(reader, rank, world, folder / form, saved)


@ranks(3)
@pytest.mark.nightly
def test_training_goes_on_under_another_plugin(rank: int, world: int, tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    folder = shared(tmp_path)
    for writer, reader, form in (
        ("zero1", "torch_ddp", "whole"),
        ("zero2", "torch_fsdp", "shards"),
        ("torch_fsdp", "zero1", "shards-safetensors"),
        ("torch_ddp", "zero2", "async"),
        ("zero1", "zero2", "async-shards"),
        ("zero2", "zero2", "whole-safetensors"),
        ("gemini", "torch_ddp", "shards-safetensors"),
        ("torch_fsdp", "gemini", "shards"),
        ("gemini", "gemini", "async-shards"),
    ):
        check_pair(writer, reader, rank, world, folder / f"{writer}-{reader}", (form,))


@ranks(4)
def test_replicated_shards_are_written_once(rank: int, world: int, tmp_path: Path) -> None:
    folder = shared(tmp_path)
    booster = Booster(plugin=new_plugin("zero2", extra_dp_size=2))
    model, optimizer, _ = train(booster, rank, steps=range(3))
    save(booster, model, optimizer, folder, "shards")
    saved = {name: weight.clone() for name, weight in full_weights(model).items()}
    goes_on("zero1", rank, world, folder, saved)


@pytest.mark.nightly
@ranks(1, 2, 4)
@pytest.mark.parametrize("reader", NAMES)
@pytest.mark.parametrize("writer", NAMES)
def test_training_goes_on_in_every_form(rank: int, world: int, tmp_path: Path, writer: str, reader: str) -> None:
    pytest.importorskip("safetensors")
    check_pair(writer, reader, rank, world, shared(tmp_path), FORMS)


@ranks(2, 3)
@pytest.mark.in_suite(1)
def test_16_bit_training_resumes_bit_for_bit(rank: int, world: int, tmp_path: Path) -> None:
    """With the masters, the moments and the loss scale: ColossalAI saves neither masters nor scale."""
    folder = shared(tmp_path)
    for precision, shard, writer, reader in (
        ("bf16", False, "zero1", "zero2"),
        ("fp16", True, "zero2", "gemini"),
        ("bf16", True, "gemini", "zero1"),
    ):
        options = {"initial_scale": 2.0**8, "growth_interval": 3}
        booster = Booster(plugin=new_plugin(writer, precision, **options))
        model, optimizer, _ = train(booster, rank, steps=range(3))
        booster.save_model(model, folder / f"{writer}-model", shard=shard)
        booster.save_optimizer(optimizer, folder / f"{writer}-optimizer", shard=shard, size_per_shard=2e-4)
        run_steps(booster, model, optimizer, mean_loss, rank, steps=range(3, 5))
        again = Booster(plugin=new_plugin(reader, precision, initial_scale=2.0**3))
        fresh: Any = other_start()
        fresh, fresh_optimizer, *_ = again.boost(fresh, new_optimizer(fresh))
        again.load_model(fresh, folder / f"{writer}-model")
        again.load_optimizer(fresh_optimizer, folder / f"{writer}-optimizer")
        run_steps(again, fresh, fresh_optimizer, mean_loss, rank, steps=range(3, 5))
        ours, wanted = full_weights(fresh), full_weights(model)
        assert all(torch.equal(ours[name], weight) for name, weight in wanted.items())
        masters = [whole_masters(each) for each in (optimizer, fresh_optimizer)]
        assert len(masters[0]) == 7
        assert all(torch.equal(masters[0][number], masters[1][number]) for number in masters[0])
        assert any(not torch.equal(m, m.to(weight_dtype(precision)).float()) for m in masters[0].values())
        if precision == "fp16":
            assert fresh_optimizer.scaler.state_dict() == optimizer.scaler.state_dict()
            assert optimizer.scaler.value == 2.0**9


def weight_dtype(precision: str) -> torch.dtype:
    return torch.bfloat16 if precision == "bf16" else torch.float16


def whole_masters(optimizer: Any) -> dict[int, torch.Tensor]:
    return {number: state["master"] for number, state in optimizer.state_dict()["state"].items()}


@ranks(2)
def test_masters_of_another_moment_are_not_believed(rank: int, world: int, tmp_path: Path) -> None:
    """Weights that were trained on since: by another plugin, whose files carry the old masters along."""
    folder = shared(tmp_path)
    booster = Booster(plugin=new_plugin("zero1", "bf16"))
    model, optimizer, _ = train(booster, rank, steps=range(2))
    booster.save_optimizer(optimizer, folder / "optimizer")
    run_steps(booster, model, optimizer, mean_loss, rank, steps=range(2, 5))
    before = full_weights(model)
    before = {name: weight.clone() for name, weight in before.items()}
    booster.load_optimizer(optimizer, folder / "optimizer")
    optimizer.zero_grad()
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    run_steps(booster, model, optimizer, mean_loss, rank, steps=range(1))
    assert all(torch.equal(before[name], weight) for name, weight in full_weights(model).items())


@ranks(2)
def test_torch_alone_reads_the_files_and_the_plugin_reads_torchs(rank: int, world: int, tmp_path: Path) -> None:
    folder = shared(tmp_path)
    booster = Booster(plugin=new_plugin("zero2"))
    model, optimizer, _ = train(booster, rank, steps=range(3))
    save(booster, model, optimizer, folder, "whole")
    plain = other_start()
    plain_optimizer = new_optimizer(plain)
    plain.load_state_dict(torch.load(folder / "model", weights_only=True))
    plain_optimizer.load_state_dict(torch.load(folder / "optimizer", weights_only=True))
    assert [group["lr"] for group in plain_optimizer.param_groups] == [0.2, 0.45]
    assert all(torch.equal(full_weights(model)[name], param) for name, param in plain.named_parameters())
    for group, params in zip(plain_optimizer.param_groups, optimizer.engine.user_params, strict=True):
        for param, ours in zip(group["params"], params, strict=True):
            number = next(n for n, p in enumerate(optimizer.parameters) if p is ours)
            state = optimizer.state_dict()["state"][number]
            assert torch.equal(plain_optimizer.state[param]["momentum_buffer"], state["momentum_buffer"])
    fresh: Any = other_start()
    fresh, fresh_optimizer, *_ = booster.boost(fresh, new_optimizer(fresh), mean_loss)
    fresh.unwrap().load_state_dict(plain.state_dict())
    fresh.update_master_params()
    fresh_optimizer.load_state_dict(plain_optimizer.state_dict())
    run_steps(booster, fresh, fresh_optimizer, mean_loss, rank, steps=range(3, 5))
    assert_same_training(fresh, trained_on_one_process(world, 1, False)[0], BOUNDS["fp32"])


def save_with_adam(rank: int, world: int, folder: Path) -> None:
    booster = Booster(plugin=new_plugin("zero2"))
    model: Any = make_net(torch.float32)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.01)
    model, optimizer, *_ = booster.boost(model, optimizer)
    run_steps(booster, model, optimizer, mean_loss, rank, steps=range(2))
    for shard in (False, True):
        booster.save_model(model, folder / f"model{shard}", shard=shard)
        booster.save_optimizer(optimizer, folder / f"optimizer{shard}", shard=shard, size_per_shard=2e-4)


def load_with_adam(rank: int, world: int, folder: Path) -> None:
    saved = torch.load(folder / "optimizerFalse", weights_only=True)
    assert len(list((folder / "optimizerTrue").glob("pytorch_optim-*.bin"))) > 3
    for shard in (False, True):
        booster = Booster(plugin=new_plugin("zero1"))
        model: Any = other_start()
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1.0)
        model, optimizer, *_ = booster.boost(model, optimizer)
        booster.load_model(model, folder / f"model{shard}")
        booster.load_optimizer(optimizer, folder / f"optimizer{shard}")
        state = optimizer.state_dict()
        assert state["param_groups"] == saved["param_groups"] and optimizer.param_groups[0]["lr"] == 0.01
        assert state["state"].keys() == saved["state"].keys() == set(range(7))
        for number, values in saved["state"].items():
            assert values.keys() == {"step", "exp_avg", "exp_avg_sq"} and float(values["step"]) == 2
            assert all(torch.equal(value, state["state"][number][key]) for key, value in values.items())
            assert values["exp_avg"].abs().max() > 0


def test_another_number_of_ranks_reads_the_files(tmp_path: Path) -> None:
    run_on_ranks(save_with_adam, 3, {"world": 3, "folder": tmp_path})
    run_on_ranks(load_with_adam, 2, {"world": 2, "folder": tmp_path})
    run_on_ranks(load_with_adam, 1, {"world": 1, "folder": tmp_path})


@ranks(3)
def test_a_sharded_save_holds_one_parameter_of_the_optimizer_at_a_time(rank: int, world: int, tmp_path: Path) -> None:
    booster = Booster(plugin=new_plugin("zero1"))
    model, optimizer, _ = train(booster, rank, steps=range(1))
    held: list[Any] = []
    for _, state in booster.checkpoint_io.optimizer_states(optimizer):
        held.append(weakref.ref(state["momentum_buffer"]))
        del state
        gc.collect()
        assert sum(reference() is not None for reference in held[:-1]) == 0
    assert len(held) == 7


@ranks(2)
def test_what_does_not_fit_is_refused_on_all_ranks(rank: int, world: int, tmp_path: Path) -> None:
    folder = shared(tmp_path)
    booster = Booster(plugin=new_plugin("zero1"))
    model, optimizer, _ = train(booster, rank, steps=range(1))
    booster.save_optimizer(optimizer, folder / "optimizer")
    wide: Any = make_net(torch.float32, width=9)
    wide, wide_optimizer, *_ = booster.boost(wide, new_optimizer(wide))
    with pytest.raises(ValueError, match=r"'momentum_buffer' of 'first.weight' has shape \[7, 5\].*\[9, 5\]"):
        booster.load_optimizer(wide_optimizer, folder / "optimizer")
    one = torch.nn.Linear(5, 3)
    one_model, one_optimizer, *_ = booster.boost(one, torch.optim.SGD(one.parameters(), lr=0.1))
    with pytest.raises(ValueError, match=r"groups of \[3, 4\] parameters, and this one of \[2\]"):
        booster.load_optimizer(one_optimizer, folder / "optimizer")


@ranks(2)
def test_hugging_face_reads_the_directory_and_tied_weights_stay_tied(rank: int, world: int, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    folder = shared(tmp_path)
    config = transformers.GPT2Config(
        n_layer=1, n_head=2, n_embd=16, vocab_size=40, n_positions=8, bos_token_id=0, eos_token_id=0
    )
    torch.manual_seed(0)
    booster = Booster(plugin=new_plugin("zero2"))
    plain = transformers.GPT2LMHeadModel(config)
    model, *_ = booster.boost(plain, torch.optim.SGD(plain.parameters(), lr=0.1))
    booster.save_model(model, folder / "safe", shard=True, size_per_shard=0.01, use_safetensors=True)
    booster.save_model(model, folder / "whole.safetensors", use_safetensors=True)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder / "safe")
    assert all(torch.equal(full_weights(model)[key], param) for key, param in theirs.named_parameters())
    for path in ("safe", "whole.safetensors"):
        other = transformers.GPT2LMHeadModel(config)
        fresh, *_ = booster.boost(other, torch.optim.SGD(other.parameters(), lr=0.1))
        booster.load_model(fresh, folder / path)
        assert all(torch.equal(full_weights(fresh)[key], value) for key, value in full_weights(model).items())
        assert fresh.unwrap().lm_head.weight is fresh.unwrap().transformer.wte.weight
