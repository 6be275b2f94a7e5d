"""The checksum of initial weights sees every exchange of two elements, wherever they lie."""

import pytest
import torch

from core.distributed.guard.replicas import checksum


@pytest.mark.parametrize("numel", [2, 61, 77, 122, 200])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_any_two_elements_that_change_places_change_the_checksum(numel: int, dtype: torch.dtype) -> None:
    values = torch.arange(1, numel + 1).to(dtype)
    whole = checksum(values).tolist()
    for distance in (1, 7, 61):
        for first in range(numel - distance):
            swapped = values.clone()
            swapped[[first, first + distance]] = values[[first + distance, first]]
            if not torch.equal(swapped, values):
                assert checksum(swapped).tolist() != whole, f"elements {first} and {first + distance} of {numel}"
