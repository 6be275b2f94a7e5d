"""The bar: silent bugs of two papers, of loops and of our layers, and right programs: found, placed, at which step.

The rows are those of the tables in docs/source/verify.md. The suite runs some of them, the nightly run all.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from core import parallel_state
from core.verify.gpt import check_gpt
from tests.unit_tests.distributed.guard.loops import told_by
from tests.unit_tests.ranks import ranks
from tests.unit_tests.verify.layer_mutations import MUTATIONS, PLACES
from tests.unit_tests.verify.silent_bugs import Split, train

TP, SP, CP, DP, PP = Split(tp=2), Split(tp=2, sp=True), Split(cp=2), Split(dp=2), Split(pp=2)


@dataclass(frozen=True)
class Row:
    """A bug of TTrace in a training loop. step: in which the watch names it with these words; 0 if it never does."""

    split: Split
    step: int
    words: str = ""


def plant(split: Split, bug: str, step: int, words: str = "") -> Row:
    return Row(replace(split, bug=bug), step, words)


TTRACE = [
    plant(replace(TP, words=512), "embedding mask", 1, "of 'embedding.weight' [256, 16] have a gradient, and no token"),
    plant(replace(DP, recompute=True), "stale input", 2, "'layers.1' is recomputed in backward from another input"),
    plant(CP, "loss over cp", 0),
    plant(DP, "loss over dp", 0),
    plant(PP, "untied", 1, "'embedding.weight' of the whole model is held by two stages"),
    plant(SP, "router", 1, "'layers.1.mlp.router.bias' differs between ranks 0 and 1 of group 'tp'"),
    plant(TP, "overlap", 1, "'layers.1.norm_2.bias' differs between ranks 0 and 1 of group 'tp'"),
    plant(replace(PP, layers=4), "a layer on two stages", 1, "'layers.1.norm_1.weight' of the whole model is held by"),
    plant(PP, "stage division", 0),
    plant(DP, "a copy's optimizer", 2, "have not moved, and no optimizer holds them"),
    plant(Split(tp=2, dp=2), "wrong group", 1, "of group 'tp'"),
    plant(SP, "norm: norm_1", 1, "'layers.1.norm_1.bias' differs between ranks 0 and 1 of group 'tp'"),
    plant(TP, "norm of queries", 1, "'layers.1.attention.q_norm.bias' differs"),
    plant(TP, "cast", 0),
    plant(CP, "gather of keys", 0),
]


def of_a_copy(model: nn.Module) -> Any:
    return torch.optim.SGD(copy.deepcopy(model.module).parameters(), lr=0.1)  # type: ignore[operator,union-attr]


def told_of(split: Split) -> Any:
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=split.tp,
        context_parallel_size=split.cp,
        pipeline_model_parallel_size=split.pp,
    )
    return told_by(train(split, **({"optimizer_of": of_a_copy} if "copy" in split.bug else {})), steps=3)


def check(row: Row) -> None:
    told: list[Any] = [None] * row.split.world
    dist.all_gather_object(told, told_of(row.split))
    found = [each for each in told if each is not None]
    assert bool(found) == bool(row.step), told
    assert all(each.step == row.step and row.words in each.text for each in found), told


def identity(row: Row) -> str:
    return row.split.bug.replace(" ", "_")


@ranks(2)
@pytest.mark.parametrize("row", [row for row in TTRACE if row.split.world == 2], ids=identity)
def test_a_bug_of_ttrace_is_found_without_an_option(rank: int, world: int, row: Row) -> None:
    check(row)


@ranks(4)
@pytest.mark.parametrize("row", [row for row in TTRACE if row.split.world == 4], ids=identity)
def test_a_bug_of_ttrace_is_found_without_an_option_on_four_ranks(rank: int, world: int, row: Row) -> None:
    check(row)


# -- mistakes in our own layers ----------------------------------------------------------------------------------------


BY_NAME = {mutation.name: mutation for mutation in MUTATIONS}


@ranks(2)
@pytest.mark.in_suite(5)
@pytest.mark.parametrize("name", BY_NAME)
def test_a_mistake_in_our_own_layers_is_found_and_placed(rank: int, world: int, name: str) -> None:
    mutation = BY_NAME[name]
    with mutation.spoil():
        report = check_gpt(mutation.layout, steps=1)
    assert not report.ok
    side, module = PLACES.get(name, ("", ""))
    if side:
        assert report.where is not None and getattr(report.where, side) == module, str(report)
    else:  # the rows of one expert's bias: the report names the parameter and the rank
        assert {each.name.rpartition(".")[2] for each in report.wrong} == {
            "bias2"
        } and "on ranks [1] only" in report.cause
