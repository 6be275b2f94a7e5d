"""The axes of a pipeline against each other, in layouts drawn so that every pair of values occurs; long, so nightly."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest

from core import parallel_state
from core.models import GPTModel
from core.pipeline_parallel import plan_pipeline
from tests.unit_tests.pipeline_parallel.pipeline_reference import build_whole, check_steps, full_name, start_pipeline
from tests.unit_tests.ranks import ranks

AXES: dict[str, tuple[Any, ...]] = {
    "schedule": ("GPipe", "1F1B", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"),
    "ranks": ((2, 1, 1), (2, 2, 1), (2, 1, 2), (2, 2, 2), (4, 1, 1), (4, 2, 1), (4, 1, 2)),  # pp, tp, dp
    "spread": ("even", "uneven"),
    "tied": (True, False),
    "positions": ("learned_absolute", "rope"),
    "per_token": (False, True),
    "recompute": (None, "full", "selective"),
    "fused": (False, True),
    "overlap": (False, True),
    "strategy": ("no_shard", "optim"),
    "extra_microbatches": (0, 2),
    "frozen": ("nothing", "first stage", "last stage"),
}


def covering_cases() -> list[dict[str, Any]]:
    """Greedy: the case that brings most pairs not seen yet, of some drawn at random, until every pair has occurred."""
    draw = random.Random(5)
    names = list(AXES)
    left = {
        (a, x, b, y)
        for a, b in itertools.combinations(names, 2)
        for x in range(len(AXES[a]))
        for y in range(len(AXES[b]))
    }
    cases = []
    while left:
        best: tuple[int, dict[str, int], set[Any]] = (-1, {}, set())
        seed = draw.choice(sorted(left))
        for _ in range(40):
            case = {name: draw.randrange(len(AXES[name])) for name in names}
            case[seed[0]], case[seed[2]] = seed[1], seed[3]
            brings = {(a, case[a], b, case[b]) for a, b in itertools.combinations(names, 2)} & left
            if len(brings) > best[0]:
                best = (len(brings), case, brings)
        left -= best[2]
        cases.append({name: AXES[name][value] for name, value in best[1].items()})
    return cases


def name_of(case: dict[str, Any]) -> str:
    return "-".join(str(value).replace(" ", "") for value in case.values())


def run(case: dict[str, Any]) -> None:
    pp, tp, _ = case["ranks"]
    schedule = case["schedule"]
    chunks = 2 if schedule not in ("GPipe", "1F1B") else 1
    stages = pp * chunks
    layers = [1] * stages
    if case["spread"] == "uneven":
        layers[0], layers[1] = 0, 2
    layout = plan_pipeline(sum(layers), pp, schedule=schedule, layers_per_stage=tuple(layers))
    count = stages + case["extra_microbatches"] * (stages // 2)
    model = {
        "share_embeddings_and_output_weights": case["tied"],
        "position_embedding_type": case["positions"],
        "num_attention_heads": 2,
    }
    config = {
        **model,
        "calculate_per_token_loss": case["per_token"],
        "recompute_granularity": case["recompute"],
        "gradient_accumulation_fusion": case["fused"],
        "sequence_parallel": tp > 1,
    }
    ddp = {
        "overlap_grad_reduce": case["overlap"],
        "data_parallel_sharding_strategy": case["strategy"],
        "bucket_size": 100,
    }
    whole = build_whole(num_layers=sum(layers), **model)
    stage = {"nothing": None, "first stage": layout.stage(0), "last stage": layout.stage(stages - 1)}[case["frozen"]]
    ends = {"first stage": ("embedding",), "last stage": ("decoder.final_", "output_layer")}.get(case["frozen"], ())
    prefixes = (*ends, *(f"decoder.layers.{number}." for number in (stage.layer_numbers if stage else ())))
    for name, param in whole.named_parameters():
        param.requires_grad_(not name.startswith(prefixes) if prefixes else True)
    trained = {name for name, param in whole.named_parameters() if param.requires_grad}

    def freeze(parts: list[GPTModel]) -> None:
        rank = parallel_state.get_pipeline_model_parallel_rank()
        for part, number in zip(parts, layout.stages_of(rank), strict=True):
            numbers = layout.stage(number).layer_numbers
            for name, param in part.named_parameters():
                param.requires_grad_(full_name(name, numbers, tied=case["tied"]) in trained)

    runner = start_pipeline(layout, schedule, tp=tp, config=config, ddp=ddp, prepare=freeze)
    check_steps(runner, whole, count, per_token=case["per_token"])


CASES = covering_cases()
BY_RANKS = {
    n: [case for case in CASES if case["ranks"][0] * case["ranks"][1] * case["ranks"][2] == n] for n in (2, 4, 8)
}


@pytest.mark.nightly
@ranks(2)
@pytest.mark.parametrize("case", BY_RANKS[2], ids=name_of)
def test_pairs_on_two_ranks(rank: int, world: int, case: dict[str, Any]) -> None:
    run(case)


@pytest.mark.nightly
@ranks(4)
@pytest.mark.parametrize("case", BY_RANKS[4], ids=name_of)
def test_pairs_on_four_ranks(rank: int, world: int, case: dict[str, Any]) -> None:
    run(case)


@pytest.mark.nightly
@ranks(8, timeout_s=120)
@pytest.mark.parametrize("case", BY_RANKS[8], ids=name_of)
def test_pairs_on_eight_ranks(rank: int, world: int, case: dict[str, Any]) -> None:
    run(case)
