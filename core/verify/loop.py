"""verify_with: compare the first step of a user's own loop with one process that splits nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from core.context_parallel.sequence_split import OF_WHOLE
from core.distributed import DistributedDataParallel
from core.distributed.buffer.grad_placeholder import tensors_in
from core.distributed.finalize_model_grads import wrapped_chunks
from core.groups import agree
from core.pipeline_parallel import PipelineRunner
from core.verify.also_seen import AlsoSeen
from core.verify.buffers import buffers_of, other_buffers, set_buffers, written_buffers
from core.verify.check import NOISE, compare
from core.verify.diagnosis import BEFORE, ELSEWHERE, NO_SIZE, NO_SUM
from core.verify.gathered import cast, kept, on_tensors
from core.verify.microbatch_weights import find_shares, microbatches_at_fault
from core.verify.microbatches import (
    Given,
    JoinFn,
    Microbatch,
    data_of,
    digests_of,
    full_batch,
    other_ends,
    other_inputs,
    other_weights,
    other_wholes,
    same_data,
)
from core.verify.norms import squares_of, wrong_norm
from core.verify.ran_jobs import LoopJob, PipelineLoopJob, RanJob, refuse_what_does_not_fit
from core.verify.reference import ModelFn, Reference
from core.verify.report import GradientReport
from core.verify.torch_model import TorchLoopJob

OTHER_BACKWARDS = (
    "the loop does something else than one backward of loss_fn for each microbatch: one is left out or runs twice, its "
    "labels are other ones, or gradients are changed (clipped, scaled, zeroed) before finalize_model_grads"
)

_CHECKS: dict[int, StepCheck] = {}  # id of the wrapped module -> its check


def verify_with(
    model: nn.Module | PipelineRunner,
    build_whole: ModelFn,
    loss_fn: Callable[..., Any],
    *,
    bound: float | None = None,
    reference_dtype: torch.dtype = torch.float64,
    join_fn: JoinFn | None = None,
    mesh: DeviceMesh | None = None,
) -> StepCheck:
    """Check the first step of a loop, including its data, accumulation, and loss, which check_gradients does not see.

    Call this once, right before the first step, after weights are loaded. The inputs of each training forward are kept
    until ``finalize_model_grads``; without our wrapper, until a torch optimizer begins to step or gradients are
    clipped. Then the unsplit model runs over the microbatches of all data ranks, and every reduced gradient of the
    layout is compared with the mean over all microbatches. The first wrong step raises WrongGradientError on all ranks.
    The model must be deterministic. Collective over the default process group.

        verify_with(model, build_whole, lambda whole, *given: whole(*given).mean())
        for tokens, labels in batches:
            model(tokens, labels).mean().backward()
            finalize_model_grads([model])
            optimizer.step()

    Args:
        model: Model as the loop calls it: in our wrapper, in torch's DDP, sharded by fully_shard, split by DTensors, or
            plain. For a pipeline, its PipelineRunner; the microbatches of the first step are kept, and inputs that the
            first stage does not get (such as labels) are taken from the last stage.
        build_whole: Builds the same model without any splitting; it gets the layout's current weights.
        loss_fn: (unsplit model, *args, **kwargs of the forward) -> mean loss of one microbatch, not divided by
            anything; with ``config.calculate_per_token_loss`` (sum of losses, number of tokens). For a pipeline
            (unsplit model, microbatch). If labels are not among the forward's arguments, pass them by
            ``LoopCheck.note``. With a loss scale, loss_fn multiplies by it.
        bound: As in check_gradients.
        reference_dtype: As in check_gradients.
        join_fn: Under context parallelism, the parts of a tensor in rank order -> the complete tensor. By default each
            rank has a head and a tail chunk of dim 1, as from get_batch_on_this_cp_rank. Tensors that are equal on all
            these ranks are taken as complete.
        mesh: Device mesh of a model without our wrapper, if its own mesh has several dimensions and no names.

    Returns:
        The check. Its ``report`` is None until the step is over.

    Raises:
        MemoryError: On all ranks, before anything is built, if the unsplit model does not fit on rank 0.
        ValueError: If the model is a stage of a pipeline, or is already being verified.
    """
    modules: list[nn.Module]
    if isinstance(model, PipelineRunner):
        chunks = wrapped_chunks(model.chunks, "verify_with(PipelineRunner(chunks, ...), build_whole, loss_fn)")
        modules = [chunk.module for chunk in chunks]
    else:
        chunks = [part for part in model.modules() if isinstance(part, DistributedDataParallel)]
        modules = [chunks[0].module if chunks else model]
        if len(chunks) > 1 or (chunks and chunks[0].groups.size("pp") > 1):
            raise ValueError(
                "verify_with was given a stage of a pipeline, whose inputs are activations; pass the PipelineRunner "
                "that runs the stages"
            )
    if any(id(module) in _CHECKS for module in modules):
        raise ValueError("this model is being verified already; call verify_with once, before the first step")
    options: dict[str, Any] = {"bound": bound, "reference_dtype": reference_dtype, "join_fn": join_fn}
    if isinstance(model, PipelineRunner):
        return PipelineCheck(model, build_whole, loss_fn, **options)
    ddp = chunks[0] if chunks else TorchLoopJob(model, loss_of_call(loss_fn), mesh)
    return LoopCheck(ddp, build_whole, loss_fn, **options)


def loss_of_call(loss_fn: Callable[..., Any]) -> Callable[[nn.Module, Microbatch], Any]:
    """Convert loss_fn(model, *args, **kwargs) to a function of a model and a microbatch."""

    def loss_of(model: nn.Module, microbatch: Microbatch) -> Any:
        args, kwargs, *buffers = microbatch
        for values in buffers:
            set_buffers(model, values)
        return loss_fn(model, *args, **kwargs)

    return loss_of


class StepCheck:
    """Check of the first steps of a loop.

    A step with non-finite gradients under a loss scale does not count.

    Args:
        job: The loop's job, which detects the end of a step.
        conclude: Called with the report, on all ranks.
        steps: Number of steps to compare, as long as they are right.

    Attributes:
        report: The report; None until the check is over. The same on all ranks.
    """

    def __init__(
        self,
        job: RanJob,
        build_whole: ModelFn,
        bound: float | None = None,
        reference_dtype: torch.dtype = torch.float64,
        conclude: Callable[[GradientReport], None] = GradientReport.raise_if_wrong,
        join_fn: JoinFn | None = None,
        steps: int = 1,
    ) -> None:
        self.report: GradientReport | None = None
        self.steps = steps
        self.done = 0  # number of compared steps
        self.before: dict[tuple[int, str], Tensor] = {}  # gradients of the last step
        self.job = job
        self.build_whole = build_whole
        self.bound = bound
        self.reference_dtype = reference_dtype
        self.conclude = conclude
        self.join_fn = join_fn
        self.reference: _LoopReference | None = None
        self.listens = True  # until the step is over
        self.skips = False  # True if a loss scale skips steps whose gradients are not finite
        self.forwards: list[Microbatch] = []
        self.noted: list[Microbatch] = []
        self.starts: list[dict[str, Tensor]] = []  # floating-point buffers before each forward
        self.autocast: torch.dtype | None = None
        self.until_over = ExitStack()
        self.until_over.enter_context(job.watched(self._finish))
        self.squares: dict[str, float] | None = None  # squared norms of right gradients, until an optimizer has stepped
        if isinstance(job, TorchLoopJob):
            job.at_norm = self._compare_norm
        self.also = AlsoSeen(job)
        self.until_over.callback(self.also.stop)
        self.notes: tuple[str, ...] = ()  # of all compared steps
        self.data: dict[int, list[str]] = {}  # digests of the last step's microbatches by data rank
        self.wholes: list[str] = []  # digests of the batches that tokens were cut from

    def prepare(self) -> None:
        """Build the reference with the current weights. Collective over the world. Raises as verify_with."""
        refuse_what_does_not_fit(self.job, self.reference_dtype)
        device = self.job.model.device
        with _kept_random_state(device):
            build = self.build_whole
            self.reference = _LoopReference(
                self.job, lambda: build().to(device), self.reference_dtype, self.job.loss_fn
            )

    def note(self, *args: Any, **kwargs: Any) -> None:
        """Pass a microbatch to ``loss_fn`` in place of the forward's arguments.

        Needed if the loss takes inputs that the forward does not get, such as labels. Call this once for each
        microbatch of the first step; later calls do nothing.

            check = verify_with(model, build_whole, lambda whole, x, y: cross_entropy(whole(x), y))
            for x, y in batches:
                check.note(x, y)
                cross_entropy(model(x), y).backward()

        Args:
            *args: Positional arguments for ``loss_fn``, after the model.
            **kwargs: Keyword arguments for ``loss_fn``.
        """
        if self.listens:
            self.noted.append(kept((args, kwargs)))
            self.advance(forwards=0)

    def advance(self, *, forwards: int) -> None:
        """Publish that a microbatch begins, by a forward or by a call of ``note``, in loops that StepEnds follows."""
        if self.job.ends is not None:
            self.job.ends.advance(self._noted(), forwards=forwards)

    def _noted(self) -> int:
        """Return the number of microbatches of this step that the loop has noted."""
        return len(self.noted)

    def note_forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Record the arguments of a forward."""
        if not self.listens:
            return
        kind = self.job.model.device.type
        self.autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        self.advance(forwards=1)
        self.forwards.append(kept((args, kwargs)))
        self._record_buffers(at=len(self.starts))
        for tensor in tensors_in([list(args), kwargs]):
            self.wholes += digests_of(((getattr(tensor, OF_WHOLE, None),), {}))

    def _record_buffers(self, at: int) -> None:
        """Record the buffers before a forward, because forwards such as spectral norm's write them."""
        chunks = self.job.model.chunks
        if len(chunks) == 1 and self.job.groups.size("pp") == 1 and not self.job.model.is_split:
            self.starts[at:] = [buffers_of(chunks[0].module, self.starts[at - 1] if at else {})]

    def look_inside(self, module: nn.Module) -> None:
        """Detect autocast or cast weights in a module that is about to run inside the model."""
        if not self.listens:
            return
        if self.starts and module is self.job.model.chunks[0].module:  # DDP has broadcast its buffers since
            self._record_buffers(at=len(self.starts) - 1)
        kind = self.job.model.device.type
        if torch.is_autocast_enabled(kind):
            self.autocast = torch.get_autocast_dtype(kind)
        self.job.model.record_dtype(module)

    def forget(self) -> None:
        """Drop the inputs of a step that was skipped for non-finite gradients; the next step is compared instead."""
        self.forwards, self.noted, self.wholes, self.starts = [], [], [], []
        self.job.losses = ()

    def _finish(self, after_clip: bool = False) -> None:
        """Compare the step that has just ended. Collective over the world.

        Args:
            after_clip: True if the step was compared when its gradients were clipped. A rank may leave out the
                optimizer's step that follows, so this is not collective then.
        """
        if after_clip and not (self.noted or self.forwards):
            return
        if self.job.ends is not None:
            self.job.ends.meet(self._noted())
        if self.done and not agree.any(bool(self.noted or self.forwards), None, "the forwards of a step"):
            return  # for example, a second optimizer's step
        if self.skips and not self._is_finite():
            self.forget()
            return
        self.listens = False
        try:
            with _kept_random_state(self.job.model.device):
                if self.reference is None:
                    self.prepare()
                self.report = self._compared(self.noted or self.forwards)
                self.job.keep_biases()
            self.done += 1
            self.listens = self.report.ok and self.done < self.steps
        finally:
            self.reference = None
            self.forget()
            if not self.listens:
                self.before = {}
                self.until_over.close()
        if not self.listens:
            self.conclude(self.report)

    def _compare_norm(self, norm: float | None) -> None:
        """Compare the norm by which Megatron Core's optimizer clips with right gradients' norm. Collective."""
        if self.report is None or self.squares is None:
            return
        answers = agree.gather((norm, self.squares), None, "the gradient norm")
        self.squares = None
        squares = {rank: found for rank, (_, found) in answers.items()}
        texts = [wrong_norm(norm, squares) for norm, _ in answers.values() if norm]
        if any(texts):
            self.report = replace(self.report, broken=(next(filter(None, texts)),))
            self.listens = False
            self.until_over.close()
            self.conclude(self.report)

    def _initialized(self) -> set[str]:
        """Return buffers of modules that have initialised themselves from this step's first input."""
        return set()

    def _is_finite(self) -> bool:
        infinite = not all(bool(grad.isfinite().all()) for grad in self.job.gradients().values())
        return not agree.any(infinite, None, "gradients that are not finite")

    def _compared(self, mine: list[Microbatch]) -> GradientReport:
        job, groups, reference = self.job, self.job.groups, self.reference
        assert reference is not None, "prepared"
        axis, stage = "dp" if groups.dp is not None else "dp_cp", groups.rank("pp")
        end = 0 if stage == 0 else -1 if stage == groups.size("pp") - 1 else None
        parts = _on_cpu(mine) if groups.rank("tp") == 0 and end is not None else None
        given = Given(
            groups.rank(axis),
            groups.rank("cp"),
            groups.rank("tp"),
            end,
            [digests_of(part) for part in mine],
            parts,
            self.wholes,
            written_buffers(self.starts, job.model.chunks[0].module, len(mine), without=self._initialized()),
            job.weight_checksums(),
        )
        answers = agree.gather(given, None, "the microbatches of the first step")
        counts = {rank: len(given.digests) for rank, given in answers.items()}
        if len(set(counts.values())) > 1 or 0 in counts.values():
            raise ValueError(
                f"the forwards of the first step in training mode, or calls of note, are by rank {counts}; verify_with "
                "expects one for each microbatch, as many on every rank. Call the wrapped model, and note once for "
                "each microbatch"
            )
        batch = full_batch(answers, self.join_fn)
        job.mine, job.forwards = mine, self.forwards
        job.microbatches = reference.microbatches = len(mine)
        reference.scale = job.scale
        got = job.gradients()  # the diagnosis clears them
        self.also.end_step(got, len(mine))
        compute = self.autocast or job.model.dtype
        noise = NOISE.get(compute, 1e-2)
        with torch.autocast(job.model.device.type, self.autocast, enabled=self.autocast is not None):
            uneven = find_shares(job, reference, batch, got, self.bound, noise)
            job.losses = () if reference.shares else job.losses
            report = compare(
                job,
                reference,
                batch,
                bound=self.bound,
                noise=noise,
                steps=1,
                title=f"{_title(self.done)}, {_counted(dist.get_world_size(), 'rank')}, "
                f"{_counted(len(mine), 'microbatch')} each",
            )
            differences = [other_inputs(answers), other_wholes(answers), other_ends(answers)]
            notes = [*same_data(answers, self.data), *filter(None, (*differences, uneven)), *self.also.lines()]
            notes += other_buffers({rank: given.buffers[0] for rank, given in answers.items() if given.buffers})
            self.data = data_of(answers)
            report = replace(report, notes=tuple(dict.fromkeys((*self.notes, *notes))))
            self.notes = report.notes
            other, at_fault = "" if report.ok else other_weights(answers) or differences[0], ""
            unexplained = report.cause.startswith((NO_SUM, BEFORE, ELSEWHERE)) or NO_SIZE in report.cause
            if report.wrong and not other and unexplained:
                at_fault = microbatches_at_fault(job, reference, batch, report, got, self.before)
                is_in_loop = not at_fault and ELSEWHERE not in report.cause and BEFORE not in report.cause
                other = OTHER_BACKWARDS if is_in_loop else ""
        self.before = got if self.steps > 1 else {}
        self.squares = squares_of(job.model.trained, got) if isinstance(job, TorchLoopJob) and report.ok else None
        everywhere = len({entry.name for entry in report.wrong}) == report.parameters
        if at_fault or (everywhere and "of microbatches" in report.cause):  # the loop is at fault, not a module
            report = replace(report, cause=at_fault or report.cause, where=None)
        return replace(report, cause=f"{other}; then: {report.cause}") if other else report


class LoopCheck(StepCheck):
    """Check by verify_with of the forwards of one wrapped model.

    Args:
        ddp, build_whole, loss_fn, bound, reference_dtype, join_fn: As for verify_with, with ``ddp`` for its model.
    """

    def __init__(
        self,
        ddp: DistributedDataParallel | TorchLoopJob,
        build_whole: ModelFn,
        loss_fn: Callable[..., Any],
        bound: float | None,
        reference_dtype: torch.dtype,
        join_fn: JoinFn | None = None,
    ) -> None:
        job = ddp if isinstance(ddp, TorchLoopJob) else LoopJob(ddp, loss_of_call(loss_fn))
        called = job.torch_model.outer if isinstance(job, TorchLoopJob) else job.ddp.module
        super().__init__(job, build_whole, bound, reference_dtype, join_fn=join_fn)
        if isinstance(job, TorchLoopJob):  # its dtype is known only in the first forward
            refuse_what_does_not_fit(job, reference_dtype)
            for part in called.modules():
                self.until_over.callback(part.register_forward_pre_hook(_look_inside).remove)
        else:
            self.prepare()
        # Must run before fully_shard's hook, which casts the inputs.
        hook = called.register_forward_pre_hook(_record_forward, with_kwargs=True, prepend=True)
        self.until_over.callback(hook.remove)
        _CHECKS[id(called)] = self
        self.until_over.callback(_CHECKS.pop, id(called))


class PipelineCheck(StepCheck):
    """Check by verify_with of the microbatches of a pipeline's first step."""

    def __init__(
        self, runner: PipelineRunner, build_whole: ModelFn, loss_fn: Callable[..., Any], **options: Any
    ) -> None:
        super().__init__(PipelineLoopJob(runner, loss_of_call(loss_fn)), build_whole, **options)
        self.prepare()
        step = runner.step

        def kept_step(microbatches: Sequence[Any], **options: Any) -> Any:
            for microbatch in microbatches if self.listens else ():
                self.note_forward((microbatch,), {})
            return step(microbatches, **options)

        vars(runner)["step"] = kept_step
        self.until_over.callback(vars(runner).pop, "step")
        for chunk in runner.chunks:
            _CHECKS[id(chunk.module)] = self
            self.until_over.callback(_CHECKS.pop, id(chunk.module))


class _LoopReference(Reference):
    """Reference that runs each microbatch separately: lengths may differ, and masks may have no sample dimension."""

    def piece(self, batch: Any, number: int) -> Any:
        """See Reference."""
        microbatch = batch[number // self.microbatches][number % self.microbatches]
        return on_tensors(lambda tensor: tensor.to(self.device), microbatch)

    def pieces(self, batch: Any) -> list[Any]:
        """See Reference."""
        if getattr(self.config, "num_moe_experts", None) is not None:
            return super().pieces(batch)
        return [self.piece(batch, number) for number in range(self.data_ranks * self.microbatches)]


def _record_forward(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Record a training forward. A module hook without a reference to the check, so that modules can be copied."""
    check = _CHECKS.get(id(module))
    if check is not None and module.training and torch.is_grad_enabled():
        check.note_forward(args, kwargs)


def _look_inside(module: nn.Module, _: Any) -> None:
    """Pass any module of a model without our wrapper to ``StepCheck.look_inside``. A module hook."""
    for check in list(_CHECKS.values()):
        check.look_inside(module)


@contextmanager
def _kept_random_state(device: torch.device) -> Iterator[None]:
    """Restore the random state afterwards, because rank 0 runs more code than the other ranks."""
    with torch.random.fork_rng([] if device.type == "cpu" else [device], device_type=device.type):
        yield


def _title(step: int) -> str:
    titles = ("first step of the loop", "second step of the loop (the first was right)")
    return titles[step] if step < len(titles) else f"step {step + 1} of the loop (those before were right)"


def _counted(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 'es' if what.endswith('h') else 's'}"


def _on_cpu(microbatches: Sequence[Microbatch]) -> list[Microbatch]:
    return [on_tensors(lambda tensor: cast(tensor, None, torch.device("cpu")), part) for part in microbatches]
