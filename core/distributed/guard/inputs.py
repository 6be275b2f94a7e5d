"""Inputs: what a wrapped model was given in a step, as checksums that stay on the device until a step ends.

Ranks of one tensor-parallel group must be given the same tokens, ranks of one context-parallel group parts of the same
batch, and the first and the last pipeline stage the same microbatch. Data ranks must not all be given the same batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from core.distributed.guard.replicas import checksum

MOST_FORWARDS = 16  # of a step that are noted
MOST_DEPTH = 4  # of containers inside one another
OF_WHOLE = "whole_of_this_part"  # the attribute of a part of a batch: the whole that it was cut from


def note_whole(whole: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    """Remember what a part of a batch of whole numbers, such as tokens, was cut from; returns the part.

    The whole lives as long as the part. Parts of activations, which are large, are not marked.
    """
    if not (whole.is_floating_point() or whole.is_complex()):
        setattr(part, OF_WHOLE, whole)
    return part


class Leaf(NamedTuple):
    """A tensor among the inputs: where it lies, its shape, and its checksum."""

    path: str  # such as "forward 0, input_ids"
    shape: tuple[int, ...]
    is_whole_number: bool
    varies: bool  # True if its elements are not all equal
    sums: tuple[int, int, int]
    of_whole: tuple[int, ...]  # the checksum of the batch that it is a part of; empty if that is not known


class Inputs:
    """Checksums of the inputs of one step."""

    def __init__(self) -> None:
        self.noted: list[tuple[str, tuple[int, ...], bool, list[torch.Tensor]]] = []
        self.forwards = 0

    def note(self, given: Any) -> None:
        """Note the tensors of one forward. A few small operations a tensor on its device, which is not waited for."""
        if self.forwards >= MOST_FORWARDS:
            return
        for path, tensor in _leaves(given, "", MOST_DEPTH):
            if _is_readable(tensor):
                varies = (tensor.detach() != tensor.detach().reshape(-1)[0]).any().reshape(1).long()
                whole = getattr(tensor, OF_WHOLE, None)
                is_part = whole is not None and _is_readable(whole)
                numbers = [checksum(tensor), varies, *([checksum(whole)] if is_part else [])]
                path, is_whole_number = f"forward {self.forwards}{path}", not tensor.is_floating_point()
                self.noted.append((path, tuple(tensor.shape), is_whole_number, numbers))
        self.forwards += 1

    def take(self) -> list[Leaf]:
        """Take what was noted since the last call, read from the device at once."""
        noted, self.noted, self.forwards = self.noted, [], 0
        if not noted:
            return []
        device = noted[-1][-1][0].device
        flat = torch.cat([number.to(device) for *_, numbers in noted for number in numbers]).tolist()
        leaves, at = [], 0
        for path, shape, is_whole_number, numbers in noted:
            own = flat[at : at + sum(number.numel() for number in numbers)]
            at += len(own)
            leaves.append(Leaf(path, shape, is_whole_number, bool(own[3]), tuple(own[:3]), tuple(own[4:])))
        return leaves

    def stop(self) -> None:
        """Keep nothing."""
        self.noted = []


def whole_numbers(given: Any) -> Iterator[torch.Tensor]:
    """The tensors of whole numbers among the inputs of a forward."""
    for _, tensor in _leaves(given, "", MOST_DEPTH):
        if _is_readable(tensor) and not tensor.is_floating_point() and tensor.dtype is not torch.bool:
            yield tensor


def _leaves(given: Any, path: str, depth: int) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(given, torch.Tensor):
        yield path, given
    elif depth and isinstance(given, Mapping):
        for key, value in given.items():
            yield from _leaves(value, f"{path}, {key}", depth - 1)
    elif depth and isinstance(given, Sequence) and not isinstance(given, (str, bytes)):
        for number, value in enumerate(given):
            yield from _leaves(value, f"{path}, {number}", depth - 1)


def _is_readable(tensor: torch.Tensor) -> bool:
    plain = type(tensor) is torch.Tensor and tensor.layout is torch.strided and tensor.device.type != "meta"
    return plain and tensor.numel() > 0 and not (tensor.is_complex() or tensor.is_quantized)
