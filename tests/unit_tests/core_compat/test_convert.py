"""Conversion against plain torch and plain safetensors: the whole model on one process is the reference."""

from __future__ import annotations

import argparse
import json
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from core.checkpoint import CheckpointError, load_checkpoint, save_checkpoint
from core.checkpoint.plain_files import parse_size
from core.checkpoint.weights.sharded import runs_by_size
from core.groups.process_groups import ProcessGroups
from core.models import GPTModel
from core_compat.convert import convert, main, open_source, parser
from tests.unit_tests.checkpoint.checkpoint_reference import (
    Layout,
    assert_planted,
    build,
    model_config,
    plant,
    step_once,
    whole_shapes,
    whole_value,
)
from tests.unit_tests.ranks import run_on_ranks

ADAM = {"exp_avg", "exp_avg_sq", "step"}


def options(*words: object) -> argparse.Namespace:
    return parser().parse_args([str(word) for word in words])


def planted_model(dtype: torch.dtype = torch.float32) -> GPTModel:
    """The whole model on this process, with the planted values."""
    model = GPTModel(model_config(Layout(dtype=dtype)), ProcessGroups())
    state = {name: whole_value("model", name, tuple(t.shape), dtype) for name, t in model.state_dict().items()}
    model.load_state_dict(state)
    return model


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype and torch.equal(found[name], value), name


def test_a_checkpoint_of_one_process_becomes_its_state_dict_and_back(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = planted_model(torch.bfloat16)
    save_checkpoint(tmp_path / "root", 4, [model])
    assert main([str(tmp_path / "root"), str(tmp_path / "weights.pt")]) == 0
    found = torch.load(tmp_path / "weights.pt", weights_only=True)
    assert_same(found, model.state_dict())
    assert "tensors" in capsys.readouterr().out and not list(tmp_path.glob(".*"))

    convert(options(tmp_path / "weights.pt", tmp_path / "again", "--as-step", 9))
    other = GPTModel(model_config(Layout(dtype=torch.bfloat16, seed=2)), ProcessGroups())
    report = load_checkpoint(tmp_path / "again", [other])
    assert report.step == 9
    assert_same(other.state_dict(), model.state_dict())


def test_safetensors_are_cut_by_size_and_found_by_the_index(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    model = planted_model()
    expected = model.state_dict()
    save_checkpoint(tmp_path / "root", 1, [model])
    convert(options(tmp_path / "root", tmp_path / "hf", "--to", "safetensors", "--max-shard-size", "3KB"))
    index = json.loads((tmp_path / "hf" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in expected.values())
    files = sorted(path.name for path in (tmp_path / "hf").glob("*.safetensors"))
    assert len(files) > 2 and files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    found: dict[str, Tensor] = {}
    for file in files:
        held = safetensors.load_file(str(tmp_path / "hf" / file))
        assert sum(value.nbytes for value in held.values()) <= 3000 or len(held) == 1
        assert all(index["weight_map"][name] == file for name in held)
        found |= held
    assert_same(found, expected)

    last, kept = tmp_path / "hf" / files[-1], (tmp_path / "hf" / files[-1]).read_bytes()
    last.write_bytes((tmp_path / "hf" / files[0]).read_bytes())
    with pytest.raises(CheckpointError, match=f"{files[-1]} is not the file that .* was saved with"):
        convert(options(tmp_path / "hf", tmp_path / "mixed"))
    last.write_bytes(kept)

    convert(options(tmp_path / "root", tmp_path / "one", "--to", "safetensors"))
    assert [path.name for path in (tmp_path / "one").iterdir()] == ["model.safetensors"]
    assert_same(safetensors.load_file(str(tmp_path / "one" / "model.safetensors")), expected)
    for source in (tmp_path / "hf", tmp_path / "one", tmp_path / "one" / "model.safetensors"):
        convert(options(source, tmp_path / f"from-{source.stem}"))
        other = GPTModel(model_config(Layout(seed=2)), ProcessGroups())
        load_checkpoint(tmp_path / f"from-{source.stem}", [other])
        assert_same(other.state_dict(), expected)


class Tied(torch.nn.Module):
    """One parameter under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(3, 2)
        self.head = torch.nn.Linear(2, 3, bias=False)
        self.head.weight = self.embedding.weight


def test_a_shared_parameter_is_saved_once_and_has_all_its_names_in_a_state_dict(tmp_path: Path) -> None:
    model = Tied()
    save_checkpoint(tmp_path / "root", 1, [model])
    assert list(open_source(tmp_path / "root").keys()) == ["model.embedding.weight"]
    convert(options(tmp_path / "root", tmp_path / "weights.pt"))
    other = Tied()
    other.load_state_dict(torch.load(tmp_path / "weights.pt", weights_only=True))  # strict
    assert torch.equal(other.head.weight, model.embedding.weight)
    convert(options(tmp_path / "weights.pt", tmp_path / "again"))
    third = Tied()
    load_checkpoint(tmp_path / "again", [third])
    assert torch.equal(third.head.weight, model.embedding.weight)


def save_with_state(rank: int, root: str) -> None:
    job = build(Layout(2, tp=2, strategy="optim", dtype=torch.bfloat16))
    step_once(job, whole_shapes())
    plant(job, whole_shapes())
    save_checkpoint(root, 5, job.chunks, job.optimizer)


def load_with_state(rank: int, root: str) -> None:
    job = build(Layout(3, strategy="optim", dtype=torch.bfloat16, seed=2))
    report = load_checkpoint(root, job.chunks, job.optimizer)
    assert report.notes == ()
    assert_planted(job, whole_shapes(), ADAM | {"master"})


def test_optimizer_state_goes_through_a_plain_file_and_masters_can_stand_for_weights(tmp_path: Path) -> None:
    run_on_ranks(save_with_state, 2, {"root": str(tmp_path / "root")}, timeout_s=120)
    convert(options(tmp_path / "root", tmp_path / "all.pt", "--optimizer"))
    found = torch.load(tmp_path / "all.pt", weights_only=True)
    shapes = whole_shapes()
    low = torch.bfloat16
    assert_same(found["model"], {name: whole_value("model", name, shape, low) for name, shape in shapes.items()})
    assert found["optimizer"].keys() == {name for name in shapes if not name.endswith("expert_bias")}
    for name, state in found["optimizer"].items():
        assert state.keys() == ADAM | {"master"} and float(state["step"]) == 7.0
        for key in ("exp_avg", "exp_avg_sq", "master"):
            assert torch.equal(state[key], whole_value(key, name, shapes[name], torch.bfloat16)), f"{key} of {name}"
    convert(options(tmp_path / "all.pt", tmp_path / "again"))
    run_on_ranks(load_with_state, 3, {"root": str(tmp_path / "again")}, timeout_s=120)

    convert(options(tmp_path / "root", tmp_path / "masters.pt", "--masters"))
    masters = torch.load(tmp_path / "masters.pt", weights_only=True)
    assert_same(masters, {name: whole_value("master", name, shape, torch.float32) for name, shape in shapes.items()})
    convert(options(tmp_path / "root", tmp_path / "half.pt", "--masters", "--dtype", "fp16"))
    half = torch.load(tmp_path / "half.pt", weights_only=True)
    assert all(torch.equal(value, masters[name].half()) for name, value in half.items())


def test_what_cannot_be_converted_is_one_line_and_leaves_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_checkpoint(tmp_path / "root", 1, [torch.nn.Linear(2, 2)])
    torch.save({"a": torch.zeros(2), "b": 3}, tmp_path / "mixed.pt")
    (tmp_path / "junk.pt").write_bytes(b"not a file of torch")
    (tmp_path / "junk.safetensors").write_bytes(b"not one either")
    (tmp_path / "there.pt").write_bytes(b"")
    (tmp_path / "empty").mkdir()
    before = sorted(tmp_path.rglob("*"))
    for words, message in [
        ((tmp_path / "nowhere", tmp_path / "x.pt"), "does not exist"),
        ((tmp_path / "empty", tmp_path / "x.pt"), "no checkpoint directory"),
        ((tmp_path / "root", tmp_path / "x"), "add --to safetensors"),
        ((tmp_path / "root", tmp_path / "x", "--to", "state_dict"), "name a state_dict file with one of .pt"),
        ((tmp_path / "root", tmp_path / "there.pt"), "exists; move it away"),
        ((tmp_path / "root", tmp_path / "x.pt", "--step", 7), "7"),
        ((tmp_path / "mixed.pt", tmp_path / "x"), "'b' is a int and no tensor"),
        ((tmp_path / "mixed.pt", tmp_path / "x", "--masters"), "are for checkpoints"),
        ((tmp_path / "junk.pt", tmp_path / "x"), "junk.pt is no file of torch.save"),
        ((tmp_path / "junk.safetensors", tmp_path / "x"), "junk.safetensors is not a complete safetensors file"),
        ((tmp_path / "root", tmp_path / "x", "--to", "safetensors", "--max-shard-size", "2PB"), "'2PB' is no size"),
    ]:
        assert main([str(word) for word in words]) == 1
        error = capsys.readouterr().err
        assert message in error and error.count("\n") == 1, error
    assert sorted(tmp_path.rglob("*")) == before


def test_one_step_of_a_checkpoint_can_be_named_by_its_directory(tmp_path: Path) -> None:
    for step in (1, 2):
        model = torch.nn.Linear(1, 1, bias=False)
        model.weight.data.fill_(step)
        save_checkpoint(tmp_path, step, [model])
    first = next(tmp_path.glob("step_00000001*"))
    assert float(open_source(first)["model.weight"].read()) == 1.0
    assert float(open_source(tmp_path)["model.weight"].read()) == 2.0
    assert float(open_source(tmp_path, 1)["model.weight"].read()) == 1.0
    with pytest.raises(CheckpointError, match="leave --step out"):
        open_source(first, 2)


@pytest.mark.parametrize(
    ("text", "size"), [("5GB", 5 * 10**9), ("1.5 KiB", 1536), ("7", 7), ("2mb", 2 * 10**6), ("10B", 10)]
)
def test_sizes_are_read_as_people_write_them(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GB", "0", "-1", "5 GBs", "0.1"])
def test_sizes_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is no size"):
        parse_size(text)


def test_runs_of_names_stay_below_the_limit_where_they_can() -> None:
    sizes = {"a": 3, "b": 3, "c": 9, "d": 1, "e": 0}
    assert list(runs_by_size(sizes, sizes.__getitem__, 6)) == [["a", "b"], ["c"], ["d", "e"]]
    assert list(runs_by_size({}, sizes.__getitem__, 6)) == []


class Runs:
    """A value whose pickle runs code: it makes a file."""

    def __init__(self, place: Path) -> None:
        self.place = place

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (self.place,)


def test_a_foreign_file_that_can_run_code_is_read_only_where_it_is_trusted(tmp_path: Path) -> None:
    ran = tmp_path / "it ran"
    weights = {"a": torch.arange(3.0), "b": torch.ones(2, 2)}
    torch.save({"model": weights, "by": Runs(ran)}, tmp_path / "foreign.pt")
    words = [tmp_path / "foreign.pt", tmp_path / "root"]
    with pytest.raises(
        CheckpointError, match=r"with tensors only \(.*\); if you trust .* --trust-foreign-files"
    ) as error:
        convert(options(*words))
    assert "\n" not in str(error.value) and not ran.exists()
    convert(options(*words, "--trust-foreign-files"))
    assert ran.exists()
    convert(options(tmp_path / "root", tmp_path / "plain.pt"))
    assert_same(torch.load(tmp_path / "plain.pt", weights_only=True), weights)


@pytest.mark.parametrize("inside", [True, False])
def test_a_directory_of_torchs_own_checkpoints_is_read_only_where_it_is_trusted(tmp_path: Path, inside: bool) -> None:
    weights = {"layer.a": torch.arange(12.0).view(3, 4), "b": torch.ones(2, dtype=torch.bfloat16)}
    state = {"model": weights, "optimizer": {"lr": torch.tensor(0.1)}} if inside else weights
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, checkpoint_id=tmp_path / "foreign", no_dist=True)
    words = [tmp_path / "foreign", tmp_path / "plain.pt"]
    with pytest.raises(CheckpointError, match="whose index is a pickle and can run code.*add --trust-foreign-files"):
        convert(options(*words))
    convert(options(*words, "--trust-foreign-files"))
    assert_same(torch.load(tmp_path / "plain.pt", weights_only=True), weights)
    (tmp_path / "foreign" / ".metadata").write_bytes(b"no pickle")
    with pytest.raises(CheckpointError, match="has no index of torch.distributed.checkpoint"):
        convert(options(tmp_path / "foreign", tmp_path / "other.pt", "--trust-foreign-files"))
