"""plan_run: what a run of some configuration on some ranks would hold and take, before anything is allocated."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from core.plan.device import Device, read_device
from core.plan.job_run import run_of_job
from core.plan.report import gib, memory_table, time_table
from core.plan.run_memory import RankMemory, Run, StageParts, parts_of_stages, plan_memory
from core.plan.step_time import StepTime, plan_time
from core.training.config import JobConfig
from core.training.config_file import load_config


@dataclass(frozen=True)
class RunPlan:
    """A planned run. memories: one rank of each pipeline position. parts: the figures of the parts of all stages."""

    run: Run
    device: Device
    memories: list[RankMemory]
    parts: StageParts = field(default_factory=dict, repr=False)

    @cached_property
    def time(self) -> StepTime:
        """The time of a step, as the slowest rank takes it."""
        return plan_time(self.run, self.memories, self.parts or parts_of_stages(self.run), self.device)

    @property
    def room(self) -> int:
        """Bytes that one rank may use: its device, or its part of a machine's memory."""
        if not self.device.is_host:
            return self.device.memory_bytes
        return self.device.memory_bytes // min(self.run.grid.world_size, self.device.ranks_per_machine)

    @cached_property
    def fullest(self) -> RankMemory:
        """The rank that holds most."""
        return max(self.memories, key=lambda memory: memory.peak)

    @property
    def fits(self) -> bool:
        """True if every rank has room."""
        return self.fullest.peak <= self.room

    def describe(self) -> str:
        """The plan in words."""
        fullest = self.fullest
        verdict = (
            f"fits: rank {fullest.rank} holds most, {gib(fullest.peak)} of {gib(self.room)}"
            if self.fits
            else f"does not fit: rank {fullest.rank} would hold {gib(fullest.peak)}, and has {gib(self.room)}"
        )
        device = f"{self.device.name}: {self.device.about}"
        time = ["", time_table(self.time)] if self.device.has_figures else []
        return "\n".join([device, memory_table(self.memories, self.room), verdict, *time])


def plan_run(config: JobConfig | Path | str, ranks: int, device: str | Device = "h100") -> RunPlan:
    """Plan a run of the main job. Local: no process group, and no memory for weights.

    config: what the main job is told, or the path of a TOML file of it. ranks: of the whole job. device: a name of
    `known_devices`, the path of a file like theirs, or a Device.

    Raises ConfigError, with the arithmetic, for a model or a layout that cannot be built.

        plan = plan_run("configs/tiny.toml", ranks=4, device="h100")
        print(plan.describe())
    """
    if not isinstance(config, JobConfig):
        config = load_config(["--config", str(config)])
    found = read_device(device) if isinstance(device, str) else device
    one_host = found.is_host and ranks <= found.ranks_per_machine
    run = run_of_job(config, ranks, on_cpu=found.is_host, one_host=one_host)
    parts = parts_of_stages(run)
    return RunPlan(run, found, plan_memory(run, parts=parts), parts)
