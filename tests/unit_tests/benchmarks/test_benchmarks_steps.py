"""The harness of `python -m benchmarks steps`: its arithmetic, its gate, and arms that go wrong. Never its times."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable
from dataclasses import asdict
from statistics import fmean
from typing import Any

import pytest

from benchmarks.arms import all_arms
from benchmarks.interleave import Limits
from benchmarks.new_process import in_new_process
from benchmarks.step_figures import (
    Spread,
    deviation,
    figures_of,
    formula_ratio,
    mean_over_ranks,
    over_starts,
    ratio_by_round,
    ratio_of_medians,
    spread,
)
from benchmarks.step_plan import RANK_BYTES, TOLERANCE, Plan, arm_bytes, batches_of
from benchmarks.step_start import measure_start, reference_and_controls
from benchmarks.step_summary import MEMORY_AIM, aims_of, as_values, summary
from benchmarks.step_table import KEPT, table
from benchmarks.steps import chosen, faults, parser, run_workload
from benchmarks.workloads import WORKLOADS

MODULES = ("benchmarks.arms_torch", "benchmarks.arms_core", "tests.unit_tests.benchmarks.benchmark_arms")


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
    assert formula_ratio("optim_grads_params", 4, 0.25) == 1.5  # two buckets of parameters and two of gradients
    assert WORKLOADS["gpt10m"].passing_numel(2) / WORKLOADS["gpt10m"].numel() == pytest.approx(0.27, abs=0.01)


def row(name: str, wall: list[list[float]], **given: Any) -> dict[str, Any]:
    """A row as in the JSON. wall: [start][step], all in one round of batch 0; processor time is a tenth of it."""
    turns = [
        {
            "start": start,
            "batch": 0,
            "wall_s": [steps],
            "cpu_s": [[0.1 * step for step in steps]],
            "deviation": 1e-7,
            "memory_before": [1000, 1000],
            "memory_peak": [1000 + int(given.get("peak", 5) * 400)] * 2,
        }
        for start, steps in enumerate(wall)
    ]
    made = {"name": name, "stage": "no_shard", "kind": "peer", "outcome": "measured", "reason": "", "starts": turns}
    return made | {key: value for key, value in given.items() if key != "peak"}


def result_of(*rows: dict[str, Any], name: str = "w", accumulation: int = 1) -> dict[str, Any]:
    """A workload of 100 parameters, on which torch DDP takes a second."""
    baseline = row("torch ddp", [[1.0]] * len(rows[0]["starts"]), peak=6.5)
    plan = {"ranks": 2, "accumulation": accumulation, "starts": len(rows[0]["starts"]), "steps_per_turn": 3}
    workload = {"name": name, "sizes": "", "numel": 100}
    run = {"workload": workload, "plan": plan, "rounds": 1, "batches": [[]], "took_s": 90.0}
    return run | {"rows": [*rows], "baseline": baseline}


ABOUT = {"torch": "2", "machine": "m", "date": "2026-11-21", "commit": "c", "command": "python -m benchmarks steps"}


def test_figures_are_medians_over_starts_and_ratios_are_within_a_start_and_batch() -> None:
    arm = row("core optim", [[2.0, 2.0, 9.0], [3.0], [8.0]], peak=5.6)
    baseline = row("torch ddp", [[1.0], [2.0], [4.0]])
    found = figures_of(arm, baseline, 100)
    assert found is not None and (found.wall_ms, found.steps) == (3000.0, 5)
    assert found.ratio == Spread(1.5, 2.0, 2.0)  # 2 / 1, 3 / 2, 8 / 4
    assert found.cpu_ms == pytest.approx(300.0) and found.cpu_ratio is not None
    assert found.cpu_ratio.median == pytest.approx(2.0) and found.peak == 5.6
    # The baseline ran in two batches of the second start: the arm's is the one of its own batch.
    baseline["starts"].append(row("torch ddp", [[30.0]])["starts"][0] | {"start": 1, "batch": 1})
    assert figures_of(arm, baseline, 100).ratio == Spread(1.5, 2.0, 2.0)  # type: ignore[union-attr]
    arm["starts"][1]["batch"] = 1
    assert figures_of(arm, baseline, 100).ratio == Spread(0.1, 2.0, 2.0)  # type: ignore[union-attr]
    own = figures_of(baseline, baseline, 100)
    assert own is not None and own.ratio is None and own.wall_ms == 4000.0  # of 1, 16 and 4
    assert figures_of(arm | {"outcome": "failed"}, baseline, 100) is None
    with pytest.raises(ValueError, match="no start"):
        over_starts([])


def test_the_formula_adds_what_a_loop_that_keeps_its_gradients_holds_next_to_its_states() -> None:
    floor = row("no communication", [[1.0]], peak=5.0, stage="none", kind="floor")
    result = result_of(floor, row("core optim", [[1.0]], peak=5.6, stage="optim", kind="ours"))

    def peak_and_formula() -> list[str]:
        return next(line.split()[-4:-2] for line in table(result, ABOUT) if line.startswith("core optim"))

    assert peak_and_formula() == ["5.60", "3.00"]
    result["rows"].append(row(KEPT, [[1.0]], peak=6.5, stage="none", kind="floor"))  # 2.5 next to its states
    assert peak_and_formula() == ["5.60", "5.50"]
    assert KEPT in all_arms(MODULES)[0]


def test_the_table_fits_a_terminal_and_says_what_was_not_measured() -> None:
    arms = all_arms()[0]
    rows = [row(name, [[12.0, 13.0]] * 3, stage=arm.stage, kind="peer") for name, arm in arms.items()]
    rows[0] |= {"outcome": "absent", "reason": "the package 'p' is not installed"}
    rows[1] |= {"kind": "control", "outcome": "NOT CAUGHT"}
    command = " ".join(["python -m benchmarks steps --arms", *arms])
    lines = table(result_of(*rows), ABOUT | {"command": command})
    assert not [line for line in lines if len(line) > 120]
    assert any("commit c; took 1.5 min" in line for line in lines)
    assert any("absent: the package 'p' is not installed" in line for line in lines)
    assert any(line.startswith(rows[1]["name"]) and "NOT CAUGHT (loss 1.0e-07)" in line for line in lines)
    shown = " ".join(line.removesuffix(" \\").strip() for line in lines)
    assert command in shown


def test_an_aim_is_judged_by_the_better_setting_and_next_to_the_best_peer_of_the_stage() -> None:
    ours = {"stage": "optim", "kind": "ours"}
    rows = [
        row(KEPT, [[1.0]], peak=6.0, stage="none", kind="floor"),  # the formula of optim is 5
        row("core optim", [[0.9]], peak=5.2, **ours),
        row("core optim overlapped", [[0.8]], peak=5.4, **ours),
        row("core optim over sockets", [[0.1]], peak=1.0, **ours),
        row("sketch", [[0.78]], peak=5.3, stage="optim"),
        row("torch zero1", [[0.9]], peak=5.5, stage="optim"),
    ]
    time, memory = aims_of(result_of(*rows))
    assert (time.aim, time.found, time.setting, time.met) == (0.85, 0.8, "core optim overlapped", True)
    assert "met, 0.05 below" in time.line() and "NOT below sketch, 0.78" in time.line()
    assert (memory.aim, memory.found, memory.setting, memory.met) == (5.25, 5.2, "core optim", True)
    assert "met, 0.05 below" in memory.line() and "; below sketch, 5.30" in memory.line()
    time, _ = aims_of(result_of(*rows, name="tiny"))
    assert (time.aim, time.met) == (0.77, False) and "missed by 0.03" in time.line()
    time, _ = aims_of(result_of(*rows, accumulation=4))
    assert time.aim == 0.97
    (time,) = aims_of(result_of(*rows[1:2]))  # no formula without the floor, and no peer
    assert time.peer_found is None and time.line().endswith("(core optim)")
    assert aims_of(result_of(rows[0])) == []
    failed = result_of(*rows)
    failed["baseline"] |= {"outcome": "failed", "starts": []}
    assert [aim.what for aim in aims_of(failed)] == ["memory"]  # there is nothing that times are a ratio to


def test_sharded_parameters_are_judged_as_mapped_as_over_gloo_and_next_to_sharded_optimizers() -> None:
    params = {"stage": "optim_grads_params"}
    rows = [
        row("core optim", [[0.9]], peak=4.0, stage="optim", kind="ours"),
        row("core optim_grads_params", [[0.9]], peak=2.1, kind="ours", **params),
        row("core optim_grads_params gloo", [[1.2]], peak=2.3, kind="ours", **params),
        row("fsdp2 resharded", [[1.3]], peak=5.0, **params),
    ]
    found = {name: aims_of(result_of(*rows, name=name)) for name in ("tiny", "gpt51m")}
    aims = {name: [(aim.setting, aim.aim, aim.met) for aim in of[1:]] for name, of in found.items()}
    gloo = ("core optim_grads_params gloo", 1.15, False)
    assert aims["tiny"] == [("core optim_grads_params", 0.88, False), gloo]
    assert aims["gpt51m"] == [("core optim_grads_params", 0.85, False), gloo]
    assert found["tiny"][2].line().endswith("; below fsdp2 resharded, 1.30")
    result = result_of(*rows, name="gpt51m")
    result["plan"]["ranks"] = 4
    share = aims_of(result)[2]
    assert (share.what, share.peer, share.met) == ("memory", "core optim", True) and share.aim == pytest.approx(2.2)


def test_the_summary_has_a_line_an_arm_and_a_column_a_workload() -> None:
    absent = row("deepspeed zero 1", [], stage="optim", outcome="absent")
    first = result_of(row("core no_shard", [[0.8], [0.9]], kind="ours"), absent)
    second = result_of(row("core optim", [[0.7]], stage="optim", kind="ours"), name="tiny")
    lines = [re.split(r"\s{2,}", line) for line in summary([first, second])]
    assert lines == [
        ["ratio to torch ddp (of cpu)", "w", "tiny"],
        ["torch ddp", "1000.0 ms", "1000.0 ms"],
        ["core no_shard", "0.85 (0.85)", "not run"],
        ["deepspeed zero 1", "absent", "not run"],
        ["core optim", "not run", "0.70 (0.70)"],
    ]
    values = as_values([first, second])
    assert values["figures"]["w"]["core no_shard"]["ratio"]["median"] == pytest.approx(0.85)
    assert [(aim["workload"], aim["stage"], aim["met"]) for aim in values["aims"]] == [
        ("w", "no_shard", True),
        ("tiny", "optim", True),
    ]


def test_a_slow_arm_is_given_fewer_steps_and_batches_are_as_large_as_memory_allows() -> None:
    plan = Plan(steps_per_turn=3, turn_s=4.0)
    assert [plan.counted_steps(step_s) for step_s in (0.1, 1.3, 1.4, 2.1, 60.0)] == [3, 3, 2, 1, 1]
    arms, workload = all_arms()[0], WORKLOADS["gpt51m"]
    baseline, others = arms["torch ddp"], [arms[name] for name in ("core optim", "deepspeed zero 3", "sketch")]
    numel = workload.numel()
    each = 2 * (RANK_BYTES + 6 * 4 * numel)
    assert arm_bytes(baseline, numel, 2) == each and arm_bytes(others[1], numel, 2) > 1.25 * each
    for limit, wanted in ((9 * each, [3]), (3.5 * each, [2, 1]), (2.6 * each, [1, 1, 1])):
        batches = batches_of(others, baseline, workload, 2, limit)
        assert [len(batch) - 1 for batch in batches] == wanted
        assert all(batch[0] is baseline for batch in batches)
        assert [arm for batch in batches for arm in batch[1:]] == others
    assert batches_of([], baseline, workload, 2, 1e12) == [[baseline]]
    with pytest.raises(ValueError, match="'core optim' and 'torch ddp' need about .* GiB together on gpt51m"):
        batches_of(others, baseline, workload, 2, 1.9 * each)


def test_arms_are_chosen_by_name_or_beginning() -> None:
    arms, missing = all_arms(MODULES)
    assert not missing and [arm.name for arm in chosen(["torch ddp"], arms)] == ["torch ddp"]
    assert [arm.name for arm in chosen(["core optim_g", "hangs"], arms)] == [
        "core optim_grads",
        "core optim_grads overlapped",
        "core optim_grads_params",
        "core optim_grads_params gloo",
        "hangs",
    ]
    with pytest.raises(ValueError, match="no arm's name begins with 'nonsense'"):
        chosen(["nonsense"], arms)


def directly(function: Callable[..., Any], *arguments: Any) -> Any:
    """In this process, whose server has torch already: a new one would import it twice."""
    return function(*arguments)


def measured(names: list[str], **given: Any) -> dict[str, Any]:
    # memory: for the baseline and three more.
    few: dict[str, Any] = {"rounds": 2, "steps_per_turn": 2, "memory_bytes": 1.05e9}
    return run_workload(
        WORKLOADS["test"], chosen(names, all_arms(MODULES)[0]), Plan(**few | given, modules=MODULES), directly
    )


@pytest.mark.nightly
def test_wrong_arms_are_caught_and_right_ones_measured_in_every_start() -> None:
    result = measured(["core optim", "raises", "too fast", "not there", "sketch"], starts=2)
    rows = {row["name"]: row for row in result["rows"]}
    assert [[len(turn) for turn in turns["wall_s"]] for turns in rows["core optim"]["starts"]] == [[2, 2], [2, 2]]
    for name in ("core optim", "sketch"):
        assert rows[name]["outcome"] == "measured" and [turns["start"] for turns in rows[name]["starts"]] == [0, 1]
        assert all(turns["deviation"] < 1e-6 and min(turns["memory_peak"]) > 0 for turns in rows[name]["starts"])
    assert [len(turns["losses"]) for turns in rows["core optim"]["starts"]] == [5, 4]
    assert rows["control: own gradients"]["outcome"] == rows["control: sum for mean"]["outcome"] == "caught"
    assert rows["control: sum for mean"]["starts"][0]["deviation"] > TOLERANCE
    assert rows["too fast"]["outcome"] == "wrong loss" and rows["too fast"]["starts"][0]["deviation"] > TOLERANCE
    assert rows["raises"]["outcome"] == "failed" and "this arm has a fault" in rows["raises"]["reason"]
    assert len(rows["raises"]["starts"]) == 1  # it is left out of the second
    assert rows["not there"]["outcome"] == "absent" and "'no_such_package'" in rows["not there"]["reason"]
    assert KEPT in rows and len(result["batches"]) == 2 and all(names[0] == "torch ddp" for names in result["batches"])
    assert [(turns["start"], turns["batch"]) for turns in result["baseline"]["starts"]] == [
        (0, 0),
        (0, 1),
        (1, 0),
        (1, 1),
    ]
    assert not faults([result])
    text = "\n".join(table(result, ABOUT))
    assert "caught" in text and "core optim" in text and "this arm has a fault" in text
    rows["control: sum for mean"]["outcome"] = "NOT CAUGHT"
    rows["core optim"]["outcome"] = "wrong loss"
    assert len(faults([result])) == 2


@pytest.mark.nightly
def test_an_arm_that_hangs_or_dies_is_named_and_the_others_go_on() -> None:
    result = measured(["hangs", "dies", "torch ddp views"], starts=1, limits=Limits(step_s=3.0))
    rows = {row["name"]: row for row in result["rows"]}
    assert rows["hangs"]["outcome"] == "failed" and "rank" in rows["hangs"]["reason"]
    assert rows["dies"]["outcome"] == "failed" and "exit code 7" in rows["dies"]["reason"]
    assert rows["torch ddp views"]["outcome"] == "measured"


def test_a_start_is_a_process_of_its_own_and_what_fails_in_it_is_reported() -> None:
    assert in_new_process(os.getpid) not in (os.getpid(), in_new_process(os.getpid))
    with pytest.raises(RuntimeError, match="No such file or directory: '/no/such'"):
        in_new_process(os.listdir, "/no/such")
    with pytest.raises(RuntimeError, match="posix._exit, in a process of its own: its process ended with exit code 9"):
        in_new_process(os._exit, 9)


@pytest.mark.parametrize("option", ["--starts", "--rounds", "--steps-per-turn", "--ranks", "--accumulation"])
def test_counts_are_at_least_one(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parser().parse_args([option, "0"])
    assert "0, and it has to be at least 1" in capsys.readouterr().err


def peaks(name: str, ranks: int) -> dict[str, float]:
    """What a rank takes at its peak over the parameters. Of more steps than a table has, so that no peak is missed."""
    workload = WORKLOADS[name]
    plan = Plan(ranks=ranks, starts=1, rounds=0, gate_steps=8, memory_steps=6, modules=MODULES[:2])
    reference, _ = reference_and_controls(workload, plan)
    arms = [[KEPT, "core optim", "core optim_grads_params"]]
    found = {turns.name: asdict(turns) for turns in in_new_process(measure_start, workload, arms, reference, plan, 0)}
    assert {turns["outcome"] for turns in found.values()} == {"measured"}, found
    grown = {arm: zip(turns["memory_peak"], turns["memory_before"], strict=True) for arm, turns in found.items()}
    return {arm: fmean(peak - before for peak, before in of) / (4 * workload.numel()) for arm, of in grown.items()}


@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("name", "ranks"), [("gpt10m", 2), ("gpt10m", 4), ("gpt51m", 4)])
def test_the_peak_with_sharded_parameters_is_the_formulas_and_little_over_half_of_a_sharded_optimizers(
    name: str, ranks: int
) -> None:
    """Of 51 M parameters on 4 ranks the share was 0.53 to 0.56 on a busy machine; the aim is PARAMS_OVER_OPTIM."""
    found, workload = peaks(name, ranks), WORKLOADS[name]
    passing = workload.passing_numel(ranks) / workload.numel()
    bytes_without_states = found[KEPT] - formula_ratio("none", 1)
    formula = formula_ratio("optim_grads_params", ranks, passing) + bytes_without_states
    ours = found["core optim_grads_params"]
    assert 0.7 * formula < ours < MEMORY_AIM * formula, (found, formula)
    assert name != "gpt51m" or ours < 0.58 * found["core optim"], found
