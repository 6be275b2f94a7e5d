"""The benchmarks run; what they measure is in benchmarks/notebook.md."""

from benchmarks.__main__ import BENCHMARKS, main


def test_an_unknown_benchmark_is_answered_with_the_list(capsys):
    assert main(["gruops"]) == 2
    answer = capsys.readouterr().err
    assert all(name in answer for name in BENCHMARKS)


def test_creations_of_one_rank_stay_and_those_of_all_groups_grow_with_the_world(capsys):
    assert main(["groups", "--worlds", "256", "512", "--repeat", "1"]) == 0
    rows = [line.rsplit(maxsplit=6) for line in capsys.readouterr().out.splitlines()[3:]]
    own = {world: [int(row[2]) for row in rows if row[0].split()[0] == world] for world in ("256", "512")}
    every = {world: [int(row[4]) for row in rows if row[0].split()[0] == world] for world in ("256", "512")}
    assert max(own["256"] + own["512"]) < 15
    assert all(large > 1.5 * small for large, small in zip(every["512"], every["256"], strict=True))
