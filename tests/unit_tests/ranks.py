"""A test that runs on several ranks, written like a test that runs on one.

    @ranks(2, 4)
    @pytest.mark.parametrize("average", [False, True])
    def test_sum_of_ranks(rank: int, world: int, average: bool) -> None:
        ...

The function runs once a rank, in processes that were started before and have torch imported. Each test has a default
gloo group of its own, which is destroyed afterwards together with whatever `parallel_state` built. A failure shows the
first failing rank's traceback only; a test that does not end is ended, and its stuck frame is shown.

The pool: one process a rank, at most MAX_WORLD, shared by the whole pytest session. A worker that took part in a failed
test is never used again. Workers end when the pipe from the pytest process closes, so none outlives it.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import datetime
import faulthandler
import functools
import gc
import importlib
import inspect
import itertools
import multiprocessing
import os
import queue
import random
import re
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import connection, forkserver
from pathlib import Path
from typing import Any

import pytest

MAX_WORLD = 8
START_LIMIT_S = 180.0  # starting a worker on a busy machine; not counted as the test's time
GRACE_S = 1.0  # after the first failure, how long the other ranks may take to report theirs
SEED = 1234
PRELOADED = ("core_train.job", "core.booster.plugin", "core.gradient_accumulation", "tests.layouts.gpt")
LIBRARIES = ("transformers.models.llama.modeling_llama", "safetensors.torch", "peft")
EAGER = ("test_process_groups", "test_parallel_state", "test_ranks")  # connect all pairs of a group when it is made
LOOPBACK = {"linux": "lo", "darwin": "lo0"}

# What a rank says when another one is gone; never shown while a better reason is known.
CONNECTION_WORDS = ("connection closed", "connection reset", "timed out", "timeout", "broken pipe", "socket")


class RankFailure(AssertionError):
    """The first failing rank's traceback, or the frame of a rank that did not end."""


def ranks(
    *worlds: int, nightly: Sequence[int] = (), timeout_s: float = 60.0
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Run a test function on `world` ranks, for each of `worlds`, and for each of `nightly` among the long sweeps.

    The function takes `rank` and `world`, and any parameters and fixtures whose values can be pickled. It must be
    found by its name in its module: no closures.
    """
    if not worlds or any(not 1 <= world <= MAX_WORLD for world in (*worlds, *nightly)):
        raise ValueError(f"@ranks takes worlds from 1 to {MAX_WORLD}, got {worlds}; write @ranks(4) or @ranks(1, 2).")

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        wanted = inspect.signature(function).parameters

        @functools.wraps(function)
        def test(*bound: object, **arguments: Any) -> None:
            __tracebackhide__ = True  # what failed is in the RankFailure's text
            # `bound` is the instance of a test class; each rank makes its own.
            world = arguments["world"]
            passed = {name: value for name, value in arguments.items() if name in wanted}
            run_on_ranks(function, world, passed, timeout_s=timeout_s)

        parameters = [parameter for name, parameter in wanted.items() if name != "rank"]
        if "world" not in wanted:
            parameters.append(inspect.Parameter("world", inspect.Parameter.KEYWORD_ONLY))
        test.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        test.rank_function = function  # type: ignore[attr-defined]
        marked = pytest.mark.timeout(timeout_s + START_LIMIT_S)(test)
        cases = [pytest.param(world, id=f"{world}ranks") for world in worlds]
        cases += [pytest.param(world, id=f"{world}ranks", marks=pytest.mark.nightly) for world in nightly]
        return pytest.mark.parametrize("world", cases)(marked)

    return decorate


def run_on_ranks(
    function: Callable[..., None], world: int, arguments: dict[str, Any], *, timeout_s: float = 60.0
) -> None:
    """Call `function(rank=..., **arguments)` on each of `world` ranks; raise RankFailure when one fails."""
    __tracebackhide__ = True
    if "<locals>" in function.__qualname__:
        raise ValueError(f"{function.__qualname__} is defined inside a function; ranks find tests by name in a module.")
    _the_pool().run(function, world, arguments, timeout_s)


@contextlib.contextmanager
def as_torchrun_starts(rank: int, world: int) -> Iterator[None]:
    """In the place of a test's group, the variables by which torchrun's ranks find each other. Collective."""
    import torch.distributed as dist

    port = [0]
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        port = [store.port]
    dist.broadcast_object_list(port)
    dist.barrier()
    dist.destroy_process_group()
    place = {"RANK": rank, "WORLD_SIZE": world, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": world}
    place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port[0], "TORCHELASTIC_USE_AGENT_STORE": True}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in place.items():
            patch.setenv(name, str(value))
        yield


# --- this side of the pipe ---------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Task:
    """One rank's part of one test."""

    module: str
    qualname: str
    arguments: dict[str, Any]
    rank: int
    world: int
    store_prefix: str
    timeout_s: float


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What became of one rank's part: passed, skipped, failed or ended."""

    rank: int
    kind: str
    when_s: float
    text: str = ""
    only_lost_a_peer: bool = False


class Worker:
    """A started process that waits for tasks."""

    def __init__(self, context: Any, number: int, store_port: int, folder: Path) -> None:
        self.stuck_file = folder / f"stuck-{number}.txt"
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(
            target=_worker_main, args=(theirs, store_port, str(self.stuck_file)), name=f"rank-worker-{number}"
        )
        self.process.start()
        theirs.close()
        self.ready = False

    def wait_until_ready(self) -> None:
        if self.ready:
            return
        if not self.pipe.poll(START_LIMIT_S):
            raise RuntimeError(f"{self.process.name} did not start within {START_LIMIT_S:.0f} s")
        self.pipe.recv()  # EOFError here means that the worker's own imports failed; its stderr says why
        self.ready = True

    def where_it_is_stuck(self) -> str:
        """The Python frames of the worker, by faulthandler; works inside a collective too."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process.pid, signal.SIGUSR1)
            time.sleep(0.3)
        return self.stuck_file.read_text() if self.stuck_file.exists() else "(no frames)"

    def kill(self) -> None:
        self.process.kill()
        self.process.join()
        self.pipe.close()


class Pool:
    """Workers by rank; grown on demand. A worker is of one rank all its life: torch keeps what it found for a mesh."""

    def __init__(self) -> None:
        from core.groups.local_store import local_store

        # forkserver: torch is imported once, a worker costs a fork. It forks before any thread or group exists.
        method = "forkserver" if sys.platform == "linux" else "spawn"
        self.context = multiprocessing.get_context(method)
        if method == "forkserver":
            # torch.optim imports torch._dynamo at its first use, a second in each worker if not done here.
            # So is the package: a worker of eight that imports it for itself costs a second, and so after each failure.
            # So is what this process has imported: a whole suite comes to most of the package, and to transformers.
            own = [name for name in sys.modules if re.match(r"core(_\w+)?\.", name) and not name.endswith("__main__")]
            own += [name for name in LIBRARIES if name.partition(".")[0] in sys.modules]
            self.context.set_forkserver_preload(
                ["torch", "torch.distributed", "torch._dynamo", "einops", "pytest", *PRELOADED, *own]
            )
        # On IPv4, as torch asks for the name of each client: a name server may take 5 s for ::ffff:127.0.0.1.
        self.store = local_store()
        self.folder = Path(tempfile.mkdtemp(prefix="ranks-"))
        self.numbers = itertools.count()
        self.workers: dict[int, Worker] = {}

    def run(self, function: Callable[..., None], world: int, arguments: dict[str, Any], timeout_s: float) -> None:
        __tracebackhide__ = True
        for rank in range(world):
            if rank not in self.workers:
                self.workers[rank] = Worker(self.context, next(self.numbers), self.store.port, self.folder)
        workers = [self.workers[rank] for rank in range(world)]
        healthy = False
        try:
            for worker in workers:
                worker.wait_until_ready()
            prefix = f"test-{next(self.numbers)}"
            for rank, worker in enumerate(workers):
                worker.pipe.send(
                    Task(function.__module__, function.__qualname__, arguments, rank, world, prefix, timeout_s)
                )
            outcomes = self._gather(workers, timeout_s)
            if all(outcome.kind in ("passed", "skipped") for outcome in outcomes):
                # Groups are taken down only now, when no rank can be inside a collective.
                for worker in workers:
                    worker.pipe.send("clean up")
                cleaned = self._gather(workers, timeout_s)
                healthy = all(outcome.kind == "passed" for outcome in cleaned)
                outcomes += cleaned
        finally:
            if not healthy:
                for rank, worker in enumerate(workers):
                    worker.kill()
                    del self.workers[rank]
        _judge(function.__qualname__, outcomes, world)

    def _gather(self, workers: Sequence[Worker], timeout_s: float) -> list[Outcome]:
        """One outcome a rank; after a failure or at the limit, what is known by then."""
        waiting = dict(enumerate(workers))
        outcomes: list[Outcome] = []
        limit = time.monotonic() + timeout_s
        while waiting:
            remaining = limit - time.monotonic()
            readable = connection.wait([worker.pipe for worker in waiting.values()], max(remaining, 0.0))
            if not readable and remaining <= 0:
                if not any(outcome.kind in ("failed", "ended") for outcome in outcomes):
                    rank, worker = min(waiting.items())
                    text = f"ranks {sorted(waiting)} had not ended after {timeout_s:g} s; rank {rank} was here:\n"
                    outcomes.append(Outcome(rank, "failed", time.monotonic(), text + worker.where_it_is_stuck()))
                break
            for rank in [rank for rank, worker in waiting.items() if worker.pipe in readable]:
                worker = waiting.pop(rank)
                try:
                    outcome = worker.pipe.recv()
                except (EOFError, ConnectionResetError):
                    worker.process.join()
                    code = worker.process.exitcode
                    crashed = code is not None and code < 0 and worker.stuck_file.exists()
                    text = f"the process ended with exit code {code} inside the test"
                    text += f"\n{worker.stuck_file.read_text()}" if crashed else ""
                    outcome = Outcome(rank, "ended", time.monotonic(), text)
                outcomes.append(outcome)
                if outcome.kind in ("failed", "ended"):
                    limit = min(limit, time.monotonic() + GRACE_S)
        return outcomes

    def close(self) -> None:
        for worker in self.workers.values():
            worker.kill()
        self.workers.clear()
        shutil.rmtree(self.folder, ignore_errors=True)


def _judge(name: str, outcomes: Sequence[Outcome], world: int) -> None:
    __tracebackhide__ = True
    failures = [outcome for outcome in outcomes if outcome.kind in ("failed", "ended")]
    if failures:
        first = min(failures, key=lambda outcome: (outcome.only_lost_a_peer, outcome.when_s))
        others = sorted({outcome.rank for outcome in failures} - {first.rank})
        more = f"\n(also failed: ranks {others})" if others else ""
        raise RankFailure(f"{name}, rank {first.rank} of {world}:\n{first.text}{more}")
    for outcome in outcomes:
        if outcome.kind == "skipped":
            pytest.skip(outcome.text)


_pool: Pool | None = None


def _the_pool() -> Pool:
    global _pool
    if _pool is None:
        _pool = Pool()
        atexit.register(close_pool)
    return _pool


def start_server() -> None:
    """Start the process that workers are forked from, with what this process has imported of the package by now.

    A process has one such server, and its imports are those that the first pool to start it names: one of the
    package, or this one. Workers that have to import for themselves cost seconds each.
    """
    _the_pool()
    if sys.platform == "linux":
        forkserver.ensure_running()


def close_pool() -> None:
    """End all workers; the next test starts new ones."""
    global _pool
    if _pool is not None:
        _pool.close()
        _pool = None


# --- the other side of the pipe ----------------------------------------------------------------------------------


def _worker_main(pipe: connection.Connection, store_port: int, stuck_file: str) -> None:
    """Run tasks until the pipe closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole terminal; the pytest process decides
    os.environ["OMP_NUM_THREADS"] = "1"
    if sys.platform in LOOPBACK:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", LOOPBACK[sys.platform])
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    _rewrite_asserts(Path(stuck_file).parent)
    _seed_what_is_there_only()
    stuck = open(stuck_file, "w")  # noqa: SIM115  faulthandler needs the descriptor for as long as the process lives
    faulthandler.register(signal.SIGUSR1, file=stuck, all_threads=False)
    faulthandler.enable(file=stuck)  # a crash of native code leaves the frames of all threads
    messages: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def read_pipe() -> None:
        # A thread of its own, so that a closed pipe ends the process even inside a collective.
        try:
            while True:
                messages.put(pipe.recv())
        except (EOFError, OSError):  # the pytest process is gone, and could not clean up
            shutil.rmtree(Path(stuck_file).parent, ignore_errors=True)
            os._exit(1)

    threading.Thread(target=read_pipe, daemon=True).start()
    store = dist.TCPStore("127.0.0.1", store_port, is_master=False)
    _freeze_what_was_imported()
    pipe.send("ready")
    while True:
        task = messages.get()
        pipe.send(_outcome(task.rank, functools.partial(_run_task, task, store)))
        messages.get()
        pipe.send(_outcome(task.rank, _clean_up))


def _outcome(rank: int, act: Callable[[], None]) -> Outcome:
    """Run, and turn what happened into something that can be sent."""
    try:
        act()
        return Outcome(rank, "passed", time.monotonic())
    except pytest.skip.Exception as skip:
        return Outcome(rank, "skipped", time.monotonic(), str(skip))
    except BaseException as error:
        when_s = time.monotonic()
        words = f"{type(error).__name__} {error}".lower()
        lost_peer = isinstance(error, (RuntimeError, OSError)) and any(word in words for word in CONNECTION_WORDS)
        return Outcome(rank, "failed", when_s, _traceback_of_the_test(error), lost_peer)
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()


def _traceback_of_the_test(error: BaseException) -> str:
    """The traceback without this file's own frames."""
    frames = traceback.TracebackException.from_exception(error)
    frames.stack = traceback.StackSummary.from_list([frame for frame in frames.stack if frame.filename != __file__])
    return "".join(frames.format())


def _run_task(task: Task, store: Any) -> None:
    import torch
    import torch.distributed as dist

    found: Any = importlib.import_module(task.module)
    owner = None
    for name in task.qualname.split("."):
        owner, found = found, getattr(found, name)
    function = getattr(found, "rank_function", found)
    if inspect.isclass(owner):
        function = functools.partial(function, owner())

    random.seed(SEED)
    torch.manual_seed(SEED)
    if "TESTS_POISON" in os.environ:
        from tests.unit_tests import poison

        poison.start()
    # gloo connects two ranks when they first talk, not every pair of every group at once: of 20 groups a test uses
    # few, and the others cost it more than all its collectives. Tests of groups themselves have them as users do.
    os.environ["TORCH_GLOO_LAZY_INIT"] = "0" if task.module.rpartition(".")[2] in EAGER else "1"
    dist.init_process_group(
        "gloo",
        store=dist.PrefixStore(task.store_prefix, store),
        rank=task.rank,
        world_size=task.world,
        timeout=datetime.timedelta(seconds=2 * task.timeout_s),  # the pool's limit comes first, and shows the frame
    )
    try:
        function(rank=task.rank, **task.arguments)
    finally:
        for patches in task.arguments.values():  # the fixture's end undoes those of the test's own process alone
            if isinstance(patches, pytest.MonkeyPatch):
                patches.undo()


def _clean_up() -> None:
    """Leave nothing of a test behind."""
    import torch
    import torch.distributed as dist

    connections = [[group._get_backend(torch.device("cpu"))] for group in dist.distributed_c10d._world.pg_map]
    parallel_state = sys.modules.get("core.parallel_state")
    if parallel_state is not None:
        parallel_state.destroy_model_parallel()
    streams = sys.modules.get("core.tensor_parallel.random")
    if streams is not None:
        streams.get_rng_tracker().reset()
    if dist.is_initialized():
        dist.destroy_process_group()
    torch.set_grad_enabled(True)
    torch.set_default_dtype(torch.float32)
    if torch.are_deterministic_algorithms_enabled():  # asked first: the setter imports the compiler
        torch.use_deterministic_algorithms(False)
    gc.collect()
    _end_side_by_side(connections)
    _freeze_what_was_imported()


def _end_side_by_side(connections: Sequence[list[Any]]) -> None:
    """Let go of the last reference to each. The thread of a gloo group looks every 10 ms whether it shall end, and a
    test of four axes has 20 groups: one after another they would cost more than most tests.
    """
    ends = [threading.Thread(target=connection.clear) for connection in connections]
    for end in ends:
        end.start()
    for end in ends:
        end.join()


def _freeze_what_was_imported() -> None:
    """Modules stay, so the collections after later tests need not look at them; 0.1 s each once a suite has run."""
    global _modules_frozen
    if len(sys.modules) != _modules_frozen:
        gc.freeze()
        _modules_frozen = len(sys.modules)


_modules_frozen = 0


def _seed_what_is_there_only() -> None:
    """torch keeps each seed for each kind of device that may still appear, with the stack it came from: 0.3 ms and
    some KiB a `manual_seed`, and tests seed each model that they make.
    """
    import torch

    for kind in (torch.cuda, torch.xpu, torch.mtia):
        if not kind.is_available():
            kind.manual_seed_all = lambda seed: None


def _rewrite_asserts(folder: Path) -> None:
    """Make a failing assert show its values here as it does in the pytest process.

    pytest keeps what it rewrote next to the tests, unless Python writes no bytecode. Then the first worker
    that rewrites a file leaves it for the others: in the pool's folder, or in that of a whole run.
    """
    from _pytest.assertion import install_importhook
    from _pytest.config import get_config

    from tests.unit_tests import rewritten

    install_importhook(get_config())
    if rewritten.FOLDER in os.environ or sys.dont_write_bytecode:
        rewritten.share(Path(os.environ.get(rewritten.FOLDER, folder)))
