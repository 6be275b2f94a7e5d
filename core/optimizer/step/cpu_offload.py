"""OffloadedOptimizer: a part of the segments is stepped on the CPU, where their optimizer state stays.

Of an offloaded segment the CPU has a twin of the master weights, a place for the gradient, and the algorithm's state. A
step copies the gradient down, steps the twin, and copies it up into the master. With a device, and if overlap is asked
for, copies have streams of their own: while the device steps what it kept, gradients come down and the CPU steps one
segment after the other, each going up while the next is stepped.

    gradient  --d2h stream-->  [CPU: step segment 1][step segment 2] ...
    device:   [step its own segments]       --h2d stream--> segment 1, segment 2, ...

Without a device the same code runs, with plain copies, and every fraction gives the same bits.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from core.optimizer.masters.master_weights import Segment
from core.optimizer.optimizer_config import OptimizerConfig

logger = logging.getLogger(__name__)

Groups = list[dict[str, Any]]
MakeOptimizer = Callable[[Groups], torch.optim.Optimizer]
CPU = torch.device("cpu")


def choose_segments(numels: Sequence[int], fraction: float) -> list[int]:
    """Which segments to offload so that they hold about `fraction` of all elements.

    The largest that fit are taken, and the smallest of the rest if that comes nearer. Pure, so every start of a job
    chooses alike. Ascending indices.
    """
    left = fraction * sum(numels)
    chosen, rest = [], []
    for index in sorted(range(len(numels)), key=lambda index: (-numels[index], index)):
        if 0 < numels[index] <= left:
            chosen.append(index)
            left -= numels[index]
        elif numels[index]:
            rest.append(index)
    if rest and numels[rest[-1]] - left <= left:
        chosen.append(rest[-1])
    return sorted(chosen)


@dataclass(slots=True, eq=False)
class HostSegment:
    """What the CPU has of a master: a twin of its weights, and its gradient there.

    version: the master's version when twin and master were last equal. Another version means that weights were loaded.
    aliased: True if the master is the model's own memory. Anybody may write it through `.data`, unseen, so every step
        copies the twin anew.
    """

    master: nn.Parameter
    group: int
    twin: nn.Parameter
    gradient: torch.Tensor
    aliased: bool
    version: int = -1
    here: torch.cuda.Event | None = field(default=None, repr=False)

    def part(self, master: nn.Parameter) -> HostSegment:
        """The host's segment of a part of this master, on the same memory."""
        low = (master.data_ptr() - self.master.data_ptr()) // master.element_size()
        twin = self.twin.data.view(-1)[low : low + master.numel()].view(master.shape)
        gradient = self.gradient.view(-1)[low : low + master.numel()].view(master.shape)
        return HostSegment(master, self.group, nn.Parameter(twin), gradient, self.aliased, self.version)

    def holds(self, master: torch.Tensor) -> bool:
        """True if `master` is a part of this one's memory."""
        start, end = self.master.data_ptr(), self.master.data_ptr() + self.master.nbytes
        same_device = master.device == self.master.device
        return same_device and start <= master.data_ptr() and master.data_ptr() + master.nbytes <= end


class OffloadedOptimizer(torch.optim.Optimizer):
    """One torch optimizer from outside; inside, one for what the device keeps and one for what the CPU has.

    groups: all param groups with all masters. segments: of these masters. offloadable: which segments may go. make:
    builds the optimizer of a list of groups, called once for the device and once for the CPU.

    `state` is keyed by master as ever; the tensors of an offloaded one lie on the CPU. State that a checkpoint puts
    there on a device is moved at the next step.
    """

    def __init__(
        self, config: OptimizerConfig, groups: Groups, segments: Sequence[Segment], offloadable: Sequence[bool],
        make: MakeOptimizer,
    ) -> None:  # fmt: skip
        super().__init__(groups, {})
        self.config = config
        self.overlap = config.overlap_cpu_optimizer_d2h_h2d
        candidates = [segment for segment, may in zip(segments, offloadable, strict=True) if may]
        chosen = choose_segments([segment.numel for segment in candidates], config.optimizer_offload_fraction)
        self.hosted = [self._host(candidates[index]) for index in chosen]
        total = sum(segment.numel for segment in candidates)
        self.offloaded_fraction = sum(segment.master.numel() for segment in self.hosted) / total if total else 0.0
        logger.info("%.1f %% of the optimizer's state is on the CPU", 100 * self.offloaded_fraction)
        self._by_master = {id(segment.master): segment for segment in self.hosted}
        self.host_groups: Groups = [{**group, "params": []} for group in groups]
        for segment in self.hosted:
            self.host_groups[segment.group]["params"].append(segment.twin)
        self.host = make(self.host_groups)
        everything = self._keep_only_device_params()
        self.device = make(self.param_groups)
        for group, params in zip(self.param_groups, everything, strict=True):
            group["params"] = params
        self.state.update(self.device.state)
        self._share_state_of_device()
        self._take_state(self.hosted)  # some algorithms make theirs when they are built
        on = self.hosted[0].master.device if self.hosted else CPU  # which need not be the current device
        self.streams = (torch.cuda.Stream(on), torch.cuda.Stream(on)) if on.type == "cuda" else None

    def _host(self, segment: Segment) -> HostSegment:
        master, config = segment.master, self.config
        on_device = master.is_cuda
        twin = torch.empty(
            master.shape, dtype=master.dtype, device="cpu", pin_memory=on_device and config.pin_cpu_params
        )
        gradient = torch.empty(
            master.shape, dtype=master.dtype, device="cpu", pin_memory=on_device and config.pin_cpu_grads
        )
        shard = segment.shards[0]
        start = shard.param.data_ptr() + shard.offset * shard.param.element_size()
        return HostSegment(master, segment.group, nn.Parameter(twin), gradient, aliased=start == master.data_ptr())

    def _share_state_of_device(self) -> None:
        self.device.state = self.state
        for member in getattr(self.device, "members", ()):
            member.state = self.state

    @property
    def members(self) -> list[torch.optim.Optimizer]:
        """What reports of backends ask."""
        return [self.device, self.host]

    # -- a step -----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Update every parameter that has a gradient, on the CPU or where it lies."""
        hosted = [
            segment
            for group in self.param_groups
            for master in group["params"]
            if master.grad is not None and (segment := self._hosted(master)) is not None
        ]
        for segment in hosted:
            self._bring_down(segment)
        everything = self._keep_only_device_params()
        try:
            self.device.step()
        finally:
            for group, params in zip(self.param_groups, everything, strict=True):
                group["params"] = params
        if self.overlap:
            for segment in hosted:
                self._step_on_host([segment])
        elif hosted:
            self._step_on_host(hosted)
        if self.streams is not None and any(segment.master.is_cuda for segment in hosted):
            torch.cuda.current_stream(self.streams[1].device).wait_stream(self.streams[1])
        for segment in hosted:
            segment.version = segment.master._version

    def _hosted(self, master: nn.Parameter) -> HostSegment | None:
        """The host's segment of a master. A new master may be a part of an old one that was split."""
        known = self._by_master.get(id(master))
        if known is not None or not self.hosted or master.numel() == 0:
            return known
        whole = next((segment for segment in self.hosted if segment.holds(master)), None)
        if whole is None:
            return None
        part = self._by_master[id(master)] = whole.part(master)
        return part

    def _keep_only_device_params(self) -> list[list[nn.Parameter]]:
        everything = [group["params"] for group in self.param_groups]
        for group in self.param_groups:
            group["params"] = [master for master in group["params"] if self._hosted(master) is None]
        return everything

    def _bring_down(self, segment: HostSegment) -> None:
        """Copy a gradient to the CPU, and the weights where they may have changed; beside the device's work."""
        assert segment.master.grad is not None, "a segment is brought down when it has a gradient"
        pairs = [(segment.gradient, segment.master.grad)]
        if segment.aliased or segment.version != segment.master._version:
            pairs.append((segment.twin, segment.master))
        if self.streams is None or not (self.overlap and segment.master.is_cuda):
            for host, device in pairs:
                host.copy_(device)
            return
        down = self.streams[0]
        down.wait_stream(torch.cuda.current_stream(down.device))
        with torch.cuda.stream(down):
            for host, device in pairs:
                host.copy_(device, non_blocking=True)
            segment.here = torch.cuda.Event()
            segment.here.record(down)

    def _step_on_host(self, segments: Sequence[HostSegment]) -> None:
        """Step twins, and copy them up."""
        for host_group, group in zip(self.host_groups, self.param_groups, strict=True):
            host_group.update({key: value for key, value in group.items() if key != "params"})
            host_group["params"] = []
        self.host.state.clear()
        for segment in segments:
            if segment.here is not None:
                segment.here.synchronize()
                segment.here = None
            segment.twin.grad = segment.gradient
            self.host_groups[segment.group]["params"].append(segment.twin)
            if segment.master in self.state:
                self.host.state[segment.twin] = {
                    key: self._on_cpu(value) for key, value in self.state[segment.master].items()
                }
        self.host.step()
        self._take_state(segments)
        for segment in segments:
            self._bring_up(segment)

    def _take_state(self, segments: Sequence[HostSegment]) -> None:
        for segment in segments:
            if segment.twin in self.host.state:
                self.state[segment.master] = self.host.state[segment.twin]

    def _on_cpu(self, value: Any) -> Any:
        return value.to(CPU) if isinstance(value, torch.Tensor) else value

    def _bring_up(self, segment: HostSegment) -> None:
        if self.streams is None or not (self.overlap and segment.master.is_cuda):
            segment.master.copy_(segment.twin)
            return
        up = self.streams[1]
        up.wait_stream(self.streams[0])  # has itself waited for all that read the master before this step
        with torch.cuda.stream(up):
            segment.master.copy_(segment.twin, non_blocking=True)


def offloadable_segments(segments: Sequence[Segment], groups: Groups) -> list[bool]:
    """True for each segment that can be stepped on the CPU.

    Muon's cannot, because matrices may be gathered between devices; nor those in scratch memory, which holds a master
    only while it is stepped.
    """
    return [not segment.in_scratch and groups[segment.group]["optimizer"] != "muon" for segment in segments]


def check_offload(config: OptimizerConfig, segments: Sequence[Segment], may: Sequence[bool]) -> None:
    """ValueError where less can be offloaded than is asked for."""
    numels = [segment.numel for segment in segments if segment.numel]
    if numels and not any(may) and config.optimizer_offload_fraction > 0:
        raise ValueError(
            f"optimizer_offload_fraction is {config.optimizer_offload_fraction} and nothing can be offloaded: master "
            "weights, moments and gradients must be in fp32 (DistributedDataParallelConfig(grad_reduce_in_fp32=True), "
            "without use_precision_aware_optimizer), and Muon's matrices stay where they are"
        )
