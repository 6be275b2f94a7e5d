"""check_gradients: one model, one batch, computed twice - in the layout of the running ranks and on one process."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from core import parallel_state
from core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from core.process_groups import ProcessGroups
from core.verify.diagnosis import RankPart, explain
from core.verify.gathered import cast, on_tensors, own_slice, slicing_axis, valid_mask, whole_gradients
from core.verify.job import Job, LossFn
from core.verify.reference import ModelFn, Reference, compute_reference
from core.verify.report import Comparison, GradientReport

BOUNDS = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 5e-2, torch.float16: 1e-2}
# A parameter whose gradient is this much smaller than the whole gradient is all round-off; its error is measured
# against this share of the whole instead.
NOISE = {torch.float64: 1e-6, torch.float32: 1e-3, torch.bfloat16: 1e-2, torch.float16: 1e-2}
DEFAULT_WRAPPER = DistributedDataParallelConfig(initial_weights="broadcast")
SAMPLE = 65536  # elements of a wrong gradient that the diagnosis looks at


def check_gradients(
    model_fn: ModelFn,
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
    pg_collection: ProcessGroups | None = None,
    title: str = "",
    ranks: int | None = None,
) -> GradientReport:
    """Compare every gradient of a model in the running layout with those of one process that splits nothing.

    model_fn: builds this rank's model, plain or wrapped in DistributedDataParallel already. loss_fn(model, part): the
    mean loss over a part of the batch; with `config.calculate_per_token_loss` (sum of losses, number of tokens). batch:
    the whole global batch, equal on all ranks: a tensor, or nested tuples, lists, dicts of tensors whose first
    dimension counts samples. Data-parallel ranks take equal parts in rank order, cut once more into `microbatches`.
    reference_fn: builds the model without any splitting; `model_fn` where that does not split. It gets the layout's
    weights. config, ddp_config: what the model is wrapped with; by default rank 0's weights are broadcast. dtype: model
    and batch are cast to it; None leaves them, and a model that came wrapped keeps its own. steps: gradients are
    compared after each of so many steps without an update. bound: on the relative error; 1e-10 in fp64, 1e-5 in fp32.
    ranks: outside of a process group, start so many processes on gloo; everything passed must then be importable and
    picklable.

    Returns the same report on every rank. Collective over the default process group. The model must be
    deterministic (no dropout, no batch statistics).

        report = check_gradients(build_model, mean_loss, (inputs, labels), ranks=4)
        report.raise_if_wrong()
    """
    if ranks is not None:
        if dist.is_initialized():
            raise ValueError(
                f"ranks={ranks} starts processes, but this one is in a process group already; leave it out"
            )
        from core.verify.rank_pool import RankPool

        options = {
            "reference_fn": reference_fn,
            "config": config,
            "ddp_config": ddp_config,
            "dtype": dtype,
            "reference_dtype": reference_dtype,
            "microbatches": microbatches,
            "steps": steps,
            "bound": bound,
            "title": title,
        }
        with RankPool(ranks) as pool:
            report: GradientReport = pool.run(check_gradients, ranks, (model_fn, loss_fn, batch), options)
            return report
    if not dist.is_initialized():
        raise RuntimeError(
            "check_gradients compares ranks, and torch.distributed is not started; start it (torchrun), or pass "
            "ranks=4 to let check_gradients start processes of its own"
        )
    with _groups(pg_collection) as groups:
        if groups.size("pp") > 1:
            raise ValueError("check_gradients runs forward and backward in one piece and knows no pipeline stages yet")
        model = model_fn()
        ddp = _wrapped(model, config, ddp_config or DEFAULT_WRAPPER, groups, dtype)
        device = ddp.plan.device
        compute = next(ddp.module.parameters()).dtype
        batch = on_tensors(lambda t: cast(t, dtype and compute, device), batch)
        job = Job(ddp, loss_fn, batch, microbatches, getattr(ddp.config, "calculate_per_token_loss", False))
        build = _reference_builder(model_fn, reference_fn, ddp, came_wrapped=model is ddp)
        reference = compute_reference(job, build, reference_dtype)
        limit = BOUNDS.get(compute, 1e-2) if bound is None else bound
        title = title or f"{dist.get_world_size()} ranks"
        return _compare(job, reference, limit, NOISE.get(compute, 1e-2), steps, title)


@contextmanager
def _groups(pg_collection: ProcessGroups | None) -> Iterator[ProcessGroups]:
    """The given groups, parallel_state's, or plain data parallelism for as long as the check takes."""
    if pg_collection is not None:
        yield pg_collection
    elif parallel_state.model_parallel_is_initialized():
        yield parallel_state.get_process_groups()
    else:
        parallel_state.initialize_model_parallel()
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
    model_fn: ModelFn, reference_fn: ModelFn | None, ddp: DistributedDataParallel, *, came_wrapped: bool
) -> ModelFn:
    if reference_fn is not None:
        return reference_fn
    if any(slicing_axis(ddp, name, param) for name, param in ddp.module.named_parameters()):
        raise ValueError(
            "this model is split over tensor parallelism; pass reference_fn, which builds it without any splitting"
        )
    # Wrapping is collective and the reference is built on one rank only: a model that came wrapped is copied.
    return (lambda: copy.deepcopy(ddp.module)) if came_wrapped else model_fn


def _compare(job: Job, reference: Reference, bound: float, noise: float, steps: int, title: str) -> GradientReport:
    names = list(job.ddp.contracts)
    norms = {name: float(grad.double().norm()) for name, grad in reference.grads.items()}
    floor = noise * sum(norm**2 for norm in norms.values()) ** 0.5
    largest, loss_error, digests = 0.0, 0.0, []
    wrong: list[Comparison] = []
    cause = ""
    details: tuple[str, ...] = ()
    for step in range(steps):
        loss = job.step()
        # The sum of many losses of either sign can be small: measured against one at least.
        loss_error = max(loss_error, abs(loss - reference.loss) / max(abs(reference.loss), 1.0))
        got = whole_gradients(job.ddp)
        digests.append(_digest(got))
        mine = [
            _comparison(job, name, step, got[name], reference.grads[name], max(norms[name], floor)) for name in names
        ]
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, mine)
        largest = max([largest, *(c.error for rank in everyone for c in rank)])
        wrong = sorted(
            (c for rank in everyone for c in rank if not c.error <= bound), key=lambda c: (names.index(c.name), c.rank)
        )
        if wrong:
            cause, details = _diagnose(job, reference, got, wrong)
            if step > 0:
                cause += f" (only from step {step} on: the steps before left something behind)"
            break
    if not loss_error <= bound:
        then = f"; of the gradients: {cause}" if cause else ""
        cause = f"the forward passes differ already, relative error of the loss {loss_error:.3g}{then}"
    everything: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everything, digests)
    return GradientReport(
        title=title,
        bound=bound,
        parameters=len(names),
        largest_error=largest,
        loss_error=loss_error,
        wrong=tuple(wrong),
        cause=cause,
        unmoved=tuple(name for name in names if norms[name] == 0.0),
        digest=hashlib.sha256(repr(everything).encode()).hexdigest()[:16],
        details=details,
    )


def _comparison(job: Job, name: str, step: int, got: Tensor, whole: Tensor, scale: float) -> Comparison:
    param = job.ddp.module.get_parameter(name)
    want = own_slice(job.ddp, name, param, whole).double()
    have = got.detach().cpu().double()
    if have.shape != want.shape:
        raise ValueError(
            f"rank {dist.get_rank()}: the gradient of {name!r} is {list(have.shape)} and this rank's slice of the "
            f"reference {list(want.shape)}"
        )
    size = float(want.norm())
    error = float((have - want).norm()) / scale if scale > 0 else float(have.norm())
    ratio = float((have * want).sum()) / size**2 if size > 0 else float("nan")
    return Comparison(name, dist.get_rank(), step, error, ratio)


def _digest(grads: dict[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for grad in grads.values():
        digest.update(grad.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _diagnose(
    job: Job, reference: Reference, got: dict[str, Tensor], wrong: list[Comparison]
) -> tuple[str, tuple[str, ...]]:
    """The likely cause of the first wrong gradient. One more backward, without any reduction. Collective."""
    ddp, name = job.ddp, wrong[0].name
    valid = valid_mask(ddp, name)
    ddp.zero_grad_buffer()
    job.backward(reduce=False)
    param: Any = ddp.module.get_parameter(name)
    local = param.main_grad.detach().cpu().double().reshape(-1).clone()
    ddp.zero_grad_buffer()
    want = own_slice(ddp, name, param, reference.grads[name]).double().reshape(-1)
    have = got[name].cpu().double().reshape(-1)
    chosen = slice(None, None, -(-have.numel() // SAMPLE))
    mine = RankPart(dist.get_rank(), _place(ddp.groups), local[chosen], have[chosen], want[chosen], valid[chosen])
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, mine)
    answer: list[Any] = [None]
    if dist.get_rank() == 0:  # one rank's round-off decides, so that all report the same
        answer[0] = explain(
            parts,
            _sizes(ddp.groups),
            _suspects(ddp, {c.name for c in wrong}),
            tokens=reference.tokens,
            microbatches=job.microbatches,
        )
    dist.broadcast_object_list(answer, src=0)
    cause, details = answer[0]
    return cause, details


AXES = {"dp": "dp_cp", "tp": "tp", "pp": "pp", "ep": "ep"}  # words of the diagnosis -> fields of ProcessGroups
INSTANCE_AXES = {"optimizer instances": "inter_dp_cp", "dp inside an instance": "intra_dp_cp"}


def _axes(groups: ProcessGroups) -> dict[str, str]:
    return {**AXES, **(INSTANCE_AXES if groups.size("inter_dp_cp") > 1 else {})}


def _place(groups: ProcessGroups) -> dict[str, int]:
    return {axis: groups.rank(field) for axis, field in _axes(groups).items()}


def _sizes(groups: ProcessGroups) -> dict[str, int]:
    return {axis: groups.size(field) for axis, field in _axes(groups).items()}


def _suspects(ddp: DistributedDataParallel, wrong: set[str]) -> list[str]:
    """The axes over which all wrong parameters are reduced and no right one is."""
    reduced = {
        name: {"dp" if contract.data_group == "dp_cp" else "ep", *contract.partial_over, *contract.averaged_over}
        for name, contract in ddp.contracts.items()
    }
    blamed = set.intersection(*(reduced[name] for name in wrong))
    cleared = set().union(*(axes for name, axes in reduced.items() if name not in wrong))
    return sorted(blamed - cleared) or sorted(blamed)
