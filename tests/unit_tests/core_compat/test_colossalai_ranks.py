"""launch, DistCoordinator, ProcessGroupMesh, loggers and devices by ColossalAI's names, and the table of names."""

from __future__ import annotations

import contextlib
import copy
import io
import logging
import os
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

import core_compat.colossalai as colossalai
from core.booster import DistCoordinator
from core.booster.process_group_mesh import ProcessGroupMesh
from core.booster.rank_logger import disable_existing_loggers
from core_compat.colossalai.devices import MultiTimer, get_accelerator, get_current_device
from core_compat.colossalai.lazy_init import LazyInitContext
from core_compat.colossalai.starting import (
    DistributedLogger,
    launch,
    launch_from_openmpi,
    launch_from_slurm,
    launch_from_torch,
)
from tests.unit_tests.core_compat.colossalai_counts import count
from tests.unit_tests.forked_python import run_python
from tests.unit_tests.ranks import ranks
from tests.unit_tests.test_docs import ROOT

PROGRAM = """
import colossalai, torch
from colossalai.cluster import DistCoordinator
from colossalai.booster import Booster
from colossalai.booster.plugin import TorchDDPPlugin
colossalai.launch_from_torch(config={}, seed=7)
coordinator = DistCoordinator()
total = torch.tensor([coordinator.rank + 1.0])
torch.distributed.all_reduce(total)
coordinator.block_all()
coordinator.print_on_master(f"sum {float(total)} draw {torch.rand(1).item():.6f}")
coordinator.destroy()
"""


@pytest.mark.parametrize("world", [1, pytest.param(2, marks=pytest.mark.nightly)])
def test_a_program_that_imports_colossalai_runs_as_it_is_and_its_launch_seeds(tmp_path: Path, world: int) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    command = ["-m", "core_compat.colossalai", str(tmp_path / "program.py")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    if world > 1:
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world}"]
        command = [*torchrun, "--no-python", sys.executable, *command]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, cwd=tmp_path)
    else:  # as torchrun would start the only rank; port 0 asks the system for one
        place = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
        done = run_python(*command, folder=tmp_path, cwd=tmp_path, env={**environment, **place})
    assert done.returncode == 0, done.stderr
    torch.manual_seed(7)
    assert done.stdout.splitlines() == [f"sum {world * (world + 1) / 2} draw {torch.rand(1).item():.6f}"]
    assert done.stderr.count(f"started with gloo on cpu; world size {world}, seed 7") == 1 or torch.cuda.is_available()


@ranks(2)
def test_launch_keeps_started_groups_and_seeds_everything(rank: int, world: int) -> None:
    launch_from_torch({}, seed=3, verbose=False)
    draws = random.random(), float(np.random.rand()), float(torch.rand(1))
    random.seed(3)
    np.random.seed(3)
    torch.manual_seed(3)
    assert draws == (random.random(), float(np.random.rand()), float(torch.rand(1)))
    with pytest.raises(RuntimeError, match=f"as rank {rank} of 2, and launch says rank {rank} of 5"):
        launch(rank, 5, "localhost", 1, verbose=False)
    with pytest.raises(ValueError, match="clip_grad_norm.*gradient_accumulation.*nothing here would read it"):
        launch_from_torch({"clip_grad_norm": 1.0, "gradient_accumulation": 4})


@pytest.mark.parametrize(
    ("call", "variable", "launcher"),
    [
        (launch_from_torch, "RANK", "torchrun"),
        (lambda: launch_from_slurm("localhost", 1), "SLURM_PROCID", "srun"),
        (lambda: launch_from_openmpi("localhost", 1), "OMPI_COMM_WORLD_RANK", "mpirun"),
    ],
)
def test_launch_without_its_launcher_says_which(
    call: Any, variable: str, launcher: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(variable, raising=False)
    with pytest.raises(RuntimeError, match=f"{variable} is not set; start the program with {launcher}"):
        call()


@ranks(3)
def test_the_coordinator_knows_its_place_prints_once_and_runs_one_rank_first(
    rank: int, world: int, tmp_path: Path
) -> None:
    coordinator = DistCoordinator()
    assert (coordinator.rank, coordinator.world_size, coordinator.local_rank) == (rank, 3, rank)
    assert (coordinator.is_master(), coordinator.is_node_master(), coordinator.is_last_process()) == (
        rank == 0,
        rank == 0,
        rank == 2,
    )
    pair = dist.new_group([1, 2])
    if rank > 0:
        assert coordinator.is_master(pair) == (rank == 1)
    file = tmp_path / "prepared"
    with coordinator.priority_execution(executor_rank=1):
        if rank == 1:
            time.sleep(0.2)
            file.write_text("done")
        assert file.read_text() == "done"
    with pytest.raises(OSError if rank == 0 else RuntimeError, match="no room"), coordinator.priority_execution():
        if rank == 0:
            raise OSError("no room")
        raise AssertionError("this rank went on")
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        coordinator.print_on_master("hello")
    assert printed.getvalue() == ("hello\n" if rank == 0 else "")
    assert coordinator.on_master_only()(lambda value: value + 1)(1) == (2 if rank == 0 else None)
    coordinator.block_all()


@ranks(4)
def test_a_mesh_has_groups_along_one_axis_and_along_several(rank: int, world: int) -> None:
    mesh = ProcessGroupMesh(1, 2, 2)
    assert mesh.shape == (1, 2, 2) and mesh.size(1) == 2 and mesh.coordinate() == (0, rank // 2, rank % 2)
    assert mesh.coordinate(2) == rank % 2
    assert mesh.unravel(2, (2, 2)) == (1, 0) and mesh.ravel((1, 0), (2, 2)) == 2
    assert mesh.ravel((2, 0), (2, 2), mode="wrap") == 0
    assert mesh.get_coords_along_axis((0, 1, 0), 2, [0, 1]) == [(0, 1, 0), (0, 1, 1)]

    def members(axis: Any, places: Any = None) -> list[int] | None:
        group = mesh.get_group_along_axis(axis, places)
        assert mesh.get_group_along_axis(axis, places) is group
        return None if group is None else mesh.get_ranks_in_group(group)

    assert members(0) == [rank]
    assert members(1) == [rank % 2, rank % 2 + 2]
    assert members(2) == [rank // 2 * 2, rank // 2 * 2 + 1]
    assert members([2, 1]) == [0, 1, 2, 3]
    total = torch.tensor([float(rank)])
    dist.all_reduce(total, group=mesh.get_group_along_axis(2))
    assert float(total) == (1.0 if rank < 2 else 5.0)
    with pytest.raises(ValueError, match=r"\(3, 2\) has 6 ranks, and the world 4"):
        ProcessGroupMesh(3, 2)


@ranks(2)
def test_a_logger_logs_on_the_ranks_that_are_named_and_into_a_file(rank: int, world: int, tmp_path: Path) -> None:
    logger = DistributedLogger("colossalai.test")
    logger.log_to_file(tmp_path, level="DEBUG", suffix="run")
    logger.info("for all")
    logger.warning("for one", ranks=[1])
    logger.debug("below the level")
    text = (tmp_path / f"rank_{rank}_run.log").read_text()
    assert "for all" in text and ("for one" in text) == (rank == 1) and "below" not in text
    assert "test_colossalai_ranks.py" in text
    logger.set_level("DEBUG")
    logger.debug("now")
    assert "now" in (tmp_path / f"rank_{rank}_run.log").read_text()


def test_other_loggers_become_quiet() -> None:
    logging.getLogger("noisy").setLevel(logging.DEBUG)
    logging.getLogger("kept").setLevel(logging.DEBUG)
    disable_existing_loggers(exclude=["kept"])
    assert logging.getLogger("noisy").level == logging.WARNING and logging.getLogger("kept").level == logging.DEBUG


def test_the_device_is_the_one_that_is_here() -> None:
    accelerator = get_accelerator()
    assert accelerator.get_current_device() == get_current_device()
    assert accelerator.max_memory_allocated() >= 0
    accelerator.empty_cache()
    accelerator.synchronize()
    with accelerator.autocast(dtype=torch.bfloat16):
        assert (
            nn.Linear(2, 2).to(get_current_device())(torch.ones(1, 2).to(get_current_device())).dtype == torch.bfloat16
        )
    with pytest.raises(AttributeError, match="has no 'teleport'"):
        accelerator.teleport()


def test_timers_keep_what_they_are_asked_to(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([1.0, 3.0, 10.0, 11.0])
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    timer = MultiTimer()
    for _ in range(2):
        timer.start("step")
        timer.stop("step", keep_in_history=True)
    assert timer.get_timer("step").get_history_mean() == 1.5
    assert timer.get_timer("step").get_elapsed_time() == 1.0
    timer.reset()
    assert not timer.get_timer("step").has_history
    off = MultiTimer(on=False)
    off.start("step")
    assert off.stop("step", True) is None and not off.is_on()


def test_a_lazy_model_has_the_values_of_a_plain_one() -> None:
    torch.manual_seed(0)
    plain = nn.Linear(3, 3)
    torch.manual_seed(0)
    with LazyInitContext(default_device="meta"):
        lazy = nn.Linear(3, 3)
    assert torch.equal(LazyInitContext.materialize(lazy).weight, plain.weight)
    with pytest.raises(RuntimeError, match="'weight' is on the meta device"):
        LazyInitContext.materialize(nn.Linear(3, 3, device="meta"))


@ranks(2)
def test_shardformer_splits_a_model_that_computes_as_before(rank: int, world: int) -> None:
    transformers = pytest.importorskip("transformers")
    from core_compat.colossalai.shard_former import ShardConfig, ShardFormer

    shape = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 4, "num_hidden_layers": 1}
    torch.manual_seed(0)
    whole = transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape, vocab_size=32, num_key_value_heads=2))
    split = copy.deepcopy(whole)
    config = ShardConfig(parallel_output=False, enable_flash_attention=True)
    assert config.tensor_parallel_size == 2
    sharded, tied = ShardFormer(config).optimize(split)
    tokens = torch.randint(32, (2, 6), generator=torch.Generator().manual_seed(1))
    found, expected = (model(input_ids=tokens, labels=tokens) for model in (sharded, whole))
    torch.testing.assert_close(found.logits, expected.logits, atol=1e-5, rtol=1e-5)
    found.loss.backward()
    expected.loss.backward()
    for model in (sharded.model.layers[0], whole.model.layers[0]):
        assert float(model.mlp.up_proj.weight.grad.abs().max()) > 1e-4
    wanted = whole.model.layers[0].mlp.up_proj.weight.grad.chunk(2)[rank]
    torch.testing.assert_close(sharded.model.layers[0].mlp.up_proj.weight.grad, wanted, atol=1e-6, rtol=1e-4)
    norm = whole.model.layers[0].input_layernorm.weight.grad
    torch.testing.assert_close(sharded.model.layers[0].input_layernorm.weight.grad, norm, atol=1e-6, rtol=1e-4)
    assert tied == []
    stages: list[dict[str, Any]] = [{"pipeline_stage_manager": object()}, {"sequence_parallelism_mode": "ring"}]
    for given in (*stages, {"enable_sequence_parallelism": True}, {"sequence_parallel_process_group": "sp"}):
        with pytest.raises(ValueError, match=f"{next(iter(given))}=.*HybridParallelPlugin, which makes stages"):
            ShardConfig(**given)  # type: ignore[arg-type]
    assert ShardConfig(extra_kwargs={}).enable_sequence_parallelism is False


def test_every_name_of_the_table_is_there() -> None:
    surface = colossalai.SURFACE
    for path in surface.paths:
        for name in surface.all_names(path):
            assert surface.resolve(path, name) is not None


def test_the_names_that_examples_import_most_are_here() -> None:
    names, imports, served = count()
    missing = {name for name, here in names.items() if not here}
    assert missing == {
        *("pipeline.stage_manager.PipelineStageManager", "checkpoint_io.CheckpointIndexFile"),
        "quantization.BnbQuantizationConfig",
    }
    assert imports == served == 294
    assert all(colossalai.SURFACE.missing(name).count(": ") for name in missing), "a sentence says what to do"


@pytest.mark.parametrize(
    ("line", "advice"),
    [
        ("from colossalai.nn.optimizer import FusedLAMB", r"Lamb\(bias_correction=True\)"),
        ("from colossalai.core import global_context", r"booster\.Booster"),
        ("from colossalai.inference.core.engine import InferenceEngine", "save_model"),
        ("from colossalai.zero import ColoInitContext", "LazyInitContext"),
    ],
)
def test_a_name_that_is_not_here_says_what_to_do(line: str, advice: str) -> None:
    with pytest.raises(ImportError, match=advice):
        exec(line.replace("colossalai", "core_compat.colossalai"))
