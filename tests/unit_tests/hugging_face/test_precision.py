"""16-bit models next to transformers' own in that dtype: to the bit where nothing is split."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("transformers")

from core import parallel_state
from core.booster import Booster
from core.booster.plugin import GeminiPlugin, HybridParallelPlugin, LowLevelZeroPlugin, TorchFSDPPlugin
from core.hugging_face import gather_logits, load_split
from core.hugging_face.read.precision import cast_model, dtypes_of, kept_dtypes
from tests.families.tiny import all_families, model_class, tiny_config, tiny_inputs, tiny_model
from tests.unit_tests.hugging_face.models import small, tokens
from tests.unit_tests.ranks import ranks

FAMILIES = ["llama/LlamaConfig", "deepseek_v3/DeepseekV3Config", "gpt_oss/GptOssConfig", "t5/T5Config"]
PRECISIONS = {"bf16": torch.bfloat16, "fp16": torch.float16}
LENGTH = 48


def of_family(name: str, directory: Path) -> Any:
    """A small fp32 model, saved: (model, its class)."""
    model = tiny_model(tiny_config(all_families()[name])).float().eval()
    model.save_pretrained(directory)
    return model


def tensors_of(model: Any) -> dict[str, torch.Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def check_cast(name: str, directory: Path, dtype: torch.dtype) -> None:
    model = of_family(name, directory)
    wanted = type(model).from_pretrained(directory, dtype=dtype).eval()
    found = cast_model(model, dtype)
    expected = tensors_of(wanted)
    for key, tensor in tensors_of(found).items():
        assert tensor.dtype is expected[key].dtype, (key, tensor.dtype, expected[key].dtype)
        assert torch.equal(tensor, expected[key]), key
    assert cast_model(found, dtype) is found  # a second time changes nothing
    again = tensors_of(found)
    assert all(torch.equal(tensor, again[key]) for key, tensor in expected.items())


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_cast_model_is_what_transformers_loads_in_that_dtype(name: str, precision: str, tmp_path: Path) -> None:
    check_cast(name, tmp_path, PRECISIONS[precision])


@pytest.mark.nightly
@pytest.mark.parametrize("name", sorted(all_families()))
@pytest.mark.parametrize("precision", PRECISIONS)
def test_every_family_is_cast_as_transformers_loads_it(name: str, precision: str, tmp_path: Path) -> None:
    try:
        model_class(type(tiny_config(all_families()[name])))
        of_family(name, tmp_path / "first")
    except Exception as error:  # no model of its own
        pytest.skip(str(error))
    check_cast(name, tmp_path / "again", PRECISIONS[precision])


def test_a_model_with_adapters_keeps_what_it_keeps_without() -> None:
    peft = pytest.importorskip("peft")
    made = small("llama", torch.float32)
    kept = kept_dtypes(made, torch.bfloat16)
    assert set(kept.values()) == {torch.float32}
    adapted = peft.get_peft_model(made, peft.LoraConfig(r=2, target_modules="all-linear"))
    cast = tensors_of(cast_model(adapted, torch.bfloat16))
    in_fp32 = {name.removeprefix("base_model.model.") for name, each in cast.items() if each.dtype == torch.float32}
    assert in_fp32 == set(kept)


def test_modules_that_are_no_transformers_models_are_cast_whole() -> None:
    llama = small("llama", torch.float32)
    both = torch.nn.ModuleDict({"llama": llama, "more": torch.nn.BatchNorm1d(3)})
    cast_model(both, torch.bfloat16)
    assert both["more"].running_mean.dtype is both["more"].weight.dtype is torch.bfloat16
    assert llama.model.rotary_emb.inv_freq.dtype is torch.float32
    assert llama.lm_head.weight.dtype is torch.bfloat16


PLUGINS = {
    "zero": lambda precision: LowLevelZeroPlugin(precision=precision, initial_scale=2**10),  # the first step is made
    "gemini": lambda precision: GeminiPlugin(precision=precision),
    "hybrid": lambda precision: HybridParallelPlugin(1, 1, precision=precision),
    "hybrid, sharded": lambda precision: HybridParallelPlugin(1, 1, precision=precision, zero_stage=3),
}


@ranks(2)
@pytest.mark.parametrize("plugin", PLUGINS)
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.in_suite(5)
def test_a_plugins_logits_are_transformers_own_to_the_bit(
    rank: int, world: int, plugin: str, name: str, precision: str, tmp_path: Path
) -> None:
    model = of_family(name, tmp_path)  # the first rank writes
    dist.barrier()
    inputs = tiny_inputs(model)
    reference = (
        type(model).from_pretrained(tmp_path, dtype=PRECISIONS[precision], experts_implementation="eager").eval()
    )
    booster = Booster(plugin=PLUGINS[plugin](precision))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    boosted_model, wrapped, *_ = booster.boost(model, optimizer)
    with torch.no_grad():
        expected = reference(**inputs).logits
        assert torch.equal(boosted_model.eval()(**inputs).logits, expected)
    assert expected.std() > 0.01
    out = boosted_model(**inputs)  # and it trains
    booster.backward(out.logits.float().pow(2).mean(), wrapped)
    wrapped.step()
    with torch.no_grad():
        assert not torch.equal(boosted_model.eval()(**inputs).logits, expected)


@ranks(2)
@pytest.mark.parametrize("where", ["load_split", "meta", "whole"])
def test_rotary_frequencies_of_a_split_model_are_those_of_transformers(
    rank: int, world: int, where: str, tmp_path: Path
) -> None:
    model = small("llama", torch.float32)
    if rank == 0:
        model.save_pretrained(tmp_path / "model")
    dist.barrier()
    reference = type(model).from_pretrained(tmp_path / "model", dtype=torch.bfloat16)
    booster = Booster(plugin=None if where == "load_split" else HybridParallelPlugin(2, 1, precision="bf16"))
    if where == "load_split":
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
        split = load_split(tmp_path / "model", dtype=torch.bfloat16)
    elif where == "meta":
        with torch.device("meta"):
            split = type(model)(copy.deepcopy(model.config))
        split, *_ = booster.boost(split)
        booster.load_model(split, tmp_path / "model")
    else:
        split, *_ = booster.boost(model)
    part = split.unwrap() if hasattr(split, "unwrap") else split
    assert torch.equal(part.model.rotary_emb.inv_freq, reference.model.rotary_emb.inv_freq)
    assert part.model.rotary_emb.inv_freq.dtype is torch.float32 and part.lm_head.weight.dtype is torch.bfloat16
    with torch.no_grad():
        loss = float(split.eval()(input_ids=tokens(2, LENGTH), labels=tokens(2, LENGTH)).loss)
        expected = float(reference.eval()(input_ids=tokens(2, LENGTH), labels=tokens(2, LENGTH)).loss)
    assert loss == pytest.approx(expected, abs=0.01)


@ranks(2)
def test_buffers_under_fsdp_are_those_that_transformers_has(rank: int, world: int) -> None:
    from torch.distributed.fsdp import MixedPrecision

    model = small("llama", torch.float32)
    frequencies = model.model.rotary_emb.inv_freq.clone()
    plugin = TorchFSDPPlugin(
        mixed_precision=MixedPrecision(param_dtype=torch.bfloat16, buffer_dtype=torch.bfloat16),
        auto_wrap_policy={type(model.model.layers[0])},
    )
    boosted_model, *_ = Booster(plugin=plugin).boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    inner = boosted_model.unwrap()
    assert torch.equal(inner.model.rotary_emb.inv_freq, frequencies)
    inner(input_ids=tokens(), labels=tokens()).loss.backward()


def test_dtypes_of_a_family_name_what_it_keeps() -> None:
    model = tiny_model(tiny_config(all_families()["deepseek_v3/DeepseekV3Config"])).float()
    kept = {
        name.rpartition("layers.")[2]
        for name, dtype in dtypes_of(model, torch.bfloat16).items()
        if dtype is torch.float32
    }
    assert "1.mlp.gate.e_score_correction_bias" in kept and "1.mlp.gate.weight" in kept
    assert "1.mlp.experts.down_proj" not in kept


LONG = 4096
# Families of which a position so far back reaches the last one: none of these has windows or chunks throughout.
OF_LONG_TEXT = (
    *("llama/LlamaConfig", "qwen2/Qwen2Config", "qwen3/Qwen3Config", "qwen3_moe/Qwen3MoeConfig", "olmo2/Olmo2Config"),
    *("deepseek_v3/DeepseekV3Config", "gpt_oss/GptOssConfig", "gemma2/Gemma2Config", "gemma3/Gemma3TextConfig"),
    *("glm4/Glm4Config", "granite/GraniteConfig", "cohere/CohereConfig", "phi3/Phi3Config", "mixtral/MixtralConfig"),
    *("starcoder2/Starcoder2Config", "smollm3/SmolLM3Config", "ernie4_5/Ernie4_5Config", "exaone4/Exaone4Config"),
    *("helium/HeliumConfig", "mistral/MistralConfig", "gpt_neox/GPTNeoXConfig", "seed_oss/SeedOssConfig"),
)


def long_model(name: str) -> Any:
    """A small model with peaked attention and no windows, in fp64, whose last position sees the first one."""
    kind = all_families()[name]
    sizes = {"max_position_embeddings": 2 * LONG, "sliding_window": 2 * LONG, "num_hidden_layers": 2}
    like = kind()
    known = {key: value for key, value in sizes.items() if getattr(like, key, None) is not None}
    model = tiny_model(tiny_config(kind, known)).eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if key.endswith(("q_proj.weight", "k_proj.weight", "qkv_proj.weight", "q_b_proj.weight")):
                parameter.mul_(4.0)
    return model


def last_logits(model: Any) -> torch.Tensor:
    ids = torch.randint(3, 90, (2, LONG + 8), generator=torch.Generator().manual_seed(4))
    with torch.no_grad():
        return gather_logits(model(input_ids=ids, use_cache=False).logits)[:, -8:].double()


# Families without norms of queries and keys, in which attention is peaked.
SENSITIVE = ("llama/LlamaConfig", "qwen2/Qwen2Config", "deepseek_v3/DeepseekV3Config")


@pytest.mark.nightly
@ranks(2, timeout_s=600.0)
@pytest.mark.parametrize("name", OF_LONG_TEXT)
def test_logits_at_position_4096_in_bf16_are_as_near_as_transformers_own(
    rank: int, world: int, name: str, tmp_path: Path
) -> None:
    """To the bit where nothing is split; at tp 2, at most twice as far from fp32 as one process of transformers."""
    model = long_model(name).float()
    exact = last_logits(model)
    model.save_pretrained(tmp_path)  # writes on the first rank alone
    dist.barrier()
    loaded = type(model).from_pretrained(tmp_path, dtype=torch.bfloat16, experts_implementation="eager")  # as `model`
    own = last_logits(loaded.eval())
    limit = float((own - exact).norm() / exact.norm())
    for plugin in (LowLevelZeroPlugin(precision="bf16"), HybridParallelPlugin(2, 1, precision="bf16")):
        boosted_model, *_ = Booster(plugin=plugin).boost(copy.deepcopy(model))
        found = last_logits(boosted_model.eval())
        if isinstance(plugin, LowLevelZeroPlugin):
            assert torch.equal(found, own)
        off = float((found - exact).norm() / exact.norm())
        assert off <= 2 * limit + 0.01, (off, limit)
        parallel_state.destroy_model_parallel()
    if name in SENSITIVE:  # what the test is for: rotary frequencies that are rounded too
        rounded = last_logits(copy.deepcopy(model).bfloat16())
        assert float((rounded - exact).norm() / exact.norm()) > 2 * limit + 0.01
