"""The GPU's figures in one command: overhead of the wrapper, weight gradients in place, the optimizer's pass, MFU.

First every arm is compared: with plain PyTorch, with fp64, and what the device computes with what the CPU does. What is
wrong is not timed, and a control that is wrong on purpose has to be caught. `--device cpu` runs the same code without a
GPU, for its tests and for the shapes of a CPU.
"""

from __future__ import annotations

import argparse
import contextlib
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from benchmarks import gpu_fusion, gpu_optimizer, gpu_steps
from benchmarks.gpu_clock import Watch, in_turns, rows_of, table, watch_for
from benchmarks.gpu_fusion import AUTOGRAD, WrongGradient
from benchmarks.gpu_steps import CONTROL, MODELS, PLAIN, Setting, WrongLosses, own_gpt, plain
from benchmarks.optimizer_arms import WrongWeights
from benchmarks.report import add_json, machine, write_json
from benchmarks.step_figures import flat, spread
from core_train import mfu

CHECKED_STEPS = 6
CHECK_TOLERANCE = 1e-4  # of losses in fp32, one device against another
TIMED_TOLERANCE = 5e-3  # of losses as they are timed, in bf16 perhaps, against plain PyTorch on the same device
OWN_TOLERANCE = 2e-2  # of our GPT in bf16, whose products are rounded otherwise on another device
AIM_OVERHEAD, AIM_BANDWIDTH = 1.01, 0.85
OWN = "core's GPT in bf16"
SANITIZER = "compute-sanitizer"
SANITIZER_LIMIT_S = 300

NO_CUDA = (
    "python -m benchmarks gpu needs a CUDA device, and torch {torch} finds none: use a machine with an NVIDIA GPU and "
    "its driver, and install a CUDA build of torch (torch.version.cuda must not be None), or run the same "
    "code without its figures with --device cpu."
)


@dataclass(frozen=True)
class Run:
    """State that all sections share."""

    device: torch.device
    watch: Watch
    model: str
    rounds: int
    laps: int
    peak: float | None
    dtypes: tuple[str, ...] = tuple(gpu_fusion.DTYPES)

    def timed(
        self, calls: dict[str, Callable[[], Any]], before: dict[str, Callable[[], Any]] | None = None
    ) -> dict[str, Any]:
        """Seconds of each call."""
        return in_turns(calls, self.watch, rounds=self.rounds, laps=self.laps, before=before)


Found = tuple[str, Any]  # what is printed, what is written


def check(run: Run) -> Found:
    """Check every arm's losses on the device against plain PyTorch on the CPU, and that a wrong one is caught."""
    here = Setting(MODELS["test"], run.device, autocast=False, lr=gpu_steps.CHECKED_LR)
    cpu = here.on("cpu")
    want = gpu_steps.losses(plain(cpu), cpu.batches(CHECKED_STEPS))
    off = {}
    for name, make in gpu_steps.arms_of(here).items():
        off[name] = gpu_steps.check(name, gpu_steps.losses(make(), here.batches(CHECKED_STEPS)), want, CHECK_TOLERANCE)
    wrong = gpu_steps.losses(plain(here, gradient_factor=0.5), here.batches(CHECKED_STEPS))
    off[CONTROL] = gpu_steps.check_control(wrong, want, CHECK_TOLERANCE)
    here, cpu = (replace(setting, lr=gpu_steps.LR) for setting in (here, cpu))
    own, found = (gpu_steps.losses(own_gpt(each)[0], each.batches(CHECKED_STEPS)) for each in (cpu, here))
    off[OWN] = gpu_steps.check(OWN, found, own, OWN_TOLERANCE)
    lines = [f"Losses of {CHECKED_STEPS} steps on {run.device.type}, fp32, largest relative difference from the CPU's"]
    lines += [f"  {name:<34} {value:.1e}{'  (caught)' if name == CONTROL else ''}" for name, value in off.items()]
    return "\n".join(lines), {"tolerance": CHECK_TOLERANCE, "deviations": off}


def wrapper(run: Run) -> Found:
    """A step of ours over a step of plain PyTorch, at world size 1."""
    setting = Setting(MODELS[run.model], run.device, autocast=run.device.type == "cuda")
    batches = setting.batches(CHECKED_STEPS)
    steps, want = {}, None
    for name, make in gpu_steps.arms_of(setting).items():
        step = make()
        found = gpu_steps.losses(step, batches)
        want = want or found
        gpu_steps.check(name, found, want, TIMED_TOLERANCE)
        steps[name] = step
    seconds = run.timed({name: partial(step, batches[0]) for name, step in steps.items()})
    flops = gpu_steps.step_flops(gpu_steps.matrix_numel(setting.workload.model()), setting.workload)
    extra = {name: rates(flops, spread(flat(rounds)).median, run.peak) for name, rounds in seconds.items()}
    rows = rows_of(seconds, PLAIN, extra)
    title = f"{run.model}, {'bf16 autocast' if setting.autocast else 'fp32'}"
    text = table(rows, title) + f"\nratio: to {PLAIN}; the aim is below {AIM_OVERHEAD}. {setting.workload.sizes()}"
    return text, {"model": run.model, "flops": flops, "rows": [asdict(row) for row in rows]}


def own(run: Run) -> Found:
    """A step of core's GPT in bf16: MFU."""
    setting = Setting(MODELS[run.model], run.device, autocast=False)
    batches = setting.batches(1)
    step, model = own_gpt(setting)
    seconds = run.timed({OWN: lambda: step(batches[0])})
    flops = gpu_steps.step_flops(gpu_steps.matrix_numel(model), setting.workload)
    extra = {name: rates(flops, spread(flat(rounds)).median, run.peak) for name, rounds in seconds.items()}
    rows = rows_of(seconds, OWN, extra)
    peak = f"{run.peak:g} TFLOP/s ({mfu.PEAK_SOURCE}, or --peak-tflops)" if run.peak else "unknown: --peak-tflops"
    text = table(rows, f"core's GPT of {run.model}'s sizes, bf16")
    text += f"\n{flops / 1e12:.3f} TFLOP a step: 6 N + 12 L H Q T a token (PaLM, appendix B); the device's peak: {peak}"
    return text, {"flops": flops, "peak_tflops": run.peak, "rows": [asdict(row) for row in rows]}


def fusion(run: Run) -> Found:
    """The weight gradient written in place, against autograd's."""
    texts, results = [], []
    for dtypes in run.dtypes:
        for shape in gpu_fusion.shapes_of(MODELS[run.model]):
            arms = dict(gpu_fusion.pair(shape, dtypes, run.device))
            rows = rows_of(run.timed({name: backward for name, backward in arms.items()}), AUTOGRAD)
            size = f"{shape.name} [{shape.out}, {shape.into}], {shape.tokens} tokens, {dtypes}"
            texts.append(table(rows, size))
            results.append({**asdict(shape), "dtypes": dtypes, "rows": [asdict(row) for row in rows]})
            del arms
    return "\n".join(texts), results


def optimizer(run: Run) -> Found:
    """The optimizer's step, as a share of copy bandwidth."""
    texts, results = [], []
    makers = gpu_optimizer.makers(gpu_optimizer.triton_kernel(run.device))
    for precision in gpu_optimizer.NAMES:
        problem = gpu_optimizer.problem_of(MODELS[run.model], precision, run.device)
        calls, before = gpu_optimizer.calls_of(problem, gpu_optimizer.checked(problem, makers))
        seconds = run.timed(calls, before)
        medians = {name: spread(flat(rounds)).median for name, rounds in seconds.items()}
        copy_s = medians[gpu_optimizer.COPY]
        extra: dict[str, dict[str, Any]] = {
            name: {"of copy": gpu_optimizer.share_of_copy(problem, seconds_of, copy_s)}
            for name, seconds_of in medians.items()
            if name != gpu_optimizer.COPY
        }
        extra[gpu_optimizer.COPY] = {"of copy": 1.0}
        rows = rows_of(seconds, gpu_optimizer.TORCH, extra)
        texts.append(table(rows, precision))
        results.append({"precision": precision, "numel": problem.numel, "rows": [asdict(row) for row in rows]})
    texts.append(f"of copy: bytes that a clipped step must move, over time and copy bandwidth; aim {AIM_BANDWIDTH}")
    return "\n".join(texts), results


def sanitizer(run: Run) -> Found:
    """This command once more on a tiny model under compute-sanitizer."""
    if run.device.type != "cuda":
        return f"{SANITIZER}: not run, it watches CUDA", {"outcome": "not run"}
    found = shutil.which(SANITIZER)
    if found is None:
        return f"{SANITIZER}: not found; it comes with the CUDA toolkit", {"outcome": "not found"}
    inner = [sys.executable, "-m", "benchmarks", "gpu", "--model", "test", "--rounds", "1", "--laps", "1"]
    inner += ["--sections", *(name for name in SECTIONS if name != "sanitizer")]
    command = [found, "--tool", "memcheck", "--error-exitcode", "99", *inner]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SANITIZER_LIMIT_S)
    except subprocess.TimeoutExpired:
        return f"{SANITIZER}: no end after {SANITIZER_LIMIT_S} s", {"outcome": "timed out"}
    outcome = {0: "clean", 99: "FOUND ERRORS"}.get(done.returncode, f"the command itself failed ({done.returncode})")
    tail = "\n".join(done.stdout.strip().splitlines()[-5:])
    if done.returncode:
        raise WrongLosses(f"{SANITIZER}: {outcome}\n{tail}\n{done.stderr.strip()[-2000:]}")
    return f"{SANITIZER}: {outcome}\n{tail}", {"outcome": outcome}


SECTIONS: dict[str, Callable[[Run], Found]] = {
    "check": check,
    "wrapper": wrapper,
    "own": own,
    "fusion": fusion,
    "optimizer": optimizer,
    "sanitizer": sanitizer,
}


def rates(flops: int, seconds: float, peak: float | None) -> dict[str, Any]:
    """TFLOP/s, and the share of the peak where that is known."""
    tflops = flops / seconds / 1e12
    return {"TFLOP/s": tflops, "MFU": tflops / peak if peak else "-"}


@contextlib.contextmanager
def one_rank(device: torch.device) -> Iterator[None]:
    """A world of this process alone."""
    from core import parallel_state

    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    try:
        yield
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def main(arguments: list[str]) -> int:
    """Print a table for each section; 1 where there is no device, or where something is wrong."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks gpu", description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--model", choices=sorted(MODELS), help="default: gpt355m on cuda, test on cpu")
    parser.add_argument("--sections", nargs="+", choices=tuple(SECTIONS), default=list(SECTIONS))
    dtypes = list(gpu_fusion.DTYPES)
    parser.add_argument("--dtypes", nargs="+", choices=dtypes, default=dtypes, help="of the section fusion")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--laps", type=int, default=5, help="of an arm in each round")
    parser.add_argument("--peak-tflops", type=float, help="of the device in bf16; known for H200, H100, A100, L40S")
    add_json(parser)
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        print(NO_CUDA.format(torch=torch.__version__), file=sys.stderr)
        return 1
    device = torch.device(options.device)
    name = torch.cuda.get_device_name() if device.type == "cuda" else ""
    run = Run(
        device=device,
        watch=watch_for(device),
        model=options.model or ("gpt355m" if device.type == "cuda" else "test"),
        rounds=options.rounds,
        laps=options.laps,
        peak=mfu.peak_tflops(name, options.peak_tflops),
        dtypes=tuple(options.dtypes),
    )
    print(f"torch {torch.__version__}, {machine()}")
    results: dict[str, Any] = {}
    wrong = []
    with one_rank(device):
        for section in options.sections:
            try:
                text, results[section] = SECTIONS[section](run)
            except (WrongLosses, WrongGradient, WrongWeights) as error:
                text, results[section] = f"WRONG: {error}", {"wrong": str(error)}
                wrong.append(section)
            print(f"\n## {section}\n{text}", flush=True)
            if device.type == "cuda":
                torch.cuda.empty_cache()
    write_json(options.json, "gpu", arguments, results)
    if wrong:
        print(f"wrong: {', '.join(wrong)}", file=sys.stderr)
    return 1 if wrong else 0
