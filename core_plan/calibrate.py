"""``python -m core plan calibrate``: measure the current machine and write a device file for plans of runs on it.

All ranks work at once, as they do in a run. A speed that depends on the size is stored by size: small products are
slower than large ones, and values that fit into a cache are read faster.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import shlex
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.utils.benchmark import Timer, timer

from core import parallel_state
from core.groups import agree
from core.models.gpt import GPTModel
from core.transformer.transformer_config import TransformerConfig
from core_plan.device import Device, known_devices, read_device
from core_plan.job.errors import ConfigError
from core_plan.job.model_config import DTYPES
from core_plan.job.run_directory import check_writable
from core_plan.live_memory import LiveMemory, Work
from core_plan.machine.launch import find_launch
from core_plan.machine.memory import host_memory_bytes
from core_plan.machine.own_ranks import become_rank, start_ranks
from core_plan.machine.threads import available_cores
from core_plan.step_time import work_seconds

MOST_SECONDS = 600.0
ROUNDS = 7  # an odd number: the median is one of them
COMMUNICATORS = 8  # created at once to measure the memory of each
# Sizes by whether they are for a GPU: edges of products; heads, tokens and width of an attention; bytes of an operator;
# bytes of a message; rows, tokens and width of a GPT whose operators are counted.
EDGES = {True: (256, 1024, 2048, 4096, 8192), False: (16, 64, 256)}
ATTENDED = {True: (16, 8192, 128), False: (4, 256, 64)}
MOVED = {True: (2**16, 2**20, 2**24, 2**28), False: (2**12, 2**16, 2**20, 2**23)}
SENT = {True: (2**10, 2**16, 2**20, 2**24, 2**27), False: (2**10, 2**16, 2**20, 2**22)}
GPTS = {True: (1, 8, 16), False: (2, 128, 256)}
# torch 2.13 renames the flat collectives; 2.11 has only the old name.
gather_flat = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def calibrate(arguments: Sequence[str]) -> int:
    """Measure on ranks started here, or on the ranks that a launcher has started, and return the exit status.

    Raises:
        ConfigError: On all ranks, if something cannot be measured or written.
    """
    parser = argparse.ArgumentParser(
        prog="python -m core plan calibrate",
        description="Measure this machine: matrix products, memory, operators, the optimizer's update, and collectives "
        "of all its ranks. The file is one for --device.",
    )
    parser.add_argument("--out", type=Path, default=Path("this_machine.json"), help="the file that is written")
    parser.add_argument("--ranks", type=int, help="that work at once; as a rule one a GPU, or one a core")
    parser.add_argument("--seconds", type=float, default=60.0, help="that the measurements may take")
    parser.add_argument("--links-from", metavar="DEVICE", help="take the links of that device, and measure none")
    options = parser.parse_args(list(arguments))
    launch = find_launch(os.environ)
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    ranks = options.ranks if options.ranks is not None else gpus or max(2, available_cores())
    most = gpus or 64 * available_cores()
    if launch is None and not 1 <= ranks <= most:
        raise ConfigError(f"--ranks {ranks} is not between 1 and {most}, which this machine can take")
    if launch is not None and launch.world_size != launch.local_world_size:
        raise ConfigError(
            f"{launch.world_size} ranks run on several machines, and calibrate measures one; start it on one of them, "
            "and write links.between into its file"
        )
    if (ranks if launch is None else launch.world_size) == 1 and options.links_from is None:
        raise ConfigError(
            "one rank has no links to measure; use --links-from to copy the links of a known device: "
            f"{', '.join(known_devices())}"
        )
    if not 0 < options.seconds <= MOST_SECONDS:
        raise ConfigError(f"--seconds {options.seconds:g} is not between 0 and {MOST_SECONDS:g}")
    links = None if options.links_from is None else read_device(options.links_from)
    if options.out.suffix != ".json":
        raise ConfigError(f"--out {options.out} does not end in .json, by which --device knows a file from a name")
    check_writable(options.out.parent, "--out")
    if launch is None:
        return start_ranks(ranks)
    become_rank(launch)
    torch.set_num_threads(1)
    if gpus:
        torch.cuda.set_device(launch.local_rank)
    dist.init_process_group("nccl" if gpus else "gloo")
    try:
        command = shlex.join(["python", "-m", "core", "plan", "calibrate", *arguments])
        table = measure(options.out.stem, options.seconds, links, command=command)
    finally:
        dist.destroy_process_group()
    if launch.rank == 0:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(table, indent=2) + "\n")
        place = shlex.quote(str(options.out))
        print(f"{table['about']}; written to {options.out}: python -m core plan --device {place} ...")
    return 0


class Clock:
    """Timer of functions that all ranks call. ``share`` scales the usual measuring time."""

    def __init__(self, share: float) -> None:
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.share, self.round_s = share, 0.05 * share

    def alone(self, run: Callable[[], object]) -> float:
        """Return the seconds of one call that waits for no other rank, as median over calls and ranks.

        On a CPU this is processor time, because ranks may share a core.
        """
        clock = time.thread_time if self.device.type == "cpu" else timer
        timed = Timer("run()", globals={"run": run}, timer=clock).blocked_autorange(min_run_time=ROUNDS * self.round_s)
        return statistics.median(of_all(timed.median))

    def seconds(self, run: Callable[[], object]) -> float:
        """Return the seconds of one call on the slowest rank, as median of rounds. Collective over all ranks."""
        run()
        calls = max(1, min(1000, int(self.round_s / max(self.once(run), 1e-7))))  # the same on all ranks
        rounds = []
        for _ in range(ROUNDS):
            dist.barrier()  # ranks that share cores leave it at different times; the timer's first calls do not count
            rounds.append(Timer("run()", globals={"run": run}).timeit(calls).mean)
        return statistics.median(map(max, zip(*of_all(rounds), strict=True)))

    def once(self, run: Callable[[], object]) -> float:
        """Return the seconds of a single call on the slowest rank. Collective over all ranks."""
        dist.barrier()
        start = timer()
        run()
        return max(of_all(timer() - start))


def of_all(value: Any) -> list[Any]:
    """Return every rank's value. Collective over all ranks."""
    return list(agree.gather(value, [dist.group.WORLD], "a measurement").values())


def measure(name: str, seconds: float, links: Device | None, *, command: str) -> dict[str, Any]:
    """Return the content of a device file, measured within ``seconds``. Collective over all ranks.

    The links are measured, unless those of another device are given. ``command`` is written into the file's source.
    """
    clock = Clock(seconds / 60)
    on_gpu, ranks, cores = clock.device.type == "cuda", dist.get_world_size(), available_cores()
    matmul = {name: matmul_rates(clock, dtype) for name, dtype in DTYPES.items()}
    memory = memory_rates(clock)
    measured: dict[str, Any] = {}
    if links is None:
        measured = {"collectives": collective_lines(clock), "communicator_bytes": communicator_bytes(clock)}
        near = far = dict(zip(("latency_s", "bytes_per_s"), measured["collectives"]["all_gather"][-1][1:], strict=True))
    else:
        near, far = ({"latency_s": x.latency_s, "bytes_per_s": x.bytes_per_s} for x in (links.inside, links.between))
    parallel_state.initialize_model_parallel()
    try:
        taken, work = gpt_step(clock)
    finally:
        parallel_state.destroy_model_parallel()
    today = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    table = {
        "name": name,
        "about": f"{torch.cuda.get_device_name() if on_gpu else f'{cores} CPU cores'}, {ranks} ranks at once, "
        "as measured",
        "memory_bytes": torch.cuda.get_device_properties(0).total_memory if on_gpu else host_memory_bytes(),
        "is_host": not on_gpu,
        "matmul_flops": {dtype: points[-1][1] for dtype, points in matmul.items()},
        "peak_flops": {dtype: max(rate for _, rate in points) for dtype, points in matmul.items()},
        "attention_flops": {name: attention_rate(clock, DTYPES[name]) for name in ("float32", "bfloat16")},
        "memory_bandwidth": memory[-1][1],
        "operator_overhead_s": 0.0,
        "links": {"inside": near, "between": far},
        "ranks_per_machine": ranks if on_gpu else 64 * cores,
        "matmul_sizes": matmul,
        "memory_sizes": memory,
        **measured,
        "cores": 0 if on_gpu else cores,
        "ranks": ranks,
        "source": f"Measured on {today} with torch {torch.__version__} by: {command}. {ranks} ranks worked at once, "
        "one thread each. peak_flops is the fastest product that was measured, so MFU is a share of what this machine "
        f"reaches. links.between is {'of ' + links.name if links else 'not measured: it repeats links.inside'}.",
    }
    # A GPU's small operators take as long as a launch. A host's take their own time and what surrounds them.
    rest = taken if on_gpu else taken - work_seconds(work, Device.of(table))
    return {**table, "operator_overhead_s": max(0.0, rest / sum(work.values()))}


def matmul_rates(clock: Clock, dtype: torch.dtype) -> list[list[float]]:
    """Return [operations of a product, operations per second] by size."""
    points = []
    for edge in EDGES[clock.device.type == "cuda"]:
        left, right, result = (torch.ones(edge, edge, dtype=dtype, device=clock.device) for _ in range(3))
        flops = 2 * edge**3
        points.append([flops, flops / clock.alone(partial(torch.mm, left, right, out=result))])
    return points


def attention_rate(clock: Clock, dtype: torch.dtype) -> float:
    """Return the operations per second of causal attention, forward and backward. Masked elements do not count."""
    heads, tokens, width = ATTENDED[clock.device.type == "cuda"]
    made = [torch.randn(1, heads, tokens, width, dtype=dtype, device=clock.device) for _ in range(4)]
    query, key, value, grad = (part.requires_grad_(place < 3) for place, part in enumerate(made))

    def attend() -> None:
        F.scaled_dot_product_attention(query, key, value, is_causal=True).backward(grad)

    forward = 4 * heads * tokens**2 * width / 2  # two products, half of each is masked; backward has five
    return 3.5 * forward / clock.alone(attend)


def memory_rates(clock: Clock) -> list[list[float]]:
    """Return [bytes read and written, bytes per second] by size, for operators that allocate their results."""
    points = []
    for nbytes in MOVED[clock.device.type == "cuda"]:
        values = torch.randn(nbytes // 4 // 64, 64, device=clock.device)

        def run(x: Tensor = values) -> None:
            torch.add(x, x)  # reads twice and writes once, as the plan counts; the next one too
            torch.mul(x, x)
            F.gelu(x)  # reads and writes once; the next one too
            F.layer_norm(x, (64,))

        points.append([2.5 * nbytes, 10 * nbytes / clock.alone(run)])
    return points


def gpt_step(clock: Clock) -> tuple[float, Counter[Work]]:
    """Return the seconds of a GPT's forward and backward, and the work of its operators."""
    rows, tokens, width = GPTS[clock.device.type == "cuda"]
    sizes = TransformerConfig(
        num_layers=4, hidden_size=width, num_attention_heads=8, vocab_size=256, max_sequence_length=tokens
    )
    model = GPTModel(sizes, parallel_state.get_process_groups()).to(clock.device)
    ids = torch.zeros(rows, tokens, dtype=torch.long, device=clock.device)

    def run() -> None:
        model(ids, labels=ids).mean().backward()

    run()
    with LiveMemory([*model.parameters()]) as watched:
        run()
    return clock.alone(run), sum(watched.work.values(), Counter())


def collective_lines(clock: Clock) -> dict[str, list[list[float]]]:
    """Return [ranks, latency, bytes per second] by collective, with all groups of that many ranks active at once."""
    world = dist.get_world_size()
    # (1 or 2, call): how often (n - 1) / n of the bytes of all parts leave one of n ranks in a call.
    collectives: dict[str, tuple[int, Callable[[Tensor, Any], object]]] = {
        "all_reduce": (2, lambda parts, group: dist.all_reduce(parts, group=group)),
        "all_gather": (1, lambda parts, group: gather_flat(parts, parts.chunk(group.size())[0].clone(), group=group)),
        "all_to_all": (1, lambda parts, group: dist.all_to_all_single(torch.empty_like(parts), parts, group=group)),
    }
    found: dict[str, list[list[float]]] = {kind: [] for kind in collectives}
    for ranks in sorted({n for n in (2, 4, world) if n <= world and world % n == 0}):
        groups: list[Any] = [dist.new_group(list(range(first, first + ranks))) for first in range(0, world, ranks)]
        group = groups[dist.get_rank() // ranks]
        for kind, (times, call) in collectives.items():
            samples = []
            for nbytes in SENT[clock.device.type == "cuda"]:
                parts = torch.ones(max(ranks, nbytes // 4 // ranks * ranks), device=clock.device)
                samples.append((times * parts.nbytes * (ranks - 1) / ranks, clock.seconds(partial(call, parts, group))))
            found[kind].append([ranks, *line(samples)])
        dist.destroy_process_group(group)
    return found


def line(samples: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Fit (latency, bytes per second) to (bytes, seconds). Relative errors count, so small messages count too."""
    nbytes, seconds = zip(*samples, strict=True)
    slope, latency = map(float, np.polyfit(nbytes, seconds, 1, w=[1 / s for s in seconds]))
    return max(latency, 1e-7), 1 / max(slope, 1e-15)


def communicator_bytes(clock: Clock) -> int | None:
    """Return the GPU memory of a communicator that has sent 64 KiB, as median of ranks; None on a CPU. Collective."""
    if clock.device.type == "cpu":
        return None
    values = torch.ones(2**14, device=clock.device)
    dist.all_reduce(values)
    torch.cuda.synchronize()
    free = torch.cuda.mem_get_info()[0]
    made: list[Any] = [dist.new_group() for _ in range(COMMUNICATORS)]
    for group in made:
        dist.all_reduce(values, group=group)
    torch.cuda.synchronize()
    each = (free - torch.cuda.mem_get_info()[0]) / COMMUNICATORS
    for group in made:
        dist.destroy_process_group(group)
    return max(0, int(statistics.median(of_all(each))))
