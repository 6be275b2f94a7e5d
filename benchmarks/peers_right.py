"""Gradients of other frameworks' own loops, each layout on 2 ranks compared with one process in fp64.

An answer is `equal`, `wrong` with the first wrong parameter, or `not read` with the reason. `PYTHONPATH` names the
directory of the frameworks, or they are installed: `pip install --no-deps --target DIR megatron-core==0.16.1`, and
`torchtitan==0.2.2 torchdata==0.11.0`, and `deepspeed==0.19.8 hjson msgpack py-cpuinfo`.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import importlib.metadata
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from benchmarks import right_deepspeed, right_torchtitan, right_trainers
from benchmarks.right_megatron import Layout, on_this_device, report_of
from core.verify import GradientReport, WrongGradientError, verify_with
from core.verify.rank_pool import RankFailure, RankPool


def _net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8), nn.LayerNorm(8))


def _ddp() -> nn.Module:
    return DistributedDataParallel(_net())


def _fsdp() -> nn.Module:
    model: nn.Module = fully_shard(_net(), mesh=init_device_mesh("cpu", (2,), mesh_dim_names=("dp",)))
    return model


def _tensor() -> nn.Module:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    return parallelize_module(_net(), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})


def _torch_report(build: Callable[[], nn.Module]) -> GradientReport:
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    check = verify_with(model, _net, _loss)
    seed = 0 if build is _tensor else dist.get_rank()
    _loss(model, torch.randn(4, 8, generator=torch.Generator().manual_seed(seed))).backward()
    with contextlib.suppress(WrongGradientError):
        optimizer.step()
    assert check.report is not None
    return check.report


def _loss(model: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = (model(inputs) - inputs).square().mean()
    return loss


def _megatron_report(layout: Layout) -> GradientReport:
    with on_this_device():
        return report_of(layout)


def _of_trainers(loop: str) -> dict[str, Callable[[], GradientReport]]:
    programs = [program for program in right_trainers.RIGHT if program.loop == loop]
    return {str(program): partial(right_trainers.report_of, program) for program in programs}


# Framework -> layout -> its program.
PROGRAMS: dict[str, dict[str, Callable[[], GradientReport]]] = {
    "torch": {
        "DistributedDataParallel, dp 2": partial(_torch_report, _ddp),
        "fully_shard, dp 2": partial(_torch_report, _fsdp),
        "parallelize_module, tp 2": partial(_torch_report, _tensor),
    },
    "Megatron Core": {
        "dp 2": partial(_megatron_report, Layout()),
        "dp 2, distributed optimizer": partial(_megatron_report, Layout(sharded=True)),
        "tp 2": partial(_megatron_report, Layout(tp=2)),
        "tp 2, sequence parallelism": partial(_megatron_report, Layout(tp=2, sequence=True)),
        "pp 2, 1F1B, tied embedding": partial(_megatron_report, Layout(pp=2, tied=True, microbatches=3)),
        "pp 2, distributed optimizer": partial(_megatron_report, Layout(pp=2, sharded=True)),
        "pp 2, 2 virtual stages": partial(_megatron_report, Layout(pp=2, vpp=2)),
        "ep 2": partial(_megatron_report, Layout(ep=2)),
        "ep 2, distributed optimizer": partial(_megatron_report, Layout(ep=2, sharded=True)),
    },
    "DeepSpeed": {str(loop): partial(right_deepspeed.report_of, loop) for loop in right_deepspeed.RIGHT},
    "torchtitan": {str(loop): partial(right_torchtitan.report_of, loop) for loop in right_torchtitan.LAYOUTS},
    "accelerate": _of_trainers("accelerate"),
    "Transformers": _of_trainers("Trainer"),
    "TRL": _of_trainers("SFTTrainer"),
}
PACKAGES = {"Megatron Core": "megatron-core"}


def answer_on_rank(framework: str, layout: str) -> tuple[str, str]:
    """Return the answer about a program, and its reason or figures. Runs on each rank."""
    try:
        report = PROGRAMS[framework][layout]()
    except ValueError as error:
        return "not read", str(error).strip().splitlines()[0]
    if report.ok:
        return "equal", f"{report.parameters} gradients, at most {report.largest_error:.1g} off"
    return "wrong", f"{report.wrong[0].name}: {report.cause}"


def version_of(framework: str) -> str:
    """Return a framework's version; empty if it is not installed."""
    try:
        return importlib.metadata.version(PACKAGES.get(framework, framework))
    except importlib.metadata.PackageNotFoundError:
        return ""


def main(arguments: Sequence[str]) -> int:
    """Print the table; the exit status is 1 if an answer is `wrong`."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks peers_right", description=__doc__)
    parser.add_argument("words", nargs="*", help="words in the name of a framework or layout; all by default")
    words = parser.parse_args(arguments).words
    answers: list[str] = []
    print(f"{datetime.date.today()}, gloo, CPU, fp32 in the layout\n")
    print("| framework | layout | answer | |\n|---|---|---|---|")
    with RankPool(2) as pool:
        for framework, layouts in PROGRAMS.items():
            version = version_of(framework)
            for layout in layouts if version else ():
                if words and not any(word in f"{framework} {layout}" for word in words):
                    continue
                try:
                    given: dict[str, Any] = {"framework": framework, "layout": layout}
                    answer, why = pool.run(answer_on_rank, 2, (), given, limit_s=240.0)
                except RankFailure as error:
                    answer, why = "fails", str(error).strip().splitlines()[-1]
                answers.append(answer)
                print(f"| {framework} {version} | {layout} | {answer} | {why} |", flush=True)
    return int("wrong" in answers)
