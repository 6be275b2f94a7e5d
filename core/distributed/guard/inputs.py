"""Inputs over tensor parallelism, as checksums that explain why copies of a gradient differ.

They are never an error.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from core.distributed.guard.replicas import checksum
from core.groups import agree
from core.groups.process_groups import ProcessGroups

MOST_FORWARDS = 16  # number of forwards recorded in a step
MOST_DEPTH = 4  # depth of nested containers


class Inputs:
    """Checksums of the integer inputs of one step, such as tokens.

    Floating-point inputs may be activations, which differ by rounding.
    """

    def __init__(self) -> None:
        self.noted: dict[str, tuple[tuple[int, ...], torch.Tensor]] = {}  # path -> (shape, checksum)
        self.forwards = 0

    def note(self, given: Any) -> None:
        """Record the tensors of one forward.

        Queues a few small operations for each tensor on its device, without waiting.

        Args:
            given: Arguments of the forward.
        """
        for path, tensor in _leaves(given, "", MOST_DEPTH) if self.forwards < MOST_FORWARDS else ():
            if tensor.dim() and not tensor.is_floating_point() and is_readable(tensor):
                self.noted[f"forward {self.forwards}{path}"] = tuple(tensor.shape), checksum(tensor)
        self.forwards += 1

    def difference(self, groups: ProcessGroups) -> str | None:
        """Name the first input that differs between tensor-parallel ranks. Collective over them.

        Args:
            groups: Process groups of the model.

        Returns:
            A text, or None if all inputs are equal.
        """
        mine = {path: (shape, sums.tolist()) for path, (shape, sums) in self.noted.items()}
        answers = agree.gather(mine, groups.control("tp"), "the inputs over group tp")
        (rank, reference), *others = answers.items()
        for other, theirs in others:
            path = next((path for path in reference if path in theirs and theirs[path] != reference[path]), None)
            if path is not None:
                return (
                    f"the inputs differ between ranks {rank} and {other} of group 'tp' {list(answers)}, first in "
                    f"{path}. These ranks see the same batch in most programs: choose data by "
                    "parallel_state.get_data_parallel_rank(), and draw it from one seed in such a group"
                )
        return None


def _leaves(given: Any, path: str, depth: int) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(given, torch.Tensor):
        yield path, given
    elif depth and isinstance(given, (Mapping, list, tuple)):
        for key, value in given.items() if isinstance(given, Mapping) else enumerate(given):
            yield from _leaves(value, f"{path}, {key}", depth - 1)


def is_readable(tensor: torch.Tensor) -> bool:
    """Return True for a plain tensor with values, which can be read without changing the program.

    Args:
        tensor: Any tensor.
    """
    plain = type(tensor) is torch.Tensor and tensor.layout is torch.strided and tensor.device.type != "meta"
    if not plain or tensor.is_complex() or tensor.is_quantized or torch.compiler.is_compiling():
        return False
    try:
        return tensor.data_ptr() != 0
    except RuntimeError:  # inside torch.func, whose tensors have no memory
        return False
