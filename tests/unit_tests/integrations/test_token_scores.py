"""TRL's scores of tokens: a model that is split gives what TRL's own forward gives on one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from core.booster import Booster
from core.booster.plugin import HybridParallelPlugin
from core.integrations.token_scores import Asked, score_tokens, take_off
from tests.unit_tests.ranks import ranks

transformers = pytest.importorskip("transformers")
pytest.importorskip("trl")

LAYOUTS = {
    "tp": {"tp_size": 2},
    "in chunks": {"tp_size": 2, "logits_chunk": 5},
    "sp": {"tp_size": 1, "sp_size": 2, "enable_sequence_parallelism": True, "sequence_parallelism_mode": "ring_attn"},
    "ZeRO-3": {"tp_size": 1, "zero_stage": 3},
}


def new_model() -> Any:
    """A vocabulary of 67 does not divide, so the last rank has padding; the family divides its logits."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 67, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = transformers.GraniteConfig(**sizes, **heads, initializer_range=0.3, logits_scaling=1.7)
    return transformers.AutoModelForCausalLM.from_config(config).double()


def inputs() -> dict[str, torch.Tensor]:
    ids = torch.arange(3 * 12).reshape(3, 12) * 7 % 67
    labels = ids.clone()
    labels[:, :4] = -100
    return {"input_ids": ids, "labels": labels}


def scored(model: Any) -> Any:
    """Backward of all log-probabilities, each with a weight of its own."""
    output = model(**inputs(), fused_lm_head=True, use_cache=False)
    weights = torch.linspace(0.5, 1.5, output.log_probs.numel()).view_as(output.log_probs)
    return output, (output.log_probs * weights).sum()


@ranks(2)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_scores_of_a_split_model_are_those_of_trl(rank: int, world: int, layout: str) -> None:
    from trl.trainer.utils import add_fused_lm_head

    names = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1")
    options = {"outputs": names, "temperature": 1.0 if "logits_chunk" in LAYOUTS[layout] else 1.5}
    reference = new_model()
    add_fused_lm_head(reference, **options)
    expected, loss = scored(reference)
    loss.backward()
    assert expected.is_top1.any() or expected.entropy.max() > 1

    model = new_model()
    add_fused_lm_head(model, **options)
    asked = take_off(model)
    assert asked == (options["temperature"], False, names) and take_off(model) is None
    booster = Booster(plugin=HybridParallelPlugin(pp_size=1, precision="fp32", **LAYOUTS[layout]))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    boosted, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=1.0))
    score_tokens(boosted.unwrap(), asked)
    found, loss = scored(boosted)
    for name in (*names, "loss", "label_mask"):
        torch.testing.assert_close(getattr(found, name).detach(), getattr(expected, name).detach(), check_dtype=False)
    booster.backward(loss, optimizer)
    optimizer.step()
    after = dict(booster.checkpoint_io.model_tensors(boosted))
    for name, parameter in reference.named_parameters():
        moved = before[name].double() - after[name].double()
        assert parameter.grad.abs().max() > 0.1, name
        torch.testing.assert_close(moved, parameter.grad, atol=1e-5, rtol=1e-4)  # TRL multiplies in fp32


@ranks(2)
def test_scores_that_are_not_computed_are_refused_by_name(rank: int, world: int) -> None:
    """They were given without the temperature."""
    from trl.trainer.utils import add_fused_lm_head

    model = new_model()
    add_fused_lm_head(model, cast_lm_head_to_fp32=True)
    with pytest.raises(ValueError, match="cast_lm_head_to_fp32=True with a plugin"):
        take_off(model)
    booster = Booster(plugin=HybridParallelPlugin(2, 1, precision="fp32", logits_chunk=5))
    boosted, *_ = booster.boost(new_model())
    score_tokens(boosted.unwrap(), Asked(temperature=0.5))
    with pytest.raises(ValueError, match="temperature=0.5 with logits_chunk"):
        scored(boosted)
    with pytest.raises(ValueError, match="shift_labels is not obeyed"):
        boosted(**inputs(), shift_labels=inputs()["labels"], fused_lm_head=True)
