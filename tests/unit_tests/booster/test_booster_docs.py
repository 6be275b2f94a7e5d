"""The page on the Booster runs and does what it says, and so does the example."""

import copy
import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from core.booster import Booster
from core.booster.plugin import DPPluginBase
from core.interface import ModelWrapper, OptimizerWrapper
from tests.unit_tests.booster.booster_reference import full_weights
from tests.unit_tests.ranks import ranks
from tests.unit_tests.test_docs import ROOT, run_page

EXAMPLE = ROOT / "examples" / "train_hf.py"
SMALL = ["--steps", "6", "--batch-size", "2", "--length", "64", "--log-every", "100", "--lr", "0.01"]


HYBRID = "## HybridParallelPlugin"  # from here on the page has a second program


def page(name: str, **part: str) -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        return run_page(ROOT / "docs" / "source" / f"{name}.md", monkeypatch, **part)


def batch(number: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    inputs = torch.randn(16, 8, generator=torch.Generator().manual_seed(100 * number + rank))
    return inputs, inputs.sum(1, keepdim=True)


@ranks(2)
def test_the_page_on_the_booster_does_what_it_says(rank: int, world: int) -> None:
    names = page("booster", end=HYBRID)
    reference = names["new_model"]()
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.05)
    for numbers in ([0], [1], [2], [10, 11, 12, 13]):
        parts = [batch(number, r) for number in numbers for r in range(world)]
        inputs, targets = (torch.cat(part) for part in zip(*parts, strict=True))
        optimizer.zero_grad()
        nn.functional.mse_loss(reference(inputs), targets).backward()
        if len(numbers) == 1:
            norm = nn.utils.clip_grad_norm_(reference.parameters(), 1.0)
        optimizer.step()
    assert float(names["grad_norm"]) == pytest.approx(float(norm), rel=1e-4) and norm > 1.0
    start = dict(names["new_model"]().named_parameters())
    for model in (names["model"], names["model_again"]):
        ours = full_weights(model)
        for name, want in reference.named_parameters():
            torch.testing.assert_close(ours[name], want, atol=1e-5, rtol=1e-5)
            assert (want - start[name]).abs().max() > 3e-4
    assert names["optimizer_again"].param_groups[0]["lr"] == 0.05
    assert names["optimizer16"].scaler.value == 2.0**12 and not names["optimizer16"].found_inf
    sharded_as_on_one_process(names, world)


class AverageAfterBackward(OptimizerWrapper):
    def step(self) -> Any:
        for param in self.parameters:
            if param.grad is not None:
                dist.all_reduce(param.grad)
                param.grad /= dist.get_world_size()
        return super().step()


class OwnPlugin(DPPluginBase):
    """The least that a plugin implements."""

    def supported_precisions(self) -> list[str]:
        return ["fp32"]

    def control_precision(self) -> bool:
        return False

    def configure(
        self, model: Any, optimizer: Any = None, criterion: Any = None, dataloader: Any = None, lr_scheduler: Any = None
    ) -> Any:
        model = ModelWrapper(model.to(self.device()))
        return model, AverageAfterBackward(optimizer), criterion, dataloader, lr_scheduler


@ranks(2)
def test_a_plugin_of_the_user_averages_gradients(rank: int, world: int) -> None:
    torch.manual_seed(0)
    mine = nn.Linear(8, 1)
    plain = copy.deepcopy(mine)
    booster = Booster(plugin=OwnPlugin())
    model, optimizer, *_ = booster.boost(plain, torch.optim.SGD(plain.parameters(), lr=0.05))
    inputs, targets = batch(0, rank)
    booster.backward(nn.functional.mse_loss(model(inputs), targets), optimizer)
    optimizer.step()
    inputs, targets = (torch.cat(part) for part in zip(*[batch(0, r) for r in range(world)], strict=True))
    nn.functional.mse_loss(mine(inputs), targets).backward()
    for ours_, want in zip(model.parameters(), mine.parameters(), strict=True):
        torch.testing.assert_close(ours_.grad, want.grad)


def sharded_as_on_one_process(names: dict[str, Any], world: int) -> None:
    """Four steps of AdamW in fp32, where the page's are in bf16 with masters."""
    with names["gemini_model"].gathered():
        gemini = {name: param.detach().clone() for name, param in names["gemini_model"].unwrap().named_parameters()}
    assert all(torch.equal(value, gemini[name]) for name, value in names["gemini_weights"].items())
    assert len(names["gemini_model"].module.reducer.buckets) == 2
    for ours, norm, warms_up in (
        (list(names["zero_model"].unwrap().parameters()), names["zero_norm"], True),
        (list(gemini.values()), names["gemini_norm"], False),
    ):
        expected, start = names["new_model"](), names["new_model"]()
        optimizer = torch.optim.AdamW(expected.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=4) if warms_up else None
        for step in range(4):
            optimizer.zero_grad()
            inputs, targets = (torch.cat(part) for part in zip(*[batch(step, r) for r in range(world)], strict=True))
            nn.functional.mse_loss(expected(inputs), targets).backward()
            expected_norm = float(nn.utils.clip_grad_norm_(expected.parameters(), 1.0))
            optimizer.step()
            if scheduler is not None:
                scheduler.step()
        assert norm == pytest.approx(expected_norm, rel=2e-2)
        for found, want, before in zip(ours, expected.parameters(), start.parameters(), strict=True):
            moved = (want - before).norm()
            assert found.dtype == torch.bfloat16 and moved > 0.005
            assert (found.float() - want).norm() < 0.2 * moved  # Adam makes steps of small gradients, which bf16 rounds


@ranks(4)
def test_the_program_of_the_page_over_stages_trains_as_one_process(rank: int, world: int) -> None:
    pytest.importorskip("transformers")
    names = page("booster", begin=HYBRID)
    torch.manual_seed(0)
    model = names["transformers"].AutoModelForCausalLM.from_config(names["config"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(0)
    expected = []
    for _ in range(8):
        ids = (torch.randint(0, 256, (8, 1), generator=generator) + torch.arange(32)) % 256
        optimizer.zero_grad()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        expected.append(float(loss.detach()))
    assert names["losses"] == pytest.approx(expected, abs=1e-3)
    assert expected[0] - expected[-1] > 0.5


@ranks(2)
def test_the_page_for_those_who_come_from_colossalai_trains(rank: int, world: int) -> None:
    names = page("coming_from_colossalai")
    torch.manual_seed(0)
    reference = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 1))
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
    inputs = names["inputs"]
    for step in range(4):
        x = inputs[16 * step : 16 * (step + 1)]  # the ranks' samples alternate
        optimizer.zero_grad()
        nn.functional.mse_loss(reference(x), x.sum(1, keepdim=True)).backward()
        nn.utils.clip_grad_norm_(reference.parameters(), 1.0)
        optimizer.step()
    for ours, want in zip(names["model"].parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours, want, atol=1e-5, rtol=1e-5)


def losses_of(example: Any, plugin: str, *more: str) -> list[float]:
    return example.main(["--plugin", plugin, *SMALL, *more])


@ranks(2, timeout_s=240)
def test_the_example_gives_the_same_losses_with_each_plugin(rank: int, world: int, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("safetensors")
    spec = importlib.util.spec_from_file_location("train_hf", EXAMPLE)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    folder = [str(tmp_path)]
    dist.broadcast_object_list(folder)
    save = ["--save", folder[0]]
    plugins = ("torch_ddp", "torch_fsdp", "low_level_zero", "gemini")
    losses = {plugin: losses_of(example, plugin, "--precision", "fp32", *save) for plugin in plugins}
    for plugin in plugins[1:]:
        assert losses[plugin] == pytest.approx(losses["torch_ddp"], rel=1e-4)
    assert losses["torch_ddp"][-1] < 0.9 * losses["torch_ddp"][0]
    for plugin in plugins:  # each goes on from what the last has saved
        resumed = losses_of(example, plugin, "--precision", "fp32", "--resume", folder[0], "--steps", "1")
        assert resumed[0] < 0.8 * losses["torch_ddp"][0]


@pytest.mark.nightly
@pytest.mark.parametrize("plugin", ["torch_ddp", "torch_fsdp", "low_level_zero", "gemini"])
def test_the_command_of_the_example_runs(plugin: str) -> None:
    pytest.importorskip("transformers")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(EXAMPLE)]
    done = subprocess.run([*command, "--plugin", plugin, *SMALL], capture_output=True, text=True, timeout=170, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert "step 5: loss" in done.stdout
