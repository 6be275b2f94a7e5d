"""Dropout of split models: copies over tp drop alike, whatever one rank draws; data ranks and stages do not."""

from __future__ import annotations

import copy
import itertools
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from core import parallel_state
from core.hugging_face import split_model, split_stages
from core.hugging_face.lora import add_lora
from core.pipeline_parallel import PipelineLayout
from core.tensor_parallel import get_rng_tracker, model_parallel_manual_seed
from tests.unit_tests.hugging_face.models import small, tokens
from tests.unit_tests.ranks import ranks

DROPS = {"resid_pdrop": 0.3, "embd_pdrop": 0.3, "attn_pdrop": 0.3, "head_dim": None}


def from_all(value: Any) -> list[Any]:
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, value)
    return everywhere


def places() -> dict[str, int]:
    groups = parallel_state.get_process_groups()
    return {axis: groups.rank(axis) for axis in ("tp", "cp", "dp", "pp")}


def alike(mine: Tensor, *axes: str) -> None:
    """Equal on ranks whose places on these axes are, and different on all others."""
    for (place, one), (other_place, other) in itertools.combinations(from_all((places(), mine)), 2):
        same = all(place[axis] == other_place[axis] for axis in axes)
        close = torch.allclose(one, other, rtol=1e-9, atol=1e-12)
        assert close is same, f"{place} and {other_place}"


@ranks(2, 4)
@pytest.mark.in_suite()
@pytest.mark.parametrize("seeded", [True, False])
@pytest.mark.parametrize("mode", [None, "split_gather"])
def test_a_rank_that_draws_for_itself_changes_no_mask_of_a_copy(
    rank: int, world: int, seeded: bool, mode: str | None
) -> None:
    get_rng_tracker().reset()
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    model = small("gpt2", **DROPS)
    split_model(model, sequence_parallel=mode)
    torch.manual_seed(7 + rank)  # the lowest rank's counts
    if seeded:
        model_parallel_manual_seed(3)
    model.train()
    before = torch.get_rng_state()
    logits = [model(tokens()).logits.detach() for _ in range(2)]
    assert torch.equal(torch.get_rng_state(), before)
    torch.rand(rank)  # one rank samples some text
    logits.append(model(tokens()).logits.detach())
    for each in logits:
        alike(each, "dp")
    assert not torch.allclose(logits[0], logits[1]) and not torch.allclose(logits[1], logits[2])
    model.eval()
    alike(model(tokens()).logits.detach())
    get_rng_tracker().reset()


@ranks(2)
@pytest.mark.parametrize("adapters", [False, True])
def test_layers_that_run_again_in_backward_drop_the_same(rank: int, world: int, adapters: bool) -> None:
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    model = small("llama", attention_dropout=0.3)
    split_model(model)
    if adapters:
        peft = pytest.importorskip("peft")
        config = peft.LoraConfig(r=2, lora_dropout=0.3, target_modules="all-linear", init_lora_weights=False)
        model = add_lora(model, config)
    model.train()

    def gradients(again: bool) -> tuple[Tensor, list[Tensor]]:
        model_parallel_manual_seed(3)
        if again:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.zero_grad()
        loss = model(tokens(), labels=tokens(), use_cache=False).loss
        torch.rand(5 * rank)
        loss.backward()
        return loss.detach(), [copy.deepcopy(p.grad) for p in model.parameters() if p.grad is not None]

    loss, expected = gradients(False)
    loss_again, got = gradients(True)
    alike(loss)
    assert torch.equal(loss, loss_again)
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    model_parallel_manual_seed(4)
    assert not torch.allclose(model(tokens(), labels=tokens()).loss, loss)
    get_rng_tracker().reset()


class Drawn:
    """What would be drawn next where dropout and attention are called."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.numbers: dict[str, list[Tensor]] = {"dropout": [], "attention": []}
        for kind, name in {"dropout": "dropout", "attention": "scaled_dot_product_attention"}.items():
            monkeypatch.setattr(F, name, partial(self.call, kind, getattr(F, name)))

    def call(self, kind: str, function: Any, *args: Any, **kwargs: Any) -> Tensor:
        with torch.random.fork_rng():
            self.numbers[kind].append(torch.rand(8))
        return function(*args, **kwargs)


@ranks(2)
@pytest.mark.parametrize("adapters", [False, True])
def test_heads_are_dropped_by_each_rank_in_its_own_way(rank: int, world: int, adapters: bool) -> None:
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    model = small("gpt2", **DROPS)
    split_model(model)
    if adapters:
        peft = pytest.importorskip("peft")
        named = {"target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True}
        model = add_lora(model, peft.LoraConfig(r=2, lora_dropout=0.3, init_lora_weights=False, **named))
    model_parallel_manual_seed(3)
    model.train()
    with pytest.MonkeyPatch.context() as monkeypatch:
        drawn = Drawn(monkeypatch)
        logits = model(tokens()).logits.detach()
    alike(logits)
    assert len(drawn.numbers["attention"]) == 2
    for number in drawn.numbers["attention"]:
        alike(number, "tp")
    split_inputs = 0
    for number in drawn.numbers["dropout"]:
        both = from_all(number)
        split_inputs += not torch.equal(both[0], both[1])
    # Of adapters, those of the two row layers in each block have a split input: of attention, and of the MLP.
    assert (split_inputs, len(drawn.numbers["dropout"])) == ((4, 11) if adapters else (0, 5))
    get_rng_tracker().reset()


@ranks(2, 4)
@pytest.mark.parametrize("mode", ["all_to_all", "ring_attn"])
@pytest.mark.in_suite()
def test_positions_are_dropped_by_each_rank_of_a_cut_sequence_in_its_own_way(rank: int, world: int, mode: str) -> None:
    tp = world // 2
    parallel_state.initialize_model_parallel(tp, context_parallel_size=2)
    model = small("gpt2", **{**DROPS, "attn_pdrop": 0.0 if mode == "ring_attn" else 0.3})
    split_model(model, sequence_parallel=mode)
    model_parallel_manual_seed(3)
    model.train()
    with pytest.MonkeyPatch.context() as monkeypatch:
        drawn = Drawn(monkeypatch)
        logits = model(tokens()).logits.detach()
    alike(logits)
    embeddings, *layers = drawn.numbers["dropout"]
    alike(embeddings)
    assert len(layers) == 4
    for number in layers:
        alike(number, "cp")
    for number in drawn.numbers["attention"]:
        alike(number, "cp", "tp")
    get_rng_tracker().reset()


@ranks(2)
def test_stages_drop_elements_of_their_own(rank: int, world: int) -> None:
    get_rng_tracker().reset()
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
    torch.manual_seed(5)
    (stage,) = split_stages(small("gpt2", **DROPS), PipelineLayout((1, 1), 2))
    drawn: list[Tensor] = []
    layer = next(
        module for module in stage.modules() if type(module).__name__ == "GPT2Block" and list(module.parameters())
    )
    layer.register_forward_pre_hook(lambda *_: drawn.append(torch.rand(8)))
    stage.train()
    torch.manual_seed(5)
    given = {} if rank == 0 else {"received": torch.ones(2, 12, 32, dtype=torch.float64)}
    stage(tokens(), **given)
    stage(tokens(), **given)
    alike(torch.cat(drawn), "pp")
    get_rng_tracker().reset()


@ranks(2)
def test_a_seed_that_one_rank_alone_has_set_is_refused_on_all(rank: int, world: int) -> None:
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    if rank == 1:
        model_parallel_manual_seed(3)
    model = small("gpt2", **DROPS)
    split_model(model)
    with pytest.raises(RuntimeError, match=r"ranks \[1\] of \[0, 1\] have called model_parallel_manual_seed"):
        model.train()(tokens())
