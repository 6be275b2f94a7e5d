"""The page about Megatron Core: its program trains as one process does, its table of fields is that of the code.

Here a model with Megatron's call and tags takes the place of Megatron's own; test_megatron_stock.py has that one.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from core import parallel_state
from core.groups.process_groups import ProcessGroups
from core.models.gpt import GPTModel
from core.transformer import TransformerConfig
from tests.unit_tests.core_compat.megatron_like import installed
from tests.unit_tests.core_compat.megatron_page import FIELDS, MARK, PAGE, table
from tests.unit_tests.ranks import ranks
from tests.unit_tests.test_docs import program_of, run_page


def test_the_page_of_fields_has_a_place_for_the_tables_of_the_code() -> None:
    assert MARK in FIELDS.read_text()
    assert "| refused | `fp8_param_gather`, " in table() and "| no effect | `align_param_gather` |" in table()


def test_the_training_loop_is_megatrons_but_for_its_import_lines() -> None:
    lines = [line for line in program_of(PAGE).splitlines() if "core_compat" in line]
    assert len(lines) == 6, "five for the loop, and module_tree for the model of ours"
    assert all(line.startswith("from core_compat.megatron") for line in lines)


def one_process(batches: Callable[[], Iterator[tuple[torch.Tensor, torch.Tensor]]]) -> list[float]:
    """The losses of the same training by torch alone."""
    shape: dict[str, Any] = dict(num_layers=2, hidden_size=16, num_attention_heads=4, vocab_size=32)
    shape |= {"max_sequence_length": 16, "share_embeddings_and_output_weights": False}
    model = GPTModel(TransformerConfig(**shape), ProcessGroups())
    params = list(model.parameters())
    groups = [{"params": [p for p in params if p.dim() > 1]}, {"params": [p for p in params if p.dim() == 1]}]
    groups[1]["weight_decay"] = 0.0  # type: ignore[assignment]
    optimizer = torch.optim.AdamW(groups, lr=0.01, weight_decay=0.01)
    iterator, losses = batches(), []
    for _ in range(20):
        optimizer.zero_grad()
        parts = [next(iterator) for _ in range(2)]
        loss = sum(model(tokens, labels).mean() for tokens, labels in parts) / 2
        loss.backward()
        torch.nn.utils.clip_grad_norm_(params, 1.0)
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


@ranks(2)
def test_the_program_of_the_page_trains_and_loads_what_it_saved(rank: int, world: int) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch, warnings.catch_warnings(), installed():
        monkeypatch.setattr(torch.cuda, "current_device", torch.cuda.current_device)  # the page sets it
        warnings.simplefilter("error")
        names = run_page(PAGE, monkeypatch)
    assert parallel_state.get_tensor_model_parallel_world_size() == 2
    expected = one_process(names["batches"])
    assert names["losses"] == pytest.approx(expected, abs=2e-4)
    assert expected[0] - expected[-1] > 0.5, "it trains by far more than that"
    assert names["loaded"]["iteration"] == 20 and names["update_successful"] is True
    tokens, labels = next(names["iterator"])
    split = names["model"](tokens, names["positions"], names["causal"], labels=labels)
    torch.testing.assert_close(names["whole"](tokens, labels), split, atol=1e-5, rtol=1e-5)
    if rank == 0:
        assert json.loads((Path(names["directory"][0]) / "gpt2" / "config.json").read_text())["model_type"] == "gpt2"
