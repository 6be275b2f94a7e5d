"""What a model's configuration accepts and refuses."""

import dataclasses

import pytest
import torch

from core.model_parallel_config import ModelParallelConfig


def test_defaults_are_one_rank_in_fp32_without_callbacks():
    config = ModelParallelConfig()
    sizes = [getattr(config, name) for name in SIZES if name not in OPTIONAL]
    assert sizes == [1] * len(sizes)
    assert [getattr(config, name) for name in OPTIONAL] == [None, None]
    assert config.params_dtype is torch.float32
    assert config.moe_router_bias_update_rate == 1e-3
    callbacks = [field.name for field in dataclasses.fields(config) if field.name.endswith("_func")]
    assert len(callbacks) == 5
    assert all(getattr(config, name) is None for name in callbacks)


SIZES = [field.name for field in dataclasses.fields(ModelParallelConfig) if field.name.endswith("_size")]
OPTIONAL = ["virtual_pipeline_model_parallel_size", "expert_tensor_parallel_size"]


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("size", [0, -1, 2.0, True, "2"])
def test_a_size_that_is_not_a_count_is_refused_by_name(name, size):
    with pytest.raises(ValueError, match=rf"{name} must be an integer of at least 1(, or None)?, got {size!r}"):
        ModelParallelConfig(**{name: size})


@pytest.mark.parametrize("name", [name for name in SIZES if name not in OPTIONAL])
def test_a_size_that_is_needed_may_not_be_none(name):
    with pytest.raises(ValueError, match=f"{name} must be an integer of at least 1, got None"):
        ModelParallelConfig(**{name: None})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"sequence_parallel": True}, "sequence_parallel=True with tensor_model_parallel_size=1"),
        ({"virtual_pipeline_model_parallel_size": 2}, "with pipeline_model_parallel_size=1: pipeline-model-"),
        ({"fp16": True, "bf16": True}, "fp16=True and bf16=True"),
        ({"bf16": True, "params_dtype": torch.float16}, "bf16=True contradicts params_dtype: parameters are made in"),
        (
            {"moe_router_enable_expert_bias": True, "moe_router_bias_update_rate": 0.0},
            "moe_router_bias_update_rate must be above 0",
        ),
    ],
)
def test_fields_that_contradict_each_other_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        ModelParallelConfig(**arguments)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("fp16", "parameters are made in params_dtype=torch.float32; set params_dtype=torch.float16, or convert"),
        ("bf16", "parameters are made in params_dtype=torch.float32; set params_dtype=torch.bfloat16, or convert"),
        ("use_cpu_initialization", "weights are drawn whole in any case"),
        ("has_cond_embedder", "gradients of parameters with `param.pipeline_parallel = True` are summed"),
    ],
)
def test_what_changes_nothing_is_a_warning(name, why):
    with pytest.warns(UserWarning, match=f"{name}=True changes nothing here: {why}"):
        assert getattr(ModelParallelConfig(**{name: True}), name)


def test_what_belongs_together_is_accepted():
    config = ModelParallelConfig(
        tensor_model_parallel_size=2,
        sequence_parallel=True,
        pipeline_model_parallel_size=2,
        virtual_pipeline_model_parallel_size=2,
        bf16=True,
        params_dtype=torch.bfloat16,
    )
    config.finalize_model_grads_func = print  # users set callbacks late
    assert config.finalize_model_grads_func is print
