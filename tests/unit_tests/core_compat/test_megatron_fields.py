"""Every field of Megatron's configurations is obeyed, refused by name, or said to change nothing; none is unknown."""

from __future__ import annotations

import ast
import dataclasses
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from core_compat.megatron.faces import configs
from tests.unit_tests.core_compat.megatron_page import megatrons_fields
from tests.unit_tests.test_config_fields import MODEL_PARTS, READERS, ROOT, fields_read, names_read

KINDS = (
    configs.DistributedDataParallelConfig,
    configs.OptimizerConfig,
    configs.ModelParallelConfig,
)
NAMES = megatrons_fields()
FIELDS = [(kind, name) for kind in KINDS for name in NAMES[kind.__name__]]
UNOBEYED = [(kind, name) for kind, name in FIELDS if name in kind.rules]
OBEYED = [(kind, name) for kind, name in FIELDS if name not in kind.rules]
# What a field is set to where another number, name or truth would not do, with what it needs next to it.
OTHERS: dict[str, dict[str, Any]] = {
    "optimizer": {"optimizer": "sgd"},
    "overlap_param_gather": {"overlap_param_gather": True, "use_distributed_optimizer": True},
    "data_parallel_sharding_strategy": {"data_parallel_sharding_strategy": "optim", "use_megatron_fsdp": True},
    **{
        name: {name: torch.bfloat16, "use_precision_aware_optimizer": True}
        for name in ("main_params_dtype", "main_grads_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")
    },
    "initial_loss_scale": {"initial_loss_scale": 2.0},
    "optimizer_offload_fraction": {"optimizer_offload_fraction": 0.5, "optimizer_cpu_offload": True},
    "muon_scale_mode": {"muon_scale_mode": "none"},
    "muon_fp32_matmul_prec": {"muon_fp32_matmul_prec": "high"},
    "muon_coefficient_type": {"muon_coefficient_type": "simple"},
    "muon_tp_mode": {"muon_tp_mode": "blockwise"},
    "muon_scalar_optimizer": {"muon_scalar_optimizer": "lion"},
}


def other(default: Any, name: str) -> Any:
    """A value that is not the default."""
    if name.endswith("_dtype"):
        return torch.bfloat16
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


def read_by_code() -> set[str]:
    """Names that the engine reads of a model's configuration, or the faces of schedules, models and optimizers."""
    folders = [ROOT / "core" / folder for folder in MODEL_PARTS]
    faces = ROOT / "core_compat" / "megatron" / "faces"
    files = [path for folder in folders for path in folder.rglob("*.py") if not path.name.endswith("_config.py")]
    files += [faces / f"{name}.py" for name in ("schedules", "optimizer", "modules")]
    return {name for path in files for name in names_read(ast.parse(Path(path).read_text()))}


READ = read_by_code()
READ_OF_OURS = {kind: fields_read(kind, READERS[kind]) for kind in (configs.OurDDPConfig, configs.OurOptimizerConfig)}
# Not in ours, and read of Megatron's own configuration.
ELSEWHERE = {field.name for field in dataclasses.fields(configs.ModelParallelConfig)} | {
    "use_megatron_fsdp",
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
    others = {key: value for key, value in given.items() if key != name}
    without, found = kind(**others).ours(), kind(**given).ours()
    if found == without:
        assert name in ELSEWHERE, f"{name} has no effect"
        assert name in READ or name == "use_megatron_fsdp"  # which has a test of its own
    else:
        assert name in READ_OF_OURS[type(found)] | {"muon_use_nesterov"}, f"nothing reads {name}"


def test_no_field_is_unknown() -> None:
    assert [len(names) for names in megatrons_fields().values()] == [40, 65, 75]
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


def test_a_subclass_with_fields_of_its_own_is_a_configuration() -> None:
    @dataclasses.dataclass
    class Widened(configs.ModelParallelConfig):
        colour: str = "red"

    config = Widened(tensor_model_parallel_size=2)
    assert (config.colour, config.expert_tensor_parallel_size, config.barrier_with_L1_time) == ("red", 2, True)


def test_a_decoder_of_another_length_is_refused() -> None:
    from core_compat.megatron.faces.schedules import get_forward_backward_func

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
