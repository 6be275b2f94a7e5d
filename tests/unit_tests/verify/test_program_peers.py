"""The command on programs over accelerate, Transformers' Trainer, and TRL: right ones silent, wrong ones found."""

from __future__ import annotations

import pytest

from benchmarks.right_trainers import RIGHT, Program, report_of
from tests.unit_tests.ranks import ranks

for package in ("transformers", "accelerate", "trl"):
    pytest.importorskip(package)
pytestmark = pytest.mark.nightly
LEFT_OUT, RATE, NORM = "embed_tokens.weight' on ranks [1]", "lr=0.25", "layers.1.input_layernorm.weight"
# A program with a planted mistake, and text that its report contains.
WRONG: dict[Program, str] = {
    Program("accelerate", "dp", "doubled"): "the backward runs twice of microbatch 2 of 2",
    Program("accelerate", "dp", "divided twice"): "too small, the number of microbatches",
    Program("accelerate", "dp", "skipped"): "on data rank 1 alone",
    Program("accelerate", "dp", "no_sync"): "not reduced over dp",
    Program("accelerate", "dp", "not zeroed"): "zero_grad is not called",
    Program("accelerate", "dp", "left out"): LEFT_OUT,
    Program("accelerate", "fsdp", "doubled"): "the backward runs twice of microbatch 2 of 2",
    Program("accelerate", "fsdp", "divided twice"): "too small, the number of microbatches",
    Program("accelerate", "fsdp", "skipped"): "on data rank 1 alone",
    Program("accelerate", "fsdp", "not zeroed"): "zero_grad is not called",
    Program("accelerate", "fsdp", "left out"): LEFT_OUT,
    Program("accelerate", "tp", "norm"): NORM,
    Program("accelerate", "tp", "divided twice"): "too small, the number of microbatches",
    Program("Trainer", "dp", "doubled"): "2 times the reference",
    Program("Trainer", "dp", "labels of a rank"): "all parameters are wrong",
    Program("Trainer", "dp", "norm"): NORM,
    Program("Trainer", "dp", "left out"): LEFT_OUT,
    Program("Trainer", "dp", "other rate"): RATE,
    Program("Trainer", "fsdp", "doubled"): "2 times the reference",
    Program("Trainer", "fsdp", "labels of a rank"): "the microbatches count",
    Program("Trainer", "fsdp", "left out"): LEFT_OUT,
    Program("Trainer", "fsdp", "other rate"): RATE,
    Program("SFTTrainer", "dp", "doubled"): "the microbatches count",
    Program("SFTTrainer", "dp", "left out"): LEFT_OUT,
    Program("SFTTrainer", "fsdp", "doubled"): "the microbatches count",
    Program("SFTTrainer", "fsdp", "other rate"): RATE,
}


@ranks(2)
@pytest.mark.parametrize("program", RIGHT, ids=str)
def test_a_right_program_gives_no_alarm(rank: int, world: int, program: Program) -> None:
    report = report_of(program)
    assert report.ok and report.parameters == 21 and "those of one process" in report.weights, str(report)
    assert "two optimizers" not in str(report), str(report)


@ranks(2)
@pytest.mark.parametrize("program", WRONG, ids=str)
def test_a_wrong_program_is_found_and_placed(rank: int, world: int, program: Program) -> None:
    report = report_of(program)
    assert not report.ok and WRONG[program] in str(report), str(report)


@ranks(2)
@pytest.mark.parametrize("loop", ["Trainer", "SFTTrainer"])
def test_a_mean_of_means_over_unequal_labels_is_also_seen(rank: int, world: int, loop: str) -> None:
    report = report_of(Program(loop, "dp", "mean of means"))
    assert report.ok and "unequal numbers of labels count the same" in str(report), str(report)
