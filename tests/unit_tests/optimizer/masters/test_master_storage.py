"""What is kept in 16 bits comes back within the stated bound, and a remainder brings back every bit."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from core.distributed.contract.gradient_contract import GradientContract
from core.optimizer.masters.master_storage import CopyStorage, RemainderStorage
from core.optimizer.masters.param_shards import ParamShard, cut_shards


def shards_of(*params: nn.Parameter, gap: int = 0) -> list[ParamShard]:
    """The parameters one after the other, with padding between them."""
    shards, start = [], 0
    for number, param in enumerate(params):
        contract = GradientContract(f"p{number}", False, "dp_cp", 1)
        shards.append(ParamShard(param, contract, 0, start, start + param.numel(), 0))
        start += param.numel() + gap
    return shards


def fp32_patterns() -> torch.Tensor:
    """Random bits, which are numbers of every size, and the edges: ties, zeros, subnormals, infinities, NaN."""
    bits = torch.randint(-(2**31), 2**31, (200_000,), generator=torch.Generator().manual_seed(1), dtype=torch.int64)
    edges = [
        0,
        -(2**31),
        1,
        0x7FFF,
        0x8000,
        0x8001,
        0x18000,
        0x3F808000,
        0x3F818000,
        0x7F7FFFFF,
        0x7F800000,
        0x7FC00001,
    ]
    return torch.cat([bits, torch.tensor(edges)]).to(torch.int32).view(torch.float32)


def test_a_bf16_parameter_and_its_remainder_are_the_fp32_master_bit_for_bit() -> None:
    values = fp32_patterns()
    param = nn.Parameter(torch.zeros(values.numel(), dtype=torch.bfloat16))
    kept = RemainderStorage(shards_of(param), None, torch.zeros(values.numel(), dtype=torch.int16))
    kept.write(values.clone())
    back = torch.empty_like(values)
    kept.read(back)
    assert torch.equal(back.view(torch.int32), values.view(torch.int32))
    assert torch.equal(kept.saved(5, 50).view(torch.int32), values[5:50].view(torch.int32))
    finite = torch.isfinite(values)
    rounded = values[finite].bfloat16()
    differs = param.data[finite] != rounded
    ties = (values[finite].view(torch.int32) & 0xFFFF) == 0x8000
    assert bool((~differs | ties).all()), "a parameter is not its master rounded to nearest"
    assert int(differs.sum()) > 0, "no tie was met"
    nearest = (param.data[finite].float() - values[finite]).abs() <= (rounded.float() - values[finite]).abs()
    assert bool(nearest.all())


def test_remainders_lie_next_to_several_parameters_with_padding_between_them() -> None:
    params = [nn.Parameter(torch.zeros(n, dtype=torch.bfloat16)) for n in (3, 5, 2)]
    shards = shards_of(*params, gap=4)
    numel = shards[-1].end
    values = torch.linspace(-2, 3, numel)
    kept = RemainderStorage(shards, None, torch.zeros(numel, dtype=torch.int16))
    kept.write(values.clone())
    back = torch.zeros(numel)
    kept.read(back)
    for shard in shards:
        assert torch.equal(back[shard.start : shard.end], values[shard.start : shard.end])
        assert torch.equal(shard.param.data, values[shard.start : shard.end].bfloat16())
    second = kept.part(7, 12, shards[1:2])
    part = torch.zeros(5)
    second.read(part)
    assert torch.equal(part, values[7:12])


@pytest.mark.parametrize("in_one_tensor", [True, False])
def test_a_master_is_put_together_from_parameter_and_remainder(in_one_tensor: bool) -> None:
    """Bits by plain integers; what the memory held before does not matter."""
    masters = [1.0 + 2.0**-10, -3.1, 0.0, 2.0**-140, 1e38, -1.00390625]
    bits = [int(torch.tensor(value).view(torch.int32)) for value in masters]
    memory = torch.tensor([(b + 0x8000) >> 16 for b in bits], dtype=torch.int16).view(torch.bfloat16)
    param = nn.Parameter(memory)
    remainders = [b - (int(half) << 16) for b, half in zip(bits, memory.view(torch.int16), strict=True)]
    assert any(remainder < 0 for remainder in remainders) and any(remainder > 0 for remainder in remainders)
    memory_of_all = param.data if in_one_tensor else None
    kept = RemainderStorage(shards_of(param), memory_of_all, torch.tensor(remainders, dtype=torch.int16))
    out = torch.full((6,), math.nan)
    kept.read(out)
    assert out.view(torch.int32).tolist() == bits
    kept.write(out)
    assert kept.kept.tolist() == remainders and torch.equal(param.data.view(torch.int16), memory.view(torch.int16))


@pytest.mark.parametrize("in_one_tensor", [True, False])
def test_a_copy_is_written_to_the_parameter_and_takes_over_what_others_write_there(in_one_tensor: bool) -> None:
    masters = torch.tensor([1.0 + 2.0**-12, -3.1, 0.0, 1e38, -1.00390625, 7.7])
    param = nn.Parameter(torch.zeros(6, dtype=torch.bfloat16))
    storage = CopyStorage(shards_of(param), param.data if in_one_tensor else None, masters.clone())
    storage.write(storage.kept)
    assert torch.equal(param.data, masters.bfloat16())
    storage.copy_edits()
    assert torch.equal(storage.kept, masters), "nothing was edited"
    param.data[1] = 2.5
    storage.copy_edits()
    masters[1] = 2.5
    assert torch.equal(storage.kept, masters)
    storage.load([(4, torch.tensor([5.0, 6.0]))])
    assert storage.saved(3, 6).tolist() == [masters[3].item(), 5.0, 6.0]
    storage.copy_parameters()
    assert torch.equal(storage.kept, param.data.float())


def test_cut_slices_cover_every_element_once() -> None:
    params = [nn.Parameter(torch.zeros(n)) for n in (3, 10, 1, 6)]
    shards = shards_of(*params, gap=2)
    for numel in (1, 2, 3, 5, 7, 100):
        seen: dict[int, list[int]] = {id(p): [] for p in params}
        for stretch, end in cut_shards(shards, numel):
            assert stretch[-1].end <= end <= stretch[0].start + numel
            for shard in stretch:
                whole = next(s for s in shards if s.param is shard.param)
                assert shard.start - shard.offset == whole.start
                seen[id(shard.param)] += range(shard.offset, shard.offset + shard.numel)
        assert all(seen[id(p)] == list(range(p.numel())) for p in params)
