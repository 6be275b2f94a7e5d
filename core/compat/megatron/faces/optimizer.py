"""get_megatron_optimizer with Megatron's arguments, and an optimizer with the methods that its programs call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from core import optimizer as ours
from core.compat.megatron.faces import configs
from core.distributed.finalize_model_grads import wrapped_chunks
from core.optimizer.groups.param_groups import Condition, Overrides
from core.process_groups import ProcessGroups


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

    def sharded_state_dict(
        self,
        model_sharded_state_dict: Any = None,
        is_loading: bool = False,
        sharding_type: str | None = None,
        metadata: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Stands for this optimizer's state in what dist_checkpointing saves and loads. No argument has a part.

        `dist_checkpointing.load` puts the state into this optimizer, and its masters with it.
        """
        from core.compat.megatron.faces.sharded import OptimizerState

        return {"state": OptimizerState(self)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from a state that `state_dict` gave; one that dist_checkpointing has loaded is in place already."""
        from core.compat.megatron.faces.sharded import OptimizerState

        found = state_dict.get("state") if isinstance(state_dict, Mapping) else None
        if isinstance(found, OptimizerState):
            found.check_loaded(self)
            return
        super().load_state_dict(state_dict)  # type: ignore[misc]

    def save_parameter_state(self, filename: str) -> None:
        """Refused: one file of one rank is no checkpoint."""
        raise NotImplementedError(
            "save_parameter_state would gather all state on one rank; save with dist_checkpointing.save, or "
            "core.checkpoint.save_checkpoint(root, step, [model], optimizer), which every rank writes a part of"
        )

    def load_parameter_state(self, filename: str, *, update_legacy_format: bool = False) -> None:
        """Refused: see `save_parameter_state`."""
        raise NotImplementedError(
            "load_parameter_state reads a file that save_parameter_state wrote, which there is none of here; load with "
            "dist_checkpointing.load or core.checkpoint.load_checkpoint"
        )

    def offload_to_cpu(self) -> None:
        """Refused: state lies where the config says."""
        raise NotImplementedError(
            "offload_to_cpu moves the state between training phases, which is not built; keep it on the CPU with "
            "OptimizerConfig(optimizer_cpu_offload=True, optimizer_offload_fraction=1.0)"
        )

    restore_from_cpu = offload_to_cpu


class MegatronOptimizer(_MegatronMethods, ours.ReplicatedOptimizer):
    """core.optimizer's, where every rank of a data group updates every parameter."""


class DistributedOptimizer(_MegatronMethods, ours.DistributedOptimizer):
    """core.optimizer's, where each rank of a data group updates its shards."""


FACES: dict[type, Any] = {ours.ReplicatedOptimizer: MegatronOptimizer, ours.DistributedOptimizer: DistributedOptimizer}


def get_megatron_optimizer(
    config: Any,
    model_chunks: nn.Module | Sequence[nn.Module],
    config_overrides: Overrides | Condition | None = None,
    use_gloo_process_groups: bool = True,
    pg_collection: ProcessGroups | None = None,
    dump_param_to_param_group_map: str | None = None,
    *,
    no_weight_decay_cond: Condition | None = None,
    scale_lr_cond: Condition | None = None,
    lr_mult: float = 1.0,
) -> Any:
    """core.optimizer.get_megatron_optimizer, from Megatron's configuration or ours.

    config_overrides: or, as in older versions, no_weight_decay_cond in its place. use_gloo_process_groups: has no part,
    since no state is gathered. Overrides and conditions are said in core.optimizer.get_megatron_optimizer.
    """
    if dump_param_to_param_group_map is not None:
        raise ValueError(
            "dump_param_to_param_group_map is not supported; optimizer.param_groups says each group's name and numbers"
        )
    if isinstance(config, configs.OptimizerConfig):
        _check_overlap(config, model_chunks)
        config = config.ours()
    if callable(config_overrides):
        config_overrides, no_weight_decay_cond = None, config_overrides
    made = ours.get_megatron_optimizer(
        config,
        model_chunks,
        no_weight_decay_cond,
        scale_lr_cond,
        lr_mult,
        config_overrides=config_overrides,
        pg_collection=pg_collection,
    )
    made.__class__ = FACES[type(made)]  # the same object with Megatron's methods, as FSDP2 does it to modules
    return made


def _check_overlap(config: configs.OptimizerConfig, model_chunks: nn.Module | Sequence[nn.Module]) -> None:
    for chunk in wrapped_chunks(model_chunks, "get_megatron_optimizer(OptimizerConfig(...), [model])"):
        if config.overlap_param_gather and not chunk.ddp_config.overlap_param_gather:
            raise ValueError(
                "OptimizerConfig.overlap_param_gather is True and the model was wrapped with overlap_param_gather="
                "False, so that nothing would overlap; set it in DistributedDataParallelConfig too"
            )
