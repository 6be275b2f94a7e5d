"""Norms of long memory in pieces, against sums in fp64 and, for exact values, in Python."""

from __future__ import annotations

import math

import pytest
import torch

from core.optimizer.norm.norm_pass import CONVERTED_ROWS, ROW_ELEMENTS, NormPass

CPU = torch.device("cpu")
LENGTHS = (
    0,
    1,
    ROW_ELEMENTS - 1,
    ROW_ELEMENTS,
    3 * ROW_ELEMENTS + 5,
    2 * CONVERTED_ROWS * ROW_ELEMENTS + ROW_ELEMENTS + 1,
)


def reference(values: torch.Tensor, p: float) -> float:
    magnitudes = values.double().abs()
    if math.isinf(p):
        return magnitudes.max().item() if len(values) else 0.0
    return magnitudes.pow(p).sum().item() ** (1 / p)


def of_stretches(stretches: list[torch.Tensor], p: float, dtype: torch.dtype) -> list[float]:
    """The norm of each stretch, from its pieces."""
    norm_pass = NormPass(stretches, CPU)
    norms = norm_pass.norms(p, dtype)
    assert norms.dtype is torch.float64 and len(norms) == len(norm_pass.tensor_of)
    pieces: list[list[float]] = [[] for _ in stretches]
    for norm, index in zip(norms.tolist(), norm_pass.tensor_of, strict=True):
        pieces[index].append(norm)
    return [reference(torch.tensor(norms, dtype=torch.float64), p) for norms in pieces]


@pytest.mark.parametrize("p", [1.0, 2.0, 3.5, math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_every_element_of_every_length_is_in_one_piece(dtype: torch.dtype, p: float) -> None:
    torch.manual_seed(5)
    memory = torch.randn(sum(LENGTHS) + 3).to(dtype)
    stretches = list(memory[3:].split(list(LENGTHS)))  # not at the beginning of memory
    computed = torch.float64 if dtype is torch.float64 else torch.float32
    for found, stretch in zip(of_stretches(stretches, p, computed), stretches, strict=True):
        assert found == pytest.approx(reference(stretch, p), rel=2e-6 if computed is torch.float32 else 1e-13)
        if len(stretch):
            assert found > 0
    assert of_stretches([], p, computed) == []


def test_numbers_whose_sum_is_known_add_up_exactly() -> None:
    length = 5 * ROW_ELEMENTS + 100
    for dtype in (torch.float32, torch.bfloat16):
        values = torch.full((length,), 0.5, dtype=dtype)
        assert of_stretches([values], 2.0, torch.float32) == [pytest.approx(math.sqrt(length) / 2, rel=1e-15)]
        values[ROW_ELEMENTS + 7] = -64.0
        assert of_stretches([values], math.inf, torch.float32) == [64.0]


def test_ten_million_equal_numbers_are_added_to_five_digits() -> None:
    """One sum in fp32 over all of them is off by 1e-3 and more."""
    for dtype in (torch.float32, torch.bfloat16):
        values = torch.full((10_000_003,), 1e-3, dtype=dtype)
        (found,) = of_stretches([values], 2.0, torch.float32)
        assert found == pytest.approx(values[0].item() * math.sqrt(len(values)), rel=3e-6)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("at", [0, ROW_ELEMENTS, 3 * ROW_ELEMENTS + 4])
@pytest.mark.parametrize("p", [2.0, math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_not_finite_shows_in_its_piece(dtype: torch.dtype, p: float, at: int, bad: float) -> None:
    values = torch.ones(3 * ROW_ELEMENTS + 5, dtype=dtype)
    assert all(map(math.isfinite, NormPass([values], CPU).norms(p, torch.float32).tolist()))
    values[at] = bad
    assert not all(map(math.isfinite, NormPass([values], CPU).norms(p, torch.float32).tolist()))


def test_squares_beyond_fp32_are_found_in_fp64() -> None:
    values = torch.full((2 * ROW_ELEMENTS + 1,), 1e30)
    assert math.isinf(of_stretches([values], 2.0, torch.float32)[0])
    assert of_stretches([values], 2.0, torch.float64)[0] == pytest.approx(1e30 * math.sqrt(len(values)), rel=1e-6)
