"""The main job on two hosts, by `torchrun --nnodes 2`: right numbers without shared memory; a lost host is named."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("tyro")

from tests.unit_tests.core_train.training_reference import ROOT, TINY, losses_on_ranks, read_losses, text_flags_in
from tests.unit_tests.core_train.two_hosts import ADDRESSES, TwoHosts, why_not

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(300)]


@pytest.fixture(scope="module", autouse=True)
def _needs_namespaces() -> None:
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)


def start_job(hosts: TwoHosts, tmp_path: Path, *flags: str) -> list[tuple[subprocess.Popen[str], Path]]:
    """Two ranks on each host; each host's process and the file of its output."""
    where = [
        "--run.directory",
        str(tmp_path),
        "--run.name",
        "hosts",
        "--logging.no-plots",
        "--logging.print-every",
        "1",
    ]
    job = [str(ROOT / "pretrain_gpt.py"), *TINY, *where, *flags]
    started = []
    for host in range(2):
        # each machine has a token cache of its own; the text is on a disk that both see
        text = text_flags_in(tmp_path / f"tokens-{host}")
        torchrun = ["-m", "torch.distributed.run", "--nnodes", "2", "--node-rank", str(host), "--nproc-per-node", "2"]
        torchrun += ["--master-addr", ADDRESSES[0], "--master-port", "29511"]
        log = tmp_path / f"log-{host}"
        with log.open("w") as output:
            command = [sys.executable, *torchrun, *job, *text]
            process = hosts.start(host, command, stdout=output, stderr=subprocess.STDOUT, cwd=tmp_path)
        started.append((process, log))
    return started


def wait_for(log: Path, pattern: str, limit_s: float) -> str:
    until = time.monotonic() + limit_s
    while time.monotonic() < until:
        found = re.search(pattern, log.read_text())
        if found is not None:
            return found[0]
        time.sleep(0.05)
    raise AssertionError(f"{log.name} has no {pattern!r} within {limit_s} s: {log.read_text()}")


@pytest.mark.parametrize("flags", [[], ["--tp", "1"], ["--tp", "1", "--pp", "2"]], ids=["tp2-dp2", "dp4", "pp2-dp2"])
def test_two_hosts_have_the_losses_of_one(tmp_path: Path, flags: list[str]) -> None:
    expected = losses_on_ranks(4, [*TINY, *text_flags_in(tmp_path / "tokens"), *flags], tmp_path)
    with TwoHosts(tmp_path) as hosts:
        for process, log in start_job(hosts, tmp_path, *flags):
            assert process.wait(120) == 0, log.read_text()
    losses = read_losses(tmp_path / "hosts")
    assert losses == pytest.approx(expected, abs=1e-6, rel=0) and len(losses) == 20
    assert losses[0] - losses[-1] > 0.3, "they moved by far more than the bound"


@pytest.mark.parametrize(("lost", "how"), [(1, "killed"), (1, "cable"), (0, "killed"), (0, "cable")])
def test_a_lost_host_is_named_on_the_other(tmp_path: Path, lost: int, how: str) -> None:
    """Host a holds the job's store: without it the survivors say that."""
    with TwoHosts(tmp_path) as hosts:
        job = start_job(hosts, tmp_path, "--run.steps", "100000")
        wait_for(job[0][1], "step 3/", 120)
        if how == "cable":
            hosts.pull_the_cable()
        else:
            job[lost][0].kill()
        log = job[1 - lost][1]
        if lost == 1:  # by the watch, or by the rank whose wait failed
            named = wait_for(log, r"rank [23] \(process \d+ on host-b\) \w+|ranks? [23][\d, ]* did not come", 20)
            assert "left" not in named
        else:
            wait_for(log, "the job's store does not answer", 20)
