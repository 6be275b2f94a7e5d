"""Storage formats of master weights between steps, for parameters that are not full-precision masters.

    ParameterStorage    the 16-bit parameters themselves, with no other master
    CopyStorage         an fp32 copy, stepped in place; the parameter is the rounded copy
    RemainderStorage    a bf16 parameter and its 16 missing bits, which together are the exact fp32 master

The first and the third are stepped in scratch memory (scratch.py). bf16 rounds to nearest, so updates below 1/512 of a
bf16 master do not change it.

Users may write to parameters at any time: a load, a pruning mask, or a clamp through ``.data`` leaves no trace except
new values. Each step therefore begins with ``copy_edits``, which makes masters and parameters consistent.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from core.optimizer.masters.param_shards import ParamShard

# Number of elements compared, or stepped through scratch, at a time.
CPU_NUMEL = 2**18  # 1 MiB of an fp32 tensor: four of them stay in a core's cache
DEVICE_NUMEL = 2**24  # 64 MiB: long enough to hide the launch of a dozen kernels
INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}  # keyed by element size in bytes
HALF_OF_A_REMAINDER = 0x8000


class ParameterStorage:
    """Masters that are the 16-bit parameters themselves, and the base class of the other storages.

    ``memory`` is the contiguous memory of the segment's parameters, [numel] with padding, or ``None`` if each parameter
    has its own. ``kept`` is additional state, [numel], or [0] if the storage needs none.
    """

    def __init__(self, shards: Sequence[ParamShard], memory: torch.Tensor | None, kept: torch.Tensor) -> None:
        self.shards = shards
        self.memory = memory
        self.kept = kept

    def views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Split a flat tensor, [numel], with the segment's layout into views that match ``parameters()``."""
        if self.memory is not None:
            return [flat]
        first = self.shards[0].start
        return [flat[shard.start - first : shard.end - first].view(shard.shape) for shard in self.shards]

    def parameters(self) -> list[torch.Tensor]:
        """Return the owned part of each parameter, or one tensor over all of them if they are contiguous."""
        return [shard.data for shard in self.shards] if self.memory is None else [self.memory]

    def read(self, out: torch.Tensor, spare: torch.Tensor | None = None) -> None:
        """Copy the masters in full precision into ``out``, [numel].

        ``spare`` is workspace of the same size, because allocating new memory costs more than writing to it.
        """
        torch._foreach_copy_(self.views(out), self.parameters())

    def write(self, values: torch.Tensor) -> None:
        """Store full-precision masters, [numel], and update the parameters. ``values`` may be overwritten."""
        torch._foreach_copy_(self.parameters(), self.views(values))

    def copy_parameters(self) -> None:
        """Set the masters to the current parameters."""

    def copy_edits(self) -> None:
        """Update masters of parameters that user code has written since the last ``write``."""

    def saved(self, low: int, high: int) -> torch.Tensor | None:
        """Return masters [low, high) in full precision, or ``None`` if the parameters are the masters."""
        return None

    def load(self, saved: Iterable[tuple[int, torch.Tensor]]) -> None:
        """Load saved masters from pairs of (first element, values). Other elements keep their masters."""

    def part(self, low: int, high: int, shards: Sequence[ParamShard]) -> ParameterStorage:
        memory = None if self.memory is None else self.memory[low:high]
        return type(self)(shards, memory, self.kept[low:high])


class CopyStorage(ParameterStorage):
    """Separate masters in full precision. The inner optimizer steps ``kept``."""

    def read(self, out: torch.Tensor, spare: torch.Tensor | None = None) -> None:
        """Do nothing, because ``out`` is ``kept``."""

    def copy_parameters(self) -> None:
        torch._foreach_copy_(self.views(self.kept), self.parameters())

    def copy_edits(self) -> None:
        """Copy every parameter that differs from its rounded master to the master."""
        for master, param in zip(self.views(self.kept), self.parameters(), strict=True):
            numel = CPU_NUMEL if master.is_cpu else DEVICE_NUMEL
            param = param.to(master.device)  # the same tensor, unless masters are on the host
            pieces = [(master, param)]
            if master.dim() == 1 and master.numel() > numel:
                pieces = list(zip(master.split(numel), param.split(numel), strict=True))
            for shard in pieces:
                _copy_edits(*shard)

    def saved(self, low: int, high: int) -> torch.Tensor:
        return self.kept[low:high]

    def load(self, saved: Iterable[tuple[int, torch.Tensor]]) -> None:
        for low, values in saved:
            self.kept[low : low + values.numel()].copy_(values)


def _copy_edits(master: torch.Tensor, param: torch.Tensor) -> None:
    """Copy the parameter to the master in every element that differs from the rounded master.

    Bits are compared. On a GPU the master is always written, to avoid a host sync on the result of the comparison.
    """
    rounded = master.to(param.dtype)  # the master itself if nothing is rounded
    kind = INTEGERS[param.element_size()]
    if not master.is_cpu:
        master.copy_(torch.where(rounded.view(kind) == param.view(kind), master, param))
        return
    wide = 8 // param.element_size()
    flat = (
        t.dim() == 1 and t.is_contiguous() and not (t.numel() | t.storage_offset()) % wide for t in (rounded, param)
    )
    compared = torch.int64 if all(flat) else kind  # torch compares 64 bits at a time fastest
    if not torch.equal(rounded.view(compared), param.view(compared)):
        master.copy_(torch.where(rounded.view(kind) == param.view(kind), master, param))


class RemainderStorage(ParameterStorage):
    """Masters in fp32 as the sum of two 16-bit integers: bits = (bits of the bf16 parameter << 16) + remainder.

    The remainder is signed, so the parameter is the master rounded to nearest. Ties are rounded away from zero: with
    ties to even, as torch rounds, some remainders would need a 17th bit. Only in ties, once in 65536 numbers, does the
    parameter differ from ``master.bfloat16()``. Every fp32 number is restored bit for bit. ``kept`` stores the
    remainders in int16.
    """

    def _halves(self) -> list[torch.Tensor]:
        return [param.view(torch.int16) for param in self.parameters()]

    def read(self, out: torch.Tensor, spare: torch.Tensor | None = None) -> None:
        # The parameters' bits are converted to int32 in the master's memory; gaps between shards keep their values.
        bits = out.view(torch.int32)
        torch._foreach_copy_(self.views(bits), self._halves())
        low = torch.empty_like(bits) if spare is None else spare.view(torch.int32)
        torch.add(low.copy_(self.kept), bits, alpha=1 << 16, out=bits)

    def write(self, values: torch.Tensor) -> None:
        bits = values.view(torch.int32)
        self.kept.copy_(bits)  # the lower 16 bits
        bits.add_(HALF_OF_A_REMAINDER).bitwise_right_shift_(16)
        torch._foreach_copy_(self._halves(), self.views(bits))

    def copy_parameters(self) -> None:
        self.kept.zero_()

    def copy_edits(self) -> None:
        """Reset remainders that do not fit their edited parameter.

        An edited parameter with its old remainder is still a valid master, at most half a unit in the last place away.
        A zero with a negative remainder is not: together they would be a NaN.
        """
        for remainder, param in zip(self.views(self.kept), self.parameters(), strict=True):
            without_sign = param.view(torch.int16) << 1  # torch counts integers faster than bf16 numbers
            if without_sign.count_nonzero() < param.numel():
                remainder.masked_fill_((param == 0) & (remainder < 0), 0)

    def saved(self, low: int, high: int) -> torch.Tensor:
        return self._whole()[low:high]

    def load(self, saved: Iterable[tuple[int, torch.Tensor]]) -> None:
        whole = self._whole()
        for low, values in saved:
            whole[low : low + values.numel()].copy_(values)
        self.write(whole)

    def _whole(self) -> torch.Tensor:
        whole = torch.zeros(self.kept.numel(), dtype=torch.float32, device=self.kept.device)
        self.read(whole)
        return whole
