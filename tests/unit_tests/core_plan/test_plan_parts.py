"""What a plan's figures are of: activations by part of the model, and what belongs to experts."""

import re
from dataclasses import replace
from typing import Any, Literal

import pytest

from benchmarks.plan_jobs import GptJob, ModelJob
from core_plan import ModelRun, RankMemory, plan_run
from core_plan.gpt_source import run_of_job
from core_plan.hugging_face_source import run_of_model
from core_plan.job.config_file import load_config
from core_plan.live_memory import LiveMemory
from core_plan.run_memory import plan_memory
from core_plan.step_memory import ACTIVATIONS
from tests.unit_tests.core_plan.test_plan_memory import EXPERTS, MODEL, RECOMPUTED, strategy
from tests.unit_tests.ranks import ranks

EMBEDDING, LAYERS, AGAIN, HEAD = "embedding", "layers", "layers, computed again", "last norm, logits and loss"
SENT = f"{LAYERS}, output sent"  # the last layer of a stage


def counts_of(memory: RankMemory) -> dict[str, int]:
    """Copies by name; the parts of a table must come to its total."""
    assert sum(saved.nbytes for saved in memory.activations) == memory.held[ACTIVATIONS] > 0
    return {saved.part: saved.copies for saved in memory.activations if saved.nbytes}


OURS: dict[str, tuple[str, list[dict[str, int]]]] = {
    "plain": ("--tp 1", [{EMBEDDING: 1, LAYERS: 4, HEAD: 1}]),
    "recomputed": (f"--tp 1 {' '.join(RECOMPUTED)}", [{EMBEDDING: 1, AGAIN: 4, HEAD: 1}]),
    "tp, sequence parallel": (f"--tp 2 {' '.join(RECOMPUTED)}", [{EMBEDDING: 1, AGAIN: 4, HEAD: 1}]),
    "cp": ("--tp 1 --cp 2", [{EMBEDDING: 1, LAYERS: 4, HEAD: 1}]),
    "pp": ("--tp 1 --pp 2", [{EMBEDDING: 2, LAYERS: 2, SENT: 2}, {LAYERS: 2, HEAD: 1}]),
    "pp, recomputed": (
        f"--tp 1 --pp 2 {' '.join(RECOMPUTED)}",
        [{EMBEDDING: 2, AGAIN: 2}, {AGAIN: 2, HEAD: 1}],  # the last layer keeps its input, which the one before gave
    ),
    "experts": (
        f"--tp 1 --parallel.ep 2 {' '.join(EXPERTS)}",
        [{EMBEDDING: 1, "expert layers": 2, "dense layers": 2, HEAD: 1}],
    ),
    # When most is held, four microbatches of rank 0 are in its first stage of one layer and one in the second; of rank
    # 1 three are in the first.
    "vpp": ("--tp 1 --pp 2 --parallel.vpp 2", [{EMBEDDING: 4, SENT: 5}, {SENT: 3}]),
    "accumulated": (
        f"--tp 1 --run.micro-batch-size 2 {' '.join(strategy('optim_grads'))}",
        [{EMBEDDING: 1, LAYERS: 4, HEAD: 1}],
    ),
}


@pytest.mark.parametrize("layout", list(OURS))
def test_parts_of_our_model_come_to_the_total(layout: str) -> None:
    flags, expected = OURS[layout]
    plan = plan_run(load_config([*MODEL, *flags.split()]), 2, "h100")
    assert [counts_of(memory) for memory in plan.memories] == expected
    assert plan.fullest.activations in [memory.activations for memory in plan.memories]


THEIRS: dict[str, tuple[dict[str, Any], list[dict[str, int]]]] = {
    "llama": ({}, [{EMBEDDING: 1, LAYERS: 4, HEAD: 1}]),
    "qwen3": ({"recompute": True}, [{EMBEDDING: 1, AGAIN: 4, HEAD: 1}]),
    "llama tp": ({"tp": 2, "sequence_parallel": "split_gather"}, [{EMBEDDING: 1, LAYERS: 4, HEAD: 1}]),
    "llama cp": ({"cp": 2, "sequence_parallel": "ring_attn"}, [{EMBEDDING: 1, LAYERS: 4, HEAD: 1}]),
    "qwen3 pp": (
        {"pp": 2, "micro_batch_size": 1},
        [{EMBEDDING: 2, LAYERS: 2, SENT: 2}, {"before the layers": 1, LAYERS: 2, HEAD: 1}],
    ),
    "gemma2": ({}, [{EMBEDDING: 1, "layers (sliding_attention)": 2, "layers (full_attention)": 2, HEAD: 1}]),
    "qwen3_moe ep": ({"ep": 2}, [{EMBEDDING: 1, "expert layers": 4, HEAD: 1}]),
}


@pytest.mark.parametrize("layout", list(THEIRS))
def test_parts_of_a_hugging_face_model_come_to_the_total(layout: str) -> None:
    pytest.importorskip("transformers")
    options, expected = THEIRS[layout]
    said = ModelRun(f"tiny:{layout.split()[0]}", sequence_length=64, global_batch_size=4, **options)
    plan = plan_run(said, 2, "h100")
    assert [counts_of(memory) for memory in plan.memories] == expected


@ranks(1, timeout_s=120)
@pytest.mark.parametrize(
    ("family", "options"),
    [
        *(("llama", {}), ("qwen3", {"recompute": True}), ("qwen3_moe", {}), ("ours", {})),
        ("ours", {"recompute_modules": ("layernorm", "mlp_act"), "recompute_num_layers": 3}),
    ],
)
@pytest.mark.in_suite(2)
def test_parts_come_to_what_a_forward_leaves(rank: int, world: int, family: str, options: dict[str, Any]) -> None:
    """To the byte. The plan of our model counts the labels, which this run had before."""
    job: GptJob | ModelJob
    if family == "ours":
        config = load_config([*MODEL, "--tp", "1"])
        granularity: Any = "selective" if options else None
        config = replace(config, model=replace(config.model, recompute_granularity=granularity, **options))
        run = run_of_job(config, world, on_cpu=True)
        job = GptJob(config, world)
    else:
        said = ModelRun(f"tiny:{family}", sequence_length=64, global_batch_size=4, **options)
        run = run_of_model(said, world, on_cpu=True)
        job = ModelJob(said, run)
    (planned,) = plan_memory(run)
    job.step()
    job.clear()
    model: Any = job.chunks[0]
    (batch,) = job.batches
    with LiveMemory(job.known()) as live:
        if isinstance(job, GptJob):
            loss = model(batch, labels=batch).mean()
        else:
            loss = job.loss(model(**job.arguments(batch)).logits.float(), labels=batch, num_items_in_batch=1.0)
        left = live.live
    assert loss.item() > 0
    left += batch.nbytes if family == "ours" else 0
    assert sum(saved.nbytes for saved in planned.activations) == left


@pytest.mark.parametrize(("flags", "tp", "cp"), [("--tp 1", 1, 1), ("--tp 2", 2, 1), ("--tp 1 --cp 2", 1, 2)])
def test_a_layer_that_is_computed_again_keeps_its_input_alone(flags: str, tp: int, cp: int) -> None:
    """In fp32 [sequences, tokens, hidden] of a rank's tokens."""
    config = load_config([*MODEL, *RECOMPUTED, *flags.split(), "--run.micro-batch-size", "2"])
    (again,) = (saved.each for saved in plan_run(config, 2, "h100").fullest.activations if saved.part == AGAIN)
    assert again == 4 * 2 * (64 // cp // tp) * 64


def test_norms_of_a_gpu_keep_their_input_alone() -> None:
    """In bf16, of a token: query, key, value and context; both norms' outputs; both sums; the MLP's four times as wide
    before and after its activation. In fp32 a number of each norm, and of each head. On a CPU norms keep fp32 too."""
    config = load_config([*MODEL, "--tp", "1", "--model.dtype", "bfloat16", "--run.micro-batch-size", "1"])
    on_gpu, on_cpu = (
        next(saved.each for saved in plan_run(config, 1, device).fullest.activations if saved.part == LAYERS)
        for device in ("h100", "laptop")
    )
    assert on_gpu == 64 * (2 * 64 * (4 + 2 + 2 + 2 * 4) + 4 * (2 + 4))
    assert on_cpu > on_gpu + 2 * 64 * 64 * 4


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_hugging_face_layer_that_is_computed_again_keeps_its_input_alone(
    dtype: Literal["float32", "bfloat16"],
) -> None:
    pytest.importorskip("transformers")
    said = ModelRun("tiny:llama", recompute=True, dtype=dtype, sequence_length=64, global_batch_size=4)
    (again,) = (saved.each for saved in plan_run(said, 2, "h100").fullest.activations if saved.part == AGAIN)
    assert again == 2 * 64 * 64 * {"float32": 4, "bfloat16": 2}[dtype]


def test_a_table_shows_the_parts_below_their_total() -> None:
    flags = [*MODEL, *RECOMPUTED, "--tp", "1", "--pp", "2", "--run.micro-batch-size", "2"]
    lines = plan_run(load_config(flags), 2, "h100").describe().splitlines()
    start = next(place for place, line in enumerate(lines) if line.startswith("activations"))
    rows = [re.split(r"\s\s+", line.strip()) for line in lines[start : start + 6]]
    assert (
        rows
        == [
            ["activations", "130.25 KiB", "226.63 KiB"],  # 2 x (33.125 + 32), 2 x 32 + 162.628
            ["microbatches in flight", "2", "1"],
            [EMBEDDING, "2 x 33.12 KiB"],
            [AGAIN, "2 x 32.00 KiB", "2 x 32.00 KiB"],
            [HEAD, "1 x 162.63 KiB"],
            ["working memory of a layer", *rows[5][1:]],
        ]
    )


DROPS = "--model.hidden-size 64 --model.num-attention-heads 4 --model.sequence-length 256 --model.dtype bfloat16"


def dropping(device: str, more: str) -> RankMemory:
    flags = f"{' '.join(MODEL)} {DROPS} --tp 1 --run.micro-batch-size 4 {more}"
    return plan_run(load_config(flags.split()), 1, device).fullest


def saved_by_layer(memory: RankMemory) -> int:
    (layer,) = {saved.each for saved in memory.activations if saved.part == LAYERS}
    return layer


def test_attention_drops_in_its_kernel_on_a_gpu_and_in_scores_on_a_cpu() -> None:
    """On a CPU torch keeps probabilities and what is dropped of them: [4 sequences, 4 heads, 256, 256]."""
    plain, dropped = ("", "--model.attention-dropout 0.1")
    assert saved_by_layer(dropping("h100", dropped)) == saved_by_layer(dropping("h100", plain))
    assert dropping("h100", dropped).peak == dropping("h100", plain).peak
    scores = 4 * 4 * 256 * 256
    assert saved_by_layer(dropping("laptop", dropped)) > saved_by_layer(dropping("laptop", plain)) + 2 * 2 * scores


@pytest.mark.parametrize(("device", "bytes_of_mask"), [("h100", 1), ("laptop", 2)])
def test_dropout_keeps_a_byte_an_element_on_a_gpu(device: str, bytes_of_mask: int) -> None:
    """Behind attention and behind the MLP; torch's dropout on a CPU keeps its mask in bfloat16."""
    more = saved_by_layer(dropping(device, "--model.hidden-dropout 0.1")) - saved_by_layer(dropping(device, ""))
    assert more == 2 * bytes_of_mask * (4 * 256 * 64)


def test_gpt2_with_its_own_dropout_needs_no_room_for_scores_on_a_gpu() -> None:
    """A real configuration of GPT-2 says attn_pdrop 0.1."""
    peaks = []
    for attn_pdrop in (0.1, 0.0):
        run = ModelRun("tiny:gpt2", dtype="bfloat16", sequence_length=512, global_batch_size=4, micro_batch_size=4)
        run.configuration.update({"attn_pdrop": attn_pdrop, "n_positions": 512})
        peaks.append(plan_run(run, 1, "h100").fullest.peak)
    assert peaks[0] == peaks[1]


def test_values_that_are_narrower_than_queries_need_no_room_for_scores_on_a_gpu() -> None:
    """Heads of DeepSeek-V3 have 192 numbers in queries and keys and 128 in values. [4 sequences, 4 heads, 512, 512]."""
    pytest.importorskip("transformers")
    run = ModelRun("tiny:deepseek_v3", dtype="bfloat16", sequence_length=512, global_batch_size=4, micro_batch_size=4)
    heads = {"qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8, "num_attention_heads": 4}
    run.configuration.update({**heads, "num_key_value_heads": 4})
    dense = [
        next(saved.each for saved in plan_run(run, 1, device).fullest.activations if saved.part == "dense layers")
        for device in ("h100", "laptop")
    ]
    assert dense[1] - dense[0] > 4 * 4 * 512 * 512 * 2  # bytes of the scores
