"""Five steps with GeminiPlugin equal one process on the same global batch."""

from typing import Any

import pytest

from core.booster import Booster
from core.booster.plugin import GeminiPlugin
from tests.unit_tests.booster.booster_reference import (
    BOUNDS,
    MAX_NORM,
    assert_same_training,
    train,
    trained_on_one_process,
)
from tests.unit_tests.ranks import ranks

SCALE = 2.0**10
TINY_CHUNKS = {"min_chunk_size_m": 0, "search_range_m": 0, "hidden_dim": 60}  # so that the model needs several


def new_booster(precision: str = "fp32", **options: Any) -> Booster:
    return Booster(plugin=GeminiPlugin(precision=precision, **{"initial_scale": SCALE, **TINY_CHUNKS, **options}))


def check(rank: int, world: int, precision: str, accumulate: int, clip: bool, **options: Any) -> Any:
    sync_all = options.pop("sync_all", False)
    inside = {"max_norm": MAX_NORM} if clip else {}
    booster = new_booster(precision, **inside, **options)
    model, optimizer, _ = train(booster, rank, accumulate, sync_all=sync_all)
    reference, norms = trained_on_one_process(world, accumulate, clip)
    assert_same_training(model, reference, BOUNDS[precision])
    assert optimizer.get_grad_norm() == pytest.approx(norms[-1], rel=10 * BOUNDS[precision])
    assert min(norms) > 1.2 * MAX_NORM, "clipping would change nothing"
    assert not optimizer.found_inf
    if precision == "fp16":
        assert optimizer.scaler.value == SCALE
    assert len(model.module.reducer.buckets) > 1
    return model


CASES = [
    ("fp32", 1, False, {}),
    ("fp32", 4, True, {"enable_async_reduce": False}),
    ("bf16", 4, True, {}),
    ("fp16", 1, True, {"enable_async_reduce": False}),
    ("fp32", 3, True, {"enable_gradient_accumulation": True}),
    ("fp16", 4, True, {"enable_gradient_accumulation": True}),
    ("fp32", 2, True, {"strict_ddp_mode": True}),
    ("fp32", 2, True, {"shard_param_frac": 0.0}),
]


@ranks(1, 3, nightly=(2,))
@pytest.mark.in_suite(1)
def test_five_steps_equal_one_process(rank: int, world: int) -> None:
    for precision, accumulate, clip, options in CASES:
        check(rank, world, precision, accumulate, clip, **options)
