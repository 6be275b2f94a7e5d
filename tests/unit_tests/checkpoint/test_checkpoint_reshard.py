"""Saved at one layout, loaded at another: parameters, moments and masters bit for bit those of the whole model."""

from __future__ import annotations

import dataclasses
import gc
import itertools
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint as dcp

from core import parallel_state
from core.checkpoint import load_checkpoint, save_checkpoint
from core.checkpoint.optimizer_pieces import leaves
from core.distributed import finalize_model_grads
from core.distributed.sharded.param_unit import ParamUnit
from core.distributed.wire import huge_pages
from core.optimizer import OptimizerConfig, get_megatron_optimizer
from tests.unit_tests.checkpoint.checkpoint_reference import (
    Layout,
    assert_planted,
    build,
    plant,
    step_once,
    whole_shapes,
    whole_value,
)
from tests.unit_tests.ranks import run_on_ranks
from tests.unit_tests.reference import wrap

ADAM = {"exp_avg", "exp_avg_sq", "step"}
BF16 = {"dtype": torch.bfloat16}
CHAIN = [
    Layout(1),
    Layout(4, tp=2, pp=2, ep=2, etp=1, strategy="optim"),
    Layout(3, strategy="optim"),
    Layout(2, pp=2, vpp=2),
    Layout(3, strategy="optim_grads_params"),
    Layout(2, tp=2, strategy="optim_grads"),
    Layout(2, strategy="optim_grads_params"),
    Layout(1, strategy="optim_grads_params"),
]
NIGHTLY = [
    *CHAIN,
    Layout(2, ep=2, strategy="optim"),
    Layout(1, strategy="optim"),
    Layout(2, tp=2),
    Layout(3, strategy="optim_grads"),
    Layout(4, pp=2, ep=2, strategy="optim_grads"),
    Layout(3),
    Layout(2, cp=2, strategy="optim"),
    Layout(2, etp=2, strategy="optim"),
    Layout(4, ep=2, strategy="optim"),
    Layout(4, tp=2, pp=2, strategy="optim_grads_params"),
    Layout(4, strategy="optim_grads_params"),
    Layout(4, ep=2, strategy="optim_grads_params", instances=2),
    Layout(4, ep=4),
    Layout(4, tp=2, pp=2, vpp=2, strategy="optim"),
    Layout(4, strategy="optim", instances=2),
    Layout(4, ep=2, strategy="optim", instances=2),
    Layout(4, tp=4, strategy="optim"),
    Layout(4, tp=2, ep=2, etp=2, strategy="optim"),
    Layout(6, tp=2, strategy="optim"),
    Layout(6, pp=2, strategy="optim"),
    Layout(8, tp=2, pp=2, ep=2, cp=2, etp=1, strategy="optim"),
]


def keys_of(layout: Layout) -> set[str]:
    return ADAM | ({"master"} if layout.dtype is torch.bfloat16 else set())


def save_at(rank: int, layout: Layout, root: str) -> None:
    """Plant and save."""
    job = build(layout)
    step_once(job, whole_shapes())
    plant(job, whole_shapes())
    report = save_checkpoint(root, 3, job.chunks, job.optimizer, extra={"samples": 24})
    assert report.committed


def load_at(rank: int, layout: Layout, roots: list[str]) -> None:
    """Load each, in a job that begins with other weights."""
    for root in roots:
        job = build(dataclasses.replace(layout, seed=2))
        report = load_checkpoint(root, job.chunks, job.optimizer)
        assert (report.step, report.extra, report.notes) == (3, {"samples": 24}, ())
        assert_planted(job, whole_shapes(), keys_of(layout))
        parallel_state.destroy_model_parallel()


def nothing_is_gathered() -> Any:
    """Fails where a checkpoint has whole parameters, for which a rank may have no memory."""
    return mock.patch.object(ParamUnit, "all_gather", side_effect=AssertionError("a bucket was gathered"))


def load_and_save_at(rank: int, layout: Layout, source: str, target: str) -> None:
    """A link of a chain: what is saved is what was loaded."""
    job = build(dataclasses.replace(layout, seed=2))
    with nothing_is_gathered():
        load_checkpoint(source, job.chunks, job.optimizer)
    assert_planted(job, whole_shapes(), keys_of(layout))
    with nothing_is_gathered():
        save_checkpoint(target, 3, job.chunks, job.optimizer, extra={"samples": 24})


def whole_tensors(root: str) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint, read by plain torch in one process, without any of our planners."""
    directory = next(Path(root).glob("step_*"))
    reader = dcp.FileSystemReader(directory)
    state = {
        key: torch.empty(record.size, dtype=record.properties.dtype)
        for key, record in reader.read_metadata().state_dict_metadata.items()
        if hasattr(record, "properties")
    }
    dcp.load(state, storage_reader=reader, no_dist=True)
    return state


def assert_file_is_the_whole_model(root: str, layout: Layout) -> None:
    found = whole_tensors(root)
    shapes = whole_shapes()
    expected = {f"model.{name}": whole_value("model", name, shape, layout.dtype) for name, shape in shapes.items()}
    for name, shape in shapes.items():
        if not name.endswith("expert_bias"):
            for key in keys_of(layout) - {"step"}:
                expected[f"optimizer.{key}.{name}"] = whole_value(key, name, shape, layout.dtype)
            expected[f"optimizer.step.{name}"] = torch.tensor(7.0)
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert found[key].dtype == value.dtype and torch.equal(found[key], value), key


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("options", [pytest.param({}, marks=pytest.mark.nightly), BF16], ids=["fp32", "bf16"])
@pytest.mark.nightly
def test_a_model_goes_from_layout_to_layout_and_stays_the_same_bit_for_bit(tmp_path: Path, options: dict) -> None:
    """Every link loads what the one before has saved, compares it with the planted values, and saves again."""
    chain = [dataclasses.replace(layout, **options) for layout in (CHAIN if not options else [*CHAIN[1:4], CHAIN[5]])]
    roots = [str(tmp_path / str(number)) for number in range(len(chain))]
    run_on_ranks(save_at, chain[0].world, {"layout": chain[0], "root": roots[0]}, timeout_s=120)
    assert_file_is_the_whole_model(roots[0], chain[0])
    for layout, source, target in zip(chain[1:], roots[:-1], roots[1:], strict=True):
        run_on_ranks(
            load_and_save_at, layout.world, {"layout": layout, "source": source, "target": target}, timeout_s=120
        )
        assert_file_is_the_whole_model(target, layout)


# What other algorithms and precisions keep: real steps, and the file of another layout must be the same file.
KEPT = {
    "lion": ({"optimizer": "lion"}, {}, {"exp_avg"}),
    "Adagrad": ({"optimizer": "Adagrad"}, {}, {"step", "sum"}),
    "muon": ({"optimizer": "muon"}, {}, {"momentum_buffer"}),
    "remainders": (
        {"use_precision_aware_optimizer": True, "exp_avg_dtype": torch.bfloat16, "exp_avg_sq_dtype": torch.bfloat16},
        BF16,
        ADAM | {"master"},
    ),
    "fp16": ({"initial_loss_scale": 256.0, "loss_scale_window": 2}, {"dtype": torch.float16}, ADAM | {"master"}),
}


def step_and_save(rank: int, case: str, root: str) -> None:
    options, changes, _ = KEPT[case]
    job = build(Layout(2, tp=2, **changes), **options)
    for _ in range(3):
        step_once(job, whole_shapes())
    save_checkpoint(root, 3, job.chunks, job.optimizer)


def load_and_save(rank: int, case: str, source: str, target: str) -> None:
    options, changes, _ = KEPT[case]
    strategy = "no_shard" if case == "muon" else "optim"
    job = build(Layout(3, strategy=strategy, seed=2, **changes), **options)
    assert load_checkpoint(source, job.chunks, job.optimizer).notes == ()
    if case == "fp16":
        assert job.optimizer.get_loss_scale().item() == 512.0, "it grew after two good steps"
    save_checkpoint(target, 3, job.chunks, job.optimizer)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("case", KEPT)
@pytest.mark.in_suite(2)
def test_what_any_algorithm_keeps_loads_at_another_layout(tmp_path: Path, case: str) -> None:
    source, target = str(tmp_path / "source"), str(tmp_path / "target")
    run_on_ranks(step_and_save, 2, {"case": case, "root": source}, timeout_s=120)
    run_on_ranks(load_and_save, 3, {"case": case, "source": source, "target": target}, timeout_s=120)
    saved, again = whole_tensors(source), whole_tensors(target)
    assert {key.split(".")[1] for key in saved if key.startswith("optimizer.")} >= KEPT[case][2]
    assert saved.keys() == again.keys()
    for key, value in saved.items():
        assert again[key].dtype == value.dtype and torch.equal(again[key], value), key
        assert bool(torch.isfinite(value).all())
    assert any(value.abs().max() > 0 for key, value in saved.items() if key.startswith("optimizer."))


# -- what a rank takes while it loads --------------------------------------------------------------------------------

LAYERS, WIDTH = 8, 1024
BUCKET = 2 * WIDTH * WIDTH  # elements: two layers


def wide_job(strategy: str, seed: int) -> tuple[Any, Any]:
    """A model of 8 M parameters whose shards each rank has for itself, and its Adam."""
    parallel_state.initialize_model_parallel()
    torch.manual_seed(seed)
    model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
    ddp = wrap(model, data_parallel_sharding_strategy=strategy, bucket_size=BUCKET, share_host_memory=False)
    return ddp, get_megatron_optimizer(OptimizerConfig(lr=0.01), [ddp])


def train(ddp: Any, optimizer: Any, rank: int) -> None:
    for step in range(2):
        optimizer.zero_grad()
        ddp(torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))).square().sum().backward()
        finalize_model_grads([ddp])
        optimizer.step()


def assert_holds(ddp: Any, optimizer: Any, file: dict[str, torch.Tensor]) -> None:
    """Every weight, and this rank's part of every moment, is bit for bit what plain torch reads from the file."""
    with ddp.gathered():
        weights = {name: param.detach().clone() for name, param in ddp.module.named_parameters()}
    assert len(weights) == LAYERS
    assert [name for name, value in weights.items() if not torch.equal(value, file[f"model.{name}"])] == []
    for leaf in leaves(optimizer):
        for name, held in leaf.state_by_parameter().items():
            for entry, key in itertools.product(held, ("exp_avg", "exp_avg_sq")):
                whole, first = file[f"optimizer.{key}.{name}"].reshape(-1), entry["offset"]
                assert entry["numel"] and whole.abs().max() > 0
                assert torch.equal(entry[key], whole[first : first + entry["numel"]]), f"{key} of {name}"


def wide_save(rank: int, root: str) -> None:
    ddp, optimizer = wide_job("optim_grads_params", 1)
    train(ddp, optimizer, rank)
    save_checkpoint(root, 2, [ddp], optimizer)
    assert_holds(ddp, optimizer, whole_tensors(root))


def most_bytes(action: Any, *arguments: Any) -> int:
    """The most memory that this process has at a time meanwhile, by the kernel."""
    gc.collect()
    huge_pages.give_back()
    Path("/proc/self/clear_refs").write_text("5")  # from here on
    action(*arguments)
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def wide_load(rank: int, root: str, strategy: str) -> None:
    ddp, optimizer = wide_job(strategy, 2)
    # Of several, because the C library keeps more or less of what its threads have freed.
    loading = min(most_bytes(load_checkpoint, root, [ddp], optimizer) for _ in range(2))
    assert_holds(ddp, optimizer, whole_tensors(root))
    training = max(most_bytes(train, ddp, optimizer, rank) for _ in range(2))
    assert loading < training + 4 * BUCKET, f"{loading >> 20} MiB for the load, {training >> 20} for a step"


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel is asked for the most memory at a time")
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_what_four_ranks_have_saved_loads_elsewhere_with_less_than_a_bucket_above_training(tmp_path: Path) -> None:
    root = str(tmp_path)
    run_on_ranks(wide_save, 4, {"root": root})
    for world, strategy in ((2, "optim_grads_params"), (1, "optim_grads_params"), (2, "no_shard")):
        run_on_ranks(wide_load, world, {"root": root, "strategy": strategy})


@pytest.mark.nightly
@pytest.mark.timeout(3000)
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("options, first", [({}, 0), (BF16, 2)], ids=["fp32", "bf16"])
def test_layouts_load_what_layouts_saved(tmp_path: Path, options: dict, first: int) -> None:
    """Every file is the whole model, by plain torch; each is loaded by a fifth of the layouts, other ones in bf16."""
    layouts = [dataclasses.replace(layout, **options) for layout in NIGHTLY]
    roots = [str(tmp_path / str(number)) for number in range(len(layouts))]
    for layout, root in zip(layouts, roots, strict=True):
        run_on_ranks(save_at, layout.world, {"layout": layout, "root": root}, timeout_s=300)
        assert_file_is_the_whole_model(root, layout)
    for number, layout in enumerate(layouts):
        sources = [root for source, root in enumerate(roots) if (source - number) % 5 == first]
        run_on_ranks(load_at, layout.world, {"layout": layout, "roots": sources}, timeout_s=600)
