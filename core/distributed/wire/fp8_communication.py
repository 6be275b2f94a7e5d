"""Collectives that carry 8-bit floats: each block of numbers travels as e4m3 with one fp32 scale.

Backends know no 8-bit floats, so bytes are sent as uint8. Sums are made in fp32 on the rank that owns the part, from
numbers as they arrived: an all-reduce rounds twice (each rank's contribution, then the sum), however many ranks.

How far off: rounding x changes it by at most |x| / 16, or by its block's largest number / 2**18 where that is more
(e4m3 has 3 bits of mantissa; its smallest step is 2**-9, of 448). So the mean g of the ranks' g_r arrives with an error
of at most

    1/16 mean|g_r| + 1/16 |g + that error| + small  <=  0.13 mean|g_r| + (largest number of a block) / 2**17

A block that holds inf or NaN arrives as NaN on every rank, so a loss scaler sees it.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from core.watch.waiting import waiting

BLOCK = 256  # numbers that share a scale: 4 bytes in 260
LARGEST = 448.0
FP8 = torch.float8_e4m3fn


def quantize(tensor: torch.Tensor) -> torch.Tensor:
    """Numbers [..., n] as bytes [..., n + 4 n / BLOCK]; n a multiple of BLOCK, rows independent."""
    blocks = tensor.float().unflatten(-1, (-1, BLOCK))
    largest = blocks.abs().amax(-1, keepdim=True)
    scale = torch.where(largest > 0, largest / LARGEST, 1.0)
    # An inf would be rounded to 448 by some versions of torch; a scale of NaN shows it in all.
    scale = torch.where(largest.isfinite(), scale, torch.nan)
    # A scale in the subnormal numbers would lose its own precision, and numbers below it are zero to fp32.
    numbers = (blocks / scale.clamp_min(torch.finfo(torch.float32).tiny)).clamp(-LARGEST, LARGEST).to(FP8)
    packed = torch.cat([numbers.view(torch.uint8), scale.contiguous().view(torch.uint8)], dim=-1)
    return packed.flatten(-2)


def dequantize(packed: torch.Tensor) -> torch.Tensor:
    """Bytes of `quantize` as fp32 numbers."""
    blocks = packed.unflatten(-1, (-1, BLOCK + 4))
    scale = blocks[..., BLOCK:].contiguous().view(torch.float32).clamp_min(torch.finfo(torch.float32).tiny)
    return (blocks[..., :BLOCK].contiguous().view(FP8).float() * scale).flatten(-2)


def all_reduce(tensor: torch.Tensor, group: dist.ProcessGroup, *, mean: bool) -> None:
    """Sum, or average, a contiguous tensor [n] in place over `group`. Collective, blocking; any floating dtype, any n.

    Sends about half of what an fp16 all-reduce sends, a quarter of an fp32 one.
    """
    size = dist.get_world_size(group)
    if tensor.numel() == 0 or size == 1:
        return
    row = -(-tensor.numel() // (size * BLOCK)) * BLOCK
    rows = torch.nn.functional.pad(tensor.view(-1), (0, size * row - tensor.numel())).view(size, row)
    total = rows.new_empty(size * row, dtype=torch.float32)
    all_gather(total, _sum_of_parts(rows, group, mean=mean), group)
    tensor.view(-1).copy_(total[: tensor.numel()])


def reduce_scatter(output: torch.Tensor, tensor: torch.Tensor, group: dist.ProcessGroup, *, mean: bool) -> None:
    """Sum, or average, `tensor` [n * size] over `group`; `output` [n] is this rank's part. Collective, blocking.

    Rounds once, so the error is at most 1/16 mean|g_r| + largest of a block / 2**18.
    """
    size = dist.get_world_size(group)
    own = _sum_of_parts(_padded(tensor.view(size, -1)), group, mean=mean)
    output.copy_(own[: output.numel()])


def all_gather(output: torch.Tensor, tensor: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Fill `output` [n * size] with every rank's `tensor` [n], which may be a part of it. Collective, blocking.

    Every rank gets the same rounded numbers, its own included: |error| <= |x| / 16 + largest of a block / 2**18.
    """
    size = dist.get_world_size(group)
    packed = quantize(_padded(tensor.view(1, -1))).flatten()
    gathered = torch.empty(size * packed.numel(), dtype=torch.uint8, device=packed.device)
    all_gather_bytes(gathered, packed, group)
    output.view(size, -1).copy_(dequantize(gathered.view(size, -1))[:, : tensor.numel()])


def all_gather_bytes(output: torch.Tensor, tensor: torch.Tensor, group: dist.ProcessGroup) -> None:
    """All-gather under the name that this version of torch has for it."""
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    with waiting("8-bit values of all ranks", group):
        gather(output, tensor, group=group)


def _sum_of_parts(rows: torch.Tensor, group: dist.ProcessGroup, *, mean: bool) -> torch.Tensor:
    """rows [size, m], row r for rank r. Returns the fp32 sum, or mean, over ranks of this rank's row, [m]."""
    packed = quantize(rows)
    received = torch.empty_like(packed)
    with waiting("8-bit parts of all ranks", group):
        dist.all_to_all_single(received, packed, group=group)
    parts = dequantize(received)
    return parts.sum(0) / len(parts) if mean else parts.sum(0)


def _padded(rows: torch.Tensor) -> torch.Tensor:
    """[size, n] as [size, m], m a multiple of BLOCK."""
    return torch.nn.functional.pad(rows, (0, -rows.shape[1] % BLOCK))
