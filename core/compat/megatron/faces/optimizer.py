"""get_megatron_optimizer with Megatron's arguments, and an optimizer with the methods that its programs call."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from core import optimizer as ours
from core.compat.arguments import arguments
from core.compat.megatron.faces import configs
from core.compat.megatron.faces.sharded import OptimizerState
from core.compat.megatron.faces.wrapper import refusal
from core.distributed.finalize_model_grads import wrapped_chunks


class _MegatronMethods:
    """What Megatron's optimizers can be asked beyond ours."""

    model_chunks: list[Any]

    @property
    def chained_optimizers(self) -> list[Any]:
        """This optimizer alone: it holds dense and expert parameters of all chunks."""
        return [self]

    def get_grad_stats_parallel_group(self) -> Any:
        """The ranks over which the norm of gradients is taken."""
        return self.model_chunks[0].groups.require("intra_dist_opt")

    @arguments("self -model_sharded_state_dict=None -is_loading=False -sharding_type=None -metadata=None")
    def sharded_state_dict(self) -> dict[str, Any]:
        """Stands for this optimizer's state in what dist_checkpointing saves and loads. No argument has a part.

        `dist_checkpointing.load` puts the state into this optimizer, and its masters with it.
        """
        return {"state": OptimizerState(self)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from a state that `state_dict` gave; one that dist_checkpointing has loaded is in place already."""
        found = state_dict.get("state") if isinstance(state_dict, Mapping) else None
        if isinstance(found, OptimizerState):
            found.check_loaded(self)
            return
        super().load_state_dict(state_dict)  # type: ignore[misc]

    save_parameter_state = refusal(
        "save_parameter_state would gather all state on one rank; save with dist_checkpointing.save, or "
        "core.checkpoint.save_checkpoint(root, step, [model], optimizer), which every rank writes a part of"
    )
    load_parameter_state = refusal(
        "load_parameter_state reads a file that save_parameter_state wrote, which there is none of here; load with "
        "dist_checkpointing.load or core.checkpoint.load_checkpoint"
    )
    offload_to_cpu = restore_from_cpu = refusal(
        "offload_to_cpu moves the state between training phases, which is not built; keep it on the CPU with "
        "OptimizerConfig(optimizer_cpu_offload=True, optimizer_offload_fraction=1.0)"
    )


class MegatronOptimizer(_MegatronMethods, ours.ReplicatedOptimizer):
    """core.optimizer's, where every rank of a data group updates every parameter."""


class DistributedOptimizer(_MegatronMethods, ours.DistributedOptimizer):
    """core.optimizer's, where each rank of a data group updates its shards."""


FACES: dict[type, Any] = {ours.ReplicatedOptimizer: MegatronOptimizer, ours.DistributedOptimizer: DistributedOptimizer}


@arguments(
    "config model_chunks config_overrides=None -use_gloo_process_groups=True pg_collection=None "
    "!dump_param_to_param_group_map=None * no_weight_decay_cond=None scale_lr_cond=None lr_mult=1.0",
    {"dump_param_to_param_group_map": "optimizer.param_groups says each group's name and numbers"},
)
def get_megatron_optimizer(config: Any, model_chunks: Any, config_overrides: Any, **given: Any) -> Any:
    """core.optimizer.get_megatron_optimizer, from Megatron's configuration or ours.

    config_overrides: or, as in older versions, no_weight_decay_cond in its place. use_gloo_process_groups: has no part,
    since no state is gathered. Overrides and conditions are said in core.optimizer.get_megatron_optimizer.
    """
    if isinstance(config, configs.OptimizerConfig):
        for chunk in wrapped_chunks(model_chunks, "get_megatron_optimizer(OptimizerConfig(...), [model])"):
            if config.overlap_param_gather and not chunk.ddp_config.overlap_param_gather:
                raise ValueError(
                    "OptimizerConfig.overlap_param_gather is True and the model was wrapped with overlap_param_gather="
                    "False, so that nothing would overlap; set it in DistributedDataParallelConfig too"
                )
        config = config.ours()
    if callable(config_overrides):
        config_overrides, given["no_weight_decay_cond"] = None, config_overrides
    made = ours.get_megatron_optimizer(config, model_chunks, config_overrides=config_overrides, **given)
    made.__class__ = FACES[type(made)]  # the same object with Megatron's methods, as FSDP2 does it to modules
    return made
