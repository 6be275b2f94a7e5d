"""Compare the weights after each optimizer step with the same optimizer on one process.

Gradients are compared before an optimizer gets them. Here one process takes these gradients unsplit and in fp64, clips
them by the norm of all of them, and steps an optimizer of the same class with the same settings. Each rank compares its
weights with the result, relative to the update.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from core.groups import agree
from core.optimizer.adopted_optimizer import AdoptedOptimizer, twin_of
from core.optimizer.optimizer import MegatronOptimizer
from core.optimizer.step.inner_optimizer import inner_optimizer
from core.verify import deepspeed, megatron
from core.verify.gathered import Held, slice_of
from core.verify.optimizer_steps import Clip, Step, cause_of_updates, gradients_of_step, joined
from core.verify.place import ALLOWANCE
from core.verify.ran_jobs import RanJob
from core.verify.reference import sent_from_rank_zero
from core.verify.report import Comparison, GradientReport
from core.verify.torch_model import CLIPS, gradient_of

RELATIVE = 1e-3  # error of an update by an optimizer in fp32
COARSE = 0.5  # bound of an update's error above which the update is not tested
SETTINGS = (bool, int, float, str, tuple, type(None), Tensor)  # types of settings of a param group
ONE_BY_ONE = {"foreach": False, "fused": None, "capturable": False}  # settings of the single process's optimizer
Key = tuple[int, str]


class Updates:
    """Optimizer steps of one job, and the weights that one process has after them.

    Args:
        job: The job.

    Attributes:
        is_open: True from the comparison of gradients to the comparison of the weights after the step.
        done: Number of steps after which weights were compared.
        notes: Findings that are no errors.
        cause: Likely cause of wrong weights.
        stopped: Reason why weights are no longer compared.
    """

    def __init__(self, job: RanJob) -> None:
        self.job = job
        modules = [chunk.module for chunk in job.model.chunks]
        params = {(n, name): param for n, module in enumerate(modules) for name, param in module.named_parameters()}
        self.params: dict[Key, Any] = {held.key: params[held.key] for held in job.model.trained}
        self.held: dict[int, Held] = {id(params[held.key]): held for held in job.model.trained}
        self.is_open = False
        self.done = 0
        self.notes: list[str] = []
        self.cause = self.stopped = ""
        self.largest = 0.0
        self.coarse: set[str] = set()  # parameters whose update is below the resolution of their dtype
        self.weights: dict[str, nn.Parameter] = {}  # on rank 0
        self.stepped: set[str] = set()  # on rank 0: parameters that some optimizer has stepped
        self.twins: dict[int, tuple[Any, Any]] = {}  # on rank 0: id of an optimizer -> it, and its twin

    def begin(self, gradients: dict[Key, Tensor]) -> None:
        """Take the gradients of a step, which are right. Collective over the world."""
        if self.stopped:
            return
        self.gradients = gradients
        self.steps: list[Step] = []
        self.optimizers: list[Any] = []
        self.clips: list[Clip] = []
        self.again = ""  # description of a second step with the same gradients
        self.at_step = dict(gradients)  # gradients in memory when an optimizer begins its step
        self.after: dict[Key, Tensor] = {}  # weights when an optimizer has ended its step
        self.before = self._weights()
        self.written: dict[Key, Tensor] = {}  # weights that were written before an optimizer began its step
        self.fresh: list[bool] = []  # for each optimizer's step, True if its state was empty
        if not self.done:
            trained = {held.name for held in self.job.model.trained}
            trained = set().union(*agree.gather(trained, None, "the trained parameters").values())
            weights = self.job.model.full_weights()
            self.weights = {name: nn.Parameter(weights[name].double()) for name in weights if name in trained}
        self.is_open = True

    def before_step(
        self, optimizer: Any, groups: Sequence[Sequence[Any]], params: Sequence[Any], own_clip: float = 0.0
    ) -> None:
        """Record an optimizer that begins its step.

        ``groups`` are the parameters that this rank steps, ``params`` all of the optimizer's. ``own_clip`` is the norm
        to which the optimizer itself clips, or 0.
        """
        names = tuple(tuple(self.held[id(p)].name for p in group if id(p) in self.held) for group in groups)
        mine = [self.held[id(param)] for param in params if id(param) in self.held]
        if not self.is_open or not mine:
            return
        now = self.job.gradients() if self.job.scale == 1.0 else self.gradients
        again = any(optimizer is known for known in self.optimizers)
        if again and all(torch.equal(now[held.key], self.at_step[held.key]) for held in mine):
            self.again = f"{type(optimizer).__name__} steps again with the gradients of its last step"
        self.at_step |= {held.key: now[held.key] for held in mine}
        if not self.after:
            weights = self._weights()
            self.written |= {key: weights[key] for key, value in self.before.items() if not _same(value, weights[key])}
        self.fresh.append(not optimizer.state)
        settings = tuple(
            {key: value for key, value in group.items() if key != "params" and isinstance(value, SETTINGS)}
            for group in optimizer.param_groups
        )
        absent = [p for p in params if gradient_of(p) is None and not deepspeed.stores_gradient(p)]
        without = frozenset(self.held[id(param)].name for param in absent if id(param) in self.held)
        self.steps.append(Step(type(optimizer).__name__, settings, names, without, tuple(self.clips), own_clip))
        self.optimizers.append(optimizer)
        self.clips = []
        if dist.get_rank() == 0 and not again and id(optimizer) not in self.twins and optimizer.state:
            self.stopped = f"{type(optimizer).__name__} has a state from before the first step"

    def after_step(self, params: Sequence[Any], left_out: Sequence[Any] = ()) -> None:
        """Copy the weights that an optimizer has stepped; it has left out those that have a gradient in memory only."""
        mine = [self.held[id(param)] for param in params if id(param) in self.held]
        if self.is_open and mine:
            names = {self.held[id(param)].name for param in left_out if id(param) in self.held}
            self.steps[-1] = replace(self.steps[-1], without=self.steps[-1].without | names)
            weights = self._weights()
            self.after |= {held.key: weights[held.key] for held in mine}

    def record_clip(self, params: Any, limit: Any, norm_type: float | None) -> None:
        """Record that the program clips gradients, by value if there is no ``norm_type``."""
        given = [params] if isinstance(params, Tensor) else params
        names = tuple(self.held[id(param)].name for param in given if id(param) in self.held)
        if self.is_open and names:
            self.clips.append(Clip(names, float(limit), norm_type))

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Follow the steps of torch's optimizers inside the context. Enter it after ``RanJob.watched``, which
        begins.
        """

        def before(optimizer: Any, *_: Any) -> None:
            if not is_wrapper(optimizer):
                groups = [group["params"] for group in optimizer.param_groups]
                self.before_step(optimizer, groups, [param for group in groups for param in group])

        def after(optimizer: Any, *_: Any) -> None:
            if not is_wrapper(optimizer):
                self.after_step([param for group in optimizer.param_groups for param in group["params"]])

        def before_megatron(optimizer: Any) -> None:
            if megatron.gathers_later(optimizer):
                self.stopped = "overlap_param_gather gathers them in the next forward; set it to False for the check"
            # Another rank may step the only shard of a parameter, so this is about all of the model's.
            for inner, groups in megatron.stepped(optimizer):
                self.before_step(inner, groups, list(self.params.values()), optimizer.config.clip_grad)

        def after_megatron(optimizer: Any, _: Any) -> None:
            if megatron.stepped(optimizer):
                self.after_step(list(self.params.values()))

        with ExitStack() as stack:
            stack.callback(register_optimizer_step_pre_hook(before).remove)
            stack.callback(register_optimizer_step_post_hook(after).remove)
            stack.enter_context(megatron.around_steps("step_with_ready_grads", before_megatron, after_megatron))
            engine = getattr(self.job.model, "outer", None)
            if engine is not None and (zero := deepspeed.zero_optimizer(engine)) is not None:
                step, groups = zero.step, deepspeed.groups_of(zero)
                params = [param for group in groups for param in group]

                def zero_step(*args: Any, **kwargs: Any) -> None:
                    self.before_step(zero.optimizer, groups, params, engine.gradient_clipping())
                    step(*args, **kwargs)
                    self.after_step(params)

                stack.enter_context(mock.patch.object(zero, "step", zero_step))
            yield

    def compare(self) -> list[Comparison]:
        """Compare the weights after the step with those of one process. Collective over the world."""
        self.is_open = False
        model = self.job.model
        now = self._weights()
        outside = [held.name for held in model.trained if not _same(self.after.get(held.key), now[held.key])]
        written = [held.name for held in model.trained if held.key in self.written]
        seen = (self.steps, outside, written, self.again, self.stopped)
        everyone = agree.gather(seen, None, "the optimizers' steps")
        steps, late, early, again, stops = map(list, zip(*everyone.values(), strict=True))
        outside, written = ([name for names in of_ranks for name in names] for of_ranks in (late, early))
        self.again, self.stopped = (next(filter(None, texts), "") for texts in (again, stops))
        if not any(steps):
            self.stopped = self.stopped or "no optimizer of torch or of core has stepped this model"
        if self.stopped:
            return []
        if written:
            self._take_over({**self.before, **self.written}, written)
            self._note(
                f"before an optimizer's step something else has written {written[0]!r} (the first of them): an update "
                "by hand, or a perturbation that is not taken back"
            )
        got, at_step = model.whole(self.gradients), model.whole(self.at_step)
        before = {name: value.detach().clone() for name, value in self.weights.items()}
        answer = self._on_one_process(steps, got, at_step) if dist.get_rank() == 0 else None
        notes, self.cause, self.stopped = agree.gather(answer, None, "the single process's step")[0] or ([], "", "")
        if self.stopped:
            return []
        self.done += 1
        for note in notes:
            self._note(note)
        after = {name: value.detach() for name, value in self.weights.items()}
        before, after = (sent_from_rank_zero(values, model.device) for values in (before, after))
        stepped = set().union(*(step.stepped for mine in steps for step in mine))
        mine = [
            self._comparison(held, before[held.name], after[held.name], self.after.get(held.key, now[held.key]))
            for held in model.trained
            if held.name in stepped
        ]
        answers = agree.gather(mine, None, "the weights after a step").values()
        everything = [comparison for of_rank in answers for comparison in of_rank]
        self.coarse |= {each.name for each in everything if each.bound >= COARSE}
        self.largest = max([self.largest, *(each.error for each in everything if each.bound < COARSE)])
        order = {name: number for number, name in enumerate(after)}
        wrong = sorted((c for c in everything if not c.error <= c.bound), key=lambda c: (order[c.name], c.rank))
        if wrong and not self.cause:
            self.cause = cause_of_updates(wrong, everything, steps)
        others = [name for name in order if name in outside or name not in stepped]
        if others:
            self._take_over(now, others)
        changed = [name for name in others if name in stepped]
        if changed:
            self._note(
                f"after an optimizer's step something else has written {changed[0]!r} (the first of them): a clamp, a "
                "load or an average of weights. The next step starts from these weights"
            )
        return wrong

    def line(self) -> str:
        """Describe right weights in one line."""
        if self.stopped:
            return f"weights are not compared: {self.stopped}"
        coarse = f"; below the resolution of their dtype, so not tested: {len(self.coarse)} parameters"
        return (
            f"weights after {self.done} step{'s' * (self.done > 1)} of the optimizer are those of one process, largest "
            f"relative error of an update {self.largest:.2g}{coarse if self.coarse else ''}"
        )

    def _comparison(self, held: Held, before: Tensor, after: Tensor, have: Tensor) -> Comparison:
        valid = slice_of(held.place, torch.ones(held.place.shape))
        start, want = held.slice_of(before).double(), held.slice_of(after).double()
        own = have.detach().cpu().double() * valid
        moved = want - start
        size, eps = float(moved.norm()), torch.finfo(have.dtype).eps
        rounding = ALLOWANCE * eps / 4 * float(want.norm()) * self.done
        scale = size or float(want.norm()) or 1.0
        bound = rounding / scale + (max(RELATIVE, 16 * eps) if size else 0.0)
        ratio = float(((own - start) * moved).sum()) / size**2 if size else float("nan")
        return Comparison(held.name, dist.get_rank(), self.done - 1, float((own - want).norm()) / scale, ratio, bound)

    def _take_over(self, weights: dict[Key, Tensor], names: Sequence[str]) -> None:
        """Continue with the program's weights of these parameters. Collective over the world."""
        whole = self.job.model.whole(weights)
        for name in names if whole else ():
            self.weights[name].data.copy_(whole[name])

    def _weights(self) -> dict[Key, Tensor]:
        """Return copies of this rank's weights. Collective if they are sharded."""
        with self.job.model.gathered(), torch.no_grad():
            return {key: _local(param).clone() for key, param in self.params.items()}

    def _note(self, note: str) -> None:
        if note not in self.notes:
            self.notes.append(note)

    def _on_one_process(
        self, steps: Sequence[Sequence[Step]], got: dict[str, Tensor], at_step: dict[str, Tensor]
    ) -> tuple[list[str], str, str]:
        """Make the step on this process.

        Returns:
            (notes, cause of wrong weights if the optimizer got wrong gradients, reason not to compare).
        """
        notes, cause = [], ""
        for number, optimizer in enumerate(self.optimizers):
            of_all = [of_rank[number] for of_rank in steps if number < len(of_rank)]
            step = joined(of_all)
            grads, note, wrong = gradients_of_step(
                step,
                {name: got[name].double() for name in step.stepped},
                {n: at_step[n].double() for n in step.stepped},
            )
            notes += [note] if note else []
            cause = cause or wrong
            notes += self._restarted(optimizer, step.stepped, is_fresh=self.fresh[number])
            try:
                self._twin_steps(optimizer, step, grads)
            except Exception as error:
                return notes, cause, f"a copy of {type(optimizer).__name__} does not step on one process: {error}"
        return notes, cause, ""

    def _restarted(self, optimizer: Any, names: Sequence[str], *, is_fresh: bool) -> list[str]:
        """Describe a state that a program drops between two steps. One process drops it too."""
        _, twin = self.twins.get(id(optimizer), (None, None))
        if twin is not None and twin.state and is_fresh:
            twin.state.clear()
            return [f"the state of {type(optimizer).__name__} was cleared after step {self.done}"]
        if twin is None and any(name in self.stepped for name in names):
            return [f"another {type(optimizer).__name__} makes step {self.done + 1} of {names[0]!r}, without a state"]
        self.stepped.update(names)
        return []

    def _twin_steps(self, optimizer: Any, step: Step, grads: dict[str, Tensor]) -> None:
        groups = [
            {**settings, **{key: value for key, value in ONE_BY_ONE.items() if key in settings}}
            | {"params": [self.weights[name] for name in names]}
            for settings, names in zip(step.groups, step.names, strict=True)
        ]
        for name, param in self.weights.items():
            param.grad = grads.get(name)
        if id(optimizer) not in self.twins:
            self.twins[id(optimizer)] = optimizer, _twin(optimizer, groups)
        _, twin = self.twins[id(optimizer)]
        for own, given in zip(twin.param_groups, groups, strict=True):
            own.update(given)
        twin.step()


def is_wrapper(optimizer: Any) -> bool:
    """Return True if an optimizer steps by another one, as those for sharpness-aware minimization do."""
    return any(isinstance(value, torch.optim.Optimizer) for value in vars(optimizer).values())


def _twin(optimizer: Any, groups: list[dict[str, Any]]) -> Any:
    if isinstance(optimizer, AdoptedOptimizer):
        return twin_of(optimizer.user, groups)
    if isinstance(optimizer, MegatronOptimizer):
        return inner_optimizer(replace(optimizer.config, optimizer_backend="single"), groups)
    return twin_of(optimizer, groups)


def _local(param: Any) -> Tensor:
    local: Tensor = param.detach().to_local() if hasattr(param, "to_local") else param.detach()
    return local


def _same(after: Tensor | None, now: Tensor) -> bool:
    return after is None or torch.equal(after, now)


def with_updates(report: GradientReport, updates: Updates, wrong: Sequence[Comparison]) -> GradientReport:
    """Add a comparison of weights to the report about the gradients of the same step."""
    report = replace(report, notes=tuple(dict.fromkeys((*report.notes, *updates.notes))))
    if updates.again:
        broken = f"step {updates.done} of the loop: {updates.again}; no backward ran between the two"
        return replace(report, broken=(broken,), weights=updates.line())
    if not wrong:
        return replace(report, weights=updates.line())
    title = f"weights after step {updates.done}, whose gradients were right"
    return replace(report, title=title, compared="updates", wrong=tuple(wrong), cause=updates.cause)


@contextmanager
def watched_updates(found: Callable[[], Sequence[Updates]]) -> Iterator[None]:
    """Report optimizer steps and gradient clipping to ``Updates`` while the context is active."""

    step = MegatronOptimizer.step_with_ready_grads

    def own_step(optimizer: MegatronOptimizer) -> bool:
        groups: list[list[Any]] = [[] for _ in optimizer.param_groups]
        for masters in optimizer.masters:
            for segment in masters.segments:
                groups[segment.group] += [shard.param for shard in segment.shards]
        params = [param for chunk in optimizer.model_chunks for param in chunk.parameters()]
        for updates in found():
            updates.before_step(optimizer, groups, params, min(filter(None, optimizer._limits), default=0.0))
        done = step(optimizer)
        segments = [segment for masters in optimizer.masters for segment in masters.segments if not segment.live]
        for updates in found():
            updates.after_step(params, [shard.param for segment in segments for shard in segment.shards])
        return done

    def noting(clip: Callable[..., Any], by_value: bool) -> Callable[..., Any]:
        def noting_clip(parameters: Any, limit: Any, norm_type: float = 2.0, *args: Any, **kwargs: Any) -> Any:
            parameters = parameters if isinstance(parameters, Tensor) else list(parameters)
            for updates in found():
                updates.record_clip(parameters, limit, None if by_value else norm_type)
            given = () if by_value else (norm_type,)
            return clip(parameters, limit, *given, *args, **kwargs)

        return noting_clip

    patches = [mock.patch.object(MegatronOptimizer, "step_with_ready_grads", own_step)]
    patches += [mock.patch.object(owner, name, noting(getattr(owner, name), "value" in name)) for owner, name in CLIPS]
    for patch in patches:
        patch.start()
    try:
        yield
    finally:
        for patch in reversed(patches):
            patch.stop()
