"""A loop written for Megatron Core runs here with its import lines changed, and its losses are those of one process."""

from __future__ import annotations

import types
from pathlib import Path
from typing import Any

import pytest
import torch

import core_compat.megatron as mcore
from core import parallel_state
from core.groups.process_groups import ProcessGroups
from core.models.gpt import GPTModel
from core.transformer import TransformerConfig
from tests.unit_tests.core_compat.megatron_like import built
from tests.unit_tests.ranks import ranks

PROGRAM = Path(__file__).with_name("simple_gpt_loop.py")
STEPS, MICROBATCHES = 4, 2


def program(*, installed: bool = False) -> Any:
    """The loop as a module: its import lines changed, or run as it is over the installed surface."""
    text = PROGRAM.read_text()
    module = types.ModuleType("the_program")
    if installed:
        mcore.install()
    else:
        lines = [line.replace("from megatron.core", "from core_compat.megatron") for line in text.splitlines()]
        text = "\n".join(lines)
    try:
        exec(compile(text, str(PROGRAM), "exec"), vars(module))
    finally:
        mcore.uninstall()
    return module


def one_process(world: int) -> list[float]:
    """The same training by torch alone: the whole model, the whole batch, SGD."""
    loop = program()
    shape: dict[str, Any] = dict(num_layers=2, hidden_size=16, num_attention_heads=4)
    config = TransformerConfig(**shape, vocab_size=loop.VOCABULARY, max_sequence_length=loop.SEQUENCE_LENGTH)
    model = GPTModel(config, ProcessGroups())
    optimizer = torch.optim.SGD(model.parameters(), lr=loop.LEARNING_RATE)
    losses = []
    for step in range(STEPS):
        first = step * MICROBATCHES * world
        parts = [loop.samples(seed) for seed in range(first, first + MICROBATCHES * world)]
        tokens, labels = (torch.cat(both) for both in zip(*parts, strict=True))
        optimizer.zero_grad()
        loss = model(tokens, labels).mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


CASES: list[dict[str, Any]] = [
    {},
    {"distributed_optimizer": True},
    {"tensor_parallel": 2},
    {"tensor_parallel": 2, "sequence_parallel": True, "distributed_optimizer": False},
    {"pipeline_parallel": 2, "distributed_optimizer": False},
]


@ranks(2)
@pytest.mark.parametrize("case", CASES, ids=lambda case: "_".join(case) or "data_parallel")
def test_losses_are_those_of_one_process(rank: int, world: int, tmp_path: Path, case: dict[str, Any]) -> None:
    (tmp_path / "checkpoint").mkdir(exist_ok=True)
    loop = program(installed=not case)
    losses = loop.train(built, STEPS, MICROBATCHES, **case, checkpoint_path=tmp_path / "checkpoint")
    expected = one_process(parallel_state.get_data_parallel_world_size())
    if losses or parallel_state.is_pipeline_last_stage():
        assert losses == pytest.approx(expected, abs=2e-5)
        assert expected[0] - expected[-1] > 0.05, "it trains"
