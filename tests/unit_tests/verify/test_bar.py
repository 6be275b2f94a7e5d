"""The bar: silent bugs of two papers, of loops and of our layers, and right programs: found, placed, at which step.

The counts are those of benchmarks/notebook.md. The suite runs some of the programs, the nightly run all.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from core import parallel_state
from core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from core.verify import GradientReport, WrongGradientError, verify_with
from tests.layouts.gpt import check_gpt
from tests.unit_tests.distributed.guard.loops import report_of
from tests.unit_tests.distributed.guard.test_first_steps import OVER_DATA, OVER_TENSOR
from tests.unit_tests.ranks import ranks
from tests.unit_tests.verify.layer_mutations import MUTATIONS, PLACES
from tests.unit_tests.verify.silent_bugs import Split, train
from tests.unit_tests.verify.silent_bugs import check as check_gradients_of
from tests.unit_tests.verify.test_loop import Mlp, loss_of
from tests.unit_tests.verify.unmeant_programs import UNMEANT

TP, SP, CP, DP, PP = Split(tp=2), Split(tp=2, sp=True), Split(cp=2), Split(dp=2), Split(pp=2)


@dataclass(frozen=True)
class Row:
    """A bug of TTrace in a training loop. step: in which the default watch names it with these words; 0 if never."""

    split: Split
    step: int
    words: str = ""


def plant(split: Split, bug: str, step: int, words: str = "") -> Row:
    return Row(replace(split, bug=bug), step, words)


TTRACE = [
    plant(replace(TP, words=512), "embedding mask", 0),
    plant(replace(DP, recompute=True), "stale input", 0),
    plant(CP, "loss over cp", 0),
    plant(DP, "loss over dp", 0),
    plant(PP, "untied", 1, "'embedding.weight' of the whole model is held by two stages"),
    plant(SP, "router", 1, "'layers.1.mlp.router.bias' differs between ranks 0 and 1 of group 'tp'"),
    plant(TP, "overlap", 1, "'layers.1.norm_2.bias' differs between ranks 0 and 1 of group 'tp'"),
    plant(replace(PP, layers=4), "a layer on two stages", 1, "'layers.1.norm_1.weight' of the whole model is held by"),
    plant(PP, "stage division", 0),
    plant(DP, "a copy's optimizer", 0),
    plant(Split(tp=2, dp=2), "wrong group", 1, "of group 'tp'"),
    plant(SP, "norm: norm_1", 1, "'layers.1.norm_1.bias' differs between ranks 0 and 1 of group 'tp'"),
    plant(TP, "norm of queries", 1, "'layers.1.attention.q_norm.bias' differs"),
    plant(TP, "cast", 0),
    plant(CP, "gather of keys", 0),
]


def of_a_copy(model: nn.Module) -> Any:
    return torch.optim.SGD(copy.deepcopy(model.module).parameters(), lr=0.1)  # type: ignore[operator,union-attr]


def report_on(split: Split, dtype: torch.dtype = torch.float32) -> Any:
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=split.tp,
        context_parallel_size=split.cp,
        pipeline_model_parallel_size=split.pp,
    )
    return report_of(train(split, dtype, **({"optimizer_of": of_a_copy} if "copy" in split.bug else {})), steps=3)


def check(row: Row) -> None:
    said: list[Any] = [None] * row.split.world
    dist.all_gather_object(said, report_on(row.split))
    found = [each for each in said if each is not None]
    assert bool(found) == bool(row.step), said
    assert all(each.step == row.step and row.words in each.text for each in found), said


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


# -- TrainCheck's ------------------------------------------------------------------------------------------------------

# Programs that break a relation between ranks, and the step of the error. One more is in test_ddp_guards.py: a model
# that was moved after the wrap.
TRAINCHECK: dict[str, tuple[Callable[[], Iterator[None]], int]] = {
    "clip by each tensor-parallel rank": (OVER_TENSOR["clip_grad_norm_ of torch"][0], 2),
    "initialised again": (OVER_TENSOR["initialised after the wrap"][0], 1),
    "clip on one data rank": (OVER_DATA["a clip on one rank"][0], 2),
    "a link that loses a bucket": (OVER_DATA["a link that loses a bucket"][0], 2),
    "a rank without step": (OVER_DATA["a rank without step"][0], 2),
}
# Programs that the command names: see test_also_seen.py.
TRAINCHECK_OF_THE_COMMAND = {
    *("a filter that freezes all but norms", "frozen after the wrap", "gradients are not zeroed"),
    *("the optimizer holds a copy's parameters", "the optimizer holds a part", "the same data on all ranks"),
    *("a cut graph", "targets broadcast against a column", "an evaluation with dropout"),
}


def test_the_other_bugs_of_traincheck_are_planted_for_the_command() -> None:
    assert UNMEANT.keys() >= TRAINCHECK_OF_THE_COMMAND
    assert len(TRAINCHECK) + 1 + len(TRAINCHECK_OF_THE_COMMAND) == 15


@pytest.mark.nightly
@ranks(2)
@pytest.mark.parametrize("name", TRAINCHECK)
def test_a_bug_of_traincheck_that_breaks_a_relation_is_found_by_the_second_step(
    rank: int, world: int, name: str
) -> None:
    program, step = TRAINCHECK[name]
    over_tensor = program in [about[0] for about in OVER_TENSOR.values()]
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2 if over_tensor else 1)
    said = report_of(program())
    assert said is not None and said.step == step, said


# -- loops -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Loop:
    """A loop around a right model; what the error of verify_with must say of its first step."""

    words: str
    tp: int = 1
    weight: float = 1 / 3
    change: Callable[[int, Tensor], Tensor] = lambda number, labels: labels
    backwards: Callable[[int], int] = lambda number: 1
    same_data: bool = True  # on the ranks of tensor parallelism
    drops: bool = False
    clips: bool = False
    reduction: str = "mean"


def of_the_next(number: int, labels: Tensor) -> Tensor:
    return labels.roll(1)


LOOPS = {
    "loss over the world": Loop("dp times too small (dp is 2): 1/n twice", weight=1 / 6),
    "loss times the world": Loop("dp times too large (dp is 2)", weight=2 / 3),
    "not divided by the microbatches": Loop("3 times too large, the number of microbatches", weight=1.0),
    "divided twice by the microbatches": Loop("3 times too small, the number of microbatches", weight=1 / 9),
    "a microbatch left out": Loop("it clears microbatch 1 of 3", backwards=lambda number: number > 0),
    "a microbatch twice": Loop("runs twice of microbatch 3 of 3", backwards=lambda number: 1 + (number == 2)),
    "other tokens over tp": Loop("were given different inputs", tp=2, same_data=False),
    "a rank that drops its gradients": Loop("of 3 gradients are wrong", drops=True),
    "a sum for the mean": Loop("times the reference", reduction="sum"),
    "clipped before finalize": Loop("of 3 gradients are wrong", clips=True),
    "labels of the next sample": Loop("something else than one backward of loss_fn", change=of_the_next),
}


def first_step(loop: Loop) -> GradientReport | None:
    """None if the loop was right."""
    torch.manual_seed(1)
    config = DistributedDataParallelConfig(initial_weights="broadcast")
    model = DistributedDataParallel(None, config, Mlp(loop.tp).double())
    check = verify_with(model, lambda: Mlp(1), loss_of)
    data_rank = parallel_state.get_data_parallel_rank() if loop.same_data else dist.get_rank()
    generator = torch.Generator().manual_seed(100 + data_rank)
    for number in range(3):
        tokens, labels = (torch.randint(0, most, (4,), generator=generator) for most in (11, 5))
        check.note(tokens, labels)
        for _ in range(loop.backwards(number)):
            with model.no_sync():
                logits, wanted = model(tokens), loop.change(number, labels)
                (nn.functional.cross_entropy(logits, wanted, reduction=loop.reduction) * loop.weight).backward()
        if loop.drops and number == 0 and dist.get_rank() == 1:
            for param in model.parameters():
                param.grad.zero_()
    if loop.clips:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    try:
        finalize_model_grads([model])
    except WrongGradientError:
        return check.report
    return None


@ranks(2)
@pytest.mark.in_suite(3)
@pytest.mark.parametrize("name", LOOPS)
def test_a_mistake_of_a_loop_is_found_in_its_first_step(rank: int, world: int, name: str) -> None:
    loop = LOOPS[name]
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=loop.tp)
    report = first_step(loop)
    assert report is not None and loop.words in str(report), str(report)
    assert first_step(Loop("", tp=loop.tp)) is None, "the right one"


# -- right programs ----------------------------------------------------------------------------------------------------

RIGHT = [
    *(TP, SP, CP, PP, DP, replace(DP, recompute=True, layers=6)),
    *(Split(tp=2, dp=2, sp=True), Split(tp=2, cp=2)),
]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def right_program(split: Split, dtype: torch.dtype) -> None:
    """Neither check_gradients nor the watch says anything."""
    report = check_gradients_of(split, dtype)
    assert report.ok and report.where is None, f"{dtype}: {report}"
    assert report.share < 0.6, f"{dtype}: {report.share}"
    said = report_on(split, dtype)
    assert said is None, said


def line_of(split: Split) -> str:
    return f"tp{split.tp}{'+sp' if split.sp else ''}-cp{split.cp}-dp{split.dp}-pp{split.pp}{'-again' * split.recompute}"


@ranks(2)
@pytest.mark.in_suite()
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("split", [split for split in RIGHT if split.world == 2], ids=line_of)
def test_a_right_program_raises_no_alarm(rank: int, world: int, split: Split, dtype: str) -> None:
    right_program(split, DTYPES[dtype])


@pytest.mark.nightly
@ranks(4)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("split", [split for split in RIGHT if split.world == 4], ids=line_of)
def test_a_right_program_on_four_ranks_raises_no_alarm(rank: int, world: int, split: Split, dtype: str) -> None:
    right_program(split, DTYPES[dtype])
