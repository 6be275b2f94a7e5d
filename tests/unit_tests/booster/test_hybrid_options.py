"""Every parameter of HybridParallelPlugin has an effect that is seen here, or a warning names it, as the page says."""

import copy
import inspect
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("transformers")

from core import parallel_state
from core.booster import Booster
from core.booster.plugin import GradientCheckpointConfig, HybridParallelPlugin
from core.booster.plugin.hybrid_parallel_options import WITHOUT_EFFECT
from core.hugging_face import Policy
from core.hugging_face.run.layer_checkpointing import checkpoint_layers
from tests.unit_tests.hugging_face.models import small, tokens
from tests.unit_tests.ranks import ranks

# What ColossalAI's signature has, and the task's list.
LISTED = [
    "tp_size",
    "pp_size",
    "sp_size",
    "precision",
    "zero_stage",
    "enable_all_optimization",
    "enable_fused_normalization",
    "enable_flash_attention",
    "enable_jit_fused",
    "enable_sequence_parallelism",
    "sequence_parallelism_mode",
    "enable_sequence_overlap",
    "parallel_output",
    "num_microbatches",
    "microbatch_size",
    "initial_scale",
    "min_scale",
    "growth_factor",
    "backoff_factor",
    "growth_interval",
    "hysteresis",
    "max_scale",
    "max_norm",
    "broadcast_buffers",
    "ddp_bucket_cap_mb",
    "find_unused_parameters",
    "check_reduction",
    "gradient_as_bucket_view",
    "static_graph",
    "zero_bucket_size_in_m",
    "cpu_offload",
    "communication_dtype",
    "overlap_communication",
    "custom_policy",
    "pp_style",
    "num_model_chunks",
    "scheduler_nodes",
    "num_layers_per_stage",
    "gradient_checkpoint_config",
    "enable_metadata_cache",
    "make_vocab_size_divisible_by",
    "dp_outside",
    "overlap_p2p",
    "overlap_allgather",
    "fp8_communication",
    "use_fp8",
    "inner_ring_size",
]

Options = dict[str, Any]
TP: Options = {"tp_size": 2}
PP: Options = {"pp_size": 2, "num_microbatches": 2}
RING: Options = {"enable_sequence_parallelism": True, "sequence_parallelism_mode": "ring_attn", "sp_size": 2}


def plugin_of(**options: Any) -> Any:
    return HybridParallelPlugin(**{"tp_size": 1, "pp_size": 1, "precision": "fp32", **options})


def boosted(**options: Any) -> tuple[Any, Any]:
    model = small("llama", torch.float32, num_hidden_layers=4, tie_word_embeddings=False, attn_implementation="eager")
    model.register_buffer("noted", torch.full((), float(torch.distributed.get_rank())))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    booster = Booster(plugin=plugin_of(**options))
    model, optimizer, *_ = booster.boost(model, optimizer)
    return model, optimizer


def size_of(axis: str) -> Callable[..., Any]:
    return lambda **options: plugin_of(**options).groups().size(axis)


def config_of(name: str) -> Callable[..., Any]:
    return lambda **options: getattr(plugin_of(**options).ddp_config, name)


def scaler_numbers(**options: Any) -> list[float]:
    scaler = boosted(precision="fp16", **options)[1].scaler
    return [scaler.value, *(getattr(scaler, name) for name in list(SCALER)[1:])]


def strides(**options: Any) -> int:
    first, second = plugin_of(**options).groups().ranks("pp")
    return int(second - first)


def logits_shape(**options: Any) -> int:
    return int(boosted(**options)[0](input_ids=tokens()).logits.shape[-1])


def microbatches(**options: Any) -> int:
    model, _ = boosted(**options)
    seen: list[int] = []
    for layer in model.parts()[0].model.layers:
        if list(layer.parameters()):
            layer.register_forward_pre_hook(lambda *_: seen.append(1))
            break
    plugin = plugin_of(**options)
    ids = tokens(4)
    with torch.no_grad():
        plugin.execute_pipeline(iter([{"input_ids": ids, "labels": ids}]), model, None)
    return len(seen)


def layers_here(**options: Any) -> int:
    return sum(bool(list(layer.parameters())) for part in boosted(**options)[0].parts() for layer in part.model.layers)


def checkpointed(**options: Any) -> int:
    return sum(getattr(layer, "gradient_checkpointing", False) for layer in boosted(**options)[0].unwrap().model.layers)


def attention(**options: Any) -> str:
    return str(boosted(**options)[0].unwrap().config._attn_implementation)


def offloaded(**options: Any) -> bool:
    return bool(plugin_of(**options).optimizer_config.optimizer_cpu_offload)


def whole_parameters(**options: Any) -> int:
    return len(boosted(**options)[0].unwrap().split_report.plan.whole)


# Parameter: (what it needs next to it, another value than the default, what is looked at, without it and with it).
EFFECTS: dict[str, tuple[Options, Any, Callable[..., Any], Any, Any]] = {
    "tp_size": ({}, 2, size_of("tp"), 1, 2),
    "pp_size": ({"num_microbatches": 2}, 2, size_of("pp"), 1, 2),
    "sp_size": ({**RING, "sp_size": 4}, 2, size_of("cp"), 4, 2),
    "precision": ({}, "bf16", lambda **o: boosted(**o)[0].unwrap().dtype, torch.float32, torch.bfloat16),
    "zero_stage": ({}, 3, config_of("strategy"), "no_shard", "optim_grads_params"),
    "enable_flash_attention": ({}, True, attention, "eager", "sdpa"),
    "enable_sequence_parallelism": (TP, True, lambda **o: plugin_of(**o).sequence_parallel, None, "split_gather"),
    "sequence_parallelism_mode": (
        {"enable_sequence_parallelism": True, "sp_size": 2, **TP},
        "all_to_all",
        size_of("cp"),
        1,
        2,
    ),
    "parallel_output": (TP, False, logits_shape, 64, 97),
    "make_vocab_size_divisible_by": (TP, 10, logits_shape, 64, 50),
    "num_microbatches": ({"pp_size": 2, "num_microbatches": 2}, 4, microbatches, 2, 4),
    "microbatch_size": ({"pp_size": 2, "microbatch_size": 2}, 1, microbatches, 2, 4),
    "max_norm": ({}, 2.0, lambda **o: boosted(**o)[1].max_norm, 0, 2.0),
    "broadcast_buffers": ({}, False, lambda **o: float(boosted(**o)[0].unwrap().noted), 0.0, "rank"),
    "ddp_bucket_cap_mb": ({}, 4, config_of("bucket_size"), 25 * 2**18, 2**20),
    "zero_bucket_size_in_m": ({"zero_stage": 1}, 1, config_of("bucket_size"), 12 * 2**20, 2**20),
    "cpu_offload": (
        {"zero_stage": 1},
        True,
        lambda **o: plugin_of(**o).optimizer_config.optimizer_cpu_offload,
        0,
        1,
    ),
    "communication_dtype": ({}, torch.bfloat16, config_of("grad_communication_dtype"), None, torch.bfloat16),
    "overlap_communication": ({}, False, config_of("overlap_grad_reduce"), True, False),
    "custom_policy": (
        {**TP, "parallel_output": False},
        Policy({"gate_proj": "colwise", "up_proj": "colwise", "down_proj": "rowwise"}),
        whole_parameters,
        9,
        27,
    ),
    "pp_style": ({**PP, "num_model_chunks": 2, "pp_style": "zbv"}, "interleaved", layers_here, 2, 2),
    "num_model_chunks": ({**PP, "pp_style": "interleaved"}, 2, lambda **o: len(boosted(**o)[0].parts()), None, 2),
    "num_layers_per_stage": (PP, [1, 3], layers_here, 2, "1 or 3"),
    "gradient_checkpoint_config": ({}, GradientCheckpointConfig(0.5), checkpointed, 0, 2),
    "dp_outside": (PP, False, strides, 1, 2),
    "overlap_allgather": ({"zero_stage": 1}, True, config_of("overlap_param_gather"), False, True),
    "fp8_communication": ({}, True, config_of("grad_communication_dtype"), None, torch.float8_e4m3fn),
}
# Options of the loss scale: (default, another value); seen together.
SCALER: dict[str, tuple[float, float]] = {
    "initial_scale": (2.0**16, 2.0**8),
    "min_scale": (1, 4.0),
    "growth_factor": (2, 4.0),
    "backoff_factor": (0.5, 0.25),
    "growth_interval": (1000, 10),
    "hysteresis": (2, 1),
    "max_scale": (2.0**32, 2.0**20),
}
# Taken, or refused with a reason, by what the machine or the other parameters are.
CONDITIONAL = {"use_fp8"}


def seen(look: Callable[..., Any], options: Options) -> Any:
    try:
        return look(**options)
    finally:
        parallel_state.destroy_model_parallel()


@ranks(4)
@pytest.mark.parametrize("third", range(3))
def test_every_parameter_has_the_effect_that_the_table_says(rank: int, world: int, third: int) -> None:
    for name, (needed, value, look, before, after) in list(EFFECTS.items())[third::3]:
        if before is not None:
            assert seen(look, {"tp_size": 1, **needed}) == before, name
        found = seen(look, {**needed, name: value})
        assert found == {"rank": float(rank), "1 or 3": [1, 3][rank % 2]}.get(str(after), after), name


@ranks(4)
def test_every_parameter_of_the_loss_scale_reaches_it(rank: int, world: int) -> None:
    assert seen(scaler_numbers, {}) == [default for default, _ in SCALER.values()]
    others = {name: value for name, (_, value) in SCALER.items()}
    assert seen(scaler_numbers, others) == list(others.values())
    with pytest.raises((ValueError, RuntimeError), match="use_fp8"):
        plugin_of(use_fp8=True)
    with pytest.raises((ValueError, RuntimeError), match="use_fp8 .*(sp_size to 1|cannot run here)"):
        plugin_of(use_fp8=True, tp_size=2, precision="bf16")


OTHER_VALUES: Options = {
    **dict.fromkeys(("enable_all_optimization", "enable_fused_normalization", "enable_jit_fused"), True),
    **dict.fromkeys(("enable_sequence_overlap", "find_unused_parameters", "check_reduction"), True),
    **dict.fromkeys(("gradient_as_bucket_view", "static_graph"), True),
    **dict.fromkeys(("enable_metadata_cache", "overlap_p2p"), False),
    **{"scheduler_nodes": [], "inner_ring_size": 2},
}


@ranks(2)
def test_options_without_effect_are_named_in_one_warning(rank: int, world: int) -> None:
    assert OTHER_VALUES.keys() == WITHOUT_EFFECT.keys()
    with pytest.warns(UserWarning, match="options change nothing here") as warned:
        plugin_of(**OTHER_VALUES, sequence_parallelism_mode="all_to_all")
    (only,) = warned
    assert "HybridParallelPlugin: these options change nothing here. " in str(only.message)
    named = [f"{name}={value!r}" for name, value in OTHER_VALUES.items()]
    for words in (*named, "sequence_parallelism_mode='all_to_all'"):
        assert f"{words}: " in str(only.message)
    assert only.filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plugin_of()
        plugin_of(**{name: default for name, (default, _) in WITHOUT_EFFECT.items()})
        with pytest.raises(ValueError, match="World size 2 is not divisible"):
            plugin_of(**RING, tp_size=2)


def test_the_table_the_signature_and_the_list_name_the_same_parameters() -> None:
    signature = [name for name in inspect.signature(HybridParallelPlugin.__init__).parameters if name != "self"]
    assert sorted(signature) == sorted([*LISTED, "example", "logits_chunk"])  # which are ours
    assert EFFECTS.keys() | SCALER.keys() | WITHOUT_EFFECT.keys() | CONDITIONAL == set(LISTED)
    assert not (EFFECTS.keys() | SCALER.keys()) & WITHOUT_EFFECT.keys()


def test_layers_are_checkpointed_without_a_name_that_transformers_gives_up(recwarn: pytest.WarningsRecorder) -> None:
    model = small("llama")
    checkpoint_layers([model], GradientCheckpointConfig(0.5), ["model.layers"])
    assert [layer.gradient_checkpointing for layer in model.model.layers] == [True, False]
    assert not [warning.message for warning in recwarn if warning.category is FutureWarning]


@ranks(2)
@pytest.mark.parametrize("multiple", [64, 100])  # with 100 the second rank holds padding alone
@pytest.mark.parametrize("chunk", [0, 5])
@pytest.mark.in_suite()
def test_a_padded_vocabulary_trains_as_one_process_and_is_saved_without_its_padding(
    rank: int, world: int, multiple: int, chunk: int, tmp_path: Path
) -> None:
    import transformers

    model = small("llama", torch.float32)
    reference = copy.deepcopy(model)
    plugin = plugin_of(**TP, make_vocab_size_divisible_by=multiple, logits_chunk=chunk)
    booster = Booster(plugin=plugin)
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.5))
    sgd = torch.optim.SGD(reference.parameters(), lr=0.5)
    assert list(model.unwrap().lm_head.weight.shape) == [multiple, 32]
    for seed in range(2):
        ids = tokens(seed=seed)
        found, expected = (each(input_ids=ids, labels=ids).loss for each in (model, reference))
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)
        booster.backward(found, optimizer)
        expected.backward()
        for each in (optimizer, sgd):
            each.step()
            each.zero_grad()
    booster.save_model(model, tmp_path / "saved", shard=True)
    dist.barrier()
    loaded = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "saved")
    assert loaded.config.vocab_size == 97
    for name, parameter in reference.named_parameters():
        torch.testing.assert_close(loaded.get_parameter(name), parameter, rtol=1e-4, atol=1e-6)
    loaded.resize_token_embeddings(103)
    assert loaded(input_ids=torch.tensor([[102]])).logits.shape[-1] == 103
    before = model.unwrap().lm_head.weight.detach().clone()
    booster.load_model(model, tmp_path / "saved")
    assert torch.equal(model.unwrap().lm_head.weight, before)
