"""DistributedDataParallel and get_megatron_optimizer with Megatron's arguments and methods."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from core import optimizer as ours
from core.distributed import DistributedDataParallel as OurWrapper
from core.distributed.buffer.bucket import Bucket
from core.distributed.finalize_model_grads import wrapped_chunks
from core.groups import agree
from core.groups.global_names import declare_layer_names
from core.groups.process_groups import world_groups
from core.watch.warn_user import warn_user
from core_compat.megatron.faces import configs
from core_compat.megatron.faces.buffers import BufferList, partition_buckets
from core_compat.megatron.faces.checkpoint import sharded_state_dict
from core_compat.megatron.faces.refusals import arguments, never_made, refusal
from core_compat.megatron.tree import OptimizerState


class DistributedDataParallel(OurWrapper):
    """core.distributed.DistributedDataParallel that also accepts Megatron's configurations.

    ddp_config is read once, when the model is wrapped; ``self.ddp_config`` is the result. All-gathers are complete when
    the optimizer's step returns, so hooks before a forward have nothing to wait for, enabled or not. As in Megatron,
    parameters get ``grad_added_to_main_grad = False``; a kernel that accumulates into main_grad sets it to True.
    """

    @arguments(
        "self config ddp_config=None module=None disable_bucketing=False pg_collection=None !full_param_layout=None"
    )
    def __init__(self, config: Any, ddp_config: Any, **given: Any) -> None:
        configs.check_model_config(config)
        ours = ddp_config.ours() if isinstance(ddp_config, configs.DistributedDataParallelConfig) else ddp_config
        if isinstance(given["module"], torch.nn.Module):  # other types are rejected below
            declare_layer_names(given["module"])
            for param in given["module"].parameters():
                if param.requires_grad:
                    param.grad_added_to_main_grad = False
        super().__init__(config, ours, **given)

    @property
    def buffers(self) -> BufferList:
        """Gradient buffers of dense parameters.

        Calling the result returns the module's own buffers, like torch's method.
        """
        return BufferList(self.grad_buffers, super().buffers)

    @property
    def bucket_groups(self) -> list[Bucket]:
        """Buckets of dense parameters, each as its own group, in the order in which backward completes them."""
        return partition_buckets(self.grad_buffers)

    @property
    def expert_parallel_bucket_groups(self) -> list[Bucket]:
        return partition_buckets(self.expert_parallel_buffers)

    def enable_forward_pre_hook(self) -> None:
        """Do nothing, because parameters are complete before every forward, which starts no all-gather."""

    reset_param_sync_dispatch_state = free_overlap_buffers = enable_forward_pre_hook

    def disable_forward_pre_hook(self, param_sync: bool = True) -> None:
        """Finish parameter all-gathers, the only thing to wait for. Collective if an all-gather is in flight."""
        self.finish_param_sync()

    offload_grad_buffers = restore_grad_buffers = refusal(
        "offload_grad_buffers frees the gradient memory between training phases, which is not built; delete the "
        "wrapper and the optimizer, and load them again from a checkpoint, or shard more: "
        "data_parallel_sharding_strategy='optim_grads_params'"
    )

    sharded_state_dict = sharded_state_dict


class _MegatronMethods:
    """Methods of Megatron's optimizers that the engine's lack."""

    model_chunks: list[Any]

    @property
    def chained_optimizers(self) -> list[Any]:
        """List with only this optimizer, which has the dense and expert parameters of all chunks."""
        return [self]

    def prepare_model_params_for_param_sync(self) -> None:
        """Do nothing, because a step writes the parameters directly, and no copy of them waits for an all-gather."""

    def get_grad_stats_parallel_group(self) -> Any:
        """Return the group over which the gradient norm is computed."""
        return self.model_chunks[0].groups.require("intra_dist_opt")

    @arguments("self -model_sharded_state_dict=None -is_loading=False -sharding_type=None -metadata=None")
    def sharded_state_dict(self) -> dict[str, Any]:
        """Return a placeholder for this optimizer's state in a tree.

        ``dist_checkpointing.load`` restores it in this optimizer.
        """
        return {"state": OptimizerState(self)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load the result of ``state_dict``. A state loaded by dist_checkpointing is already restored."""
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


MegatronOptimizer: Any = never_made(
    "MegatronOptimizer",
    ours.MegatronOptimizer,
    "call get_megatron_optimizer(OptimizerConfig(optimizer=...), [model]), which takes a torch.optim class too",
)
FACES: dict[type, Any] = {
    kind: type(kind.__name__, (_MegatronMethods, kind), {"__doc__": kind.__doc__, "__module__": __name__})
    for kind in (ours.ReplicatedOptimizer, ours.DistributedOptimizer)
}
DistributedOptimizer = FACES[ours.DistributedOptimizer]


@arguments(
    "config model_chunks config_overrides=None -use_gloo_process_groups=True pg_collection=None "
    "!dump_param_to_param_group_map=None * no_weight_decay_cond=None scale_lr_cond=None lr_mult=1.0"
)
def get_megatron_optimizer(config: Any, model_chunks: Any, config_overrides: Any, **given: Any) -> Any:
    """Call core.optimizer.get_megatron_optimizer with Megatron's configuration or core's.

    ``config_overrides`` may be, as in old versions, no_weight_decay_cond in this position. use_gloo_process_groups is
    ignored, because no state is gathered. Raises ValueError if overlap_param_gather is True here and False in the
    wrapper.
    """
    if isinstance(config, configs.OptimizerConfig):
        chunks = wrapped_chunks(model_chunks, "get_megatron_optimizer(OptimizerConfig(...), [model])")
        for chunk in chunks:
            if config.overlap_param_gather and not chunk.ddp_config.overlap_param_gather:
                raise ValueError(
                    "OptimizerConfig.overlap_param_gather is True and the model was wrapped with overlap_param_gather="
                    "False, so that nothing would overlap; set it in DistributedDataParallelConfig too"
                )
        config = _without_idle_precision(config.ours(), chunks)
    if callable(config_overrides):
        config_overrides, given["no_weight_decay_cond"] = None, config_overrides
    made = ours.get_megatron_optimizer(config, model_chunks, config_overrides=config_overrides, **given)
    made.__class__ = FACES[type(made)]  # the same object with Megatron's methods, as FSDP2 does with modules
    return made


def _without_idle_precision(config: ours.OptimizerConfig, chunks: Sequence[OurWrapper]) -> ours.OptimizerConfig:
    """Remove fp16 or bf16 from the configuration if no rank has parameters in it.

    Megatron trains fp32 models with either. Collective if one is set and params_dtype is not.
    """
    for name, dtype in (("fp16", torch.float16), ("bf16", torch.bfloat16)):
        if not getattr(config, name) or config.params_dtype is not None:
            continue
        has_dtype = any(param.dtype == dtype for chunk in chunks for param in chunk.parameters())
        if not agree.any(has_dtype, world_groups(chunks[0].groups), "the dtypes of the model"):
            warn_user(
                f"OptimizerConfig.{name}=True changes nothing here: no parameter of the model is in {dtype}. Put it "
                "into Float16Module before it is wrapped, or leave the option out"
            )
            without: dict[str, Any] = {name: False}
            config = dataclasses.replace(config, **without)
    return config
