"""Megatron's configurations with every field of its versions, obeyed or rejected by name. They are mutable.

The engine's configurations are created from them at their use (``ours()``), so the values at that time count.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from core.distributed import DistributedDataParallelConfig as OurDDPConfig
from core.model_parallel_config import ModelParallelConfig as OurModelParallelConfig
from core.optimizer import OptimizerConfig as OurOptimizerConfig
from core.watch.warn_user import warn_user
from core_compat.arguments import is_one_of
from core_compat.megatron.faces.refusals import Rule, rules_of

# Not checked in our config: 16-bit weights come from Float16Module as well as from params_dtype.
SIZE_FREE = ("fp16", "bf16")


# Fields of a model's configuration that Megatron's schedule or finalize_model_grads obeys, and its layers rely on.
OF_THE_SCHEDULE = (
    *("delay_wgrad_compute", "defer_embedding_wgrad_compute", "overlap_moe_expert_parallel_comm"),
    *("enable_autocast", "hybrid_context_parallel", "moe_grad_scale_func", "mtp_grad_scale_func"),
    *("gtp_weight_remat_size", "expert_gtp_weight_remat_size"),
)


class _Written:
    """Mutable configuration. Setting an unsupported value raises an error or warns."""

    rules: Mapping[str, Rule] = {}

    def __setattr__(self, name: str, value: Any) -> None:
        rule = self.rules.get(name)
        if rule is not None and not is_one_of(value, rule.defaults):
            text = f"{type(self).__name__}.{name}={value!r} {{}}: {rule.sentence}"
            if rule.refused:
                raise ValueError(text.format(f"is not supported; leave it at {rule.defaults[0]!r}"))
            warn_user(text.format("changes nothing here"))
        super().__setattr__(name, value)

    def same_fields(self, kind: Any, *without: str) -> dict[str, Any]:
        """Return the fields that the engine's configuration class also has and that have an effect, by name."""
        names = [found.name for found in dataclasses.fields(kind) if found.name not in {*without, *self.rules}]
        return {name: getattr(self, name) for name in names if hasattr(self, name)}


def _base(name: str, ours: Any) -> Any:
    """Create a dataclass with the engine's fields and their defaults, and with the unsupported fields."""
    rules = rules_of(name)
    made = {key: field(default=rule.defaults[0]) for key, rule in rules.items()}
    kept = [found for found in dataclasses.fields(ours) if found.name not in rules]
    made |= {f.name: field(default=f.default, default_factory=f.default_factory) for f in kept}
    fields = [(key, Any, default) for key, default in made.items()]
    space = {"rules": rules, "__module__": __name__}
    return dataclasses.make_dataclass(f"_{name}", fields, bases=(_Written,), namespace=space)


_DDP: Any = _base("DistributedDataParallelConfig", OurDDPConfig)
_Optimizer: Any = _base("OptimizerConfig", OurOptimizerConfig)
_ModelParallel: Any = _base("ModelParallelConfig", OurModelParallelConfig)


@dataclass
class DistributedDataParallelConfig(_DDP):
    """Options of the wrapper: the fields of core.distributed.DistributedDataParallelConfig, and Megatron's.

    ``data_parallel_sharding_strategy`` requires use_megatron_fsdp=True, as in Megatron, and is rejected without it.
    """

    use_megatron_fsdp: bool = False

    def ours(self) -> OurDDPConfig:
        """Return the engine's equivalent configuration. Raises ValueError if there is no equivalent."""
        if self.data_parallel_sharding_strategy != "no_shard" and not self.use_megatron_fsdp:
            raise ValueError(
                f"data_parallel_sharding_strategy is {self.data_parallel_sharding_strategy!r} and use_megatron_fsdp is "
                "False, with which Megatron does not read it; set use_megatron_fsdp=True, or leave it at 'no_shard'"
            )
        return OurDDPConfig(**self.same_fields(OurDDPConfig))


@dataclass
class OptimizerConfig(_Optimizer):
    """Options of the optimizer: the fields of core.optimizer.OptimizerConfig, and Megatron's.

    ``overlap_param_gather`` must equal the wrapper's option. ``muon_use_nesterov`` is the old name of muon_nesterov.
    """

    params_dtype: torch.dtype = torch.float32
    muon_use_nesterov: bool = False
    use_distributed_optimizer: bool = False
    overlap_param_gather: bool = False

    def ours(self) -> OurOptimizerConfig:
        """Return the engine's equivalent configuration."""
        given = self.same_fields(OurOptimizerConfig)
        if self.params_dtype == torch.float32 and (self.fp16 or self.bf16):
            given["params_dtype"] = None  # Megatron leaves it at fp32, the default, for 16-bit models too
        return OurOptimizerConfig(**{**given, "muon_nesterov": self.muon_nesterov or self.muon_use_nesterov})


@dataclass
class SGDOptimizerConfig(OptimizerConfig):
    """OptimizerConfig of SGD."""

    optimizer: Any = "sgd"


@dataclass
class ModelParallelConfig(_ModelParallel):
    """Parallel sizes, dtypes and callbacks: the fields of core.model_parallel_config, and Megatron's.

    The pipeline schedule reads and checks variable_seq_lengths and microbatch_group_size_per_vp_stage.
    ``pipeline_dtype`` is the dtype of tensors sent between stages, by default params_dtype.
    """

    pipeline_dtype: torch.dtype | None = None
    variable_seq_lengths: bool = False
    microbatch_group_size_per_vp_stage: int | None = None
    barrier_with_L1_time: bool = True

    def __post_init__(self) -> None:
        filled: Any = self  # its fields are created from tables
        if filled.expert_tensor_parallel_size is None:
            filled.expert_tensor_parallel_size = filled.tensor_model_parallel_size
        if filled.pipeline_model_parallel_size > 1 and filled.pipeline_dtype is None:
            filled.pipeline_dtype = filled.params_dtype
        OurModelParallelConfig(**filled.same_fields(OurModelParallelConfig, *SIZE_FREE))


def check_model_config(config: Any) -> None:
    """Raise ValueError if the layers of a model's configuration, which may be Megatron's own, need Megatron's
    schedule.
    """
    for name in OF_THE_SCHEDULE:
        rule = ModelParallelConfig.rules[name]
        value = getattr(config, name, rule.defaults[0])
        if not is_one_of(value, rule.defaults):
            raise ValueError(
                f"{type(config).__name__}.{name}={value!r} is obeyed by Megatron's own schedule alone; leave it at "
                f"{rule.defaults[0]!r}: {rule.sentence}"
            )
