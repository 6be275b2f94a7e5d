"""Hugging Face models split by core.hugging_face: a step, Transformers' own tensor parallelism and torch's FSDP2.

Three parts. steps: a llama of 51 M parameters on two ranks, every arm in the same two processes, one step of each in
turn; an arm counts only if its losses of the first steps are those of FSDP2. wrap: planning and wrapping a model of a
thousand modules. load: a directory of a gibibyte on four ranks, what a rank reads and how far its memory grows.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from benchmarks.arms_torch import ADAM
from benchmarks.report import add_json, write_json
from core import parallel_state
from core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from core.distributed.distributed_data_parallel_config import Strategy
from core.groups.process_groups import ProcessGroups
from core.groups.rank_grid import RankGrid, group_ranks
from core.hugging_face import load_split, read_plan, split_model
from core.models import transformers_layouts
from core.models.gpt import GPTModel
from core.optimizer import OptimizerConfig, get_megatron_optimizer
from core.tensor_parallel.initialization import tensor_parallel_slice

PARTS = ("steps", "wrap", "load")
GIB = 1 << 30
CHECKED_STEPS, TOLERANCE = 3, 1e-4  # so many steps on one batch: their losses are compared before anything is timed
REFERENCE = "FSDP2, resharded"
BY_GPT = "our own GPT, tp 2"
SHAPES: dict[str, dict[str, Any]] = {
    "51 M": {"hidden_size": 768, "intermediate_size": 2304, "num_hidden_layers": 5, "vocab_size": 8192},
    "tiny": {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 64},
    "1000 modules": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 77, "vocab_size": 256},
    "1 GiB": {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 12, "vocab_size": 32000},
}
Step = Callable[[Tensor], Tensor]  # token ids of the whole batch -> this rank's loss


def llama(shape: str) -> Any:
    """A llama with random weights, the same in every process."""
    import transformers

    heads = max(4, SHAPES[shape]["hidden_size"] // 64)
    torch.manual_seed(1)
    config = transformers.LlamaConfig(num_attention_heads=heads, num_key_value_heads=heads, **SHAPES[shape])
    return transformers.LlamaForCausalLM(config).train()


def groups_of(world: int, tp: int) -> ProcessGroups:
    """The groups of a layout. Several layouts live in one process, so none is parallel_state's."""
    return ProcessGroups.build(group_ranks(RankGrid(world, tp=tp), dist.get_rank()))


# -- the arms of a step ---------------------------------------------------------------------------------------------


def ours(shape: str, directory: Path, tp: int, strategy: Strategy, *, parallel_output: bool = False) -> Step:
    """A model split by its plan, or over data ranks alone, and our optimizer."""
    groups = groups_of(dist.get_world_size(), tp)
    model = llama(shape)
    if tp > 1:
        split_model(model, parallel_output=parallel_output, pg_collection=groups)
    return _ours_wrapped(model, groups, strategy, lambda module, ids: module(input_ids=ids, labels=ids).loss)


def our_gpt(shape: str, directory: Path) -> Step:
    """Our own GPT with the weights of the same llama."""
    groups = groups_of(dist.get_world_size(), tp=2)
    theirs = llama(shape)
    config = transformers_layouts.config_from_transformers(theirs.config.to_dict())
    config = type(config)(**{**vars(config), "tensor_model_parallel_size": 2})
    model = GPTModel(config, pg_collection=groups)
    whole = transformers_layouts.from_transformers(config, theirs.state_dict())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            value = whole[name]
            if getattr(parameter, "tensor_model_parallel", False):
                place: Any = parameter
                cut = (place.partition_dim, groups.size("tp"), groups.rank("tp"), place.partition_stride)
                value = tensor_parallel_slice(value, *cut)
            parameter.copy_(value)
    del theirs, whole
    return _ours_wrapped(
        model, groups, "no_shard", lambda module, ids: module(ids, labels=ids.roll(-1, 1))[:, :-1].mean()
    )


def _ours_wrapped(
    model: Any, groups: ProcessGroups, strategy: Strategy, loss_of: Callable[[Any, Tensor], Tensor]
) -> Step:
    sharded = strategy != "no_shard"
    options = DistributedDataParallelConfig(
        data_parallel_sharding_strategy=strategy, use_distributed_optimizer=sharded, average_in_collective=True
    )
    wrapped = DistributedDataParallel(None, options, model, pg_collection=groups)
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            lr=ADAM["lr"],
            adam_beta1=ADAM["betas"][0],
            adam_beta2=ADAM["betas"][1],
            adam_eps=ADAM["eps"],
            weight_decay=ADAM["weight_decay"],
            clip_grad=0.0,
            use_distributed_optimizer=sharded,
        ),
        [wrapped],
        # Weight decay on every parameter, as torch's AdamW has it.
        no_weight_decay_cond=lambda name, parameter: False,
        pg_collection=groups,
    )

    def step(ids: Tensor) -> Tensor:
        wrapped.zero_grad_buffer()
        loss = loss_of(wrapped, _own_rows(ids, groups.size("dp"), groups.rank("dp")))
        loss.backward()
        finalize_model_grads([wrapped], pg_collection=groups)
        optimizer.step()
        return loss.detach()

    return step


def transformers_tp(shape: str, directory: Path) -> Step:
    """Transformers' own tensor parallelism, which is made of DTensors."""
    import transformers
    from transformers.distributed import DistributedConfig

    if dist.get_rank() == 0:
        llama(shape).save_pretrained(directory)
    dist.barrier()
    model: Any = transformers.LlamaForCausalLM.from_pretrained(
        directory, distributed_config=DistributedConfig(tp_size=dist.get_world_size())
    ).train()
    return _torch_step(model, 1, 0)


def fsdp2(shape: str, directory: Path, *, reshard: bool) -> Step:
    """fully_shard on every layer and on the rest."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model, mesh = llama(shape), init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh, reshard_after_forward=reshard)
    return _torch_step(model, dist.get_world_size(), dist.get_rank())


def _torch_step(model: Any, ranks: int, rank: int) -> Step:
    from torch.distributed.tensor import DTensor

    # torch's fused AdamW takes DTensors or plain tensors, not both in one group; Transformers leaves norms plain.
    groups: list[list[torch.nn.Parameter]] = [[], []]
    for parameter in model.parameters():
        groups[isinstance(parameter, DTensor)].append(parameter)
    optimizer = torch.optim.AdamW([{"params": group} for group in groups if group], **ADAM)

    def step(ids: Tensor) -> Tensor:
        optimizer.zero_grad()
        own = _own_rows(ids, ranks, rank)
        loss = model(input_ids=own, labels=own, use_cache=False).loss
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def _own_rows(ids: Tensor, ranks: int, rank: int) -> Tensor:
    """Tensor-parallel ranks take the whole batch, data ranks their rows."""
    return ids.chunk(ranks)[rank]


ARMS: dict[str, Callable[[str, Path], Step]] = {
    REFERENCE: lambda shape, directory: fsdp2(shape, directory, reshard=True),
    "FSDP2, parameters kept": lambda shape, directory: fsdp2(shape, directory, reshard=False),
    "Transformers' tensor parallelism": transformers_tp,
    "ours, tp 2": lambda shape, directory: ours(shape, directory, 2, "no_shard"),
    "ours, tp 2, logits split": lambda shape, directory: ours(shape, directory, 2, "no_shard", parallel_output=True),
    "ours, dp 2, `optim_grads_params`": lambda shape, directory: ours(shape, directory, 1, "optim_grads_params"),
    BY_GPT: our_gpt,
}


def measure_steps(rank: int, directory: Path, shape: str, rounds: int, tokens: int) -> list[dict[str, Any]]:
    """Each arm's median step and processor time; RuntimeError where an arm's losses are others than the reference's."""
    steps = {name: build(shape, directory / "llama") for name, build in ARMS.items()}
    gc.collect()
    batch = torch.Generator().manual_seed(3)
    vocabulary = SHAPES[shape]["vocab_size"]
    losses: dict[str, list[float]] = {name: [] for name in steps}
    walls: dict[str, list[float]] = {name: [] for name in steps}
    works: dict[str, list[float]] = {name: [] for name in steps}
    ids = torch.randint(vocabulary, (dist.get_world_size(), tokens), generator=batch)
    for number in range(CHECKED_STEPS + rounds):
        for name, step in steps.items():
            dist.barrier()
            began, worked = time.perf_counter(), time.process_time()
            loss = step(ids)
            taken = torch.tensor([time.perf_counter() - began, time.process_time() - worked], dtype=torch.float64)
            dist.all_reduce(loss)
            losses[name].append(float(loss) / dist.get_world_size())
            dist.all_reduce(taken, op=dist.ReduceOp.MAX)
            if number >= CHECKED_STEPS:
                walls[name].append(float(taken[0]))
                works[name].append(float(taken[1]))
        if number == CHECKED_STEPS - 1:
            refuse_other_losses(losses)
    ratios = {
        name: [mine / theirs for mine, theirs in zip(walls[name], walls[REFERENCE], strict=True)] for name in steps
    }
    return [
        {
            "arm": name,
            "step_ms": 1e3 * statistics.median(walls[name]),
            "processor_ms": 1e3 * statistics.median(works[name]),
            "ratio": statistics.median(ratios[name]),
            "least": min(ratios[name]),
            "most": max(ratios[name]),
            "losses": losses[name][:CHECKED_STEPS],
        }
        for name in steps
    ]


def refuse_other_losses(losses: dict[str, list[float]]) -> None:
    """RuntimeError that names an arm whose losses are not the reference's, or where these do not move."""
    wanted = losses[REFERENCE]
    if abs(wanted[-1] - wanted[0]) < 30 * TOLERANCE * abs(wanted[0]):
        raise RuntimeError(f"losses {wanted} hardly move, so they show nothing")
    for name, found in losses.items():
        if any(abs(mine - theirs) > TOLERANCE * abs(theirs) for mine, theirs in zip(found, wanted, strict=True)):
            raise RuntimeError(f"{name}: losses {found}, expected {wanted}")


# -- wrapping and loading -------------------------------------------------------------------------------------------


def measure_wrap(shape: str, rounds: int) -> dict[str, float]:
    """Median seconds of the plan, the split with its checks, and the wrapper."""
    groups = groups_of(dist.get_world_size(), tp=2)
    taken: dict[str, list[float]] = {"plan": [], "split": [], "wrap": []}
    for _ in range(rounds + 1):
        model = llama(shape)
        dist.barrier()
        laps = [time.perf_counter()]
        plan = read_plan(model)
        laps.append(time.perf_counter())
        split_model(model, plan, pg_collection=groups)
        laps.append(time.perf_counter())
        DistributedDataParallel(None, DistributedDataParallelConfig(), model, pg_collection=groups)
        laps.append(time.perf_counter())
        for name, before, after in zip(taken, laps, laps[1:], strict=False):
            taken[name].append(after - before)
    medians = {name: statistics.median(seconds[1:]) for name, seconds in taken.items()}
    return {"modules": float(sum(1 for _ in model.modules())), **medians, "all": sum(medians.values())}


def measure_load(rank: int, directory: Path, shape: str) -> dict[str, float]:
    """Most bytes that a rank reads, and most that its own memory (of no file) grows during it, in GiB."""
    size = 0.0
    if rank == 0:
        whole = llama(shape)
        size = sum(p.numel() * p.element_size() for p in whole.parameters()) / GIB
        whole.save_pretrained(directory / "load")
        del whole
    gc.collect()
    dist.barrier()
    parallel_state.initialize_model_parallel(dist.get_world_size())
    before, seen, done = _own_bytes(), [0], threading.Event()

    def watch() -> None:
        while not done.wait(0.002):
            seen.append(_own_bytes())

    watcher = threading.Thread(target=watch)
    watcher.start()
    began = time.perf_counter()
    try:
        model = load_split(directory / "load")
    finally:
        done.set()
        watcher.join()
    most = torch.tensor([model.bytes_read / GIB, (max(seen) - before) / GIB, time.perf_counter() - began, size])
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    parallel_state.destroy_model_parallel()
    return dict(zip(("read_GiB", "grown_GiB", "seconds", "checkpoint_GiB"), most.tolist(), strict=True))


def _own_bytes() -> int:
    """Memory of this process that is no file's. The kernel can take back pages of files that were only read."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


# -- processes and the table ----------------------------------------------------------------------------------------


def worker(rank: int, world: int, folder: str, part: str, shape: str, rounds: int, tokens: int) -> None:
    """One rank of a part; rank 0 leaves the result in the folder."""
    import transformers

    transformers.logging.disable_progress_bar()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/{part}.store", rank=rank, world_size=world)
    directory = Path(folder)
    result: Any
    if part == "steps":
        result = measure_steps(rank, directory, shape, rounds, tokens)
    else:
        result = measure_wrap(shape, rounds) if part == "wrap" else measure_load(rank, directory, shape)
    if rank == 0:
        torch.save(result, directory / f"{part}.pt")
    dist.barrier()
    dist.destroy_process_group()


def measure(part: str, shape: str, rounds: int, tokens: int, ranks: int) -> Any:
    """The result of one part, in processes of its own."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(worker, (ranks, folder, part, shape, rounds, tokens), nprocs=ranks)
        return torch.load(Path(folder) / f"{part}.pt")


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The arms in Markdown, and how far the split llama is from our own GPT."""
    lines = ["| arm | step | over FSDP2 | least, most | processor time |", "|---|---|---|---|---|"]
    for row in rows:
        lines.append(
            f"| {row['arm']} | {row['step_ms']:.1f} ms | {row['ratio']:.2f} | {row['least']:.2f}, {row['most']:.2f} "
            f"| {row['processor_ms']:.1f} ms |"
        )
    times = {row["arm"]: row["step_ms"] for row in rows}
    lines += [
        f"{name} over {BY_GPT}: {times[name] / times[BY_GPT]:.2f}" for name in times if name.startswith("ours, tp")
    ]
    return "\n".join(lines)


def main(arguments: list[str]) -> None:
    """Measure the parts that are asked for, and print them."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks hugging_face", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--rounds", type=int, default=9, help="steps of each arm that are timed, and wraps")
    parser.add_argument("--tokens", type=int, default=256, help="of each row; there is a row a rank")
    parser.add_argument("--tiny", action="store_true", help="small models, to see that it works")
    add_json(parser)
    options = parser.parse_args(arguments)
    if options.rounds < 1 or options.tokens < 8:
        parser.error("--rounds must be at least 1, and --tokens at least 8")
    shapes = {"steps": "51 M", "wrap": "1000 modules", "load": "1 GiB"}
    results: dict[str, Any] = {}
    for part in options.parts:
        shape = "tiny" if options.tiny else shapes[part]
        results[part] = measure(part, shape, options.rounds, options.tokens, 4 if part == "load" else 2)
        print(f"{part}: llama, {shape}, torch {torch.__version__}, gloo")
        if part == "steps":
            print(table(results[part]))
        else:
            print("  " + ", ".join(f"{name} {value:.3f}" for name, value in results[part].items()), flush=True)
    write_json(options.json, "hugging_face", arguments, results)
