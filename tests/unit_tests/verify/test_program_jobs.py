"""`python -m core verify` on programs of other libraries."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from core import parallel_state
from tests.unit_tests.integrations.loops import launched
from tests.unit_tests.integrations.test_trainer import trainer_of
from tests.unit_tests.ranks import ranks
from tests.unit_tests.verify.test_program import Net, data_of, report_of


def with_accelerate(mixed_precision: str, fault: bool) -> None:
    from core.integrations import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=3, mixed_precision=mixed_precision)
    torch.manual_seed(4)
    model: Any = Net()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for step in range(16):
        for x, y in data_of(10 * step + accelerator.process_index):
            with accelerator.accumulate(model):
                loss = model(x, y)
                accelerator.backward(loss / 3 if fault else loss)  # accelerate divides too
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.01)
                optimizer.step()
                optimizer.zero_grad()


def with_trainer(folder: Path, fault: bool) -> None:
    trainer = trainer_of(folder, "optim")
    trainer.model.float()  # transformers computes the loss of an fp64 model in fp32
    if fault:
        loss_of: Callable[..., Any] = trainer.compute_loss
        trainer.compute_loss = lambda *args, **kwargs: 2 * loss_of(*args, **kwargs)
    trainer.train()


@ranks(2)
@pytest.mark.parametrize("fault", [False, True])
@pytest.mark.parametrize(
    "kind", ["no", *(pytest.param(kind, marks=pytest.mark.nightly) for kind in ("fp16", "trainer"))]
)
def test_loops_of_other_libraries_are_checked(rank: int, world: int, kind: str, fault: bool, tmp_path: Path) -> None:
    """In fp16 accelerate begins with a scale of 65536. Transformers' Trainer divides by the labels of all ranks."""
    with launched(rank, world):
        program = (lambda: with_trainer(tmp_path, fault)) if kind == "trainer" else lambda: with_accelerate(kind, fault)
        report = report_of(program)
    parallel_state.destroy_model_parallel()
    assert report.ok != fault, str(report)
    if fault and kind != "trainer":
        assert "3 times too small, the number of microbatches: divided by it twice" in report.cause
    if fault and kind == "trainer":
        assert abs(report.wrong[0].ratio - 2.0) < 0.02, str(report)
