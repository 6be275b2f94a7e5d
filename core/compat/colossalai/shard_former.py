"""ShardFormer and ShardConfig: a transformers model, split over a group of ranks by its plan, for one's own loop."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch import nn

from core.hugging_face import Plan, Policy, read_plan, split_model
from core.process_groups import ProcessGroups

_PLUGIN = "use booster.plugin.HybridParallelPlugin, which makes stages and splits sequences"
_AS_WRITTEN = "modules stay as the family wrote them; torch.compile fuses them"
_REFUSED: dict[str, tuple[Any, str]] = {
    **dict.fromkeys(("pipeline_stage_manager", "sequence_parallel_process_group"), (None, _PLUGIN)),
    **dict.fromkeys(("enable_sequence_parallelism", "enable_sequence_overlap"), (False, _PLUGIN)),
    "sequence_parallelism_mode": (None, _PLUGIN),
    **dict.fromkeys(
        ("enable_all_optimization", "enable_fused_normalization", "enable_jit_fused"), (False, _AS_WRITTEN)
    ),
    "make_vocab_size_divisible_by": (64, "a vocabulary is padded to the next multiple of the ranks"),
    "gradient_checkpoint_config": (None, "call model.gradient_checkpointing_enable()"),
    "fp8_communication": (False, "activations are exchanged in their own dtype"),
}


@dataclass
class ShardConfig:
    """How ShardFormer splits. tensor_parallel_process_group: None for the world. parallel_output: logits stay split.

    ValueError, with what to do instead, for a field that nothing here obeys and that is not at its default.
    """

    tensor_parallel_process_group: dist.ProcessGroup | None = None
    sequence_parallel_process_group: dist.ProcessGroup | None = None
    pipeline_stage_manager: Any = None
    enable_tensor_parallelism: bool = True
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
    extra_kwargs: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, (default, advice) in _REFUSED.items():
            if getattr(self, name) != default:
                raise ValueError(f"ShardConfig({name}={getattr(self, name)!r}) is not supported: {advice}")
        if self.extra_kwargs:
            raise ValueError(f"ShardConfig(extra_kwargs={self.extra_kwargs}) is not supported: nothing would read it")

    @property
    def tensor_parallel_size(self) -> int:
        """Ranks that a model is split over."""
        return dist.get_world_size(self.tensor_parallel_process_group) if self.enable_tensor_parallelism else 1


class ShardFormer:
    """`model, tied = ShardFormer(ShardConfig(...)).optimize(model)`: the model's weights become this rank's slices."""

    def __init__(self, shard_config: ShardConfig) -> None:
        self.shard_config = shard_config

    def optimize(self, model: nn.Module, policy: Policy | None = None) -> tuple[nn.Module, list[dict[int, Any]]]:
        """(the model, split in place; [], since no parameter is on two stages). Collective over the group.

        policy: a core.hugging_face.Policy; by default the family's. Raises PlanError where the family has no rules.
        ValueError where a plain loop would train on parts of gradients; the model is then to be made anew.
        """
        config, whole = self.shard_config, model
        if config.enable_flash_attention:
            if not hasattr(model, "set_attn_implementation"):
                raise ValueError(f"enable_flash_attention needs a transformers model, got a {type(model).__name__}")
            model.set_attn_implementation("sdpa")
        if not config.enable_tensor_parallelism:
            return model, []
        plan: Plan | None = None if policy is None else read_plan(whole, policy)
        groups = ProcessGroups(tp=config.tensor_parallel_process_group or dist.group.WORLD)
        report = split_model(model, plan, parallel_output=config.parallel_output, pg_collection=groups)
        if report.partial:
            raise ValueError(
                f"{type(model).__name__}: gradients of {', '.join(sorted(report.partial)[:3])} are parts of a sum over "
                "the group, which a loop of its own would not add; use booster.plugin.HybridParallelPlugin, or "
                "core.hugging_face.split_model with core.distributed.DistributedDataParallel"
            )
        return model, []
