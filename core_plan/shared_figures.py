"""SharedFigures: costs of a microbatch of any size in each part of a model, from two measured sizes.

Layouts that split a layer in the same way share these figures, for any pipeline, data ranks and batch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from core_plan.live_memory import Work
from core_plan.run_memory import Run
from core_plan.step_figures import PartFigures, Sent

# Sequences of the measured microbatches. With one sequence, a transposed tensor is contiguous, and fewer
# operators run. Odd numbers keep operators apart whose sizes would be equal by chance.
LOW, LEAST_HIGH = 3, 5
Parts = dict[Any, PartFigures]


class SharedFigures:
    """Figures by the split of a layer. `most` is the largest microbatch of any layout, in sequences."""

    def __init__(self, most: int) -> None:
        self.high = max(most, LEAST_HIGH) | 1
        self._watched: dict[Hashable, tuple[Parts, Parts]] = {}  # for LOW and for `high` sequences
        self._between: dict[tuple[Hashable, int], Parts] = {}

    def at(self, split: Hashable, run: Run, micro: int, parts: Sequence[Any]) -> Parts:
        """Return the figures of parts for a microbatch.

        Args:
            split: Key that is equal for runs whose layers are split in the same way.
            run: The run.
            micro: Sequences of the microbatch.
            parts: Parts of the model.
        """
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
        if missing:  # uses separate groups, because they count traffic
            for of_size, found in zip(known, run.figures(missing, (LOW, self.high)), strict=True):
                of_size.update((part, found[part]) for part in missing)
        return known


def between(low: PartFigures, high: PartFigures, share: float) -> PartFigures | None:
    """Interpolate a part between two microbatch sizes; None if the two sizes run different operators.

    Work and traffic are linear in the size. The highest points of memory are convex in it, so between the two sizes the
    result is not below a measurement.
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
