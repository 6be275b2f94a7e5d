"""Collectives in 8 bits stay within the bounds that their file states, and tell of inf and NaN."""

import pytest
import torch
import torch.distributed as dist

from core.distributed.wire import fp8_communication as fp8
from tests.unit_tests.ranks import ranks

FIRST = 1 / 16  # of one rounding
SMALL = 2.0**-18  # of a block's largest


def numbers(rank: int, numel: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Numbers of very different sizes, so that one scale for all would lose most of them."""
    generator = torch.Generator().manual_seed(rank)
    size = torch.exp2(torch.randint(-12, 4, (numel,), generator=generator).float())
    return (torch.randn(numel, generator=generator) * size).to(dtype)


@pytest.mark.parametrize("scale", [1e-30, 1e-6, 1.0, 1e30])
def test_a_rounded_number_is_within_a_sixteenth(scale: float) -> None:
    exact = numbers(0, 4 * fp8.BLOCK).double() * scale
    got = fp8.dequantize(fp8.quantize(exact.float())).double()
    largest = exact.view(-1, fp8.BLOCK).abs().amax(1, keepdim=True).expand(-1, fp8.BLOCK).flatten()
    bound = FIRST * exact.abs() + SMALL * largest
    assert ((got - exact).abs() <= bound * 1.0001).all()
    assert ((got - exact).abs() > 0.03 * exact.abs()).any(), "nothing was rounded"


def test_zeros_come_back_as_zeros_and_what_is_not_finite_as_nan() -> None:
    x = torch.zeros(3 * fp8.BLOCK)
    x[5], x[fp8.BLOCK] = torch.inf, torch.nan
    got = fp8.dequantize(fp8.quantize(x)).view(3, -1)
    assert not got[0].isfinite().any() and not got[1].isfinite().any()
    assert (got[2] == 0).all()


def test_a_block_costs_four_bytes_more_than_its_numbers() -> None:
    assert fp8.quantize(torch.ones(2, 512)).shape == (2, 512 + 4 * 512 // fp8.BLOCK)


@ranks(1, 3, nightly=(2,))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("numel", [1, 257, 5000])
def test_a_mean_of_ranks_is_within_the_stated_bound(rank: int, world: int, numel: int, dtype: torch.dtype) -> None:
    parts = [numbers(r, numel, dtype) for r in range(world)]
    got = parts[rank].clone()
    fp8.all_reduce(got, dist.group.WORLD, mean=True)
    if world == 1:
        assert torch.equal(got, parts[0])
        return
    exact = torch.stack([part.double() for part in parts]).mean(0)
    magnitude = torch.stack([part.double().abs() for part in parts]).mean(0)
    largest = max(part.double().abs().max() for part in parts)
    rounding = torch.finfo(dtype).eps * exact.abs()
    error = (got.double() - exact).abs()
    assert (error <= 0.13 * magnitude + largest * 2.0**-17 + rounding).all()
    assert numel < 100 or (error > 0.01 * exact.abs()).any(), "nothing travelled in 8 bits"
    everyone = [torch.empty_like(got) for _ in range(world)]
    dist.all_gather(everyone, got)
    assert all(torch.equal(everyone[0], other) for other in everyone), "ranks disagree"


@ranks(4)
def test_a_mean_is_over_the_group_and_not_over_the_world(rank: int, world: int) -> None:
    pair = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    x = torch.full((300,), float(2 ** (rank % 2 + 1)))  # 2 and 4: exact in 8 bits, as is their mean
    fp8.all_reduce(x, pair, mean=True)
    torch.testing.assert_close(x, torch.full((300,), 3.0), atol=0, rtol=1 / 16)


@ranks(3)
def test_an_overflow_on_one_rank_reaches_all(rank: int, world: int) -> None:
    x = torch.ones(1000)
    if rank == 1:
        x[700] = torch.inf
    fp8.all_reduce(x, dist.group.WORLD, mean=True)
    assert not x[700].isfinite() and x[:256].isfinite().all()


@ranks(2, 3)
def test_scattered_sums_and_gathered_shards_are_within_their_bounds(rank: int, world: int) -> None:
    numel = 301
    parts = [numbers(r, world * numel) for r in range(world)]
    for mean in (True, False):
        got = torch.empty(numel)
        fp8.reduce_scatter(got, parts[rank], dist.group.WORLD, mean=mean)
        mine = torch.stack([part.view(world, numel)[rank].double() for part in parts])
        factor = 1 / world if mean else 1.0
        bound = FIRST * mine.abs().sum(0) + SMALL * mine.abs().amax(1).sum()
        assert ((got.double() - factor * mine.sum(0)).abs() <= factor * bound * 1.001).all()
    full = torch.empty(world * numel)
    shard = full[rank * numel : (rank + 1) * numel]
    shard.copy_(numbers(rank, numel))  # in place, as FSDP gathers
    fp8.all_gather(full, shard, dist.group.WORLD)
    exact = torch.cat([numbers(r, numel) for r in range(world)])
    assert ((full - exact).abs() <= FIRST * exact.abs() + SMALL * exact.abs().max()).all()
