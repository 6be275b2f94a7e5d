"""The benchmark of files: which arms it refuses, its table, and one tiny run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import tiers
from benchmarks.__main__ import main
from benchmarks.arms import all_arms
from benchmarks.step_plan import Turns


def turns(name: str, start: int, wall_s: list[list[float]], grown: int) -> Turns:
    """Turns in which processor time is half of the time."""
    cpu_s = [[step / 2 for step in steps] for steps in wall_s]
    before = [1_000_000, 2_000_000]
    peaks = [1_000_000 + grown, 2_000_000 + grown]
    return Turns(name, start, 0, losses=[3.0, 2.5], wall_s=wall_s, cpu_s=cpu_s, memory_before=before, memory_peak=peaks)


def all_turns() -> list[Turns]:
    """Two starts of two rounds; in the second start everything takes twice as long."""
    found = []
    for number, name in enumerate(tiers.FRACTIONS):
        for start in (0, 1):
            slow = (start + 1) * (1 + number / 10)
            found.append(turns(name, start, [[slow, slow], [slow, 3 * slow]], 5_000_000 - number * 1_000_000))
    return found


def test_an_arm_that_failed_or_has_other_losses_and_an_uncaught_control_are_named() -> None:
    found = all_turns()
    tiers.refuse_wrong([Turns("control", 0, 0, outcome="caught"), *found])
    with pytest.raises(RuntimeError, match="in files: control: NOT CAUGHT"):
        tiers.refuse_wrong([Turns("control", 0, 0, outcome="NOT CAUGHT"), *found])
    found[4].outcome, found[4].reason = "failed", "rank 1 says why"
    with pytest.raises(RuntimeError, match="in files: moments, parameters: failed rank 1 says why"):
        tiers.refuse_wrong(found)
    found[4].outcome, found[4].losses = "measured", [3.0, 2.5 + 2.0**-40]
    with pytest.raises(RuntimeError, match=r"in files: moments, parameters: losses .*, in RAM \[3.0, 2.5\]"):
        tiers.refuse_wrong(found)


def test_ratios_are_of_a_round_and_memory_is_what_a_rank_has_grown_by() -> None:
    found = all_turns()
    found[2].wall_s[0] = [2.0, 2.0]  # of the first start's first round, in which the arm in RAM took 1
    lines = tiers.table(tiers.rows_of(found))
    assert lines[2] == "| nothing | 2000 ms | 1.00 | 1.00, 1.00 | 1000 ms | 1.00 | 1.00, 1.00 | 5 MB |"
    assert lines[3] == "| moments | 2200 ms | 1.10 | 1.10, 2.00 | 1100 ms | 1.10 | 1.10, 1.10 | 4 MB |"
    assert len(lines) == 2 + len(tiers.FRACTIONS)


def test_arms_are_known_to_the_ranks_and_say_what_lies_in_files() -> None:
    arms, missing = all_arms(tiers.MODULES)
    assert not missing and {arms[name].stage for name in tiers.FRACTIONS} == {"optim_grads_params"}
    assert tiers.FRACTIONS[tiers.IN_RAM] == {} and next(iter(tiers.FRACTIONS)) == tiers.IN_RAM


@pytest.mark.parametrize("wrong", ["--ranks", "--starts", "--rounds"])
def test_nothing_to_measure_is_refused(wrong: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["tiers", wrong, "0"])
    assert f"{wrong} 0: expected at least 1" in capsys.readouterr().err


@pytest.mark.nightly
def test_a_tiny_run_has_every_arm(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "tiers.json"
    assert main(["tiers", "--workloads", "test", "--starts", "1", "--rounds", "2", "--json", str(path)]) == 0
    printed = capsys.readouterr().out
    assert all(f"| {name} |" in printed for name in tiers.FRACTIONS)
    results = json.loads(path.read_text())["results"]["test"]
    assert [row["in_files"] for row in results["rows"]] == list(tiers.FRACTIONS)
    assert all(row[clock]["median"] > 0 for row in results["rows"] for clock in tiers.CLOCKS)
    assert len({str(turn["losses"]) for turn in results["turns"]}) == 1
