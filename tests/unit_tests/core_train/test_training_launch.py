"""Launchers' environments, threads a rank, and ranks started by the job itself."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from core_plan.job.errors import ConfigError
from core_plan.machine.launch import Launch, expand_counts, find_launch, first_host, say_once
from core_plan.machine.threads import available_cores, intra_op_threads
from tests.unit_tests.forked_python import _become
from tests.unit_tests.ranks import _the_pool
from tests.unit_tests.test_docs import ROOT

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "head",
    "MASTER_PORT": "1234",
    "TORCHELASTIC_RUN_ID": "x",
}
SLURM = {
    "SLURM_JOB_ID": "40007",
    "SLURM_PROCID": "9",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "2",
    "SLURM_STEP_NUM_TASKS": "11",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2),3",
    "SLURM_STEP_NODELIST": "gpu[003-004,9],other",
}


def test_torchruns_variables_give_the_place_of_a_rank() -> None:
    assert find_launch(TORCHRUN) == Launch(5, 8, 1, 4, "head", 1234, "torchrun")


def test_slurms_variables_give_the_place_of_a_rank() -> None:
    assert find_launch(SLURM) == Launch(9, 11, 1, 3, "gpu003", 20007, "slurm")
    assert find_launch({**SLURM, "MASTER_PORT": "7", "MASTER_ADDR": "h"}) == Launch(9, 11, 1, 3, "h", 7, "slurm")


def test_torchrun_inside_slurm_wins() -> None:
    launch = find_launch({**SLURM, **TORCHRUN})
    assert launch is not None and launch.launcher == "torchrun"


def test_a_plain_start_has_no_place_and_neither_has_a_slurm_shell() -> None:
    assert find_launch({}) is None
    assert find_launch({"SLURM_JOB_ID": "1", "SLURM_PROCID": "0", "SLURM_NTASKS": "8"}) is None
    assert find_launch({**SLURM, "SLURM_STEP_NUM_TASKS": "1"}) is None


def test_half_an_environment_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="RANK=0 and WORLD_SIZE=2 are set and MASTER_ADDR, MASTER_PORT not"):
        find_launch({"RANK": "0", "WORLD_SIZE": "2"})
    with pytest.raises(ConfigError, match="SLURM_LOCALID is not set"):
        find_launch({name: value for name, value in SLURM.items() if name != "SLURM_LOCALID"})


TORCHRUN_ALL = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "here", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    ("start", "name", "value"),
    [
        *((TORCHRUN_ALL, "RANK", value) for value in ("x", "", "-1", "2", "1.0", "1" * 5000, "\u0661")),
        *((TORCHRUN_ALL, "WORLD_SIZE", value) for value in ("0", "many", "1e3")),
        *((TORCHRUN_ALL, "MASTER_PORT", value) for value in ("http", "0", "65536", "-5")),
        *((TORCHRUN_ALL, "LOCAL_RANK", value) for value in ("x", "2")),
        *((TORCHRUN_ALL, "LOCAL_WORLD_SIZE", value) for value in ("0", "3")),
        *((SLURM, "SLURM_PROCID", value) for value in ("x", "99")),
        *((SLURM, "SLURM_STEP_NUM_TASKS", value) for value in ("x", "0", "-4")),
        *((SLURM, "SLURM_LOCALID", value) for value in ("99", "")),
        *((SLURM, "SLURM_NODEID", value) for value in ("99", "a")),
        *((SLURM, "SLURM_JOB_ID", value) for value in ("job", "-1")),
        *((SLURM, "SLURM_STEP_NODELIST", value) for value in ("", ",", "[1-2]", "gpu[", "gpu[]", "gpu[a]", "a b")),
        *((SLURM, "SLURM_STEP_TASKS_PER_NODE", value) for value in ("", "x2", "4(x0)", "4(", "9" * 5000)),
        *((SLURM, "SLURM_STEP_TASKS_PER_NODE", value) for value in ("4(x2),2", "999999(x999999)", "0(x2),11")),
        *((TORCHRUN_ALL, "MASTER_ADDR", value) for value in ("", "a b", "http://here", "a\0", "a" * 5000)),
        (TORCHRUN_ALL, "TORCHELASTIC_RESTART_COUNT", "x"),
    ],
)
def test_a_variable_that_is_wrong_is_refused_in_one_line(start: dict[str, str], name: str, value: str) -> None:
    find_launch(start)
    with pytest.raises(ConfigError) as error:
        find_launch({**start, name: value})
    assert "\n" not in str(error.value) and len(str(error.value)) < 6000


@pytest.mark.parametrize(
    ("hosts", "first"),
    [("node7", "node7"), ("a-1,a-2", "a-1"), ("gpu[003-006,9]", "gpu003"), ("r[2,4]n", "r2n"), ("x[10-12],y", "x10")],
)
def test_the_first_host_of_a_slurm_list(hosts: str, first: str) -> None:
    assert first_host(hosts) == first


def test_slurm_counts_are_expanded_or_refused() -> None:
    assert expand_counts("2(x3),1") == [2, 2, 2, 1]
    with pytest.raises(ConfigError, match="four"):
        expand_counts("four")


@pytest.mark.parametrize(
    ("environment", "requested", "threads"),
    [
        ({}, None, 4),
        ({}, 3, 3),
        ({"OMP_NUM_THREADS": "7"}, None, 7),
        ({"OMP_NUM_THREADS": "6,2"}, None, 6),
        ({"OMP_NUM_THREADS": "7"}, 2, 2),
        ({"OMP_NUM_THREADS": "1", "TORCHELASTIC_RUN_ID": "x"}, None, 4),  # torchrun's own 1
        ({"OMP_NUM_THREADS": "2", "TORCHELASTIC_RUN_ID": "x"}, None, 2),
        ({"OMP_NUM_THREADS": "1"}, None, 1),
        ({"SLURM_CPUS_PER_TASK": "5"}, None, 5),
    ],
)
def test_threads_are_the_flag_or_the_users_variable_or_a_share_of_the_cores(
    environment: dict[str, str], requested: int | None, threads: int
) -> None:
    assert intra_op_threads(environment, requested=requested, cores=16, local_world_size=4) == threads


def test_more_ranks_than_cores_get_one_thread_each() -> None:
    assert intra_op_threads({}, requested=None, cores=2, local_world_size=4) == 1
    assert available_cores() >= 1


RANK_SCRIPT = r"""
import os, signal, sys, time
from core_plan.machine.launch import find_launch
from core_plan.machine.own_ranks import become_rank, start_ranks
launch = find_launch(os.environ)
if launch is None:
    sys.orig_argv = [sys.executable, *sys.argv]
    sys.exit(start_ranks(2))
become_rank(launch)
what = sys.argv[1]
if what == "sum":  # importing torch takes longer than all the rest, so only where ranks must meet
    import torch, torch.distributed as dist
    dist.init_process_group("gloo")
    total = torch.tensor([launch.rank + 1.0])
    dist.all_reduce(total)
    sys.stdout.write(f"sum {total.item()}\n"); sys.stdout.flush()
    dist.destroy_process_group()
if what == "fail" and launch.rank == 1:
    os._exit(3)
if what in ("fail", "wait"):
    signal.signal(signal.SIGINT, lambda *_: sys.exit(5))
    sys.stdout.write(f"pid {os.getpid()}\n"); sys.stdout.flush()
    time.sleep(0.2 if what == "fail" else 30)
"""


class Job:
    """The script in a fork of a process that has torch; its ranks are started as those of any job."""

    def __init__(self, folder: Path, what: str) -> None:
        script, self.output = folder / "job.py", folder / "output.txt"
        script.write_text(RANK_SCRIPT)
        unwanted = {"RANK", "WORLD_SIZE", "SLURM_STEP_NUM_TASKS"}
        environment = {name: value for name, value in os.environ.items() if name not in unwanted}
        environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        files = self.output, folder / "errors.txt"
        self.process: Any = _the_pool().context.Process(
            target=_become, args=([str(script), what], str(folder), environment, files)
        )
        self.process.start()

    def status(self, limit_s: float = 60.0) -> int:
        """Wait for the end; the exit status."""
        self.process.join(limit_s)
        assert self.process.exitcode is not None, "it has not ended"
        return int(self.process.exitcode)

    def pids(self) -> list[int]:
        """Wait for both ranks."""
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and self.process.is_alive():
            lines = self.output.read_text().split("\n") if self.output.exists() else []
            found = [int(line.split()[1]) for line in lines[:-1] if line.startswith("pid")]
            if len(found) == 2:
                return found
            time.sleep(0.05)
        raise AssertionError("the ranks ended early")


@pytest.mark.nightly
def test_a_plain_start_runs_its_own_ranks(tmp_path: Path) -> None:
    job = Job(tmp_path, "sum")
    assert job.status() == 0
    assert job.output.read_text().count("sum 3.0") == 2


def test_a_plain_start_passes_on_the_failure_of_a_rank(tmp_path: Path) -> None:
    job = Job(tmp_path, "fail")
    assert job.status() == 3
    assert job.output.read_text().count("pid ") == 1, "rank 0 goes on to its end"


def test_an_interrupt_reaches_every_rank(tmp_path: Path) -> None:
    job = Job(tmp_path, "wait")
    job.pids()
    os.kill(job.process.pid, signal.SIGINT)
    assert job.status() == 5


def test_ranks_end_when_the_process_that_started_them_is_killed(tmp_path: Path) -> None:
    job = Job(tmp_path, "wait")
    pids = job.pids()
    job.process.kill()
    job.process.join()
    deadline = time.monotonic() + 20
    while any(_is_running(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not [pid for pid in pids if _is_running(pid)]


def _is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_torchrun_shows_what_ended_a_job_last_and_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

    file = tmp_path / "error.json"
    first = find_launch(TORCHRUN | {"RANK": "0", "LOCAL_RANK": "0"})
    say_once("error: --modle is no option", first, {"TORCHELASTIC_ERROR_FILE": str(file)})
    assert capsys.readouterr().err == ""
    failure = ProcessFailure(local_rank=0, pid=1, exitcode=2, error_file=str(file))
    shown = str(ChildFailedError("core_train.finetune", {0: failure})).splitlines()
    assert shown[-2].endswith("error: --modle is no option") and set(shown[-1]) == {"="}
    for launch, expected in ((first, "error: no file\n"), (None, "error: no file\n"), (find_launch(TORCHRUN), "")):
        say_once("error: no file", launch, {})
        assert capsys.readouterr().err == expected


@pytest.mark.nightly
def test_torchrun_ends_the_ranks_that_have_found_the_same(tmp_path: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3"]
    done = subprocess.run(
        [*torchrun, "pretrain_gpt.py", "--tpp", "x"], capture_output=True, text=True, timeout=150, cwd=ROOT
    )
    assert done.returncode == 1 and done.stderr.count("Unrecognized options") == 1
    assert done.stderr.rstrip().splitlines()[-2].endswith("--tpp, x")
