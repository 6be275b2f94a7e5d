"""Master weights: the memory that the inner torch optimizer updates, bucket by bucket.

A bucket's owned range is cut into slices, one a parameter (the first and the last may hold only a part of theirs), and
neighbours of one param group are joined to runs, so that torch sees few long tensors instead of many short ones.

Where a run's master is, its gradients are and its moments are in full precision, torch steps them where they lie:

    the shard         full precision: this rank's part of the memory that parameters lie in, updated in place. Where
                      nothing is sharded that is all of it, and the optimizer makes it (flat_parameters.py)
    the parameter     the same where parameters have to stay where they are: each is a run
    a copy            16-bit parameters: an fp32 copy of the owned range, written back after the step

Every other run is stepped through scratch memory (scratch.py), cut into pieces that fit there.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple

import torch
from torch import nn

from core import huge_pages
from core.distributed.buffer.bucket import Bucket
from core.distributed.buffer.param_views import pieces_of
from core.distributed.contract.gradient_contract import GradientContract
from core.optimizer.masters.edited_parameters import take_edits
from core.optimizer.masters.flat_parameters import FlatParameters
from core.optimizer.masters.stored_values import CopiedValues, ParameterValues, RemainderValues, StoredValues, stored
from core.optimizer.optimizer_config import OptimizerConfig

LOW_PRECISION = (torch.bfloat16, torch.float16)
_REQUIRES_GRAD = operator.attrgetter("requires_grad")
VECTOR_NUMEL = 16  # elements of the longest vector of a CPU, in fp32
NORM_GROUP = "grad_norm_group"  # the attribute of parameters whose gradients have a norm of their own


class Slice(NamedTuple):
    """Elements [start, end) of the bucket's owned range: those from `offset` on of one flattened parameter.

    A tuple, because there is one for each parameter and a frozen dataclass takes four times as long to make.
    """

    param: nn.Parameter
    contract: GradientContract
    group: int
    start: int
    end: int
    offset: int
    norm_group: str | None = None

    @property
    def numel(self) -> int:
        """Elements of the parameter that this rank owns here."""
        return self.end - self.start

    def cut(self, start: int, end: int) -> Slice:
        """The part of it in [start, end) of the owned range."""
        low, high = max(self.start, start), min(self.end, end)
        return self._replace(start=low, end=high, offset=self.offset + low - self.start)


@dataclass(slots=True, eq=False)
class Run:
    """Neighbouring slices of one param group and the tensor that the inner optimizer sees for them.

    In scratch `master` and `grad` mean something only while the run is stepped.
    """

    slices: tuple[Slice, ...]
    reduced: torch.Tensor  # [numel], the gradients where they were reduced, in their dtype
    master: nn.Parameter = field(default_factory=lambda: nn.Parameter(torch.empty(0)))
    grad: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    in_scratch: bool = False
    wave: int = 0  # runs of a bucket with equal numbers are in scratch at the same time
    at: int = 0  # where in the scratch memory
    home: StoredValues | None = None  # where the master is kept; None: `master` itself
    moments: dict[str, StoredValues] = field(default_factory=dict)  # what is kept in another dtype
    live: bool = True  # False while its parameters are frozen, or have no gradient on any rank

    @property
    def start(self) -> int:
        """First element within the bucket's owned range."""
        return self.slices[0].start

    @property
    def numel(self) -> int:
        """Elements, padding between slices included."""
        return self.reduced.numel()

    @property
    def group(self) -> int:
        """Index of the param group."""
        return self.slices[0].group

    @property
    def norm_group(self) -> str | None:
        """The norm that its gradients are clipped by."""
        return self.slices[0].norm_group

    @property
    def gaps(self) -> list[tuple[int, int]]:
        """[low, high) of the padding after slices, within the run."""
        starts = [*(piece.start - self.start for piece in self.slices[1:]), self.numel]
        ends = [piece.end - self.start for piece in self.slices]
        return [(end, start) for end, start in zip(ends, starts, strict=True) if end < start]


def owned_slices(bucket: Bucket, group_of: Callable[[nn.Parameter], int]) -> list[Slice]:
    """The parts of the bucket's parameters that this rank updates; empty ones are left out."""
    low, high = bucket.shard_range
    first = bucket.layout.start
    slices = []
    for slot, param, contract in zip(bucket.layout.slots, bucket.params, bucket.contracts, strict=True):
        _, _, slot_start, slot_end, _ = slot
        start, end = slot_start - first, slot_end - first
        offset = 0
        if start < low:
            start, offset = low, low - start
        if end > high:
            end = high
        if start < end:
            norm_group = getattr(param, NORM_GROUP, None)
            slices.append(Slice(param, contract, group_of(param), start - low, end - low, offset, norm_group))
    return slices


def join_slices(slices: Sequence[Slice], alone: Callable[[int], bool] = lambda group: False) -> list[list[Slice]]:
    """Neighbours of one param group and norm together. The padding between them has no gradient that matters.

    Only where what comes before fills whole vectors: kernels round the last elements of a tensor, where they do not, in
    another way than those before, and a run that is split later (a frozen parameter) shall not change a bit.
    alone: param groups of which each slice is a run of its own.
    """
    joined: list[list[Slice]] = []
    stretch: list[Slice] = []  # the last one
    key: tuple[int, str | None] | None = None  # its group and norm; None where nothing may join it
    first = 0  # where it begins
    for piece in slices:
        mine = None if alone(piece.group) else (piece.group, piece.norm_group)
        if mine is not None and mine == key and (piece.start - first) % VECTOR_NUMEL == 0:
            stretch.append(piece)
        else:
            stretch = [piece]
            joined.append(stretch)
            key, first = mine, piece.start
    return joined


def cut_slices(slices: Sequence[Slice], numel: int) -> list[tuple[list[Slice], int]]:
    """Cut neighbours into (slices, end) of `numel` elements and a shorter last one.

    A stretch ends where it was cut, in padding perhaps, so that it fills whole vectors (see join_slices).
    """
    first, last = slices[0].start, slices[-1].end
    stretches: list[tuple[list[Slice], int]] = []
    index = 0
    for start in range(first, last, numel):
        end = min(start + numel, last)
        stretch = []
        while index < len(slices) and slices[index].start < end:
            stretch.append(slices[index].cut(start, end))
            if slices[index].end > end:
                break  # it goes on in the next stretch
            index += 1
        if stretch:
            stretches.append((stretch, end))
    return stretches


class Home(Enum):
    """Where the masters of a bucket are kept."""

    PARAMETER = "the parameters"
    COPY = "a copy of the owned range"
    REMAINDER = "bf16 parameters and what they lack"


class BucketMasters:
    """The master weights of one bucket's owned range, and the gradients that update them.

    scratch_numel: the longest run that is stepped through scratch; None for any length.
    needs_shape: is a param group's algorithm one that needs whole parameters in their shape?
    """

    def __init__(
        self,
        bucket: Bucket,
        group_of: Callable[[nn.Parameter], int],
        config: OptimizerConfig,
        *,
        scratch_numel: int | None = None,
        needs_shape: Callable[[int], bool] = lambda group: False,
    ) -> None:
        self.bucket = bucket
        self.config = config
        self.grad = bucket.owned_grad
        self.slices = owned_slices(bucket, group_of)
        self.live = [True] * len(bucket.params)  # for each parameter: is it updated in this step
        self.param_dtype = bucket.params[0].dtype
        self.dtype = torch.promote_types(self.param_dtype, torch.float32)  # what steps are computed in
        self.flat: FlatParameters | None = None
        if bucket.param_data is None and not config.optimizer_cpu_offload:
            self.flat = FlatParameters.of(bucket)
        self.param_data = self._owned_param_data()
        self.home = self._choose_home()
        self.main: torch.Tensor | None = None
        if self.home is Home.COPY and self.copy_dtype == self.dtype:
            self.main = huge_pages.zeros(self.grad.numel(), self.dtype, self.grad.device)
        self.in_scratch = self._passes_through_scratch()
        self.remainders: torch.Tensor | None = None
        if self.home is Home.REMAINDER:
            self.remainders = huge_pages.zeros(self.grad.numel(), torch.int16, self.grad.device)
        self.needs_shape = needs_shape
        self.runs = self._make_runs(self._stretches(scratch_numel))
        self.load_parameters()

    # -- where things lie -------------------------------------------------------------------------------------------

    def _owned_param_data(self) -> torch.Tensor | None:
        """The owned range of the memory that the parameters lie in; None where each has its own."""
        if self.flat is not None:
            return self.flat.data
        low, high = self.bucket.shard_range
        return None if self.bucket.param_data is None else self.bucket.param_data[low:high]

    def _choose_home(self) -> Home:
        config = self.config
        contiguous = all(param.is_contiguous() for param in self.bucket.params)
        if self.param_dtype not in LOW_PRECISION:
            return Home.PARAMETER if contiguous or self.param_data is not None else Home.COPY
        if not config.use_precision_aware_optimizer or not contiguous:
            return Home.COPY
        if config.main_params_dtype == self.param_dtype:
            return Home.PARAMETER
        bf16_beside_fp32 = self.param_dtype == torch.bfloat16 and config.main_params_dtype == torch.float32
        return Home.REMAINDER if bf16_beside_fp32 and config.store_param_remainders else Home.COPY

    @property
    def copy_dtype(self) -> torch.dtype:
        """What a copy of the owned range is kept in."""
        plain = self.param_dtype not in LOW_PRECISION or not all(p.is_contiguous() for p in self.bucket.params)
        return self.dtype if plain else self.config.main_params_dtype

    def _passes_through_scratch(self) -> bool:
        """Is anything kept in another dtype than steps are computed in?"""
        config = self.config
        in_place = self.main is not None or (self.home is Home.PARAMETER and self.param_dtype == self.dtype)
        moments = (config.exp_avg_dtype, config.exp_avg_sq_dtype)
        return not in_place or self.grad.dtype != self.dtype or any(dtype != torch.float32 for dtype in moments)

    def _stretches(self, scratch_numel: int | None) -> list[tuple[list[Slice], int]]:
        """(slices, end) of each run."""
        in_place = self.home is Home.PARAMETER and self.param_dtype == self.dtype
        one_a_param = self.config.optimizer_cpu_offload or (in_place and self.param_data is None)
        joined = join_slices(self.slices, lambda group: one_a_param or self.needs_shape(group))
        stretches: list[tuple[list[Slice], int]] = []
        for slices in joined:
            if self.in_scratch and scratch_numel is not None and not self.needs_shape(slices[0].group):
                stretches += cut_slices(slices, scratch_numel)
            else:
                stretches.append((slices, slices[-1].end))
        return stretches

    def _make_runs(self, stretches: Sequence[tuple[list[Slice], int]]) -> list[Run]:
        ranges = [(slices[0].start, end) for slices, end in stretches]
        reduced = pieces_of(self.grad, ranges)
        values: Sequence[torch.Tensor | None] = [None] * len(ranges)
        if self.param_data is not None:
            values = pieces_of(self.param_data, ranges)
        return [
            self._run(slices, grads, params)
            for (slices, _), grads, params in zip(stretches, reduced, values, strict=True)
        ]

    def _run(self, slices: list[Slice], reduced: torch.Tensor, values: torch.Tensor | None) -> Run:
        """One run; `values` is the memory of its parameters where they lie one after the other."""
        in_place = self.home is Home.PARAMETER and self.param_dtype == self.dtype
        if self.main is None and not in_place:
            return Run(tuple(slices), reduced, in_scratch=True, home=self._home_of(slices, reduced.numel(), values))
        piece = slices[0]
        if self.main is not None:
            values = self.main[piece.start : piece.start + reduced.numel()]
        shape = self._shape_of(piece, reduced.numel()) if self.needs_shape(piece.group) else None
        if values is not None:
            master = nn.Parameter(values if shape is None else values.view(shape))
        elif piece.numel == piece.param.numel():
            master = piece.param
        else:
            master = nn.Parameter(_of_parameter(piece))
        if self.in_scratch:
            return Run(tuple(slices), reduced, master, in_scratch=True)
        return Run(tuple(slices), reduced, master, reduced if master.dim() == 1 else reduced.view(master.shape))

    def _home_of(self, slices: Sequence[Slice], numel: int, values: torch.Tensor | None) -> StoredValues:
        """Where the master of a run is kept that is stepped in scratch."""
        params = ParameterValues(slices, values)
        if self.remainders is not None:
            return RemainderValues(self.remainders[slices[0].start : slices[0].start + numel], params)
        if self.home is Home.COPY:
            return CopiedValues(stored(numel, self.copy_dtype, self.grad.device), params)
        return params

    def _shape_of(self, piece: Slice, numel: int) -> tuple[int, ...]:
        """The shape in which the inner optimizer sees a run of `numel` elements that begins with `piece`."""
        if not self.needs_shape(piece.group):
            return (numel,)
        if piece.numel != piece.param.numel():
            raise ValueError(
                f"parameter {piece.contract.name!r} is updated by an algorithm that needs it whole, and this rank owns "
                f"{piece.numel} of its {piece.param.numel()} elements; wrap the model with whole_param_shards=True"
            )
        return tuple(piece.param.shape)

    def place(self, run: Run, memory: Callable[[str], torch.Tensor]) -> None:
        """Give a run its part of the scratch memory of this name, where it needs it."""
        if run.home is not None:
            master = memory("master")[run.at : run.at + run.numel]
            run.master = nn.Parameter(master.view(self._shape_of(run.slices[0], run.numel)))
        if run.reduced.dtype == self.dtype:
            run.grad = run.reduced.view(run.master.shape)
        else:
            run.grad = memory("grad")[run.at : run.at + run.numel].view(run.master.shape)

    @property
    def waves(self) -> list[list[Run]]:
        """The runs that are stepped through scratch, those of one wave together."""
        scratched = (run for run in self.runs if run.in_scratch)
        return [list(runs) for _, runs in itertools.groupby(scratched, key=lambda run: run.wave)]

    # -- moving values ----------------------------------------------------------------------------------------------

    def load_parameters(self) -> None:
        """Take over parameters that were changed from outside, such as loaded ones."""
        self.take_back_parameters()
        for run in self.runs:
            if self.main is not None:
                views = [self.main[p.start : p.end].view(_flat_or_whole(p)) for p in run.slices]
                torch._foreach_copy_(views, [_of_parameter(p) for p in run.slices])
            elif isinstance(run.home, (CopiedValues, RemainderValues)):
                whole = torch.zeros(run.numel, dtype=self.dtype, device=self.grad.device)
                run.home.params.read(whole)
                run.home.write(whole)

    def live_changed(self) -> bool:
        """True if other parameters are updated in this step than in the last. Once a step: 0.1 ms for 2005 of them."""
        trains = map(_REQUIRES_GRAD, self.bucket.params)
        before, self.live = self.live, list(map(operator.and_, trains, map(bool, self.bucket.used)))
        return self.live != before

    def take_over_edits(self) -> None:
        """Let copies follow parameters that somebody has written since the last step: loaded, pruned or clamped ones.

        After it masters and parameters belong together again, wherever the parameters were left.
        """
        self.take_back_parameters()
        if self.main is not None and self.param_data is not None:
            take_edits(self.main, self.param_data)
        elif self.main is not None:
            for p in self.slices:
                take_edits(self.main[p.start : p.end].view(_flat_or_whole(p)), _of_parameter(p))
        elif self.home is not Home.PARAMETER:
            for run in self.runs:
                if run.home is not None:
                    run.home.take_edits()

    def take_back_parameters(self) -> None:
        """Find parameters where they were left, or bring them back there with the values that they have now."""
        if self.flat is not None:
            self.flat.take_back()

    def store_runs(self, wave: Sequence[Run]) -> None:
        """Write copies that were stepped through scratch to the parameters, while they are in the processor's cache."""
        if self.main is not None and self.param_data is not None:
            for run in wave:
                self.param_data[run.start : run.start + run.numel].copy_(run.master.data.view(-1))

    def store_parameters(self) -> None:
        """Write updated copies to the parameters' memory that this rank owns; all other homes have done so."""
        if self.main is not None and self.param_data is not None:
            if not self.in_scratch:
                self.param_data.copy_(self.main)
        elif self.main is not None and self.slices:
            views = [self.main[p.start : p.end].view(_flat_or_whole(p)) for p in self.slices]
            torch._foreach_copy_([_of_parameter(p) for p in self.slices], views)
        if self.flat is not None:
            self.flat.note_written()

    def split(self, run: Run, counts: list[int], state: dict[Any, dict[str, Any]]) -> list[Run]:
        """Cut a run into runs of `counts` slices each; the inner optimizer's state is cut with it.

        Padding stays with what is before it, so that all parts but the last fill whole vectors.
        """
        parts: list[Run] = []
        first = 0
        for count in counts:
            slices = run.slices[first : first + count]
            first += count
            low = slices[0].start - run.start
            high = run.slices[first].start - run.start if first < len(run.slices) else run.numel
            part = Run(
                slices,
                run.reduced[low:high],
                nn.Parameter(run.master.data[low:high]),
                run.grad[low:high],
                run.in_scratch,
                run.wave,
                run.at + low,
                None if run.home is None else run.home.part(low, high, slices),
                {key: values.part(low, high, slices) for key, values in run.moments.items()},
            )
            if run.master in state:
                whole = state[run.master]
                state[part.master] = {key: cut_state(key, value, run.master, low, high) for key, value in whole.items()}
            parts.append(part)
        state.pop(run.master, None)
        index = self.runs.index(run)
        self.runs[index : index + 1] = parts
        return parts


def _flat_or_whole(piece: Slice) -> tuple[int, ...]:
    return tuple(piece.param.shape) if piece.numel == piece.param.numel() else (piece.numel,)


def _of_parameter(piece: Slice) -> torch.Tensor:
    """The owned part of a parameter: itself where it is all owned, for it may not be contiguous."""
    if piece.numel == piece.param.numel():
        return piece.param.data
    return piece.param.data.view(-1)[piece.offset : piece.offset + piece.numel]


def is_per_element(key: str, value: Any, master: torch.Tensor) -> bool:
    """Does a state value hold one number for every element of the master, as moments do and step counts do not?"""
    return isinstance(value, torch.Tensor) and key != "step" and value.shape == master.shape


def cut_state(key: str, value: Any, master: torch.Tensor, low: int, high: int) -> Any:
    """The part of one optimizer state value that belongs to elements [low, high) of a flat master."""
    if is_per_element(key, value, master):
        return value[low:high]
    return value.clone() if isinstance(value, torch.Tensor) else value
