"""Layout-independent initialization: every rank draws the full master weight and keeps its slice."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import torch
from torch import Tensor, nn

InitMethod = Callable[[Tensor], object]


def normal_init(std: float) -> InitMethod:
    """Return an initializer that draws from a normal distribution with mean zero."""
    return lambda weight: nn.init.normal_(weight, mean=0.0, std=std)


def draw_master(shape: tuple[int, ...], init_method: InitMethod, name: str | None, seed: int) -> Tensor:
    """Draw a full weight in fp32 on the CPU, identical for any dtype, device and layout.

    Each rank draws the same master weight and keeps its slice, so that a run's initial weights do not depend on its
    parallel layout.

    Args:
        shape (tuple[int, ...]): Shape of the full weight.
        init_method (InitMethod): Initializes a tensor in place.
        name (str): Parameter path in the full model. Together with ``seed`` it determines the values. ``None`` draws
            from torch's default CPU generator, which all ranks of a tensor-parallel group must have seeded equally.
        seed (int): The job's seed.
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
    """Return the size of each rank's part of a dimension, padded to a multiple of ``multiple``."""
    return -(-length // (size * multiple)) * multiple


def tensor_parallel_slice(master: Tensor, dim: int, size: int, rank: int, stride: int = 1, multiple: int = 1) -> Tensor:
    """Return the slice of a master weight that one tensor-parallel rank holds.

    A dimension that does not divide evenly (a vocabulary) is padded with zeros at its end.

    Args:
        master (Tensor): Full weight.
        dim (int): Dimension to split.
        size (int): Number of ranks.
        rank (int): Rank that holds the slice.
        stride (int, optional): Number of parts of ``dim`` that are split separately (2 for SwiGLU's gate and up).
        multiple (int, optional): A rank's rows are padded to a multiple of this number.
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
    """Join the ranks' slices into the master weight (or its gradient). Inverse of ``tensor_parallel_slice``.

    Args:
        slices (list[Tensor]): Slices in rank order.
        dim (int): Dimension along which they were split.
        stride (int, optional): Number of parts of ``dim`` that were split separately.

    Returns:
        The full tensor, with any padding still at its end.
    """
    parts = [piece.chunk(stride, dim) for piece in slices]
    return torch.cat([part[i] for i in range(stride) for part in parts], dim)


def set_tensor_model_parallel_attributes(
    param: nn.Parameter, is_parallel: bool, dim: int, stride: int, length: int | None = None
) -> None:
    """Tag a parameter with its tensor-parallel split, which the wrapper, the optimizer and checkpoints read.

    Args:
        param (Parameter): Parameter to tag.
        is_parallel (bool): ``True`` if each rank holds a slice, ``False`` if the parameter is replicated.
        dim (int): Dimension along which it is split.
        stride (int): Number of parts of ``dim`` that are split separately (2 for SwiGLU's gate and up).
        length (int, optional): Size of ``dim`` in the full model, if the ranks' slices include padding.
    """
    param.tensor_model_parallel = is_parallel
    param.partition_dim = dim
    param.partition_stride = stride
    if length is not None:
        param.partition_length = length


def padded_vocab_size(vocab_size: int, tensor_parallel_size: int) -> int:
    """Round a vocabulary size up to a multiple of the tensor-parallel size, so that all ranks hold equal slices.

    Args:
        vocab_size (int): Number of token ids.
        tensor_parallel_size (int): Number of tensor-parallel ranks.
    """
    return -(-vocab_size // tensor_parallel_size) * tensor_parallel_size
