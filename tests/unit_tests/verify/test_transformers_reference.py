"""Transformers' own model as the reference of our GPT sees what is wrong in our layers on one process too."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from core import parallel_state
from core.groups.process_groups import ProcessGroups
from core.models import GPTModel
from core.models.transformers_layouts import LAYOUTS
from core.transformer import attention, mlp, norms
from core.transformer.transformer_config import TransformerConfig
from core.verify import GradientReport, check_gradients
from core.verify.structure import builder_of
from core.verify.transformers_reference import TransformersGPT
from tests.unit_tests.ranks import ranks

pytest.importorskip("transformers")

LLAMA = {"normalization": "RMSNorm", "position_embedding_type": "rope", "num_query_groups": 2, "add_bias_linear": False}
KINDS: dict[str, dict[str, Any]] = {
    "gpt2": {},
    "llama": {**LLAMA, "activation": "swiglu", "share_embeddings_and_output_weights": False},
    "arcee": {**LLAMA, "activation": "gelu"},
}


def config_of(kind: str, tp: int = 1) -> TransformerConfig:
    return TransformerConfig(
        num_layers=2,
        hidden_size=16,
        num_attention_heads=4,
        ffn_hidden_size=24,
        vocab_size=20,
        max_sequence_length=8,
        params_dtype=torch.float64,
        init_method_std=0.2,
        tensor_model_parallel_size=tp,
        **KINDS[kind],
    )


def loss_of(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return model(batch["tokens"], batch["labels"]).mean()


def check(kind: str, tp: int, theirs: bool = True, **given: Any) -> GradientReport:
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=tp)
    tokens = torch.randint(0, 20, (4, 9), generator=torch.Generator().manual_seed(3))

    def build() -> nn.Module:
        torch.manual_seed(7)
        return GPTModel(config_of(kind, tp))

    try:
        return check_gradients(
            build,
            loss_of,
            {"tokens": tokens[:, :-1], "labels": tokens[:, 1:]},
            config=config_of(kind, tp),
            reference_fn=None if theirs else lambda: GPTModel(config_of(kind), ProcessGroups()),
            steps=1,
            **given,
        )
    finally:
        parallel_state.destroy_model_parallel()


@ranks(2)
@pytest.mark.parametrize("kind", KINDS)
def test_our_gpt_has_the_gradients_of_transformers_model(rank: int, world: int, kind: str) -> None:
    report = check(kind, tp=2 if kind != "arcee" else 1)
    assert report.ok, str(report)
    assert report.parameters > 10 and report.largest_error < 1e-12
    assert report.reference == f"reference: {LAYOUTS[kind]} of transformers"


@ranks(2)
def test_our_gpt_has_the_gradients_of_transformers_model_in_16_bits(rank: int, world: int) -> None:
    report = check("llama", tp=2, dtype=torch.bfloat16)
    assert report.ok and report.share < 0.8, str(report)


@ranks(1)
def test_packed_documents_are_kept_apart_in_transformers_model_too(rank: int, world: int) -> None:
    config = config_of("llama")
    theirs, ours = TransformersGPT(config), GPTModel(config, ProcessGroups())
    ours.load_state_dict(theirs.state_dict(), strict=False)
    tokens = torch.arange(16).view(2, 8)
    documents = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1], [0, 0, 0, 0, 0, 1, 1, 2]])
    positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4], [0, 1, 2, 3, 4, 0, 1, 0]])
    packed = {"position_ids": positions, "document_ids": documents}
    got = theirs(tokens, tokens, **packed)
    assert torch.allclose(got, ours(tokens, tokens, **packed), rtol=1e-12)
    assert not torch.allclose(got, ours(tokens, tokens))


@ranks(1)
def test_a_gpt_without_a_counterpart_is_compared_with_its_own_classes(rank: int, world: int) -> None:
    built = builder_of(GPTModel(replace(config_of("gpt2"), num_moe_experts=2), ProcessGroups()))
    assert built is not None and type(built[0]()) is GPTModel
    assert built[1].startswith("reference of the same classes") and "num_moe_experts is 2" in built[1]


def not_causal(*args: Any, **kwargs: Any) -> Tensor:
    return torch.nn.functional.scaled_dot_product_attention(*args, **{**kwargs, "is_causal": False})


def twice(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda x: function(function(x))


class Patched:
    """torch.nn.functional with some functions replaced, for one module's eyes."""

    def __init__(self, **functions: Any) -> None:
        self.functions = functions

    def __getattr__(self, name: str) -> Any:
        return self.functions.get(name) or getattr(torch.nn.functional, name)


SHARED: dict[str, tuple[Any, Patched, str]] = {
    "not causal": (attention, Patched(scaled_dot_product_attention=not_causal), "self_attention.linear_proj"),
    "GELU twice": (mlp, Patched(gelu=twice(torch.nn.functional.gelu)), "mlp.linear_fc2"),
    "a norm without its weight": (
        norms,
        Patched(
            layer_norm=lambda x, shape, weight, bias, eps: torch.nn.functional.layer_norm(x, shape, 2 * weight, bias)
        ),
        "input_layernorm",
    ),
}


@ranks(2)
@pytest.mark.parametrize("name", SHARED)
def test_a_layer_that_is_wrong_in_both_is_found_and_placed(rank: int, world: int, name: str) -> None:
    module, patched, place = SHARED[name]
    with mock.patch.object(module, "F", patched):
        assert check("gpt2", 1, theirs=False).ok, "a reference of the same classes does not see it"
        report = check("gpt2", 1)
    assert not report.ok and report.where is not None
    assert report.where.forward == f"decoder.layers.0.{place}", str(report)


@ranks(1)
def test_a_model_without_a_counterpart_is_refused(rank: int, world: int) -> None:
    config = TransformerConfig(
        num_layers=1, hidden_size=8, num_attention_heads=2, vocab_size=8, max_sequence_length=4, num_moe_experts=2
    )
    with pytest.raises(ValueError, match="num_moe_experts is 2"):
        TransformersGPT(config)
