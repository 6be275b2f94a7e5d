"""The wheel works without the repository, and says what the package is."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from email import message_from_bytes
from pathlib import Path

import pytest

import core

pytest.importorskip("setuptools", minversion="77")
ROOT = Path(__file__).parents[2]
PACKAGES = ("core", "core_plan", "core_train", "core_compat")
PROGRAM = """
import sys, torch
import torch.distributed as dist
import core, core_compat.megatron, core_plan, core_train.main, core.booster, core.verify, pretrain_gpt
from core import parallel_state
from core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from core.optimizer import OptimizerConfig, get_megatron_optimizer

assert core.__file__.startswith(sys.argv[1]), core.__file__
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
parallel_state.initialize_model_parallel()
module = torch.nn.Linear(2, 1, bias=False)
torch.nn.init.ones_(module.weight)
model = DistributedDataParallel(None, DistributedDataParallelConfig(use_distributed_optimizer=True), module)
optimizer = get_megatron_optimizer(OptimizerConfig(optimizer="sgd", lr=0.5, clip_grad=0.0, weight_decay=0.0), [model])
model(torch.tensor([[1.0, 3.0]])).sum().backward()
finalize_model_grads([model])
optimizer.step()
print("weights", *module.weight.flatten().tolist())
"""


def run(command: list[str], where: Path, **environment: str) -> str:
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=150, cwd=where, env={**os.environ, **environment}
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.nightly
def test_a_wheel_trains_outside_of_the_checkout(tmp_path: Path) -> None:
    source, wheels, installed, elsewhere = (tmp_path / name for name in ("source", "wheels", "installed", "elsewhere"))
    elsewhere.mkdir()
    for name in PACKAGES:
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE", "pretrain_gpt.py"):
        shutil.copy(ROOT / name, source)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    run([*pip, "wheel", ".", "--no-deps", "--no-build-isolation", "--wheel-dir", str(wheels)], source)
    (wheel,) = wheels.iterdir()
    run([*pip, "install", "--no-deps", "--no-index", "--target", str(installed), str(wheel)], elsewhere)

    with zipfile.ZipFile(wheel) as content:
        names = content.namelist()
        (metadata,) = (message_from_bytes(content.read(name)) for name in names if name.endswith("/METADATA"))
    assert {name.split("/")[0] for name in names if ".dist-info" not in name} == {*PACKAGES, "pretrain_gpt.py"}
    modules = {str(path.relative_to(ROOT)) for name in PACKAGES for path in (ROOT / name).rglob("*.py")}
    assert modules | {f"{name}/py.typed" for name in PACKAGES} <= set(names)
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert (metadata["Version"], metadata["License-Expression"]) == (core.__version__, "Apache-2.0")
    assert "Typing :: Typed" in metadata.get_all("Classifier", [])

    said = run([str(installed / "bin" / "gradient-core"), "--help"], elsewhere, PYTHONPATH=str(installed))
    assert said.startswith("usage: python -m core WORD")
    out = run([sys.executable, "-c", PROGRAM, str(installed)], elsewhere, PYTHONPATH=str(installed))
    assert out.split() == ["weights", "0.5", "-0.5"]  # 1 - 0.5 * [1, 3]
