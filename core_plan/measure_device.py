"""Measurements of a device file: all ranks of one machine work at once, as they do in a run.

Operations that wait for other ranks are measured as the median of several rounds on the slowest rank. Operations of a
single rank are measured in processor time on a CPU, so ranks that share a core do not disturb it. A speed that depends
on the size is stored by size: a core is slower on very small products, and faster on values that fit into its cache.
"""

from __future__ import annotations

import datetime
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from core import parallel_state
from core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from core.models.gpt import GPTModel
from core.optimizer import OptimizerConfig, get_megatron_optimizer
from core.transformer.transformer_config import TransformerConfig
from core_plan.device import Device
from core_plan.live_memory import LiveMemory
from core_plan.machine.memory import host_memory_bytes
from core_plan.machine.threads import available_cores
from core_plan.measure_clock import ROUNDS, Clock, of_all
from core_plan.measure_links import collective_lines, communicator_bytes, wire
from core_plan.operator_times import TimedOperators, sample_sizes, sample_step

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
ATTENTIVE = (torch.float32, torch.bfloat16)  # dtypes in which attention is measured
EDGES = {True: (256, 1024, 2048, 4096, 8192), False: (16, 64, 256)}  # edges of products; True on a GPU
ATTENDED = {True: (16, 8192, 128), False: (4, 256, 64)}  # heads, tokens and width of an attention
MOVED = {True: (2**16, 2**20, 2**24, 2**28), False: (2**12, 2**16, 2**20, 2**23)}  # bytes
MODELS = ((1, 32), (8, 32), (1, 1024))  # layers and width, one bucket per layer: costs of a step, a bucket and a byte
GPTS = ((1, 8, 16), (1, 64, 128), (2, 128, 256))  # rows, tokens, width: overhead around operators of several sizes


def measure(name: str, seconds: float, links: Device | None, *, command: str) -> dict[str, Any]:
    """Return the content of a device file on rank 0. Collective over all ranks.

    Args:
        name: Name of the device.
        seconds: Time limit of all measurements.
        links: Device whose links are used instead of measured ones; None measures them.
        command: The command, for the file's source.
    """
    clock = Clock(seconds / 60)
    on_gpu = clock.device.type == "cuda"
    ranks = dist.get_world_size()
    matmul = {str(dtype).removeprefix("torch."): matmul_rates(clock, dtype) for dtype in DTYPES}
    best = {dtype: max(rate for _, rate in points) for dtype, points in matmul.items()}
    memory = memory_rates(clock)
    inside = {"latency_s": links.inside.latency_s, "bytes_per_s": links.inside.bytes_per_s} if links else wire(clock)
    between = {"latency_s": links.between.latency_s, "bytes_per_s": links.between.bytes_per_s} if links else inside
    parallel_state.initialize_model_parallel()
    try:
        costs, gradients = step_costs(clock)
        overhead, on_top = operator_costs(clock)
    finally:
        parallel_state.destroy_model_parallel()
    cores = available_cores()
    what = torch.cuda.get_device_name() if on_gpu else f"{cores} CPU cores"
    today = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    return {
        "name": name,
        "about": f"{what}, {ranks} ranks at once, as measured",
        "memory_bytes": torch.cuda.get_device_properties(0).total_memory if on_gpu else host_memory_bytes(),
        "is_host": not on_gpu,
        "matmul_flops": {dtype: points[-1][1] for dtype, points in matmul.items()},
        "peak_flops": best,
        "attention_flops": {str(dtype).removeprefix("torch."): attention_rate(clock, dtype) for dtype in ATTENTIVE},
        "memory_bandwidth": memory[-1][1],
        "operator_overhead_s": overhead,
        "links": {"inside": inside, "between": between, **({} if on_gpu or gradients is None else gradients)},
        "ranks_per_machine": ranks if on_gpu else 64 * cores,
        "matmul_sizes": matmul,
        "memory_sizes": memory,
        **costs,
        **({} if on_gpu else {"operators": operator_times(clock, on_top)}),
        **({} if links else {"collectives": collective_lines(clock), "communicator_bytes": communicator_bytes(clock)}),
        "cores": 0 if on_gpu else cores,
        "ranks": ranks,
        "source": f"Measured on {today} with torch {torch.__version__} by: {command}. {ranks} ranks worked at once, "
        "one thread each. peak_flops is the fastest product that was measured, so MFU is a share of what this machine "
        f"reaches. links.between is {'of ' + links.name if links else 'not measured: it repeats links.inside'}.",
    }


def matmul_rates(clock: Clock, dtype: torch.dtype) -> list[list[float]]:
    """Return [operations of a product, operations per second] by size."""
    points = []
    for edge in EDGES[clock.device.type == "cuda"]:
        left, right = (torch.ones(edge, edge, dtype=dtype, device=clock.device) for _ in range(2))
        result = torch.empty_like(left)
        flops = 2 * edge**3

        def multiply(a: Tensor = left, b: Tensor = right, c: Tensor = result) -> None:
            torch.mm(a, b, out=c)

        points.append([flops, flops / clock.alone(multiply)])
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


def operator_costs(clock: Clock) -> tuple[float, float]:
    """Return the overhead per operator of a GPT in its wrapper.

    Modules, hooks and autograd have a cost per operator. Freeing memory and refilling caches have a cost per size.

    Returns:
        (seconds in addition to an operator's own, fraction of its own seconds that is added). On a GPU: (least duration
        of an operator, 0).
    """
    if clock.device.type == "cuda":
        count, _, run = _gpt_in_wrapper(clock, *GPTS[0])
        return clock.alone(run) / count, 0.0
    (own_small, rest_small), (own_large, rest_large) = (
        _own_and_rest(clock, *size) for size in (GPTS[0], GPTS[1 if clock.share <= 0.1 else 2])
    )
    share = max(0.0, (rest_large - rest_small) / (own_large - own_small))
    return max(0.0, rest_small - share * own_small), share


def _own_and_rest(clock: Clock, rows: int, tokens: int, width: int) -> tuple[float, float]:
    """Return an operator's seconds in a GPT and its overhead.

    They are measured in turns, so that a slower machine affects both.
    """
    count, bare, wrapped = _gpt_in_wrapper(clock, rows, tokens, width)
    own, rest = [], []
    for _ in range(ROUNDS):
        timed = TimedOperators()
        with timed:
            bare()
        own.append(timed.total() / count)
        rest.append(clock.processor(wrapped, 1) / count - own[-1])
    return statistics.median(of_all(statistics.median(own))), statistics.median(of_all(statistics.median(rest)))


def _gpt_in_wrapper(
    clock: Clock, rows: int, tokens: int, width: int
) -> tuple[int, Callable[[], None], Callable[[], None]]:
    """Return (number of operators, forward and backward of a GPT, the same for a wrapped GPT)."""
    sizes = TransformerConfig(
        num_layers=4, hidden_size=width, num_attention_heads=8, vocab_size=256, max_sequence_length=tokens
    )
    models = [GPTModel(sizes, parallel_state.get_process_groups()).to(clock.device) for _ in range(2)]
    config = DistributedDataParallelConfig(check_for_nan_in_grad=True, initial_weights="broadcast")
    wrapper = DistributedDataParallel(None, config, models[1])
    ids = torch.zeros(rows, tokens, dtype=torch.long, device=clock.device)

    def bare() -> None:
        models[0](ids, labels=ids).mean().backward()

    def wrapped() -> None:
        with wrapper.no_sync():
            wrapper(ids, labels=ids).mean().backward()

    bare()
    wrapped()
    with LiveMemory([*models[0].parameters()]) as watched:
        bare()
    return sum(sum(counter.values()) for counter in watched.work.values()), bare, wrapped


def operator_times(clock: Clock, on_top: float) -> dict[str, list[list[float]]]:
    """Return [size, processor seconds of a call] by name and dtype, for layers that run forward and backward.

    Args:
        clock: The timer.
        on_top: Fraction of these seconds that is added.
    """
    timed = TimedOperators()
    for dtype, rounds in ((torch.float32, 2), (torch.bfloat16, 1)):
        for rows, tokens, width in sample_sizes(clock.share):
            model, ids = sample_step(dtype, rows, tokens, width)
            model(ids).backward()
            with timed:
                for _ in range(rounds):
                    model(ids).backward()
    tables = of_all(timed.table())
    return {
        name: [
            [size, (1 + on_top) * statistics.median(table[name][place][1] for table in tables)]
            for place, (size, _) in enumerate(own)
        ]
        for name, own in tables[0].items()
    }


def step_costs(clock: Clock) -> tuple[dict[str, Any], dict[str, dict[str, float]] | None]:
    """Return the costs of a step outside its layers, and the link of gradient reductions; None on one rank.

    Three models give the costs of a step, of a bucket, and of a byte.
    """
    ranks = dist.get_world_size()
    finalized, updated = zip(*(_finalize_and_update(clock, *sizes) for sizes in MODELS), strict=True)
    nbytes = 4 * (MODELS[2][1] ** 2 - MODELS[0][1] ** 2)
    reduce, update = (_cost(taken) for taken in (finalized, updated))
    sent = 2 * nbytes * (ranks - 1) / ranks
    return {
        "step_overhead_s": reduce[0] + update[0],
        "optimizer_bucket_s": update[1],
        "optimizer_bandwidth": 5 * nbytes / update[2],  # gradients once; two moments are read and written
    }, {"gradients": {"latency_s": max(reduce[1], 1e-7), "bytes_per_s": sent / reduce[2]}} if ranks > 1 else None


def _cost(taken: Sequence[float]) -> tuple[float, float, float]:
    """Return (cost of a step, of a bucket, of all bytes of the large model) from the times of MODELS."""
    one, many, large = taken
    bucket = max(0.0, (many - one) / (MODELS[1][0] - MODELS[0][0]))
    return max(0.0, one - bucket), bucket, max(large - one, 1e-7)


def _finalize_and_update(clock: Clock, layers: int, width: int) -> tuple[float, float]:
    """Return the seconds of clearing and reducing gradients, and of the optimizer's step, with one bucket per layer."""
    config = DistributedDataParallelConfig(
        overlap_grad_reduce=False, bucket_size=width * width, check_for_nan_in_grad=True, initial_weights="broadcast"
    )
    module = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers))).to(clock.device)
    model = DistributedDataParallel(None, config, module)
    optimizer = get_megatron_optimizer(OptimizerConfig(lr=1e-9), [model])
    taken = []
    for _ in range(1 + 2 * ROUNDS):
        cleared = clock.once(model.zero_grad_buffer)
        model(torch.ones(1, width, device=clock.device)).sum().backward()
        reduced = clock.once(lambda: finalize_model_grads([model]))
        taken.append((cleared + reduced, clock.once(optimizer.step)))
    finalized, updated = (statistics.median(column) for column in zip(*taken[1:], strict=True))
    return finalized, updated
