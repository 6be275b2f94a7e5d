"""Findings about the microbatches that ranks were given."""

from __future__ import annotations

from core.verify.microbatches import Given, data_of, same_data


def given(rank: int, *digests: str) -> Given:
    return Given(rank, 0, 0, 0, [[digest] for digest in digests], None, [], [], {})


def test_equal_and_repeated_microbatches_are_described() -> None:
    answers = {rank: given(rank, *parts) for rank, parts in enumerate(["ab", "bc", "de", "de"])}
    some, all_of_them = same_data(answers, {})
    assert some.startswith("data ranks [0, 1] were given 1 equal microbatches among others")
    assert all_of_them.startswith("data ranks [2, 3] were given the same microbatches, so they train as one")
    apart = {rank: given(rank, *parts) for rank, parts in enumerate(["ab", "cd"])}
    later = {0: given(0, "e", "f"), 1: given(1, "c", "d")}
    assert not same_data(apart, {}) and not same_data(apart, data_of(apart)), "all ranks may repeat their data"
    (stale,) = same_data(later, data_of(apart))
    assert stale.startswith("data ranks [1] were given the microbatches of the step before")
