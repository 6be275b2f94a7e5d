"""check_gradients: one model, one batch, computed twice - in the layout of the running ranks and on one process."""

from __future__ import annotations

import copy
import hashlib
import statistics
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from core import parallel_state
from core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from core.distributed.guard.first_steps import paused
from core.groups import agree
from core.groups.process_groups import ProcessGroups
from core.pipeline_parallel import PipelineRunner
from core.verify.causes import cause_of_bias, cause_of_gradient
from core.verify.diagnosis import Explanation
from core.verify.gathered import Held, cast, on_tensors
from core.verify.job import Job, LossFn, PipelineJob, PlainJob, SplitFn
from core.verify.place import ALLOWANCE, Where, in_any_layer, largest_of_layers
from core.verify.reference import Expected, ModelFn, Reference
from core.verify.report import Comparison, GradientReport
from core.verify.structure import builder_of
from core.verify.where import locate, random_module, shared_faults

BIAS_BOUND = 1e-5  # of the routers' biases, which move by equal steps
BOUND = 1e-10  # relative, in fp64; in other dtypes errors are compared with those of the reference in that dtype
# A parameter whose gradient is this much smaller than the whole gradient is all round-off; its error is measured
# against this share of the whole instead.
NOISE = {torch.float64: 1e-6, torch.float32: 1e-3, torch.bfloat16: 1e-2, torch.float16: 1e-2}
NAMES_SHOWN = 4
DEFAULT_WRAPPER = DistributedDataParallelConfig(initial_weights="broadcast")


def check_gradients(
    model_fn: Callable[[], nn.Module | PipelineRunner],
    loss_fn: LossFn,
    batch: Any,
    *,
    reference_fn: ModelFn | None = None,
    config: Any = None,
    ddp_config: DistributedDataParallelConfig | None = None,
    dtype: torch.dtype | None = torch.float64,
    reference_dtype: torch.dtype = torch.float64,
    microbatches: int = 1,
    steps: int = 2,
    bound: float | None = None,
    split_fn: SplitFn | None = None,
    pg_collection: ProcessGroups | None = None,
    title: str = "",
    ranks: int | None = None,
    sizes: Mapping[str, Any] | None = None,
    optimizer_fn: Callable[[Any], Any] | None = None,
) -> GradientReport:
    """Compare every gradient of a model in the running layout with those of one process that splits nothing.

    model_fn: builds this rank's model, plain or wrapped in DistributedDataParallel already; or a PipelineRunner over
    its wrapped stages. loss_fn(model, part): the mean loss over a part of the batch; with
    `config.calculate_per_token_loss` (sum of losses, number of tokens). A pipeline's forward step computes its loss
    itself, and loss_fn serves the reference alone. batch: the whole global batch, equal on all ranks: a tensor, or
    nested tuples, lists, dicts of tensors whose first dimension counts samples. Data-parallel ranks take equal parts in
    rank order, cut once more into `microbatches`. split_fn: a microbatch -> what this context-parallel rank holds of it
    (get_batch_on_this_cp_rank).
    reference_fn: builds the model without any splitting; by default `model_fn` where that does not split, and for our
    GPT the model of transformers that core.convert would write, where there is one. It gets the layout's
    weights; what it calls a stage's parameters, modules say (`global_names`, see core.distributed.contract).
    config, ddp_config: what the model is wrapped with; by default rank 0's weights are broadcast. dtype: model
    and batch are cast to it; None leaves them, and a model that came wrapped keeps its own. steps: gradients are
    compared after each of so many steps without an update. bound: on the relative error; by default 1e-10 in fp64. In
    other dtypes the reference runs in fp64 and in that dtype, and a gradient may be off by 8 times what that costs it.
    ranks: outside of a process group, start so many processes on gloo; everything passed must then be importable and
    picklable. sizes: arguments of initialize_model_parallel, where no groups are up yet. optimizer_fn: (the wrapped
    model or the PipelineRunner) -> its optimizer. One step then follows right gradients, and parameters that have a
    gradient and do not move are a fault.

    Returns the same report on every rank. Collective over the default process group. The model must be
    deterministic (no dropout, no batch statistics): a random one is reported as such. If something is wrong that no
    reduction explains, the report says in which module it begins.

        report = check_gradients(build_model, mean_loss, (inputs, labels), ranks=4)
        report.raise_if_wrong()
    """
    given = {**locals(), "ranks": None, "pg_collection": None}
    if ranks is not None:
        if dist.is_initialized():
            raise ValueError(
                f"ranks={ranks} starts processes, but this one is in a process group already; leave it out"
            )
        from core.verify.rank_pool import RankFailure, RankPool

        with RankPool(ranks) as pool:
            try:
                report: GradientReport = pool.run(check_gradients, ranks, (), given)
            except RankFailure as failure:  # raised here, without the frames of the pool
                raise failure.refusal or RankFailure(str(failure)) from None
            return report
    if not dist.is_initialized():
        raise RuntimeError(
            "check_gradients compares ranks, and torch.distributed is not started; start it (torchrun), or pass "
            "ranks=4 to let check_gradients start processes of its own"
        )
    with _groups(pg_collection, sizes) as groups:
        model = model_fn()
        _check_axes(groups, model, split_fn)
        job: Job
        called: Any = model
        if isinstance(model, PipelineRunner):
            job = PipelineJob(model, microbatches, split_fn)
        else:
            called = ddp = _wrapped(model, config, ddp_config or DEFAULT_WRAPPER, groups, dtype)
            job = PlainJob(ddp, loss_fn, microbatches, split_fn)
        compute = job.model.dtype
        batch = on_tensors(lambda t: cast(t, dtype and compute, job.model.device), batch)
        build, kind = _reference_builder(model_fn, reference_fn, job, model)
        reference = Reference(job, build, reference_dtype, loss_fn)
        title = title or f"{dist.get_world_size()} ranks"
        noise = NOISE.get(compute, 1e-2)
        with paused([chunk.engine.first_steps for chunk in job.model.chunks]):
            report = compare(job, reference, batch, bound=bound, noise=noise, steps=steps, title=title)
            report = replace(report, reference=kind)
        if optimizer_fn is not None and report.ok:
            report = replace(report, broken=_left_by_optimizer(job, optimizer_fn(called)))
        return report


def _check_axes(groups: ProcessGroups, model: Any, split_fn: SplitFn | None) -> None:
    if groups.size("pp") > 1 and not isinstance(model, PipelineRunner):
        raise ValueError(
            f"pipeline_model_parallel_size is {groups.size('pp')}, and model_fn gave a {type(model).__name__}: how "
            "stages run is the schedule's affair. Let model_fn return a PipelineRunner over the wrapped stages, and "
            "pass reference_fn, which builds the whole model"
        )
    if groups.size("cp") > 1 and split_fn is None:
        raise ValueError(
            f"context_parallel_size is {groups.size('cp')}, so a rank holds a part of each sequence, and only you know "
            "which tensors of the batch have one; pass split_fn=get_batch_on_this_cp_rank, or a function like it"
        )


@contextmanager
def _groups(pg_collection: ProcessGroups | None, sizes: Mapping[str, Any] | None) -> Iterator[ProcessGroups]:
    """The given groups, parallel_state's, or groups of these sizes for as long as the check takes."""
    if sizes is not None and (pg_collection is not None or parallel_state.model_parallel_is_initialized()):
        raise ValueError(f"sizes={dict(sizes)} would make groups, and there are groups already; leave it out")
    if pg_collection is not None:
        yield pg_collection
    elif parallel_state.model_parallel_is_initialized():
        yield parallel_state.get_process_groups()
    else:
        parallel_state.initialize_model_parallel(**(sizes or {}))
        try:
            yield parallel_state.get_process_groups()
        finally:
            parallel_state.destroy_model_parallel()


def _wrapped(
    model: nn.Module,
    config: Any,
    ddp_config: DistributedDataParallelConfig,
    groups: ProcessGroups,
    dtype: torch.dtype | None,
) -> DistributedDataParallel:
    if isinstance(model, DistributedDataParallel):
        return model
    if dtype is not None:
        model = model.to(dtype)
    return DistributedDataParallel(config, ddp_config, model, pg_collection=groups)


def _reference_builder(
    model_fn: Callable[[], Any], reference_fn: ModelFn | None, job: Job, model: nn.Module | PipelineRunner
) -> tuple[ModelFn, str]:
    """Function that builds the whole model, and its kind in words, where there is a choice."""
    if reference_fn is not None:
        return reference_fn, ""
    of_gpt = builder_of(job.model.chunks[0].module)
    if of_gpt is not None:
        return of_gpt
    if isinstance(model, PipelineRunner):
        raise ValueError("this model comes in stages; pass reference_fn, which builds it whole")
    if job.model.is_split:
        raise ValueError(
            "this model is split over tensor or expert parallelism; pass reference_fn, which builds it without any "
            "splitting"
        )
    # Wrapping is collective and the reference is built on one rank only: a model that came wrapped is copied.
    (chunk,) = job.model.chunks
    return (lambda: copy.deepcopy(chunk.module)) if model is chunk else model_fn, ""


def compare(
    job: Job, reference: Reference, batch: Any, *, bound: float | None, noise: float, steps: int, title: str
) -> GradientReport:
    """Run steps and compare each with the reference. Collective over the world."""
    largest = share = loss_error = loss_bound = 0.0
    digests: list[str] = []
    wrong: list[Comparison] = []
    cause = drift = ""
    details: tuple[str, ...] = ()
    where: Where | None = None
    random: str | None = None
    expected: Expected | None = None
    for step in range(steps):
        if expected is None or reference.moves:
            expected = reference.step(batch)
            if job.per_token and job.scale != 1.0:
                job.token_weight = reference.token_weight = 1.0 / (expected.tokens or 1.0)
            allowed = Allowed(expected, noise, bound, job.model.dtype)
        biases = job.biases()
        loss = job.step(batch)
        if job.sees_loss:
            # The sum of many losses of either sign can be small: measured against one at least.
            loss_error = max(loss_error, abs(loss - expected.loss) / max(abs(expected.loss), 1.0))
        loss_bound = allowed.loss()
        got = job.gradients()
        digests.append(_digest(got))
        mine = [
            _comparison(job, held, step, got[held.key], expected.grads[held.name], allowed)
            for held in job.model.trained
        ]
        mine += [_bias_comparison(held, step, expected.biases[held.name]) for held in job.model.biases]
        everyone = [comparison for rank in _from_all(mine) for comparison in rank]
        order = {name: number for number, name in enumerate([*expected.grads, *expected.biases])}
        largest = max([largest, *(c.error for c in everyone)])
        share = max([share, *(c.error / c.bound for c in everyone)])
        wrong = sorted((c for c in everyone if not c.error <= c.bound), key=lambda c: (order[c.name], c.rank))
        if wrong or not loss_error <= loss_bound:
            moved = {held.key: held.tensor - biases[held.key] for held in job.model.biases}
            for held in job.model.biases:  # so that a backward of the diagnosis chooses the same experts
                held.tensor.copy_(biases[held.key])
            names = list(dict.fromkeys(c.name for c in wrong))
            random = random_module(reference, batch)
            if random is not None:
                cause = (
                    f"the model is random: {random} gives another output when the reference runs a second time on the "
                    "same batch, so nothing can be compared; set dropout to 0"
                )
                break
            explanation = _explain(job, reference, expected, batch, got, names, moved)
            cause, details = explanation.cause, explanation.details
            if expected.noise and cause and not explanation.of_reduction:
                cause += "; in this dtype a wrong factor of a reduction looks like that too: check once more in fp64"
            if not explanation.of_reduction or not loss_error <= loss_bound:
                options: dict[str, Any] = {
                    "bound": allowed.least,
                    "noise": noise,
                    "parameters": list(expected.grads),
                    "wrong": names,
                    "factor": job.factor_of_gradients(expected.tokens),
                }
                where = locate(job, reference, batch, **options)
            if step > 0 and cause:
                cause += f" (only from step {step} on: the steps before left something behind)"
            break
        drift = drift or job.drift()
    assert expected is not None, f"steps must be 1 at least, got {steps}"
    if wrong or not loss_error <= loss_bound:
        broken: tuple[str, ...] = ()
    else:
        broken = shared_faults(reference, expected, batch)
    if not loss_error <= loss_bound and random is None:
        then = f"; of the gradients: {cause}" if cause else ""
        cause = f"the forward passes differ already, relative error of the loss {loss_error:.3g}{then}"
    return GradientReport(
        title=title,
        bound=allowed.bound,
        parameters=len(expected.grads),
        largest_error=largest,
        loss_error=loss_error,
        wrong=tuple(wrong),
        cause=cause,
        unmoved=tuple(name for name, norm in allowed.norms.items() if norm == 0.0),
        digest=hashlib.sha256(repr(_from_all(digests)).encode()).hexdigest()[:16],
        details=details,
        drift=drift,
        loss_bound=loss_bound,
        share=share,
        names=tuple(expected.grads),
        where=where,
        broken=broken,
    )


class Allowed:
    """Allowed relative error of a gradient: `bound`, or ALLOWANCE times what the layout's dtype costs the reference.

    A parameter of few elements can be right by chance in the reference, so the cost is the largest of this parameter in
    all layers, and the middle one of all parameters at least.
    """

    def __init__(self, expected: Expected, noise: float, bound: float | None, dtype: torch.dtype) -> None:
        self.expected = expected
        self.norms = {name: float(grad.double().norm()) for name, grad in expected.grads.items()}
        self.floor = noise * sum(norm**2 for norm in self.norms.values()) ** 0.5
        self.bound = bound if bound is not None or expected.noise else BOUND
        self.eps = torch.finfo(dtype).eps
        costs = {name: cost / (self.scale(name) or 1.0) for name, cost in expected.noise.items()}
        self.costs = largest_of_layers(costs)
        self.middle = max(statistics.median(costs.values()) if costs else 0.0, self.eps / 4)

    @property
    def least(self) -> float:
        """Allowed error of a tensor where the dtype costs the reference nothing."""
        return max(self.bound or 0.0, ALLOWANCE * self.eps / 4 if self.expected.noise else 0.0)

    def scale(self, name: str) -> float:
        """Norm that an error is relative to."""
        return max(self.norms[name], self.floor)

    def gradient(self, name: str) -> float:
        """The largest relative error of a parameter that is right."""
        if self.bound is not None:
            return self.bound
        return ALLOWANCE * max(self.costs[in_any_layer(name)], self.middle)

    def loss(self) -> float:
        """The same of the loss."""
        if self.bound is not None:
            return self.bound
        return ALLOWANCE * max(self.expected.loss_noise / max(abs(self.expected.loss), 1.0), self.eps)


def _explain(
    job: Job,
    reference: Reference,
    expected: Expected,
    batch: Any,
    got: dict[tuple[int, str], Tensor],
    names: list[str],
    moved: dict[tuple[int, str], Tensor],
) -> Explanation:
    """The likely cause of what is wrong; of a loss alone nothing is known yet."""
    if not names:
        return Explanation("", of_reduction=False)
    if names[0] in expected.biases:
        return cause_of_bias(job, batch, names[0], moved)
    return cause_of_gradient(job, reference, expected, batch, got, names)


def _left_by_optimizer(job: Job, optimizer: Any) -> tuple[str, ...]:
    """Parameters that have a gradient and that a step does not change, in words. Collective."""
    grads = job.model.gradients()
    with job.model.gathered():
        before = {held.key: held.tensor.detach().clone() for held in job.model.trained if bool(grads[held.key].any())}
    optimizer.step()
    with job.model.gathered():
        left = [h.name for h in job.model.trained if h.key in before and torch.equal(before[h.key], h.tensor)]
    everyone = agree.gather(left, None, "the step of the optimizer")
    names = list(dict.fromkeys(name for found in everyone.values() for name in found))
    if not names:
        return ()
    ranks = [rank for rank, found in everyone.items() if found]
    more = f" and {len(names) - NAMES_SHOWN} more" if len(names) > NAMES_SHOWN else ""
    return (
        f"optimizer: {len(names)} parameters have a gradient, and a step does not move them on ranks {ranks}: "
        f"{', '.join(map(repr, names[:NAMES_SHOWN]))}{more}. Make it of all parameters of the wrapped model, after the "
        "wrap; it may hold those of a copy or of a part",
    )


def _from_all(value: Any) -> list[Any]:
    return list(agree.gather(value, None, "the oracle's findings").values())


def _comparison(job: Job, held: Held, step: int, got: Tensor, whole: Tensor, allowed: Allowed) -> Comparison:
    scale, bound = allowed.scale(held.name), allowed.gradient(held.name)
    want = held.slice_of(whole).double()
    have = got.detach().cpu().double()
    if have.shape != want.shape:
        raise ValueError(
            f"rank {dist.get_rank()}: the gradient of {held.place.local_name!r} is {list(have.shape)} and this rank's "
            f"slice of the reference {list(want.shape)}"
        )
    size = float(want.norm())
    error = float((have - want).norm()) / scale if scale > 0 else float(have.norm())
    ratio = float((have * want).sum()) / size**2 if size > 0 else float("nan")
    return Comparison(held.name, dist.get_rank(), step, error, ratio, bound)


def _bias_comparison(held: Held, step: int, want: Tensor) -> Comparison:
    have, want = held.tensor.detach().cpu().double(), want.double()
    size = float(want.norm())
    error = float((have - want).norm()) / max(size, 1e-30)
    ratio = float((have * want).sum()) / max(size, 1e-30) ** 2
    return Comparison(held.name, dist.get_rank(), step, error, ratio, BIAS_BOUND)


def _digest(grads: dict[tuple[int, str], Tensor]) -> str:
    digest = hashlib.sha256()
    for grad in grads.values():
        digest.update(grad.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
