"""Pool of processes on this machine that run functions repeatedly as the ranks of a gloo group.

The ranks meet at a store in this process, on a port chosen by the system. No process is ever left behind: a rank exits
when the pipe to this process closes, or when this process has ended.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing import connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from core import parallel_state
from core.groups.local_store import local_store

START_LIMIT_S = 180.0
GRACE_S = 5.0  # after one rank fails, time for the others to report their errors
OURS = Path(__file__).parents[1]  # the package
PEER_IS_GONE = ("Connection closed by peer", "Connection reset by peer", "Broken pipe")  # gloo's messages


class RankFailure(RuntimeError):
    """Error for a rank that raised, exited, or timed out; the message names the first one and contains its traceback.

    Attributes:
        refusal: The original error, if this package rejected the input on all ranks alike; its message is sufficient.
    """

    refusal: Exception | None = None


@dataclass(frozen=True)
class _Failed:
    """An error raised by a rank. ``refusal`` is the error itself if only this package's code ran on its way."""

    text: str
    refusal: Exception | None = None


@dataclass(frozen=True)
class _Task:
    function: Callable[..., Any]
    arguments: Sequence[Any]
    options: Mapping[str, Any]
    rank: int
    world: int
    number: int
    limit_s: float


@dataclass
class _Worker:
    process: Any
    pipe: Any
    ready: bool = field(default=False)

    def wait_until_ready(self) -> None:
        """Wait for the process to start, so that its imports do not count as task time."""
        if not self.ready:
            if not self.pipe.poll(START_LIMIT_S):
                raise RankFailure(f"a process did not start within {START_LIMIT_S:.0f} s")
            try:
                self.pipe.recv()
            except (EOFError, ConnectionResetError):
                self.process.join()
                raise RankFailure(
                    f"a process ended with exit code {self.process.exitcode} while it started, and it runs the "
                    "program's file first. Move the code that starts processes under `if __name__ == '__main__':`; "
                    "for other failures, see the process's traceback above"
                ) from None
            self.ready = True


class RankPool:
    """Pool of ``ranks`` processes, started on first use. A context manager: leaving it ends them.

        with RankPool(4) as pool:
            result_of_rank_0 = pool.run(function, 2, (argument,))

    Args:
        ranks: Number of processes.
    """

    def __init__(self, ranks: int) -> None:
        if ranks < 1:
            raise ValueError(f"a pool needs at least 1 rank, got {ranks}")
        self.ranks = ranks
        # Forking a process that has imported torch is fast. The fork server starts before any thread or group exists.
        self.context: Any = multiprocessing.get_context("forkserver" if sys.platform == "linux" else "spawn")
        if sys.platform == "linux":
            self.context.set_forkserver_preload(["torch", "torch.distributed", "core.verify"])
        self.store = local_store()
        self.workers: dict[int, _Worker] = {}  # each process keeps its rank, because torch caches its mesh
        self.tasks = 0

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(
        self,
        function: Callable[..., Any],
        world: int,
        arguments: Sequence[Any] = (),
        options: Mapping[str, Any] | None = None,
        *,
        limit_s: float = 300.0,
    ) -> Any:
        """Call an importable function on ``world`` ranks of a new process group.

        Args:
            function: Importable function.
            world: Number of ranks, at most the pool's.
            arguments: Positional arguments.
            options: Keyword arguments.
            limit_s: Time limit in seconds.

        Returns:
            The result of rank 0.

        Raises:
            RankFailure: If a rank raises, exits, or times out. All ranks of the call are then restarted.
        """
        if not 1 <= world <= self.ranks:
            raise ValueError(f"{world} ranks were asked of a pool of {self.ranks}")
        self._fill()
        workers = [self.workers[rank] for rank in range(world)]
        self.tasks += 1
        healthy = False
        try:
            for worker in workers:
                worker.wait_until_ready()
            for rank, worker in enumerate(workers):
                worker.pipe.send(_Task(function, arguments, options or {}, rank, world, self.tasks, limit_s))
            results = _gather(workers, limit_s)
            healthy = True
        finally:
            if not healthy:  # ranks may hang in a collective, so none is reused
                for rank, worker in enumerate(workers):
                    _end(worker)
                    del self.workers[rank]
        return results[0]

    def start(self) -> None:
        """Start all processes now and wait until they are ready; ``run`` otherwise does so on first use."""
        self._fill()
        for worker in self.workers.values():
            worker.wait_until_ready()

    def close(self) -> None:
        """End all processes. Idempotent."""
        for worker in self.workers.values():
            _end(worker)
        self.workers.clear()

    def _fill(self) -> None:
        for rank in range(self.ranks):  # start all at once, so that they import torch in parallel
            if rank not in self.workers:
                self.workers[rank] = self._start()

    def _start(self) -> _Worker:
        ours, theirs = self.context.Pipe()
        process = self.context.Process(
            target=_worker_main, args=(theirs, self.store.port), name="verify-rank", daemon=True
        )
        process.start()
        theirs.close()
        return _Worker(process, ours)


def _end(worker: _Worker) -> None:
    worker.process.kill()
    worker.process.join()
    worker.pipe.close()


def _gather(workers: Sequence[_Worker], limit_s: float) -> list[Any]:
    """Collect all results in rank order. RankFailure names the rank that most likely caused the failure."""
    waiting = dict(enumerate(workers))
    results: dict[int, Any] = {}
    failures: list[tuple[bool, bool, int, str]] = []  # (lost a peer?, rejected?, order of arrival, what)
    refusals: list[Exception] = []
    deadline = time.monotonic() + limit_s
    while waiting:
        ready = connection.wait([w.pipe for w in waiting.values()], max(0.0, deadline - time.monotonic()))
        if not ready:
            break
        for rank in [rank for rank, worker in waiting.items() if worker.pipe in ready]:
            worker = waiting.pop(rank)
            try:
                error, result = worker.pipe.recv()
            except (EOFError, ConnectionResetError):
                worker.process.join()
                error, result = _Failed(f"its process ended with exit code {worker.process.exitcode}"), None
            if error is not None:
                lost_a_peer = any(sign in error.text for sign in PEER_IS_GONE)
                refusals += [] if error.refusal is None else [error.refusal]
                what = f"rank {rank} of {len(workers)}: {error.text}"
                failures.append((lost_a_peer, error.refusal is not None, len(failures), what))
                deadline = min(deadline, time.monotonic() + GRACE_S)
            results[rank] = result
    if failures:
        failure = RankFailure(min(failures)[-1])
        if len(refusals) == len(workers) and len(set(map(repr, refusals))) == 1:
            failure.refusal = refusals[0]
        raise failure
    if waiting:
        raise RankFailure(f"ranks {sorted(waiting)} had not ended after {limit_s:g} s")
    return [results[rank] for rank in range(len(workers))]


# --- in the started processes -----------------------------------------------------------------------------------------


def _worker_main(pipe: Any, port: int) -> None:
    def end_with_parent() -> None:
        starter = multiprocessing.parent_process()
        assert starter is not None, "a pool's rank is started by a pool"
        connection.wait([starter.sentinel])
        os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    pipe.send("ready")
    while True:
        try:
            task = pipe.recv()
        except EOFError:
            return
        pipe.send(_perform(task, port))


def _perform(task: _Task, port: int) -> tuple[_Failed | None, Any]:
    limit = timedelta(seconds=task.limit_s)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=limit)
    try:
        dist.init_process_group(
            "gloo",
            store=dist.PrefixStore(f"task-{task.number}", store),
            rank=task.rank,
            world_size=task.world,
            timeout=limit,
        )
        result = task.function(*task.arguments, **task.options)
        dist.barrier()  # no rank destroys the group while another still uses it
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
        return None, result if task.rank == 0 else None
    except Exception as error:  # groups stay alive so that this error is reported first; the pool ends us
        return _Failed(f"{type(error).__name__}: {error}\n{traceback.format_exc()}", _refusal(error)), None


def _refusal(error: Exception) -> Exception | None:
    """Return the error if its message is meant for users and only this package's code was on the stack."""
    places = [Path(frame.filename) for frame in traceback.extract_tb(error.__traceback__)]
    says_all = isinstance(error, (ValueError, MemoryError)) and error.args == (str(error),)
    return error if says_all and all(OURS in place.parents for place in places) else None
