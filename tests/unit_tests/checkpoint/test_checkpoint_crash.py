"""kill -9 of any rank at any named point of a save: the newest checkpoint is found bit-equal, and saving goes on."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from core.checkpoint.save_points import POINTS, reach, set_hook
from tests.unit_tests import ranks
from tests.unit_tests.checkpoint import checkpoint_crash_training
from tests.unit_tests.checkpoint.checkpoint_crash import LOST_A_PEER, Crash, Outcome, process_main, random_crashes
from tests.unit_tests.checkpoint.checkpoint_crash_training import KilledTraining, Resumed

ROOT = Path(__file__).parents[3]
NAMES = list(POINTS)
OF_EVERY_RANK = NAMES[: NAMES.index("before metadata")]
COMMITTED = NAMES[NAMES.index("after rename") :]


def outcomes_of(main: Callable[..., None], crashes: list[Any], folder: Path) -> list[Any]:
    """Run them in one process that forks their ranks."""
    context = ranks._the_pool().context  # its server has torch imported
    ours, theirs = context.Pipe()
    process = context.Process(target=main, args=(crashes, str(folder), theirs))
    process.start()
    theirs.close()
    found: list[Any] = []
    try:
        while (outcome := ours.recv() if ours.poll(150) else None) is not None:
            found.append(outcome)
    except EOFError:
        pass
    finally:
        process.kill()
        process.join()
    assert len(found) == len(crashes), f"ended after {found[-1:]}"
    return found


def assert_survived(outcome: Outcome, expected: int) -> None:
    victim = outcome.crash.victim
    assert outcome.exits[victim] == -9, f"{outcome.crash}: was never killed, {outcome}"
    assert outcome.exits[1 - victim] in (0, LOST_A_PEER), f"{outcome.crash}: {outcome}"
    assert not outcome.error, f"{outcome.crash}: {outcome}"
    assert outcome.found == expected, f"{outcome.crash}: found step {outcome.found}, step {expected} is the newest"
    assert outcome.newest == 3, f"{outcome.crash}: {outcome}"
    assert outcome.left == [".lock"], f"{outcome.crash}: the next save has left {outcome.left}"


@pytest.mark.timeout(400)
def test_a_rank_killed_at_any_point_leaves_the_newest_checkpoint_whole_and_the_next_save_works(in_memory: Path) -> None:
    crashes = [Crash(False, 0, point) for point in POINTS]
    crashes += [Crash(False, 1, point) for point in OF_EVERY_RANK]
    crashes += [
        Crash(True, 0, point) for point in ("half a file", "half a manifest", "after rename", "during deletion")
    ]
    crashes += [Crash(True, 1, point) for point in ("half a file", "before part")]
    for outcome in outcomes_of(process_main, crashes, in_memory):
        assert_survived(outcome, 2 if outcome.crash.point in COMMITTED else 1)


@pytest.mark.nightly
@pytest.mark.timeout(1200)
def test_a_rank_killed_at_any_moment_leaves_a_whole_checkpoint(tmp_path: Path) -> None:
    outcomes = outcomes_of(process_main, random_crashes(100, seed=3), tmp_path)
    for outcome in outcomes:
        assert outcome.found in (1, 2) and not outcome.error, outcome
        assert outcome.newest == 3 and outcome.left == [".lock"], outcome
    assert {outcome.found for outcome in outcomes} == {1, 2}, "all moments were too early, or too late"


def assert_resumed_exactly(resumed: Resumed) -> None:
    killed = resumed.killed
    assert resumed.exits[killed.victim] == -9 and resumed.exits[1 - killed.victim] == LOST_A_PEER, resumed
    assert resumed.exits_after == [0, 0], resumed
    assert resumed.started_at == ([4, 4] if killed.point in COMMITTED else [2, 2]), resumed
    assert resumed.equal, f"{killed}: parameters or moments differ from those of an unbroken run"


@pytest.mark.timeout(400)
@pytest.mark.nightly
def test_training_goes_on_bit_for_bit_after_a_rank_was_killed_in_a_save(tmp_path: Path) -> None:
    killed = [KilledTraining("half a file", 1, True, "optim"), KilledTraining("after rename", 0, False, "optim")]
    for resumed in outcomes_of(checkpoint_crash_training.process_main, killed, tmp_path):
        assert_resumed_exactly(resumed)


@pytest.mark.nightly
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("strategy", ["no_shard", "optim", "optim_grads"])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_training_goes_on_bit_for_bit_after_any_rank_was_killed_at_any_point(
    strategy: str, asynchronous: bool, tmp_path: Path
) -> None:
    cases = [(point, 0) for point in NAMES] + [(point, 1) for point in OF_EVERY_RANK]
    killed = [KilledTraining(point, victim, asynchronous, strategy) for point, victim in cases]
    for resumed in outcomes_of(checkpoint_crash_training.process_main, killed, tmp_path):
        assert_resumed_exactly(resumed)


def test_points_are_inert_unless_a_test_asks_and_a_wrong_name_is_an_error() -> None:
    reach("no such point", 0)  # no one listens: one comparison
    reached = []
    set_hook(lambda point, rank: reached.append((point, rank)))
    try:
        reach("before data", 3)
        with pytest.raises(ValueError, match="'no such point' is no point of a save; there are before data"):
            reach("no such point", 0)
    finally:
        set_hook(None)
    assert reached == [("before data", 3)]


def test_no_variable_of_the_environment_ends_a_save() -> None:
    sources = [path.read_text() for path in (ROOT / "core" / "checkpoint").rglob("*.py")]
    assert sources and not any("os.kill" in source or "environ" in source for source in sources)
