"""`generate` of boosted models: the tokens that one process makes, in every plugin, and where it is refused."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from core.booster import Booster
from core.booster.plugin import (
    GeminiPlugin,
    HybridParallelPlugin,
    LowLevelZeroPlugin,
    MoeHybridParallelPlugin,
    TorchDDPPlugin,
    TorchFSDPPlugin,
)
from core.hugging_face import PlanError
from tests.unit_tests.hugging_face.models import small, tokens
from tests.unit_tests.ranks import ranks

PLUGINS: dict[str, Callable[[], Any]] = {
    "low_level_zero": lambda: LowLevelZeroPlugin(stage=2, precision="fp32"),
    "gemini": lambda: GeminiPlugin(precision="fp32"),
    "zero_3": lambda: HybridParallelPlugin(1, 1, zero_stage=3, precision="fp32"),
    "ddp": TorchDDPPlugin,
    "fsdp": TorchFSDPPlugin,
    "experts": lambda: MoeHybridParallelPlugin(tp_size=1, pp_size=1, ep_size=2, precision="fp32"),
}


def boosted_by(plugin: Any, model: Any) -> Any:
    boosted, *_ = Booster(plugin=plugin).boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    return boosted.eval()


def generated(model: Any, rank: int = 0) -> list[list[int]]:
    """Greedy tokens of a prompt; another prompt, and another length, for each rank."""
    ids = tokens(2, 5, seed=rank)
    found = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=3 + 3 * rank, do_sample=False)
    return list(found.tolist())


@ranks(2)
@pytest.mark.parametrize("kind", [HybridParallelPlugin, GeminiPlugin])
def test_a_model_over_tp_generates_what_one_process_does(rank: int, world: int, kind: Any) -> None:
    sizes = (2, 1) if kind is HybridParallelPlugin else ()
    options: dict[str, Any] = {"precision": "fp32"} if sizes else {"precision": "fp32", "tp_size": 2}
    model = small("llama")
    reference = copy.deepcopy(model).eval()
    boosted = boosted_by(kind(*sizes, **options), model)
    assert generated(boosted) == generated(reference)
    ids = tokens(1, 3)
    torch.manual_seed(5)
    expected = [reference.generate(ids, max_new_tokens=12, do_sample=True).tolist() for _ in range(2)]
    assert expected[0] != expected[1]
    torch.manual_seed(5 + rank)  # the second rank has drawn other numbers
    assert [boosted.generate(ids, max_new_tokens=12, do_sample=True).tolist() for _ in range(2)] == expected
    if sizes:
        assert boosted(input_ids=ids).logits.shape[-1] == 64  # they stay split


@ranks(2)
@pytest.mark.parametrize("name", PLUGINS)
@pytest.mark.in_suite(3)
def test_data_ranks_generate_texts_of_their_own(rank: int, world: int, name: str) -> None:
    made = PLUGINS[name]()
    model = small("qwen3_moe" if isinstance(made, MoeHybridParallelPlugin) else "llama")
    reference = copy.deepcopy(model).eval()
    assert generated(boosted_by(made, model), rank) == generated(reference, rank)


@ranks(2)
def test_a_stage_generates_nothing(rank: int, world: int) -> None:
    plugin = HybridParallelPlugin(1, 2, num_microbatches=2, precision="fp32")
    with pytest.raises(RuntimeError, match="cut into 2 pipeline stages, .* generate with the model saved"):
        boosted_by(plugin, small("llama")).generate(tokens())


@ranks(2)
def test_a_part_of_the_sequence_generates_nothing(rank: int, world: int) -> None:
    plugin = HybridParallelPlugin(2, 1, enable_sequence_parallelism=True, precision="fp32")
    with pytest.raises(PlanError, match="a part of the layers or of the sequence; generate with the model saved"):
        boosted_by(plugin, small("llama")).generate(tokens())
