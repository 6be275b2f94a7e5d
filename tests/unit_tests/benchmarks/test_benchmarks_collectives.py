"""The table of collectives: every way is checked before it is timed, and the check can fail."""

from __future__ import annotations

import pytest
import torch

from benchmarks.collectives import Arms, measure, table
from tests.unit_tests.ranks import ranks


@ranks(3, nightly=(2,))
@pytest.mark.nightly
def test_every_way_gives_the_sum_and_is_timed(rank: int, world: int) -> None:
    rows = measure(300, rank, world, repeat=2)
    assert {row["kind"] for row in rows} == {"reduce-scatter", "all-reduce", "all-gather"}
    assert sum(row["name"] == "mapped memory" for row in rows) == 3
    assert all(len(row["ms"]) == 2 and min(row["ms"]) > 0 for row in rows)


@ranks(2)
def test_a_way_that_gives_another_result_is_refused(rank: int, world: int) -> None:
    arms = Arms(10, rank, world)
    with pytest.raises(ValueError, match="all-reduce by nothing gives another result"):
        arms.check("all-reduce", "nothing", arms.full, lambda: None)
    part = torch.arange(10.0)[arms.mine] * 3

    def by_hand() -> None:
        arms.full[arms.mine].copy_(part)

    arms.check("reduce-scatter", "by hand", arms.full, by_hand)


def test_the_table_has_a_line_a_way_and_a_column_a_size() -> None:
    rows = [
        {"ranks": 2, "mib": mib, "kind": "all-gather", "name": name, "ms": [1.0, 2.0, 9.0]}
        for mib in (1, 16)
        for name in ("a", "b")
    ]
    lines = table([*rows, {"ranks": 4, "mib": 1, "kind": "all-gather", "name": "a", "ms": [5.0]}]).splitlines()
    assert lines[0].split() == ["ms", "2", "ranks", "2", "ranks", "4", "ranks"]
    assert lines[2].split() == ["all-gather:", "a", "2.00", "2.00", "5.00"]
    assert lines[3].split() == ["all-gather:", "b", "2.00", "2.00"]
