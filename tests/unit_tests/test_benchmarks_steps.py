"""The harness of `python -m benchmarks steps`: its arithmetic, its gate, and arms that go wrong. Never its times."""

from __future__ import annotations

import math
import multiprocessing
from typing import Any

import pytest

from benchmarks.arms import all_arms
from benchmarks.interleave import Limits
from benchmarks.step_figures import deviation, formula_ratio, mean_over_ranks, ratio_by_round, ratio_of_medians, spread
from benchmarks.step_table import KEPT, table
from benchmarks.steps import TOLERANCE, Plan, chosen, faults, run_workload
from benchmarks.workloads import WORKLOADS

MODULES = ("benchmarks.arms_torch", "benchmarks.arms_core", "tests.unit_tests.benchmark_arms")


def test_a_spread_is_median_and_quartiles() -> None:
    found = spread([4.0, 1.0, 3.0, 2.0, 5.0])
    assert (found.low, found.median, found.high) == (2.0, 3.0, 4.0)
    with pytest.raises(ValueError, match="no value"):
        spread([])


def test_ratios_are_of_medians_and_of_neighbouring_turns() -> None:
    arm, baseline = [[2.0, 2.0, 9.0], [6.0, 6.0, 6.0]], [[1.0, 1.0, 1.0], [4.0, 4.0, 4.0]]
    assert ratio_of_medians(arm, baseline) == 6.0 / 2.5
    by_round = ratio_by_round(arm, baseline)
    assert (by_round.low, by_round.median, by_round.high) == (1.625, 1.75, 1.875)
    with pytest.raises(ValueError, match="2 rounds of the arm and 1 of the baseline"):
        ratio_by_round(arm, baseline[:1])
    assert mean_over_ranks([[1.0, 2.0], [3.0, 6.0]]) == [2.0, 4.0]


def test_losses_are_compared_step_by_step() -> None:
    assert deviation([1.0, 2.0, 4.0], [1.0, 2.0, 5.0]) == pytest.approx(0.2)
    assert deviation([1.0, math.nan], [1.0, 1.0]) == math.inf
    with pytest.raises(ValueError, match="1 losses against 2"):
        deviation([1.0], [1.0, 1.0])


def test_formulas_are_bytes_over_the_parameters() -> None:
    assert [formula_ratio(stage, 2) for stage in ("none", "no_shard", "optim")] == [4.0, 4.0, 3.0]
    assert formula_ratio("optim_grads", 4) == 1.75 and formula_ratio("optim_grads_params", 4) == 1.0


def test_the_formula_adds_what_a_loop_that_keeps_its_gradients_holds_beside_its_states() -> None:
    def row(name: str, stage: str, kind: str, peak: float) -> dict[str, Any]:
        empty = {"reason": "", "batch": 0, "deviation": None, "wall_s": [[1.0]], "cpu_s": [[1.0]]}
        memory = {"memory_before": [1000], "memory_peak": [1000 + int(peak * 4 * 100)]}
        return {"name": name, "stage": stage, "kind": kind, "outcome": "measured", **empty, **memory}

    rows = [row("no communication", "none", "floor", 5.0), row("core optim", "optim", "ours", 5.6)]
    about = dict.fromkeys(("torch", "machine", "date", "commit", "command"), "")
    result = {"workload": {"name": "w", "sizes": "", "numel": 100}, "rows": rows, "reference": [1.0]}
    result["baselines"] = [row("torch ddp", "no_shard", "peer", 6.6)]
    lines = table(result, 2, 1, TOLERANCE, about)
    assert [line.split()[-3:-1] for line in lines if line.startswith("core optim")] == [["5.60", "3.00"]]
    rows.append(row(KEPT, "none", "floor", 6.5))  # 2.5 beside its states
    lines = table(result, 2, 1, TOLERANCE, about)
    assert [line.split()[-3:-1] for line in lines if line.startswith("core optim")] == [["5.60", "5.50"]]
    assert KEPT in all_arms(MODULES)[0]


def test_arms_are_chosen_by_name_or_beginning() -> None:
    arms, missing = all_arms(MODULES)
    assert not missing and [arm.name for arm in chosen(["torch ddp"], arms)] == ["torch ddp"]
    assert [arm.name for arm in chosen(["core optim_g", "hangs"], arms)] == [
        "core optim_grads",
        "core optim_grads overlapped",
        "hangs",
    ]
    with pytest.raises(ValueError, match="no arm's name begins with 'nonsense'"):
        chosen(["nonsense"], arms)


def measured(names: list[str], limits: Limits) -> dict[str, Any]:
    # Forked from a server that has torch: a run starts a dozen processes, and each would import it.
    preload = ["torch", "torch._dynamo", "torch.distributed", "core"]
    multiprocessing.get_context("forkserver").set_forkserver_preload(preload)
    few: dict[str, Any] = {"rounds": 2, "steps_per_turn": 2, "memory_steps": 1, "at_once": 5}
    plan = Plan(**few, modules=MODULES, method="forkserver", limits=limits)
    return run_workload(WORKLOADS["test"], chosen(names, all_arms(MODULES)[0]), plan)


def test_wrong_arms_are_caught_and_right_ones_measured() -> None:
    result = measured(["core optim", "raises", "too fast", "not there"], Limits())
    rows = {row["name"]: row for row in result["rows"]}
    assert rows["core optim"]["outcome"] == "measured" and rows["core optim"]["deviation"] < 1e-6
    assert [len(turn) for turn in rows["core optim"]["wall_s"]] == [2, 2]
    assert rows["control: own gradients"]["outcome"] == rows["control: sum for mean"]["outcome"] == "caught"
    assert rows["control: sum for mean"]["deviation"] > TOLERANCE
    assert rows["too fast"]["outcome"] == "wrong loss" and rows["too fast"]["deviation"] > TOLERANCE
    assert rows["raises"]["outcome"] == "failed" and "this arm has a fault" in rows["raises"]["reason"]
    assert rows["not there"]["outcome"] == "absent" and "'no_such_package'" in rows["not there"]["reason"]
    assert not faults([result])
    about = dict.fromkeys(("torch", "machine", "date", "commit", "command"), "")
    text = "\n".join(table(result, 2, 1, TOLERANCE, about))
    assert "caught" in text and "core optim" in text and "this arm has a fault" in text
    rows["control: sum for mean"]["outcome"] = "NOT CAUGHT"
    rows["core optim"]["outcome"] = "wrong loss"
    assert len(faults([result])) == 2


@pytest.mark.nightly
def test_an_arm_that_hangs_or_dies_is_named_and_the_others_go_on() -> None:
    result = measured(["hangs", "dies", "torch ddp views"], Limits(step_s=3.0))
    rows = {row["name"]: row for row in result["rows"]}
    assert rows["hangs"]["outcome"] == "failed" and "rank" in rows["hangs"]["reason"]
    assert rows["dies"]["outcome"] == "failed" and "exit code 7" in rows["dies"]["reason"]
    assert rows["torch ddp views"]["outcome"] == "measured"
