"""Storage of one segment's masters between steps, if the parameters are not the masters in full precision.

    ParameterStorage    the 16-bit parameters themselves: there is no other master
    CopyStorage         an fp32 copy, which is stepped where it lies; the parameter is the copy rounded
    RemainderStorage    a bf16 parameter and the 16 bits that it lacks: together the fp32 master, exactly

The first and the third are stepped in scratch memory (scratch.py). bf16 is rounded to nearest, so a master in bf16
stands still under updates below 1/512 of it.

Users write parameters as they like: a load, a pruning mask, a clamp through `.data` leave no trace but the values. So
each step begins with `take_edits`, after which masters and parameters belong together again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from core.optimizer.masters.param_shards import ParamShard

# Elements that are compared, or stepped through scratch, at a time.
CPU_NUMEL = 2**18  # 1 MiB of an fp32 tensor: four of them stay in a core's cache
DEVICE_NUMEL = 2**24  # 64 MiB: long enough to hide the launch of a dozen kernels
INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes of an element
HALF_OF_A_REMAINDER = 0x8000


class ParameterStorage:
    """Masters that are the 16-bit parameters; also the way in which the other storages reach the parameters.

    memory: [numel] where the parameters lie one after the other, padding included; None where each has its own.
    kept: [numel] what is kept in addition; [0] for nothing.
    """

    def __init__(self, shards: Sequence[ParamShard], memory: torch.Tensor | None, kept: torch.Tensor) -> None:
        self.shards = shards
        self.memory = memory
        self.kept = kept

    def views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """The parts of `flat`, laid out as the segment is, that belong to `parameters()`."""
        if self.memory is not None:
            return [flat]
        first = self.shards[0].start
        return [flat[shard.start - first : shard.end - first].view(shard.shape) for shard in self.shards]

    def parameters(self) -> list[torch.Tensor]:
        """The owned part of each parameter; or all of them in one."""
        return [shard.data for shard in self.shards] if self.memory is None else [self.memory]

    def read(self, out: torch.Tensor, spare: torch.Tensor | None = None) -> None:
        """Fill `out`, flat and in full precision, with the masters.

        spare: as much memory, to be written over. Fresh memory costs more than what is written into it.
        """
        torch._foreach_copy_(self.views(out), self.parameters())

    def write(self, values: torch.Tensor) -> None:
        """Keep `values`, flat and in full precision, as masters; the parameters follow. `values` may be overwritten."""
        torch._foreach_copy_(self.parameters(), self.views(values))

    def take_parameters(self) -> None:
        """Make the parameters, as they are, the masters."""

    def take_edits(self) -> None:
        """Follow parameters that user code has written since the last `write`."""

    def saved(self, low: int, high: int) -> torch.Tensor | None:
        """Masters [low, high) in full precision; None where the parameters say it all."""
        return None

    def load(self, saved: Iterable[tuple[int, torch.Tensor]]) -> None:
        """Take over saved masters: (first element, values). The others stay."""

    def part(self, low: int, high: int, shards: Sequence[ParamShard]) -> ParameterStorage:
        """The storage of elements [low, high) alone, over the same memory. They hold `shards`."""
        memory = None if self.memory is None else self.memory[low:high]
        return type(self)(shards, memory, self.kept[low:high])


class CopyStorage(ParameterStorage):
    """Masters of their own, in full precision: `kept` is what the inner optimizer steps."""

    def read(self, out: torch.Tensor, spare: torch.Tensor | None = None) -> None:
        """Nothing: `out` is `kept`."""

    def take_parameters(self) -> None:
        torch._foreach_copy_(self.views(self.kept), self.parameters())

    def take_edits(self) -> None:
        """A parameter that is not its master rounded has been written, and becomes its own master."""
        for master, param in zip(self.views(self.kept), self.parameters(), strict=True):
            numel = CPU_NUMEL if master.is_cpu else DEVICE_NUMEL
            param = param.to(master.device)  # the same one, unless masters are on the host
            pieces = [(master, param)]
            if master.dim() == 1 and master.numel() > numel:
                pieces = list(zip(master.split(numel), param.split(numel), strict=True))
            for shard in pieces:
                _take_edits(*shard)

    def saved(self, low: int, high: int) -> torch.Tensor:
        return self.kept[low:high]

    def load(self, saved: Iterable[tuple[int, torch.Tensor]]) -> None:
        for low, values in saved:
            self.kept[low : low + values.numel()].copy_(values)


def _take_edits(master: torch.Tensor, param: torch.Tensor) -> None:
    """Give the master the parameter's value in every element in which the parameter is not the master rounded.

    The comparison is of bits. On a GPU the master is written in any case, because the host would have to wait for the
    result of the comparison.
    """
    rounded = master.to(param.dtype)  # the master itself where nothing is rounded
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
    """An fp32 master as the sum of two 16-bit integers: bits = (bits of the bf16 parameter << 16) + remainder.

    The remainder is signed, so the parameter is the master rounded to nearest. Ties go away from zero: with ties to
    even, as torch rounds, some remainders would need a 17th bit. Only there, once in 65536 numbers, the parameter
    differs from `master.bfloat16()`. Every fp32 number comes back bit for bit.

    kept: the remainders, in int16.
    """

    def _halves(self) -> list[torch.Tensor]:
        return [param.view(torch.int16) for param in self.parameters()]

    def read(self, out: torch.Tensor, spare: torch.Tensor | None = None) -> None:
        # The parameters' bits, converted to int32 where the master will stand; gaps between shards stay as they are.
        bits = out.view(torch.int32)
        torch._foreach_copy_(self.views(bits), self._halves())
        low = torch.empty_like(bits) if spare is None else spare.view(torch.int32)
        torch.add(low.copy_(self.kept), bits, alpha=1 << 16, out=bits)

    def write(self, values: torch.Tensor) -> None:
        bits = values.view(torch.int32)
        self.kept.copy_(bits)  # the lower 16 bits
        bits.add_(HALF_OF_A_REMAINDER).bitwise_right_shift_(16)
        torch._foreach_copy_(self._halves(), self.views(bits))

    def take_parameters(self) -> None:
        self.kept.zero_()

    def take_edits(self) -> None:
        """An edited parameter with its old remainder is a master too, at most half a unit of the last place away.

        A zero is none with a negative remainder; the two would make a NaN.
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
