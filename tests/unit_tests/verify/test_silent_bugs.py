"""TTrace's fourteen silent bugs as a user's mistakes: each is found, and the report names where it is."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import core.verify.check
from core.hugging_face import split_model
from core.verify import GradientReport, Where, check_gradients
from core.verify.gpt import check_gpt
from core.verify.in_double import InDouble
from core.verify.tables import QUICK
from core.verify.where import locate
from tests.unit_tests.hugging_face.models import small, tokens
from tests.unit_tests.ranks import ranks
from tests.unit_tests.verify.silent_bugs import Split, check

TP, SP, CP, DP, PP = Split(tp=2), Split(tp=2, sp=True), Split(cp=2), Split(dp=2), Split(pp=2)


@dataclass(frozen=True)
class Case:
    """A split with a mistake. words: what the report must hold. forward, backward: the modules that it must name."""

    split: Split
    words: tuple[str, ...]
    forward: str | None = None
    backward: str | None = None


def plant(split: Split, bug: str, *words: str, forward: str | None = None, backward: str | None = None) -> Case:
    return Case(replace(split, bug=bug), words, forward, backward)


CASES = [
    plant(
        *(TP, "embedding mask", "first wrong output `embedding` on ranks [0, 1]", "right before it: nothing"),
        forward="embedding",
    ),
    plant(replace(DP, recompute=True), "stale input", "recomputation: `layers.1.norm_1` gives another output"),
    plant(CP, "loss over cp", "cp times too small (cp is 2): 1/n twice"),
    plant(DP, "loss over dp", "dp times too small (dp is 2): 1/n twice"),
    plant(PP, "untied", "wrong: embedding; right: 31 of 32", "not reduced over pp", backward="embedding"),
    plant(
        *(SP, "router", "wrong: layers.0.mlp.router, layers.1.mlp.router; right: 28 of 32", "not reduced over tp"),
        backward="layers.1.mlp.router",
    ),
    plant(
        *(TP, "overlap", "right at the output of `layers.1.mlp.up` and wrong at that of `layers.1.norm_2`"),
        backward="layers.1.norm_2",
    ),
    plant(PP, "stage division", "calls: `layers.1.norm_1` runs 4 times on rank [1]", forward="layers.1"),
    plant(
        *(SP, "norm: norm_1", "wrong: layers.0.norm_1, layers.1.norm_1; right: 28 of 32", "not reduced over tp"),
        backward="layers.1.norm_1",
    ),
    plant(
        *(TP, "norm of queries", "wrong: layers.0.attention.q_norm, layers.1.attention.q_norm", "not reduced over tp"),
        backward="layers.1.attention.q_norm",
    ),
    plant(TP, "cast", "first wrong output `head` on ranks [0, 1]", "right before it: `norm`", forward="head"),
    plant(
        *(CP, "gather of keys", "right at the output of `layers.1.attention.q_norm` and wrong at that of `linear_qkv`"),
        backward="layers.1.attention.linear_qkv",
    ),
]


@ranks(2)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.split.bug.replace(" ", "_"))
def test_a_silent_bug_is_found_and_placed(rank: int, world: int, case: Case) -> None:
    found_and_placed(case)


@ranks(4)
def test_a_product_that_sums_over_another_group_is_found_and_placed(rank: int, world: int) -> None:
    found_and_placed(plant(Split(tp=2, dp=2), "wrong group", backward="layers.1.norm_2"))


@ranks(2)
@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.nightly)], ids=str)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.split.bug.replace(" ", "_"))
def test_a_silent_bug_is_placed_in_16_bits(rank: int, world: int, case: Case, dtype: torch.dtype) -> None:
    """All but the cast to bf16, which 16 bits hide."""
    if case.split.bug != "cast":
        found_and_placed(replace(case, words=()), dtype)


def found_and_placed(case: Case, dtype: torch.dtype = torch.float64) -> None:
    report = check(case.split, dtype)
    assert not report.ok
    for word in case.words:
        assert word in str(report), f"{word!r} is not in the report:\n{report}"
    if case.forward or case.backward:
        assert report.where is not None, str(report)
        assert (report.where.forward, report.where.backward) == (case.forward, case.backward), str(report)


@ranks(2)
def test_an_optimizer_of_a_copys_parameters_is_found(rank: int, world: int) -> None:
    def of_a_copy(ddp: nn.Module) -> Any:
        return torch.optim.SGD(copy.deepcopy(ddp.module).parameters(), lr=1.0)  # type: ignore[operator,union-attr]

    report = check(DP, optimizer_fn=of_a_copy)
    assert not report.ok
    assert "optimizer: 32 parameters have a gradient, and a step does not move them on ranks [0, 1]" in str(report)
    assert check(DP, optimizer_fn=lambda ddp: torch.optim.SGD(ddp.parameters(), lr=1.0)).ok


RIGHT = [TP, SP, CP, PP, replace(DP, recompute=True, layers=6)]


@ranks(2)
@pytest.mark.parametrize("split", RIGHT, ids=lambda s: f"tp{s.tp}{'+sp' if s.sp else ''} cp{s.cp} dp{s.dp} pp{s.pp}")
def test_a_right_program_raises_no_alarm(rank: int, world: int, split: Split) -> None:
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        report = check(split, dtype)
        assert report.ok and report.where is None, f"{dtype}: {report}"
        assert report.share < 0.6, f"{dtype}: {report.share}"


DEEP = [*RIGHT[:4], DP, Split(tp=2, dp=2, sp=True), Split(tp=2, cp=2)]


@pytest.mark.nightly
@ranks(2, 4, timeout_s=900)
@pytest.mark.timeout(1000)
@pytest.mark.parametrize("layers", [6, 12, 24])
def test_right_programs_of_any_depth_raise_no_alarm_and_no_module_is_blamed(rank: int, world: int, layers: int) -> None:
    for split in DEEP:
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            if split.world == world:
                with blaming_anyway() as places:
                    report = check(replace(split, layers=layers), dtype)
                assert report.ok and report.share < 0.9, f"{layers} {split} {dtype}: {report}"
                assert [(place.forward, place.backward) for place in places] == [(None, None)], places[0].lines
                assert len(places[0].rows) > 8 * layers


@contextmanager
def blaming_anyway() -> Iterator[list[Where]]:
    """`locate` runs for right programs too, and its findings are kept."""
    compare, found = core.verify.check.compare, []

    def both(job: Any, reference: Any, batch: Any, **options: Any) -> GradientReport:
        report = compare(job, reference, batch, **options)
        eps = torch.finfo(job.model.dtype).eps
        bound = 1e-10 if job.model.dtype == torch.float64 else 2 * eps
        noise = options["noise"]
        found.append(locate(job, reference, batch, bound=bound, noise=noise, parameters=report.names, wrong=[]))
        return report

    with mock.patch.object(core.verify.check, "compare", both):
        yield found


@ranks(2, 4, 8, nightly=(1, 3), timeout_s=170)
def test_no_module_of_our_model_is_blamed_in_a_right_layout(rank: int, world: int) -> None:
    for layout in QUICK if world != 4 else QUICK[-8:]:
        if layout.world == world and not layout.expert_bias:  # the bias has moved since the step
            with blaming_anyway() as places:
                assert check_gpt(layout, steps=1).ok
            (place,) = places
            assert (place.forward, place.backward) == (None, None), f"{layout}: {place.lines}"
            wrong = [row for row in place.rows if not all(m.ok for m in row.gradients.values())]
            assert not wrong and sum(bool(row.outputs) for row in place.rows) > 20, f"{layout}: {place.lines} {wrong}"


def split_qwen3() -> nn.Module:
    """A small Hugging Face model over two ranks; one rank's projection in its second layer is a tenth too large."""
    model = small("qwen3")
    split_model(model)
    if dist.get_rank() == 1:
        model.model.layers[1].self_attn.o_proj.register_forward_hook(lambda module, inputs, output: output * 1.1)
    return model


def loss_of_a_causal_model(model: nn.Module, tokens_of_part: torch.Tensor) -> torch.Tensor:
    return model(input_ids=tokens_of_part, labels=tokens_of_part).loss


@ranks(2)
def test_a_wrong_output_of_a_split_hugging_face_model_is_placed(rank: int, world: int) -> None:
    sizes = {"tensor_model_parallel_size": 2}
    with InDouble():
        report = check_gradients(
            split_qwen3, loss_of_a_causal_model, tokens(4), reference_fn=lambda: small("qwen3"), sizes=sizes
        )
    assert report.where is not None and report.where.forward == "model.layers.1.self_attn.o_proj", str(report)
    assert "first wrong output `model.layers.1.self_attn.o_proj` on rank [1]" in str(report)
