"""plan_run: memory and time of a run on a number of ranks, before anything is allocated."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from core.distributed.layout.model_plan import dtype_name
from core_plan.communication import communicators
from core_plan.device import Device, read_device
from core_plan.gpt_source import run_of_job
from core_plan.hugging_face_source import run_of_model
from core_plan.job.config import JobConfig
from core_plan.job.config_file import load_config
from core_plan.job.errors import ConfigError
from core_plan.live_memory import EIGHT_BITS
from core_plan.model_run import ModelRun
from core_plan.report import COMMUNICATORS, gib, memory_table, time_table, traffic_table
from core_plan.run_memory import RankMemory, Run, StageParts, Wrapped, parts_of_stages, plan_memory
from core_plan.step_figures import PartFigures
from core_plan.step_time import SHARES, StepTime, plan_time

OFFLOADING_TAKES_NO_TIME = (
    "the time that offloading takes is not in it: a device file has no speed of a disk, of a host's "
    "link or of its steps"
)


@dataclass(frozen=True)
class RunPlan:
    """A planned run.

    Attributes:
        run: The run.
        device: The device of each rank.
        memories: Memory of one rank of each pipeline position.
        parts: Figures of the parts of all stages.
    """

    run: Run
    device: Device
    memories: list[RankMemory]
    parts: StageParts = field(repr=False)

    @cached_property
    def time(self) -> StepTime:
        """Time of a step on the slowest rank."""
        return plan_time(self.run, self.memories, self.parts, self.device)

    @property
    def room(self) -> int:
        """Bytes available to the tensors of one rank: its device or share of a machine, without the headroom."""
        return self.device.room(self.run.grid.world_size)

    @property
    def headroom(self) -> int:
        """Bytes of a rank's memory kept free for the allocator's overhead."""
        return self.device.kept_free(self.run.grid.world_size)

    @cached_property
    def fullest(self) -> RankMemory:
        """The rank with the highest peak."""
        return max(self.memories, key=lambda memory: memory.peak)

    @property
    def fits(self) -> bool:
        """True if every rank fits."""
        return self.fullest.peak <= self.room

    @property
    def not_counted(self) -> str:
        """Text about the fullest rank's communicators, if the device file does not have their memory."""
        found = communicators(self.run, self.fullest, self.parts)
        if self.device.communicator_bytes is not None or not found:
            return ""
        each = ", ".join(f"{names} of {ranks} ranks" for names, ranks in found)
        return (
            f"not counted: {'gloo' if self.run.on_cpu else 'NCCL'}'s memory of {len(found)} "
            f"communicator{'s' * (len(found) > 1)} ({each}); a device file of calibrate has it"
        )

    @property
    def parameters(self) -> int:
        """Elements of all trainable parameters of the model. An embedding that is also the head counts once."""
        total = 0
        for memory in self.memories:
            groups = self.run.groups_of(memory.rank)
            for plan in memory.plans:
                for name, contract in plan.contracts.items():
                    is_copy = contract.crosses_stages and groups.rank("pp") > 0
                    ranks = math.prod(groups.size(axis) for axis in contract.sharded_over if axis != "pp")
                    total += 0 if is_copy else plan.params[name].numel() * ranks
        return total

    @property
    def layout(self) -> str:
        """Parameters, parallel sizes and batch in one line."""
        run = self.run
        sizes = {"tp": run.grid.tp, "pp": run.grid.pp, "cp": run.grid.cp, "ep": run.grid.ep, "dp": run.grid.dp}
        axes = " x ".join(f"{name} {size}" for name, size in sizes.items() if size > 1 or name == "dp")
        count = f"{run.microbatches} microbatch{'es' * (run.microbatches > 1)}"
        chunks = f", {run.layout.chunks} stages a rank" if run.layout.chunks > 1 else ""
        parameters = f"{in_thousands(self.parameters)} parameters; " if self.parameters else ""
        return f"{parameters}{axes}{chunks}; {count} of {run.source.micro_batch_size} a rank"

    def as_dict(self) -> dict[str, Any]:
        """Return the plan as numbers for JSON, in bytes and seconds.

        ``step`` exists only if the device file has figures.
        """
        ranks = self.run.grid.world_size
        found: dict[str, Any] = {
            "parameters": self.parameters,
            "layout": self.layout,
            "device": self.device.name,
            "ranks": ranks,
            "fits": self.fits,
            "room_bytes": self.room,
            "headroom_bytes": self.headroom,
            "peak_bytes": self.fullest.peak,
            "positions": [
                {"rank": memory.rank, "stages": memory.stages, "peak_bytes": memory.peak, "bytes": memory.held}
                for memory in self.memories
            ],
        }
        if self.device.has_figures:
            time = self.time
            kinds = ("seconds", *SHARES, "tokens_per_s", "mfu")
            each = {"tokens_per_s_each": time.tokens_per_s / ranks, "flops_per_s_each": time.flops_per_s / ranks}
            found["step"] = {**{kind: getattr(time, kind) for kind in kinds}, **each}
        return found

    def describe(self) -> str:
        """Return the plan as text."""
        fullest = self.fullest
        verdict = (
            f"fits: rank {fullest.rank} holds most, {gib(fullest.peak)} of {gib(self.room)}"
            if self.fits
            else f"does not fit: rank {fullest.rank} would hold {gib(fullest.peak)}, and has {gib(self.room)}"
        )
        device = f"{self.device.name}: {self.device.about}"
        unknown = [self.not_counted] if self.not_counted else []
        timed = self.device.has_figures
        ranks, on_cpu = self.run.grid.world_size, self.run.on_cpu
        tables = [time_table(self.time, ranks, on_cpu=on_cpu)] * timed + [traffic_table(self.time, has_seconds=timed)]
        time = ["", *filter(None, tables)] if any(tables) else []
        offloads = any(sum([*memory.files.values(), *memory.host.values()]) for memory in self.memories)
        offloaded = [OFFLOADING_TAKES_NO_TIME] if timed and offloads else []
        table = memory_table(self.memories, self.room, self.headroom)
        return "\n".join([*self.run.notes, self.layout, device, table, verdict, *unknown, *time, *offloaded])


def in_thousands(count: int) -> str:
    """Format a count such as '70.6 B'; M for millions, k for thousands."""
    for unit, size in (("B", 10**9), ("M", 10**6), ("k", 10**3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return str(count)


def run_of(config: JobConfig | ModelRun, ranks: int, device: Device) -> Run:
    """Create the run of a configuration on a number of ranks.

    Raises:
        ConfigError: If it cannot be built.
        PlanError: If the model's family cannot be split so.
    """
    where = {"on_cpu": device.is_host, "one_host": device.is_host and ranks <= device.ranks_per_machine}
    in_8_bits = isinstance(config, ModelRun) and config.use_fp8 and device.has_figures
    if in_8_bits and dtype_name(EIGHT_BITS) not in device.matmul_flops:
        raise ConfigError(
            f"--use-fp8: {device.name} has no products in 8 bits: its file has no matmul_flops of "
            f"{dtype_name(EIGHT_BITS)}; leave it out, or give a device that has, such as h100"
        )
    return run_of_model(config, ranks, **where) if isinstance(config, ModelRun) else run_of_job(config, ranks, **where)


def plan_run(config: JobConfig | ModelRun | Path | str, ranks: int, device: str | Device = "h100") -> RunPlan:
    """Plan a run of the main job, or of a Hugging Face model.

    Local: no process group, and no memory for weights.

        plan = plan_run("configs/tiny.toml", ranks=4, device="h100")
        print(plan.describe())

    Args:
        config: Configuration of the main job, the path of its TOML file, or a ModelRun of a Hugging Face model.
        ranks: Number of ranks of the job.
        device: A name of ``known_devices``, the path of a device file, or a Device.

    Returns:
        The plan.

    Raises:
        ConfigError: If the model or the layout cannot be built. The text has the arithmetic.
    """
    if isinstance(config, (str, Path)):
        config = load_config(["--config", str(config)])
    found = read_device(device) if isinstance(device, str) else device
    try:
        return plan_of(run_of(config, ranks, found), found)
    except ConfigError:
        raise
    except ValueError as error:  # PlanError, or the wrapper's error for a sharding that the stages do not support
        raise ConfigError(str(error)) from error


def plan_of(
    run: Run, device: Device, figures: dict[Any, PartFigures] | None = None, wrapped: Wrapped | None = None
) -> RunPlan:
    """Plan a run. Other runs may share ``figures`` and ``wrapped``, see ``parts_of_stages`` and ``plan_memory``."""
    parts = parts_of_stages(run, figures)
    memories = plan_memory(run, parts=parts, wrapped=wrapped)
    if device.communicator_bytes is not None:
        each = {memory.rank: len(communicators(run, memory, parts)) for memory in memories}
        memories = [
            replace(memory, state={**memory.state, COMMUNICATORS: each[memory.rank] * device.communicator_bytes})
            for memory in memories
        ]
    return RunPlan(run, device, memories, parts)
