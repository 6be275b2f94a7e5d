"""Step time over bucket size on a simulated wire, for three ratios of backward to communication, and the advice.

Two ranks train a small model whose layers stand for layers on a device: their forward and backward sleep, so that the
processor is free then, as while a GPU computes; the gradients, the reductions and the wrapper are real. The
wire is simulated too (benchmarks/simulated_wire.py): latency + bytes / bandwidth a collective, one after
another. So the curve is about overlap, and not about two ranks that share this machine's cores.

Each point counts only if its losses are those of one process on the batches of both ranks, and of every other point.
Points of one ratio are measured in turns.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

from benchmarks.bucket_advisor import advise_bucket_size, fit_wire, record_backward, sent_per_byte
from benchmarks.report import add_json, circumstances, write_json
from benchmarks.simulated_wire import Wire, put_on_wire
from core import parallel_state
from core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from core.distributed.wire.overlap import measure_overlap
from core_train.step_trace import StepTrace

RANKS = 2
LAYERS = 24
WIDTH = 128  # a layer holds WIDTH x WIDTH floats, 64 KiB
FORWARD_S, BACKWARD_S = 1e-3, 2e-3  # a layer's
LATENCY_S = 3e-3
RATIOS = {"4:1": 4.0, "1:1": 1.0, "1:4": 0.25}  # backward : bytes / bandwidth of all gradients
LAYERS_A_BUCKET = (1, 2, 3, 4, 6, 8, 12, 24)
LEARNING_RATE = 0.1


@dataclass
class Point:
    """One bucket size of one ratio."""

    layers_a_bucket: int
    step_ms: list[float] = field(default_factory=list)
    exposed_ms: list[float] = field(default_factory=list)
    hidden: list[float] = field(default_factory=list)
    predicted_exposed_ms: float = 0.0

    @property
    def bucket_size(self) -> int:
        """Elements."""
        return self.layers_a_bucket * WIDTH * WIDTH

    def values(self) -> dict[str, Any]:
        """For the table and the file: medians, and the spread of the step time."""
        return {
            "bucket_size": self.bucket_size,
            "buckets": -(-LAYERS // self.layers_a_bucket),
            "step_ms": statistics.median(self.step_ms),
            "step_ms_least": min(self.step_ms),
            "step_ms_most": max(self.step_ms),
            "exposed_ms": statistics.median(self.exposed_ms),
            "hidden_share": statistics.median(self.hidden),
            "predicted_exposed_ms": self.predicted_exposed_ms,
        }


class _Sleep(torch.autograd.Function):
    """Hands its input on; forward and backward take their time without the processor."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, scale: float) -> torch.Tensor:
        ctx.scale = scale
        time.sleep(FORWARD_S * scale)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        time.sleep(BACKWARD_S * ctx.scale)
        return grads[0], None


class Layer(nn.Module):
    """x + tanh(x W), after a sleep that stands for a device at work."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH**0.5)
        self.scale = scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, WIDTH] to the same."""
        return x + 0.1 * torch.tanh(_Sleep.apply(x, self.scale) @ self.weight)


def make_model(scale: float) -> nn.Sequential:
    """The same weights on every rank; scale 0: the layers do not sleep."""
    torch.manual_seed(7)
    return nn.Sequential(*(Layer(scale) for _ in range(LAYERS)))


def batch_of(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets [4, WIDTH], other ones on every rank."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    x, y = torch.randn(2, 4, WIDTH, generator=generator).unbind()
    return x, y


def loss_of(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    """Mean squared error on this rank's batch."""
    x, y = batch_of(rank, step)
    return (model(x) - y).square().mean()


def wire_for(ratio: float, ranks: int = RANKS) -> Wire:
    """On which sending all gradients once takes as long as all layers' backward, over `ratio`."""
    sent = 2 * (ranks - 1) / ranks * LAYERS * WIDTH * WIDTH * 4
    return Wire(LATENCY_S, sent / (LAYERS * BACKWARD_S / ratio))


def reference_losses(steps: int, ranks: int = RANKS) -> list[float]:
    """One process, the batches of all ranks, plain autograd and SGD: the mean loss before each step."""
    model = make_model(0.0)
    losses = []
    for step in range(steps):
        model.zero_grad()
        loss = sum(loss_of(model, rank, step) for rank in range(ranks)) / ranks
        loss.backward()
        losses.append(float(loss.detach()))
        with torch.no_grad():
            for param in model.parameters():
                param -= LEARNING_RATE * param.grad
    return losses


def check_losses(found: dict[str, list[float]], expected: list[float]) -> None:
    """Refuse a run in which a point trained something else than the reference, or than the other points."""
    first = next(iter(found))
    if not expected[0] - expected[-1] > 1e-3:
        raise RuntimeError(f"the reference's loss went from {expected[0]} to {expected[-1]}: too little to compare by")
    for name, losses in found.items():
        if losses != found[first]:
            raise RuntimeError(f"{name} has losses {losses}, and {first} {found[first]}: not the same training")
        worst = max(abs(loss - want) for loss, want in zip(losses, expected, strict=True))
        if worst > 1e-5:
            raise RuntimeError(f"{name} is {worst:.2g} away from one process on the whole batch: {losses}, {expected}")


def train(
    wire: Wire, layers_a_bucket: int, steps: int, rank: int
) -> tuple[list[float], list[StepTrace], list[float], Any]:
    """Wrap a fresh model and train it: seconds of each step, its report, mean losses, and the wrapped model."""
    config = DistributedDataParallelConfig(
        overlap_grad_reduce=True,
        bucket_size=layers_a_bucket * WIDTH * WIDTH,
        share_host_memory=False,  # reductions by gloo's threads, as a network card would, not in the wait
        initial_weights="ignore",
    )
    ddp = DistributedDataParallel(None, config, make_model(1.0))
    put_on_wire(ddp, wire)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=LEARNING_RATE)
    seconds, traces, losses = [], [], []
    for step in range(steps):
        dist.barrier()
        begun = time.perf_counter()
        trace = StepTrace(rank, step)
        ddp.zero_grad_buffer()
        with trace.span("forward"):
            loss = loss_of(ddp, rank, step)
        with trace.span("backward"):
            loss.backward()
        with trace.span("finalize"):
            finalize_model_grads([ddp])
        with trace.span("optimizer"):
            optimizer.step()
        seconds.append(time.perf_counter() - begun)
        trace.buckets = list(ddp.overlap_report().reductions)
        traces.append(trace)
        losses.append(loss.detach())
    mean = torch.stack(losses)
    dist.all_reduce(mean)
    return seconds, traces, (mean / dist.get_world_size()).tolist(), ddp


def measure_ratio(name: str, options: dict[str, Any], rank: int) -> dict[str, Any]:
    """All points of one ratio in turns, then the advice from one recorded backward."""
    wire, warm, steps = wire_for(RATIOS[name]), 1, options["steps"]
    points = {layers: Point(layers) for layers in options["layers_a_bucket"]}
    losses: dict[str, list[float]] = {}
    last: dict[int, StepTrace] = {}
    measured: list[StepTrace] = []
    for turn in range(options["turns"]):
        for layers, point in points.items():
            seconds, traces, losses[f"turn {turn}, {layers} layers a bucket"], ddp = train(
                wire, layers, warm + steps, rank
            )
            point.step_ms += [1e3 * value for value in seconds[warm:]]
            totals = [measure_overlap(trace.buckets) for trace in traces[warm:]]
            point.exposed_ms += [total.exposed_ms for total in totals]
            point.hidden += [total.hidden_share for total in totals]
            last[layers] = traces[-1]
            measured += traces[warm:]
            sent = sent_per_byte(ddp.step_report())
            del ddp
            gc.collect()  # a second wrapper on the group would keep the next one from launching in backward
    check_losses(losses, reference_losses(warm + steps))
    advice, times = advise(wire, sent, points, rank)
    try:
        fitted = asdict(fit_wire([trace.buckets for trace in measured], sent_per_byte=sent))
    except ValueError:  # a busy host saw too few buckets end
        fitted = None
    for each in advice.curve:
        points[each.bucket_size // (WIDTH * WIDTH)].predicted_exposed_ms = each.exposed_ms
    rows = [point.values() for point in points.values()]
    best = min(rows, key=lambda row: row["step_ms"])
    advised = next(row for row in rows if row["bucket_size"] == advice.bucket_size)
    return {
        "ratio": name,
        "wire": asdict(wire),
        "fitted_wire": fitted,
        "backward_ms": 1e3 * times.end_s,
        "points": rows,
        "best": best["bucket_size"],
        "advised": advised["bucket_size"],
        "advised_over_best": advised["step_ms"] / best["step_ms"],
        "_trace": last[advised["bucket_size"] // (WIDTH * WIDTH)],
    }


def advise(wire: Wire, sent: float, points: dict[int, Point], rank: int) -> tuple[Any, Any]:
    """From a backward of the model with one bucket, in which nothing is launched before the end."""
    _, _, _, ddp = train(wire, LAYERS, 1, rank)
    ddp.zero_grad_buffer()
    loss = loss_of(ddp, rank, 0)
    with record_backward(ddp) as times:
        loss.backward()
    finalize_model_grads([ddp])
    sizes = [point.bucket_size for point in points.values()]
    advice = advise_bucket_size(times, wire, sent_per_byte=sent, candidates=sizes)
    del ddp
    gc.collect()
    return advice, times


def table(result: dict[str, Any]) -> str:
    """One ratio: a line a bucket size, then best, advised and the fitted wire."""
    wire, fitted = result["wire"], result["fitted_wire"]
    by_steps = "not fitted: too few buckets were seen to end"
    if fitted is not None:
        by_steps = f"fitted from the steps {1e3 * fitted['latency_s']:.2f} ms, {fitted['bytes_per_s'] / 1e6:.1f} MB/s"
    lines = [
        f"backward : communication {result['ratio']}  (backward {result['backward_ms']:.1f} ms; wire "
        f"{1e3 * wire['latency_s']:.1f} ms + bytes / {wire['bytes_per_s'] / 1e6:.1f} MB/s, {by_steps})",
        f"{'bucket_size':>12}{'buckets':>9}{'step ms':>10}{'least .. most':>18}{'exposed ms':>12}{'predicted':>11}"
        f"{'hidden':>8}",
    ]
    for row in result["points"]:
        marks = [word for word in ("best", "advised") if row["bucket_size"] == result[word]]
        lines.append(
            f"{row['bucket_size']:>12,}{row['buckets']:>9}{row['step_ms']:>10.1f}"
            f"{row['step_ms_least']:>9.1f} .. {row['step_ms_most']:<5.1f}{row['exposed_ms']:>12.1f}"
            f"{row['predicted_exposed_ms']:>11.1f}{row['hidden_share']:>8.0%}  {', '.join(marks)}"
        )
    lines.append(f"the advised bucket size's step is {result['advised_over_best']:.3f} of the best measured one")
    return "\n".join(lines)


def draw_curves(path: Path, results: Sequence[dict[str, Any]]) -> None:
    """Step time and hidden share over the bucket size, one column a ratio; predictions dashed."""
    from core.extras import require
    from core_plan.figure import figure

    picture = figure(12, 5)
    rows = picture.subplots(2, len(results), sharex=True, height_ratios=[3, 1], squeeze=False)
    for column, result in enumerate(results):
        times, shares = rows[0][column], rows[1][column]
        sizes = [point["bucket_size"] for point in result["points"]]
        steps = [point["step_ms"] for point in result["points"]]
        least = [point["step_ms"] - point["step_ms_least"] for point in result["points"]]
        most = [point["step_ms_most"] - point["step_ms"] for point in result["points"]]
        base = min(p["step_ms"] - p["exposed_ms"] for p in result["points"])
        predicted = [base + point["predicted_exposed_ms"] for point in result["points"]]
        times.errorbar(sizes, steps, yerr=[least, most], marker="o", capsize=3, label="measured")
        times.plot(sizes, predicted, linestyle="--", color="tab:gray", label="predicted from one backward")
        advised = next(point for point in result["points"] if point["bucket_size"] == result["advised"])
        times.plot([advised["bucket_size"]], [advised["step_ms"]], "*", color="tab:red", markersize=15, label="advised")
        times.set_title(f"backward : communication = {result['ratio']}")
        times.set_ylim(bottom=0)
        shares.plot(sizes, [100 * point["hidden_share"] for point in result["points"]], marker="o", color="tab:green")
        shares.set_ylim(0, 105)
        shares.set_xscale("log", base=2)
        shares.set_xticks(sizes, [f"{size // 1024}" for size in sizes], minor=False)
        shares.minorticks_off()
        shares.set_xlabel("bucket_size (1024 elements)")
        for axes in (times, shares):
            axes.grid(alpha=0.3)
    rows[0][0].set_ylabel("step, ms")
    rows[1][0].set_ylabel("hidden, %")
    rows[0][0].legend(fontsize="small")
    picture.savefig(path, dpi=110)
    require("matplotlib.pyplot", "drawing the plots").close(picture)


def _rank(rank: int, store: str, options: dict[str, Any], results: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    parallel_state.initialize_model_parallel()
    for name in options["ratios"]:
        result = measure_ratio(name, options, rank)
        if rank == 0:
            results.put(result)
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


def main(arguments: list[str]) -> None:
    """Print a table a ratio; with --plots also the curves, and one step as a picture."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks overlap", description=__doc__)
    parser.add_argument("--ratios", nargs="+", choices=list(RATIOS), default=list(RATIOS))
    parser.add_argument("--layers-a-bucket", type=int, nargs="+", default=list(LAYERS_A_BUCKET))
    parser.add_argument("--steps", type=int, default=3, help="measured steps a point and turn, after one that is not")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument(
        "--plots", type=Path, metavar="FOLDER", help="write overlap_curve.png, overlap_step.png and .json"
    )
    add_json(parser)
    options = parser.parse_args(arguments)
    if min(options.layers_a_bucket) < 1 or max(options.layers_a_bucket) > LAYERS:
        parser.error(f"--layers-a-bucket takes 1 to {LAYERS}, the layers that there are")

    around = circumstances("overlap", arguments)
    print(f"{around['date'][:10]}, {around['machine']}, torch {around['torch']}, gloo, {RANKS} ranks, simulated wire")
    print(f"{LAYERS} layers of {WIDTH * WIDTH:,} fp32 parameters that sleep {1e3 * FORWARD_S:.0f} ms forward and")
    print(f"{1e3 * BACKWARD_S:.0f} ms backward; medians of {options.turns} turns x {options.steps} steps, rank 0")
    context = mp.get_context("spawn")
    queue = context.SimpleQueue()
    results = []
    with tempfile.TemporaryDirectory() as folder:
        spawned = mp.spawn(_rank, (str(Path(folder) / "store"), vars(options), queue), nprocs=RANKS, join=False)
        for _ in options.ratios:
            while queue.empty():
                if spawned.join(timeout=0.2):
                    break
            results.append(queue.get())
            print("\n" + table(results[-1]), flush=True)
        while not spawned.join():
            pass
    if options.plots is not None:
        _write_plots(options.plots, results)
    for result in results:
        result.pop("_trace")
    write_json(options.json, "overlap", arguments, results)


def _write_plots(folder: Path, results: Sequence[dict[str, Any]]) -> None:
    from core_train.plots import draw_bucket_timeline

    folder.mkdir(parents=True, exist_ok=True)
    draw_curves(folder / "overlap_curve.png", results)
    trace = results[len(results) // 2]["_trace"]
    draw_bucket_timeline(folder / "overlap_step.png", trace)
