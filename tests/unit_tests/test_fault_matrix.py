"""Every survivor names the rank that was lost: by each fault, in each phase of the main job, in each layout, both ways.

The main job runs in processes of multiprocessing, without a launcher that would end them. One rank falls in a phase.
What the other ranks' watches log is read with its time. A sample runs by default, and all of it nightly. The end of the
run says how many survivors have named the rank, and how fast.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import logging
import multiprocessing
import os
import re
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from core.booster import Booster
from core.booster.plugin import HybridParallelPlugin
from core.groups.local_store import local_store
from core_plan.job.config_file import load_config
from core_plan.job.plan import plan_job
from core_plan.machine.launch import Launch
from core_train.job import on_started_ranks, run_job
from tests.unit_tests.core_train.training_reference import TINY, text_flags_in
from tests.unit_tests.hugging_face.models import small, tokens

pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks for processes in /proc")

VICTIM, STEP = 1, 3
DWELL_S = 1.1  # in the phase, before the rank falls: the others come to wait for it
LIMIT_S = {"kill": 2.0, "exit 0": 2.0, "exception": 2.0, "stop": 10.0}
SLACK_S = 4.0  # for a busy machine; what the run says at its end holds the limits
START_S = 60.0

EXPERTS = "--model.num-experts 4 --model.moe-layer-freq 1"
SHARDED = "--ddp.data-parallel-sharding-strategy"
LAYOUTS = {
    "dp": (3, f"--parallel.tp 1 {SHARDED} no_shard --ddp.no-use-distributed-optimizer --ddp.no-overlap-param-gather"),
    "zero 1": (3, f"--parallel.tp 1 {SHARDED} optim"),
    "zero 2": (3, f"--parallel.tp 1 {SHARDED} optim_grads"),
    "zero 3": (3, f"--parallel.tp 1 {SHARDED} optim_grads_params"),
    "tp": (4, "--parallel.tp 2"),
    "pp": (4, "--parallel.tp 1 --parallel.pp 2 --run.micro-batch-size 1"),
    "ep": (4, f"--parallel.tp 1 --parallel.ep 2 {EXPERTS}"),
    "cp": (4, "--parallel.tp 1 --parallel.cp 2"),
    "hybrid tp": (4, ""),  # a loop of the user's own with HybridParallelPlugin, below
    "hybrid pp": (4, ""),
}
HYBRID: dict[str, dict[str, Any]] = {
    "hybrid tp": {"tp_size": 2, "pp_size": 1},  # and two data ranks
    "hybrid pp": {"tp_size": 2, "pp_size": 2, "num_microbatches": 2},
}
TRANSPORTS = {"memory": [], "sockets": ["--ddp.no-share-host-memory"]}
# Where the rank falls: a function that is entered there, and whether that counts in step STEP alone.
FUNCTIONS = {
    "before groups": ("core.parallel_state", "start_watch", False),  # the ranks are started, and this one has no watch
    "start-up": ("core.parallel_state", "ProcessGroups.build", False),
    "wrap": ("core_train.job", "wrap_stages", False),
    "data": ("core_train.trainer", "Trainer.batch", True),
    "bucket": ("core.distributed.wire.collectives", "Collectives._launch", True),
    "guards": ("core.distributed.reduce.grad_reducer", "agree_on_step", True),
    "norm": ("core.optimizer.optimizer", "GradMeter.measure", True),
    "gather": ("core.distributed.sharded.plain_params", "PlainParams.start_bucket", True),
    "load": ("core.checkpoint.load", "_check_format", False),
    "save": ("core_train.checkpoints", "save_checkpoint", False),
}
IN_HYBRID = {
    "wrap": ("core.booster.plugin.zero_plugin_base", "cut_model", False),  # the watch runs
    "data": (__name__, "batch_of", True),
    "load": ("core.booster.booster", "Booster.load_model", False),
    "save": ("core.booster.booster", "Booster.save_model", False),
}
GATHERED_IN_USE = {"gather": ("core.distributed.sharded.unsharder", "Unsharder._all_gather", True)}
LAYERS = ("TransformerLayer", "LlamaDecoderLayer")
PHASES = (*FUNCTIONS, "forward", "backward")
IN_STEPS = {"data", "forward", "backward", "bucket", "guards", "norm", "gather"}


@dataclass(frozen=True)
class Case:
    fault: str
    phase: str
    layout: str
    transport: str

    def __str__(self) -> str:
        return f"{self.fault}, {self.phase}, {self.layout}, {self.transport}"

    @property
    def world(self) -> int:
        return LAYOUTS[self.layout][0]

    def flags(self, folder: Path, cache: Path) -> list[str]:
        words = [*TINY, *text_flags_in(cache), *LAYOUTS[self.layout][1].split(), "--run.global-batch-size", "12"]
        words += ["--logging.no-plots", *TRANSPORTS[self.transport]]
        words += ["--run.directory", str(folder / "runs"), "--optimizer.warmup-steps", "1"]
        words += ["--run.steps", "40" if self.fault == "slow" else "4", "--run.validation-windows", "2"]
        if self.phase in ("load", "save"):
            words += ["--checkpoint.dir", str(folder / "saved"), "--checkpoint.every", "2"]
        return words


def is_possible(case: Case) -> bool:
    """False where nothing is gathered, as where ranks map each other's parameters; and for an error in a load, which
    all ranks raise, with the rank's name.

    The loop of the user's own runs once, with the memory that ranks of a host share.
    """
    if case.layout in HYBRID and case.transport != "memory":
        return False
    if case.phase == "gather" and (case.layout == "dp" or (case.layout, case.transport) == ("zero 3", "memory")):
        return False
    return (case.phase, case.fault) != ("load", "exception")


# --- in the ranks -----------------------------------------------------------------------------------------------------


class Lines(logging.Handler):
    """Writes what a watch logs, with the time, as soon as it comes."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.file = path.open("a", buffering=1)

    def emit(self, record: logging.LogRecord) -> None:
        self.file.write(json.dumps([time.time(), record.getMessage()]) + "\n")


def rank_main(case: Case, rank: int, port: int, folder: Path, flags: list[str]) -> None:
    os.environ.update({"GLOO_SOCKET_IFNAME": "lo", "TORCH_GLOO_LAZY_INIT": "1", "OMP_NUM_THREADS": "1"})
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    output = os.open(folder / f"{rank}.out", os.O_WRONLY | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)
    torch.set_num_threads(1)
    logging.getLogger("core.watch.rank_watch").addHandler(Lines(folder / f"{rank}.lines"))
    launch = Launch(rank, case.world, rank, case.world, "127.0.0.1", port, "own")
    os.environ.update(launch.environment())
    (folder / f"{rank}.pid").write_text(str(os.getpid()))
    if rank == VICTIM and case.fault != "none":
        set_trap(case, folder)
    if case.layout in HYBRID:
        on_started_ranks(lambda *_: train_hybrid(case, folder / "saved"), "cpu", 5, launch)
        return
    config = load_config(flags)
    run_job(config, plan_job(config, case.world), launch)


def train_hybrid(case: Case, saved: Path) -> None:
    """Four steps of a user's own loop; it goes on from what was saved, and saves after the second step."""
    plugin = HybridParallelPlugin(precision="fp32", zero_stage=1, max_norm=1.0, **HYBRID[case.layout])
    booster, model = Booster(plugin=plugin), small("llama", torch.float32)
    model, optimizer, *_ = booster.boost(model, torch.optim.AdamW(model.parameters()))
    if saved.exists():
        booster.load_model(model, saved)
    for step in range(1, 5):
        begin_step(step)
        batch = batch_of(step)
        if plugin.pp_size > 1:
            booster.execute_pipeline(iter([batch]), model, None, optimizer)
        else:
            booster.backward(model(**batch).loss, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        if case.phase in ("load", "save") and step == 2:
            booster.save_model(model, saved, shard=True)
            if case.fault == "none":
                return


def begin_step(step: int) -> None:
    """Where a trap learns the step."""


def batch_of(step: int) -> dict[str, torch.Tensor]:
    ids = tokens(seed=step)
    return {"input_ids": ids, "labels": ids.clone()}


def set_trap(case: Case, folder: Path) -> None:
    """Have this rank fall when it comes to the phase, in step STEP where the phase is one of a step."""
    running = [0]

    def fall() -> None:
        if case.phase in IN_STEPS and running[0] != STEP:
            return
        time.sleep(DWELL_S)
        (folder / "fell.new").write_text(str(time.time()))
        (folder / "fell.new").rename(folder / "fell")
        if case.fault in ("kill", "stop"):
            os.kill(os.getpid(), signal.SIGKILL if case.fault == "kill" else signal.SIGSTOP)
        elif case.fault == "exit 0":
            sys.exit(0)
        raise ValueError("a bad batch")

    def before(module: str, name: str, act: Callable[[Any], None]) -> None:
        owner: Any = importlib.import_module(module)
        *path, name = name.split(".")
        for part in path:
            owner = getattr(owner, part)
        inner = getattr(owner, name)

        def entered(*arguments: Any, **options: Any) -> Any:
            act(arguments[0] if arguments else None)
            return inner(*arguments, **options)

        static = isinstance(vars(owner).get(name), (classmethod, staticmethod))
        setattr(owner, name, staticmethod(entered) if static else entered)

    def record_step(trainer: Any) -> None:
        running[0] = trainer.step + 1

    def slow_down(trainer: Any) -> None:
        time.sleep(0.25)

    before("core_train.trainer", "Trainer.train_step", record_step)
    before(__name__, "begin_step", lambda step: running.__setitem__(0, step))
    others = IN_HYBRID if case.layout in HYBRID else GATHERED_IN_USE if case.layout == "zero 3" else {}
    places = {**FUNCTIONS, **others}
    if case.fault == "slow":
        before("core_train.trainer", "Trainer.train_step", slow_down)
    elif case.phase in places:
        module, name, _ = places[case.phase]
        before(module, name, lambda _first: fall())
    else:

        def trap(module: nn.Module, _inputs: Any, output: Any = None) -> None:
            if type(module).__name__ not in LAYERS or not module.training:
                return
            if case.phase == "forward":
                fall()
            else:
                first = output[0] if isinstance(output, tuple) else output
                if first.requires_grad:  # not where a split is proven
                    first.register_hook(lambda _grad: fall())

        register = nn.modules.module.register_module_forward_pre_hook
        (register if case.phase == "forward" else nn.modules.module.register_module_forward_hook)(trap)


# --- in this process --------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def started(case: Case, folder: Path, flags: list[str]) -> Iterator[list[Any]]:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed", "torch._dynamo", "core_train.job"])
    store = local_store()
    job = [
        context.Process(target=rank_main, args=(case, rank, store.port, folder, flags)) for rank in range(case.world)
    ]
    try:
        for process in job:
            process.start()
        yield job
    finally:
        for process in job:
            process.kill()
            process.join()


def lines_of(folder: Path, rank: int) -> list[tuple[float, str]]:
    path = folder / f"{rank}.lines"
    whole = [line for line in (path.read_text() if path.exists() else "").splitlines(keepends=True) if line[-1] == "\n"]
    return [tuple(json.loads(line)) for line in whole]


def output_of(folder: Path) -> str:
    return "\n".join(f"{path.name}:\n{path.read_text()[-1500:]}" for path in sorted(folder.glob("*.out")))


def seconds_until_named(case: Case, folder: Path, cache: Path) -> dict[int, tuple[float, str]]:
    """Survivor -> the seconds after the fall in which its watch named a rank, and its line."""
    flags = case.flags(folder, cache)
    if case.phase == "load":
        first = Case("none", "load", case.layout, case.transport)
        with started(first, folder, [*flags, "--run.stop-after", "2"]) as job:
            for process in job:
                process.join(START_S)
            assert [process.exitcode for process in job] == [0] * case.world, output_of(folder)
        for path in folder.glob("*.lines"):
            path.unlink()
        flags = [*flags, "--checkpoint.resume"]
    survivors = [rank for rank in range(case.world) if rank != VICTIM]
    with started(case, folder, flags) as job:
        limit = time.monotonic() + START_S
        while not (folder / "fell").exists():
            assert time.monotonic() < limit and job[VICTIM].is_alive(), f"{case}: not come to it\n{output_of(folder)}"
            time.sleep(0.05)
        fell = float((folder / "fell").read_text())
        while time.time() < fell + LIMIT_S[case.fault] + SLACK_S:
            if all(lines_of(folder, rank) for rank in survivors):
                break
            time.sleep(0.05)
        found = {}
        for rank in survivors:
            for when, line in lines_of(folder, rank)[:1]:
                found[rank] = when - fell, line
        return found


def problems_of(case: Case, folder: Path, found: dict[int, tuple[float, str]]) -> list[str]:
    pid = (folder / f"{VICTIM}.pid").read_text()
    problems = []
    for rank in range(case.world):
        if rank == VICTIM:
            continue
        if rank not in found:
            problems.append(f"{case}: rank {rank} has said nothing\n{output_of(folder)}")
            continue
        after, line = found[rank]
        if re.match(rf"rank {rank}: rank {VICTIM} \(process {pid} on \S+\) (has|is|failed)", line) is None:
            problems.append(f"{case}: rank {rank} blames another: {line}")
        elif (
            case.layout not in HYBRID
            and case.phase in IN_STEPS
            and f"step {STEP}" not in line.partition("This rank is ")[2]
        ):
            problems.append(f"{case}: no place and step {STEP} of rank {rank}: {line}")
        elif after > LIMIT_S[case.fault] + SLACK_S:
            problems.append(f"{case}: rank {rank} needed {after:.1f} s: {line}")
    return problems


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tokens")


@pytest.fixture(scope="module")
def times(request: pytest.FixtureRequest) -> Iterator[dict[str, list[float | None]]]:
    """Of each fault, the seconds of each survivor, None for one that named no one. Printed when all is done."""
    of_fault: dict[str, list[float | None]] = {}
    yield of_fault
    capture = request.config.pluginmanager.getplugin("capturemanager")
    with capture.global_and_fixture_disabled():
        print()
        for fault, all_of in of_fault.items():
            named = [seconds for seconds in all_of if seconds is not None]
            in_time = sum(seconds <= LIMIT_S[fault] for seconds in named)
            print(
                f"{fault}: named {len(named)} of {len(all_of)}, {in_time} within {LIMIT_S[fault]:.0f} s, "
                f"median {statistics.median(named or [0]):.2f} s, most {max(named, default=0):.2f} s"
            )


def run_case(case: Case, folder: Path, cache: Path, times: dict[str, list[float | None]]) -> None:
    found = seconds_until_named(case, folder, cache)
    survivors = [rank for rank in range(case.world) if rank != VICTIM]
    times.setdefault(case.fault, []).extend(found[rank][0] if rank in found else None for rank in survivors)
    problems = problems_of(case, folder, found)
    assert not problems, "\n".join(problems)


SAMPLE = [
    Case("kill", "forward", "tp", "memory"),
    Case("stop", "backward", "pp", "sockets"),
    Case("exception", "guards", "zero 2", "memory"),
    Case("exit 0", "norm", "zero 1", "sockets"),
    Case("kill", "before groups", "hybrid tp", "memory"),
]
ALL = [
    case
    for transport in TRANSPORTS
    for layout in LAYOUTS
    for phase in PHASES
    for fault in LIMIT_S
    if is_possible(case := Case(fault, phase, layout, transport)) and case not in SAMPLE
]


@pytest.mark.parametrize("case", [*SAMPLE, *(pytest.param(case, marks=pytest.mark.nightly) for case in ALL)], ids=str)
def test_every_survivor_names_the_rank_that_fell(
    case: Case, tmp_path: Path, cache: Path, times: dict[str, list[float | None]]
) -> None:
    run_case(case, tmp_path, cache, times)


SLOW = [
    Case("slow", "data", layout, transport) for layout in LAYOUTS if layout not in HYBRID for transport in TRANSPORTS
]


@pytest.mark.parametrize("case", [pytest.param(case, marks=pytest.mark.nightly) for case in SLOW], ids=str)
def test_a_slow_rank_is_named_in_the_log_and_in_the_steps(case: Case, tmp_path: Path, cache: Path) -> None:
    with started(case, tmp_path, case.flags(tmp_path, cache)) as job:
        for process in job:
            process.join(START_S)
        assert [process.exitcode for process in job] == [0] * case.world, output_of(tmp_path)
    named = [line for _, line in lines_of(tmp_path, 0) if " is slow: it works " in line]
    assert [re.match(r"rank 0: rank (\d+) \(process", line)[1] for line in named] == [str(VICTIM)], named  # type: ignore[index]
    steps = tmp_path / "runs" / "latest" / "steps.jsonl"
    slow = [json.loads(line)["slow_ranks"] for line in steps.read_text().splitlines()]
    assert slow[0] == [] and slow[-1] == [VICTIM]
