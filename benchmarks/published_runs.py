"""Plans compared with the published figures of others' runs. Nothing is run: a row takes seconds of one core.

A ratio is the plan over the published figure. The sources of the figures, and what of a row is not comparable, are in
benchmarks/plans.md, whose table `python -m benchmarks published` prints.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

from benchmarks.report import add_json, write_json
from core_plan import Link, RunPlan, fake_collectives, plan_run, read_device
from core_plan.job.config_file import load_config

ALL_CUT = "--ddp.data-parallel-sharding-strategy optim_grads_params --ddp.no-overlap-param-gather"
RECOMPUTED, SELECTIVE = (f"--model.recompute-granularity {how}" for how in ("full", "selective"))
PARTS = f"{SELECTIVE} --model.recompute-modules layernorm mlp_act"
DROPOUT = "--model.hidden-dropout 0.1 --model.attention-dropout 0.1"
WHOLE = "--parallel.sequence-parallel False"
FP32_GRADIENTS = "--ddp.grad-reduce-in-fp32"
FUSED = f"{FP32_GRADIENTS} --model.gradient-accumulation-fusion"
UNTIED = "--model.no-share-embeddings-and-output-weights"


@dataclass(frozen=True)
class PublishedRun:
    """One run. shape, layout: options of the main job. seconds: of a step, as published; else tokens_per_s of a GPU, or
    mfu. gib: published memory of a GPU. hardware: what its source says of the GPUs that differs from the device's file.
    within: what the ratio of time is to lie within; None where it lies elsewhere, for the reason that the page gives.
    gathers_late: in backward, arithmetic waited for the gathers of parameters. torch_of_today: False for the kernels
    that torch had before 2.9.
    """

    name: str
    source: str
    ranks: int
    shape: str
    layout: str
    tokens: int
    sequences: int
    device: str = "h100"
    seconds: float | None = None
    tokens_per_s: float | None = None
    mfu: float | None = None
    gib: float | None = None
    hardware: Mapping[str, Any] = field(default_factory=dict)
    within: Range | None = None
    gathers_late: bool = False
    torch_of_today: bool = False

    @property
    def flags(self) -> str:
        """All options of the main job."""
        batch = f"--model.sequence-length {self.tokens} --run.global-batch-size {self.sequences}"
        return f"--model.dtype bfloat16 {self.shape} {batch} {self.layout}"

    def plan(self) -> RunPlan:
        """Its plan."""
        device = replace(read_device(self.device), **self.hardware)
        with nullcontext() if self.torch_of_today else norms_of_operators():
            return plan_run(load_config(self.flags.split()), self.ranks, device)

    @property
    def published(self) -> str:
        """The published figures."""
        figures = [(self.seconds, "{:g} s"), (self.tokens_per_s, "{:,.0f} tokens/s/GPU"), (self.gib, "{:.1f} GiB")]
        mfu = [] if self.mfu is None else [f"MFU {self.mfu:.0%}"]
        return "; ".join([*mfu, *(words.format(value) for value, words in figures if value is not None)])

    def slower(self, plan: RunPlan) -> float:
        """Its step's time over the plan's, by what its publishers did otherwise."""
        if not self.gathers_late:
            return 1.0
        gathers = sum(row.seconds for row in plan.time.communication if row.collective == "all_gather")
        of_backward = gathers / 2
        return 1.0 + (1.0 - read_device(self.device).overlap_slowdown) * of_backward / plan.time.seconds

    def in_words(self, plan: RunPlan) -> str:
        """The planned figure of time, of the kind that is published."""
        slower = self.slower(plan)
        if self.seconds is not None:
            return f"{plan.time.seconds * slower:.3g} s"
        if self.mfu is not None:
            return f"MFU {plan.time.mfu / slower:.0%}"
        return f"{plan.time.tokens_per_s / self.ranks / slower:,.0f} tokens/s/GPU"

    def time_ratio(self, plan: RunPlan) -> float:
        """The time of a planned step over that of the published one."""
        slower = self.slower(plan)
        if self.seconds is not None:
            return plan.time.seconds * slower / self.seconds
        if self.tokens_per_s is not None:
            return self.tokens_per_s * self.ranks * slower / plan.time.tokens_per_s
        assert self.mfu is not None, "a row has a figure of time"
        return self.mfu * slower / plan.time.mfu


def norms_of_operators() -> AbstractContextManager[Any]:
    """Inside, an RMSNorm on a GPU is several operators in fp32, as in torch before 2.9."""
    return mock.patch.object(fake_collectives, "rms_norm_of_gpu", fake_collectives.RMS_NORM)


def shape(layers: int, hidden: int, heads: int, vocabulary: int, more: str) -> str:
    """Options of a model's sizes."""
    return (
        f"--model.num-layers {layers} --model.hidden-size {hidden} --model.num-attention-heads {heads} "
        f"--model.vocab-size {vocabulary} {more}"
    )


def swiglu(width: int, groups: int | None = None) -> str:
    """Options of an MLP and attention as llama has them."""
    return f"--model.activation swiglu --model.ffn-hidden-size {width}" + (
        "" if groups is None else f" --model.num-query-groups {groups}"
    )


def mpt(layers: int, hidden: int, heads: int) -> str:
    """The shape of an MPT: no biases, tied embeddings. Its positions are added to scores, which costs nothing here."""
    return shape(layers, hidden, heads, 50368, "--model.normalization LayerNorm " + LEARNED)


LEARNED = "--model.position-embedding-type learned_absolute"
MEGATRON = f"--model.normalization LayerNorm --model.add-bias-linear {LEARNED}"
NANOTRON = shape(24, 2048, 16, 49152, swiglu(4096))
LLAMA_8B = shape(32, 4096, 32, 128256, f"{swiglu(14336, 8)} {UNTIED}")
QWEN_8B = shape(36, 4096, 32, 151936, f"{swiglu(12288, 8)} --model.qk-layernorm {UNTIED}")
LLAMA_405B = shape(126, 16384, 128, 128256, f"{swiglu(53248, 8)} {UNTIED}")
GPT_22B, GPT_175B = (
    shape(layers, hidden, heads, 51200, f"{MEGATRON} {DROPOUT}")
    for layers, hidden, heads in ((48, 6144, 64), (96, 12288, 96))
)
BLOOM = shape(70, 14336, 112, 250880, MEGATRON)
EVEN_405B = "--parallel.layers-per-stage 0 " + "1 " * 126 + "0 --parallel.schedule Interleaved1F1B"

FLASH_2 = {"attention_flops": {"bfloat16": 286e12}}  # of H100: attention of runs before torch took cuDNN's kernel
HBM2E = {"memory_bandwidth": 0.85 * 2.4e12, "memory_bytes": 96_000_000_000}  # of torchtitan's H100
OMNI_PATH = {"between": Link(8.4e-6, 0.8 * 400e9 / 8 / 8, 14e-6)}  # four links of 100 Gbit/s for 8 GPUs
Range = tuple[float, float]
NEAR, LONG = (0.85, 1.15), (0.7, 1.3)


def row(
    name: str, source: str, ranks: int, sizes: str, layout: str, batch: tuple[int, int], **more: Any
) -> PublishedRun:
    """One row. batch: sequences of a step, tokens of each."""
    return PublishedRun(name, source, ranks, sizes, layout, batch[1], batch[0], **more)


def _nanotron(ranks: int, layout: str, mib: int, seconds: float, within: Range | None = NEAR) -> PublishedRun:
    name = f"nanotron 1.1B, {ranks} H100, {layout.replace('--run.micro-batch-size', 'mbs').replace('--', '')}"
    more = {"seconds": seconds, "gib": mib / 2**10, "within": within, "hardware": FLASH_2}
    return row(name, "nanotron", ranks, NANOTRON, f"{layout} {FP32_GRADIENTS}", (1024, 4096), **more)


def _mpt(
    name: str,
    sizes: tuple[int, int, int],
    ranks: int,
    batch: tuple[int, int],
    micro: int,
    rate: int,
    *,
    recomputed: bool,
    within: Range | None,
) -> PublishedRun:
    layout = f"--tp 1 {ALL_CUT} --run.micro-batch-size {micro}{' ' + RECOMPUTED if recomputed else ''}"
    return row(
        name, "llm-foundry", ranks, mpt(*sizes), layout, batch, tokens_per_s=rate, within=within, hardware=FLASH_2,
        gathers_late=True,
    )  # fmt: skip


def _titan(cp: int, tokens: int, rate: int, gib: float) -> PublishedRun:
    layout = f"--tp 1 --cp {cp} {ALL_CUT} {RECOMPUTED} --run.micro-batch-size 1"
    return row(
        f"torchtitan Llama 8B, 8 H100, cp {cp}, {tokens:,} tokens",
        "torchtitan",
        8,
        LLAMA_8B,
        layout,
        (8 // cp, tokens),
        tokens_per_s=rate,
        gib=gib,
        hardware=HBM2E | FLASH_2,
        within=LONG,
    )


def _titan_8k(ranks: int, device: str, sequences: int, rate: int, gib: float | None = None) -> list[PublishedRun]:
    """A part of each layer was computed again, so the run lies between two plans: of nothing again, and of all."""
    layout = f"--tp 1 {ALL_CUT} --run.micro-batch-size {sequences} --ddp.bucket-size 40000000"
    batch = ranks * sequences, 8192
    more = {"tokens_per_s": rate, "gib": gib, "device": device, "hardware": HBM2E | FLASH_2 if device == "h100" else {}}
    name = f"torchtitan Llama 8B, {ranks} {device.upper()}, 8,192 tokens"
    return [
        row(f"{name}, {again} again", "torchtitan", ranks, LLAMA_8B, f"{layout} {options}", batch, **more)
        for again, options in (("nothing", ""), ("all", RECOMPUTED))
    ]


def _meta(ranks: int, mfu: float, options: str = "") -> PublishedRun:
    """Section 3.3.2 of the paper: gradients of microbatches are added up in fp32, and 8K tokens were trained without
    activation checkpointing."""
    strategy = f"--ddp.data-parallel-sharding-strategy optim {FUSED}"
    layout = f"--tp 8 --pp 16 {EVEN_405B} --run.micro-batch-size 1 {strategy} {options}"
    name = f"Llama 3 405B, {ranks:,} H100{', parts computed again' * bool(options)}"
    more = {"mfu": mfu, "within": NEAR, "hardware": FLASH_2, "torch_of_today": True}
    return row(name, "llama3", ranks, LLAMA_405B, layout, (2048, 8192), **more)


def _megatron(name: str, sizes: str, ranks: int, layout: str, sequences: int, seconds: float) -> PublishedRun:
    return row(
        name, "korthikanti", ranks, sizes, layout, (sequences, 2048), device="a100", seconds=seconds, within=NEAR
    )


T22, T175 = "--tp 8 --run.micro-batch-size 4", "--tp 8 --pp 8 --parallel.vpp 3 --run.micro-batch-size 1"
ROWS = (
    _nanotron(8, "--tp 4 --run.micro-batch-size 8", 25808, 18.95),
    _nanotron(16, "--tp 4 --run.micro-batch-size 16", 47549, 10.35),
    _nanotron(64, "--tp 4 --run.micro-batch-size 4", 13153, 2.85),
    _nanotron(16, "--tp 1 --run.micro-batch-size 2", 25075, 9.1, within=None),
    _mpt("MPT-7B, 8 H100", (32, 4096, 32), 8, (48, 2048), 6, 10643, recomputed=False, within=NEAR),
    _mpt("MPT-13B, 8 H100", (40, 5120, 40), 8, (16, 2048), 2, 4792, recomputed=False, within=NEAR),
    _mpt("MPT-30B, 32 H100, recomputed", (48, 7168, 64), 32, (1344, 2048), 14, 2308, recomputed=True, within=NEAR),
    _mpt("MPT-70B, 64 H100, recomputed", (80, 8192, 64), 64, (2048, 2048), 8, 1039, recomputed=True, within=NEAR),
    _mpt("MPT-7B, 8,192 tokens, recomputed", (32, 4096, 32), 8, (128, 8192), 8, 6935, recomputed=True, within=NEAR),
    _mpt("MPT-7B, 32,768 tokens, recomputed", (32, 4096, 32), 8, (32, 32768), 2, 3318, recomputed=True, within=LONG),
    *_titan_8k(64, "a100", 1, 2904),
    *_titan_8k(8, "h100", 2, 5762, 82.4),
    *_titan_8k(128, "h100", 2, 5605, 67.0),
    _titan(1, 32768, 3890, 83.9),
    _titan(2, 65536, 2540, 84.2),
    _titan(4, 131072, 1071, 84.0),
    _titan(8, 262144, 548, 84.5),
    row(
        "TRL Qwen3-8B, 8 H100, cp 8, 1,048,576 tokens, recomputed",
        "trl",
        8,
        QWEN_8B,
        f"--tp 1 --cp 8 {ALL_CUT} {RECOMPUTED} --run.micro-batch-size 1",
        (1, 1048576),
        seconds=379.8,
        torch_of_today=True,
        within=LONG,
    ),
    _meta(8192, 0.43),
    _meta(16384, 0.41),
    _meta(8192, 0.43, PARTS),
    _meta(16384, 0.41, PARTS),
    row(
        "GPT 175B, 96 H100",
        "Megatron-LM",
        96,
        shape(96, 12288, 96, 131072, ""),
        "--tp 8 --pp 12 --run.micro-batch-size 1",
        (1152, 4096),
        mfu=0.47,
        hardware=FLASH_2,
    ),
    _megatron("GPT 22B, 8 A100, all recomputed", GPT_22B, 8, f"{T22} {RECOMPUTED}", 4, 1.42),
    _megatron("GPT 22B, 8 A100, selective", GPT_22B, 8, f"{T22} {SELECTIVE}", 4, 1.10),
    _megatron("GPT 175B, 64 A100, all recomputed", GPT_175B, 64, f"{T175} {RECOMPUTED}", 64, 18.13),
    _megatron("GPT 175B, 64 A100, selective", GPT_175B, 64, f"{T175} {SELECTIVE}", 64, 13.75),
    row(
        "BLOOM 176B, 384 A100",
        "bloom",
        384,
        BLOOM,
        f"--tp 4 --pp 12 --parallel.layers-per-stage 5 {'6 ' * 10}5 {WHOLE} --run.micro-batch-size 2 {RECOMPUTED}",
        (2048, 2048),
        device="a100",
        mfu=0.36,
        hardware=OMNI_PATH,
        gib=60e9 / 2**30,
        within=NEAR,
    ),
)  # fmt: skip


def compared(run: PublishedRun) -> dict[str, Any]:
    """One row of the table."""
    plan = run.plan()
    peak = plan.fullest.peak / 2**30
    return {
        "run": run.name,
        "published": run.published,
        "planned": f"{run.in_words(plan)}; {peak:.1f} GiB{'' if plan.fits else ', does not fit'}",
        "memory_gib": peak,
        "memory_ratio": None if run.gib is None else peak / run.gib,
        "fits": plan.fits,
        "seconds": plan.time.seconds,
        "mfu": plan.time.mfu,
        "time_ratio": run.time_ratio(plan),
        "within": run.within,
        "parts": {
            name: getattr(plan.time, name)
            for name in ("compute", "exchanges", "bubble", "slower_ranks", "gradients", "optimizer")
        },
    }


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The rows in Markdown. A ratio is the plan over the published figure."""
    lines = ["| run | published | plan | memory | time |", "|---|---|---|---|---|"]
    for found in rows:
        memory = "" if found["memory_ratio"] is None else f"{found['memory_ratio']:.2f}"
        cells = [found["run"], found["published"], found["planned"], memory, f"{found['time_ratio']:.2f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main(arguments: list[str]) -> None:
    """Plan the rows that are asked for, and print them."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks published", description=__doc__.splitlines()[0])
    parser.add_argument("--rows", nargs="+", help="rows whose name has one of these in it")
    add_json(parser)
    options = parser.parse_args(arguments)
    wanted = [run for run in ROWS if options.rows is None or any(part in run.name for part in options.rows)]
    if not wanted:
        parser.error(f"no row is called so; rows: {'; '.join(run.name for run in ROWS)}")
    results = [compared(run) for run in wanted]
    print(table(results))
    write_json(options.json, "published", arguments, {"rows": results})
