"""Attributes of plugins that ColossalAI's programs read: groups, sizes, the rank mesh, the stage, the shard config.

Groups are created at ``boost``, at ``prepare_dataloader``, or when one is first read. All ranks must do that together.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, fields
from typing import Any

from torch.distributed import ProcessGroup

from core.booster.process_group_mesh import ProcessGroupMesh
from core.groups.process_groups import ProcessGroups


@dataclass(frozen=True)
class PluginShardConfig:
    """Split of models by a plugin, with the names of ColossalAI's ShardConfig. The plugin's arguments set it.

    sequence_parallel_process_group and pipeline_stage_manager are ``None`` if sequences or stages are not split.
    """

    tensor_parallel_process_group: ProcessGroup | None
    sequence_parallel_process_group: ProcessGroup | None
    pipeline_stage_manager: StageManager | None
    tensor_parallel_size: int
    enable_tensor_parallelism: bool
    enable_all_optimization: bool = False
    enable_fused_normalization: bool = False
    enable_flash_attention: bool = False
    enable_jit_fused: bool = False
    enable_sequence_parallelism: bool = False
    sequence_parallelism_mode: str | None = None
    enable_sequence_overlap: bool = False
    parallel_output: bool = True
    make_vocab_size_divisible_by: int = 64
    gradient_checkpoint_config: Any = None
    fp8_communication: bool = False

    @classmethod
    def of(cls, given: dict[str, Any], tp_group: ProcessGroup | None, tp_size: int, **more: Any) -> PluginShardConfig:
        """Create the config from a plugin's arguments by name."""
        known = {field.name: given[field.name] for field in fields(cls) if field.name in given}
        absent = {"sequence_parallel_process_group": None, "pipeline_stage_manager": None}
        sizes = {"tensor_parallel_size": tp_size, "enable_tensor_parallelism": tp_size > 1}
        return cls(tp_group, **{**sizes, **absent, **known, **more})


@dataclass(frozen=True)
class StageManager:
    """Position of a rank in its pipeline, with the names of ColossalAI's PipelineStageManager.

    ``last`` is the index of the rank with the model's last layers.
    """

    stage: int
    num_stages: int
    last: int

    def is_first_stage(self, ignore_chunk: bool = False) -> bool:
        """Return ``True`` on the rank with the model's first layers. ``ignore_chunk`` has no effect."""
        return self.stage == 0

    def is_last_stage(self, ignore_chunk: bool = False) -> bool:
        """Return ``True`` on the rank with the model's last layers, or with ``ignore_chunk`` on the pipeline's last
        rank.
        """
        return self.stage == (self.num_stages - 1 if ignore_chunk else self.last)

    def is_first_device(self) -> bool:
        return self.is_first_stage(ignore_chunk=True)

    def is_last_device(self) -> bool:
        return self.is_last_stage(ignore_chunk=True)


class MeshAttributes(ABC):
    """Mixin of HybridParallelPlugin with the properties of a split over tp_size x sp_size x pp_size ranks.

    As in ColossalAI, ``stage_manager`` is ``None`` without stages. ``pg_mesh`` has the axes ``dp_axis``, ``pp_axis``,
    ``sp_axis`` and ``tp_axis``; tensor-parallel ranks are always neighbors.
    """

    tp_size: int
    pp_size: int
    sp_size: int
    pp_style: str
    dp_outside: bool
    sequence_parallel: str | None
    world_size: int
    _arguments: dict[str, Any]
    _mesh: ProcessGroupMesh | None = None

    @abstractmethod
    def groups(self) -> ProcessGroups:
        """Return the process groups. Collective at the first call."""

    @property
    def dp_size(self) -> int:
        return self.world_size // (self.tp_size * self.pp_size * self.sp_size)

    @property
    def dp_group(self) -> ProcessGroup:
        """Ranks that hold the same slices of the same layers, and train on different data."""
        return self.groups().require("dp")

    @property
    def tp_group(self) -> ProcessGroup:
        return self.groups().require("tp")

    @property
    def pp_group(self) -> ProcessGroup:
        """Ranks of this rank's pipeline, first stage first."""
        return self.groups().require("pp")

    @property
    def sp_group(self) -> ProcessGroup:
        """Ranks that a sequence is split over, or a group of one rank if it is not split."""
        has_own_ranks = self.sequence_parallel is None or self.sp_size > 1
        return self.groups().require("cp" if has_own_ranks else "tp")

    @property
    def dp_axis(self) -> int:
        return 0 if self.dp_outside else 1

    @property
    def pp_axis(self) -> int:
        return 1 - self.dp_axis

    @property
    def tp_axis(self) -> int:
        return 2 if self.sp_size == 1 else 3

    @property
    def sp_axis(self) -> int:
        return 5 - self.tp_axis

    @property
    def pg_mesh(self) -> ProcessGroupMesh:
        """Grid of all ranks, with this plugin's groups along its axes."""
        if self._mesh is None:
            sizes = {self.dp_axis: self.dp_size, self.pp_axis: self.pp_size}
            sizes |= {self.tp_axis: self.tp_size, self.sp_axis: self.sp_size}
            of_axes = {self.dp_axis: "dp", self.pp_axis: "pp", self.tp_axis: "tp", self.sp_axis: "cp"}
            groups = {axis: self.groups().require(name) for axis, name in of_axes.items()}
            self._mesh = ProcessGroupMesh(*(sizes[axis] for axis in range(4)), groups=groups)
        return self._mesh

    @property
    def stage_manager(self) -> StageManager | None:
        if self.pp_size == 1:
            return None
        return StageManager(self.groups().rank("pp"), self.pp_size, 0 if self.pp_style == "zbv" else self.pp_size - 1)

    @property
    def shard_config(self) -> PluginShardConfig:
        more = {"pipeline_stage_manager": self.stage_manager, "sequence_parallelism_mode": self.sequence_parallel}
        return PluginShardConfig.of(
            self._arguments, self.tp_group, self.tp_size, sequence_parallel_process_group=self.sp_group, **more
        )
