"""`python -m core verify train.py` finds what a program does wrong, in any wrapper, and alarms at no right one."""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

from core import parallel_state
from core.booster import Booster
from core.booster.plugin import GeminiPlugin, LowLevelZeroPlugin, TorchDDPPlugin, TorchFSDPPlugin
from core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from core.optimizer import OptimizerConfig, get_megatron_optimizer
from core.pipeline_parallel import get_forward_backward_func
from core.verify import WrongGradientError, declare_splits, note, verify_with
from core.verify.asked import asked_by, execute, function_named
from core.verify.microbatch_weights import shares_of
from core.verify.program import Asked, ProgramWatch, run_program
from core.verify.report import GradientReport
from tests.layouts import gpt
from tests.layouts.layouts import Layout
from tests.unit_tests.ranks import ranks

MICROBATCHES = 3


class Net(nn.Module):
    """Its forward gives the mean loss, unless it is given no targets."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(6)
        self.up = nn.Linear(6, 8)
        self.down = nn.Linear(8, 4)

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        out = self.down(torch.tanh(self.up(self.norm(x))))
        return out if y is None else (out - y).square().mean()


def mean_loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return (model(x) - y).square().mean()


def build_whole() -> nn.Module:
    return Net()


WHOLE = f"{__name__}:build_whole"


def report_of(program: Callable[[], None], **asked: Any) -> GradientReport:
    """Run a program, which is to end after its first step."""
    watch = ProgramWatch(Asked("a program", **asked))
    with watch.active(), pytest.raises(SystemExit) as end:
        program()
    (report,) = watch.reports
    assert end.value.code == (0 if report.ok else 1)
    return report


def data_of(seed: int, shape: tuple[int, ...] = (5, 6)) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    draws = [torch.randn(*shape, generator=generator) for _ in range(MICROBATCHES)]
    return [(x, x[..., :4].sin() + 1.0) for x in draws]


def train(
    model: Any,
    *,
    fault: str = "",
    forward: Callable[..., Tensor] | None = None,
    seed: int | None = None,
    clip: float | None = None,
    evaluates: bool = False,
) -> None:
    """A user's loop around any wrapper, with a mistake. evaluates: before the first step."""
    ours = isinstance(model, DistributedDataParallel)
    rank = dist.get_rank() if dist.is_initialized() else 0
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    if ours:
        optimizer = get_megatron_optimizer(OptimizerConfig(optimizer="sgd", lr=0.1), [model])
    if evaluates:
        with torch.no_grad():
            model.eval()(*data_of(99)[0])
        model.train()
    forward = forward or model
    for step in range(2):
        if fault != "not zeroed":
            model.zero_grad_buffer() if ours else optimizer.zero_grad()
        for number, (x, y) in enumerate(data_of(10 * step + (rank if seed is None else seed))):
            is_last = number == MICROBATCHES - 1
            with nullcontext() if is_last or not hasattr(model, "no_sync") else model.no_sync():
                loss = forward(x, y) / MICROBATCHES  # torch's DDP decides in the forward if it reduces
            if fault == "divided twice":
                loss = loss / MICROBATCHES
            if fault == "divided by the world":
                loss = loss / dist.get_world_size()
            if number == 1 and (fault == "forgotten microbatch" or (fault, rank) == ("forgotten on rank 1", 1)):
                continue
            if fault == "zeroed too late" and is_last:
                model.zero_grad_buffer() if ours else model.zero_grad()
            with nullcontext() if is_last or not hasattr(model, "no_sync") else model.no_sync():
                loss.backward()
        if ours:
            finalize_model_grads([model])
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()


class Turned(nn.Linear):
    """Linear layer whose outputs a complex table turns, as rotary embeddings do."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.register_buffer("table", torch.polar(torch.ones(outputs // 2), torch.arange(outputs / 2)))

    def forward(self, x: Tensor) -> Tensor:
        pairs = torch.view_as_complex(super().forward(x).unflatten(-1, (-1, 2)))
        return torch.view_as_real(pairs * self.table).flatten(-2)


def wrapped_by(kind: str) -> Any:
    torch.manual_seed(4)
    model = Net()
    if kind == "DDP of torch":
        return nn.parallel.DistributedDataParallel(model)
    if kind.startswith("fully_shard"):
        mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        policy = mixed if kind.endswith("bf16") else MixedPrecisionPolicy()
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        if kind.endswith("recomputed"):
            model.up = checkpoint_wrapper(Turned(6, 8))
            model.holder = nn.Module()  # without a class of its own
        fully_shard(model.up, mesh=mesh, mp_policy=policy)
        return fully_shard(model, mesh=mesh, mp_policy=policy)
    options: dict[str, Any] = {"data_parallel_sharding_strategy": kind}
    config = DistributedDataParallelConfig(initial_weights="broadcast", **options)
    return DistributedDataParallel(None, config, model)


KINDS = (
    "no_shard",
    "optim_grads_params",
    "DDP of torch",
    "fully_shard",
    "fully_shard in bf16",
    "fully_shard, rotated and recomputed",
)


@ranks(2)
@pytest.mark.parametrize("kind", KINDS)
def test_a_right_program_is_right_under_any_wrapper(rank: int, world: int, kind: str) -> None:
    """An evaluation before it leaves the outermost module of fully_shard with plain parameters."""
    parallel_state.initialize_model_parallel()
    try:
        torch_clips = 0.01 if kind in KINDS[2:] else None
        report = report_of(lambda: train(wrapped_by(kind), clip=torch_clips, evaluates=True))
        assert report.ok and report.parameters == 6 and report.title.startswith("second step"), report
        assert report.largest_error < (0.05 if kind.endswith("bf16") else 1e-5)
    finally:
        parallel_state.destroy_model_parallel()


FAULTS = {
    "divided twice": "3 times too small, the number of microbatches: divided by it twice",
    "divided by the world": "dp times too small (dp is 2): 1/n twice",
    "forgotten microbatch": "the backward does not run of microbatch 2 of 3, so 2/3 of the gradient is there",
    "zeroed too late": "a late zero_grad: it clears microbatches 1, 2 of 3, so 1/3 of the gradient is there",
    "not zeroed": "the gradients of the step before are still there: zero_grad is not called",
    "forgotten on rank 1": "on data rank 1 alone the backward does not run of microbatch 2 of 3",
}


@ranks(2)
@pytest.mark.in_suite()
@pytest.mark.parametrize("kind", ["no_shard", "DDP of torch", "fully_shard"])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_mistake_of_the_loop_is_found_under_any_wrapper(rank: int, world: int, kind: str, fault: str) -> None:
    if (kind, fault) == ("fully_shard", "forgotten on rank 1"):
        pytest.skip("each backward of fully_shard is collective, so the program itself waits forever")
    parallel_state.initialize_model_parallel()
    try:
        report = report_of(lambda: train(wrapped_by(kind), fault=fault))
        # After a forward, zero_grad does not reach the root's parameters, which fully_shard has not resharded.
        reached = 2 if (kind, fault) == ("fully_shard", "zeroed too late") else 6
        assert len({entry.name for entry in report.wrong}) == reached
        assert FAULTS[fault] in report.cause
        assert report.title.startswith("second step" if fault == "not zeroed" else "first step")
    finally:
        parallel_state.destroy_model_parallel()


def split_by_torch(*, forgets: bool, mesh: DeviceMesh | None = None) -> nn.Module:
    """A DTensor-parallel model; where it forgets, the norm is no DTensor, and its ranks have parts of the rows."""
    torch.manual_seed(4)
    model = Net()
    mesh = mesh or init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    part = mesh.get_local_rank()
    plan: dict[str, Any] = {
        "up": ColwiseParallel(input_layouts=Shard(0)),
        "down": RowwiseParallel(output_layouts=Replicate()),
    }
    if not forgets:
        plan["norm"] = SequenceParallel(sequence_dim=0)
    model.norm.register_forward_pre_hook(lambda _, args: (args[0].chunk(2)[part],))
    return parallelize_module(model, mesh, plan)


@ranks(2)
@pytest.mark.parametrize("forgets", [False, True])
def test_a_forgotten_reduction_in_a_dtensor_parallel_model_is_found(rank: int, world: int, forgets: bool) -> None:
    model = split_by_torch(forgets=forgets)
    assert isinstance(model.get_parameter("up.weight"), DTensor)

    def loss(x: Tensor, y: Tensor) -> Tensor:
        x, y = x[:4], y[:4]
        note(mean_loss, x, y)
        return mean_loss(model, x, y)

    report = report_of(lambda: train(model, forward=loss, seed=7), whole=WHOLE)
    assert report.ok != forgets, report
    if forgets:
        assert {entry.name for entry in report.wrong} == {"norm.weight", "norm.bias"}
        assert "not reduced over tp" in report.cause


@ranks(4)
@pytest.mark.parametrize("forgets", [False, True])
def test_a_model_that_is_split_and_sharded_by_torch_is_checked(rank: int, world: int, forgets: bool) -> None:
    """fully_shard over DTensor parallelism, by the command and by verify_with."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = fully_shard(split_by_torch(forgets=forgets, mesh=mesh["tp"]), mesh=mesh["dp"])
    check = verify_with(model, build_whole, mean_loss)

    def loss(x: Tensor, y: Tensor) -> Tensor:
        check.note(x[:4], y[:4])
        return mean_loss(model, x[:4], y[:4])

    with pytest.raises(WrongGradientError, match="wrong: norm; right: 4 of 6") if forgets else nullcontext():
        train(model, forward=loss, seed=mesh["dp"].get_local_rank())
    assert check.report is not None and check.report.ok != forgets and check.report.parameters == 6
    if forgets:
        assert {entry.name for entry in check.report.wrong} == {"norm.weight", "norm.bias"}


@ranks(4)
@pytest.mark.parametrize("forgets", [False, True])
def test_a_model_of_dtensors_in_torchs_ddp_is_checked(rank: int, world: int, forgets: bool) -> None:
    """DDP makes plain tensors of DTensors, so the command looks at them before."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))

    def program() -> None:
        split = split_by_torch(forgets=forgets, mesh=mesh["tp"])
        model = nn.parallel.DistributedDataParallel(split, device_mesh=mesh["dp"])

        def loss(x: Tensor, y: Tensor) -> Tensor:
            note(mean_loss, x[:4], y[:4])
            return mean_loss(model, x[:4], y[:4])

        train(model, forward=loss, seed=mesh["dp"].get_local_rank())

    report = report_of(program, whole=WHOLE)
    assert report.ok != forgets and report.parameters == 6, str(report)
    assert not forgets or {entry.name for entry in report.wrong} == {"norm.weight", "norm.bias"}
    assert not forgets or "not reduced over tp" in report.cause


@ranks(2)
@pytest.mark.in_suite(3)
@pytest.mark.parametrize("fault", ["", "divided by the world", "forgotten microbatch"])
@pytest.mark.parametrize("kind", ["DDP of torch", "fully_shard", "fully_shard in bf16"])
def test_verify_with_takes_a_model_that_torch_wraps(rank: int, world: int, kind: str, fault: str) -> None:
    model = wrapped_by(kind)
    check = verify_with(model, build_whole, lambda whole, x, y: whole(x, y))
    with pytest.raises(WrongGradientError) if fault else nullcontext() as caught:
        train(model, fault=fault, clip=0.01)
    assert check.report is not None and check.report.ok == (not fault)
    coarse = fault == "divided by the world" and kind == "fully_shard in bf16"  # rounding hides a factor's exact size
    cause = "a wrong factor of a reduction looks like that too: check once more in fp64"
    assert (cause if coarse else FAULTS.get(fault, "")) in str(caught.value if caught else "")


@ranks(2)
def test_a_program_goes_on_where_it_is_asked_to(rank: int, world: int) -> None:
    torch.manual_seed(4)
    watch = ProgramWatch(Asked("a program", continues=True))
    with watch.active():
        model = nn.parallel.DistributedDataParallel(Net())
        before = model.module.up.weight.detach().clone()
        train(model)
    torch.manual_seed(4)
    alone = nn.parallel.DistributedDataParallel(Net())
    train(alone)
    assert len(watch.reports) == 1
    assert not torch.equal(before, model.module.up.weight)
    assert torch.equal(alone.module.up.weight, model.module.up.weight)


@ranks(2)
def test_what_is_not_known_is_asked_for(rank: int, world: int) -> None:
    lonely = Net()
    lonely.lock = threading.Lock()  # cannot be copied
    with ProgramWatch(Asked("a program")).active(), pytest.raises(ValueError, match="--whole module:function"):
        train(lonely)
    stage = nn.Sequential()
    stage.add_module(f"stage{rank}", Net())
    with ProgramWatch(Asked("a program")).active(), pytest.raises(ValueError, match="torch.distributed.pipelining"):
        train(stage, forward=lambda x, y: mean_loss(stage, x, y))
    parallel_state.initialize_model_parallel(2)
    split = declare_splits(Net(), {"up.*": 0, "down.weight": 1})  # the attributes do not tell how to build it unsplit
    with ProgramWatch(Asked("a program")).active(), pytest.raises(ValueError, match="--whole module:function"):
        train(split)
    parallel_state.destroy_model_parallel()
    with ProgramWatch(Asked("a program")).active(), pytest.raises(ValueError, match="gives a Tensor of shape .*--loss"):
        plain = nn.parallel.DistributedDataParallel(Net())
        train(plain, forward=lambda x, y: mean_loss(plain, x, y))


@pytest.mark.parametrize("fault", ["", "divided twice", "zeroed too late", "not zeroed"])
def test_a_program_of_one_process_is_checked(fault: str) -> None:
    torch.manual_seed(4)
    report = report_of(lambda: train(Net(), fault=fault))
    assert report.ok == (not fault) and FAULTS.get(fault, "") in report.cause
    assert not dist.is_initialized()


@ranks(2)
def test_equal_data_on_two_data_ranks_is_said(rank: int, world: int) -> None:
    report = report_of(lambda: train(nn.parallel.DistributedDataParallel(Net()), seed=3))
    assert report.ok and "data ranks [0, 1] were given the same microbatches" in str(report)
    assert not report_of(lambda: train(nn.parallel.DistributedDataParallel(Net()))).notes


def train_boosted(plugin: Any, precision: str | None = None, *, weight: float = 1 / MICROBATCHES) -> None:
    """A loop around the Booster, which clips."""
    torch.manual_seed(4)
    booster = Booster(plugin=plugin, mixed_precision=precision)
    model: Any = Net()
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.01))
    for step in range(16):
        optimizer.zero_grad()
        for number, (x, y) in enumerate(data_of(10 * step + dist.get_rank())):
            with nullcontext() if number == MICROBATCHES - 1 else booster.no_sync(model, optimizer):
                booster.backward(model(x, y) * weight, optimizer)
        optimizer.clip_grad_by_norm(0.01)
        optimizer.step()


PLUGINS: dict[str, Callable[[], Any]] = {
    "zero": lambda: LowLevelZeroPlugin(stage=2, precision="fp32"),
    "zero in fp16": lambda: LowLevelZeroPlugin(stage=1, precision="fp16", initial_scale=2.0**24),
    "gemini": lambda: GeminiPlugin(precision="fp32", min_chunk_size_m=0.1, search_range_m=0.1),
    "ddp": TorchDDPPlugin,
    "ddp in fp16": TorchDDPPlugin,
    "fsdp": TorchFSDPPlugin,
}


@ranks(2)
@pytest.mark.in_suite()
@pytest.mark.parametrize("weight", [1 / MICROBATCHES, 1.0])
@pytest.mark.parametrize("kind", PLUGINS)
def test_boosted_programs_are_checked(rank: int, world: int, kind: str, weight: float) -> None:
    """In fp16 the first steps overflow, and are not compared."""
    precision = "fp16" if kind == "ddp in fp16" else None
    try:
        report = report_of(lambda: train_boosted(PLUGINS[kind](), precision, weight=weight))
        assert report.ok == (weight != 1.0), report
        assert report.ok or "3 times too large, the number of microbatches: not divided by it" in report.cause
    finally:
        parallel_state.destroy_model_parallel()


@ranks(2)
@pytest.mark.parametrize("kind", ["ours", "torch's"])
@pytest.mark.parametrize("fault", [False, True])
def test_a_loss_scale_is_divided_out(rank: int, world: int, kind: str, fault: bool) -> None:
    """The fault: a loss that is not multiplied by it, or gradients that are clipped before they are divided by it."""
    parallel_state.initialize_model_parallel()

    def program() -> None:
        model = wrapped_by("no_shard" if kind == "ours" else "DDP of torch")
        options = OptimizerConfig(optimizer="sgd", lr=0.1, loss_scale=1024.0)
        optimizer: Any = None
        optimizer = get_megatron_optimizer(options, [model]) if kind == "ours" else torch.optim.SGD(model.parameters())
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for step in range(2):
            optimizer.zero_grad()
            loss = model(*data_of(10 * step + rank)[0])
            if kind == "ours":
                (loss if fault else optimizer.scale_loss(loss)).backward()
                finalize_model_grads([model])
                optimizer.step()
                continue
            scaler.scale(loss).backward()
            if not fault:
                scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()

    report = report_of(program)
    parallel_state.destroy_model_parallel()
    assert report.ok != fault, str(report)
    times = (
        "1024 times too small, the loss scale: the loss is not" if kind == "ours" else "1024 times too large, the loss"
    )
    assert not fault or report.cause.startswith(times)


PIPELINES = [
    Layout(pp=2, schedule="1F1B", microbatches=3),
    Layout(cp=2, cp_comm="p2p", microbatches=2),
    Layout(pp=2, schedule="Interleaved1F1B", vpp=2, microbatches=2, per_token=True),
]


@ranks(2)
@pytest.mark.in_suite(2)
@pytest.mark.parametrize("layout", PIPELINES, ids=str)
@pytest.mark.parametrize("fault", [False, True])
def test_pipelines_and_context_parallelism_are_checked(rank: int, world: int, layout: Layout, fault: bool) -> None:
    """Of our GPT the reference is transformers' model, if there is one with the same layers."""

    def program() -> None:
        with gpt.groups_of(layout) as process_groups:
            job = gpt.job_of(layout, "fp64", process_groups, gpt.wrapper_config(layout))
            norm = next(p for c in job.model.chunks for n, p in c.module.named_parameters() if "input_layernorm" in n)
            if fault and rank == 0:
                norm.register_hook(lambda grad: 2 * grad)
            for _ in range(2):
                job.step(gpt.global_batch(layout))

    report = report_of(program)
    assert report.ok != fault, report
    assert report.reference.startswith("reference")
    if fault:
        assert report.where is not None and "input_layernorm" in str(report), report


@ranks(2)
def test_a_forward_step_that_draws_its_own_data_is_refused(rank: int, world: int) -> None:
    """The runner is given no microbatches, and its forward step is no one's that the command knows."""
    with gpt.groups_of(PIPELINES[0]) as process_groups:
        job: Any = gpt.job_of(PIPELINES[0], "fp64", process_groups, gpt.wrapper_config(PIPELINES[0]))
        with (
            ProgramWatch(Asked("a program")).active(),
            pytest.raises(ValueError, match="draws its data itself.*PipelineRunner"),
        ):
            job.runner.step([None] * 3)


@ranks(2)
@pytest.mark.in_suite(2)
@pytest.mark.parametrize("layout", [PIPELINES[0], PIPELINES[2], Layout(tp=2, microbatches=2)], ids=str)
@pytest.mark.parametrize("fault", ["", "norm", "loss", "no note"])
def test_a_loop_of_megatrons_schedule_is_checked(rank: int, world: int, layout: Layout, fault: str) -> None:
    """Its forward step draws other data for each microbatch. Faults: a gradient, a microbatch's loss, none noted."""

    def mean_of(whole: nn.Module, tokens: Tensor) -> Any:
        losses = whole(tokens, labels=tokens)
        return (losses.sum(), losses.numel()) if layout.per_token else losses.mean()

    def forward_step(iterator: Any, chunk: Any) -> Any:
        (tokens,) = next(iterator)
        if fault != "no note":
            note(mean_of, tokens, per_token=layout.per_token)
        wrong = 2.0 if fault == "loss" and bool((tokens == marked[1]).all()) else 1.0

        def loss_func(losses: Tensor) -> tuple[Any, ...]:
            total = wrong * losses.sum()
            return (total, losses.numel(), {}) if layout.per_token else (total / losses.numel(), {})

        return chunk(tokens, labels=tokens), loss_func

    draw = torch.Generator().manual_seed(3)
    marked = [torch.randint(gpt.VOCABULARY, (2, gpt.SEQUENCE), generator=draw) for _ in range(2 * layout.microbatches)]

    def program() -> None:
        with gpt.groups_of(layout) as process_groups:
            job: Any = gpt.job_of(layout, "fp64", process_groups, gpt.wrapper_config(layout))
            chunks = job.model.chunks
            norm = next(p for c in chunks for n, p in c.module.named_parameters() if "input_layernorm" in n)
            if fault == "norm" and rank == 0:
                norm.register_hook(lambda grad: 2 * grad)
            iterators = [iter([(tokens,) for tokens in marked]) for _ in chunks]
            chunks[0].config.finalize_model_grads_func = finalize_model_grads
            for _ in range(2):
                for chunk in chunks:
                    chunk.zero_grad_buffer()
                get_forward_backward_func()(
                    forward_step_func=forward_step,
                    data_iterator=iterators,
                    model=chunks,
                    num_microbatches=layout.microbatches,
                    seq_length=gpt.SEQUENCE,
                    micro_batch_size=2,
                )

    if fault == "no note":
        with ProgramWatch(Asked("a program")).active(), pytest.raises(ValueError, match="core.verify.note"):
            program()
        return
    report = report_of(program)
    assert report.ok != bool(fault), report
    if fault == "norm":
        assert report.where is not None and "input_layernorm" in str(report), report
    if fault == "loss":
        assert "microbatch" in report.cause, report


def test_ranks_that_train_alone_are_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program that imports what could start ranks, and starts none, is no exception."""
    program = tmp_path / "train.py"
    program.write_text(
        "import torch\nimport core_plan.machine.own_ranks\ntorch.nn.Linear(2, 1)(torch.ones(1, 2)).sum().backward()\n"
    )
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr("sys.argv", ["train.py"])
    monkeypatch.setattr("sys.path", ["", *sys.path])
    assert run_program(Asked(str(program))) == 1
    assert "WORLD_SIZE is 2 and the program starts no torch.distributed" in capsys.readouterr().out


def test_the_command_line_ends_at_the_program() -> None:
    asked = asked_by(["--whole", "m:f", "--go-on", "-m", "core", "finetune", "--loss", "3"])
    assert asked == Asked("core", ("finetune", "--loss", "3"), True, "m:f", continues=True)
    assert function_named(WHOLE) is build_whole
    with pytest.raises(ValueError, match="has no 'nothing'"):
        function_named(f"{__name__}:nothing")


def test_the_text_of_a_programs_exit_is_printed(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for number, (code, status, text) in enumerate([("'no data'", 1, "no data\n"), ("3", 3, ""), ("", 0, "")]):
        program = tmp_path / f"train_{number}.py"
        program.write_text(f"import sys\nsys.exit({code})\n")
        with mock.patch.object(sys, "path", ["", *sys.path]), mock.patch.object(sys, "argv", []):
            assert execute(Asked(str(program))) == status
        assert capsys.readouterr().err == text


def test_labels_are_counted_as_losses_count_them() -> None:
    """Rows of a next-token loss: its first label does not count, and rows without padding are labels too."""
    rows = [torch.tensor([[-100, 5, 6]]), torch.tensor([[4, 5, -100]]), torch.tensor([[4, 5, 6, 7]])]
    batch = [[((), {"labels": row}) for row in rows]]
    assert shares_of(batch)["the mean over the labels of all ranks"] == pytest.approx([6 / 8, 6 / 8, 12 / 8])
    assert shares_of(batch)["the mean over the predicted labels of all ranks"] == pytest.approx([1.0, 0.5, 1.5])


def test_a_file_that_is_not_there_is_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert run_program(Asked(str(tmp_path / "train.py"))) == 2
    assert re.search("there is no file .*train.py", capsys.readouterr().err)
