"""Megatron's configurations: every field of its versions, obeyed or refused by name; they may be written to.

Ours are made from them where they are used (`ours()`), so a field counts as it stands then.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from core.compat.arguments import defaults_of, is_one_of
from core.compat.megatron.faces.refusals import Rule, rules_of
from core.distributed import DistributedDataParallelConfig as OurDDPConfig
from core.groups.process_groups import ProcessGroups
from core.model_parallel_config import ModelParallelConfig as OurModelParallelConfig
from core.optimizer import OptimizerConfig as OurOptimizerConfig
from core.tensor_parallel.initialization import normal_init
from core.tensor_parallel.mappings import resolve_groups
from core.transformer import TransformerConfig as OurTransformerConfig

# Left out where ours is made: 16-bit weights come from Float16Module as well as from params_dtype, and callbacks are
# read from Megatron's configuration itself.
SIZE_FREE = ("fp16", "bf16", "use_cpu_initialization", "has_cond_embedder")
CALLBACKS = ("no_sync_func", "grad_sync_func", "param_sync_func", "finalize_model_grads_func")
# Megatron reads these sizes from its groups: one that is left at 1 is the group's.
OF_GROUPS = (("tensor_model_parallel_size", "tp"), ("expert_tensor_parallel_size", "expt_tp"))
OF_EXPERTS = ("expert_model_parallel_size", "ep")
# Megatron gives these to GPTModel; a gated activation has two fields there.
OF_GPT = ("vocab_size", "max_sequence_length", "position_embedding_type", "rotary_base", "activation")


class _Written:
    """A configuration that may be written to; a value that nothing obeys is refused, or warned of, when it is set."""

    rules: Mapping[str, Rule] = {}

    def __setattr__(self, name: str, value: Any) -> None:
        rule = self.rules.get(name)
        if rule is not None and not is_one_of(value, rule.defaults):
            text = f"{type(self).__name__}.{name}={value!r} {{}}: {rule.sentence}"
            if rule.refused:
                raise ValueError(text.format(f"is not supported; leave it at {rule.defaults[0]!r}"))
            warnings.warn(text.format("changes nothing here"), stacklevel=3)
        super().__setattr__(name, value)

    def same_fields(self, kind: Any, *without: str) -> dict[str, Any]:
        """The fields that a configuration of ours has too, by name."""
        names = [found.name for found in dataclasses.fields(kind) if found.name not in without]
        return {name: getattr(self, name) for name in names if hasattr(self, name)}


def _base(parent: type, name: str, ours: Any, *without: str, own: str = "") -> Any:
    """A dataclass of the fields of ours with their defaults, those that nothing obeys, and words 'name=default'."""
    rules = rules_of(name)
    inherited = {found.name for found in dataclasses.fields(parent)} if dataclasses.is_dataclass(parent) else set()
    kept = [found for found in dataclasses.fields(ours) if found.name not in {*rules, *inherited, *without}]
    made = {key: _default(rule.defaults[0]) for key, rule in rules.items()}
    made |= {f.name: field(default=f.default, default_factory=f.default_factory) for f in kept}
    made |= {key: _default(defaults_of(text)[0]) for key, _, text in (word.partition("=") for word in own.split())}
    space = {"rules": {**getattr(parent, "rules", {}), **rules}, "__module__": __name__}
    fields = [(key, Any, default) for key, default in made.items()]
    return dataclasses.make_dataclass(f"_{name}", fields, bases=(parent,), namespace=space)


def _default(value: Any) -> Any:
    return field(default_factory=lambda: list(value)) if isinstance(value, list) else field(default=value)


_DDP: Any = _base(_Written, "DistributedDataParallelConfig", OurDDPConfig)
_Optimizer: Any = _base(_Written, "OptimizerConfig", OurOptimizerConfig)
_ModelParallel: Any = _base(
    _Written,
    "ModelParallelConfig",
    OurModelParallelConfig,
    own="pipeline_dtype=None variable_seq_lengths=False microbatch_group_size_per_vp_stage=None "
    "barrier_with_L1_time=True",
)


@dataclass
class DistributedDataParallelConfig(_DDP):
    """Options of the wrapper: the fields of core.distributed.DistributedDataParallelConfig, and Megatron's.

    data_parallel_sharding_strategy: followed with use_megatron_fsdp=True, as in Megatron, and refused without it.
    align_param_gather: refused when it is used, since gathers are complete when the optimizer's step returns.
    """

    use_megatron_fsdp: bool = False

    def ours(self) -> OurDDPConfig:
        """Our configuration of the same meaning. ValueError for a combination that there is none of."""
        if self.data_parallel_sharding_strategy != "no_shard" and not self.use_megatron_fsdp:
            raise ValueError(
                f"data_parallel_sharding_strategy is {self.data_parallel_sharding_strategy!r} and use_megatron_fsdp is "
                "False, with which Megatron does not read it; set use_megatron_fsdp=True, or leave it at 'no_shard'"
            )
        return OurDDPConfig(**self.same_fields(OurDDPConfig))


@dataclass
class OptimizerConfig(_Optimizer):
    """Options of the optimizer: the fields of core.optimizer.OptimizerConfig, and Megatron's.

    overlap_param_gather: must be what the model was wrapped with. muon_use_nesterov: the older name of muon_nesterov.
    """

    params_dtype: torch.dtype = torch.float32
    muon_use_nesterov: bool = False
    use_distributed_optimizer: bool = False
    overlap_param_gather: bool = False

    def ours(self) -> OurOptimizerConfig:
        """Our configuration of the same meaning."""
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

    pipeline_dtype: of what one stage sends the next; params_dtype where None. variable_seq_lengths and
    microbatch_group_size_per_vp_stage are read, and judged, by the pipeline schedule.
    """

    def __post_init__(self) -> None:
        filled: Any = self  # its fields are made from tables
        if filled.expert_tensor_parallel_size is None:
            filled.expert_tensor_parallel_size = filled.tensor_model_parallel_size
        if filled.pipeline_model_parallel_size > 1 and filled.pipeline_dtype is None:
            filled.pipeline_dtype = filled.params_dtype
        OurModelParallelConfig(**filled.same_fields(OurModelParallelConfig, *SIZE_FREE))


_Transformer: Any = _base(
    ModelParallelConfig,
    "TransformerConfig",
    OurTransformerConfig,
    *(*OF_GPT, "share_embeddings_and_output_weights"),
    own="num_layers=0 hidden_size=0 num_attention_heads=0 hidden_dropout=0.1 attention_dropout=0.1 add_qkv_bias=False "
    "gated_linear_unit=False init_method=None output_layer_init_method=None num_layers_in_first_pipeline_stage=None "
    "num_layers_in_last_pipeline_stage=None account_for_embedding_in_pipeline_split=False "
    "account_for_loss_in_pipeline_split=False cp_comm_type=None recompute_method=None recompute_modules=None",
)


@dataclass
class TransformerConfig(_Transformer):
    """The shape of a transformer, by Megatron's fields and with its defaults: dropout is 0.1 unless it is set.

    gated_linear_unit, activation_func: False with F.gelu, or True with F.silu. init_method, output_layer_init_method:
    for layers of yours; those of GPTModel are drawn with init_method_std. num_layers_in_first_pipeline_stage,
    num_layers_in_last_pipeline_stage: the other stages share the rest evenly. account_for_*_in_pipeline_split: the
    embedding, or the loss, counts as a layer of its stage.
    """

    activation_func: Callable[..., Any] = F.gelu

    def __post_init__(self) -> None:
        super().__post_init__()
        filled: Any = self
        if filled.num_attention_heads and filled.kv_channels is None:
            filled.kv_channels = filled.hidden_size // filled.num_attention_heads
        filled.num_query_groups = filled.num_query_groups or filled.num_attention_heads
        filled.ffn_hidden_size = filled.ffn_hidden_size or 4 * filled.hidden_size
        filled.recompute_modules = filled.recompute_modules or ["core_attn"]
        filled.init_method = filled.init_method or _Normal(filled.init_method_std)
        scale = (2.0 * max(filled.num_layers, 1)) ** 0.5
        filled.output_layer_init_method = filled.output_layer_init_method or _Normal(filled.init_method_std / scale)

    def ours(self, groups: ProcessGroups | None = None, **model: Any) -> OurTransformerConfig:
        """Our configuration; model: what Megatron gives its models instead (vocab_size ...), where it is not None.

        groups: those of the model, whose sizes count where this configuration leaves them at 1; else parallel_state's.
        Raises ValueError, by the field's name, for what our layers cannot do.
        """
        for problem in self._problems():
            raise ValueError(f"TransformerConfig: {problem}")
        given = self.same_fields(OurTransformerConfig, *SIZE_FREE, *CALLBACKS, "recompute_num_layers")
        found = resolve_groups(groups)
        for name, group in (*OF_GROUPS, OF_EXPERTS) if self.num_moe_experts else OF_GROUPS:
            given[name] = found.size(group) if given[name] == 1 else given[name]
        given["activation"] = "swiglu" if self.gated_linear_unit else "gelu"
        comm = self.cp_comm_type
        given["cp_comm_type"] = (comm[0] if isinstance(comm, list) else comm) or "p2p"
        if self.recompute_granularity == "full" and self.recompute_method == "block":
            given["recompute_num_layers"] = self.recompute_num_layers
        return OurTransformerConfig(**given | {name: value for name, value in model.items() if value is not None})

    def _problems(self) -> Iterator[str]:
        if (self.gated_linear_unit, self.activation_func) not in ((False, F.gelu), (True, F.silu)):
            name = getattr(self.activation_func, "__name__", repr(self.activation_func))
            yield (
                f"gated_linear_unit={self.gated_linear_unit} with activation_func={name} is not built; use False with "
                "torch.nn.functional.gelu, or True with torch.nn.functional.silu"
            )
        if not all(isinstance(method, _Normal) for method in (self.init_method, self.output_layer_init_method)):
            yield (
                "init_method and output_layer_init_method are not used by GPTModel, whose weights are drawn by name, "
                "the same ones in every layout; set init_method_std, or overwrite the weights before they are wrapped"
            )
        if self.add_qkv_bias and not self.add_bias_linear:
            yield "add_qkv_bias=True with add_bias_linear=False is not built; a layer has all its biases or none"
        if self.recompute_granularity == "full" and self.recompute_method not in ("uniform", "block", None):
            yield f"recompute_method is {self.recompute_method!r}; it is 'uniform' or 'block'"
        if isinstance(self.cp_comm_type, list) and len(set(self.cp_comm_type)) != 1:
            yield f"cp_comm_type is {self.cp_comm_type}; it must be one for all layers"
        if not isinstance(self.moe_router_load_balancing_type, str):
            yield f"moe_router_load_balancing_type is {self.moe_router_load_balancing_type}; give one auxiliary loss"


@dataclass(frozen=True)
class _Normal:
    """The draw of a layer where the program gives none: normal, around zero."""

    std: float

    def __call__(self, weight: Tensor) -> Any:
        return normal_init(self.std)(weight)
