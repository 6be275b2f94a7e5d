"""`python -m tests.layouts`: its table, its last line and its exit status; and the processes it starts."""

from __future__ import annotations

import contextlib
import io
import os
import re
import runpy
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from core.verify import GradientReport, check_gradients
from core.verify.rank_pool import RankFailure, RankPool
from tests.layouts.__main__ import main
from tests.layouts.gpt import check_gpt
from tests.layouts.layouts import Layout
from tests.layouts.table import run_table
from tests.layouts.tables import FULL_HOUSE, tables
from tests.unit_tests.ranks import as_torchrun_starts, ranks
from tests.unit_tests.reference import Net
from tests.unit_tests.test_docs import program_of
from tests.unit_tests.verify.test_verify import mean_loss, samples

ROOT = Path(__file__).parents[3]


def report(layout: Layout, dtype: str, **changes: Any) -> GradientReport:
    right = GradientReport(f"{dtype} {layout}", 1e-10, 7, 3e-16, 0.0, digest="same")
    return replace(right, **changes)


# --- the table --------------------------------------------------------------------------------------------------------


def test_last_line_is_the_summary() -> None:
    lines: list[str] = []
    groups = {"one": [Layout()], "two": [Layout(dp=2), Layout(tp=2)]}
    verdict = run_table(groups, ["fp64", "fp32"], report, lines.append)
    assert verdict.ok and len(lines) == 6
    assert lines[0] == "one: 1 layout" and lines[2] == "two: 2 layouts"
    assert lines[3].split("  ")[1:4] == ["right", "fp64 3.0e-16", "fp32 3.0e-16"] and "dp2" in lines[3]
    assert lines[-1].startswith("PASSED: 3 of 3 layouts right; largest relative error fp64 3e-16, fp32 3e-16; ")


def test_a_wrong_layout_is_counted_and_explained() -> None:
    lines: list[str] = []
    wrong = Layout(dp=2)
    verdict = run_table(
        {"both": [Layout(), wrong]},
        ["fp64"],
        lambda layout, dtype: report(layout, dtype, loss_error=1.0 if layout == wrong else 0.0, cause="a cause"),
        lines.append,
    )
    assert not verdict.ok and "a cause" in "\n".join(lines)
    assert lines[-1].splitlines()[0] == f"WRONG  {wrong}"
    assert lines[-1].splitlines()[1].startswith("FAILED: 1 of 2 layouts right")


def test_a_layout_without_result_is_wrong() -> None:
    def fails(layout: Layout, dtype: str) -> GradientReport:
        raise RankFailure("rank 1 of 2: gone")

    lines: list[str] = []
    assert not run_table({"one": [Layout(dp=2)]}, ["fp64"], fails, lines.append).ok
    assert "no result" in lines[1] and "gone" in lines[2]


def test_different_bits_in_one_family_are_wrong() -> None:
    family = [Layout(dp=2, deterministic=True), Layout(dp=2, deterministic=True, overlap=True, strategy="optim")]
    other = Layout(dp=2, deterministic=True, microbatches=2)
    assert family[0].family == family[1].family != other.family
    lines: list[str] = []
    verdict = run_table(
        {"all": [*family, other]},
        ["fp64"],
        lambda layout, dtype: report(layout, dtype, digest=str(layout)),
        lines.append,
    )
    assert not verdict.ok and len(verdict.wrong) == 1
    assert "bits differ from those of [dp2 tp1 no_shard deterministic]" in "\n".join(lines)
    assert run_table({"all": [*family, other]}, ["fp64"], report, lines.append).ok


def test_an_empty_table_is_no_success(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--only", "dp5"]) == 1
    assert capsys.readouterr().out.startswith("FAILED: no layout")


def test_layouts_are_listed_without_running_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--list", "--table", "full", "--only", "dp3 optim per token"]) == 0
    listed = capsys.readouterr().out.splitlines()
    assert listed and all(line.startswith("dp3") and "optim" in line for line in listed)


def test_every_table_has_its_list(capsys: pytest.CaptureFixture[str]) -> None:
    for name in tables():
        assert main(["--list", "--table", name]) == 0
    listed = capsys.readouterr().out.splitlines()
    assert len(listed) > 200 and str(FULL_HOUSE) in listed


def test_a_layout_that_cannot_run_is_refused_before_any_group_exists() -> None:
    with (
        RankPool(1) as pool,
        pytest.raises(
            RankFailure, match=r"rank 0 of 1: ValueError: layout \[dp1 tp1\+sp no_shard\] cannot run: sp=True"
        ),
    ):
        pool.run(check_gpt, 1, (Layout(sp=True),))


def run_command(*command: str) -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE")}
    return subprocess.run(
        [sys.executable, "-m", *command],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**environment, "OMP_NUM_THREADS": "1"},
        timeout=170,
    )


@pytest.mark.nightly
def test_command_starts_its_own_ranks() -> None:
    done = run_command("tests.layouts", "--only", "dp2 tp1 overlap", "--max-ranks", "2", "--dtypes", "fp64")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1].startswith("PASSED: 1 of 1 layouts right")


@ranks(2)
def test_ranks_that_a_launcher_started_run_the_layouts_of_their_number(rank: int, world: int) -> None:
    """With the variables that torchrun sets; `make nightly` has the real one."""
    printed = io.StringIO()
    with as_torchrun_starts(rank, world), contextlib.redirect_stdout(printed):
        status = main(["--only", "dp2 tp1", "--steps", "3", "--optimizers", "sgd"])
    assert status == 0, printed.getvalue()
    lines = [line.split() for line in printed.getvalue().splitlines()]
    assert [words[0] for words in lines] == (["a", "right", "PASSED:"] if rank == 0 else [])
    assert rank > 0 or lines[1][1] == "sgd"
    assert not dist.is_initialized()


@pytest.mark.nightly
def test_command_runs_under_torchrun() -> None:
    done = run_command(
        *("torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
        *("-m", "tests.layouts", "--only", "dp2 tp1", "--steps", "3", "--optimizers", "sgd"),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    assert [words[0] for words in lines] == ["a", "right", "PASSED:"] and lines[1][1] == "sgd"


def test_the_program_in_the_docs_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    program = tmp_path / "page.py"
    program.write_text(program_of(ROOT / "docs" / "source" / "verify.md"))
    runpy.run_path(str(program), run_name="__main__")
    printed = capsys.readouterr().out
    shown = (ROOT / "docs" / "source" / "verify.md").read_text().split("$ python mlp.py\n")[1].split("```")[0]
    report, table = re.split(r" +output, rank", printed)
    assert report.split() == shown.partition("   output, rank")[0].split()
    assert [line.split()[0] for line in table.splitlines() if "<- here" in line] == ["2.norm"]


# --- the processes ----------------------------------------------------------------------------------------------------


def sum_of_ranks(factor: float) -> float:
    value = torch.tensor(factor * (dist.get_rank() + 1))
    dist.all_reduce(value)
    return float(value)


def fail_on_rank_one() -> None:
    if dist.get_rank() == 1:
        raise ValueError("this is rank one")
    dist.barrier()


def never_end() -> None:
    if dist.get_rank() == 0:
        time.sleep(600)
    dist.barrier()


def die() -> None:
    if dist.get_rank() == 1:
        os._exit(7)
    dist.barrier()


def process_ids() -> list[int]:
    ids: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ids, os.getpid())
    return ids


def alive(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().split(")")[-1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until_gone(processes: list[int]) -> list[int]:
    limit = time.monotonic() + 15
    while any(alive(process) for process in processes) and time.monotonic() < limit:
        time.sleep(0.1)
    return [process for process in processes if alive(process)]


@pytest.mark.skipif(not Path("/proc").exists(), reason="looks for processes in /proc")
def test_pool_survives_failures_and_leaves_nothing_behind() -> None:
    with mock.patch("core.verify.rank_pool.GRACE_S", 0.5), RankPool(2) as pool:
        assert pool.run(sum_of_ranks, 2, (2.0,)) == 6.0
        assert pool.run(sum_of_ranks, 1, (5.0,)) == 5.0
        with pytest.raises(RankFailure, match="(?s)rank 1 of 2.*this is rank one"):
            pool.run(fail_on_rank_one, 2)
        with pytest.raises(RankFailure, match="had not ended after 1 s"):
            pool.run(never_end, 2, limit_s=1.0)
        with pytest.raises(RankFailure, match="exit code 7"):
            pool.run(die, 2)
        assert pool.run(sum_of_ranks, 2, (1.0,)) == 3.0
        processes = pool.run(process_ids, 2)
        assert all(alive(process) for process in processes)
        with pytest.raises(ValueError, match="3 ranks were asked of a pool of 2"):
            pool.run(sum_of_ranks, 3, (1.0,))
    assert not wait_until_gone(processes)


PARENT = """
import time
from core.verify.rank_pool import RankPool
from tests.unit_tests.verify.test_verify_command import never_end, process_ids
if __name__ == "__main__":
    pool = RankPool(2)
    print(*pool.run(process_ids, 2), flush=True)
    pool.run(never_end, 2)
"""


@pytest.mark.skipif(not Path("/proc").exists(), reason="looks for processes in /proc")
@pytest.mark.nightly
def test_ranks_end_when_the_starting_process_is_killed(tmp_path: Path) -> None:
    script = tmp_path / "parent.py"
    script.write_text(PARENT)
    parent = subprocess.Popen(
        [sys.executable, str(script)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert parent.stdout is not None
    try:
        processes = [int(word) for word in parent.stdout.readline().split()]
        assert len(processes) == 2
    finally:
        parent.send_signal(signal.SIGKILL)
        parent.wait()
    assert not wait_until_gone(processes)


def test_check_gradients_starts_ranks_of_its_own() -> None:
    report = check_gradients(Net, mean_loss, samples(), ranks=1, microbatches=3)
    report.raise_if_wrong()
    assert report.parameters == 7


def another_model() -> nn.Module:
    return nn.Linear(2, 2)


def a_mistake_of_the_users() -> nn.Module:
    raise ValueError("of mine")


def test_what_started_ranks_refuse_is_a_sentence_and_a_users_own_error_has_its_place() -> None:
    with pytest.raises(ValueError) as refused:
        check_gradients(Net, mean_loss, samples(), reference_fn=another_model, ranks=1)
    assert str(refused.value).startswith("the parameters differ: no rank of the layout holds 'weight' (2 in all), and ")
    assert "Traceback" not in str(refused.value)
    assert not any("rank_pool" in str(entry.path) for entry in refused.traceback)
    with pytest.raises(RankFailure, match="(?s)^rank 0 of 1: ValueError: of mine.*in a_mistake_of_the_users"):
        check_gradients(Net, mean_loss, samples(), reference_fn=a_mistake_of_the_users, ranks=1)


@pytest.mark.nightly
def test_a_program_that_starts_ranks_without_a_guard_hears_of_the_guard(tmp_path: Path) -> None:
    program = tmp_path / "unguarded.py"
    program.write_text("from core.verify.rank_pool import RankPool\nRankPool(1).start()\n")
    done = subprocess.run(
        [sys.executable, str(program)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        timeout=170,
    )
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith(
        "core.verify.rank_pool.RankFailure: a process ended with exit code 1"
    )
    assert "under `if __name__ == '__main__':`" in done.stderr
