"""The sum in rank order, against one element at a time in numpy."""

from __future__ import annotations

from unittest import mock

import numpy as np
import pytest
import torch

from core.distributed.wire import rank_order_sum
from core.distributed.wire.rank_order_sum import add_in_rank_order

BITS = {
    torch.float64: torch.int64,
    torch.float32: torch.int32,
    torch.bfloat16: torch.int16,
    torch.float16: torch.int16,
}
CHUNK = 8  # elements, for the test: several chunks, the last one short


def parts_of(dtype: torch.dtype, count: int, numel: int) -> list[torch.Tensor]:
    """Numbers of very different size, so that order and every rounding show; some so small that halving rounds."""
    generator = torch.Generator().manual_seed(numel)
    drawn = torch.randn(count, numel, generator=generator, dtype=torch.float64)
    powers = torch.tensor([1.0, 1e-3, 1e3, 37.0], dtype=torch.float64).repeat(numel)[:numel]
    parts = list((drawn * powers).to(dtype).unbind())
    tiny = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps  # the smallest there is
    for rank, part in enumerate(parts):
        part[::5] = tiny * (2 * rank + 3)
    return [part.clone() for part in parts]


def by_hand(parts: list[torch.Tensor], scale: float, mean: bool) -> torch.Tensor:
    dtype = parts[0].dtype
    wide = np.float64 if dtype is torch.float64 else np.float32
    total = np.zeros(parts[0].numel(), dtype=wide)
    for index in range(total.size):
        value = wide(parts[0][index].item())
        for part in parts[1:]:
            value = wide(value + wide(part[index].item()))
        if mean:
            value = wide(value / wide(len(parts)))
        total[index] = wide(value * wide(scale))
    return torch.from_numpy(total).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("count", [2, 3, 4])
@pytest.mark.parametrize("numel", [0, 1, CHUNK, 3 * CHUNK + 5])
@pytest.mark.parametrize(("scale", "mean"), [(1.0, False), (1.0, True), (0.3, False), (0.3, True)])
@pytest.mark.in_suite()
def test_every_bit_is_that_of_one_element_at_a_time(
    dtype: torch.dtype, count: int, numel: int, scale: float, mean: bool
) -> None:
    with mock.patch.object(rank_order_sum, "CHUNK", CHUNK):
        for place in range(count + 1):  # `out` is one of the parts, or further memory
            parts = parts_of(dtype, count, numel)
            expected = by_hand(parts, scale, mean)
            if place == 0 and numel > CHUNK:
                assert not torch.equal(expected, by_hand(parts, scale, not mean))
            kept = [part.clone() for part in parts]
            out = parts[place] if place < count else torch.full_like(parts[0], 7.0)
            add_in_rank_order(parts, out, scale, mean)
            assert torch.equal(out.view(BITS[dtype]), expected.view(BITS[dtype]))
            for rank, part in enumerate(parts):
                assert rank == place or torch.equal(part, kept[rank])


def test_a_mean_of_two_is_a_product_and_one_of_three_a_division() -> None:
    """By a power of two a product gives the same bits as a division and takes less time; by three it does not."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiled:
        add_in_rank_order([torch.ones(4), torch.full((4,), 2.0)], torch.empty(4), 1.0, True)
        add_in_rank_order([torch.ones(4)] * 3, out := torch.empty(4), 1.0, True)
    calls = {event.key: event.count for event in profiled.key_averages()}
    assert calls.get("aten::mul_") == 1 and calls.get("aten::div_") == 1
    assert torch.equal(out, torch.ones(4))
