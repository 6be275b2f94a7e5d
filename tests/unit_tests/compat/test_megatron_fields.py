"""Every field of Megatron's configurations is obeyed, refused by name, or said to change nothing; none is unknown."""

from __future__ import annotations

import ast
import dataclasses
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from core.compat.megatron.faces import configs
from tests.unit_tests.compat.megatron_page import megatrons_fields
from tests.unit_tests.test_config_fields import MODEL_PARTS, ROOT, names_read

KINDS = (
    configs.DistributedDataParallelConfig,
    configs.OptimizerConfig,
    configs.ModelParallelConfig,
    configs.TransformerConfig,
)
NAMES = megatrons_fields()
NAMES["TransformerConfig"] = NAMES["ModelParallelConfig"] + NAMES["TransformerConfig"]
FIELDS = [(kind, name) for kind in KINDS for name in NAMES[kind.__name__]]
UNOBEYED = [(kind, name) for kind, name in FIELDS if name in kind.rules]
OBEYED = [(kind, name) for kind, name in FIELDS if name not in kind.rules]
SHAPE: dict[str, Any] = dict(num_layers=2, hidden_size=8, num_attention_heads=4)
# What a field is set to where another number, name or truth would not do, with what it needs beside it.
OTHERS: dict[str, dict[str, Any]] = {
    "optimizer": {"optimizer": "sgd"},
    "overlap_param_gather": {"overlap_param_gather": True, "use_distributed_optimizer": True},
    "data_parallel_sharding_strategy": {"data_parallel_sharding_strategy": "optim", "use_megatron_fsdp": True},
    "main_params_dtype": {"main_params_dtype": torch.bfloat16, "use_precision_aware_optimizer": True},
    "optimizer_offload_fraction": {"optimizer_offload_fraction": 0.5, "optimizer_cpu_offload": True},
    "muon_scale_mode": {"muon_scale_mode": "none"},
    "muon_fp32_matmul_prec": {"muon_fp32_matmul_prec": "high"},
    "muon_coefficient_type": {"muon_coefficient_type": "simple"},
    "muon_tp_mode": {"muon_tp_mode": "blockwise"},
    "muon_scalar_optimizer": {"muon_scalar_optimizer": "lion"},
    "normalization": {"normalization": "RMSNorm"},
    "gated_linear_unit": {"gated_linear_unit": True, "activation_func": F.silu},
    "activation_func": {"activation_func": F.relu},
    "add_qkv_bias": {"add_qkv_bias": True, "add_bias_linear": False},
    "recompute_granularity": {"recompute_granularity": "full"},
    "recompute_num_layers": {"recompute_num_layers": 1, "recompute_granularity": "full", "recompute_method": "block"},
    "recompute_method": {"recompute_method": "block", "recompute_granularity": "full", "recompute_num_layers": 1},
    "recompute_modules": {"recompute_modules": ["mlp"], "recompute_granularity": "selective"},
    "cp_comm_type": {"cp_comm_type": "all_gather"},
    "pipeline_model_parallel_size": {"pipeline_model_parallel_size": 2},
    "virtual_pipeline_model_parallel_size": {
        "virtual_pipeline_model_parallel_size": 1,
        "pipeline_model_parallel_size": 2,
    },
    "sequence_parallel": {"sequence_parallel": True, "tensor_model_parallel_size": 2},
    "num_query_groups": {"num_query_groups": 2},
    "hidden_size": {"hidden_size": 16},
    "kv_channels": {"kv_channels": 4},
    "num_attention_heads": {"num_attention_heads": 8},
    "moe_router_load_balancing_type": {"moe_router_load_balancing_type": "none"},
    "moe_router_score_function": {"moe_router_score_function": "sigmoid"},
    "moe_token_dispatcher_type": {"moe_token_dispatcher_type": "alltoall"},
    "moe_token_drop_policy": {"moe_token_drop_policy": "position"},
    "moe_router_dtype": {"moe_router_dtype": "fp32"},
}


def other(default: Any, name: str) -> Any:
    """A value that is not the default."""
    if name.endswith("_dtype"):
        return torch.bfloat16
    if name.endswith("_func"):
        return print
    if isinstance(default, bool):
        return not default
    if isinstance(default, (int, float)) and default == default:
        return 0.5 if default != 0.5 and isinstance(default, float) else default + 1
    return 2 if default is None else "something else"


@pytest.mark.parametrize(("kind", "name"), UNOBEYED, ids=lambda part: getattr(part, "__name__", part))
def test_what_nothing_obeys_is_refused_by_name_or_warned_of(kind: Any, name: str) -> None:
    rule = kind.rules[name]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        config = kind()
        for default in rule.defaults:
            setattr(config, name, default)
    assert len(rule.sentence) > 15
    known = rule.defaults[0] is not None and not isinstance(rule.defaults[0], str) and len(rule.defaults) == 1
    value = other(rule.defaults[0], name) if known else "something else"
    if rule.refused:
        with pytest.raises(ValueError, match=f"{name}=.* is not supported; leave it at"):
            setattr(config, name, value)
        with pytest.raises(ValueError, match=name):
            kind(**{name: value})
        assert getattr(config, name) == rule.defaults[-1], "a refused value is not kept"
    else:
        with pytest.warns(UserWarning, match=f"{name}=.* changes nothing here"):
            setattr(config, name, value)


def result(kind: Any, **given: Any) -> Any:
    """Our configuration, with a description that shows every field."""
    if kind is configs.ModelParallelConfig:
        return {field.name: getattr(kind(**given), field.name) for field in dataclasses.fields(kind)}
    if kind is configs.TransformerConfig:
        made = kind(**{**SHAPE, "num_moe_experts": 4, **given})
        return made.ours(vocab_size=8, max_sequence_length=8)
    return kind(**given).ours()


def read_by_code() -> set[str]:
    """Names that the engine reads of a model's configuration, or the faces of schedules, models and optimizers."""
    folders = [ROOT / "core" / folder for folder in MODEL_PARTS]
    faces = ROOT / "core" / "compat" / "megatron" / "faces"
    files = [path for folder in folders for path in folder.rglob("*.py") if not path.name.endswith("_config.py")]
    files += [faces / f"{name}.py" for name in ("schedules", "gpt", "optimizer", "modules", "groups", "blocks")]
    return {name for path in files for name in names_read(ast.parse(Path(path).read_text()))}


READ = read_by_code()
# Not in ours, and read of Megatron's own configuration.
BESIDE = {field.name for field in dataclasses.fields(configs.ModelParallelConfig)} | {
    *("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage", "use_megatron_fsdp"),
    *("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"),
    "overlap_param_gather",
}


@pytest.mark.parametrize(("kind", "name"), OBEYED, ids=lambda part: getattr(part, "__name__", part))
def test_what_is_obeyed_changes_what_the_engine_is_given(kind: Any, name: str) -> None:
    needed = {} if kind is configs.ModelParallelConfig else OTHERS.get(name, {})
    default = next(field for field in dataclasses.fields(kind) if field.name == name).default
    given = needed if name in needed else {name: other(default, name)}
    if kind is configs.ModelParallelConfig:
        assert name in READ | {"expert_tensor_parallel_size"}, "the engine reads Megatron's configuration itself"
        return
    beside = {key: value for key, value in given.items() if key != name}
    try:
        without = result(kind, **beside)
    except ValueError:  # what stands beside it needs it
        without = None
    try:
        found = result(kind, **given)
    except ValueError as error:
        assert name in str(error) or name in ("use_megatron_fsdp", "fp16", "bf16"), error
        return
    if found == without:
        assert name in BESIDE, f"{name} has no effect"
        assert name in READ or name == "use_megatron_fsdp"  # which has a test of its own


def test_no_field_is_unknown() -> None:
    assert [len(names) for names in megatrons_fields().values()] == [40, 64, 75, 236]
    for kind, name in FIELDS:
        assert name in {field.name for field in dataclasses.fields(kind)}, f"{kind.__name__}.{name}"


def test_a_configuration_may_be_written_to_and_counts_as_it_stands() -> None:
    config = configs.DistributedDataParallelConfig()
    config.bucket_size = 1000
    config.overlap_grad_reduce = True
    ours = config.ours()
    assert (ours.bucket_size, ours.overlap_grad_reduce) == (1000, True)
    config.data_parallel_sharding_strategy = "optim_grads"
    with pytest.raises(ValueError, match="set use_megatron_fsdp=True"):
        config.ours()
    config.use_megatron_fsdp = True
    assert config.ours().strategy == "optim_grads"


def test_derived_fields_are_filled_in_as_megatron_does() -> None:
    config = configs.TransformerConfig(**SHAPE)
    assert (config.kv_channels, config.num_query_groups, config.ffn_hidden_size) == (2, 4, 32)
    assert (config.hidden_dropout, config.attention_dropout, config.barrier_with_L1_time) == (0.1, 0.1, True)
    weight = torch.zeros(400, 400)
    config.init_method(weight)
    assert weight.std() == pytest.approx(0.02, rel=0.05)
    config.output_layer_init_method(weight)
    assert weight.std() == pytest.approx(0.01, rel=0.05)


def test_a_subclass_with_fields_of_its_own_is_a_configuration() -> None:
    @dataclasses.dataclass
    class Widened(configs.TransformerConfig):
        colour: str = "red"
        normalization: str = "RMSNorm"

    config = Widened(**SHAPE)
    assert config.colour == "red" and config.ours(vocab_size=8).normalization == "RMSNorm"


def test_a_mode_that_has_no_equal_here_says_so() -> None:
    for given, says in (
        ({"gated_linear_unit": True}, "gated_linear_unit=True with activation_func=gelu is not built"),
        ({"init_method": torch.nn.init.zeros_}, "init_method .* not used by GPTModel"),
        ({"moe_router_load_balancing_type": ["aux_loss", "seq_aux_loss"]}, "one auxiliary loss"),
        ({"cp_comm_type": ["p2p", "a2a"]}, "one for all layers"),
    ):
        with pytest.raises(ValueError, match=says):
            configs.TransformerConfig(**SHAPE, **given).ours(vocab_size=8)


def test_a_draw_of_ones_own_is_refused_when_it_is_given_and_when_it_is_written() -> None:
    config = configs.TransformerConfig(**SHAPE)
    dataclasses.replace(config, hidden_size=16).ours()  # a copy has no draw of its own
    config.init_method = torch.nn.init.zeros_
    for found in (config, configs.TransformerConfig(**SHAPE, output_layer_init_method=torch.nn.init.zeros_)):
        with pytest.raises(ValueError, match="init_method and output_layer_init_method are not used by GPTModel"):
            found.ours()


def test_a_decoder_of_another_length_is_refused() -> None:
    from core.compat.megatron.faces.schedules import get_forward_backward_func

    with pytest.raises(ValueError, match="decoder_seq_length is 4 and seq_length 8"):
        get_forward_backward_func()(
            forward_step_func=lambda *_: None,
            data_iterator=None,
            model=torch.nn.Linear(1, 1),
            num_microbatches=1,
            seq_length=8,
            micro_batch_size=1,
            decoder_seq_length=4,
        )
