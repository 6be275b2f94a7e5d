"""verify_with: compare the first step of a user's own loop with one process that splits nothing."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from core.distributed import DistributedDataParallel
from core.distributed.finalize_model_grads import wrapped_chunks
from core.distributed.guard.first_steps import paused
from core.groups import agree
from core.pipeline_parallel import PipelineRunner
from core.verify.check import NOISE, compare
from core.verify.diagnosis import NO_SUM
from core.verify.gathered import cast, first_tensor, on_tensors
from core.verify.job import Job, PipelineJob, PlainJob
from core.verify.microbatches import Given, JoinFn, Microbatch, other_inputs, whole_batch
from core.verify.reference import ModelFn, Reference
from core.verify.report import GradientReport

OTHER_BACKWARDS = (
    "the loop does something else than one backward of loss_fn for each microbatch: one is left out or runs twice, its "
    "labels are other ones, or gradients are changed (clipped, scaled, zeroed) before finalize_model_grads"
)

_CHECKS: dict[int, StepCheck] = {}  # by the identity of the wrapped module


def verify_with(
    model: nn.Module | PipelineRunner,
    build_whole: ModelFn,
    loss_fn: Callable[..., Any],
    *,
    bound: float | None = None,
    reference_dtype: torch.dtype = torch.float64,
    join_fn: JoinFn | None = None,
) -> StepCheck:
    """Check the first step of a loop: its data, its accumulation and its loss, which check_gradients does not see.

    Call it once, right before the first step, after weights are loaded. The inputs of each forward in training mode
    are kept until `finalize_model_grads`. Then the unsplit model runs over the microbatches of all data ranks, and
    every reduced gradient of the layout is compared with the mean over all microbatches.

    model: wrapped in DistributedDataParallel, or the PipelineRunner of a pipeline, of which the microbatches of the
    first step are kept: loss_fn(whole, microbatch). What the first stage is not given, such as labels, is taken from
    the last one. build_whole: builds the same model without any splitting; it gets the
    layout's weights as they are now. loss_fn(whole, *args, **kwargs): the mean loss of one microbatch, not divided by
    anything, from the arguments of the forward; with `config.calculate_per_token_loss` (sum of losses, number of
    tokens). If labels are not among these arguments, the loop passes them: see `LoopCheck.note`. With a loss scale,
    loss_fn multiplies by it. bound, reference_dtype: as for check_gradients. join_fn: under context parallelism, the
    parts that its ranks have of a tensor, in order -> the whole; by default a head and a tail chunk of dim 1, as of
    get_batch_on_this_cp_rank. Tensors that are equal on all these ranks are whole.

    Raises WrongGradientError in the first `finalize_model_grads`, on all ranks alike, if a gradient is wrong. Raises
    MemoryError on all ranks, before anything is built, if the unsplit model does not fit on rank 0. The model must be
    deterministic. Collective over the default process group.

        verify_with(model, build_whole, lambda whole, *given: whole(*given).mean())
        for tokens, labels in batches:
            model(tokens, labels).mean().backward()
            finalize_model_grads([model])
            optimizer.step()
    """
    if isinstance(model, PipelineRunner):
        chunks = wrapped_chunks(model.chunks, "verify_with(PipelineRunner(chunks, ...), build_whole, loss_fn)")
    else:
        chunks = wrapped_chunks(model, "verify_with(model, build_whole, loss_fn)")
        if len(chunks) > 1 or chunks[0].groups.size("pp") > 1:
            raise ValueError(
                "verify_with was given a stage of a pipeline, whose inputs are activations; pass the PipelineRunner "
                "that runs the stages"
            )
    if any(id(chunk.module) in _CHECKS for chunk in chunks):
        raise ValueError("this model is being verified already; call verify_with once, before the first step")
    if isinstance(model, PipelineRunner):
        return PipelineCheck(model, build_whole, loss_fn, bound, reference_dtype, join_fn)
    return LoopCheck(chunks[0], build_whole, loss_fn, bound, reference_dtype, join_fn)


def loss_of_call(loss_fn: Callable[..., Any]) -> Callable[[nn.Module, Microbatch], Any]:
    """From a loss of a model and a call's arguments to one of a model and a microbatch."""

    def loss_of(model: nn.Module, microbatch: Microbatch) -> Any:
        args, kwargs = microbatch
        return loss_fn(model, *args, **kwargs)

    return loss_of


class StepCheck:
    """The check of the first step of a loop. `report` is None until it is over, and the same on all ranks.

    job: the loop's. It says when the step is over. conclude: called with the report, on all ranks.
    """

    def __init__(
        self,
        job: RanJob,
        build_whole: ModelFn,
        bound: float | None = None,
        reference_dtype: torch.dtype = torch.float64,
        conclude: Callable[[GradientReport], None] = GradientReport.raise_if_wrong,
        join_fn: JoinFn | None = None,
    ) -> None:
        self.report: GradientReport | None = None
        self.job = job
        self.build_whole = build_whole
        self.bound = bound
        self.reference_dtype = reference_dtype
        self.conclude = conclude
        self.join_fn = join_fn
        self.reference: _LoopReference | None = None
        self.listens = True  # until the step is over
        self.forwards: list[Microbatch] = []
        self.noted: list[Microbatch] = []
        self.autocast: torch.dtype | None = None
        self.until_over = ExitStack()
        self.until_over.enter_context(job.watched(self._finish))

    def prepare(self) -> None:
        """Build the reference, with the weights as they are. Collective over the world. Raises as verify_with."""
        _refuse_what_does_not_fit(self.job, self.reference_dtype)
        device = self.job.model.device
        with _kept_random_state(device):
            build = self.build_whole
            self.reference = _LoopReference(
                self.job, lambda: build().to(device), self.reference_dtype, self.job.loss_fn
            )

    def note(self, *args: Any, **kwargs: Any) -> None:
        """Pass a microbatch to `loss_fn`, in place of the forward's arguments. For labels that the forward has not.

        Call it once for each microbatch of the first step; later calls do nothing.

            check = verify_with(model, build_whole, lambda whole, x, y: cross_entropy(whole(x), y))
            for x, y in batches:
                check.note(x, y)
                cross_entropy(model(x), y).backward()
        """
        if self.listens:
            self.noted.append(kept((args, kwargs)))

    def note_forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Keep the arguments of a forward."""
        if not self.listens:
            return
        kind = self.job.model.device.type
        self.autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        self.forwards.append(kept((args, kwargs)))

    def _finish(self) -> None:
        """Compare the step that has just been closed. Collective over the world."""
        self.listens = False
        with self.until_over, _kept_random_state(self.job.model.device):
            if self.reference is None:
                self.prepare()
            self.report = self._compared(self.noted or self.forwards)
        self.reference, self.forwards, self.noted = None, [], []
        self.conclude(self.report)

    def _compared(self, mine: list[Microbatch]) -> GradientReport:
        job, groups, reference = self.job, self.job.groups, self.reference
        assert reference is not None, "prepared"
        axis, stage = "dp" if groups.dp is not None else "dp_cp", groups.rank("pp")
        end = 0 if stage == 0 else -1 if stage == groups.size("pp") - 1 else None
        parts = _on_cpu(mine) if groups.rank("tp") == 0 and end is not None else None
        given = Given(
            groups.rank(axis), groups.rank("cp"), groups.rank("tp"), end, [_digests(part) for part in mine], parts
        )
        answers = agree.gather(given, None, "the microbatches of the first step")
        counts = {rank: len(given.digests) for rank, given in answers.items()}
        if len(set(counts.values())) > 1 or 0 in counts.values():
            raise ValueError(
                f"the forwards of the first step in training mode, or calls of note, are by rank {counts}; verify_with "
                "expects one for each microbatch, as many on every rank. Call the wrapped model, and note once for "
                "each microbatch"
            )
        batch = whole_batch(answers, self.join_fn)
        job.mine = mine
        job.microbatches = reference.microbatches = len(mine)
        compute = self.autocast or job.model.dtype
        with torch.autocast(job.model.device.type, self.autocast, enabled=self.autocast is not None):
            report = compare(
                job,
                reference,
                batch,
                bound=self.bound,
                noise=NOISE.get(compute, 1e-2),
                steps=1,
                title=f"first step of the loop, {dist.get_world_size()} ranks, {len(mine)} microbatches each",
            )
        other = other_inputs(answers) or (OTHER_BACKWARDS if report.cause.startswith(NO_SUM) else "")
        return report if report.ok or not other else replace(report, cause=f"{other}; then: {report.cause}")


class LoopCheck(StepCheck):
    """The check that verify_with makes: of forwards of one wrapped model."""

    def __init__(
        self,
        ddp: DistributedDataParallel,
        build_whole: ModelFn,
        loss_fn: Callable[..., Any],
        bound: float | None,
        reference_dtype: torch.dtype,
        join_fn: JoinFn | None = None,
    ) -> None:
        job = LoopJob(ddp, loss_of_call(loss_fn))
        super().__init__(job, build_whole, bound, reference_dtype, join_fn=join_fn)
        self.prepare()
        self.until_over.callback(ddp.module.register_forward_pre_hook(_note_forward, with_kwargs=True).remove)
        _CHECKS[id(ddp.module)] = self
        self.until_over.callback(_CHECKS.pop, id(ddp.module))


class PipelineCheck(StepCheck):
    """The check that verify_with makes of a pipeline: of the microbatches of its first step."""

    def __init__(
        self,
        runner: PipelineRunner,
        build_whole: ModelFn,
        loss_fn: Callable[..., Any],
        bound: float | None,
        reference_dtype: torch.dtype,
        join_fn: JoinFn | None = None,
    ) -> None:
        job = PipelineLoopJob(runner, loss_of_call(loss_fn))
        super().__init__(job, build_whole, bound, reference_dtype, join_fn=join_fn)
        self.prepare()
        step = runner.step

        def kept_step(microbatches: Sequence[Any], **options: Any) -> Any:
            for microbatch in microbatches if self.listens else ():
                self.note_forward((microbatch,), {})
            job.ran = job.ran or [args[0] for args, _ in self.forwards]
            return step(microbatches, **options)

        vars(runner)["step"] = kept_step
        self.until_over.callback(vars(runner).pop, "step")
        for chunk in runner.chunks:
            _CHECKS[id(chunk.module)] = self
            self.until_over.callback(_CHECKS.pop, id(chunk.module))


class RanJob(Job):
    """A step that a loop has run already; the batch is a list of microbatches for each data rank."""

    sees_loss = False
    mine: list[Microbatch]
    loss_fn: Any

    @contextmanager
    def watched(self, finish: Callable[[], None]) -> Iterator[None]:
        """Call `finish` when the step's gradients are reduced, on all ranks. The watch of first steps waits."""
        with paused([chunk.engine.first_steps for chunk in self.model.chunks]):
            self.model.chunks[-1].reducer.at_end = finish
            try:
                yield
            finally:
                self.model.chunks[-1].reducer.at_end = None

    def step(self, batch: Any) -> float:
        """See Job; the loop has run it."""
        return math.nan

    def parts(self, batch: Any) -> list[Any]:
        """See Job; what this rank was given, which may not be what its tensor-parallel group was given."""
        return self.mine

    def samples(self, batch: Any) -> int:
        """See Job."""
        tensor = first_tensor(batch)
        return tensor.shape[0] if tensor.dim() else 1

    def biases(self) -> dict[tuple[int, str], Tensor]:
        """See Job."""
        return self.before

    def keep_biases(self) -> None:
        """Before the step."""
        self.before = super().biases()


class LoopJob(RanJob, PlainJob):
    """Forwards and backwards of one wrapped model."""

    def __init__(self, ddp: DistributedDataParallel, loss_fn: Callable[[nn.Module, Microbatch], Any]) -> None:
        PlainJob.__init__(self, ddp, loss_fn, 1)
        self.keep_biases()


class PipelineLoopJob(RanJob, PipelineJob):
    """A step of a pipeline. ran: the microbatches as the runner was given them."""

    def __init__(self, runner: PipelineRunner, loss_fn: Callable[[nn.Module, Microbatch], Any]) -> None:
        PipelineJob.__init__(self, runner, 1)
        self.loss_fn = loss_fn
        self.ran: list[Any] = []
        self.keep_biases()

    def parts(self, batch: Any) -> list[Any]:
        """See Job."""
        return self.ran


class _LoopReference(Reference):
    """Runs each microbatch alone: they may have other lengths, and masks that have no dimension of samples."""

    def piece(self, batch: Any, number: int) -> Any:
        """See Reference."""
        microbatch = batch[number // self.microbatches][number % self.microbatches]
        return on_tensors(lambda tensor: tensor.to(self.device), microbatch)

    def pieces(self, batch: Any) -> list[Any]:
        """See Reference."""
        if getattr(self.config, "num_moe_experts", None) is not None:
            return super().pieces(batch)
        return [self.piece(batch, number) for number in range(self.data_ranks * self.microbatches)]


def _note_forward(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """The hook of a module. It holds no check, so that a copy of the module takes none along."""
    check = _CHECKS.get(id(module))
    if check is not None and module.training and torch.is_grad_enabled():
        check.note_forward(args, kwargs)


def _refuse_what_does_not_fit(job: RanJob, dtype: torch.dtype) -> None:
    """Raise MemoryError on all ranks if weights and gradients of the unsplit model do not fit on rank 0."""
    mine = {held.name: math.prod(held.place.shape) for held in job.model.held}
    answers = agree.gather((mine, free_bytes(job.model.device)), None, "the size of the reference")
    numels: dict[str, int] = {name: numel for theirs, _ in answers.values() for name, numel in theirs.items()}
    own = job.model.dtype
    of_element = 2 * dtype.itemsize + (2 * own.itemsize if own != dtype else 0)  # weights and gradients
    needed, free = sum(numels.values()) * of_element, answers[0][1]
    if needed > free:
        raise MemoryError(
            f"the unsplit model has {sum(numels.values()):,} parameters; its weights and gradients in {dtype} and "
            f"{own} take {needed / 2**30:.2f} GiB on rank 0, where {free / 2**30:.2f} GiB are free. Verify a model "
            "with fewer layers, or pass reference_dtype=torch.float32"
        )


def free_bytes(device: torch.device) -> int:
    """Bytes that a model may still take on a device."""
    if device.type != "cpu":
        return int(torch.get_device_module(device).mem_get_info(device)[0])
    meminfo = Path("/proc/meminfo")
    if not meminfo.exists():  # no Linux
        return 1 << 60
    lines = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
    return int(lines["MemAvailable"].split()[0]) * 1024


@contextmanager
def _kept_random_state(device: torch.device) -> Iterator[None]:
    """Keep the random numbers that follow: code that runs on rank 0 alone must not change them."""
    with torch.random.fork_rng([] if device.type == "cpu" else [device], device_type=device.type):
        yield


def kept(microbatch: Microbatch) -> Microbatch:
    """A microbatch's copy, because a loop may use the memory of its inputs again."""
    kept: Microbatch = on_tensors(lambda tensor: tensor.detach().clone(), microbatch)
    return kept


def _on_cpu(microbatches: Sequence[Microbatch]) -> list[Microbatch]:
    return [on_tensors(lambda tensor: cast(tensor, None, torch.device("cpu")), part) for part in microbatches]


def _digests(microbatch: Microbatch) -> list[str]:
    """Of each tensor, in order."""
    found: list[str] = []

    def note(tensor: Tensor) -> None:
        data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        found.append(f"{list(tensor.shape)} {hashlib.sha256(data).hexdigest()}")

    on_tensors(note, microbatch)
    return found
