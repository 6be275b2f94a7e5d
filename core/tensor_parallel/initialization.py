"""Weights that are the same for every layout: the whole master weight is drawn, then each rank keeps its slice."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import torch
from torch import Tensor, nn

InitMethod = Callable[[Tensor], object]


def normal_init(std: float) -> InitMethod:
    """Draw from a normal distribution around zero."""
    return lambda weight: nn.init.normal_(weight, mean=0.0, std=std)


def draw_master(shape: tuple[int, ...], init_method: InitMethod, name: str | None, seed: int) -> Tensor:
    """The whole weight in fp32 on the CPU, for use in any dtype, device and layout.

    name: the parameter's path in the whole model; with `seed` it alone decides the numbers. None draws from torch's
    default CPU generator, which the ranks of a tensor-parallel group must then have seeded alike.
    """
    master = torch.empty(shape, dtype=torch.float32, device="cpu")
    with torch.no_grad():
        if name is None:
            init_method(master)
        else:
            digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
            with torch.random.fork_rng(devices=[]):
                torch.default_generator.manual_seed(int.from_bytes(digest[:8], "big") >> 1)
                init_method(master)
    return master


def rows_on_rank(length: int, size: int, multiple: int = 1) -> int:
    """Part of a dimension of `length` that each of `size` ranks holds, with padding: a multiple of `multiple`."""
    return -(-length // (size * multiple)) * multiple


def tensor_parallel_slice(master: Tensor, dim: int, size: int, rank: int, stride: int = 1, multiple: int = 1) -> Tensor:
    """Part of a master weight that rank `rank` of `size` keeps when it is split along `dim`.

    stride: the master's `dim` is this many parts (2 for SwiGLU's gate and up), each of which is split for itself.
    A dimension that does not divide is padded with zeros at its end (a vocabulary), so that a rank's part is a multiple
    of `multiple`.
    """
    parts = master.chunk(stride, dim) if stride > 1 else (master,)
    return torch.cat([_slice(part, dim, size, rank, multiple) for part in parts], dim)


def _slice(part: Tensor, dim: int, size: int, rank: int, multiple: int) -> Tensor:
    rows = rows_on_rank(part.shape[dim], size, multiple)
    start, stop = min(rank * rows, part.shape[dim]), min((rank + 1) * rows, part.shape[dim])
    kept = part.narrow(dim, start, stop - start)
    if stop - start == rows:
        return kept
    padding = list(part.shape)
    padding[dim] = rows - (stop - start)
    return torch.cat([kept, part.new_zeros(padding)], dim)


def tensor_parallel_join(slices: list[Tensor], dim: int, stride: int = 1) -> Tensor:
    """The master weight (or its gradient) from the ranks' slices, in rank order; padding stays at the end."""
    parts = [piece.chunk(stride, dim) for piece in slices]
    return torch.cat([part[i] for i in range(stride) for part in parts], dim)
