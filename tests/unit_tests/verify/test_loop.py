"""verify_with finds what a loop does wrong around a right model, and is silent about a right loop."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from core import parallel_state
from core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from core.model_parallel_config import ModelParallelConfig
from core.pipeline_parallel import PipelineRunner
from core.tensor_parallel import mappings
from core.verify import LoopCheck, WrongGradientError, ran_jobs, verify_with
from core.verify.job import PipelineJob
from core.verify.microbatches import Given, full_batch
from tests.layouts import gpt
from tests.layouts.layouts import Layout
from tests.unit_tests.ranks import ranks
from tests.unit_tests.test_docs import program_of
from tests.unit_tests.verify.silent_bugs import Decoder, Split, train

PAGE = Path(__file__).parents[3] / "docs" / "source" / "verify.md"
MICROBATCHES, SAMPLES = 2, 3


class Mlp(nn.Module):
    """Two linear layers over embedded tokens; each of `tp` ranks has a part of the channels between them."""

    def __init__(self, tp: int) -> None:
        super().__init__()
        self.tp = tp
        self.embedding = nn.Embedding(11, 6)
        self.up = nn.Linear(6, 8 // tp, bias=False)
        self.down = nn.Linear(8 // tp, 5, bias=False)
        for layer, dim in ((self.up, 0), (self.down, 1)):
            layer.weight.tensor_model_parallel = tp > 1
            layer.weight.partition_dim = dim

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        if self.tp > 1:
            x = mappings.copy_to_tensor_model_parallel_region(x)
        x = self.down(torch.tanh(self.up(x)))
        return mappings.reduce_from_tensor_model_parallel_region(x) if self.tp > 1 else x


def loss_of(model: nn.Module, tokens: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(tokens), labels)


@contextmanager
def groups(tp: int, **sizes: Any) -> Iterator[None]:
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=tp, **sizes)
    try:
        yield
    finally:
        parallel_state.destroy_model_parallel()


@contextmanager
def wrapped(
    tp: int, strategy: str = "no_shard", dtype: torch.dtype = torch.float64
) -> Iterator[DistributedDataParallel]:
    with groups(tp):
        torch.manual_seed(1)
        options: dict[str, Any] = {"data_parallel_sharding_strategy": strategy}
        config = DistributedDataParallelConfig(initial_weights="broadcast", **options)
        yield DistributedDataParallel(None, config, Mlp(tp).to(dtype))


def one_step(
    model: DistributedDataParallel,
    check: LoopCheck,
    *,
    source: Callable[[], int] = parallel_state.get_data_parallel_rank,
    weight: float = 1 / MICROBATCHES,
    loss_fn: Callable[..., Tensor] = loss_of,
) -> None:
    """A user's loop: as many microbatches on each data rank, each loss times `weight`."""
    generator = torch.Generator().manual_seed(100 + source())
    model.zero_grad_buffer()
    for number in range(MICROBATCHES):
        tokens = torch.randint(0, 11, (SAMPLES,), generator=generator)
        labels = torch.randint(0, 5, (SAMPLES,), generator=generator)
        check.note(tokens, labels)
        with nullcontext() if number == MICROBATCHES - 1 else model.no_sync():
            (loss_fn(model, tokens, labels) * weight).backward()
    finalize_model_grads([model])


def build_whole() -> nn.Module:
    return Mlp(1)


@ranks(2)
@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("strategy", ["no_shard", "optim", "optim_grads", "optim_grads_params"])
@pytest.mark.in_suite()
def test_a_right_loop_is_right_and_goes_on(rank: int, world: int, tp: int, strategy: str) -> None:
    with wrapped(tp, strategy) as model:
        torch.manual_seed(7)
        check = verify_with(model, build_whole, loss_of)
        if strategy != "optim_grads_params":
            copy.deepcopy(model.module)
        one_step(model, check)
        drawn = torch.rand(1)
        torch.manual_seed(7)
        assert torch.equal(drawn, torch.rand(1)), "rank 0's random numbers go on as if nothing was built"
        assert check.report is not None and check.report.ok and check.report.parameters == 3
        assert check.report.largest_error < 1e-14
        grads = check.job.model.gradients()
        assert all(bool(grad.any()) for grad in grads.values()), "the gradients are there for the optimizer"
        one_step(model, check)  # not looked at


@ranks(2)
def test_a_right_loop_is_right_in_fp32_and_under_autocast(rank: int, world: int) -> None:
    def under_autocast(model: nn.Module, tokens: Tensor, labels: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return loss_of(model, tokens, labels)

    for loss_fn in (loss_of, under_autocast):
        with wrapped(2, dtype=torch.float32) as model:
            check = verify_with(model, build_whole, loss_of)
            one_step(model, check, loss_fn=loss_fn)
            assert check.report is not None and check.report.ok


class WithLoss(nn.Module):
    """Its forward is given labels, so that nothing has to be noted."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = Mlp(1)

    def forward(self, tokens: Tensor, *, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.mlp(tokens), labels)


@ranks(2)
def test_the_inputs_of_forwards_are_kept(rank: int, world: int) -> None:
    """Microbatches have different lengths, lie in memory that is used again, and evaluations come between them."""
    for weight, ok in ((0.5, True), (1.0, False)):
        with groups(1):
            config = DistributedDataParallelConfig(initial_weights="broadcast")
            model = DistributedDataParallel(None, config, WithLoss().double())
            check = verify_with(model, WithLoss, lambda whole, *args, **kwargs: whole(*args, **kwargs))
            memory = torch.empty(2, 4, dtype=torch.int64)
            for length, sync in ((2, model.no_sync), (4, nullcontext)):
                tokens, labels = memory[0, :length].random_(0, 11), memory[1, :length].random_(0, 5)
                with sync():
                    (model(tokens, labels=labels) * weight).backward()
                with torch.no_grad():
                    model(tokens, labels=labels)
            with nullcontext() if ok else pytest.raises(WrongGradientError, match="2 times too large"):
                finalize_model_grads([model])
            assert check.report is not None and check.report.ok == ok


@ranks(2)
@pytest.mark.parametrize("right", [True, False])
def test_a_loss_per_token_is_divided_by_all_tokens(rank: int, world: int, right: bool) -> None:
    def summed(model: nn.Module, tokens: Tensor, labels: Tensor) -> tuple[Tensor, int]:
        return nn.functional.cross_entropy(model(tokens), labels, reduction="sum"), len(tokens)

    with groups(1):
        torch.manual_seed(1)
        config = ModelParallelConfig(calculate_per_token_loss=True)
        model = DistributedDataParallel(config, DistributedDataParallelConfig(), Mlp(1).double())
        check = verify_with(model, build_whole, summed)
        tokens, labels = torch.arange(3 + rank), torch.arange(3 + rank) % 5
        check.note(tokens, labels)
        loss, count = summed(model, tokens, labels)
        loss.backward()
        with nullcontext() if right else pytest.raises(WrongGradientError, match="divided by 10 tokens.*batch has 7"):
            finalize_model_grads([model], num_tokens=float(count if right else 5))


def message_of(tp: int, strategy: str = "no_shard", **loop_options: Any) -> str:
    """What the first step of a wrong loop raises."""
    with wrapped(tp, strategy) as model:
        check = verify_with(model, build_whole, loss_of)
        with pytest.raises(WrongGradientError) as caught:
            one_step(model, check, **loop_options)
        assert check.report is not None and not check.report.ok
        assert str(check.report) == str(caught.value)
        return str(caught.value)


@ranks(2)
@pytest.mark.parametrize("strategy", ["no_shard", "optim_grads_params"])
def test_a_loss_over_the_world_is_found(rank: int, world: int, strategy: str) -> None:
    message = message_of(1, strategy, weight=1 / MICROBATCHES / world)
    assert "3 of 3 gradients are wrong, first 'embedding.weight' on ranks [0, 1]" in message
    assert "0.5 times the reference" in message and "dp times too small (dp is 2): 1/n twice" in message


@ranks(2)
@pytest.mark.parametrize("tp", [1, 2])
def test_a_wrong_factor_of_accumulation_is_found(rank: int, world: int, tp: int) -> None:
    """There are three microbatches, which is the size of no group."""
    with mock.patch(f"{__name__}.MICROBATCHES", 3):
        assert "3 times too large, the number of microbatches: not divided by it" in message_of(tp, weight=1.0)


@ranks(2)
def test_other_tokens_on_ranks_of_tensor_parallelism_are_found(rank: int, world: int) -> None:
    message = message_of(2, source=lambda: rank)
    assert "likely cause: ranks 0 and 1 share one part of the data and were given different inputs" in message


@ranks(2)
def test_a_wrong_layer_is_placed(rank: int, world: int) -> None:
    with mock.patch.object(mappings, "copy_to_tensor_model_parallel_region", lambda x: x):
        message = message_of(2)
    assert "wrong: embedding; right: 2 of 3 parameters" in message
    assert "right at the output of `up` and wrong at that of `embedding`" in message


@ranks(2)
def test_a_reference_that_does_not_fit_is_refused_by_its_size(rank: int, world: int) -> None:
    def never() -> nn.Module:
        raise AssertionError("built")

    elements = 11 * 6 + 6 * 8 + 8 * 5
    with wrapped(2) as model:
        with (
            mock.patch.object(ran_jobs, "free_bytes", lambda _: 16 * elements - 1 if rank == 0 else 1 << 60),
            pytest.raises(MemoryError, match=f"the unsplit model has {elements} parameters.*on rank 0"),
        ):
            verify_with(model, never, loss_of)
        with mock.patch.object(ran_jobs, "free_bytes", lambda _: 16 * elements):
            verify_with(model, build_whole, loss_of)
        with pytest.raises(ValueError, match="being verified already"):
            verify_with(model, build_whole, loss_of)
    assert ran_jobs.free_bytes(torch.device("cpu")) > 1 << 20


@ranks(2)
def test_layouts_and_loops_that_cannot_be_compared_are_refused(rank: int, world: int) -> None:
    with groups(1, pipeline_model_parallel_size=2):
        model = DistributedDataParallel(None, DistributedDataParallelConfig(initial_weights="ignore"), Mlp(1))
        with pytest.raises(ValueError, match="a stage of a pipeline.*pass the PipelineRunner"):
            verify_with(model, build_whole, loss_of)
    with wrapped(1) as model:
        check = verify_with(model, build_whole, loss_of)
        tokens = torch.arange(3)
        for _ in range(1 + rank):
            check.note(tokens, tokens)
        loss_of(model, tokens, tokens).backward()
        with pytest.raises(ValueError, match=r"by rank \{0: 1, 1: 2\}.*once for each microbatch"):
            finalize_model_grads([model])


MOE = Layout(dp=2, ep=2, experts="alltoall", aux="aux_loss", expert_bias=True, strategy="optim", overlap=True)
IN_LOOPS = [
    Layout(tp=2, sp=True, model="modern", microbatches=2),
    MOE,
    Layout(dp=2, microbatches=2, per_token=True, overlap=True, strategy="optim_grads"),
    Layout(cp=2, cp_comm="p2p", microbatches=2),
    Layout(cp=2, cp_comm="p2p", per_token=True, model="modern"),
    Layout(pp=2, schedule="1F1B", microbatches=3),
    Layout(pp=2, schedule="Interleaved1F1B", vpp=2, microbatches=2, per_token=True),
    Layout(dp=2, cp=2, cp_comm="a2a", microbatches=2),
    Layout(pp=2, schedule="ZBVZeroBubble", vpp=2, dp=2, microbatches=4, strategy="optim_grads"),
    Layout(pp=2, schedule="1F1B", cp=2, cp_comm="p2p", microbatches=2),
    Layout(pp=2, schedule="1F1B", tp=2, sp=True, experts="alltoall", aux="aux_loss", etp=1, microbatches=2),
]


def loop_of_our_gpt(layout: Layout) -> str:
    """The report of a right loop, or of a wrong one."""
    loss_fn = gpt.token_sum if layout.per_token else gpt.token_mean
    with gpt.groups_of(layout) as process_groups:
        job = gpt.job_of(layout, "fp64", process_groups, gpt.wrapper_config(layout))
        model = job.runner if isinstance(job, PipelineJob) else job.model.chunks[0]
        check = verify_with(model, lambda: gpt.build_whole(layout), loss_fn)
        batch = gpt.global_batch(layout)
        for part in () if isinstance(job, PipelineJob) else job.parts(batch):
            check.note(part)
        job.step(batch)
        assert check.report is not None and check.report.parameters > 15
        assert check.report.bound == 1e-10
        job.step(batch)  # not looked at
        return str(check.report)


@ranks(2)
@pytest.mark.parametrize("layout", [layout for layout in IN_LOOPS if layout.world == 2], ids=str)
def test_our_gpt_is_right_in_a_loop(rank: int, world: int, layout: Layout) -> None:
    assert " gradients right" in loop_of_our_gpt(layout)


@pytest.mark.nightly
@ranks(4)
@pytest.mark.parametrize("layout", [layout for layout in IN_LOOPS if layout.world == 4], ids=str)
def test_our_gpt_is_right_in_a_loop_of_four_ranks(rank: int, world: int, layout: Layout) -> None:
    assert " gradients right" in loop_of_our_gpt(layout)


@dataclass(frozen=True)
class Wrong:
    """A user's decoder in a loop, with a mistake, and what the error must say."""

    split: Split
    words: tuple[str, ...]


WRONG = [
    Wrong(Split(cp=2, bug="loss over cp"), ("cp times too small (cp is 2): 1/n twice",)),
    Wrong(Split(cp=2, bug="gather of keys"), ("q_norm` and wrong at that of `linear_qkv`",)),
    Wrong(Split(pp=2, bug="stage division"), ("calls: `layers.1.norm_1` runs 4 times on rank [1]",)),
    Wrong(Split(pp=2, bug="untied"), ("wrong: embedding; right: 31 of 32", "not reduced over pp")),
]


@ranks(2)
@pytest.mark.parametrize("wrong", WRONG, ids=lambda wrong: wrong.split.bug.replace(" ", "_"))
def test_a_wrong_loop_over_pipeline_or_context_ranks_is_found(rank: int, world: int, wrong: Wrong) -> None:
    """The right one is right."""
    for split in (wrong.split, replace(wrong.split, bug="")):
        if not split.bug and wrong is not WRONG[0] and wrong is not WRONG[2]:
            continue
        sizes = {"context_parallel_size": split.cp, "pipeline_model_parallel_size": split.pp}
        with groups(1, **sizes):
            whole = Split(bug=split.bug if split.bug == "untied" else "")
            checks: list[Any] = []

            def start(model: Any, whole: Split = whole, checks: list[Any] = checks) -> None:
                loss = batch_loss if isinstance(model, PipelineRunner) else loss_of_inputs
                checks.append(verify_with(model, lambda: Decoder(whole), loss, join_fn=in_order))

            program = train(split, torch.float64, before=start)
            with pytest.raises(WrongGradientError) if split.bug else nullcontext() as caught:
                next(program)
            (check,) = checks
            assert check.report is not None and check.report.ok == (not split.bug)
            for word in wrong.words if split.bug else ():
                assert word in str(caught.value)


def in_order(parts: Sequence[Tensor]) -> Tensor:
    return torch.cat(list(parts), dim=1)


def loss_of_inputs(model: nn.Module, tokens: Tensor, labels: Tensor) -> Tensor:
    return model(tokens, labels)


def batch_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return model(batch["tokens"], batch["labels"])


def test_parts_of_a_sequence_are_put_together() -> None:
    """A mask of ones is cut like the tokens; what the first stage lacks the last one has; numbers stay."""
    tokens, mask = torch.arange(16).view(2, 8), torch.ones(2, 8)
    said: dict[int, Given] = {}
    for rank, (cp, stage) in enumerate([(0, 0), (1, 0), (0, -1), (1, -1)]):
        chosen = [0, 1, 6, 7] if cp == 0 else [2, 3, 4, 5]
        part = {"tokens": tokens[:, chosen] if stage == 0 else None, "mask": mask[:, chosen], "scale": torch.tensor(3)}
        labels = None if stage == 0 else 100 + tokens[:, chosen]
        said[rank] = Given(0, cp, 0, stage, [], [((part,), {"labels": labels})], [], [], {})
    ((whole, rest),) = full_batch(said, None)[0]
    assert torch.equal(whole[0]["tokens"], tokens) and torch.equal(whole[0]["mask"], mask)
    assert torch.equal(rest["labels"], 100 + tokens) and whole[0]["scale"] == 3


@ranks(2)
def test_the_loop_in_the_docs_raises_what_they_show(rank: int, world: int) -> None:
    shown = PAGE.read_text().split("loop.py\ncore.verify.report.WrongGradientError: ")[1].split("```")[0]
    program = program_of(PAGE, "py")
    assert without_bound(raised_by(program)) == without_bound(shown)
    right = program.replace(" / dist.get_world_size()", "")
    assert "4 gradients right" in raised_by(right)
    assert "4 times too large, the number of microbatches: not divided by it" in raised_by(
        right.replace(" / MICROBATCHES", "")
    )


def without_bound(text: str) -> list[str]:
    """Words; a bound in fp32 depends on how a machine adds."""
    return re.sub(r"\(bound \S+\)", "", text).split()


def raised_by(program: str) -> str:
    """The error of a program in the groups of a test, or else the report of its check."""
    names: dict[str, Any] = {"__name__": "page"}
    with mock.patch.object(dist, "init_process_group"), mock.patch.object(dist, "destroy_process_group"):
        try:
            exec(compile(program, str(PAGE), "exec"), names)
        except WrongGradientError as error:
            return str(error)
        finally:
            parallel_state.destroy_model_parallel()
    return str(names["check"].report)
