"""SharedFigures: what a microbatch of any size costs in each part of a model, from two sizes that were watched.

Layouts that split a layer alike share these figures, for any pipeline, data ranks and batch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from core.plan.live_memory import Work
from core.plan.run_memory import Run
from core.plan.step_figures import PartFigures, Sent

# Sequences of the microbatches that are watched. With one sequence, a transposed tensor is contiguous, and fewer
# operators run. Odd numbers keep operators apart whose sizes would be equal by chance.
LOW, LEAST_HIGH = 3, 5
Parts = dict[Any, PartFigures]


class SharedFigures:
    """Figures by the split of a layer. most: the largest microbatch of any layout."""

    def __init__(self, most: int) -> None:
        self.high = max(most, LEAST_HIGH) | 1
        self._watched: dict[Hashable, tuple[Parts, Parts]] = {}  # of a microbatch of LOW and of `high` sequences
        self._between: dict[tuple[Hashable, int], Parts] = {}

    def at(self, split: Hashable, run: Run, micro: int, parts: Sequence[Any]) -> Parts:
        """The figures of some parts for `micro` sequences. split: equal for runs whose layers are split alike."""
        found = self._between.setdefault((split, micro), {})
        missing = [part for part in dict.fromkeys(parts) if part not in found]
        if missing:
            low, high = self._watch(split, run, missing)
            share = (micro - LOW) / (self.high - LOW)
            for part in missing:
                figures = between(low[part], high[part], share)
                if figures is None:  # not the same operators
                    figures = run.figures(missing, [micro])[0][part]
                found[part] = figures
        return found

    def _watch(self, split: Hashable, run: Run, parts: Sequence[Any]) -> tuple[Parts, Parts]:
        known = self._watched.setdefault(split, ({}, {}))
        missing = [part for part in parts if part not in known[0]]
        if missing:  # groups of its own, because they count what is sent
            for of_size, found in zip(known, run.figures(missing, (LOW, self.high)), strict=True):
                of_size.update((part, found[part]) for part in missing)
        return known


def between(low: PartFigures, high: PartFigures, share: float) -> PartFigures | None:
    """A part between two sizes of a microbatch; None where the two do not run the same operators.

    Work and traffic are linear in the size. The highest points of memory are convex in it, so that between the two
    sizes these are no smaller than what would be watched.
    """
    work: dict[str, Counter[Work]] = {}
    sent: dict[str, Sent] = {}
    for phase in low.work:
        merged = _work_between(low.work[phase], high.work[phase], share)
        if merged is None or low.sent[phase].keys() != high.sent[phase].keys():
            return None
        work[phase] = merged
        sent[phase] = {
            key: (calls, _mean(nbytes, high.sent[phase][key][1], share))
            for key, (calls, nbytes) in low.sent[phase].items()
        }
    saved, forward, backward = (
        _mean(getattr(low, name), getattr(high, name), share) for name in ("saved", "forward", "backward")
    )
    return PartFigures(saved, forward, backward, work, sent, low.params)


def _work_between(low: Mapping[Work, int], high: Mapping[Work, int], share: float) -> Counter[Work] | None:
    if len(low) != len(high):
        return None
    found: Counter[Work] = Counter()
    for (one, count), (other, others) in zip(low.items(), high.items(), strict=True):
        here = one._replace(flops=_mean(one.flops, other.flops, share), nbytes=_mean(one.nbytes, other.nbytes, share))
        if here != other._replace(flops=here.flops, nbytes=here.nbytes):
            return None
        found[here] += _mean(count, others, share)  # a loss has more chunks of more tokens
    return found


def _mean(low: int, high: int, share: float) -> int:
    return round(low + (high - low) * share)
