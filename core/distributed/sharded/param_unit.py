"""ParamUnit: the parameters of one bucket, sharded over ranks. They are unsharded and resharded together."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from contextlib import nullcontext
from enum import Enum
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import increment_version

from core.distributed.buffer.file_tier import FileTier
from core.distributed.buffer.grad_attribute import attributes_alone
from core.distributed.buffer.grad_buffer import dtype_named
from core.distributed.buffer.memory_tier import HostTier, MemoryTier
from core.distributed.distributed_data_parallel_config import DistributedDataParallelConfig
from core.distributed.layout.model_plan import BucketGroups, ModelPlan, groups_of
from core.distributed.layout.param_layout import BucketLayout, BufferLayout
from core.distributed.layout.places import Places
from core.distributed.sharded.sharded_parameter import DATA, ParamClasses
from core.distributed.wire import huge_pages
from core.distributed.wire.backend import new_communicator
from core.distributed.wire.collectives import Collectives, Flight
from core.distributed.wire.shared_memory import HostChannel, HostMemory
from core.groups import agree
from core.groups.agree import SyncError
from core.groups.process_groups import ProcessGroups


class KeepUnsharded(Enum):
    """Time for which a bucket stays unsharded after its use."""

    WINDOW = "until a few others have been used"
    BACKWARD = "from a forward that records gradients to the end of the next backward"
    STEP = "until its values change"


class AllGather(NamedTuple):
    """An unsharded bucket, [layout.numel], whose all-gather is in flight."""

    unit: ParamUnit
    full: torch.Tensor
    flight: Flight
    copied: torch.Event | None  # set if this rank's shard is copied while the device computes

    def wait(self) -> None:
        """Wait until the bucket is complete. On a device, later work on the current stream waits."""
        self.flight.wait()
        if self.copied is not None:
            torch.accelerator.current_stream(self.full.device).wait_event(self.copied)


class ShardMemory(NamedTuple):
    """Memory of a bucket's shard."""

    shard: torch.Tensor  # [layout.numel / shards]
    mapped: torch.Tensor | None  # [layout.numel] if ranks are processes of one host; a gather then copies nothing
    channel: HostChannel | None  # used by these ranks to wait for each other
    tier: MemoryTier | None  # memory of an offloaded shard; a gather then copies the bucket


class ParamUnit:
    """Parameters of one bucket, and this rank's shard of them.

    A sharded parameter keeps its shape, dtype and device, and its class rejects reads and writes. If the full bucket is
    always in memory (mapped by all ranks, or on the only rank), the parameter's data stays there. Otherwise its data is
    a single NaN, expanded: a read that torch does not intercept gives NaN, and a write is detected when the parameter
    is unsharded.

    The bucket is sharded over the shard group of ``groups``, whose ``communicator`` is used for nothing else.
    ``blocks`` is memory for unsharded buckets on CPUs. With files, none is kept when it is freed.
    """

    def __init__(
        self,
        number: int,
        layout: BucketLayout,
        data_group: str,
        plan: ModelPlan,
        memory: ShardMemory,
        groups: BucketGroups,
        communicator: dist.ProcessGroup,
        blocks: huge_pages.Blocks,
    ) -> None:
        self.number = number
        self.layout = layout
        self.data_group = data_group
        self.names = [slot.name for slot in layout.slots]
        self.params = [plan.named[name] for name in self.names]
        self.starts = [slot.start - layout.start for slot in layout.slots]  # offset of each parameter in the bucket
        self.index_of = {id(param): index for index, param in enumerate(self.params)}
        self.shard, mapped, self.channel, self.tier = memory
        self.shard_range = layout.shard_of(dist.get_rank(groups.shard))
        self.groups = groups
        self.communicator = communicator
        self.mapped = self.shard if layout.shards == 1 and self.tier is None else mapped
        self.is_copied = self.mapped is None or self.tier is not None  # False for a bucket that is always unsharded
        self.device = plan.device  # device of unsharded buckets
        self.blocks = blocks if self.tier is None else huge_pages.Blocks(most=0)
        self.name = f"parameters of {layout.describe()}"
        self.nans = self.shard.new_full((len(layout.slots) * self.is_copied,), torch.nan, device=plan.device)
        if self.mapped is None or self.is_copied:
            self.home = [nan.expand(slot.shape) for nan, slot in zip(self.nans, layout.slots, strict=True)]
        else:
            self.home = layout.views_of(self.mapped)  # the parameters' data while they are sharded
        self.param_classes = ParamClasses(nn.Parameter, nn.Parameter, nn.Parameter)
        self.keep_unsharded = KeepUnsharded.WINDOW  # may be set at any time, to the same on all ranks
        self.full = None if self.is_copied else self.mapped  # [layout.numel] while the bucket is unsharded
        self.views: list[torch.Tensor] = []  # one view for each parameter, while they are shown
        self.versions = [0] * len(self.params)  # the parameters' versions when they were last set unsharded or sharded
        # (parameter, its `.data`) handed out while unsharded; a write to it must be detected
        self.data_of: list[tuple[str, torch.Tensor]] = []

    @property
    def is_collective(self) -> bool:
        """True if other ranks take part in an all-gather."""
        return self.mapped is None and self.layout.shards > 1

    @property
    def copies(self) -> bool:
        """True if an all-gather can run while this rank computes."""
        return self.is_collective or isinstance(self.tier, HostTier)

    @property
    def is_unsharded(self) -> bool:
        """True while the parameters' class and data are unsharded."""
        return bool(self.views)

    @torch.no_grad()
    def shard_param(self, index: int) -> None:
        """Store this rank's part of a parameter that still has separate memory, and free that memory."""
        param, (first, part) = self.params[index], self.own_part_of(index)
        part.copy_(param.reshape(-1)[first : first + part.numel()])
        param.data = self.home[index]
        self.versions[index] = param._version
        param.__class__ = self.param_classes.when_sharded

    def own_part_of(self, index: int) -> tuple[int, torch.Tensor]:
        """Return the index of the first element of this rank's part in the flattened parameter, and the elements from
        there on.
        """
        begin, (low, high) = self.starts[index], self.shard_range
        start, end = max(begin, low), min(self.layout.slots[index].end - self.layout.start, high)
        return (start - begin, self.shard[start - low : end - low]) if start < end else (0, self.shard[:0])

    def all_gather(self, collectives: Collectives, to_write: bool = False) -> torch.Tensor:
        """Return the unsharded bucket, [layout.numel]. Collective, unless ranks map each other's shards.

        With ``to_write`` it is in separate memory, so that it can be written.
        """
        if self.mapped is None:
            return self.finish_all_gather(self.start_all_gather(collectives))
        with torch.inference_mode(False), torch.no_grad():
            self.full = self._borrow().copy_(self.mapped) if to_write or self.is_copied else self.mapped
        return self.full

    def start_all_gather(self, collectives: Collectives) -> AllGather:
        """Begin an all-gather. Collective over the shard group, asynchronous."""
        with torch.inference_mode(False), torch.no_grad():  # an evaluation's mode must not mark the weights
            full = self._borrow()
            if not isinstance(self.tier, HostTier):
                self._own_part(full).copy_(self.shard)
                return AllGather(self, full, collectives.all_gather(full, self.communicator, self.name), None)
            self.tier.stream.wait_stream(torch.accelerator.current_stream(self.device))  # it used the memory
            with self.tier.stream:
                self._own_part(full).copy_(self.shard, non_blocking=True)
                flight = collectives.all_gather(full, self.communicator, self.name)
            return AllGather(self, full, flight, self.tier.stream.record_event())

    def finish_all_gather(self, gather: AllGather) -> torch.Tensor:
        """Wait for an all-gather and return the bucket, [layout.numel]."""
        gather.wait()
        self.full = gather.full
        return gather.full

    def reshard(self) -> None:
        """Set the parameters sharded and drop the bucket. Its memory is freed when nothing else refers to it."""
        try:
            self.set_sharded()
        finally:
            self.full = None if self.is_copied else self.mapped

    def set_unsharded(self, kind: type[nn.Parameter] | None = None, in_backward: bool = False) -> None:
        """Set the parameters' class, by default the owner's, and data to the unsharded ones.

        In backward, a recomputation may save frozen parameters unchanged. Raises SyncError if a parameter was written
        or moved while it was sharded.
        """
        assert self.full is not None, "a bucket is gathered before its parameters are set"
        if self.is_unsharded:
            return
        with torch.inference_mode(False), torch.no_grad():
            at_home = self.full is self.mapped
            views = self.home if at_home else self.layout.views_of(self.full)
            intact = not self.nans.is_cpu or bool(self.nans.isnan().all())  # a GPU would have to be waited for
            for param, view, home, version in zip(self.params, views, self.home, self.versions, strict=True):
                param.__class__ = kind or self.param_classes.when_unsharded
                if in_backward and self.is_copied and not param.requires_grad:
                    param.__class__ = self.param_classes.lent
                intact = intact and param._version == version and param.data_ptr() == home.data_ptr()
                if not at_home:
                    DATA.__set__(param, view)
        self.versions = [param._version for param in self.params]
        self.views = views
        if not intact:
            raise SyncError(
                f"a parameter of {self.names} was written, or given other memory, while it was not gathered; the write "
                "is lost. Write parameters inside `with model.gathered():`, which takes the values over"
            )

    def set_sharded(self) -> None:
        """Set the parameters' class and data to the sharded ones; SyncError if user code has written a parameter."""
        if not self.is_unsharded:
            return
        views, self.views = self.views, []
        wrong = next((name for name, values in self.data_of if values._version), None)
        self.data_of = []
        with torch.inference_mode(False), torch.no_grad():
            for index, (param, view, home) in enumerate(zip(self.params, views, self.home, strict=True)):
                moved = param.data_ptr() != view.data_ptr()
                if moved or param._version != self.versions[index]:
                    wrong = wrong or self.names[index]
                self.versions[index] = param._version
                if moved or view is not home:
                    DATA.__set__(param, home)
                param.__class__ = self.param_classes.when_sharded
        if wrong is not None:
            became = "keeps only its shard: the write is lost"
            if not self.is_copied:
                became = "has written the one copy that all share: load a checkpoint"
            raise SyncError(
                f"parameter {wrong!r} was written while its values were gathered for a forward or a backward, and each "
                f"rank {became}. Write parameters inside `with model.gathered():`"
            )

    @torch.no_grad()
    def is_edited(self) -> bool:
        """Return True if this rank's part differs from its shard in any bit. Moved parameters are first copied back."""
        assert self.full is not None, "only an unsharded unit is edited"
        for param, view in zip(self.params, self.views, strict=True):
            if param.data_ptr() != view.data_ptr():
                view.copy_(param)
                DATA.__set__(param, view)
        own = self._own_part(self.full).to(self.shard.device)
        return not torch.equal(own.view(torch.uint8), self.shard.view(torch.uint8))

    @torch.no_grad()
    def store_writes(self) -> None:
        """Store this rank's part of the unsharded values in its shard."""
        assert self.full is not None, "only an unsharded unit has writes"
        self.shard.copy_(self._own_part(self.full))

    def mark_written(self) -> None:
        """Mark the parameters as written, so that a graph which saved old values cannot use new ones."""
        increment_version(self.params)
        with attributes_alone():
            self.versions = [param._version for param in self.params]

    def accept_writes(self) -> None:
        """Accept writes made while the parameters were unsharded, so that ``set_sharded`` does not reject them."""
        for param, view in zip(self.params, self.views, strict=True):
            if param.data_ptr() != view.data_ptr():
                DATA.__set__(param, view)
        self.versions = [param._version for param in self.params]
        self.data_of = []

    def _borrow(self) -> torch.Tensor:
        if self.device.type == "cpu":
            return self.blocks.borrow(self.layout.numel, self.shard.dtype)
        return torch.empty(self.layout.numel, dtype=self.shard.dtype, device=self.device)

    def _own_part(self, full: torch.Tensor) -> torch.Tensor:
        low, high = self.shard_range
        return full[low:high]


class SavedWeight(NamedTuple):
    """Position of a weight that backward needs: elements of a unit's bucket, in one version of its values.

    Note [Weights are saved by place] ``F.linear`` saves a view of its weight, which would keep the memory of the
    unsharded bucket until backward. So a tensor in the memory of an unsharded bucket, or a parameter itself, is saved
    as its position there, and looked up when backward needs it. All other tensors are saved unchanged, with their
    version, because torch does not compare versions under such hooks. torch calls only the innermost hooks: inside its
    checkpoint and save_on_cpu weights are saved by value, which costs memory only. A forward that begins inside other
    hooks is rejected.
    """

    unit: ParamUnit
    number: int  # index of the parameter in the unit
    offset: int
    shape: Sequence[int]
    stride: tuple[int, ...]
    version: int  # the parameter's version: any write of the values counts


def units_of(
    plan: ModelPlan,
    ddp_config: DistributedDataParallelConfig,
    groups: ProcessGroups,
    tier: MemoryTier | None,
    places: Places,
) -> list[list[ParamUnit]]:
    """Create the units of each buffer of trained parameters, then of frozen ones. Collective over the data groups.

    A communicator is created if ranks of a shard group do not map each other's memory. Raises RuntimeError on all ranks
    if a disk is full.
    """
    usual = KeepUnsharded.WINDOW if ddp_config.reshard_after_forward else KeepUnsharded.BACKWARD
    communicators: dict[dist.ProcessGroup, dist.ProcessGroup] = {}  # keyed by the shard group
    blocks = huge_pages.Blocks(most=3)  # a window, and the prefetch
    count = itertools.count()
    units: list[list[ParamUnit]] = []
    for number, layout in enumerate((*plan.layout.buffers, *plan.frozen_layout.buffers)):
        of_layout = groups_of(layout.key.data_group, ddp_config, groups)
        memory: dict[int, ShardMemory] = {}  # keyed by bucket index
        for place in dict.fromkeys((None, tier)):
            there = [b for b in layout.buckets if ((number, b.index) in places.params) == (place is not None)]
            memory |= _shard_memory(there, layout, of_layout.shard, ddp_config.share_host_memory, plan.device, place)
        unmapped = layout.shards > 1 and any(lies.mapped is None for lies in memory.values())
        if unmapped and of_layout.shard not in communicators:
            communicators[of_layout.shard] = new_communicator(of_layout.shard)
        units.append([])
        for bucket in layout.buckets:
            unit = ParamUnit(
                next(count),
                bucket,
                layout.key.data_group,
                plan,
                memory[bucket.index],
                of_layout,
                communicators.get(of_layout.shard, of_layout.shard),
                blocks,
            )
            stays = not unit.is_copied or (number, bucket.index) in places.params_stay
            unit.keep_unsharded = KeepUnsharded.STEP if stays else usual
            units[-1].append(unit)
    return units


def _shard_memory(
    buckets: Sequence[BucketLayout],
    layout: BufferLayout,
    group: dist.ProcessGroup,
    share_memory: bool,
    device: torch.device,
    tier: MemoryTier | None,
) -> dict[int, ShardMemory]:
    """Allocate memory for consecutive buckets, by bucket index. Collective over the group."""
    if not buckets:
        return {}
    numel, rank, dtype = sum(b.numel for b in buckets), dist.get_rank(group), dtype_named(layout.key.param_dtype)
    files = tier if isinstance(tier, FileTier) else None
    new_file = None if files is None else partial(files.new_shared, is_first=rank == 0)
    shared = HostMemory.share(numel, dtype, device, [group], new_file) if share_memory else None
    zeros = partial(huge_pages.zeros, device=device) if tier is None else tier.zeros
    with nullcontext() if tier is None else agree.together(group, "the memory of offloaded parameters"):
        if files is not None and files.refused is not None:
            raise files.refused
        own = zeros(numel // layout.shards if shared is None else 0, dtype)
    found, at = {}, 0
    for bucket in buckets:
        (low, high), mapped, channel = bucket.shard_of(rank), None, None
        shard = own[at // bucket.shards :][: high - low]
        if shared is not None:
            mapped, channel = shared.of_first(at, bucket.numel), shared.channels[0]
            shard = mapped[low:high]
        found[bucket.index] = ShardMemory(shard, mapped, channel, tier)
        at += bucket.numel
    return found
