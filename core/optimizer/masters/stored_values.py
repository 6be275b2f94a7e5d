"""How masters and moments are kept between steps: one number an element in some dtype, computed with in full precision.

    PlainValues        fp32 or bf16 as they are
    HalfValues         fp16 and one power of two for all of them; second moments as their square roots
    ParameterValues    the parameter itself: there is no master apart from it
    CopiedValues       a master beside the parameter, of which the parameter is a rounded copy
    RemainderValues    a bf16 parameter and the 16 bits that it lacks: together the fp32 master, exactly

Each covers one run. `read` fills fp32 memory from what is kept, `write` keeps what is in it; both cost a pass over the
run. bf16 is rounded to nearest, so a moment or master in bf16 stands still under updates below 1/512 of it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from core.optimizer.masters.edited_parameters import take_edits

if TYPE_CHECKING:
    from core.optimizer.masters.master_weights import Slice

HALF_EXPONENT = 15  # the largest number of a run is scaled into [2**14, 2**15), a factor of 2 below fp16's limit
LARGEST_EXPONENT = 126  # of a scale, so that its inverse is a normal fp32 number too
HALF_OF_A_REMAINDER = 0x8000


class StoredValues(ABC):
    """The numbers of one run, in the dtype they are kept in."""

    @abstractmethod
    def read(self, out: torch.Tensor, spare: torch.Tensor | None = None) -> None:
        """Fill `out`, flat and in full precision.

        spare: as much memory as `out`, of its dtype, to be written over; without it some is taken where it is needed.
        """

    @abstractmethod
    def write(self, values: torch.Tensor) -> None:
        """Keep `values`, flat and in full precision; what is in them afterwards is not said."""

    @abstractmethod
    def part(self, low: int, high: int, slices: Sequence[Slice]) -> StoredValues:
        """Elements [low, high) as values of their own, over the same memory. `slices` are those that they hold."""

    @abstractmethod
    def saved(self, low: int, high: int) -> torch.Tensor:
        """Elements [low, high) for a state dict: as stored where that says it all, in full precision otherwise."""

    def take_edits(self) -> None:  # noqa: B027
        """Follow parameters that somebody has written since the last `write`; they may be these numbers themselves."""


@dataclass(slots=True, eq=False)
class PlainValues(StoredValues):
    """The numbers rounded to the dtype of `data`."""

    data: torch.Tensor

    def read(self, out: torch.Tensor, spare: torch.Tensor | None = None) -> None:
        out.copy_(self.data)

    def write(self, values: torch.Tensor) -> None:
        self.data.copy_(values)

    def part(self, low: int, high: int, slices: Sequence[Slice]) -> PlainValues:
        return PlainValues(self.data[low:high])

    def saved(self, low: int, high: int) -> torch.Tensor:
        return self.data[low:high]


class HalfValues(StoredValues):
    """fp16 numbers times 2**-k; k makes the best of fp16's range and changes with every write.

    as_roots: keep square roots. A second moment spans twice the powers of two that its gradients do; without the root
    it would round to 0 where the first moment does not, and Adam would divide by `eps` there.
    """

    def __init__(
        self,
        numel: int,
        device: torch.device,
        *,
        as_roots: bool = False,
        of: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> None:
        if of is None:
            of = (
                torch.zeros(numel, dtype=torch.float16, device=device),
                torch.ones((), dtype=torch.float32, device=device),
            )
        self.data, self.scale = of
        self.as_roots = as_roots

    def read(self, out: torch.Tensor, spare: torch.Tensor | None = None) -> None:
        out.copy_(self.data).mul_(self.scale.reciprocal())  # exact, and faster than a division
        if self.as_roots:
            out.square_()

    def write(self, values: torch.Tensor) -> None:
        if self.as_roots:
            values.sqrt_()
        if values.numel():
            largest = values.amax() if self.as_roots else _largest_magnitude(values)
            exponent = HALF_EXPONENT - torch.frexp(largest.float()).exponent
            torch.ldexp(
                torch.ones_like(self.scale), exponent.clamp_(-LARGEST_EXPONENT, LARGEST_EXPONENT), out=self.scale
            )
        self.data.copy_(values.mul_(self.scale))

    def part(self, low: int, high: int, slices: Sequence[Slice]) -> HalfValues:
        of = (self.data[low:high], self.scale.clone())
        return HalfValues(high - low, self.data.device, as_roots=self.as_roots, of=of)

    def saved(self, low: int, high: int) -> torch.Tensor:
        values = self.data[low:high].float().div_(self.scale)
        return values.square_() if self.as_roots else values


def _largest_magnitude(values: torch.Tensor) -> torch.Tensor:
    # aminmax reads as fast as memory allows; a norm of infinite order is twenty times slower on the CPU.
    low, high = torch.aminmax(values)
    return torch.maximum(low.neg(), high)


class ParameterValues(StoredValues):
    """The model's parameters, wherever they lie; also the way in which other masters reach them.

    memory: [numel] where they lie one after the other, padding included, as the run does; None where each has its own.
    """

    def __init__(self, slices: Sequence[Slice], memory: torch.Tensor | None = None) -> None:
        self.slices = list(slices)
        self.start = slices[0].start
        self.memory = memory

    def pieces(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """The parts of `flat`, laid out as the run is, that belong to `parameters()`."""
        if self.memory is not None:
            return [flat]
        return [flat[piece.start - self.start : piece.end - self.start] for piece in self.slices]

    def parameters(self) -> list[torch.Tensor]:
        """The owned part of each parameter, flat; or all of them in one."""
        if self.memory is not None:
            return [self.memory]
        return [p.param.data.view(-1)[p.offset : p.offset + p.numel] for p in self.slices]

    def read(self, out: torch.Tensor, spare: torch.Tensor | None = None) -> None:
        if self.memory is not None:
            out.copy_(self.memory)
        else:
            torch._foreach_copy_(self.pieces(out), self.parameters())

    def write(self, values: torch.Tensor) -> None:
        if self.memory is not None:
            self.memory.copy_(values)
        else:
            torch._foreach_copy_(self.parameters(), self.pieces(values))

    def part(self, low: int, high: int, slices: Sequence[Slice]) -> ParameterValues:
        return ParameterValues(slices, None if self.memory is None else self.memory[low:high])

    def saved(self, low: int, high: int) -> torch.Tensor:
        raise AssertionError("a parameter that is its own master is saved with the model")


class CopiedValues(StoredValues):
    """Masters of their own; whenever they are written the parameters follow: the masters as kept, rounded once more."""

    def __init__(self, values: PlainValues | HalfValues, params: ParameterValues) -> None:
        self.values = values
        self.params = params

    def read(self, out: torch.Tensor, spare: torch.Tensor | None = None) -> None:
        self.values.read(out, spare)

    def write(self, values: torch.Tensor) -> None:
        self.values.write(values)
        self.values.read(values)
        self.params.write(values)

    def take_edits(self) -> None:
        whole = torch.zeros_like(self.values.data, dtype=torch.float32)
        self.values.read(whole)
        pieces = zip(self.params.pieces(whole), self.params.parameters(), strict=True)
        if any([take_edits(*piece) for piece in pieces]):
            self.write(whole)

    def part(self, low: int, high: int, slices: Sequence[Slice]) -> CopiedValues:
        return CopiedValues(self.values.part(low, high, slices), self.params.part(low, high, slices))

    def saved(self, low: int, high: int) -> torch.Tensor:
        return self.values.saved(low, high)


class RemainderValues(StoredValues):
    """An fp32 master as the sum of two 16-bit integers: bits = (bits of the bf16 parameter << 16) + remainder.

    The remainder is signed, so the parameter is the master rounded to nearest. Ties go away from zero: with ties to
    even, as torch rounds, some remainders would need a 17th bit. Only there, once in 65536 numbers, the parameter
    differs from `master.bfloat16()`. Every fp32 number comes back bit for bit.
    """

    def __init__(self, remainder: torch.Tensor, params: ParameterValues) -> None:
        self.remainder = remainder  # [numel] int16
        self.params = params

    def read(self, out: torch.Tensor, spare: torch.Tensor | None = None) -> None:
        # The parameters' bits, converted to int32 where the master will stand; gaps between slices stay as they are.
        bits = out.view(torch.int32)
        if self.params.memory is not None:
            bits.copy_(self.params.memory.view(torch.int16))
        else:
            halves = [half.view(torch.int16) for half in self.params.parameters()]
            torch._foreach_copy_(self.params.pieces(bits), halves)
        # int32 += int16 would be converted by torch, in memory of its own.
        low = torch.empty_like(bits) if spare is None else spare.view(torch.int32)
        torch.add(low.copy_(self.remainder), bits, alpha=1 << 16, out=bits)

    def write(self, values: torch.Tensor) -> None:
        bits = values.view(torch.int32)
        self.remainder.copy_(bits)  # the lower 16 bits
        bits.add_(HALF_OF_A_REMAINDER).bitwise_right_shift_(16)
        if self.params.memory is not None:
            self.params.memory.view(torch.int16).copy_(bits)
        else:
            halves = [half.view(torch.int16) for half in self.params.parameters()]
            torch._foreach_copy_(halves, self.params.pieces(bits))

    def take_edits(self) -> None:
        """Any other edit is a master already: the remainder stays, at most half a unit of the parameter's last place.

        A zero is none with a negative remainder; the two would make a NaN.
        """
        for remainder, param in zip(self.params.pieces(self.remainder), self.params.parameters(), strict=True):
            without_sign = param.view(torch.int16) << 1  # torch counts integers faster than bf16 numbers
            if without_sign.count_nonzero() < param.numel():
                remainder.masked_fill_((param == 0) & (remainder < 0), 0)

    def part(self, low: int, high: int, slices: Sequence[Slice]) -> RemainderValues:
        return RemainderValues(self.remainder[low:high], self.params.part(low, high, slices))

    def saved(self, low: int, high: int) -> torch.Tensor:
        whole = torch.zeros(self.remainder.numel(), dtype=torch.float32, device=self.remainder.device)
        self.read(whole)
        return whole[low:high]


def stored(numel: int, dtype: torch.dtype, device: torch.device, *, as_roots: bool = False) -> PlainValues | HalfValues:
    """Zeros to be kept in `dtype`."""
    if dtype == torch.float16:
        return HalfValues(numel, device, as_roots=as_roots)
    return PlainValues(torch.zeros(numel, dtype=dtype, device=device))
