"""ShardFormer and ShardConfig: a transformers model, split over a group of ranks by its plan, for a custom loop."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import torch.distributed as dist
from torch import nn

from core.groups.process_groups import ProcessGroups
from core.hugging_face import Plan, Policy, read_plan, split_model
from core_compat.arguments import arguments

_PLUGIN = "use booster.plugin.HybridParallelPlugin, which makes stages and splits sequences"
_AS_WRITTEN = "modules stay as the family wrote them; torch.compile fuses them"
_ADVICE = {
    **dict.fromkeys(("pipeline_stage_manager", "sequence_parallel_process_group"), _PLUGIN),
    **dict.fromkeys(("enable_sequence_parallelism", "enable_sequence_overlap", "sequence_parallelism_mode"), _PLUGIN),
    **dict.fromkeys(("enable_all_optimization", "enable_fused_normalization", "enable_jit_fused"), _AS_WRITTEN),
    "make_vocab_size_divisible_by": "a vocabulary is padded to a multiple of the ranks; the plugin has it",
    "gradient_checkpoint_config": "call model.gradient_checkpointing_enable()",
    "extra_kwargs": "give ShardFormer.optimize(model, policy) a core.hugging_face.Policy of rules of your own",
    "fp8_communication": "activations are exchanged in their own dtype",
}


class ShardConfig(SimpleNamespace):
    """Options of ShardFormer.

    ``tensor_parallel_process_group`` is the group over which the model is split, by default the world, and
    ``parallel_output`` keeps logits split. Raises ValueError, with advice, if an unsupported field is not at its
    default.
    """

    @arguments(
        "self tensor_parallel_process_group=None !sequence_parallel_process_group=None !pipeline_stage_manager=None "
        "enable_tensor_parallelism=True !enable_all_optimization=False !enable_fused_normalization=False "
        "enable_flash_attention=False !enable_jit_fused=False !enable_sequence_parallelism=False "
        "!sequence_parallelism_mode=None !enable_sequence_overlap=False parallel_output=True "
        "!make_vocab_size_divisible_by=64 !gradient_checkpoint_config=None !fp8_communication=False !extra_kwargs={}",
        _ADVICE,
    )
    def __init__(self, **given: Any) -> None:
        defaults = {name: field.default for name, field in inspect.signature(ShardConfig).parameters.items()}
        super().__init__(**{**defaults, **given})

    @property
    def tensor_parallel_size(self) -> int:
        return dist.get_world_size(self.tensor_parallel_process_group) if self.enable_tensor_parallelism else 1


class ShardFormer:
    """Splitter of a model's weights: ``model, tied = ShardFormer(ShardConfig(...)).optimize(model)``."""

    def __init__(self, shard_config: ShardConfig) -> None:
        self.shard_config = shard_config

    def optimize(self, model: nn.Module, policy: Policy | None = None) -> tuple[nn.Module, list[dict[int, Any]]]:
        """Split a model in place, so that its weights become this rank's slices. Collective over the group.

        ``policy`` defaults to that of the model's family. Return (the model, []); the list is empty because no
        parameter is on two stages. Raises PlanError if the family has no rules, and ValueError if a plain loop would
        train on partial gradients; the model must then be created again.
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
                f"{type(model).__name__}: gradients of {', '.join(sorted(report.partial)[:3])} are partial sums over "
                "the group, which a plain training loop does not reduce; use booster.plugin.HybridParallelPlugin, or "
                "core.hugging_face.split_model with core.distributed.DistributedDataParallel"
            )
        return model, []
