"""Optimizers that turn reduced gradients into updated parameters, replicated or sharded over data parallelism."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from torch import nn

from core.distributed.finalize_model_grads import wrapped_chunks
from core.optimizer.chained_optimizer import ChainedOptimizer
from core.optimizer.grad_scaler import GradScaler
from core.optimizer.groups.model_check import (
    all_rank_groups,
    check_model,
    cut_by_shards,
    frozen_params,
    other_ranks,
    repeated_name,
    split_parameter,
    spread_group,
    trainable_params,
)
from core.optimizer.groups.param_groups import (
    Condition,
    Overrides,
    ParamGroups,
    get_standard_config_overrides,
    overrides_of_conditions,
)
from core.optimizer.groups.param_key import ParamGroupOverride, ParamKey, ParamPredicate, ParamWithNamePredicate
from core.optimizer.optimizer import DistributedOptimizer, MegatronOptimizer, ReplicatedOptimizer
from core.optimizer.optimizer_config import OptimizerConfig
from core.optimizer.optimizer_param_scheduler import OptimizerParamScheduler, get_canonical_lr_for_logging
from core.watch.collector_pause import collector_paused

if TYPE_CHECKING:
    from core.groups.process_groups import ProcessGroups

__all__ = [
    "ChainedOptimizer",
    "DistributedOptimizer",
    "GradScaler",
    "MegatronOptimizer",
    "OptimizerConfig",
    "OptimizerParamScheduler",
    "ParamGroupOverride",
    "ParamKey",
    "ParamPredicate",
    "ParamWithNamePredicate",
    "ReplicatedOptimizer",
    "get_canonical_lr_for_logging",
    "get_megatron_optimizer",
    "get_standard_config_overrides",
]


@collector_paused()
def get_megatron_optimizer(
    config: OptimizerConfig,
    model_chunks: nn.Module | Sequence[nn.Module],
    no_weight_decay_cond: Condition | Overrides | None = None,
    scale_lr_cond: Condition | None = None,
    lr_mult: float = 1.0,
    *,
    config_overrides: Overrides | None = None,
    pg_collection: ProcessGroups | None = None,
) -> MegatronOptimizer:
    """Create the optimizer of wrapped model chunks, sharded if the chunks were wrapped with a sharded strategy.

    A plain torch optimizer only sees one rank's gradients. With model parallelism or sharding, each rank would clip by
    a different norm, and one rank could skip a step that others make. This optimizer computes one gradient norm over
    all ranks, clips and skips on all of them consistently, and keeps fp32 master weights for 16-bit parameters.

        model = DistributedDataParallel(config, ddp_config, model)
        optimizer = get_megatron_optimizer(OptimizerConfig(lr=3e-4, clip_grad=1.0), [model])
        loss.backward()
        finalize_model_grads([model])
        updated, grad_norm, num_zeros = optimizer.step()

    Every rank of the job must call it.

    Args:
        config (OptimizerConfig): Algorithm, hyperparameters, precision and limits.
        model_chunks (Module or Sequence[Module]): This rank's chunks, or a single chunk. Each is a
            ``DistributedDataParallel`` or a module that contains one.
        no_weight_decay_cond (Condition | Overrides, optional): Function of (parameter name, parameter) that returns
            ``True`` for parameters without weight decay. By default biases and one-dimensional parameters do not decay.
            Names are those of the full model: a pipeline's stages count layers over all stages. As in newer Megatron
            versions, ``config_overrides`` may be passed in this position.
        scale_lr_cond (Condition, optional): Function of (parameter name, parameter) that returns ``True`` for
            parameters whose learning rate is multiplied by ``lr_mult``.
        lr_mult (float, optional): Learning rate multiplier of the parameters that ``scale_lr_cond`` selects.
        config_overrides (Overrides, optional): Maps a ``ParamKey`` to values that replace the configured ones for
            matching parameters. As in Megatron it replaces the standard overrides:
            ``{**get_standard_config_overrides(config), ParamKey(...): {...}}``.
        pg_collection (ProcessGroups, optional): Process groups of the job. The gradient norm is taken over all ranks
            that the model was wrapped with.

    Returns:
        A ``DistributedOptimizer`` for sharded chunks, and a ``ReplicatedOptimizer`` otherwise.

    Raises:
        TypeError: If ``config`` is not an OptimizerConfig.
        ValueError: If ``config`` contradicts the model, if overrides and conditions are both given, if overrides
            contradict each other or match no parameter, if shards or a parallel axis may split a parameter that its
            algorithm needs unsplit, or if a group of ``pg_collection`` (named in the message) does not reach the ranks
            that the model was wrapped with.
    """
    call = "get_megatron_optimizer(OptimizerConfig(...), [model])"
    if not isinstance(config, OptimizerConfig):
        raise TypeError(f"expected an OptimizerConfig, got {type(config).__name__}; call {call}")
    chunks = wrapped_chunks(model_chunks, call)
    if isinstance(no_weight_decay_cond, Mapping) and config_overrides is None:
        config_overrides, no_weight_decay_cond = no_weight_decay_cond, None
    if config_overrides is not None:
        if no_weight_decay_cond is not None or scale_lr_cond is not None:
            raise ValueError(
                "config_overrides and no_weight_decay_cond or scale_lr_cond are both given; write the conditions as "
                "ParamKey(with_name_predicate=...) of config_overrides"
            )
        overrides = dict(config_overrides)
    else:
        assert not isinstance(no_weight_decay_cond, Mapping), "taken as config_overrides above"
        overrides = overrides_of_conditions(config, no_weight_decay_cond, scale_lr_cond, lr_mult)
    cls = DistributedOptimizer if check_model(config, chunks) else ReplicatedOptimizer
    world = all_rank_groups(chunks[0].groups)
    groups = ParamGroups(
        config,
        trainable_params(chunks),
        overrides,
        frozen=frozen_params(chunks),
        repeated_name=repeated_name(chunks),
    )
    for chunk in chunks:
        groups.problem = groups.problem or other_ranks(pg_collection or chunks[0].groups, chunk.groups)
    groups.problem = groups.problem or spread_group(chunks, (key.algorithm for key in groups.keys))
    groups.problem = groups.problem or split_parameter(chunks, groups.needs_whole)
    groups.problem = groups.problem or cut_by_shards(chunks, groups.needs_whole)
    groups.agree(world)
    return cls(config, chunks, groups, world)
