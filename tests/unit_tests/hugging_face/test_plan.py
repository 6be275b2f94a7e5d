"""Plans: the pure table, what it refuses, and how a family's own rules become it. No processes."""

import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from core.hugging_face import Plan, PlanError, Split, read_plan
from core.hugging_face.read.plan import STYLES, cut_of, style_of
from core.hugging_face.read.transformers_plans import transformers_package


def model_of(family: str, **values: Any) -> Any:
    """A model of two layers without memory."""
    import transformers

    sizes = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0}
    config = transformers.AutoConfig.for_model(family, **{**sizes, **heads, **values})
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(config)


def test_a_plan_of_llama_is_the_table_that_one_would_write_by_hand() -> None:
    plan = read_plan(model_of("llama"))
    layer = "model.layers.1."
    cuts = {name.removeprefix(layer): split.dim for name, split in plan.splits.items() if name.startswith(layer)}
    assert cuts == {
        **dict.fromkeys(("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"), 0),
        **dict.fromkeys(("mlp.gate_proj.weight", "mlp.up_proj.weight"), 0),
        **dict.fromkeys(("self_attn.o_proj.weight", "mlp.down_proj.weight"), 1),
    }
    assert plan.splits["model.embed_tokens.weight"].dim == plan.splits["lm_head.weight"].dim == 0
    assert plan.seams["lm_head"].after == "gather"
    assert plan.whole.keys() == {
        "model.norm.weight",
        *(
            f"model.layers.{n}.{norm}.weight"
            for n in range(2)
            for norm in ("input_layernorm", "post_attention_layernorm")
        ),
    }


def test_the_table_says_what_a_rank_holds() -> None:
    table = read_plan(model_of("qwen3")).table(2)
    assert "2 x model.layers.*.self_attn.k_proj.weight: [256, 32] cut along 0, a rank holds [128, 32]" in table
    assert "2 x model.layers.*.self_attn.q_norm.weight: whole; its gradient is summed over tp" in table
    assert "2 x model.layers.*.self_attn.o_proj (rowwise): input unchanged; output summed over tp" in table
    held, whole = re.findall(r"holds ([\d,]+), ([\d,]+) of them whole", table)[0]
    model = model_of("qwen3")
    total = sum(p.numel() for p in model.parameters())
    padding = 2 * 32  # the vocabulary of 97 is padded to 98, in the embedding and in the output layer
    number = [int(text.replace(",", "")) for text in (held, whole)]
    assert 2 * (number[0] - number[1]) + number[1] == total + padding


def test_tied_embeddings_are_cut_alike_also_where_one_has_a_rule_only() -> None:
    plan = read_plan(model_of("llama", tie_word_embeddings=True))
    assert plan.splits["lm_head.weight"] == Split("lm_head.weight", (97, 32), 0, padded=True)
    assert plan.splits["model.embed_tokens.weight"].padded


def test_heads_that_do_not_divide_are_refused_with_the_sizes_that_fit() -> None:
    plan = read_plan(model_of("llama", num_attention_heads=3, num_key_value_heads=3, hidden_size=48))
    with pytest.raises(PlanError, match=r"q_proj.weight' \[48, 48\] holds 3 heads .* not divisible by 2.*fit.*: 1$"):
        plan.check_size(2)
    plan = read_plan(
        model_of("llama", num_attention_heads=6, num_key_value_heads=3, hidden_size=48, intermediate_size=66)
    )
    # Over 6 ranks each head of keys is used by two; over 2 ranks one is used by both, which have copies.
    assert plan.sizes() == [1, 2, 3, 6]
    plan.check_size(3)


def test_widths_that_do_not_divide_are_refused_and_vocabularies_are_padded() -> None:
    plan = read_plan(model_of("llama", intermediate_size=65))
    with pytest.raises(PlanError, match=r"gate_proj.weight' \[65, 32\] is cut along its dimension of 65"):
        plan.check_size(2)
    split = read_plan(model_of("llama")).splits["lm_head.weight"]
    assert split.misfit(2) is None
    assert split.local_shape(2) == (49, 32)
    packed = Split("experts.gate_up_proj", (4, 2 * 33, 32), 1, blocks=2)
    assert packed.misfit(2) == "'experts.gate_up_proj' [4, 66, 32] is cut along its dimension of 66 in 2 parts"


def test_an_unknown_style_names_family_and_style() -> None:
    model = model_of("llama")
    model._tp_plan["model.layers.*.mlp.up_proj"] = "diagonal"
    with pytest.raises(PlanError, match=r"llama .*'model.layers.0.mlp.up_proj' has style 'diagonal', which is unknown"):
        read_plan(model)


def test_a_family_without_a_plan_is_refused() -> None:
    with pytest.raises(PlanError, match=r"xglm \(XGLMForCausalLM\) has no tensor-parallel plan .* give a Policy"):
        read_plan(model_of("xglm"))


def test_versions_whose_plans_were_never_read_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    import transformers

    for version in ("5.22.1", "5.25.0", "4.57.0"):
        monkeypatch.setattr(transformers, "__version__", version)
        with pytest.raises(PlanError, match=f"transformers {version}: .* from 5.23 and before 5.25"):
            transformers_package()


def test_every_style_that_transformers_has_is_known_or_used_by_no_family() -> None:
    from transformers.distributed.parallel_utils import ALL_PARALLEL_STYLES

    unknown = {style for style in ALL_PARALLEL_STYLES if style not in STYLES}
    assert unknown == {"sequence_parallel", "ep_dispatch_experts", "grouped_gemm"}  # the last two are of expert plans


@pytest.mark.parametrize(
    ("style", "parameter", "shape", "named", "expected"),
    [
        ("colwise", "q.weight", (8, 4), False, (0, 1)),
        ("colwise", "q.bias", (8,), False, (0, 1)),
        ("colwise", "attn.sinks", (8,), True, (0, 1)),
        ("rowwise", "o.weight", (4, 8), False, (1, 1)),
        ("rowwise", "o.bias", (4,), False, None),
        ("packed_colwise", "experts.gate_up_proj", (3, 8, 4), True, (1, 2)),
        ("packed_colwise", "mlp.gate_up_proj.bias", (8,), False, (0, 2)),
        ("packed_rowwise", "experts.gate_up_proj", (3, 4, 8), True, (2, 2)),
        ("moe_tp_experts", "experts.scale", (3, 4), False, None),
        ("embedding_colwise", "embed.weight", (97, 8), False, (1, 1)),
    ],
)
def test_what_a_style_cuts(
    style: str, parameter: str, shape: tuple[int, ...], named: bool, expected: tuple[int, int] | None
) -> None:
    assert cut_of(style_of("family", parameter, style), parameter, shape, named=named) == expected


def test_sizes_of_a_plan_follow_from_lengths_blocks_and_heads() -> None:
    splits = {
        "a": Split("a", (24, 5), 0, heads=6),
        "b": Split("b", (5, 36), 1, blocks=2),
        "vocabulary": Split("vocabulary", (97, 5), 0, padded=True),
    }
    assert Plan("f", splits, {}).sizes() == [1, 2, 3, 6]


def test_a_model_that_is_no_transformers_model_is_refused() -> None:
    from core.hugging_face import split_model

    with pytest.raises(PlanError, match="takes a transformers model and was given a SimpleNamespace"):
        split_model(SimpleNamespace())
