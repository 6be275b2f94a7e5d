"""The diagnosis, without ranks: gradients mixed by hand, and the sentence that must come out."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
import torch
from torch import Tensor

from core.verify.diagnosis import BiasPart, RankPart, explain, explain_bias, name_factor
from core.verify.microbatch_weights import in_words
from core.verify.report import wrong_by_layer

Mix = Callable[[int, list[Tensor]], Tensor]
GRID = {"dp": 2, "tp": 2}  # rank = tp + 2 dp


def place(rank: int) -> dict[str, int]:
    return {"dp": rank // 2, "tp": rank % 2}


def own_gradients(elements: int = 50) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(elements, generator=generator, dtype=torch.float64) for _ in range(4)]


def sequence_parallel(rank: int, own: list[Tensor]) -> Tensor:
    """What is right for a norm: the sum over tp, the mean over dp."""
    return (own[0] + own[1] + own[2] + own[3]) / 2


def split(rank: int, own: list[Tensor]) -> Tensor:
    """What is right for a split layer: the mean over dp of the ranks with the same slice."""
    return (own[rank % 2] + own[rank % 2 + 2]) / 2


def diagnose(
    right: Mix,
    got: Mix,
    suspects: list[str],
    own: list[Tensor] | None = None,
    sizes: Mapping[str, int] = GRID,
    **options: int,
) -> str:
    own = own_gradients() if own is None else own
    everything = torch.ones(own[0].numel(), dtype=torch.bool)
    parts = [RankPart(r, place(r), own[r], got(r, own), right(r, own), everything) for r in range(4)]
    return explain(parts, sizes, suspects, **options).cause


@pytest.mark.parametrize(
    ("got", "suspects", "words"),
    [
        (lambda r, own: 2 * sequence_parallel(r, own), ["tp"], "tp times too large"),
        (lambda r, own: 2 * sequence_parallel(r, own), ["dp"], "dp times too large"),
        (lambda r, own: sequence_parallel(r, own) / 2, ["tp"], "tp times too small"),
        (lambda r, own: sequence_parallel(r, own) / 2, ["dp"], "1/n twice"),
        (lambda r, own: split(r, own), ["tp"], "not reduced over tp"),
        (lambda r, own: (own[r] + own[r ^ 1]) / 2, ["dp"], "not reduced over dp"),
        (lambda r, own: own[r] / 2, ["dp", "tp"], "not reduced over dp and tp"),
        (lambda r, own: own[3] if r == 3 else sequence_parallel(r, own), ["dp"], "unsynced on rank 3"),
        (lambda r, own: sequence_parallel(r, own) - own[2] / 2, ["dp"], "ranks [2] is missing everywhere"),
        (lambda r, own: 0 * own[r], ["dp"], "is zero"),
        (lambda r, own: 8 * sequence_parallel(r, own), ["dp"], "8 times the reference, which is no size"),
        (lambda r, own: 4 * sequence_parallel(r, own), ["dp", "tp"], "dp x tp = 4 times too large"),
        (lambda r, own: sequence_parallel(r, own).roll(1), ["dp"], "no sum of the ranks' gradients"),
        (lambda r, own: sequence_parallel(r, own) + own[1] / 2, ["dp"], "different factors"),
        (lambda r, own: (3 if r < 2 else 1) * sequence_parallel(r, own), ["dp"], "on ranks [0, 1] only"),
    ],
)
def test_causes_of_a_wrong_norm(got: Mix, suspects: list[str], words: str) -> None:
    assert words in diagnose(sequence_parallel, got, suspects)


def test_slices_of_other_ranks_do_not_belong_to_a_split_layer() -> None:
    cause = diagnose(split, lambda r, own: split(0, own) + split(1, own), ["dp"])
    assert "also holds the gradient of ranks" in cause


def test_ranks_that_saw_the_same_are_not_taken_for_missing() -> None:
    first, _, second, _ = own_gradients()
    own = [first, first, second, second]  # complete on every tensor-parallel rank
    right: Mix = lambda r, own: (own[0] + own[2]) / 2  # noqa: E731
    assert "tp times too large" in diagnose(right, lambda r, o: o[0] + o[2], ["tp"], own)
    assert "not reduced over dp" in diagnose(right, lambda r, o: o[r] / 2, ["dp"], own)


def test_ranks_without_gradient_do_not_count() -> None:
    own = own_gradients()
    own[1] = own[3] = torch.zeros_like(own[0])
    assert "not reduced over dp" in diagnose(sequence_parallel, lambda r, o: (o[r] + o[r ^ 1]) / 2, ["dp"], own)


def test_local_gradients_that_do_not_add_up_are_not_blamed_on_a_reduction() -> None:
    cause = diagnose(lambda r, own: sequence_parallel(r, own).flip(0), sequence_parallel, ["dp"])
    assert "backward is wrong before any reduction" in cause


def test_a_parameter_with_fewer_elements_than_ranks_is_judged_by_its_ratio() -> None:
    own = own_gradients(2)
    assert "tp times too large" in diagnose(sequence_parallel, lambda r, o: 2 * sequence_parallel(r, o), ["tp"], own)
    assert "points elsewhere" in diagnose(sequence_parallel, lambda r, o: o[r], ["tp"], own)


def test_only_the_elements_that_a_rank_holds_are_looked_at() -> None:
    own = own_gradients()
    parts = []
    for rank in range(4):
        valid = torch.zeros(50, dtype=torch.bool)
        valid[25 * (rank // 2) : 25 * (rank // 2) + 25] = True
        right = sequence_parallel(rank, own)
        got = torch.where(valid, right, torch.nan)
        if rank // 2 == 1:
            got[valid] = own[rank][valid] / 2
        parts.append(RankPart(rank, place(rank), own[rank], got, right, valid))
    assert explain(parts, GRID, ["dp"])[0].startswith("unsynced on ranks [2, 3]")


@pytest.mark.parametrize(
    ("factor", "suspects", "words"),
    [
        (4.0, ["ep"], "ep times too large (ep is 4)"),
        (1 / 4, ["ep"], "ep times too small (ep is 4): 1/n twice"),
        (3.0, ["pp"], "pp times too large (pp is 3)"),
        (5.0, ["dp"], "5 times too large, the number of microbatches"),
        (1 / 5, ["dp"], "5 times too small, the number of microbatches"),
        (70.0, ["dp"], "70 times too large, the number of tokens"),
        (1 / 70, ["dp"], "divided by them twice"),
        (70 / 13, ["dp"], "it is divided by 13 tokens, and the whole batch has 70"),
        (2.0, ["embd"], "twice too large: its reduction was done twice"),
        (3.0, ["dp"], "pp times too large"),  # no suspect has the size, another axis has
    ],
)
def test_names_of_factors(factor: float, suspects: list[str], words: str) -> None:
    sizes = {"dp": 7, "ep": 4, "pp": 3}
    assert words in name_factor(factor, sizes, suspects, tokens=70, microbatches=5)


# --- auxiliary losses and router biases -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("weight", "words"),
    [
        (5.0, "5 times their due weight relative to the loss: they are not divided by the number of microbatches, 5"),
        (1 / 5, "divided by the number of microbatches, 5, twice"),
        (0.5, "the ranks of cp (2) share them"),
        (0.0, "auxiliary losses have 0 times their due weight"),
        (7.0, "auxiliary losses have 7 times their due weight relative to the loss"),
    ],
)
def test_auxiliary_losses_with_another_weight_are_no_wrong_reductions(weight: float, words: str) -> None:
    own = own_gradients()
    auxiliary = own[3].roll(7)
    parts = []
    for rank in range(4):
        right = sequence_parallel(rank, own)
        got = right + (weight - 1.0) * auxiliary
        parts.append(RankPart(rank, place(rank), got, got, right, torch.ones(50, dtype=torch.bool), auxiliary))
    assert words in explain(parts, {**GRID, "cp": 2}, ["dp"], microbatches=5)[0]


def test_a_wrong_reduction_is_not_blamed_on_auxiliary_losses() -> None:
    own = own_gradients()
    parts = [
        RankPart(r, place(r), own[r], 2 * right, right, torch.ones(50, dtype=torch.bool), own[0])
        for r in range(4)
        for right in [sequence_parallel(r, own)]
    ]
    assert "tp times too large" in explain(parts, GRID, ["tp"])[0]


COUNTS = ([9, 1, 3, 7], [2, 8, 4, 6], [1, 1, 9, 9], [0, 10, 5, 5])  # of ranks 0 to 3; in all 12, 20, 21, 27


def moved(*counted: int) -> list[float]:
    totals = [sum(COUNTS[rank][expert] for rank in counted) for expert in range(4)]
    return [0.1 * ((total * 4 < sum(totals)) - (total * 4 > sum(totals))) for total in totals]


@pytest.mark.parametrize(
    ("moves", "words"),
    [
        ([moved(0), moved(1), moved(2), moved(3)], "by counts that are not added over dp and tp"),
        ([moved(0, 2), moved(1, 3), moved(0, 2), moved(1, 3)], "by counts that are not added over tp"),
        ([moved(0, 1), moved(0, 1), moved(2, 3), moved(2, 3)], "by counts that are not added over dp"),
        ([[2 * move for move in moved(0, 1, 2, 3)]] * 4, "2 times as far as moe_router_bias_update_rate says"),
        ([[0.0] * 4] * 4, "0 times as far"),
        ([moved(0, 1, 2, 3)] * 4, "those of another step were left among them"),
        ([moved(0, 1, 2, 3)] * 3 + [moved(3)], "ranks disagree"),
    ],
)
def test_causes_of_a_wrong_router_bias(moves: list[list[float]], words: str) -> None:
    parts = [BiasPart(rank, {**place(rank), "cp": 0}, COUNTS[rank], moves[rank]) for rank in range(4)]
    assert words in explain_bias(parts, 0.1)


def test_a_divisor_that_differs_between_ranks_is_named_in_tokens() -> None:
    tokens = [10, 20, 25, 30]
    cause = diagnose(sequence_parallel, lambda r, own: 60 / tokens[r] * sequence_parallel(r, own), ["dp"], tokens=60)
    assert "ranks [0, 1, 2, 3] divide by [10, 20, 25, 30] tokens, and the whole batch has 60" in cause


NAMES = ("embed.weight", "layers.0.up.weight", "layers.0.up.bias", "layers.1.up.weight", "head.weight")


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ([0, 1, 2], "everything before layers.1.up; right: 2 of 5 parameters"),
        ([0, 1], "everything before layers.1.up; right: 3 of 5 parameters"),
        ([3, 4], "everything from layers.1.up on; right: 3 of 5 parameters"),
        ([0, 1, 3, 4], "some parameters of each layer; right: 1 of 5 parameters"),
        ([0, 1, 2, 3, 4], "all parameters; right: 0 of 5 parameters"),
        ([0], "embed; right: 4 of 5 parameters"),
        ([1, 4], "layers.0.up, head; right: 3 of 5 parameters"),
    ],
)
def test_wrong_parameters_are_listed_by_layer(wrong: list[int], words: str) -> None:
    assert wrong_by_layer(NAMES, [NAMES[number] for number in wrong]) == f"wrong: {words}"


WEIGHTS: list[tuple[list[list[float]], float, str]] = [
    ([[1, 0, 1], [1, 0, 1]], 0.0, "the backward does not run of microbatch 2 of 3, so 2/3 of the gradient is there"),
    ([[0, 0, 1]], 0.0, "a late zero_grad: it clears microbatches 1, 2 of 3, so 1/3 of the gradient is there; or their"),
    ([[1, 1], [1, 2]], 0.0, "on data rank 1 alone the backward runs twice of microbatch 2 of 2"),
    ([[1, 1, 0.5]], 0.0, "the microbatches count 1, 1, 0.5 times what is due"),
    ([[1, 1], [1, 1]], 1.0, "the gradients of the step before are still there: zero_grad is not called"),
    ([[2, 2], [2, 2]], 0.0, ""),
    ([[1, 1]], 0.4, "the gradients of the step before are still there"),
    ([[2, 1]], 0.5, ""),
]


@pytest.mark.parametrize(("weights", "left_over", "words"), WEIGHTS)
def test_the_weights_of_microbatches_are_put_into_words(
    weights: list[list[float]], left_over: float, words: str
) -> None:
    said = in_words(weights, left_over)
    assert said.startswith(words) and bool(said) == bool(words)


def test_a_share_of_equal_microbatches_is_named() -> None:
    assert name_factor(0.6, {"dp": 1}, [], microbatches=5).startswith("3/5 is there: 2 of 5 microbatches are left out")
