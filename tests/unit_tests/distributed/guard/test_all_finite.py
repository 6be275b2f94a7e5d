"""The look of the guard at one tensor: one value that is not finite is enough, and the largest finite ones are not."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from core.distributed.guard.finite import NonFiniteWatch, all_finite

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, 17, 255])
def test_one_value_that_is_not_finite_is_seen_wherever_it_is(dtype: torch.dtype, bad: float, place: int) -> None:
    values = torch.linspace(-3, 5, 256, dtype=dtype)
    assert all_finite(values)
    values[place] = bad
    assert not all_finite(values)
    assert not all_finite(values.view(16, 16))
    values[255 - place] = -bad  # the other infinity next to it
    assert not all_finite(values)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_largest_and_the_smallest_finite_values_are_finite(dtype: torch.dtype) -> None:
    range_of = torch.finfo(dtype)
    assert all_finite(torch.tensor([range_of.max, range_of.min, range_of.tiny, -0.0], dtype=dtype))
    assert all_finite(torch.full((64,), range_of.max, dtype=dtype))
    assert all_finite(torch.tensor(range_of.min, dtype=dtype))
    assert all_finite(torch.empty(0, dtype=dtype))


def test_the_first_microbatch_is_warned_of_gradients_that_some_backwards_leave_out() -> None:
    params = [SimpleNamespace(grad=torch.zeros(4, dtype=dtype)) for dtype in (torch.float32, torch.bfloat16)]
    names = [SimpleNamespace(name=name) for name in ("always", "sometimes")]
    bucket: Any = SimpleNamespace(params=params, contracts=names, device=torch.device("cpu"))
    watch = NonFiniteWatch([bucket])
    for _ in range(2):  # the second time after a reset
        assert watch.first() is None
        for microbatch in range(4):
            watch.look(bucket, 0)
            if microbatch == 2:
                params[1].grad.fill_(math.inf)
                watch.look(bucket, 1)  # its first one
            if microbatch == 3:
                params[0].grad.fill_(math.nan)
                watch.look(bucket, 0)
        assert watch.first() == ("sometimes", 2)
        assert watch.first() == ("sometimes", 2)
        watch.reset()
        for param in params:
            param.grad.zero_()
