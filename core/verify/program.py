"""``python -m core verify train.py ARGS``: run a user's program, and check the first step of the model that it trains.

Calls of modules are watched while the program runs. The first module that is called in training mode, and that no
other module calls, is the model; or the first pipeline that runs. Its inputs are kept until its gradients are whole.
For a model in our wrapper that is in ``finalize_model_grads``; for any other, when an optimizer of torch begins to
step, or gradients are clipped. Two steps are compared, the second one for what the first leaves behind.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.nn.utils.parametrize import ParametrizationList

from core.booster.mixed_precision.loss_scaled_optimizer import TorchAMPOptimizer
from core.distributed import DistributedDataParallel
from core.distributed.buffer.grad_placeholder import tensors_in
from core.groups import agree
from core.interface.whole import KEEPERS, NOTES, STARTS
from core.optimizer.loss_scaler import DynamicLossScaler, LossScaler
from core.optimizer.optimizer import MegatronOptimizer
from core.pipeline_parallel import PipelineRunner
from core.pipeline_parallel.forward_backward import DrawingStep
from core.verify import megatron
from core.verify.also_seen import dropped_by
from core.verify.asked import Asked, asked_by, execute, function_named
from core.verify.gathered import kept
from core.verify.loop import StepCheck, loss_of_call
from core.verify.losses import Noted, is_weighted, loss_by_tokens, loss_of_forward, loss_of_stages, with_captured
from core.verify.megatron_program import NOTHING_DRAWN, Schedules
from core.verify.megatron_program import builder_of as builder_of_megatron
from core.verify.microbatches import Microbatch
from core.verify.ran_jobs import LoopJob, PipelineLoopJob, RanJob, taped
from core.verify.report import GradientReport
from core.verify.structure import (
    State,
    buffers_without_values,
    builder_of,
    initialized_modules,
    state_of,
    structure_of,
    with_memory,
    with_state,
)
from core.verify.torch_model import TorchLoopJob, some_world, unwrapped
from core.verify.unsplit import is_changed, unsplit_structure
from core.verify.updates import Updates, watched_updates, with_updates

UNCOPYABLE = (TypeError, AttributeError, RuntimeError, ValueError, NotImplementedError, AssertionError)
# Classes and methods that scale a loss for torch optimizers, and how to read the factor. Our optimizers know theirs.
SCALES: tuple[tuple[type, str, Callable[[Any], float]], ...] = (
    (TorchAMPOptimizer, "scale_loss", lambda optimizer: optimizer.scaler.value),
    (torch.amp.GradScaler, "scale", lambda scaler: scaler.get_scale()),
)
SCALE_SEEN = 0.05  # most scales are powers of two; errors of 16-bit gradients are smaller than this
NAME_IT = "name a function that builds the model without any splitting: --whole module:function"


def main(arguments: Sequence[str]) -> int:
    """Run the program of the arguments, check it or record it, and return the exit status."""
    asked = asked_by(arguments)
    if asked.record is None:
        return run_program(asked)
    from core.verify.record.program import record_program

    return record_program(asked)


def run_program(asked: Asked) -> int:
    """Run the program, check its first two steps, and return the exit status; 0 if all gradients are right."""
    watch = ProgramWatch(asked)
    with watch.active():
        status = execute(asked)
        watch.show_the_rest()
    if watch.reports:
        return status if all(report.ok for report in watch.reports) else 1
    if status != 0:  # the program failed with its own message, or the ranks that it started have reported
        return status
    if not watch.calls and not watch.starts_ranks:
        why = watch.alone or "the program has called no model in training mode"
        print(f"python -m core verify: {why}, so nothing is compared")
        return 1
    if watch.calls:
        print("python -m core verify: the program has ended before its first step was complete; nothing is compared")
        return 1
    return 0


class ProgramWatch:
    """Watcher of module calls in a program; ``reports`` holds the reports of the compared steps."""

    def __init__(self, asked: Asked) -> None:
        self.asked = asked
        self.reports: list[GradientReport] = []
        self.noted: list[Noted] = []
        self.structures: list[nn.Module] = []  # unsplit models, without memory
        self.split: list[nn.Module] = []  # models with DTensors, which torch's DDP replaces by plain tensors
        self.checks: dict[int, ProgramCheck] = {}  # id of the called model -> its check
        self.inside: set[int] = set()  # ids of the modules inside these models
        self.open: list[ProgramCheck] = []  # checks of the model that is running
        self.depth = 0
        self.calls = 0
        self.drawing: DrawingStep | None = None  # forward step of get_forward_backward_func
        self.optimizers: list[MegatronOptimizer] = []
        self.scale = 1.0  # last factor by which a scaler multiplied the loss
        self.dropped = ""  # note about a forward without gradients in training mode
        self.starts_ranks = False  # True if the program has started ranks, which run the check
        self.alone = ""  # reason if a model runs before torch.distributed is initialized
        self.until_end = ExitStack()
        self.schedules: Schedules | None = None  # of Megatron Core

    @contextmanager
    def active(self) -> Iterator[None]:
        """Watch the program inside the context."""
        call = nn.Module.__call__

        def watched(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            self.before(module, args, kwargs)
            self.depth += 1
            try:
                return call(module, *args, **kwargs)
            finally:
                self.depth -= 1

        step = PipelineRunner.step

        def watched_step(runner: PipelineRunner, microbatches: Sequence[Any], **options: Any) -> Any:
            self.before_pipeline(runner, microbatches)
            self.depth += 1
            try:
                return step(runner, microbatches, **options)
            finally:
                self.depth -= 1

        with self.until_end as stack:
            stack.callback(register_module_module_registration_hook(self.keep_wrapped).remove)
            listening: tuple[tuple[list[Any], Any], ...] = (
                (KEEPERS, self.keep), (NOTES, self.note), (STARTS, self.record_ranks),
            )  # fmt: skip
            for listeners, listen in listening:
                listeners.append(listen)
                stack.callback(listeners.remove, listen)
            stack.enter_context(mock.patch.object(nn.Module, "__call__", watched))
            init, optimizer_init = TorchDDP.__init__, MegatronOptimizer.__init__

            def kept_init(wrapper: TorchDDP, module: nn.Module, *args: Any, **options: Any) -> None:
                self.keep(module)
                init(wrapper, module, *args, **options)

            def listed_init(optimizer: MegatronOptimizer, *args: Any, **options: Any) -> None:
                optimizer_init(optimizer, *args, **options)
                self.optimizers.append(optimizer)

            stack.enter_context(mock.patch.object(TorchDDP, "__init__", kept_init))
            stack.enter_context(mock.patch.object(MegatronOptimizer, "__init__", listed_init))
            stack.enter_context(mock.patch.object(PipelineRunner, "step", watched_step))
            for owner, name, scale_of in SCALES:
                stack.enter_context(mock.patch.object(owner, name, self._noting_scale(getattr(owner, name), scale_of)))
            stack.enter_context(watched_updates(self._updates))
            leave = dist.destroy_process_group

            def show_and_leave(group: Any = None) -> None:
                if group is None and dist.is_initialized() and dist.get_world_size() > 1:
                    self.show_the_rest()
                leave(group)

            stack.enter_context(mock.patch.object(dist, "destroy_process_group", show_and_leave))
            for owner in (LossScaler, DynamicLossScaler, torch.amp.GradScaler):
                stack.enter_context(mock.patch.object(owner, "update", self._ending_step(owner.update)))
            yield

    def _updates(self) -> list[Updates]:
        return [check.updates for check in self.checks.values() if check.updates is not None and check.listens]

    def _noting_scale(self, method: Callable[..., Any], scale_of: Callable[[Any], float]) -> Callable[..., Any]:
        def noting(holder: Any, *args: Any, **kwargs: Any) -> Any:
            if self.listens():
                self.scale = scale_of(holder)
            return method(holder, *args, **kwargs)

        return noting

    def _ending_step(self, update: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a scaler's ``update`` to drop the inputs of a step that it skipped."""

        def ending(scaler: Any, *args: Any, **kwargs: Any) -> Any:
            for check in self.checks.values():
                check.forget()
            return update(scaler, *args, **kwargs)

        return ending

    def scale_of(self, chunks: Sequence[Any]) -> float:
        """Return the loss scale in the gradients of these chunks."""
        mine = [optimizer for optimizer in self.optimizers if chunks[0] in optimizer.model_chunks]
        own = [optimizer.grad_scaler.value for optimizer in mine if optimizer.grad_scaler is not None]
        return own[0] if own else self.scale

    def listens(self) -> bool:
        """True until a step is over; the reference runs afterwards."""
        return all(check.listens for check in self.checks.values())

    def note(self, loss_fn: Callable[..., Any], arguments: tuple[Any, ...], per_token: bool) -> None:
        """Record a microbatch and its loss. A forward step calls this for each of its chunks; only the first counts."""
        if self.listens() and (self.drawing is None or self.drawing.position == 0):
            loss_fn, captured = with_captured(loss_fn)
            self.noted.append(Noted(loss_fn, kept(((*captured, *arguments), {})), per_token))
            for check in self.checks.values():
                check.advance(forwards=0)

    def record_ranks(self) -> None:
        """Record that the program starts ranks."""
        self.starts_ranks = True

    def keep_wrapped(self, parent: nn.Module, name: str, module: nn.Module | None) -> None:
        """Record the structure of a module that our wrapper takes as a child, before the wrapper changes it.

        Megatron Core's wrapper shows that the program has imported its schedules.
        """
        if name == "module" and module is not None and isinstance(parent, DistributedDataParallel):
            self.keep(module)
        elif megatron.is_wrapper(parent) and self.schedules is None:
            self.schedules = Schedules(self)
            self.until_end.enter_context(self.schedules.watched())

    def keep(self, model: nn.Module) -> None:
        """Record the structure of a model, unless it cannot be copied."""
        try:
            is_sharded = _has_dtensors(model)
            self.structures.append(unsplit_structure(model) if is_changed(model) else structure_of(model))
            if is_sharded:
                self.split.append(structure_of(model))  # not possible after `fully_shard`, which needs none
        except UNCOPYABLE:
            return

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Find the trained model and record its inputs. Called before each module."""
        if not self.listens():
            return
        if self.depth:
            for check in self.open:
                check.look_inside(module)
            return
        known = self.checks.get(id(module))
        if not module.training or not torch.is_grad_enabled():
            self.open = []
            if known is not None and torch.is_grad_enabled():
                known.also.forwards_in_eval += 1
                if known.updates is not None:  # its step is compared too
                    self.open = [known]
                    known.note_forward(args, kwargs)
            elif module.training and not self.dropped:
                self.dropped = dropped_by(unwrapped(module))
            return
        if known is None:
            is_model = id(module) not in self.inside and not isinstance(module, ParametrizationList)
            trains = is_model and any(param.requires_grad for param in module.parameters())
            if not trains:
                return
            if not dist.is_initialized() and int(os.environ.get("WORLD_SIZE", "1")) > 1:
                self.alone = f"WORLD_SIZE is {os.environ['WORLD_SIZE']} and the program starts no torch.distributed"
                return
            with some_world():
                known = self.check_of(module, kwargs)
            self.checks[id(module)] = known
            self.inside |= {id(part) for part in module.modules()}
        self.calls += 1
        self.open = [known]
        known.note_forward(args, kwargs)

    def before_pipeline(self, runner: PipelineRunner, microbatches: Sequence[Any]) -> None:
        """Record the microbatches of a pipeline's step. Called before the step."""
        if not self.listens():
            return
        known = self.checks.get(id(runner))
        if known is None:
            known = self.checks[id(runner)] = self._pipeline_check(runner, microbatches)
            self.inside |= {id(part) for chunk in runner.chunks for part in chunk.modules()}
        self.calls += 1
        self.open = [known]
        if isinstance(runner.forward_step, DrawingStep):
            self.drawing = runner.forward_step
            known.job.tapes = taped(self.drawing)
        for microbatch in microbatches:
            known.note_forward((microbatch,), {})

    def check_of(self, model: nn.Module, kwargs: Mapping[str, Any]) -> ProgramCheck:
        wrappers = [part for part in model.modules() if isinstance(part, DistributedDataParallel)]
        weighted = is_weighted(model, kwargs)
        loss_fn: Any = loss_by_tokens if weighted else loss_of_forward
        if self.asked.loss is not None:
            loss_fn, weighted = function_named(self.asked.loss), False
        if len(wrappers) > 1 or (wrappers and wrappers[0].groups.size("pp") > 1):
            raise ValueError(
                f"the program calls a {type(model).__name__} with {len(wrappers)} wrapped parts, or a stage of a "
                "pipeline, directly; the command sees pipelines that PipelineRunner runs: use check_gradients"
            )
        loss = loss_of_call(loss_fn)
        if wrappers:
            job = LoopJob(wrappers[0], loss)
            job.called = wrappers[0] if weighted else model  # its loss covers all ranks' labels
            job.inputs_to = getattr(model, "cast_to", None)
        else:
            before = _named(self.split, {name for name, _ in unwrapped(model).named_parameters()})
            job = TorchLoopJob(model, loss, before=before)
        job.per_token = job.per_token or weighted
        if isinstance(job, TorchLoopJob) and (not job.model.is_split or _has_dtensors(job.torch_model.module)):
            self.keep(job.torch_model.module)
        return ProgramCheck(self, job, module=job.model.chunks[0].module)

    def _pipeline_check(self, runner: PipelineRunner, microbatches: Sequence[Any]) -> ProgramCheck:
        if not all(isinstance(chunk, DistributedDataParallel) for chunk in runner.chunks):
            raise ValueError(
                "the stages of this pipeline are not in core.distributed.DistributedDataParallel, from which "
                "python -m core verify reads gradients: use wrap_stages"
            )
        draws = isinstance(runner.forward_step, DrawingStep)
        given = draws or any(part is not None for part in microbatches)
        if not agree.any(given, None, "the microbatches of a pipeline"):
            raise ValueError(
                "the microbatches are None on every rank: this forward step draws its data itself, so the command does "
                "not see it; pass the data to PipelineRunner.step, or use get_forward_backward_func"
            )
        loss_fn = loss_of_stages(runner) if self.asked.loss is None else function_named(self.asked.loss)
        return ProgramCheck(self, PipelineLoopJob(runner, loss_of_call(loss_fn)), runner.chunks[0].module)

    def end(self, report: GradientReport) -> None:
        """Print a report and end the program on all ranks, unless it continues."""
        self.show(report)
        if not self.asked.continues:
            raise SystemExit(0 if report.ok else 1)

    def show(self, report: GradientReport) -> None:
        """Print a report on rank 0."""
        self.reports.append(report)
        if int(os.environ.get("RANK", "0")) == 0 if not dist.is_initialized() else dist.get_rank() == 0:
            print(report, flush=True)
            if report.where is not None:
                print(report.where.table(), flush=True)

    def show_the_rest(self) -> None:
        """Print the reports of models that ran fewer steps than were asked for before the program ended."""
        for check in self.checks.values():
            if check.listens and check.job.ends is not None:
                check.job.ends.leave()
            check.compare_weights()
            if check.listens and check.report is not None:
                check.listens = False
                notes = (*check.report.notes, *filter(None, [check.also.in_eval()]))
                self.show(replace(check.report, notes=tuple(dict.fromkeys(notes))))


class ProgramCheck(StepCheck):
    """Check of a program's first two steps. The reference is built when a step is over."""

    def __init__(self, watch: ProgramWatch, job: RanJob, module: nn.Module) -> None:
        join = watch.asked.join
        join_fn = None if join is None else function_named(join)
        wanted = watch.asked.steps
        steps = 2 if wanted is None else wanted + 1  # the next step's first forward ends the last one
        super().__init__(job, self._whole, conclude=watch.end, join_fn=join_fn, steps=steps)
        self.updates = None if wanted is None else Updates(job)
        if self.updates is not None:
            self.until_over.enter_context(self.updates.listening())
        self.watch = watch
        self.module = module
        self.structure: nn.Module | None = None
        self.buffers: dict[str, Tensor] = {}
        self.loss_scale = 1.0
        self.state: dict[str, State] = {}  # flags and buffers before the step
        self.of_gpt = None
        if watch.asked.whole is None:
            self.of_gpt = builder_of(module) or builder_of_megatron(module)

    def forget(self) -> None:
        """See StepCheck."""
        super().forget()
        self.watch.noted.clear()

    def _noted(self) -> int:
        """See StepCheck."""
        return len(self.watch.noted)

    def begin_step(self) -> None:
        """Compare the weights after the last step, before the first forward of the next one. Collective."""
        self.compare_weights()
        if self.report is not None and (not self.report.ok or self.done == self.watch.asked.steps):
            self.listens = False
            self.until_over.close()
            self.conclude(self.report)

    def note_forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """See StepCheck."""
        self.begin_step()
        if not self.forwards:
            self.state = state_of(self.module)
        super().note_forward(args, kwargs)

    def compare_weights(self) -> None:
        """Compare the weights after the step whose gradients were compared, if the command was asked to. Collective."""
        if self.listens and self.report is not None and self.updates is not None and self.updates.is_open:
            with some_world():
                self.report = with_updates(self.report, self.updates, self.updates.compare())

    def _finish(self, after_clip: bool = False) -> None:
        """See StepCheck. Torch optimizers step after the scaler has removed the loss scale."""
        if self.listens:
            self.loss_scale = self.watch.scale_of(self.job.model.chunks)
            self.job.scale = 1.0 if isinstance(self.job, TorchLoopJob) else self.loss_scale
            self.skips = self.loss_scale != 1.0
        done = self.done
        with some_world():
            super()._finish(after_clip)
            if self.updates is not None and self.listens and self.done > done:
                self.updates.begin(self.before)

    def _compared(self, mine: list[Microbatch]) -> GradientReport:
        report = super()._compared(mine)
        if self.watch.dropped:
            report = replace(report, notes=(*report.notes, self.watch.dropped))
        first, scale = report.first_wrong, self.loss_scale
        if first is not None and scale != 1.0 and abs(first.ratio / scale - 1.0) < SCALE_SEEN:
            cause = (
                f"{scale:g} times too large, the loss scale: gradients are clipped before scaler.unscale_(optimizer)"
            )
            report = replace(report, cause=cause, where=None)
        elif first is not None and scale != 1.0 and abs(first.ratio * scale - 1.0) < SCALE_SEEN:
            cause = f"{scale:g} times too small, the loss scale: the loss is not multiplied by it"
            report = replace(report, cause=cause, where=None)
        return report if self.of_gpt is None else replace(report, reference=self.of_gpt[1])

    def _initialized(self) -> set[str]:
        """See StepCheck."""
        modules = initialized_modules(self.state, state_of(self.module))
        return {name for name, _ in self.module.named_buffers() if name.rpartition(".")[0] in modules}

    def prepare(self) -> None:
        """See StepCheck.

        Raises:
            ValueError: On all ranks, if the unsplit model or the loss is unknown.
        """
        noted = self.watch.noted
        if self.watch.drawing is not None and not agree.any(bool(noted), None, "calls of core.verify.note"):
            raise ValueError(
                "the forward step of get_forward_backward_func draws its data itself; call "
                "core.verify.note(mean_loss, inputs, labels) in it, right after it has drawn a microbatch"
            )
        if noted:
            self.noted = [each.microbatch for each in noted]
            if not agree.any(any(map(tensors_in, map(list, self.noted))), None, "the data of forward steps"):
                raise ValueError(NOTHING_DRAWN)
            self.job.loss_fn = loss_of_call(noted[0].loss_fn)
            self.job.per_token = noted[0].per_token
        names = {held.name for held in self.job.model.held}
        everyone = agree.gather(names, None, "the names of the model's parameters").values()
        names = set().union(*everyone)
        self.structure = _named(self.watch.structures, names)
        is_known = self.watch.asked.whole or self.structure is not None or self.of_gpt is not None
        wanted = set() if self.structure is None else set(buffers_without_values(self.structure))
        held = [pair for chunk in self.job.model.chunks for pair in chunk.module.named_buffers()]
        mine = {name: buffer.cpu() for name, buffer in held if name in wanted and not buffer.is_meta}
        answers = agree.gather(mine, None, "the buffers of the whole model")
        self.buffers = {name: buffer for rank in reversed(answers) for name, buffer in answers[rank].items()}
        error = None if is_known else ValueError(f"the whole model is not known; {NAME_IT}")
        agree.refuse(error, None, "the reference", ValueError)
        super().prepare()

    def _whole(self) -> nn.Module:
        if self.watch.asked.whole is not None:
            whole = function_named(self.watch.asked.whole)()
            assert isinstance(whole, nn.Module), f"--whole {self.watch.asked.whole} gave no module"
            return whole
        if self.of_gpt is not None:
            return self.of_gpt[0]()
        assert self.structure is not None, "looked for in `prepare`"
        whole = with_memory(self.structure, self.buffers)
        is_unsplit = len(self.job.model.chunks) == 1 and self.job.groups.size("pp") == 1 and not self.job.model.is_split
        return with_state(whole, self.state, state_of(self.module)) if is_unsplit else whole


def _has_dtensors(model: nn.Module) -> bool:
    return any(isinstance(param, DTensor) for param in model.parameters())


def _named(structures: Sequence[nn.Module], names: set[str]) -> nn.Module | None:
    """Return the first structure whose parameters have these names."""
    fitting = (each for each in structures if names == {name for name, _ in each.named_parameters()})
    return next(fitting, None)
