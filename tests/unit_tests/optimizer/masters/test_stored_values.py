"""What is kept in 16 bits comes back within the stated bound, and a remainder brings back every bit."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from core.distributed.contract.gradient_contract import GradientContract
from core.optimizer.masters.master_weights import Run, Slice, cut_slices
from core.optimizer.masters.scratch import Scratch
from core.optimizer.masters.stored_values import CopiedValues, HalfValues, ParameterValues, RemainderValues, stored
from core.optimizer.optimizer_config import OptimizerConfig


def slices_of(*params: nn.Parameter, gap: int = 0) -> list[Slice]:
    """The parameters one after the other, with padding between them."""
    slices, start = [], 0
    for number, param in enumerate(params):
        contract = GradientContract(f"p{number}", False, "dp_cp", 1)
        slices.append(Slice(param, contract, 0, start, start + param.numel(), 0))
        start += param.numel() + gap
    return slices


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
    kept = RemainderValues(torch.zeros(values.numel(), dtype=torch.int16), ParameterValues(slices_of(param)))
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


def test_remainders_lie_beside_several_parameters_with_padding_between_them() -> None:
    params = [nn.Parameter(torch.zeros(n, dtype=torch.bfloat16)) for n in (3, 5, 2)]
    slices = slices_of(*params, gap=4)
    numel = slices[-1].end
    values = torch.linspace(-2, 3, numel)
    kept = RemainderValues(torch.zeros(numel, dtype=torch.int16), ParameterValues(slices))
    kept.write(values.clone())
    back = torch.zeros(numel)
    kept.read(back)
    for piece in slices:
        assert torch.equal(back[piece.start : piece.end], values[piece.start : piece.end])
        assert torch.equal(piece.param.data, values[piece.start : piece.end].bfloat16())
    second = kept.part(7, 12, slices[1:2])
    part = torch.zeros(5)
    second.read(part)
    assert torch.equal(part, values[7:12])


@pytest.mark.parametrize("largest", [1e-30, 1e-5, 1.0, 3.0e4, 1e30])
def test_half_values_are_within_the_bound_at_any_size(largest: float) -> None:
    generator = torch.Generator().manual_seed(2)
    values = torch.randn(4000, generator=generator) * 2.0 ** (-30 * torch.rand(4000, generator=generator))
    values = values / values.abs().max() * largest
    kept = HalfValues(4000, torch.device("cpu"))
    kept.write(values.clone())
    back = torch.empty(4000)
    kept.read(back)
    error = (back - values).abs()
    assert bool((error <= 2.0**-11 * values.abs() + 2.0**-38 * largest).all())
    assert float(error.max()) > 0
    again = HalfValues(4000, torch.device("cpu"))
    again.write(back.clone())
    assert torch.equal(again.data, kept.data) and torch.equal(again.scale, kept.scale), "kept twice, changed once"


def test_second_moments_keep_the_range_of_first_ones() -> None:
    """Gradients from 1 down to 2**-36: plain fp16 would keep the first moment and lose the second."""
    grads = 2.0 ** -torch.arange(37.0)
    first, second = HalfValues(37, torch.device("cpu")), HalfValues(37, torch.device("cpu"), as_roots=True)
    first.write(grads.clone())
    second.write(grads.square())
    m, v = torch.empty(37), torch.empty(37)
    first.read(m)
    second.read(v)
    assert torch.equal(m, grads)
    assert torch.equal(v, grads.square())
    plain = HalfValues(37, torch.device("cpu"))
    plain.write(grads.square())
    plain.read(v)
    assert bool((v == 0).any())


def test_zeros_and_empty_runs_are_kept() -> None:
    for numel in (0, 3):
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            kept = stored(numel, dtype, torch.device("cpu"), as_roots=True)
            kept.write(torch.zeros(numel))
            back = torch.ones(numel)
            kept.read(back)
            assert back.tolist() == [0.0] * numel


@pytest.mark.parametrize("in_one_tensor", [True, False])
def test_a_master_is_put_together_in_memory_that_is_lent_to_it(in_one_tensor: bool) -> None:
    """Bits by plain integers; what the memory held before does not matter."""
    masters = [1.0 + 2.0**-10, -3.1, 0.0, 2.0**-140, 1e38, -1.00390625]
    bits = [int(torch.tensor(value).view(torch.int32)) for value in masters]
    memory = torch.tensor([(b + 0x8000) >> 16 for b in bits], dtype=torch.int16).view(torch.bfloat16)
    param = nn.Parameter(memory)
    remainders = [b - (int(half) << 16) for b, half in zip(bits, memory.view(torch.int16), strict=True)]
    assert any(remainder < 0 for remainder in remainders) and any(remainder > 0 for remainder in remainders)
    params = ParameterValues(slices_of(param), param.data if in_one_tensor else None)
    kept = RemainderValues(torch.tensor(remainders, dtype=torch.int16), params)
    out, spare = torch.full((6,), math.nan), torch.full((6,), math.nan)
    kept.read(out, spare)
    assert out.view(torch.int32).tolist() == bits
    kept.write(out)
    assert kept.remainder.tolist() == remainders and torch.equal(param.data.view(torch.int16), memory.view(torch.int16))


@pytest.mark.parametrize("as_roots", [False, True])
def test_fp16_numbers_are_scaled_by_the_largest_magnitude(as_roots: bool) -> None:
    values = [0.0, 4.0, 64.0, 1.0] if as_roots else [0.5, -20.0, 3.0, 0.0]  # roots up to 8; a negative largest
    kept = HalfValues(4, torch.device("cpu"), as_roots=as_roots)
    kept.write(torch.tensor(values))
    assert kept.scale.item() == (2.0**11 if as_roots else 2.0**10)  # 8 * 2**11 = 2**14; 20 * 2**10 = 1.25 * 2**14
    back = torch.empty(4)
    kept.read(back)
    assert back.tolist() == values


def test_a_copy_writes_the_parameter_too() -> None:
    param = nn.Parameter(torch.zeros(6, dtype=torch.float16))
    for dtype in (torch.bfloat16, torch.float16):
        kept = CopiedValues(stored(6, dtype, torch.device("cpu")), ParameterValues(slices_of(param)))
        values = torch.linspace(-1, 1.7, 6)
        kept.write(values)
        assert torch.equal(param.data, values.half())
        back = torch.empty(6)
        kept.read(back)
        assert torch.allclose(back, values, rtol=2.0**-8, atol=0)
        assert not math.isclose(float(back[5]), 1.7, rel_tol=1e-7)


def test_cut_slices_cover_every_element_once() -> None:
    params = [nn.Parameter(torch.zeros(n)) for n in (3, 10, 1, 6)]
    slices = slices_of(*params, gap=2)
    for numel in (1, 2, 3, 5, 7, 100):
        seen: dict[int, list[int]] = {id(p): [] for p in params}
        for stretch, end in cut_slices(slices, numel):
            assert stretch[-1].end <= end <= stretch[0].start + numel
            for piece in stretch:
                whole = next(s for s in slices if s.param is piece.param)
                assert piece.start - piece.offset == whole.start
                seen[id(piece.param)] += range(piece.offset, piece.offset + piece.numel)
        assert all(seen[id(p)] == list(range(p.numel())) for p in params)


def test_padding_is_zero_in_scratch_whatever_lay_there() -> None:
    """A NaN in the padding of gradient or master would become the scale of an fp16 moment."""
    params = [nn.Parameter(torch.ones(n, dtype=torch.bfloat16)) for n in (3, 5)]
    slices = slices_of(*params, gap=4)
    reduced = torch.full((12,), math.nan)
    for piece in slices:
        reduced[piece.start : piece.end] = 2.0
    run = Run(tuple(slices), reduced, nn.Parameter(torch.full((12,), math.nan)), torch.full((12,), math.nan), True)
    run.home = RemainderValues(torch.full((12,), 7, dtype=torch.int16), ParameterValues(slices))
    scratch = Scratch([], OptimizerConfig())
    scratch.extent = run.numel
    scratch.unpack([run], {})
    assert run.grad.tolist() == [2.0] * 3 + [0.0] * 4 + [2.0] * 5
    assert run.master[3:7].tolist() == [0.0] * 4
    assert bool((run.master[:3] > 1.0).all()) and bool((run.master[7:] > 1.0).all())
