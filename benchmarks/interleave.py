"""The rank processes of the arms, of which one arm works at a time.

A Crew is the ranks of one arm. They start once, and then wait in a blocking read of a pipe until the parent hands them
a turn, so arms can alternate within one run while the ranks of the others use no processor time. A fault in
a crew (a rank that raises, dies or does not answer in time) becomes an ArmFailure that says which rank and why, and the
crew is killed. Ranks end when the parent does, however it ends: their pipe closes, and Linux is asked to kill them.
"""

from __future__ import annotations

import contextlib
import datetime
import faulthandler
import gc
import importlib
import itertools
import multiprocessing
import os
import queue
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import connection
from pathlib import Path
from typing import Any

from benchmarks.arms import Arm, Microbatch, Step, all_arms
from benchmarks.new_process import die_with_parent
from benchmarks.workloads import Workload

GRACE_S = 1.0  # after the first failure of a rank, how long the others may take to report theirs
LOST_PEER = ("connection", "socket", "broken pipe", "timed out")  # what a rank says when another one is gone
LOOPBACK = {"linux": "lo", "darwin": "lo0"}
# torch._dynamo is what torch.optim imports at its first use: not to be counted as an arm's memory.
PRELOADED = ["torch", "torch._dynamo", "torch.distributed", "benchmarks.interleave"]


class ArmFailure(Exception):
    """An arm cannot continue; the text says which rank and why."""


class ArmAbsent(ArmFailure):
    """A package of the arm cannot be imported."""


@dataclass(frozen=True)
class Limits:
    """Seconds that the slowest rank may take."""

    start_s: float = 240.0
    build_s: float = 240.0
    step_s: float = 60.0


@dataclass(frozen=True)
class Job:
    """Job of the ranks of an arm, passed when they start.

    data_ranks: for how many ranks there are microbatches; with one process it is given those of all of them.
    """

    arm: str
    modules: tuple[str, ...]
    workload: Workload
    ranks: int
    data_ranks: int
    accumulation: int

    def microbatches(self, rank: int, step: int) -> list[Microbatch]:
        """Microbatches of `rank` in a step."""
        seen = range(rank, self.data_ranks, self.ranks)
        return [one for data in seen for one in self.workload.microbatches(step, data, self.accumulation)]


@dataclass(frozen=True)
class StepSample:
    """One step of one rank: wall seconds, processor seconds of all threads, mean loss before the update."""

    wall_s: float
    cpu_s: float
    loss: float


class Workshop:
    """State that crews share: the store over which their ranks meet, and the folder of their logs."""

    def __init__(self) -> None:
        import torch.distributed as dist

        self.context = multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload(PRELOADED)  # of no effect where this process has its server already
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.folder = tempfile.TemporaryDirectory(prefix="benchmark-")
        self.numbers = itertools.count()
        self.crews: list[Crew] = []

    def __enter__(self) -> Workshop:
        return self

    def __exit__(self, *error: object) -> None:
        for crew in list(self.crews):
            crew.kill()
        self.folder.cleanup()

    def start(self, arm: Arm, job: Job, limits: Limits) -> Crew:
        """Start an arm's processes; `crew.meet()` waits for them."""
        crew = Crew(self, arm, job, limits)
        self.crews.append(crew)
        return crew


class Crew:
    """The rank processes of one arm."""

    def __init__(self, workshop: Workshop, arm: Arm, job: Job, limits: Limits) -> None:
        self.arm, self.job, self.limits = arm, job, limits
        self.workshop = workshop
        number = next(workshop.numbers)
        self.taken = 0
        self.pipes: list[connection.Connection] = []
        self.processes: list[Any] = []
        self.logs = [Path(workshop.folder.name) / f"{number}-{rank}.log" for rank in range(job.ranks)]
        for rank, log in enumerate(self.logs):
            mine, theirs = workshop.context.Pipe()
            what = (theirs, job, rank, workshop.store.port, f"crew-{number}", str(log), limits)
            process = workshop.context.Process(target=_rank_main, args=what, daemon=True, name=f"{arm.name} {rank}")
            process.start()
            theirs.close()
            self.pipes.append(mine)
            self.processes.append(process)

    def meet(self) -> None:
        """Wait until every rank has imported what it needs and joined the group."""
        self._answers("starting", self.limits.start_s)

    def build(self) -> None:
        """Let every rank build its model and optimizer."""
        self._send(("build",))
        self._answers("building", self.limits.build_s)

    def steps(self, count: int, watch: Callable[[], None] | None = None) -> list[list[StepSample]]:
        """Run the next `count` steps on every rank: [rank][step]. `watch` is called all along."""
        first, self.taken = self.taken, self.taken + count
        self._send(("steps", first, count))
        return self._answers(f"running step {first} to {self.taken - 1}", self.limits.step_s * count, watch)

    @property
    def pids(self) -> list[int]:
        """Process numbers by rank."""
        return [process.pid for process in self.processes]

    def kill(self) -> None:
        """End the processes; may be called again."""
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()
        for pipe in self.pipes:
            pipe.close()
        if self in self.workshop.crews:
            self.workshop.crews.remove(self)

    def _send(self, message: tuple[Any, ...]) -> None:
        for pipe in self.pipes:
            with contextlib.suppress(OSError):  # a dead rank is noticed when its answer is waited for
                pipe.send(message)

    def _answers(self, doing: str, limit_s: float, watch: Callable[[], None] | None = None) -> list[Any]:
        """One answer a rank, in rank order; or kill the crew and raise ArmFailure."""
        waiting = dict(enumerate(self.pipes))
        answers: dict[int, Any] = {}
        failures: list[tuple[int, str, str]] = []
        end = time.monotonic() + limit_s
        while waiting and (left := end - time.monotonic()) > 0:
            ready = connection.wait(list(waiting.values()), left if watch is None else min(left, 0.005))
            if watch is not None:
                watch()
            for rank in [rank for rank, pipe in waiting.items() if pipe in ready]:
                kind, value = self._receive(rank, waiting.pop(rank))
                if kind == "done":
                    answers[rank] = value
                else:
                    failures.append((rank, kind, value))
                    end = min(end, time.monotonic() + GRACE_S)
        if waiting and not failures:
            rank = min(waiting)
            failures.append((rank, "failed", f"no answer after {limit_s:g} s of {doing}; it was {self._where(rank)}"))
        if failures:
            self.kill()
            failures.sort(key=lambda failure: any(word in failure[2].lower() for word in LOST_PEER))
            rank, kind, text = failures[0]
            raise (ArmAbsent(text) if kind == "absent" else ArmFailure(f"rank {rank}, {doing}: {text}"))
        return [answers[rank] for rank in range(self.job.ranks)]

    def _receive(self, rank: int, pipe: connection.Connection) -> tuple[str, Any]:
        try:
            return pipe.recv()
        except (EOFError, OSError):
            self.processes[rank].join()
            return "failed", f"its process ended with exit code {self.processes[rank].exitcode}{self._last_words(rank)}"

    def _last_words(self, rank: int) -> str:
        lines = self.logs[rank].read_text(errors="replace").strip().splitlines() if self.logs[rank].exists() else []
        return f"; the last it wrote: {lines[-1][:200]}" if lines else ""

    def _where(self, rank: int) -> str:
        """The innermost Python frame of a rank that does not answer, by faulthandler."""
        before = self.logs[rank].stat().st_size if self.logs[rank].exists() else 0
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.processes[rank].pid, signal.SIGUSR1)
            time.sleep(0.3)
        if not self.logs[rank].exists():
            return "nowhere to be found"
        with self.logs[rank].open(errors="replace") as log:
            log.seek(before)
            frames = [line.strip() for line in log if line.lstrip().startswith("File ")]
        return f"at {frames[0]}" if frames else "nowhere to be found"


# --- the other side of the pipe ---------------------------------------------------------------------------------------


def _rank_main(
    pipe: connection.Connection, job: Job, rank: int, port: int, prefix: str, log: str, limits: Limits
) -> None:
    """Import, join the group, then do what the parent says until the pipe closes."""
    die_with_parent()
    _write_to(log)
    messages: queue.SimpleQueue[Any] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(pipe, messages), daemon=True).start()
    step: Step | None = None
    message: tuple[Any, ...] = ("start", rank, port, prefix, limits)
    while True:
        try:
            value: Any = None
            if message[0] == "start":
                arm = _start(job, *message[1:])
            elif message[0] == "build":
                step = arm.build(job.workload, job.ranks, job.accumulation)
            else:
                assert step is not None, "the parent builds before it steps"
                value = _run_steps(step, job, rank, *message[1:])
            pipe.send(("done", value))
        except ArmAbsent as error:
            pipe.send(("absent", str(error)))
        except BaseException as error:
            traceback.print_exc()
            sys.stderr.flush()
            where = traceback.extract_tb(error.__traceback__)[-1]
            text = str(error).strip().partition("\n")[0]
            pipe.send(("failed", f"{type(error).__name__}: {text} ({Path(where.filename).name}:{where.lineno})"))
        message = messages.get()


def _start(job: Job, rank: int, port: int, prefix: str, limits: Limits) -> Arm:
    os.environ |= {
        "OMP_NUM_THREADS": "1",
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(job.ranks),
        "LOCAL_WORLD_SIZE": str(job.ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    if sys.platform in LOOPBACK:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", LOOPBACK[sys.platform])
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    arm = all_arms(job.modules)[0][job.arm]
    for module in arm.imports:
        try:
            importlib.import_module(module)
        except ImportError as error:
            raise ArmAbsent(f"{module} cannot be imported: {error}") from error
    store = dist.PrefixStore(prefix, dist.TCPStore("127.0.0.1", port, is_master=False))
    # The parent's limit comes first, and can say where a rank is stuck.
    timeout = datetime.timedelta(seconds=2 * max(limits.start_s, limits.build_s, limits.step_s))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=job.ranks, timeout=timeout)
    gc.collect()  # what importing left must not go, nor pages of the server be copied for it, within a step
    return arm


def _run_steps(step: Step, job: Job, rank: int, first: int, count: int) -> list[StepSample]:
    samples = []
    for number in range(first, first + count):
        microbatches = job.microbatches(rank, number)
        wall, cpu = time.perf_counter(), time.process_time()
        loss = step(microbatches)
        samples.append(StepSample(time.perf_counter() - wall, time.process_time() - cpu, loss))
    return samples


def _read(pipe: connection.Connection, messages: queue.SimpleQueue[Any]) -> None:
    # A thread of its own, so that a closed pipe ends the process even inside a collective.
    try:
        while True:
            messages.put(pipe.recv())
    except (EOFError, OSError):
        os._exit(1)


def _write_to(log: str) -> None:
    """Send what this process prints to a file, and its frames on SIGUSR1."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    faulthandler.register(signal.SIGUSR1, file=descriptor, all_threads=False)
