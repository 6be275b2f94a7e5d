"""Compare all modules of a layout with the reference, to find where a fault begins.

The layout's microbatches run once more without any reduction, with hooks on all modules, and so does the reference.
Each tensor of a rank is compared with its part of the reference's tensor of the same name.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from torch import Tensor

from core.groups import agree
from core.groups.global_names import namer
from core.verify.cuts import cuts_of
from core.verify.job import Job, PipelineJob
from core.verify.place import (
    ALLOWANCE,
    Measured,
    Row,
    Where,
    around,
    in_any_layer,
    is_in,
    judge,
    largest_of_layers,
    quoted,
    stale_line,
)
from core.verify.recording import Point, Recorder, dense_parameters, relative_difference
from core.verify.reference import Expected, Reference

REPEATS = 1e-9  # allowed difference between two runs of the reference; a GPU's order of summation varies


def locate(
    job: Job,
    reference: Reference,
    batch: Any,
    *,
    bound: float,
    noise: float,
    parameters: Sequence[str],
    wrong: Sequence[str],
    factor: float | None = None,
) -> Where:
    """Run the layout and the reference once more with hooks, and find where the fault begins.

    Collective over the world.

    Args:
        job: Model and steps of the layout.
        reference: The unsplit model.
        batch: The complete global batch.
        bound: Relative error that is always allowed.
        noise: A tensor smaller than this share of the largest one is measured relative to that share.
        parameters: All trained parameters.
        wrong: Parameters with wrong gradients.
        factor: See Job.factor_of_gradients; None without a division by tokens.
    """
    with _recorder(job, reference) as mine:
        mine.in_backward = None if isinstance(job, PipelineJob) else False
        job.backward(batch, mine)
    job.clear()
    axis = "dp" if job.groups.dp is not None else "dp_cp"
    expected = reference.record(batch, job.groups.rank(axis))
    compare = _Comparer(job, bound, noise, job.samples(batch))
    numbered = {name for name, count in mine.calls.items() if count == expected.calls.get(name)}
    found = (
        compare.all(mine.outputs, expected.outputs, numbered, 1.0),
        compare.all(mine.gradients, expected.gradients, numbered, factor or job.factor_of_gradients(None)),
        mine.stale,
        {name: count for name, count in mine.calls.items() if count > expected.calls.get(name, count)},
    )
    answers = agree.gather(found, None, "where it begins")
    outputs, gradients, stale, more_calls = [
        _by_module([part[column] for part in answers.values()]) for column in range(4)
    ]
    rows = [Row(module, outputs.get(module, {}), gradients.get(module, {})) for module in expected.calls]
    return judge(rows, parameters, wrong, stale, more_calls)


def _by_module(ranks: Sequence[Mapping[str, Any]]) -> dict[str, dict[int, Any]]:
    """Transpose the ranks' tables to one entry per module."""
    found: dict[str, dict[int, Any]] = {}
    for rank, table in enumerate(ranks):
        for module, value in table.items():
            found.setdefault(module, {})[rank] = value
    return found


def _recorder(job: Job, reference: Reference) -> Recorder:
    """Record this rank's chunks, except experts and containers of which a pipeline stage holds only a part."""
    whole = reference.dense_parameters() if job.groups.size("pp") > 1 else None
    recorder = Recorder()
    for number, chunk in enumerate(job.model.chunks):
        name_of = namer(chunk.module)
        leave_out = set()
        if whole is not None:
            below = dense_parameters(chunk.module, name_of)
            leave_out = {name for name, names in below.items() if names != whole.get(name)}
        if any(job.groups.size(axis) > 1 for axis in ("ep", "expt_tp", "tp")):
            owners = {
                held.place.local_name.rpartition(".")[0]
                for held in job.model.trained
                if held.chunk == number and held.contract is not None and held.contract.is_expert
            }
            names = [name for name, _ in chunk.module.named_modules()]
            leave_out |= {name_of(name) for name in names if any(is_in(name, owner) for owner in owners)}
        recorder.add(chunk.module, name_of, leave_out)
    return recorder


class _Comparer:
    """Compares a rank's tensors with their parts of the reference's tensors."""

    def __init__(self, job: Job, bound: float, noise: float, samples: int) -> None:
        self.groups = job.groups
        self.bound = bound
        self.noise = noise
        self.samples = samples
        self.weights = job.model.split_weights()

    def all(
        self,
        mine: Mapping[Point, Tensor],
        whole: Mapping[Point, tuple[Tensor, float]],
        modules: Collection[str],
        factor: float,
    ) -> dict[str, Measured]:
        """Return the worst comparison of each of these modules; modules with unknown cuts are left out."""
        largest = max((_rms(tensor) for tensor, _ in whole.values()), default=0.0)
        costs: dict[str, float] = {}
        for point, (_, cost) in whole.items():
            costs[point.module] = max(cost, costs.get(point.module, 0.0))
        costs = largest_of_layers(costs)
        found: dict[str, Measured] = {}
        for point in mine.keys() & whole.keys():
            if point.module not in modules:
                continue
            cost = costs[in_any_layer(point.module)]
            measured = self._one(point, mine[point], whole[point][0], cost, factor, largest)
            if measured is not None and (point.module not in found or not measured.share <= found[point.module].share):
                found[point.module] = measured
        return found

    def _one(
        self, point: Point, mine: Tensor, whole: Tensor, cost: float, factor: float, largest: float
    ) -> Measured | None:
        if mine.dim() == 0 and self.groups.size("cp") > 1:  # a loss of only this rank's positions
            return None
        weight = self.weights.get(point.module)
        cuts = cuts_of(mine.shape, whole.shape, self.groups, samples=self.samples, weight=weight)
        if not cuts or mine.numel() == 0:
            return None
        scale = max(_rms(whole), self.noise * largest) * factor
        differences = [cut.without_padding(mine).double() - cut.of(whole).double() * factor for cut in cuts]
        errors = [_rms(difference) / (scale or 1.0) for difference in differences]
        error = min((error for error in errors if not math.isnan(error)), default=math.nan)
        return Measured(error, error / max(ALLOWANCE * cost, self.bound), mine.numel() == 1)


def _rms(tensor: Tensor) -> float:
    """Return the root mean square, which is about equal for a tensor and its parts."""
    return float(tensor.double().norm()) / max(tensor.numel(), 1) ** 0.5


def random_module(reference: Reference, batch: Any) -> str | None:
    """Return the first module whose output differs when the reference runs a second time, or None. Collective."""
    first, second = reference.record(batch, 0), reference.record(batch, 0)
    for point, (output, _) in first.outputs.items():
        other = second.outputs.get(point)
        if other is None or not relative_difference(other[0], output) <= REPEATS:
            return quoted(point.module)
    return None


def shared_faults(reference: Reference, expected: Expected, batch: Any) -> tuple[str, ...]:
    """Describe faults that the single process has too, so that comparing cannot find them. Collective.

    These are checkpoints that recompute other values, and cut graphs: a module runs, but none of its parameters gets a
    gradient. Parameters of modules that never run are not reported.
    """
    if not expected.recomputes and not expected.unreached:
        return ()
    recording = reference.record(batch, 0)
    faults = [stale_line(name, {0: error}) for name, error in list(recording.stale.items())[:1]]
    trained: dict[str, list[str]] = {name.rpartition(".")[0]: [] for name in expected.grads}
    for name in expected.grads:
        trained[name.rpartition(".")[0]].append(name)
    containers = {outer for owner in trained for outer in around(owner)}
    cut = [
        owner
        for owner, names in trained.items()
        if owner in recording.calls and owner not in containers and set(names) <= set(expected.unreached)
    ]
    if cut:
        faults.append(
            f"cut graph: {', '.join(map(quoted, cut))} runs in forward, and no gradient comes back to it on one "
            "process either (detach, no_grad, an output that is not used); if that is meant, set requires_grad_(False)"
        )
    return tuple(faults)
