"""The pages for those who come from elsewhere: the loops side by side train alike, and the files of examples/ work."""

from __future__ import annotations

import json
import os
import re
import shutil
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.unit_tests.ranks import ranks
from tests.unit_tests.test_docs import ROOT, program_of, run_page

PAGES = ROOT / "docs" / "source"


def page(name: str) -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        return run_page(PAGES / f"{name}.md", monkeypatch)


def full_batch(number: int, world: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The page's batches of all ranks, one after the other."""
    parts = [torch.randn(16, 8, generator=torch.Generator().manual_seed(10 * number + r)) for r in range(world)]
    return torch.cat(parts), torch.cat(parts).sum(1, keepdim=True)


def trained_on_one_process(new_model: Any, world: int) -> nn.Module:
    """Four steps of torch's AdamW with clipping, on the whole batch."""
    model: nn.Module = new_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(4):
        x, y = full_batch(step, world)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return model


def trained_in_groups(new_model: Any, world: int) -> nn.Module:
    """Four steps with decay of matrices alone, and a scheduler."""
    model: nn.Module = new_model()
    matrices = [param for param in model.parameters() if param.dim() > 1]
    vectors = [param for param in model.parameters() if param.dim() == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.5, total_iters=4)
    for step in range(4):
        x, y = full_batch(step, world)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
    return model


def torch_ddp_over_microbatches(new_model: Any, rank: int) -> nn.parallel.DistributedDataParallel:
    """Train under torch's DistributedDataParallel: four steps of two microbatches."""
    model = nn.parallel.DistributedDataParallel(new_model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(4):
        optimizer.zero_grad()
        for number, sync in ((2 * step, False), (2 * step + 1, True)):
            x = torch.randn(16, 8, generator=torch.Generator().manual_seed(10 * number + rank))
            model.require_backward_grad_sync = sync
            (nn.functional.mse_loss(model(x), x.sum(1, keepdim=True)) / 2).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return model


def assert_alike(ours: Any, expected: nn.Module, start: nn.Module, bound: float = 2e-5) -> None:
    for (name, want), begin in zip(expected.named_parameters(), start.parameters(), strict=True):
        found = dict(ours.named_parameters())[name]
        found = found.full_tensor() if hasattr(found, "full_tensor") else found
        torch.testing.assert_close(found, want, atol=bound, rtol=0, msg=lambda text, name=name: f"{name}: {text}")
        assert (want - begin).abs().max() > 500 * min(bound, 2e-5), "the reference has hardly moved"


@ranks(2)
def test_the_loops_of_the_page_train_like_one_process(rank: int, world: int) -> None:
    transformers = pytest.importorskip("transformers")
    names = page("coming_from")
    start, expected = names["new_model"](), trained_on_one_process(names["new_model"], world)
    theirs = torch_ddp_over_microbatches(names["new_model"], rank)
    assert_alike(names["model"].module, theirs.module, start)
    assert_alike(names["zero"].module, trained_in_groups(names["new_model"], world), start)
    if rank == 0:
        saved = torch.load(names["file"])
        again = torch.optim.AdamW(names["groups"], lr=0.0)
        again.load_state_dict(saved["optimizer"])
        assert again.param_groups[0]["lr"] == pytest.approx(5e-3) and len(again.state) == 4
        for name, value in names["zero"].module.state_dict().items():
            assert torch.equal(saved["model"][name], value)
    assert all(name.startswith("module.") for name in theirs.state_dict())
    names["model"].load_state_dict(theirs.state_dict())
    for ours, want in zip(names["model"].module.parameters(), theirs.module.parameters(), strict=True):
        assert torch.equal(ours, want)

    with names["sharded"].gathered():
        assert_alike(names["sharded"].module, expected, start)
    for name, value in expected.state_dict().items():
        torch.testing.assert_close(names["weights"][name], value, atol=2e-5, rtol=0)
    assert names["updated"] and names["grad_norm"] > 0
    assert_alike(names["engine"].unwrap(), expected, start)
    hugging_face_as_on_one_process(transformers, names, rank, world)


def hugging_face_as_on_one_process(transformers: Any, names: dict[str, Any], rank: int, world: int) -> None:
    def new_model() -> Any:
        torch.manual_seed(0)
        return transformers.AutoModelForCausalLM.from_config(names["llama"].config)

    expected = new_model()
    optimizer = torch.optim.AdamW(expected.parameters(), lr=1e-3, weight_decay=0.0)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.25, total_iters=4)
    for step in range(4):
        parts = [
            torch.randint(64, (4, 16), generator=torch.Generator().manual_seed(10 * step + r)) for r in range(world)
        ]
        optimizer.zero_grad()
        expected(input_ids=torch.cat(parts), labels=torch.cat(parts)).loss.backward()
        nn.utils.clip_grad_norm_(expected.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
    start = new_model()
    for (name, want), begin in zip(expected.named_parameters(), start.parameters(), strict=True):
        found = dict(names["llama"].named_parameters())[name]
        assert (want - begin).abs().max() > 1e-3
        torch.testing.assert_close(found, want, atol=1e-4, rtol=0)
    if rank == 0:
        for ours, want in zip(names["again"].parameters(), names["llama"].parameters(), strict=True):
            assert torch.equal(ours, want)


@ranks(2)
def test_the_loops_of_other_libraries_train_like_one_process(rank: int, world: int) -> None:
    for package in ("accelerate", "transformers", "lightning_fabric"):
        pytest.importorskip(package)
    from tests.unit_tests.integrations.loops import launched

    with launched(rank, world):
        names = page("integrations")
        assert names["trainer"].state.global_step == 4
    for name in ("model", "fabric_model"):
        expected = names["new_model"]()
        optimizer = torch.optim.AdamW(expected.parameters(), lr=1e-2)
        for step in range(4):
            x = names["inputs"][16 * step : 16 * (step + 1)]  # in another order of samples, the mean is the same
            optimizer.zero_grad()
            nn.functional.mse_loss(expected(x), x.sum(1, keepdim=True)).backward()
            nn.utils.clip_grad_norm_(expected.parameters(), 1.0)
            optimizer.step()
        assert_alike(names[name].module, expected, names["new_model"](), bound=1e-5)
    loaded = pytest.importorskip("transformers").AutoModelForCausalLM.from_pretrained(names["folder"][0] + "/model")
    for ours, want in zip(loaded.parameters(), names["llama"].parameters(), strict=True):
        assert torch.equal(ours, want)


TYPED = ["coming_from", "booster", "coming_from_megatron", "coming_from_colossalai"]
TYPED += ["your_own_loop", "checkpoints", "integrations"]
SECOND = "## HybridParallelPlugin"  # from here on the Booster's page has another program


def typed_programs(folder: Path) -> list[str]:
    for path in [ROOT / "README.md", *(PAGES / f"{name}.md" for name in TYPED)]:
        (folder / f"{path.stem.lower()}_page.py").write_text(program_of(path, end=SECOND) + "\n")
    return sorted(map(str, folder.glob("*_page.py")))


def test_mypy_has_nothing_to_say_about_documented_loops(tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    command = [sys.executable, "-m", "mypy", "--config-file", str(ROOT / "pyproject.toml"), "--allow-untyped-defs"]
    programs = typed_programs(tmp_path)
    done = subprocess.run([*command, *programs], capture_output=True, text=True, timeout=150, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr


def test_pyright_has_nothing_to_say_about_documented_loops(tmp_path: Path) -> None:
    pyright = shutil.which("pyright")
    if pyright is None:
        pytest.skip("there is no pyright on this machine: pip install 'pyright[nodejs]'")
    typed_programs(tmp_path)
    for name in ("colossalai", "megatron"):
        (tmp_path / f"coming_from_{name}_page.py").unlink()  # its modules are made when they are imported
    settings = {"include": ["."], "extraPaths": [str(ROOT)], "pythonVersion": "3.10"}
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(settings))
    command = [pyright, "--project", str(tmp_path), "--pythonpath", sys.executable, "--level", "error"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=170)
    assert done.returncode == 0, done.stdout + done.stderr


FAKE_SRUN = """#!/bin/bash
for task in 0 1 2 3; do
  SLURM_PROCID=$task SLURM_LOCALID=$((task % 2)) SLURM_NTASKS=4 SLURM_NNODES=2 "$@"
done
"""


def test_the_slurm_script_gives_a_loop_what_torchrun_would(tmp_path: Path) -> None:
    programs = {"srun": FAKE_SRUN, "scontrol": "#!/bin/bash\necho node7; echo node8\n"}
    programs["python"] = f'#!/bin/bash\nexec {sys.executable} "$@"\n'
    for name, text in programs.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(stat.S_IRWXU)
    names = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS"]
    (tmp_path / "loop.py").write_text(f"import os, sys\nprint(*map(os.environ.get, {names}), *sys.argv[1:])\n")
    given = {"SLURM_JOB_NODELIST": "node[7-8]", "SLURM_JOB_ID": "20003", "SLURM_CPUS_PER_TASK": "5"}
    environment = {**os.environ, **given, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    command = ["bash", str(ROOT / "examples" / "slurm.sh"), str(tmp_path / "loop.py"), "--words", "a b"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [f"{rank} {rank % 2} 4 2 node7 20003 5 --words a b" for rank in range(4)]


def test_the_flags_of_the_slurm_script_are_understood() -> None:
    pytest.importorskip("tyro")
    from core_plan.job.config_file import load_config

    line = (ROOT / "examples" / "slurm.sh").read_text().splitlines()[-1]
    config = load_config(line.partition("core train ")[2].split())
    assert config.checkpoint.resume and config.checkpoint.dir is not None and config.parallel.tp == 8


def test_the_image_copies_what_a_wheel_is_built_of() -> None:
    text = (ROOT / "examples" / "Dockerfile").read_text()
    copied = {name for line in re.findall(r"^COPY (.*) \S+$", text, re.MULTILINE) for name in line.split()}
    assert all((ROOT / name).exists() for name in copied)
    assert {"setup.py", "pyproject.toml", "README.md", "LICENSE", "pretrain_gpt.py"} <= copied
    assert {"core", "core_plan", "core_train", "core_compat"} <= copied


def test_each_table_of_old_and_new_names_has_arguments_that_exist() -> None:
    """`name=` and bare option names in the last column are fields or parameters of ours."""
    import inspect

    from core.booster.plugin import GeminiPlugin, HybridParallelPlugin, LowLevelZeroPlugin
    from core.distributed import DistributedDataParallelConfig
    from core.optimizer import OptimizerConfig

    known: set[str] = set()
    plugins = (LowLevelZeroPlugin, GeminiPlugin, HybridParallelPlugin)
    for kind in (DistributedDataParallelConfig, OptimizerConfig, *plugins):
        known |= set(inspect.signature(kind).parameters)
    wrong = []
    text = (PAGES / "coming_from.md").read_text().partition("## Hugging Face")[0]
    for row in re.findall(r"^\| .* \|$", text, re.MULTILINE):
        for cell in row.split(" | ")[1:]:
            for code in re.findall(r"`([^`]+)`", cell):
                for option in re.findall(r"(?:[(, ]|^)([a-z]\w*_\w+)=", code):
                    if option not in known | {"mixed_precision"}:
                        wrong.append(option)
    assert not wrong, wrong
