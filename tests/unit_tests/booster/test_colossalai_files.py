"""Files that ColossalAI's asynchronous saves write, both ways; and a save that one rank calls alone."""

from __future__ import annotations

import json
import pickle
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from core.booster import Booster
from core.booster.checkpoint_io import TorchDDPCheckpointIO
from core.booster.mixed_precision import FP16TorchMixedPrecision
from tests.unit_tests.booster.booster_reference import new_model
from tests.unit_tests.booster.test_booster_checkpoint import shared
from tests.unit_tests.booster.test_booster_training import new_plugin
from tests.unit_tests.ranks import ranks


def adam_steps(seed: int, steps: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model and its optimizer after some steps along random gradients."""
    generator = torch.Generator().manual_seed(seed)
    model = new_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1 * (1 + seed), betas=(0.8, 0.9))
    for _ in range(steps):
        for param in model.parameters():
            param.grad = torch.randn(param.shape, generator=generator)
        optimizer.step()
    return model, optimizer


def pickled(value: Any) -> torch.Tensor:
    return torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)


def as_colossalai_writes(state: dict[str, Any]) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Tensors and metadata of its asynchronous saves; its counts of steps are Python's numbers."""
    tensors = {f"state.{n}.{key}": value for n, entry in state["state"].items() for key, value in entry.items()}
    odd = {name: pickled(int(value)) for name, value in tensors.items() if name.endswith(".step")}
    if "param_groups" in state:
        odd["param_groups"] = pickled(state["param_groups"])
    return {**tensors, **odd}, {"format": "pt", "non_tensor_keys": json.dumps(list(odd))}


def assert_same_state(ours: torch.optim.Optimizer, want: torch.optim.Optimizer) -> None:
    assert ours.state_dict()["param_groups"] == want.state_dict()["param_groups"]
    for number, entry in want.state_dict()["state"].items():
        found = ours.state_dict()["state"][number]
        assert all(torch.equal(torch.as_tensor(found[key]), value) for key, value in entry.items())


@pytest.mark.parametrize("shard", [False, True])
def test_an_optimizer_that_colossalai_saved_asynchronously_is_loaded(tmp_path: Path, shard: bool) -> None:
    save_file = pytest.importorskip("safetensors.torch").save_file
    _, theirs = adam_steps(1, 3)
    state = theirs.state_dict()
    if shard:
        weight_map = {}
        for odd in (0, 1):
            part = {n: entry for n, entry in state["state"].items() if n % 2 == odd}
            name = f"optimizer-{odd + 1:05d}.safetensors"
            save_file(*_in_order(as_colossalai_writes({"state": part}), tmp_path / name))
            weight_map |= {n: name for n in part}
        torch.save(state["param_groups"], tmp_path / "pytorch_optim_group.bin")
        index = {"metadata": {"param_groups": "pytorch_optim_group.bin", "total_size": 1.0}, "weight_map": weight_map}
        (tmp_path / "optimizer.safetensors.index.json").write_text(json.dumps(index))
    else:
        save_file(*_in_order(as_colossalai_writes(state), tmp_path / "optimizer.safetensors"))
    booster = Booster(device="cpu")
    _, optimizer, *_ = booster.boost(*adam_steps(0, 1))
    booster.load_optimizer(optimizer, tmp_path)
    assert_same_state(optimizer.unwrap(), theirs)
    if shard:  # a new save takes the place of both kinds
        booster.save_optimizer(optimizer, tmp_path, shard=True)
        assert not list(tmp_path.glob("optimizer*"))
        booster.load_optimizer(optimizer, tmp_path)


def _in_order(made: tuple[dict[str, torch.Tensor], dict[str, str]], path: Path) -> tuple[Any, Any, Any]:
    return made[0], path, made[1]


def test_an_optimizer_file_named_safetensors_has_the_form_that_colossalai_reads(tmp_path: Path) -> None:
    safe_open = pytest.importorskip("safetensors").safe_open
    booster = Booster(device="cpu", mixed_precision=FP16TorchMixedPrecision(init_scale=32.0))
    model, ours = adam_steps(1, 3)
    _, optimizer, *_ = booster.boost(model, ours)
    booster.save_optimizer(optimizer, tmp_path / "o.safetensors", use_async=True)
    booster.checkpoint_io.synchronize()
    with safe_open(str(tmp_path / "o.safetensors"), framework="pt") as file:
        assert json.loads(file.metadata()["non_tensor_keys"]) == ["param_groups"]
        values = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    groups = pickle.loads(values.pop("param_groups").numpy().tobytes())
    assert groups[0]["lr"] == pytest.approx(0.2) and groups[0]["params"] == list(range(len(list(model.parameters()))))
    assert len(values) == 3 * len(groups[0]["params"])
    for name, value in values.items():
        word, number, key = name.split(".")
        assert word == "state" and torch.equal(value, ours.state_dict()["state"][int(number)][key])
    again = Booster(device="cpu", mixed_precision="fp16")
    _, loaded, *_ = again.boost(*adam_steps(0, 1))
    again.load_optimizer(loaded, tmp_path / "o.safetensors")
    assert_same_state(loaded.unwrap(), ours)
    assert loaded.scaler.value == 32.0


class RunsCode:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


def test_a_pickle_in_an_optimizer_file_runs_no_code(tmp_path: Path) -> None:
    save_file = pytest.importorskip("safetensors.torch").save_file
    booster = Booster(device="cpu")
    _, optimizer, *_ = booster.boost(*adam_steps(0, 1))
    bad = {"param_groups": pickled(RunsCode(tmp_path / "it ran"))}
    save_file(bad, tmp_path / "o.safetensors", {"non_tensor_keys": '["param_groups"]'})
    with pytest.raises(Exception, match="'param_groups' holds other things than numbers.*without use_async"):
        booster.load_optimizer(optimizer, tmp_path / "o.safetensors")
    assert not (tmp_path / "it ran").exists()


@ranks(2, timeout_s=30)
def test_a_save_by_the_master_alone_is_an_error_and_a_late_master_is_none(
    rank: int, world: int, tmp_path: Path
) -> None:
    folder = shared(tmp_path)
    booster = Booster(plugin=new_plugin("torch_ddp"))
    model, *_ = booster.boost(new_model())
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(TorchDDPCheckpointIO, "ALONE_LIMIT_S", 1.0)
        if rank == 0:
            time.sleep(1.5)
        booster.save_model(model, folder / "model")
        if rank == 0:
            began = time.monotonic()
            with pytest.raises(RuntimeError, match=r"rank 0 called and ranks \[1\] have not in 1 s.*is_master"):
                booster.save_model(model, folder / "again")
            assert 1 < time.monotonic() - began < 15
    dist.barrier()  # where rank 1 was all the time
