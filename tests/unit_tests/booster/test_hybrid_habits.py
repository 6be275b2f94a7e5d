"""Random trainings of boosted Hugging Face models: each is that of one process. A failing case has its seed."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from core.booster import Booster
from core.booster.plugin import (
    GeminiPlugin,
    HybridParallelPlugin,
    LowLevelZeroPlugin,
    TorchDDPPlugin,
    TorchFSDPPlugin,
)
from core.verify.in_double import InDouble
from tests.unit_tests.booster.booster_reference import full_weights
from tests.unit_tests.hugging_face.models import small, tokens
from tests.unit_tests.ranks import ranks

WORLD, ROWS, STEPS = 4, 4, 3
FROZEN: dict[str, tuple[str, ...]] = {
    "nothing": (),
    "lower layers": ("model.embed_tokens", "model.layers.0.", "model.layers.1."),
    "upper layers": ("model.layers.2.", "model.layers.3.", "model.norm", "lm_head"),
    "embedding": ("model.embed_tokens", "lm_head"),
    "one layer": ("model.layers.1.",),
}
# Plugins of data ranks alone, by their norm to clip at; torch's are clipped by a call.
OF_TORCH = {"torch's DDP": TorchDDPPlugin, "torch's FSDP": TorchFSDPPlugin}
OF_DATA: dict[str, Callable[[float], Any]] = {
    "Gemini": lambda norm: GeminiPlugin(precision="fp32", max_norm=norm, min_chunk_size_m=0, search_range_m=0),
    "ZeRO 1": lambda norm: LowLevelZeroPlugin(1, "fp32", max_norm=norm),
    "ZeRO 2": lambda norm: LowLevelZeroPlugin(2, "fp32", max_norm=norm),
    **{name: lambda norm, made=made: made() for name, made in OF_TORCH.items()},
}


@dataclass(frozen=True)
class Case:
    """One training. lengths: of the rows, a number a step. chances: of each row's labels, that one counts."""

    seed: int
    family: str
    tp: int
    pp: int
    options: dict[str, Any]
    frozen: str
    lengths: tuple[int, ...]
    chances: tuple[float, ...]
    max_norm: float
    accumulates: bool
    num_items: bool
    plugin: str  # of OF_DATA, or "hybrid"
    evaluates: bool  # in the middle of a step


def draw(seed: int) -> Case:
    rng = random.Random(seed)
    tp, pp = rng.choice([(1, 2), (2, 2), (2, 1), (1, 1), (1, 1)])
    plugin = rng.choice(["hybrid", *OF_DATA]) if (tp, pp) == (1, 1) else "hybrid"
    accumulates = plugin != "Gemini" and rng.random() < 0.3
    options: dict[str, Any] = {"zero_stage": rng.choice([0, 1, 2, 3])}
    if tp > 1 and rng.random() < 0.5:
        options |= {"enable_sequence_parallelism": True, "sequence_parallelism_mode": "split_gather"}
    return Case(
        seed,
        "llama" if "sequence_parallelism_mode" in options else rng.choice(["llama", "qwen2", "qwen3"]),
        tp,
        pp,
        options,
        rng.choice(list(FROZEN)),
        tuple(rng.choice([8, 12, 20]) for _ in range(STEPS)),
        tuple(rng.choice([0.0, 0.1, 0.5, 1.0]) for _ in range(ROWS)),
        rng.choice([0.0, 0.3]),
        accumulates,
        accumulates or rng.random() < 0.3,  # of two halves no rank knows the whole count
        plugin,
        rng.random() < 0.4,
    )


def built(case: Case) -> Any:
    model = small(case.family, num_hidden_layers=4)
    for name, param in model.named_parameters():
        param.requires_grad_(not name.startswith(FROZEN[case.frozen] or ("none",)))
    return model


def batch_of(case: Case, step: int, data_rank: int) -> dict[str, torch.Tensor]:
    ids = tokens(ROWS, case.lengths[step], seed=10 * step + data_rank)
    generator = torch.Generator().manual_seed(case.seed + 100 * step + data_rank)
    chances = torch.tensor(case.chances).roll(step + data_rank)[:, None]
    labels = ids.where(torch.rand(ids.shape, generator=generator) < chances, -100)
    labels[-1, -1] = ids[-1, -1]  # one counts on each rank
    return {"input_ids": ids, "labels": labels}


def descent(model: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([param for param in model.parameters() if param.requires_grad], lr=0.3)


def trained_alone(case: Case, data_ranks: int) -> tuple[Any, list[float]]:
    model = built(case)
    optimizer = descent(model)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        batches = [batch_of(case, step, rank) for rank in range(data_ranks)]
        ids, labels = (torch.cat([batch[name] for batch in batches]) for name in ("input_ids", "labels"))
        logits = model(input_ids=ids).logits[:, :-1]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten())
        loss.backward()
        if case.max_norm:
            torch.nn.utils.clip_grad_norm_(model.parameters(), case.max_norm)
        optimizer.step()
        losses.append(float(loss.detach()))
    return model, losses


def check(case: Case) -> None:
    data_ranks = WORLD // (case.tp * case.pp)
    with InDouble():
        reference, expected = trained_alone(case, data_ranks)
        micro = {"num_microbatches": 2 if case.accumulates else ROWS} if case.pp > 1 else {}
        plugin: Any = (
            OF_DATA[case.plugin](case.max_norm)
            if case.plugin in OF_DATA
            else HybridParallelPlugin(
                case.tp, case.pp, precision="fp32", max_norm=case.max_norm, **{**micro, **case.options}
            )
        )
        booster = Booster(plugin=plugin)
        model = built(case)
        model, optimizer, *_ = booster.boost(model, descent(model))
        for step in range(STEPS):
            optimizer.zero_grad()
            batch = batch_of(case, step, plugin.data_rank())
            count = sum(int((batch_of(case, step, rank)["labels"][:, 1:] != -100).sum()) for rank in range(data_ranks))
            total = 0.0
            halves = [slice(0, ROWS // 2), slice(ROWS // 2, ROWS)] if case.accumulates else [slice(None)]
            for number, half in enumerate(halves):
                part: dict[str, Any] = {name: value[half] for name, value in batch.items()}
                if case.num_items:
                    part["num_items_in_batch"] = count
                if case.evaluates:
                    with torch.no_grad():
                        run(booster, model.eval(), optimizer, case, batch_of(case, step, 7 + plugin.data_rank()))
                    model.train()
                if number < len(halves) - 1:
                    with booster.no_sync(model, optimizer):
                        total += backward(booster, model, optimizer, case, part)
                else:
                    total += backward(booster, model, optimizer, case, part)
            if case.plugin in OF_TORCH and case.max_norm:
                optimizer.clip_grad_by_norm(case.max_norm)
            optimizer.step()
            assert total == pytest.approx(expected[step], abs=1e-8), f"{case}: step {step}"
        start = dict(built(case).named_parameters())
        of_torch = case.plugin in OF_TORCH
        for name, value in full_weights(model).items() if of_torch else booster.checkpoint_io.model_tensors(model):
            if name in start:
                wanted = reference.get_parameter(name).detach()
                torch.testing.assert_close(
                    value.to(wanted), wanted, rtol=1e-7, atol=1e-8, msg=lambda text, n=name: f"{case}: {n}: {text}"
                )


def run(booster: Booster, model: Any, optimizer: Any, case: Case, part: dict[str, Any]) -> torch.Tensor:
    """The loss of a forward; with stages their backward has run."""
    if case.pp > 1:
        return booster.execute_pipeline(iter([part]), model, None, optimizer)["loss"]
    return model(**part).loss


def backward(booster: Booster, model: Any, optimizer: Any, case: Case, part: dict[str, Any]) -> float:
    loss = run(booster, model, optimizer, case, part)
    if case.pp == 1:
        booster.backward(loss, optimizer)
    return float(loss.detach())


@ranks(4)
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.nightly) for seed in range(1, 40))])
def test_a_random_training_of_a_split_model_is_that_of_one_process(rank: int, world: int, seed: int) -> None:
    check(draw(seed))
