"""TTrace's fourteen silent bugs as a user's mistakes: each is found, and the report names where it is."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
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
from core.verify.where import locate
from tests.layouts.gpt import check_gpt
from tests.layouts.layouts import Layout
from tests.layouts.tables import QUICK
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


DEEP = [TP, SP, CP, PP, DP, Split(tp=2, dp=2, sp=True), Split(tp=2, cp=2)]


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
    assert_none_is_blamed(QUICK if world != 4 else QUICK[-8::2], world)


@pytest.mark.nightly
@ranks(4, timeout_s=170)
def test_no_module_of_our_model_is_blamed_in_more_layouts(rank: int, world: int) -> None:
    assert_none_is_blamed(QUICK[-7::2], world)


def assert_none_is_blamed(layouts: Sequence[Layout], world: int) -> None:
    for layout in layouts:
        if layout.world == world and not layout.expert_bias:  # the bias has moved since the step
            with blaming_anyway() as places:
                assert check_gpt(layout, steps=1).ok
            (place,) = places
            assert (place.forward, place.backward) == (None, None), f"{layout}: {place.lines}"
            wrong = [row for row in place.rows if not all(m.ok for m in row.gradients.values())]
            assert not wrong and sum(bool(row.outputs) for row in place.rows) > 20, f"{layout}: {place.lines} {wrong}"


@ranks(2)
def test_no_module_is_blamed_where_loads_are_balanced_over_all_data_ranks(rank: int, world: int) -> None:
    layout = Layout(dp=2, ep=2, experts="alltoall", aux="global_aux_loss", microbatches=2)
    with blaming_anyway() as places:
        assert check_gpt(layout, steps=1).ok
    wrong = [row.module for row in places[0].rows if not all(m.ok for m in row.gradients.values())]
    assert not wrong and (places[0].forward, places[0].backward) == (None, None), places[0].table()


def split_qwen3(factor: float) -> nn.Module:
    """A small Hugging Face model over two ranks; one rank's projection is multiplied by a factor."""
    model = small("qwen3")
    split_model(model)
    if dist.get_rank() == 1:
        model.model.layers[1].self_attn.o_proj.register_forward_hook(lambda module, inputs, output: output * factor)
    return model


def loss_of_a_causal_model(model: nn.Module, tokens_of_part: torch.Tensor) -> torch.Tensor:
    return model(input_ids=tokens_of_part, labels=tokens_of_part).loss


def check_qwen3(dtype: torch.dtype, factor: float) -> GradientReport:
    return check_gradients(
        lambda: split_qwen3(factor),
        loss_of_a_causal_model,
        tokens(4),
        reference_fn=lambda: small("qwen3"),
        dtype=dtype,
        steps=1,
        sizes={"tensor_model_parallel_size": 2},
    )


DTYPES = [torch.float64, *(pytest.param(d, marks=pytest.mark.nightly) for d in (torch.float32, torch.bfloat16))]


@ranks(2)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_wrong_output_of_a_split_hugging_face_model_is_placed(rank: int, world: int, dtype: torch.dtype) -> None:
    report = check_qwen3(dtype, 1.1 if dtype.itemsize > 2 else 2.0)
    assert report.where is not None and report.where.forward == "model.layers.1.self_attn.o_proj", str(report)
    assert "first wrong output `model.layers.1.self_attn.o_proj` on rank [1]" in str(report)


@ranks(2)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_right_split_hugging_face_model_raises_no_alarm(rank: int, world: int, dtype: torch.dtype) -> None:
    report = check_qwen3(dtype, 1.0)
    assert report.ok and report.parameters > 20, str(report)
