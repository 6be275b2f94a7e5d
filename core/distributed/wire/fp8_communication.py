"""Collectives of 8-bit floats: each block of numbers is sent as e4m3 with one fp32 scale.

Backends do not support 8-bit floats, so bytes are sent as uint8. The rank that owns a part adds in fp32, from the
numbers it received. An all-reduce therefore rounds twice (each rank's contribution, then the sum) for any number of
ranks.

Error bound: rounding changes x by at most |x| / 16, or by its block's largest number / 2**18 if that is more (e4m3 has
3 bits of mantissa; its smallest step is 2**-9, of 448). So the mean g of the ranks' g_r arrives with an error of at
most

    1/16 mean|g_r| + 1/16 |g + that error| + small  <=  0.13 mean|g_r| + (largest number of a block) / 2**17

A block that contains inf or NaN arrives as NaN on every rank, so a loss scaler detects it.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from core.watch.waiting import waiting

BLOCK = 256  # numbers that share a scale: 4 bytes in 260
LARGEST = 448.0
FP8 = torch.float8_e4m3fn


def quantize(tensor: torch.Tensor) -> torch.Tensor:
    """Quantize rows [..., n], n a multiple of BLOCK, in blocks with one scale each, to bytes [..., n + 4 n / BLOCK]."""
    blocks = tensor.float().unflatten(-1, (-1, BLOCK))
    largest = blocks.abs().amax(-1, keepdim=True)
    scale = torch.where(largest > 0, largest / LARGEST, 1.0)
    # Some versions of torch round inf to 448. A scale of NaN marks it in all versions.
    scale = torch.where(largest.isfinite(), scale, torch.nan)
    # A subnormal scale would lose precision, and numbers below it are zero in fp32.
    numbers = (blocks / scale.clamp_min(torch.finfo(torch.float32).tiny)).clamp(-LARGEST, LARGEST).to(FP8)
    packed = torch.cat([numbers.view(torch.uint8), scale.contiguous().view(torch.uint8)], dim=-1)
    return packed.flatten(-2)


def dequantize(packed: torch.Tensor) -> torch.Tensor:
    """Return the fp32 numbers from bytes of ``quantize``."""
    blocks = packed.unflatten(-1, (-1, BLOCK + 4))
    scale = blocks[..., BLOCK:].contiguous().view(torch.float32).clamp_min(torch.finfo(torch.float32).tiny)
    return (blocks[..., :BLOCK].contiguous().view(FP8).float() * scale).flatten(-2)


def all_reduce(tensor: torch.Tensor, group: dist.ProcessGroup, *, mean: bool) -> None:
    """Sum or average a contiguous tensor [n] of any floating dtype in place over a group. Collective, blocking.

    Sends about half the bytes of an fp16 all-reduce, a quarter of an fp32 one.
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
    """Sum or average a tensor [n * size] over a group and store this rank's part in ``output``, [n]. Collective,
    blocking.

    Rounds once, so the error is at most 1/16 mean|g_r| + largest of a block / 2**18.
    """
    size = dist.get_world_size(group)
    own = _sum_of_parts(_padded(tensor.view(size, -1)), group, mean=mean)
    output.copy_(own[: output.numel()])


def all_gather(output: torch.Tensor, tensor: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Gather every rank's numbers [n], which may be part of ``output``, into ``output`` [n * size]. Blocking.

    Every rank gets the same rounded numbers, its own included: |error| <= |x| / 16 + largest of a block / 2**18.
    """
    size = dist.get_world_size(group)
    packed = quantize(_padded(tensor.view(1, -1))).flatten()
    gathered = torch.empty(size * packed.numel(), dtype=torch.uint8, device=packed.device)
    all_gather_bytes(gathered, packed, group)
    output.view(size, -1).copy_(dequantize(gathered.view(size, -1))[:, : tensor.numel()])


def all_gather_bytes(output: torch.Tensor, tensor: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Gather every rank's bytes [n] into ``output``, [n * size], by the installed torch version's function."""
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    with waiting("8-bit values of all ranks", group):
        gather(output, tensor, group=group)


def _sum_of_parts(rows: torch.Tensor, group: dist.ProcessGroup, *, mean: bool) -> torch.Tensor:
    """Return the fp32 sum or mean, [m], over ranks of this rank's row. ``rows`` is [size, m], row r for rank r."""
    packed = quantize(rows)
    received = torch.empty_like(packed)
    with waiting("8-bit parts of all ranks", group):
        dist.all_to_all_single(received, packed, group=group)
    parts = dequantize(received)
    return parts.sum(0) / len(parts) if mean else parts.sum(0)


def _padded(rows: torch.Tensor) -> torch.Tensor:
    """Pad [size, n] to [size, m], m a multiple of BLOCK."""
    return torch.nn.functional.pad(rows, (0, -rows.shape[1] % BLOCK))
