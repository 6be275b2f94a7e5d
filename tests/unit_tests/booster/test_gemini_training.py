"""What GeminiPlugin trains: any torch optimizer, unused, frozen and tied parameters, adapters; and its checkpoints."""

import contextlib
import copy
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from core.booster import Booster
from core.distributed import DistributedDataParallel, materialize
from core.distributed.sharded.param_unit import ParamUnit
from core.gradient_accumulation import accumulate_gradient
from core.groups.agree import SyncError
from core.pipeline_parallel import gpt_stages
from tests.unit_tests.booster.booster_reference import (
    MAX_NORM,
    assert_same_training,
    full_weights,
    mean_loss,
    new_model,
    new_optimizer,
    run_steps,
    train,
    trained_on_one_process,
)
from tests.unit_tests.booster.test_booster_checkpoint import other_start, shared
from tests.unit_tests.booster.test_gemini import new_booster
from tests.unit_tests.booster.test_low_level_zero_checkpoint import load_with_adam, new_plugin
from tests.unit_tests.booster.test_low_level_zero_training import (
    ALGORITHMS,
    Branches,
    assert_equal_training,
    both_ways,
    branch_loss,
    grouped,
    net_loss,
)
from tests.unit_tests.ranks import ranks, run_on_ranks
from tests.unit_tests.reference import batch, make_net


@ranks(3)
def test_any_torch_optimizer_is_sharded(rank: int, world: int) -> None:
    for name in ("adamw", "fused adamw", "nesterov", "whole", "adafactor"):
        start = new_model()
        model, reference = both_ways(start, ALGORITHMS[name], net_loss, rank, world, new_booster())
        try:
            assert_equal_training(model, reference, start, 3e-6 if name == "adafactor" else 1e-6)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from error


@ranks(3, nightly=(1, 2))
def test_parameters_without_a_gradient_are_left_alone_as_by_torch(rank: int, world: int) -> None:
    torch.manual_seed(5)
    start = Branches()
    make = grouped(torch.optim.AdamW, lr=0.05, eps=1e-3)
    model, reference = both_ways(start, make, branch_loss, rank, world, new_booster(), steps=6)
    assert_equal_training(model, reference, start)
    with model.gathered():
        plain = model.unwrap()
        assert plain.first.weight is plain.second.weight
        assert torch.equal(plain.never.weight, start.never.weight)


@ranks(2)
def test_adapters_alone_are_trained_and_the_base_is_sharded(rank: int, world: int) -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["first", "third"], init_lora_weights=False)
    booster = new_booster()
    plain = new_model()
    optimizer: Any = torch.optim.SGD(plain.parameters(), lr=0.1)
    torch.manual_seed(3)
    model = booster.enable_lora(plain, lora_config=config)
    start = copy.deepcopy(model)
    reference = copy.deepcopy(model).double()
    sgd = torch.optim.SGD([param for param in reference.parameters() if param.requires_grad], lr=0.1)
    model, optimizer, *_ = booster.boost(model, optimizer)
    for step in range(3):
        sgd.zero_grad()
        sum((net_loss(reference, r, step) / world for r in range(world)), torch.zeros(())).backward()
        sgd.step()
        optimizer.zero_grad()
        booster.backward(net_loss(model, rank, step), optimizer)
        optimizer.step()
    assert_equal_training(model, reference, start)
    changed = {name for name, weight in full_weights(model).items()
               if not torch.equal(weight, dict(start.named_parameters())[name])}  # fmt: skip
    assert len(changed) == 4 and all("lora_" in name for name in changed)
    units = model.module.engine.params.units
    assert {id(param) for unit in units for param in unit.params} == set(map(id, model.parameters()))
    assert all(unit.shard.numel() * world == unit.layout.numel and not unit.is_unsharded for unit in units)


@ranks(2)
def test_clipping_by_hand_and_looking_at_gradients(rank: int, world: int) -> None:
    booster = new_booster()
    model: Any = new_model()
    model, optimizer, *_ = booster.boost(model, new_optimizer(model))
    reference = new_model().double()
    sgd = new_optimizer(reference)
    for step, clip in enumerate((lambda o: o.clip_grad_by_norm(0.3), lambda o: o.clip_grad_by_value(0.02))):
        sgd.zero_grad()
        sum((net_loss(reference, r, step) / world for r in range(world)), torch.zeros(())).backward()
        optimizer.zero_grad()
        booster.backward(mean_loss(model(batch(rank, step)[0].float()), batch(rank, step)[1].float()), optimizer)
        for ours, theirs in zip(model.unwrap().parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(optimizer.get_param_grad(ours).double(), theirs.grad, atol=1e-6, rtol=1e-6)
        if step == 0:
            norm = nn.utils.clip_grad_norm_(reference.parameters(), 0.3)
            assert float(clip(optimizer)) == optimizer.get_grad_norm() == pytest.approx(float(norm), rel=1e-6)
            assert norm > 0.6
        else:
            nn.utils.clip_grad_value_(reference.parameters(), 0.02)
            clip(optimizer)
        sgd.step()
        optimizer.step()
    assert_equal_training(model, reference, new_model())
    with pytest.raises(ValueError, match=r"make the plugin with norm_type=3.0"):
        optimizer.clip_grad_by_norm(1.0, 3.0)


@ranks(2)
def test_a_dropped_step_leaves_nothing_behind_and_evaluation_is_right_at_any_time(rank: int, world: int) -> None:
    booster = new_booster()
    model: Any = new_model()
    start = copy.deepcopy(model)
    model, optimizer, *_ = booster.boost(model, new_optimizer(model))
    x = batch(rank, 0, torch.float32)[0]
    with torch.no_grad():
        assert torch.equal(model(x), start(x))
    with pytest.raises(SyncError, match="model.gathered"):
        print(model.unwrap().first.weight.sum())
    booster.backward(100 * net_loss(model, rank, 9), optimizer)
    optimizer.clip_grad_by_norm(1.0)
    optimizer.zero_grad()
    booster.backward(100 * net_loss(model, rank, 9), optimizer)
    run_steps(booster, model, optimizer, mean_loss, rank)
    assert_same_training(model, trained_on_one_process(world, 1, False)[0], 1e-6)


@ranks(2)
def test_the_accumulation_wrappers_drive_it(rank: int, world: int) -> None:
    booster = new_booster()
    model: Any = new_model()
    model, optimizer, *_ = booster.boost(model, new_optimizer(model))
    batches = [batch(rank, number, torch.float32) for number in range(20)]
    accumulating, loader, _, _ = accumulate_gradient(model, optimizer, batches, 4)
    for inputs, targets in loader:
        accumulating.zero_grad()
        accumulating.backward(mean_loss(model(inputs), targets))
        accumulating.clip_grad_by_norm(MAX_NORM)
        accumulating.step()
    assert_same_training(model, trained_on_one_process(world, 4, True)[0], 1e-6)


@ranks(2)
def test_a_model_on_the_meta_device_is_made_shard_by_shard(rank: int, world: int, tmp_path: Path) -> None:
    """Its weights are those that the same draws give on one process, and no rank has two layers at a time."""

    def fill(part: nn.Module) -> None:
        for param in part.parameters(recurse=False):
            param.normal_(0.0, 0.1, generator=torch.Generator().manual_seed(param.numel()))

    for precision, placed in (("fp32", {}), ("bf16", {"offload_param_frac": 1, "offload_optim_frac": 1})):
        where = {"offload_directory": shared(tmp_path)} if placed else {}
        booster = new_booster(precision, **placed, **where)
        with torch.device("meta"):
            lazy = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(8)))
        lazy = materialize(lazy, fill)
        optimizer: Any = torch.optim.SGD(lazy.parameters(), lr=0.1)
        model: Any
        held: list[int] = []

        def wrap(config: Any, ddp_config: Any, module: nn.Module, held: list[int] = held, **more: Any) -> Any:
            held.extend(param.untyped_storage().nbytes() for param in module.parameters())
            return DistributedDataParallel(config, ddp_config, module, **more)

        with Most() as most, mock.patch.object(gpt_stages, "DistributedDataParallel", wrap):
            model, optimizer, *_ = booster.boost(lazy, optimizer)
        assert len(held) == 8 and max(held) <= 4, "the cast gave a parameter memory"
        assert most.whole == 64 * 64, "elements of parameters with values at a time"
        dtype = next(model.parameters()).dtype
        plain = nn.Sequential(*(nn.Linear(64, 64, bias=False, dtype=dtype) for _ in range(8)))
        with torch.no_grad():
            plain.apply(fill)
        start = copy.deepcopy(plain)
        weights = full_weights(model)
        assert all(torch.equal(weights[name], param) for name, param in plain.named_parameters())
        x = torch.ones(4, 64)
        booster.backward(model(x).float().square().mean(), optimizer)
        optimizer.step()
        (plain(x.to(dtype)).float().square().mean()).backward()
        torch.optim.SGD(plain.parameters(), lr=0.1).step()
        for name, weight in full_weights(model).items():
            bound = 1e-6 if precision == "fp32" else 4e-3  # a bit of bf16
            torch.testing.assert_close(weight, dict(plain.named_parameters())[name], atol=bound, rtol=bound)
            assert not torch.equal(weight, dict(start.named_parameters())[name])


@ranks(1)
def test_a_model_on_the_meta_device_without_values_is_refused_with_what_to_do(rank: int, world: int) -> None:
    with torch.device("meta"):
        model = nn.Linear(3, 3)
    with pytest.raises(ValueError, match="'weight' is on the meta device .* call core.distributed.materi"):
        new_booster("bf16").boost(model, torch.optim.SGD(model.parameters(), lr=0.1))


class Most:
    """The most elements that parameters with values have at a time, while weights are made and cut."""

    def __enter__(self) -> "Most":
        self.now = self.whole = 0
        cut = ParamUnit.shard_param
        make = torch.full

        def made(shape: Any, *rest: Any, **more: Any) -> torch.Tensor:
            value = make(shape, *rest, **more)
            self.now += value.numel() if value.dim() == 2 else 0
            self.whole = max(self.whole, self.now)
            return value

        def freed(unit: ParamUnit, index: int) -> None:
            self.now -= unit.params[index].numel()
            cut(unit, index)

        self.stack = contextlib.ExitStack()
        self.stack.enter_context(mock.patch.object(torch, "full", made))
        self.stack.enter_context(mock.patch.object(ParamUnit, "shard_param", freed))
        return self

    def __exit__(self, *error: Any) -> None:
        self.stack.close()


# -- checkpoints ----------------------------------------------------------------------------------------------------


def save_with_adam(rank: int, world: int, folder: Path) -> None:
    booster = new_booster()
    model: Any = make_net(torch.float32)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.01)
    model, optimizer, *_ = booster.boost(model, optimizer)
    run_steps(booster, model, optimizer, mean_loss, rank, steps=range(2))
    for shard in (False, True):
        booster.save_model(model, folder / f"model{shard}", shard=shard)
        booster.save_optimizer(optimizer, folder / f"optimizer{shard}", shard=shard, size_per_shard=2e-4)


def load_bit_for_bit(rank: int, world: int, folder: Path) -> None:
    saved = torch.load(folder / "modelFalse", weights_only=True)
    state = torch.load(folder / "optimizerFalse", weights_only=True)["state"]
    for shard in (False, True):
        booster = new_booster()
        model: Any = other_start()
        model, optimizer, *_ = booster.boost(model, torch.optim.AdamW(model.parameters(), lr=1.0))
        booster.load_model(model, folder / f"model{shard}")
        booster.load_optimizer(optimizer, folder / f"optimizer{shard}")
        assert all(torch.equal(value, saved[name]) for name, value in full_weights(model).items())
        ours = optimizer.state_dict()["state"]
        assert ours.keys() == state.keys() == set(range(7))
        for number, values in state.items():
            assert all(torch.equal(value, ours[number][key]) for key, value in values.items())


def test_another_number_of_ranks_reads_the_files(tmp_path: Path) -> None:
    run_on_ranks(save_with_adam, 3, {"world": 3, "folder": tmp_path})
    run_on_ranks(load_bit_for_bit, 2, {"world": 2, "folder": tmp_path})
    run_on_ranks(load_with_adam, 1, {"world": 1, "folder": tmp_path})


@ranks(2)
def test_hugging_face_reads_the_directory_and_tied_weights_stay_tied(rank: int, world: int, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    folder = shared(tmp_path)
    config = transformers.GPT2Config(
        n_layer=1, n_head=2, n_embd=16, vocab_size=40, n_positions=8, bos_token_id=0, eos_token_id=0
    )
    torch.manual_seed(0)
    booster = Booster(plugin=new_plugin("gemini"))
    plain = transformers.GPT2LMHeadModel(config)
    model, *_ = booster.boost(plain, torch.optim.SGD(plain.parameters(), lr=0.1))
    booster.save_model(model, folder / "safe", shard=True, size_per_shard=0.01, use_safetensors=True)
    booster.save_model(model, folder / "whole.safetensors", use_safetensors=True)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder / "safe")
    weights = full_weights(model)
    assert all(torch.equal(weights[key], param) for key, param in theirs.named_parameters())
    for path in ("safe", "whole.safetensors"):
        other = transformers.GPT2LMHeadModel(config)
        fresh, *_ = booster.boost(other, torch.optim.SGD(other.parameters(), lr=0.1))
        booster.load_model(fresh, folder / path)
        loaded = full_weights(fresh)
        assert all(torch.equal(loaded[key], value) for key, value in weights.items())
        assert fresh.unwrap().lm_head.weight is fresh.unwrap().transformer.wte.weight


@ranks(2)
def test_a_file_that_does_not_fit_on_one_rank_is_refused_on_all(rank: int, world: int, tmp_path: Path) -> None:
    booster = new_booster()
    model, optimizer, _ = train(booster, rank, steps=range(1))
    torch.save(make_net(torch.float32, width=9 if rank else 7).state_dict(), tmp_path / f"mine{rank}")
    with pytest.raises((ValueError, RuntimeError), match=r"is \[9, 5\] in the checkpoint and \[7, 5\] in the model"):
        booster.load_model(model, tmp_path / f"mine{rank}")
    run_steps(booster, model, optimizer, mean_loss, rank, steps=range(1))  # the ranks are still together


@ranks(2)
def test_a_load_makes_no_rank_have_the_whole_model(rank: int, world: int, tmp_path: Path) -> None:
    booster = new_booster()
    model, optimizer, _ = train(booster, rank, steps=range(1))
    wanted = {name: weight.clone() for name, weight in full_weights(model).items()}
    folder = shared(tmp_path)
    booster.save_model(model, folder / "model", shard=True, size_per_shard=2e-4)
    run_steps(booster, model, optimizer, mean_loss, rank, steps=range(1, 2))
    unsharder = model.module.engine.params
    with mock.patch.object(unsharder, "_all_gather", side_effect=AssertionError("a load gathers")):
        booster.load_model(model, folder / "model")
        with pytest.raises(SyncError, match="cannot be written"), torch.no_grad():
            model.unwrap().first.weight.copy_(torch.ones(7, 5))
    assert all(torch.equal(weight, wanted[name]) for name, weight in full_weights(model).items())
