"""The look of the guard at one tensor: one value that is not finite is enough, and the largest finite ones are not."""

from __future__ import annotations

import math

import pytest
import torch

from core.distributed.guard.finite import _all_finite

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, 17, 255])
def test_one_value_that_is_not_finite_is_seen_wherever_it_is(dtype: torch.dtype, bad: float, place: int) -> None:
    values = torch.linspace(-3, 5, 256, dtype=dtype)
    assert _all_finite(values)
    values[place] = bad
    assert not _all_finite(values)
    assert not _all_finite(values.view(16, 16))
    values[255 - place] = -bad  # the other infinity beside it
    assert not _all_finite(values)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_largest_and_the_smallest_finite_values_are_finite(dtype: torch.dtype) -> None:
    range_of = torch.finfo(dtype)
    assert _all_finite(torch.tensor([range_of.max, range_of.min, range_of.tiny, -0.0], dtype=dtype))
    assert _all_finite(torch.full((64,), range_of.max, dtype=dtype))
    assert _all_finite(torch.tensor(range_of.min, dtype=dtype))
    assert _all_finite(torch.empty(0, dtype=dtype))
