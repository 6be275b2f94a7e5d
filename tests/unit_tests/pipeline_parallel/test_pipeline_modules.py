"""Pipelines of any modules, frozen stages, the users' callbacks, evaluation, and the way Megatron's users call it."""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import SplitPoint, pipeline

from core import parallel_state
from core.distributed import DistributedDataParallelConfig, LayoutMismatch, finalize_model_grads
from core.model_parallel_config import ModelParallelConfig
from core.models import GPTModel
from core.moe import MoEAuxLossAutoScaler
from core.pipeline_parallel import (
    PipelineLayout,
    PipelineRunner,
    get_forward_backward_func,
    gpt_activations,
    plan_pipeline,
    wrap_stages,
)
from core.pipeline_parallel.forward_backward import DrawingStep
from tests.unit_tests.pipeline_parallel.pipeline_reference import (
    BATCH,
    SEQUENCE,
    assert_gradients,
    build_whole,
    check_steps,
    microbatch,
    start_pipeline,
    whole_step,
    zero_buffers,
)
from tests.unit_tests.ranks import ranks
from tests.unit_tests.reference import assert_same, whole_grads

WIDTH = 6


class Cell(nn.Module):
    """A layer of a user: its own product and a plain one."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        self.scale = nn.Parameter(torch.rand(WIDTH, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.inner(x)) * self.scale + x


def make_cells(count: int = 4) -> nn.Sequential:
    torch.manual_seed(7)
    return nn.Sequential(*(Cell() for _ in range(count)))


def rows(data_rank: int, number: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(50 * data_rank + number)
    x = torch.randn(3, WIDTH, generator=generator, dtype=torch.float64)
    y = torch.randn(3, WIDTH, generator=generator, dtype=torch.float64)
    return x, y


def cell_step(chunk: nn.Module, batch: tuple[Tensor, Tensor], hidden: Tensor | None) -> Tensor:
    output = chunk(batch[0] if hidden is None else hidden)
    is_last = chunk.module.is_last
    return (output - batch[1]).pow(2).mean() if is_last else output


def whole_cells(cells: nn.Module, data_ranks: int, count: int) -> dict[str, Tensor]:
    for data_rank in range(data_ranks):
        for number in range(count):
            x, y = rows(data_rank, number)
            ((cells(x) - y).pow(2).mean() / count / data_ranks).backward()
    return {name: param.grad for name, param in cells.named_parameters() if param.grad is not None}


def run_cells(layout: PipelineLayout, schedule: str, count: int, **ddp: Any) -> None:
    """Cells of a user, cut by hand, against all of them in a row."""
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=layout.pp)
    groups = parallel_state.get_process_groups()
    cells = make_cells(layout.num_layers)
    expected = whole_cells(copy.deepcopy(cells), groups.size("dp"), count)
    numbers = layout.stages_of(groups.rank("pp"))
    stages = [nn.Sequential(*(cells[n] for n in layout.stage(s).layer_numbers)) for s in numbers]
    for stage, number in zip(stages, numbers, strict=True):
        stage.is_last = number == layout.num_stages - 1
    chunks = wrap_stages(None, DistributedDataParallelConfig(overlap_grad_reduce=True, **ddp), stages)
    shape = [torch.empty(3, WIDTH, dtype=torch.float64, device="meta")]
    runner = PipelineRunner(chunks, layout, cell_step, shape, schedule=schedule)
    for _ in range(2):
        for chunk in chunks:
            chunk.zero_grad_buffer()
        runner.step([rows(groups.rank("dp"), n) for n in range(count)])
        for chunk, number in zip(chunks, numbers, strict=True):
            first = layout.stage(number).layer_numbers.start
            got = {f"{int(n.split('.')[0]) + first}.{n.split('.', 1)[1]}": g for n, g in whole_grads(chunk).items()}
            assert_same(got, {name: expected[name] for name in got}, moved=bool(got))


@ranks(4)
@pytest.mark.parametrize("schedule", ["1F1B", "Interleaved1F1B", "ZBVZeroBubble"])
@pytest.mark.parametrize("strategy", ["no_shard", "optim"])
@pytest.mark.in_suite()
def test_modules_of_a_user(rank: int, world: int, schedule: str, strategy: str) -> None:
    layout = plan_pipeline(4, 2, schedule=schedule, chunks=1 if schedule == "1F1B" else 2)
    run_cells(layout, schedule, 4, data_parallel_sharding_strategy=strategy)


@ranks(2)
def test_a_stage_between_others_may_hold_nothing(rank: int, world: int) -> None:
    run_cells(PipelineLayout((2, 0, 0, 2), pp=2), "Interleaved1F1B", 2)


@ranks(2)
def test_a_module_that_torch_cuts(rank: int, world: int) -> None:
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
    cells = make_cells(4)
    expected = whole_cells(copy.deepcopy(cells), 1, 3)
    cut = pipeline(cells, mb_args=(rows(0, 0)[0],), split_spec={"2": SplitPoint.BEGINNING})
    stage = cut.get_stage_module(rank)
    stage.is_last = rank == 1
    (chunk,) = wrap_stages(None, DistributedDataParallelConfig(), [stage])
    shape = [torch.empty(3, WIDTH, dtype=torch.float64)]
    PipelineRunner([chunk], PipelineLayout((2, 2), 2), cell_step, shape).step([rows(0, n) for n in range(3)])
    got = whole_grads(chunk)
    assert len(got) == 6
    assert_same(got, {name: expected[name] for name in got})


class Conditioned(nn.Module):
    """Cells that all add one embedding, of which every stage holds a copy."""

    def __init__(self, cells: nn.Module) -> None:
        super().__init__()
        self.cells = cells
        torch.manual_seed(23)
        self.condition = nn.Parameter(torch.randn(WIDTH, dtype=torch.float64))
        self.condition.pipeline_parallel = True

    def forward(self, x: Tensor) -> Tensor:
        for cell in self.cells:
            x = cell(x + self.condition)
        return x


@ranks(4)
@pytest.mark.parametrize("schedule", ["1F1B", "Interleaved1F1B", "DualPipeV"])
def test_a_parameter_that_every_stage_has_a_copy_of(rank: int, world: int, schedule: str) -> None:
    layout = plan_pipeline(4, 2, schedule=schedule, chunks=1 if schedule == "1F1B" else 2)
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
    groups = parallel_state.get_process_groups()
    cells = make_cells(4)
    expected = whole_cells(Conditioned(copy.deepcopy(cells)), 2, 4)["condition"]
    numbers = layout.stages_of(groups.rank("pp"))
    stages = [Conditioned(nn.ModuleList(cells[n] for n in layout.stage(s).layer_numbers)) for s in numbers]
    for stage, number in zip(stages, numbers, strict=True):
        stage.is_last = number == layout.num_stages - 1
    virtual = ModelParallelConfig(pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=layout.chunks)
    chunks = wrap_stages(virtual, DistributedDataParallelConfig(overlap_grad_reduce=True), stages)
    shape = [torch.empty(3, WIDTH, dtype=torch.float64, device="meta")]
    runner = PipelineRunner(chunks, layout, cell_step, shape, schedule=schedule)
    for _ in range(2):
        for chunk in chunks:
            chunk.zero_grad_buffer()
        runner.step([rows(groups.rank("dp"), n) for n in range(4)])
        for chunk in chunks:
            assert_same({"condition": whole_grads(chunk)["condition"]}, {"condition": expected})


class Decayed(nn.Module):
    """Cells that add a loss of their own on the way, as a router does."""

    def __init__(self, cells: nn.Module) -> None:
        super().__init__()
        self.cells = cells

    def forward(self, x: Tensor) -> Tensor:
        for cell in self.cells:
            x = MoEAuxLossAutoScaler.apply(cell(x), self.loss_of(cell))
        return x

    @staticmethod
    def loss_of(cell: nn.Module) -> Tensor:
        return cell.scale.pow(2).sum()


@ranks(2)
@pytest.mark.parametrize("schedule", ["1F1B", "ZBVZeroBubble"])
def test_losses_that_layers_add_on_the_way_weigh_as_much_as_the_loss(rank: int, world: int, schedule: str) -> None:
    layout = plan_pipeline(4, 2, schedule=schedule)
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
    cells = make_cells(4)
    numbers = layout.stages_of(rank)
    stages = [Decayed(nn.ModuleList(copy.deepcopy(cells[n]) for n in layout.stage(s).layer_numbers)) for s in numbers]
    for stage, number in zip(stages, numbers, strict=True):
        stage.is_last = number == layout.num_stages - 1
    config = ModelParallelConfig(grad_scale_func=lambda loss: loss * 4.0)
    chunks = wrap_stages(config, DistributedDataParallelConfig(), stages)
    shape = [torch.empty(3, WIDTH, dtype=torch.float64, device="meta")]
    PipelineRunner(chunks, layout, cell_step, shape, schedule=schedule).step([rows(0, n) for n in range(4)])

    for number in range(4):
        x, y = rows(0, number)
        added = sum(Decayed.loss_of(cell) for cell in cells)
        (4.0 * ((cells(x) - y).pow(2).mean() + added) / 4).backward()
    expected = {name: param.grad for name, param in cells.named_parameters()}
    for chunk, number in zip(chunks, numbers, strict=True):
        first = layout.stage(number).layer_numbers.start
        for name, grad in whole_grads(chunk).items():
            _, cell, rest = name.split(".", 2)
            assert_same({name: grad}, {name: expected[f"{int(cell) + first}.{rest}"]})


def freeze_rank(which: int, *parts: str) -> Any:
    def prepare(stages: list[GPTModel]) -> None:
        if parallel_state.get_pipeline_model_parallel_rank() == which:
            for stage in stages:
                for name, param in stage.named_parameters():
                    if not parts or name.startswith(parts):
                        param.requires_grad_(False)

    return prepare


@ranks(3)
@pytest.mark.parametrize("frozen", [0, 1, 2], ids=["first", "between", "last"])
@pytest.mark.parametrize("schedule", ["1F1B", "InterleavedZeroBubble"])
@pytest.mark.in_suite()
def test_a_frozen_stage_lets_gradients_through(rank: int, world: int, schedule: str, frozen: int) -> None:
    config = {"share_embeddings_and_output_weights": False}
    layout = PipelineLayout((1, 2, 1), pp=3)
    runner = start_pipeline(layout, schedule, config=config, prepare=freeze_rank(frozen))
    whole = build_whole(num_layers=4, **config)
    ends = {0: "embedding.", 2: "output_layer."}
    for name, param in whole.named_parameters():
        layers = tuple(f"decoder.layers.{n}." for n in layout.stage(frozen).layer_numbers)
        last_norm = "decoder.final" if frozen == 2 else "-"
        param.requires_grad_(not name.startswith((*layers, ends.get(frozen, "-"), last_norm)))
    check_steps(runner, whole, 3)


@ranks(2)
def test_a_tied_embedding_that_is_frozen_on_one_end_is_refused(rank: int, world: int) -> None:
    runner = start_pipeline(PipelineLayout.even(2, pp=2), "1F1B", prepare=freeze_rank(0, "embedding.word"))
    with pytest.raises(LayoutMismatch, match="embd"):
        runner.step([microbatch(0, n) for n in range(2)])


@ranks(2)
@pytest.mark.parametrize("schedule", ["1F1B", "Interleaved1F1B", "ZBVZeroBubble"])
def test_evaluation_gives_the_loss_and_no_gradients(rank: int, world: int, schedule: str) -> None:
    layout = plan_pipeline(4, 2, schedule=schedule, chunks=1 if schedule == "1F1B" else 2)
    runner = start_pipeline(layout, schedule)
    _, losses = whole_step(build_whole(), 1, 5)
    for chunk in runner.chunks:
        chunk.zero_grad_buffer()
    outcome = runner.evaluate([microbatch(0, n) for n in range(5)])
    assert abs(outcome.loss.item() - losses[0]) < 1e-12 * losses[0]
    assert all(float(buffer.grad_data.abs().sum()) == 0 for chunk in runner.chunks for buffer in chunk.grad_buffers)
    check_steps(runner, build_whole(), 4)


@ranks(2)
def test_the_number_of_microbatches_may_change_from_step_to_step(rank: int, world: int) -> None:
    runner = start_pipeline(PipelineLayout.even(4, pp=2), "1F1B")
    whole = build_whole()
    for count in (2, 4, 3):
        check_steps(runner, whole, count, steps=1)


def token_step(iterator: Iterator[Any], model: nn.Module) -> Any:
    """A forward step as Megatron's users write it."""
    batch = next(iterator)

    def loss_func(losses: Tensor) -> tuple[Tensor, Tensor, float]:
        total, tokens = (losses * batch["loss_mask"]).sum(), batch["loss_mask"].sum()
        return total, tokens, float(total.detach() / tokens)

    return model(batch["tokens"], labels=batch["labels"]), loss_func


@ranks(2)
@pytest.mark.parametrize("schedule", ["1F1B", "GPipe", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble"])
def test_the_shape_of_microbatches_may_change_from_step_to_step(rank: int, world: int, schedule: str) -> None:
    """By the runner's own argument, and by that of Megatron's function; each length comes back too."""
    chunks = 1 if schedule in ("1F1B", "GPipe") else 2
    runner = start_pipeline(plan_pipeline(4, 2, schedule=schedule, chunks=chunks), schedule)
    whole = build_whole()
    for length in (SEQUENCE, 5, SEQUENCE, 3):
        batches = [{name: t[:, :length] for name, t in microbatch(0, n).items()} for n in range(2)]
        whole.zero_grad(set_to_none=True)
        losses = []
        for batch in batches:
            value = (whole(batch["tokens"], labels=batch["labels"]) * batch["loss_mask"]).sum()
            (value / batch["loss_mask"].sum() / 2).backward()
            losses.append(float(value.detach() / batch["loss_mask"].sum()))
        expected = {name: param.grad.clone() for name, param in whole.named_parameters() if param.grad is not None}
        zero_buffers(runner)
        outcome = runner.step(batches, activations=gpt_activations(runner.config, BATCH, length))
        assert outcome.loss.item() == pytest.approx(sum(losses) / 2, rel=1e-12)
        assert_gradients(runner, expected)
        zero_buffers(runner)
        reports = get_forward_backward_func(schedule)(
            forward_step_func=token_step,
            data_iterator=[iter(batches) for _ in runner.chunks],
            model=runner.chunks,
            num_microbatches=2,
            seq_length=length,
            micro_batch_size=BATCH,
        )
        finalize_model_grads(runner.chunks)
        assert_gradients(runner, expected, wrong=[] if reports in ([], pytest.approx(losses)) else [str(reports)])


@ranks(4)
def test_buckets_leave_while_the_step_runs(rank: int, world: int) -> None:
    """Before finalize, and under a schedule that puts weight gradients off too."""
    for schedule in ("1F1B", "ZBVZeroBubble"):
        layout = plan_pipeline(4, 2, schedule=schedule)
        runner = start_pipeline(layout, schedule, ddp={"overlap_grad_reduce": True, "bucket_size": 100})
        for step in range(3):
            for chunk in runner.chunks:
                chunk.zero_grad_buffer()
            before = sum(chunk.reducer.launches for chunk in runner.chunks)
            runner.step([microbatch(rank % 2, n) for n in range(4)], finalize=False)
            launched = sum(chunk.reducer.launches for chunk in runner.chunks) - before
            # The order of several chunks is not known before the first finalize.
            known = layout.chunks == 1 or step > 0
            assert launched == (sum(len(chunk.reducer.buckets) for chunk in runner.chunks) if known else 0)
            finalize_model_grads(runner.chunks)
        parallel_state.destroy_model_parallel()


@ranks(2)
@pytest.mark.parametrize("chunk_count", [1, 2])
def test_the_users_callbacks_are_called_as_megatrons_are(rank: int, world: int, chunk_count: int) -> None:
    calls: list[tuple[Any, ...]] = []

    def recorded(name: str, number: int) -> Any:
        @contextlib.contextmanager
        def no_sync() -> Iterator[None]:
            calls.append((name, "enter", number))
            yield
            calls.append((name, "leave", number))

        return no_sync if name == "no_sync" else lambda params: calls.append((name, number, len(list(params)) > 0))

    def one_or_list(name: str) -> Any:
        funcs = [recorded(name, number) for number in range(chunk_count)]
        return funcs if chunk_count > 1 else funcs[0]

    def finalize(model: list[nn.Module], num_tokens: Tensor | None, **options: Any) -> None:
        calls.append(("finalize", len(model), int(num_tokens), sorted(options)))

    config = {
        "no_sync_func": one_or_list("no_sync"),
        "grad_sync_func": one_or_list("grad_sync"),
        "param_sync_func": one_or_list("param_sync"),
        "finalize_model_grads_func": finalize,
        "calculate_per_token_loss": True,
    }
    schedule = "1F1B" if chunk_count == 1 else "Interleaved1F1B"
    layout = plan_pipeline(4, 2, schedule=schedule, chunks=chunk_count)
    runner = start_pipeline(layout, schedule, config=config)
    runner.step([microbatch(0, n) for n in range(2)])

    tokens = sum(int(microbatch(0, n)["loss_mask"].sum()) for n in range(2))
    assert calls[-1] == ("finalize", chunk_count, tokens, ["force_all_reduce", "pg_collection"])  # on every stage
    assert [c for c in calls if c[0] == "no_sync"].count(("no_sync", "enter", 0)) == 1
    # The first stage finishes last and reduces from its hooks; the others wait for grad_sync_func.
    synced = [number for name, number, *_ in calls if name == "grad_sync"]
    assert sorted(synced) == [n for n in range(chunk_count) if runner.stage_numbers[n] > 0]
    for number in synced:
        assert calls.index(("no_sync", "leave", number)) < calls.index(("grad_sync", number, True))
    gathered = [number for name, number, *_ in calls if name == "param_sync"]
    assert gathered == ([] if chunk_count == 1 else [0, 1])


@ranks(4)
@pytest.mark.parametrize(("pp", "schedule"), [(1, None), (2, None), (2, "Interleaved1F1B"), (2, "ZBVZeroBubble")])
def test_megatrons_entry(rank: int, world: int, pp: int, schedule: str | None) -> None:
    layout = plan_pipeline(4, pp, schedule=schedule or "1F1B", chunks=2 if schedule else 1)
    runner = start_pipeline(layout, schedule or "1F1B", config={"finalize_model_grads_func": finalize_model_grads})
    groups = parallel_state.get_process_groups()
    data_rank, data_ranks, count = groups.rank("dp"), groups.size("dp"), 4

    def forward_step(iterator: Iterator[Any], model: nn.Module) -> Any:
        batch = next(iterator)
        output = model(batch["tokens"], labels=batch["labels"])

        def loss_func(losses: Tensor) -> tuple[Tensor, Tensor, dict[str, float]]:
            total, tokens = (losses * batch["loss_mask"]).sum(), batch["loss_mask"].sum()
            return total, tokens, {"loss": float(total / tokens)}

        return output, loss_func

    expected, losses = whole_step(build_whole(), data_ranks, count)
    arguments = dict(num_microbatches=count, seq_length=SEQUENCE, micro_batch_size=BATCH, model=runner.chunks)
    for forward_only in (True, False, False):
        for chunk in runner.chunks:
            chunk.zero_grad_buffer()
        iterators = [iter([microbatch(data_rank, n) for n in range(count)]) for _ in runner.chunks]
        reports = get_forward_backward_func(schedule)(
            forward_step_func=forward_step, data_iterator=iterators, forward_only=forward_only, **arguments
        )
        is_last = groups.rank("pp") == layout.last_rank
        assert len(reports) == (count if is_last else 0)
        if is_last:
            assert abs(sum(report["loss"] for report in reports) / count - losses[data_rank]) < 1e-12
    assert_gradients(runner, expected)


def test_an_iterator_without_a_microbatch_left_is_refused_by_the_number_of_its_chunk() -> None:
    chunks = [nn.Identity(), nn.Identity()]
    for chunk in chunks:
        chunk.set_input_tensor = lambda hidden: None
    step = DrawingStep(SimpleNamespace(chunks=chunks), lambda drawn, chunk: next(drawn), [iter([1]), iter([])])
    with pytest.raises(ValueError, match="the data iterator of model chunk 1 has no microbatch left"):
        step(chunks[1], None, None)


@ranks(2)
def test_the_ends_of_a_v_on_one_rank_share_the_tied_weight(rank: int, world: int) -> None:
    runner = start_pipeline(plan_pipeline(4, 2, schedule="ZBVZeroBubble"), "ZBVZeroBubble")
    names = [name for chunk in runner.chunks for name, _ in chunk.module.named_parameters()]
    if rank == 0:
        first, last = (chunk.module.shared_embedding_or_output_weight() for chunk in runner.chunks)
        assert first is last
        assert "output_layer.weight" not in names
        # Torch's schedules end with the first stage; if one did not, its embedding would wait for the head.
        completed: list[int] = []
        for position, sync in enumerate(runner.syncs):
            sync.complete = partial(completed.append, position)
        runner._begin([None])
        runner._backwards_done(0)
        assert completed == []
        runner._backwards_done(1)
        assert sorted(completed) == [0, 1]
    assert dist.get_world_size(parallel_state.get_process_groups().pp) == 2


@ranks(2)
def test_a_step_leaves_a_record_of_what_each_stage_did(rank: int, world: int) -> None:
    runner = start_pipeline(plan_pipeline(4, 2, schedule="ZBVZeroBubble"), "ZBVZeroBubble")
    for _ in range(2):
        for chunk in runner.chunks:
            chunk.zero_grad_buffer()
        runner.step([microbatch(0, n) for n in range(5)])
    assert all(a.end_s <= b.start_s for a, b in itertools.pairwise(runner.events))
    for stage in runner.stage_numbers:
        done = [event for event in runner.events if event.stage == stage]
        for number in range(5):
            works = [event.work for event in done if event.microbatch == number]
            assert works in (["forward", "backward"], ["forward", "input gradient", "weight gradient"])
    assert any(event.work == "weight gradient" for event in runner.events)
