"""Master weights: the memory that the inner torch optimizer updates, bucket by bucket.

A bucket's owned range is cut into slices, one a parameter (the first and the last may hold only a part of theirs), and
neighbours of one param group are joined to runs, so that torch sees few long tensors instead of many short ones.
Three homes of a master weight, one class each:

    ParameterMasters   full precision, replicated: the model's parameters themselves
    ShardMasters       full precision, sharded: this rank's shard of the parameter buffer, updated in place
    CopiedMasters      16-bit parameters: an fp32 copy of the owned range, written back after the step
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from core.distributed.bucket import Bucket
from core.distributed.gradient_contract import GradientContract

LOW_PRECISION = (torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True, eq=False)
class Slice:
    """Elements [start, end) of the bucket's owned range: those from `offset` on of one flattened parameter."""

    param: nn.Parameter
    contract: GradientContract
    group: int
    start: int
    end: int
    offset: int

    @property
    def numel(self) -> int:
        """Elements of the parameter that this rank owns here."""
        return self.end - self.start


@dataclass(slots=True, eq=False)
class Run:
    """Neighbouring slices of one param group and the tensor that the inner optimizer sees for them."""

    slices: tuple[Slice, ...]
    master: nn.Parameter
    grad: torch.Tensor

    @property
    def start(self) -> int:
        """First element within the bucket's owned range."""
        return self.slices[0].start

    @property
    def group(self) -> int:
        """Index of the param group."""
        return self.slices[0].group


def owned_slices(bucket: Bucket, group_of: Callable[[nn.Parameter], int]) -> list[Slice]:
    """The parts of the bucket's parameters that this rank updates; empty ones are left out."""
    low, high = bucket.shard_range
    slices = []
    for slot, param, contract in zip(bucket.layout.slots, bucket.params, bucket.contracts, strict=True):
        slot_start, slot_end = slot.start - bucket.layout.start, slot.end - bucket.layout.start
        start, end = max(slot_start, low), min(slot_end, high)
        if start < end:
            slices.append(Slice(param, contract, group_of(param), start - low, end - low, start - slot_start))
    return slices


def join_slices(slices: list[Slice]) -> list[tuple[Slice, ...]]:
    """Neighbours of one param group together. The padding between them has no gradient that matters and no reader."""
    joined: list[list[Slice]] = []
    for piece in slices:
        if joined and joined[-1][-1].group == piece.group:
            joined[-1].append(piece)
        else:
            joined.append([piece])
    return [tuple(run) for run in joined]


class BucketMasters:
    """The master weights of one bucket's owned range, and the gradients that update them."""

    def __init__(self, bucket: Bucket, group_of: Callable[[nn.Parameter], int]) -> None:
        low, high = bucket.shard_range
        self.bucket = bucket
        self.grad = bucket.grad[low:high]  # as reduced, in the buffer's dtype
        self.slices = owned_slices(bucket, group_of)
        self.runs: list[Run] = []

    @property
    def scalable(self) -> list[torch.Tensor]:
        """The gradients that `load_gradients` has made ready, to be clipped in place."""
        return [self.grad]

    def load_gradients(self) -> None:
        """Make the runs' gradients those of the buffer."""

    def load_parameters(self) -> None:
        """Take over parameters that were changed from outside, such as loaded ones."""

    def store_parameters(self) -> None:
        """Write updated master weights to the parameters' memory that this rank owns."""

    def split(self, run: Run, counts: list[int], state: dict[Any, dict[str, Any]]) -> list[Run]:
        """Cut a run into runs of `counts` slices each; the inner optimizer's state is cut with it."""
        parts: list[Run] = []
        first = 0
        for count in counts:
            slices = run.slices[first : first + count]
            first += count
            low, high = slices[0].start - run.start, slices[-1].end - run.start
            part = Run(slices, nn.Parameter(run.master.data[low:high]), run.grad[low:high])
            if run.master in state:
                whole = state[run.master]
                state[part.master] = {key: cut_state(key, value, run.master, low, high) for key, value in whole.items()}
            parts.append(part)
        state.pop(run.master, None)
        index = self.runs.index(run)
        self.runs[index : index + 1] = parts
        return parts


def is_per_element(key: str, value: Any, master: torch.Tensor) -> bool:
    """Does a state value hold one number for every element of the master, as moments do and step counts do not?"""
    return isinstance(value, torch.Tensor) and key != "step" and value.shape == master.shape


def cut_state(key: str, value: Any, master: torch.Tensor, low: int, high: int) -> Any:
    """The part of one optimizer state value that belongs to elements [low, high) of a flat master."""
    if is_per_element(key, value, master):
        return value[low:high]
    return value.clone() if isinstance(value, torch.Tensor) else value


class ParameterMasters(BucketMasters):
    """Replicated, full precision: torch updates the model's parameters, each a run of its own."""

    def __init__(self, bucket: Bucket, group_of: Callable[[nn.Parameter], int]) -> None:
        super().__init__(bucket, group_of)
        views = {id(param): view for param, view in zip(bucket.params, bucket.views, strict=True)}
        self.runs = [Run((piece,), piece.param, views[id(piece.param)]) for piece in self.slices]


class FlatMasters(BucketMasters):
    """Masters that lie in one flat tensor `main` with gradients in `main_grad`."""

    def __init__(
        self, bucket: Bucket, group_of: Callable[[nn.Parameter], int], main: torch.Tensor, main_grad: torch.Tensor
    ) -> None:
        super().__init__(bucket, group_of)
        self.main = main
        self.main_grad = main_grad
        for slices in join_slices(self.slices):
            start, end = slices[0].start, slices[-1].end
            self.runs.append(Run(slices, nn.Parameter(main[start:end]), main_grad[start:end]))


class ShardMasters(FlatMasters):
    """Sharded, full precision: this rank's shard of the parameter buffer is the master."""

    def __init__(self, bucket: Bucket, group_of: Callable[[nn.Parameter], int]) -> None:
        low, high = bucket.shard_range
        assert bucket.param_data is not None, "a sharded bucket holds its parameters"
        super().__init__(bucket, group_of, bucket.param_data[low:high], bucket.grad[low:high])


class CopiedMasters(FlatMasters):
    """16-bit parameters: fp32 masters, and fp32 copies of the gradients where the buffer's are 16-bit too.

    Full-precision parameters come here as well when their gradients have another dtype or they are not contiguous.
    """

    def __init__(self, bucket: Bucket, group_of: Callable[[nn.Parameter], int]) -> None:
        low, high = bucket.shard_range
        dtype = torch.promote_types(bucket.params[0].dtype, torch.float32)
        main = torch.zeros(high - low, dtype=dtype, device=bucket.grad.device)
        grad = bucket.grad[low:high]
        super().__init__(bucket, group_of, main, grad if grad.dtype == dtype else torch.zeros_like(main))
        self.load_parameters()

    @property
    def scalable(self) -> list[torch.Tensor]:
        return [self.main_grad]

    def load_gradients(self) -> None:
        if self.main_grad.dtype != self.grad.dtype:
            self.main_grad.copy_(self.grad)

    def load_parameters(self) -> None:
        if self.bucket.param_data is not None:
            low, high = self.bucket.shard_range
            self.main.copy_(self.bucket.param_data[low:high])
            return
        for piece, view in self._whole_parameters():
            view.copy_(piece.param.data)

    def store_parameters(self) -> None:
        if self.bucket.param_data is not None:
            low, high = self.bucket.shard_range
            self.bucket.param_data[low:high].copy_(self.main)
            return
        whole = self._whole_parameters()
        if whole:
            torch._foreach_copy_([piece.param.data for piece, _ in whole], [view for _, view in whole])

    def _whole_parameters(self) -> list[tuple[Slice, torch.Tensor]]:
        return [(piece, self.main[piece.start : piece.end].view(piece.param.shape)) for piece in self.slices]


def masters_of(bucket: Bucket, group_of: Callable[[nn.Parameter], int]) -> BucketMasters:
    """Choose where the master weights of a bucket live."""
    dtype = bucket.params[0].dtype
    if dtype in LOW_PRECISION or dtype != bucket.grad.dtype:
        return CopiedMasters(bucket, group_of)
    if bucket.param_data is not None:
        return ShardMasters(bucket, group_of)
    if all(param.is_contiguous() for param in bucket.params):
        return ParameterMasters(bucket, group_of)
    return CopiedMasters(bucket, group_of)
