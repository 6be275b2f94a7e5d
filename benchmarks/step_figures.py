"""Arithmetic of the table: medians, spreads, ratios, and the gate that an arm's losses must pass. No processes.

What an arm takes differs from one start of its processes to the next, by how its memory came to lie, more than within
one. So within a start there are medians only; spreads are over starts, and so are the medians that are shown.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.arms import EPS, Stage

Rounds = Sequence[Sequence[float]]  # [round][step] of one arm, each the mean over ranks


@dataclass(frozen=True)
class Spread:
    """A median, and what is below and above it: quartiles, or the least and the most."""

    low: float
    median: float
    high: float


def spread(values: Sequence[float]) -> Spread:
    """Quartiles by linear interpolation between the values; ValueError for none."""
    if not values:
        raise ValueError("there is no value to take a median of")
    if len(values) == 1:
        return Spread(values[0], values[0], values[0])
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return Spread(low, median, high)


def over_starts(values: Sequence[float]) -> Spread:
    """The median of one value a start, and the least and the most; they are too few for quartiles."""
    if not values:
        raise ValueError("no start has a value")
    return Spread(min(values), statistics.median(values), max(values))


def flat(rounds: Rounds) -> list[float]:
    """All steps of all rounds."""
    return [value for steps in rounds for value in steps]


def ratio_of_medians(arm: Rounds, baseline: Rounds) -> float:
    """The arm's median step over the baseline's."""
    return spread(flat(arm)).median / spread(flat(baseline)).median


def ratio_by_round(arm: Rounds, baseline: Rounds) -> Spread:
    """In each round the arm's median over the baseline's, which ran seconds apart; then the spread over rounds."""
    if len(arm) != len(baseline):
        raise ValueError(f"{len(arm)} rounds of the arm and {len(baseline)} of the baseline; they were not interleaved")
    return spread([ratio_of_medians([mine], [theirs]) for mine, theirs in zip(arm, baseline, strict=True)])


@dataclass(frozen=True)
class Figures:
    """Figures of a measured arm in the table: medians over starts.

    ratio, cpu_ratio: to the baseline of the same start and batch; None for the baseline itself, and where it failed.
    peak: memory of a rank at its peak, over the bytes of the parameters; None where it cannot be read.
    """

    wall_ms: float
    ratio: Spread | None
    cpu_ms: float
    cpu_ratio: Spread | None
    peak: float | None
    steps: int


def figures_of(row: dict[str, Any], baseline: dict[str, Any], numel: int) -> Figures | None:
    """Of a row in the JSON; None for an arm that was not measured in every start that it had."""
    if row["outcome"] != "measured" or not any(turns["wall_s"] for turns in row["starts"]):
        return None
    peaks = [peak for turns in row["starts"] if (peak := _peak(turns, numel)) is not None]
    return Figures(
        wall_ms=1e3 * statistics.median(_median_a_start(row, "wall_s")),
        ratio=_ratio(row, baseline, "wall_s"),
        cpu_ms=1e3 * statistics.median(_median_a_start(row, "cpu_s")),
        cpu_ratio=_ratio(row, baseline, "cpu_s"),
        peak=statistics.median(peaks) if peaks else None,
        steps=sum(len(flat(turns["wall_s"])) for turns in row["starts"]),
    )


def _median_a_start(row: dict[str, Any], clock: str) -> list[float]:
    """Of all steps of a start; the baseline has turns in each batch of it."""
    steps: dict[int, list[float]] = {}
    for turns in row["starts"]:
        steps.setdefault(turns["start"], []).extend(flat(turns[clock]))
    return [statistics.median(values) for values in steps.values() if values]


def _ratio(row: dict[str, Any], baseline: dict[str, Any], clock: str) -> Spread | None:
    if row["name"] == baseline["name"]:
        return None
    reference = {(turns["start"], turns["batch"]): turns[clock] for turns in baseline["starts"] if turns[clock]}
    ratios = [
        ratio_of_medians(turns[clock], reference[place])
        for turns in row["starts"]
        if turns[clock] and (place := (turns["start"], turns["batch"])) in reference
    ]
    return over_starts(ratios) if ratios else None


def _peak(turns: dict[str, Any], numel: int) -> float | None:
    """The mean over ranks."""
    if not turns["memory_peak"]:
        return None
    grown = [peak - before for peak, before in zip(turns["memory_peak"], turns["memory_before"], strict=True)]
    return statistics.fmean(grown) / (4 * numel)


def mean_over_ranks(values: Sequence[Sequence[float]]) -> list[float]:
    """[rank][step] -> [step]."""
    return [statistics.fmean(step) for step in zip(*values, strict=True)]


def deviation(losses: Sequence[float], reference: Sequence[float]) -> float:
    """The largest relative difference of an arm's losses from the reference's; infinite for one that is not finite."""
    if len(losses) != len(reference):
        raise ValueError(f"{len(losses)} losses against {len(reference)} of the reference")
    if not all(math.isfinite(loss) for loss in losses):
        return math.inf
    return max(abs(mine - right) / abs(right) for mine, right in zip(losses, reference, strict=True))


def formula_ratio(stage: Stage, ranks: int, passing: float = 0.0) -> float:
    """Parameters, gradients and Adam's two moments in fp32 a rank, over the bytes of the parameters.

    passing: the two longest neighbouring buckets over the parameters. Where parameters are sharded, as many of them and
    of gradients are whole at a time.
    """
    import torch

    from benchmarks.memory_formula import bytes_per_parameter
    from core.optimizer import OptimizerConfig

    strategy = "no_shard" if stage == "none" else stage
    row = bytes_per_parameter(
        OptimizerConfig(lr=1.0, adam_eps=EPS),
        param_dtype=torch.float32,
        grad_dtype=torch.float32,
        strategy=strategy,
        shard_ranks=ranks,
    )
    whole = 2 * passing if stage == "optim_grads_params" else 0.0
    return row.total / torch.float32.itemsize + whole


def formula_of(stage: Stage, result: dict[str, Any]) -> float:
    """The formula of a stage in a run, from the JSON."""
    workload = result["workload"]
    return formula_ratio(stage, result["plan"]["ranks"], workload.get("passing", 0) / workload["numel"])
