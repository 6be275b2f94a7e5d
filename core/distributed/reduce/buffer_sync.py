"""BufferSync: broadcasts module buffers, such as BatchNorm statistics, from the first data rank before a forward."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import nn

from core.distributed.contract.gradient_contract import GradientContract
from core.distributed.wire.backend import new_communicator
from core.distributed.wire.collectives import Collectives
from core.groups import agree
from core.groups.process_groups import ProcessGroups
from core.groups.rank_grid import DATA_KINDS
from core.watch.warn_user import warn_user

BATCH_NORMS = nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d  # SyncBatchNorm is none of these


class BufferSync:
    """Torch DDP's ``broadcast_buffers`` for one wrapped model chunk: one broadcast of bytes for each data group.

    Buffers such as BatchNorm statistics follow each rank's own data, so ranks would evaluate and save different models.
    As in torch, a forward begins with a broadcast if the previous forward recorded gradients outside ``no_sync``. An
    evaluation after a training step therefore uses the first rank's buffers. If gradients are sharded, a broadcast in
    the middle of a step could wait for a rank that waits for memory, so there is only one in each step.

    Collective over the data groups: all ranks run equally many forwards. Raises LayoutMismatch if ranks hold different
    buffers.
    """

    def __init__(self, module: nn.Module, contracts: Mapping[str, GradientContract], groups: ProcessGroups) -> None:
        self.module = module
        self.of_experts = frozenset(_buffers_of_experts(module, contracts))
        self.kinds = [kind for kind in DATA_KINDS if groups.size(kind) > 1]
        tables = []
        for kind in self.kinds:
            table = [f"buffer {name!r} of {list(b.shape)} {b.dtype}" for name, b in self.named(kind).items()]
            tables.append((f"data group {kind!r}", groups.control(kind), table))
        agree.same(tables)
        # Separate from the reductions' communicators: ranks may have launched different numbers of reductions.
        self.communicators = {kind: new_communicator(groups.require(kind)) for kind in self.kinds if self.named(kind)}
        self.collectives = Collectives()
        self.is_due = True
        self.last_step = -1  # number of finalized steps at the last broadcast

    @classmethod
    def chosen(
        cls, module: nn.Module, contracts: Mapping[str, GradientContract], groups: ProcessGroups, asked: bool | None
    ) -> BufferSync | None:
        """Create the broadcaster if the config's ``broadcast_buffers`` asks for it and the module has buffers, else
        return None.

        Collective over the data groups. If the option was not set, the first data rank warns about BatchNorm layers.
        """
        if asked:
            made = cls(module, contracts, groups)
            return made if made.communicators else None
        norms = ((name, part) for name, part in module.named_modules() if isinstance(part, BATCH_NORMS))
        own = [name for name, part in norms if part.training and part.running_mean is not None]
        if asked is None and own and groups.size(DATA_KINDS[0]) > 1 and groups.rank(DATA_KINDS[0]) == 0:
            warn_user(
                f"{len(own)} layers of BatchNorm, the first {own[0]!r}, keep statistics of each rank's own data: ranks "
                "would evaluate and save different models. Set broadcast_buffers=True in "
                "DistributedDataParallelConfig, which torch's DDP does by default, or use torch.nn.SyncBatchNorm; "
                "broadcast_buffers=False says that it is meant"
            )
        return None

    def before_forward(self, steps: int, *, syncs: bool, once_a_step: bool) -> None:
        """Broadcast the buffers if a broadcast is due.

        ``steps`` counts the finalized steps, and ``syncs`` is True if this forward's gradients will be reduced.
        ``once_a_step`` limits broadcasts to one in each step.
        """
        was_due, self.is_due = self.is_due, syncs
        if was_due and not (once_a_step and steps == self.last_step):
            self.last_step = steps
            self.broadcast()

    @torch.no_grad()
    def broadcast(self) -> None:
        """Overwrite every rank's buffers with those on the first rank. Collective."""
        for kind, communicator in self.communicators.items():
            by_device: dict[torch.device, list[torch.Tensor]] = {}
            for buffer in self.named(kind).values():
                by_device.setdefault(buffer.device, []).append(buffer.data)
            for buffers in by_device.values():
                buffers.sort(key=lambda buffer: -buffer.element_size())  # so that each begins at a multiple of its size
                packed = torch.cat([buffer.reshape(-1).view(torch.uint8) for buffer in buffers])
                self.collectives.broadcast(packed, communicator, "the buffers of modules")
                if dist.get_rank(communicator) > 0:
                    _unpack(packed, buffers)

    def named(self, kind: str) -> dict[str, torch.Tensor]:
        """Return the currently registered buffers of dense modules ('dp_cp') or of expert modules, by name."""
        wants_experts = kind != DATA_KINDS[0]
        return {
            name: buffer
            for name, buffer in self.module.named_buffers()
            if buffer.numel() and buffer.layout is torch.strided and (name in self.of_experts) == wants_experts
        }


def _unpack(packed: torch.Tensor, buffers: Sequence[torch.Tensor]) -> None:
    """Copy through ``.data``, so that a graph which saved a buffer does not see its version change."""
    sizes = [buffer.numel() * buffer.element_size() for buffer in buffers]
    for buffer, begin, size in zip(buffers, itertools.accumulate(sizes, initial=0), sizes, strict=False):
        buffer.copy_(packed[begin : begin + size].view(buffer.dtype).view(buffer.shape))


def _buffers_of_experts(module: nn.Module, contracts: Mapping[str, GradientContract]) -> Collection[str]:
    """Return the names of buffers that belong to experts.

    For each buffer the nearest enclosing module with parameters, its own or its children's, decides: the buffer is an
    expert's if all of these parameters are.
    """
    experts = {name for name, contract in contracts.items() if contract.data_group != DATA_KINDS[0]}
    found = []
    for name, _ in module.named_buffers() if experts else ():
        above = itertools.accumulate([f"{part}." for part in name.split(".")[:-1]], initial="")
        holders = ([param for param in contracts if param.startswith(prefix)] for prefix in [*above][::-1])
        below = next(filter(None, holders), [])
        if below and experts.issuperset(below):
            found.append(name)
    return found
