"""Every task in every layout has the losses of TRL, or of Transformers' Trainer, on one process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("trl")

from core.finetune.arguments import load_config
from core.finetune.job import tune
from core.finetune.model import check_sizes
from tests.unit_tests.finetune.jobs import STEPS, losses_of, make_model, of_peer, options
from tests.unit_tests.integrations.loops import _forget, launched
from tests.unit_tests.ranks import ranks

CASES: dict[str, tuple[str, ...]] = {
    "sft": ("sft",),
    "sft packed": ("sft", "--packing"),
    "sft lora": ("sft", "--use_peft"),
    "dpo": ("dpo",),
    "dpo precomputed": ("dpo", "--precompute_ref_log_probs"),
    "dpo lora": ("dpo", "--use_peft"),
    "reward": ("reward",),
    "reward lora": ("reward", "--use_peft"),
    "classification": ("classification",),
    "classification lora": ("classification", "--use_peft"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("finetune")
    make_model(made)
    return made


@pytest.fixture
def expected(folder: Path, request: pytest.FixtureRequest) -> list[float]:
    """The peer's losses, computed once a case."""
    case = request.node.callspec.params["case"]
    file = folder / f"{case}.json"
    if not file.exists():
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        file.write_text(json.dumps(of_peer(folder, *CASES[case])))
        torch.set_num_threads(threads)
        _forget()
    found: list[float] = json.loads(file.read_text())
    return found


def assert_equal(folder: Path, case: str, layout: str, rank: int, world: int, expected: list[float]) -> None:
    dp = 2 if world == 4 or "--zero" in layout else 1
    with launched(rank, world):
        task, *more = CASES[case]
        config = load_config(options(folder, task, *more, *layout.split(), dp=dp))
        trainer: Any = tune(config, check_sizes(config, world))
    found = losses_of(trainer)
    assert len(found) == STEPS and max(expected) - min(expected) > 1e-2
    assert found == pytest.approx(expected, abs=1e-5)


def is_possible(case: str, layout: str) -> bool:
    """The rest is refused: test_finetune_command.py."""
    task, *more = CASES[case]
    if layout == "--pp 2" and task in ("dpo", "reward"):
        return False
    return "--zero" in layout or "--use_peft" not in more or task in ("sft", "dpo")


@ranks(2, timeout_s=150.0)
@pytest.mark.parametrize(
    ("case", "layout"),
    [(case, layout) for case in CASES for layout in ("--tp 2", "--zero 3", "--pp 2") if is_possible(case, layout)],
)
@pytest.mark.in_suite(6)
def test_losses_are_those_of_one_process(
    rank: int, world: int, case: str, layout: str, folder: Path, expected: list[float]
) -> None:
    assert_equal(folder, case, layout, rank, world, expected)


@ranks(4, timeout_s=150.0)
@pytest.mark.parametrize("case", [case for case in CASES if is_possible(case, "--tp 2")])
@pytest.mark.in_suite(1)
def test_losses_of_replicas_of_split_models_are_those_of_one_process(
    rank: int, world: int, case: str, folder: Path, expected: list[float]
) -> None:
    assert_equal(folder, case, "--tp 2", rank, world, expected)
