"""The main job over every axis: the losses of one process with torch's own optimizer, and the options that say it."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("tyro")

from core_plan.job.config_file import load_config
from core_plan.job.plan import plan_job
from core_train.job import build_trainer, job_tokens, start_groups
from tests.unit_tests.core_train.training_reference import (
    CPU,
    REPLICATED,
    TINY,
    losses_of_a_plain_loop,
    losses_on_ranks,
)
from tests.unit_tests.ranks import ranks

STEPS = 4
FEW_STEPS = [*TINY, "--run.steps", str(STEPS), "--optimizer.warmup-steps", "2"]
# A large coefficient, so that a wrong scale of the auxiliary loss is seen; four layers, so that they can be cut.
EXPERTS = ["--model.num-experts", "4", "--model.moe-aux-loss-coeff", "0.5", "--model.num-layers", "4"]
SHARED = ["--model.moe-shared-expert-intermediate-size", "16", "--model.moe-z-loss-coeff", "1e-2"]


@pytest.mark.parametrize(
    ("world", "model", "layout"),
    [
        (4, [], "--tp 1 --cp 2 --run.micro-batch-size 1"),
        pytest.param(4, [], "--tp 2 --cp 2 --parallel.cp-comm-type all_gather", marks=pytest.mark.nightly),
        (4, [], "--tp 1 --cp 2 --pp 2 --parallel.cp-comm-type a2a"),
        (2, EXPERTS, "--tp 1 --ep 2 --run.micro-batch-size 1"),
        (4, EXPERTS, "--tp 2 --ep 4 --etp 1 --model.moe-token-dispatcher-type allgather"),
        (4, [*EXPERTS, *SHARED], "--tp 2 --pp 2 --vpp 2"),
        (4, EXPERTS, "--tp 1 --cp 2 --ep 2 --run.micro-batch-size 2"),
        pytest.param(
            4, EXPERTS, "--tp 1 --pp 2 --ep 2 --schedule InterleavedZeroBubble --vpp 2", marks=pytest.mark.nightly
        ),
        pytest.param(8, EXPERTS, "--tp 2 --pp 2 --ep 2 --parallel.order tp-cp-ep-dp-pp", marks=pytest.mark.nightly),
    ],
)
@pytest.mark.in_suite(2)
def test_the_losses_are_those_of_one_process(
    tmp_path: Path, text_flags: list[str], world: int, model: list[str], layout: str
) -> None:
    common = [*FEW_STEPS, *text_flags, *model]
    expected = losses_of_a_plain_loop(load_config([*common, "--parallel.tp", "1"]), STEPS)
    assert expected[0] - expected[-1] > 0.1, "the losses must move by far more than the bound"
    losses = losses_on_ranks(world, [*common, *layout.split()], tmp_path, timeout_s=120.0)
    assert losses == pytest.approx(expected, abs=2e-5, rel=0)


def test_the_auxiliary_loss_moves_the_losses_by_far_more_than_the_bound(text_flags: list[str]) -> None:
    common = [*FEW_STEPS, *text_flags, *EXPERTS, "--parallel.tp", "1"]
    with_loss = losses_of_a_plain_loop(load_config(common), STEPS)
    without = losses_of_a_plain_loop(load_config([*common, "--model.moe-aux-loss-coeff", "0"]), STEPS)
    assert abs(with_loss[-1] - without[-1]) > 1e-4


@ranks(4)
def test_validation_with_shared_experts_needs_no_even_number_of_windows(
    rank: int, world: int, text_flags: list[str]
) -> None:
    """Three windows over four data ranks that hold one expert each: no rank may leave the others' exchange."""
    flags = [*FEW_STEPS, *text_flags, *EXPERTS, "--tp", "1", "--ep", "4", "--run.validation-windows", "3", *REPLICATED]
    config = load_config([*flags, "--data.validation-fraction", "0.1"])
    plan = plan_job(config, world)
    start_groups(config, plan)
    tokens = job_tokens(config, rank == 0)
    loss = build_trainer(config, plan, tokens, CPU).validation_loss()
    assert loss == pytest.approx(5.5, abs=0.3)


def test_short_flags_stand_for_the_parallel_sizes() -> None:
    sizes = ["--tp", "1", "--pp=2", "--vpp", "2", "--cp", "2", "--ep", "4", "--etp", "2", "--dp", "3"]
    parallel = load_config([*sizes, "--schedule", "GPipe"]).parallel
    assert (parallel.tp, parallel.pp, parallel.vpp, parallel.cp, parallel.dp) == (1, 2, 2, 2, 3)
    assert (parallel.ep, parallel.etp, parallel.schedule) == (4, 2, "GPipe")


def test_the_schedule_follows_the_stages_of_a_rank_unless_it_is_named() -> None:
    assert load_config([]).parallel.schedule_name == "1F1B"
    assert load_config(["--pp", "2", "--vpp", "2"]).parallel.schedule_name == "Interleaved1F1B"
    listed = ["--parallel.layers-per-stage", "1", "1", "1", "1"]
    assert load_config(["--pp", "2", *listed]).parallel.schedule_name == "Interleaved1F1B"
    assert load_config(["--pp", "2", "--schedule", "gpipe"]).parallel.schedule_name == "gpipe"
