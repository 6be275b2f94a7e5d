"""check_gradients: compute one batch in the layout of the running ranks and on one process, and compare."""

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
from core.verify.buffers import other_buffers, restored, starts_of
from core.verify.causes import cause_of_bias, cause_of_gradient
from core.verify.diagnosis import Explanation
from core.verify.gathered import Held, cast, on_tensors
from core.verify.job import Job, LossFn, PipelineJob, PlainJob, SplitFn
from core.verify.place import ALLOWANCE, Where, in_any_layer, largest_of_layers
from core.verify.reference import Expected, ModelFn, Reference
from core.verify.report import Comparison, GradientReport
from core.verify.structure import builder_of
from core.verify.where import locate, random_module, shared_faults

BIAS_BOUND = 1e-5  # for the routers' biases, which move by equal steps
BOUND = 1e-10  # relative, in fp64; in other dtypes the reference's own rounding error sets the bound
# A gradient this much smaller than the norm over all parameters is pure round-off. Its error is measured relative to
# this share of that norm instead.
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
    """Compare every gradient of a model in the running layout with a single process that splits nothing.

    A wrong reduction trains without an error message, only worse; this check finds it and names the likely cause. If no
    reduction explains the error, the report names the module where it begins. The model must be deterministic (no
    dropout); a random one is reported as such. If forwards write buffers, as a spectral norm does, every microbatch
    starts from the buffers that its rank had before the check. Collective over the default process group.

        report = check_gradients(build_model, mean_loss, (inputs, labels), ranks=4)
        report.raise_if_wrong()

    Args:
        model_fn: Builds this rank's model, plain or already wrapped in DistributedDataParallel, or a PipelineRunner
            over its wrapped stages.
        loss_fn: (model, part of the batch) -> mean loss; with ``config.calculate_per_token_loss`` (sum of losses,
            number of tokens). A pipeline's forward step computes its own loss, so only the reference uses loss_fn then.
        batch: The complete global batch, the same on all ranks: a tensor, or nested tuples, lists, and dicts of tensors
            whose first dimension counts samples. Data-parallel ranks take equal parts in rank order, each cut into
            ``microbatches``.
        reference_fn: Builds the unsplit model, which then gets the layout's weights. Defaults to ``model_fn`` if that
            does not split; for our GPT, to the transformers model of ``python -m core convert``, if there is one.
            Modules declare different names of a stage's parameters by ``global_names`` (see core.distributed.contract).
        config: Config to wrap the model with.
        ddp_config: DDP config to wrap the model with; by default rank 0's weights are broadcast.
        dtype: Model and batch are cast to it. None leaves them; a model that is already wrapped keeps its dtype.
        reference_dtype: Dtype of the reference.
        microbatches: Number of microbatches per data-parallel rank.
        steps: Gradients are compared after each of this many steps without an update.
        bound: Allowed relative error. Defaults to 1e-10 in fp64. In other dtypes the reference also runs in that dtype,
            and a gradient may be off by 8 times the error that this causes.
        split_fn: A microbatch -> the part of this context-parallel rank (get_batch_on_this_cp_rank).
        pg_collection: Process groups; defaults to those of ``parallel_state``.
        title: First words of the report.
        ranks: Outside a process group, start this many gloo processes. All arguments must then be importable and
            picklable.
        sizes: Arguments of initialize_model_parallel, if no groups exist yet.
        optimizer_fn: (wrapped model or PipelineRunner) -> its optimizer. If the gradients are right, it takes one step,
            and parameters that have a gradient but do not move are reported.

    Returns:
        The report, the same on every rank.

    Raises:
        ValueError: If the arguments do not fit the layout.
        RuntimeError: If torch.distributed is not initialized and ``ranks`` is None.
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
            except RankFailure as failure:  # raised without the pool's frames
                raise failure.refusal or RankFailure(str(failure)) from None
            return report
    if not dist.is_initialized():
        raise RuntimeError(
            "check_gradients compares ranks, but torch.distributed is not initialized; start the program with "
            "torchrun, or pass ranks=4 to let check_gradients start processes"
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
        starts = starts_of(job)
        reference = Reference(job, build, reference_dtype, loss_fn, starts)
        title = title or f"{dist.get_world_size()} ranks"
        noise = NOISE.get(compute, 1e-2)
        chunks = job.model.chunks
        with paused([chunk.engine.first_steps for chunk in chunks]), restored([c.module for c in chunks]) as written:
            report = compare(job, reference, batch, bound=bound, noise=noise, steps=steps, title=title)
        notes = other_buffers(
            {n: {name: start[name] for name in written & start.keys()} for n, start in enumerate(starts)}
        )
        report = replace(report, reference=kind, notes=tuple(notes))
        if optimizer_fn is not None and report.ok:
            report = replace(report, broken=_left_by_optimizer(job, optimizer_fn(called)))
        return report


def _check_axes(groups: ProcessGroups, model: Any, split_fn: SplitFn | None) -> None:
    if groups.size("pp") > 1 and not isinstance(model, PipelineRunner):
        raise ValueError(
            f"pipeline_model_parallel_size is {groups.size('pp')}, but model_fn returned a {type(model).__name__}, "
            "which does not schedule stages. Return a PipelineRunner over the wrapped stages from model_fn, and pass "
            "a reference_fn that builds the unsplit model"
        )
    if groups.size("cp") > 1 and split_fn is None:
        raise ValueError(
            f"context_parallel_size is {groups.size('cp')}, so a rank holds a part of each sequence, and only you know "
            "which tensors of the batch have one; pass split_fn=get_batch_on_this_cp_rank, or a function like it"
        )


@contextmanager
def _groups(pg_collection: ProcessGroups | None, sizes: Mapping[str, Any] | None) -> Iterator[ProcessGroups]:
    """Yield the given groups, parallel_state's, or groups of these sizes that exist during the check."""
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
    """Return a function that builds the unsplit model, and a description of it if there is a choice."""
    if reference_fn is not None:
        return reference_fn, ""
    of_gpt = builder_of(job.model.chunks[0].module)
    if of_gpt is not None:
        return of_gpt
    if isinstance(model, PipelineRunner):
        raise ValueError("this model is split into stages; pass a reference_fn that builds the unsplit model")
    if job.model.is_split:
        raise ValueError(
            "this model is split over tensor or expert parallelism; pass reference_fn, which builds it without any "
            "splitting"
        )
    # Wrapping is collective but only one rank builds the reference, so an already wrapped model is copied.
    (chunk,) = job.model.chunks
    return (lambda: copy.deepcopy(chunk.module)) if model is chunk else model_fn, ""


def compare(
    job: Job, reference: Reference, batch: Any, *, bound: float | None, noise: float, steps: int, title: str
) -> GradientReport:
    """Run the steps and compare each with the reference. Collective over the world.

    Args:
        job: Model and steps of the layout.
        reference: The unsplit model.
        batch: The complete global batch.
        bound: Allowed relative error; None derives it from the dtype.
        noise: Share of the norm over all gradients below which a gradient is round-off.
        steps: Number of steps.
        title: First words of the report.
    """
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
            # Losses of both signs can cancel, so the error is relative to 1 at least.
            loss_error = max(loss_error, abs(loss - expected.loss) / max(abs(expected.loss), 1.0))
        loss_bound = allowed.loss()
        got = job.gradients()
        digests.append(_digest(got))
        mine = [
            comparison(job, held, step, got[held.key], expected.grads[held.name], allowed) for held in job.model.trained
        ]
        mine += [_bias_comparison(held, step, expected.biases[held.name]) for held in job.model.biases]
        everyone = [comparison for rank in _from_all(mine) for comparison in rank]
        order = {name: number for number, name in enumerate([*expected.grads, *expected.biases])}
        largest = max([largest, *(c.error for c in everyone)])
        share = max([share, *(c.error / c.bound for c in everyone)])
        wrong = sorted((c for c in everyone if not c.error <= c.bound), key=lambda c: (order[c.name], c.rank))
        if wrong or not loss_error <= loss_bound:
            moved = {held.key: held.tensor - biases[held.key] for held in job.model.biases}
            for held in job.model.biases:  # so that the diagnosis routes tokens to the same experts
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
    """Allowed relative error of each gradient: ``bound``, or ALLOWANCE times the rounding error of the layout's dtype.

    The rounding error is measured on the reference. A parameter of few elements can be exact by chance, so the largest
    error of this parameter in all layers counts, and at least the median over all parameters.

    Args:
        expected: Gradients of the reference.
        noise: Share of the norm over all gradients below which a gradient is round-off.
        bound: Fixed bound, if any.
        dtype: The layout's dtype.
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
        """Allowed error of a tensor that is exact in the reference."""
        return max(self.bound or 0.0, ALLOWANCE * self.eps / 4 if self.expected.noise else 0.0)

    def scale(self, name: str) -> float:
        """Return the norm that an error is relative to."""
        return max(self.norms[name], self.floor)

    def gradient(self, name: str) -> float:
        """Return the largest relative error of a right gradient."""
        if self.bound is not None:
            return self.bound
        return ALLOWANCE * max(self.costs[in_any_layer(name)], self.middle)

    def loss(self) -> float:
        """Return the largest relative error of a right loss."""
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
    """Find the likely cause of wrong gradients; empty if only the loss is wrong."""
    if not names:
        return Explanation("", of_reduction=False)
    if names[0] in expected.biases:
        return cause_of_bias(job, batch, names[0], moved)
    return cause_of_gradient(job, reference, expected, batch, got, names)


def _left_by_optimizer(job: Job, optimizer: Any) -> tuple[str, ...]:
    """Describe parameters that have a gradient but do not move in a step. Collective."""
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


def comparison(job: Job, held: Held, step: int, got: Tensor, whole: Tensor, allowed: Allowed) -> Comparison:
    """Compare this rank's part of a gradient with the reference's.

    Raises:
        ValueError: If the shapes differ.
    """
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
