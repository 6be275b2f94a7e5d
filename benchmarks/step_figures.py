"""Arithmetic of the table: medians, spreads, ratios, and the gate that an arm's losses must pass. No processes."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.arms import EPS, Stage

Rounds = Sequence[Sequence[float]]  # [round][step] of one arm, each the mean over ranks


@dataclass(frozen=True)
class Spread:
    """Median and quartiles."""

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


def formula_ratio(stage: Stage, ranks: int) -> float:
    """Parameters, gradients and Adam's two moments in fp32 a rank, over the bytes of the parameters."""
    if stage == "optim_grads_params":
        return 4 / ranks  # everything sharded, which core.optimizer.memory does not have yet
    import torch

    from core.optimizer import OptimizerConfig
    from core.optimizer.memory import bytes_per_parameter

    strategy = "no_shard" if stage == "none" else stage
    row = bytes_per_parameter(
        OptimizerConfig(lr=1.0, adam_eps=EPS),
        param_dtype=torch.float32,
        grad_dtype=torch.float32,
        strategy=strategy,
        shard_ranks=ranks,
    )
    return row.total / torch.float32.itemsize
