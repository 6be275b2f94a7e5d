"""Figures of a device file that only plans of CPU ranks use: processor times of operators, and costs of a step.

`python -m core plan calibrate` leaves them out, because they say nothing of a GPU.

Memory bandwidth and matrix product speed do not determine an operator's time on a CPU: exp() is not memory-bound, many
small products are slower than one large one, and the kernel must first clear the pages of a new result. Therefore a
small model with common layer operators runs forward and backward, and each operator is timed at its call. Processor
time excludes time in which other ranks use the core.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

# A public module of torch that has the class; the module that defines it has a private name.
from torch.fx.experimental.proxy_tensor import TorchDispatchMode

from core import parallel_state
from core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from core.models.gpt import GPTModel
from core.optimizer import OptimizerConfig, get_megatron_optimizer
from core.transformer.transformer_config import TransformerConfig
from core_plan.calibrate import ROUNDS, Clock, of_all
from core_plan.live_memory import LiveMemory, Work

SIZES = ((2, 32, 32), (4, 64, 128), (8, 128, 256))  # rows, tokens of a row, width
VOCABULARY, HEADS = 1024, 8
MODELS = ((1, 32), (8, 32), (1, 1024))  # layers and width, one bucket per layer: costs of a step, a bucket and a byte
GPTS = ((1, 8, 16), (1, 64, 128), (2, 128, 256))  # rows, tokens, width: overhead around operators of several sizes


class SampleLayers(nn.Module):
    """Operators of GPT, llama and related models, in one layer each. Input ids have shape [rows, tokens]."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.norm = nn.LayerNorm(width)
        self.scale = nn.Parameter(torch.ones(width))
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.up, self.gate, self.down = (
            nn.Linear(width, 4 * width),
            nn.Linear(width, 4 * width),
            nn.Linear(4 * width, width),
        )
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def attend(self, hidden: Tensor, *, in_parts: bool) -> Tensor:
        """Apply attention to [rows, tokens, width]. `in_parts` uses separate product, softmax and product."""
        rows, tokens, width = hidden.shape
        shape = rows, tokens, HEADS, width // HEADS
        query, key, value = (part(hidden).view(shape).transpose(1, 2) for part in (self.query, self.key, self.value))
        angles = torch.arange(tokens, dtype=hidden.dtype)[:, None].expand(tokens, shape[-1])
        first, second = query.chunk(2, -1)
        query = query * angles.cos() + torch.cat((-second, first), -1) * angles.sin()
        if in_parts:
            scores = query @ key.transpose(-1, -2) * shape[-1] ** -0.5
            allowed = torch.ones(tokens, tokens, dtype=torch.bool).tril()
            scores = scores.masked_fill(~allowed, -1e4)
            mixed = F.dropout(F.softmax(scores, -1), 0.1) @ value
        else:
            mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return mixed.transpose(1, 2).reshape(rows, tokens, width)

    def forward(self, ids: Tensor) -> Tensor:
        """Return the loss."""
        hidden = self.embedding(ids)
        hidden = hidden + self.attend(self.norm(hidden), in_parts=False)
        normed = hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + 1e-6) * self.scale
        hidden = hidden + self.down(F.silu(self.gate(normed)) * self.up(normed))
        hidden = hidden + self.attend(self.norm(hidden), in_parts=True)
        hidden = hidden + self.down(
            F.relu(F.gelu(self.up(self.norm(hidden))) + F.gelu(self.gate(hidden), approximate="tanh"))
        )
        logits = self.head(hidden).float()
        exact = F.cross_entropy(logits.flatten(0, 1), ids.flatten())
        shifted = logits - logits.amax(-1, keepdim=True)
        by_parts = shifted.exp().sum(-1).log() - shifted.gather(-1, ids[..., None]).squeeze(-1)
        return exact + by_parts.mean()


class TimedOperators(TorchDispatchMode):
    """Processor seconds of each operator that creates a tensor: (name and dtype) -> size -> [calls, seconds]."""

    def __init__(self) -> None:
        super().__init__()
        self.taken: defaultdict[str, defaultdict[int, list[float]]] = defaultdict(lambda: defaultdict(lambda: [0, 0.0]))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        begun = time.thread_time()
        result = func(*args, **(kwargs or {}))
        seconds = time.thread_time() - begun
        work = Work.of(func, args, kwargs or {}, result)
        if work is not None:
            sample = self.taken[work.key][work.size]
            sample[0] += 1
            sample[1] += seconds
        return result

    def total(self) -> float:
        """Return the seconds of all operators together."""
        return sum(seconds for sizes in self.taken.values() for _, seconds in sizes.values())

    def table(self) -> dict[str, list[list[float]]]:
        """Return [size, seconds of a call] by name, sorted by size."""
        return {
            name: [[size, seconds / calls] for size, (calls, seconds) in sorted(sizes.items())]
            for name, sizes in self.taken.items()
        }


def sample_sizes(share: float) -> Sequence[tuple[int, int, int]]:
    """Return the sizes to measure if the measurement takes this share of the usual time."""
    return SIZES if share > 0.1 else SIZES[:2]


def sample_step(dtype: torch.dtype, rows: int, tokens: int, width: int) -> tuple[SampleLayers, Tensor]:
    """Return the model and its token ids."""
    torch.manual_seed(0)
    model = SampleLayers(width).to(dtype)
    return model, torch.randint(0, VOCABULARY, (rows, tokens))


def host_figures(clock: Clock) -> dict[str, Any]:
    """Return entries of a device file of CPU ranks. Collective over all ranks."""
    parallel_state.initialize_model_parallel()
    try:
        costs, gradients = step_costs(clock)
        overhead, on_top = operator_costs(clock)
    finally:
        parallel_state.destroy_model_parallel()
    return {
        "operator_overhead_s": overhead,
        "operators": operator_times(clock, on_top),
        **costs,
        **({} if gradients is None else {"links": gradients}),
    }


def processor(run: Callable[[], object]) -> float:
    """Return this thread's processor seconds for one call."""
    start = time.thread_time()
    run()
    return time.thread_time() - start


def operator_costs(clock: Clock) -> tuple[float, float]:
    """Return the overhead per operator of a GPT in its wrapper.

    Modules, hooks and autograd have a cost per operator. Freeing memory and refilling caches have a cost per size.

    Returns:
        (seconds in addition to an operator's own, fraction of its own seconds that is added).
    """
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
        rest.append(processor(wrapped) / count - own[-1])
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
