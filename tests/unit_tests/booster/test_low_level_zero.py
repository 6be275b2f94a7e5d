"""Five steps with LowLevelZeroPlugin equal one process on the same global batch."""

from typing import Any

import pytest

from core.booster import Booster
from core.booster.plugin import LowLevelZeroPlugin
from tests.unit_tests.booster.booster_reference import (
    BOUNDS,
    MAX_NORM,
    assert_same_training,
    train,
    trained_on_one_process,
)
from tests.unit_tests.ranks import ranks

SCALE = 2.0**10  # from 2**32 the first steps overflow and are skipped, as another test wants it
TINY_BUCKETS = 60 / 1024**2  # elements, so that the model needs several


def new_booster(stage: int, precision: str, **options: Any) -> Booster:
    options = {"initial_scale": SCALE, "reduce_bucket_size_in_m": TINY_BUCKETS, **options}
    return Booster(plugin=LowLevelZeroPlugin(stage, precision, **options))


def check(rank: int, world: int, stage: int, precision: str, accumulate: int, clip: bool, **options: Any) -> None:
    sync_all = options.pop("sync_all", False)
    inside = {"max_norm": MAX_NORM} if clip else {}
    booster = new_booster(stage, precision, **inside, **options)
    model, optimizer, _ = train(booster, rank, accumulate, sync_all=sync_all)
    reference, norms = trained_on_one_process(world, accumulate, clip)
    assert_same_training(model, reference, BOUNDS[precision])
    assert optimizer.get_grad_norm() == pytest.approx(norms[-1], rel=10 * BOUNDS[precision])
    assert min(norms) > 1.2 * MAX_NORM, "clipping would change nothing"
    assert not optimizer.found_inf
    assert (optimizer.scaler is None) == (precision != "fp16")
    if precision == "fp16":
        assert optimizer.scaler.value == SCALE
    assert len(booster_buckets(model)) > 1 or (stage == 1 and not options.get("overlap_communication", True))


def booster_buckets(model: Any) -> list[Any]:
    return model.module.reducer.buckets


CASES = [
    (1, "fp32", 1, False, {}),
    (1, "fp32", 4, True, {"overlap_allgather": True}),
    (1, "bf16", 4, True, {}),
    (1, "fp16", 1, True, {"overlap_communication": False}),
    (2, "fp32", 4, True, {}),
    (2, "fp32", 4, False, {"reduce_microbatches": "every", "overlap_communication": False}),
    (2, "bf16", 1, False, {"overlap_allgather": True}),
    (2, "fp16", 4, True, {"reduce_microbatches": "every"}),
]


@ranks(1, 3, nightly=(2,))
@pytest.mark.parametrize("case", range(0, len(CASES), 4))
def test_five_steps_equal_one_process(rank: int, world: int, case: int) -> None:
    for stage, precision, accumulate, clip, options in CASES[case : case + 4]:
        check(rank, world, stage, precision, accumulate, clip, **options)


@pytest.mark.nightly
@ranks(1, 3, nightly=(2, 4), timeout_s=120.0)
@pytest.mark.parametrize("clip", [False, True], ids=["whole", "clipped"])
@pytest.mark.parametrize("accumulate", [1, 4])
@pytest.mark.parametrize("precision", BOUNDS)
@pytest.mark.parametrize("stage", [1, 2])
def test_five_steps_equal_one_process_in_all_combinations(
    rank: int, world: int, stage: int, precision: str, accumulate: int, clip: bool
) -> None:
    for overlap in (True, False):
        options = {"overlap_communication": overlap, "overlap_allgather": overlap}
        check(rank, world, stage, precision, accumulate, clip, **options)
        if stage == 2:
            check(rank, world, stage, precision, accumulate, clip, reduce_microbatches="every", **options)
