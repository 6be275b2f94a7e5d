"""Every number of every configuration: NaN, infinity, bools, fractions and negative numbers are refused by name."""

from __future__ import annotations

import dataclasses
import math
import re
import typing
from typing import Any

import numpy as np
import pytest

from core.distributed import DistributedDataParallelConfig
from core.model_parallel_config import ModelParallelConfig
from core.number_ranges import BELOW_ONE, COUNT, NOT_NEGATIVE, POSITIVE_OR_INFINITE, check_ranges, whole
from core.optimizer import OptimizerConfig
from core.transformer.transformer_config import TransformerConfig

NEEDED: dict[type, dict[str, Any]] = {
    DistributedDataParallelConfig: {},
    OptimizerConfig: {"lr": 1e-3},
    ModelParallelConfig: {},
    TransformerConfig: {"num_moe_experts": 4},
}
ODD = (math.nan, math.inf, -math.inf, -1, 0, 2.5, True, "3", 10**30)
# What odd values mean something for, by field; everything else is refused.
ANY_NOT_NEGATIVE = {0, 2.5, 10**30}
ANY_POSITIVE = {2.5, 10**30}
MEANT: dict[str, set[Any]] = {
    **dict.fromkeys(("lr", "min_lr", "decoupled_lr", "decoupled_min_lr", "weight_decay", "adam_eps"), ANY_NOT_NEGATIVE),
    **dict.fromkeys(("moe_aux_loss_coeff", "moe_z_loss_coeff", "moe_router_bias_update_rate"), ANY_NOT_NEGATIVE),
    **dict.fromkeys(("layernorm_epsilon",), ANY_NOT_NEGATIVE),
    **dict.fromkeys(("adam_beta1", "adam_beta2", "lion_beta1", "lion_beta2", "muon_momentum", "sgd_momentum"), {0}),
    **dict.fromkeys(("hidden_dropout", "attention_dropout", "optimizer_offload_fraction"), {0}),
    **dict.fromkeys(("muon_extra_scale_factor", "loss_scale", "initial_loss_scale"), ANY_POSITIVE),
    **dict.fromkeys(("init_method_std", "rotary_base"), ANY_POSITIVE),
    **dict.fromkeys(("moe_router_topk_scaling_factor", "moe_expert_capacity_factor"), ANY_POSITIVE),
    **dict.fromkeys(("grad_norm_type", "grad_norm_skip_threshold"), {*ANY_POSITIVE, math.inf}),  # the largest; never
    "clip_grad": {*ANY_NOT_NEGATIVE, math.inf},  # 0 and inf clip nothing
    "min_loss_scale": {2.5},  # 10**30 is above the scale that it is the least of
    # whole numbers: large ones, unless they do not fit the others
    **dict.fromkeys(("bucket_size", "num_buckets", "num_distributed_optimizer_instances"), {10**30}),
    **dict.fromkeys(("loss_scale_window", "hysteresis", "muon_num_ns_steps"), {10**30}),
    **dict.fromkeys(("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"), {10**30}),
    **dict.fromkeys(("expert_model_parallel_size", "expert_tensor_parallel_size"), {10**30}),
    **dict.fromkeys(("num_layers", "kv_channels", "ffn_hidden_size", "vocab_size"), {10**30}),
    **dict.fromkeys(("hidden_size", "max_sequence_length", "moe_ffn_hidden_size", "num_moe_experts"), {10**30}),
    "moe_shared_expert_intermediate_size": {10**30},
    "moe_layer_freq": {10**30},  # only the first layer has experts
    "recompute_num_layers": {0, 10**30},  # none; all
    "logits_chunk": {0, 10**30},  # never; all tokens
    "check_weights_interval": {0, 10**30},  # never
    "init_seed": {-1, 0, 10**30},
}
MISFIT = {  # refused for the other sizes of the same configuration
    TransformerConfig: {"tensor_model_parallel_size", "expert_model_parallel_size", "expert_tensor_parallel_size"},
}


def numeric_fields(config: type) -> list[str]:
    hints = typing.get_type_hints(config)
    return [
        field.name
        for field in dataclasses.fields(config)
        if {int, float} & {hints[field.name], *typing.get_args(hints[field.name])}
    ]


@pytest.mark.parametrize("config", NEEDED, ids=lambda config: config.__name__)
def test_every_odd_number_is_refused_by_name_value_and_range_or_means_something(config: type) -> None:
    wrong = []
    for name in numeric_fields(config):
        for value in ODD:
            others = {"optimizer_cpu_offload": True} if name == "optimizer_offload_fraction" else {}
            meant = value in MEANT.get(name, set()) and not isinstance(value, bool)
            try:
                config(**{**NEEDED[config], **others, name: value})
                outcome = "taken"
            except ValueError as error:
                outcome = str(error)
            fits = name not in MISFIT.get(config, set())
            if meant and fits and outcome != "taken":
                wrong.append(f"{name}={value!r} means something: {outcome}")
            if not meant and not (re.search(rf"\b{name}\b", outcome) and repr(value) in outcome):
                wrong.append(f"{name}={value!r} is refused by name: {outcome}")
    assert not wrong, "\n".join(wrong)
    assert numeric_fields(config)


def test_a_range_says_what_it_holds() -> None:
    assert str(COUNT) == "an integer of at least 1" and np.int64(3) in COUNT and 3.0 not in COUNT
    assert str(whole(2, 5)) == "an integer of at least 2 and at most 5" and 5 in whole(2, 5) and 6 not in whole(2, 5)
    assert str(NOT_NEGATIVE) == "a finite number of at least 0" and np.float32(0.5) in NOT_NEGATIVE
    assert str(BELOW_ONE) == "a number of at least 0 and below 1" and 0 in BELOW_ONE and 1 not in BELOW_ONE
    assert str(POSITIVE_OR_INFINITE) == "a number above 0" and math.inf in POSITIVE_OR_INFINITE


def test_a_bool_is_a_bool() -> None:
    with pytest.raises(ValueError, match="overlap_grad_reduce must be True or False, got 'False'"):
        DistributedDataParallelConfig(overlap_grad_reduce="False")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="bf16 must be True or False, got 1"):
        OptimizerConfig(lr=1.0, bf16=1)  # type: ignore[arg-type]


def test_none_is_right_only_where_it_is_the_default() -> None:
    @dataclasses.dataclass
    class Sizes:
        needed: int = 1
        optional: int | None = None

    check_ranges(Sizes(), {"needed": COUNT, "optional": COUNT})
    with pytest.raises(ValueError, match="--needed must be an integer of at least 1, got None"):
        check_ranges(Sizes(needed=None), {"needed": COUNT}, lambda name: f"--{name}")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="optional must be an integer of at least 1, or None, got 0"):
        check_ranges(Sizes(optional=0), {"optional": COUNT})
