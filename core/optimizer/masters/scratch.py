"""Scratch: full-precision memory to step segments whose masters, gradients or moments are stored in another format.

A wave of segments is unpacked, stepped by the inner optimizer, and packed again. The memory is therefore bounded for
any model size, and algorithms do not depend on the storage format.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from core.optimizer.masters.master_storage import CPU_NUMEL, DEVICE_NUMEL, CopyStorage, RemainderStorage
from core.optimizer.masters.master_weights import BucketMasters, Segment, is_per_element
from core.optimizer.optimizer_config import OptimizerConfig

ALIGNMENT = 64  # in elements, so that every segment begins at a vector's first element

OPTION_OF_STATE = {  # moment's name in an inner optimizer -> option with its storage dtype
    **dict.fromkeys(("exp_avg", "momentum_buffer"), "exp_avg_dtype"),
    **dict.fromkeys(("exp_avg_sq", "max_exp_avg_sq"), "exp_avg_sq_dtype"),
}

State = dict[Any, dict[str, Any]]


def scratch_numel(device: torch.device) -> int:
    """Return the length of the longest segment that a device steps through scratch, in elements."""
    return CPU_NUMEL if device.type == "cpu" else DEVICE_NUMEL


def kept_dtype(key: str, config: OptimizerConfig) -> torch.dtype | None:
    """Return the storage dtype of an inner optimizer's state, or ``None`` if it is fp32 like the arithmetic."""
    dtype = getattr(config, OPTION_OF_STATE[key]) if key in OPTION_OF_STATE else torch.float32
    return None if dtype == torch.float32 else dtype


class Scratch:
    """Scratch memory shared by all waves of an optimizer: a tensor each for masters, gradients and packed moments."""

    def __init__(self, masters: Sequence[BucketMasters], config: OptimizerConfig, *, at_once: bool = False) -> None:
        """Plan and allocate the memory, and assign each segment a place in it.

        ``at_once`` gives every segment of all buckets a separate place, because they are stepped in one call.
        """
        self.config = config
        self.extent = 0
        self.memory: dict[tuple[str, torch.dtype, torch.device], torch.Tensor] = {}
        at = 0
        for bucket_masters in masters:
            limit = math.inf if at_once else scratch_numel(bucket_masters.grad.device)
            at = self._plan_waves(bucket_masters, at if at_once else 0, limit)
        for bucket_masters in masters:
            for segment in bucket_masters.segments:
                if segment.in_scratch:
                    self._bind(bucket_masters, segment)

    def _plan_waves(self, masters: BucketMasters, at: int, limit: float) -> int:
        """Assign waves from element ``at`` on, and return the end of the last one.

        A segment that is longer than ``limit`` (a complete matrix) has its own wave.
        """
        wave = 0
        for segment in masters.segments:
            if segment.in_scratch:
                if at and at + segment.numel > limit:
                    wave, at = wave + 1, 0
                segment.wave, segment.at = wave, at
                self.extent = max(self.extent, at + segment.numel)
                at = -(-(at + segment.numel) // ALIGNMENT) * ALIGNMENT
        return at

    def _bind(self, masters: BucketMasters, segment: Segment) -> None:

        def memory(name: str) -> torch.Tensor:
            part = self._memory(name, masters.dtype, masters.grad.device)[segment.at : segment.at + segment.numel]
            return part.view(masters.shape_of(segment))

        if not isinstance(segment.storage, CopyStorage | None):
            segment.master = nn.Parameter(memory("master"))
        segment.grad = (
            segment.reduced.view(segment.master.shape) if segment.reduced.dtype == masters.dtype else memory("grad")
        )

    def _memory(self, name: str, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        if (name, dtype, device) not in self.memory:
            self.memory[name, dtype, device] = torch.zeros(self.extent, dtype=dtype, device=device)
        return self.memory[name, dtype, device]

    def _spare(self, segment: Segment) -> torch.Tensor | None:
        """Return workspace for ``read``, or ``None`` if not needed: the gradients' scratch, which is filled after the
        masters.
        """
        if not isinstance(segment.storage, RemainderStorage):
            return None
        memory = self._memory("grad", segment.master.dtype, segment.master.device)
        return memory[segment.at : segment.at + segment.numel]

    @property
    def nbytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in self.memory.values())

    # -- a wave -----------------------------------------------------------------------------------------------------

    def unpack(self, wave: Sequence[Segment], state: State) -> None:
        """Copy gradients, masters and moments of a wave into scratch."""
        for segment in wave:
            if segment.storage is not None:
                segment.storage.read(segment.master.data.view(-1), self._spare(segment))
            if segment.grad.data_ptr() != segment.reduced.data_ptr():
                segment.grad.view(-1).copy_(segment.reduced)
            for key, kept in segment.moments.items():
                state[segment.master][key].view(-1).copy_(kept)

    def pack(self, wave: Sequence[Segment], state: State) -> None:
        """Store a wave's masters and moments in their own format, and update the parameters from their masters."""
        for segment in wave:
            if segment.storage is not None:
                segment.storage.write(segment.master.data.view(-1))
            segment_state = state.get(segment.master, {})
            for key, value in segment_state.items():
                if key not in segment.moments and is_per_element(key, value, segment.master):
                    segment_state[key] = self.adopt(segment, key, value)
                if key in segment.moments:
                    segment.moments[key].copy_(value.view(-1))

    def adopt(self, segment: Segment, key: str, value: torch.Tensor) -> torch.Tensor:
        """Return the tensor to use as an inner optimizer's moment: a view of scratch if it is stored in another
        dtype.
        """
        dtype = kept_dtype(key, self.config)
        if dtype is None:
            return value
        segment.moments[key] = torch.zeros(segment.numel, dtype=dtype, device=value.device)
        memory = self._memory(key, value.dtype, value.device)
        return memory[segment.at : segment.at + segment.numel].view(segment.master.shape)
