"""The look of the guard at one tensor: one value that is not finite is enough, and the largest finite ones are not."""

from __future__ import annotations

import math
import re
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from core.distributed.guard.finite import LargeGradWatch, NonFiniteWatch, all_finite

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


def test_a_norm_ten_times_the_largest_of_the_first_hundred_is_warned_of(recwarn: pytest.WarningsRecorder) -> None:
    gradients = [torch.ones(4), torch.full((1,), 0.5)]
    names = [SimpleNamespace(name="first.weight"), SimpleNamespace(name="second.weight")]
    buckets: Any = [
        SimpleNamespace(valid_grad=grad, contracts=[name]) for grad, name in zip(gradients, names, strict=True)
    ]
    watch = LargeGradWatch(buckets)
    for step in range(50):  # two buckets a step: 100 norms, the largest of them 2
        gradients[1].fill_(math.nan if step == 7 else 0.5)
        watch.look(step)
    gradients[0].fill_(9.9)
    gradients[1].fill_(19.0)
    watch.look(50)
    assert not recwarn.list
    gradients[1].fill_(21.0)
    with mock.patch("torch.distributed.get_rank", return_value=3), pytest.warns(UserWarning) as warned:
        watch.look(51)
    assert re.match(r"rank 3, step 51: .*'second.weight' have norm 21; the largest .* was 2 ", str(warned[0].message))
