"""SharedFigures: what a microbatch of any size costs in each part of a model, from two sizes that were watched.

So with the ranks that experts are spread over: two of their numbers are watched, beside one rank.

Layouts that split a layer alike share these figures, whatever their pipeline, their data ranks and their batch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from core.plan.choices import Split
from core.plan.live_memory import Work
from core.plan.run_memory import Run
from core.plan.step_figures import PartFigures, Sent

# Sequences of the microbatches that are watched. With one sequence, a transposed tensor is contiguous, and fewer
# operators run. Odd numbers keep operators apart whose sizes would be equal by chance.
LOW, LEAST_HIGH = 3, 5
Parts = dict[Any, PartFigures]


class SharedFigures:
    """Figures by the split of a layer. most: the largest microbatch of any layout. runs: one of each split there is."""

    def __init__(self, most: int) -> None:
        self.high = max(most, LEAST_HIGH) | 1
        self.runs: dict[Split, Run] = {}
        self._of_sizes: dict[tuple[Split, int], Parts] = {}
        self._between: dict[tuple[Split, int], Parts] = {}

    def at(self, split: Split, run: Run, micro: int, parts: Sequence[Any]) -> Parts:
        """The figures of some parts for `micro` sequences. run: any whose layers are split so."""
        found = self._between.setdefault((split, micro), {})
        missing = [part for part in dict.fromkeys(parts) if part not in found]
        if missing:
            low, high = (self._of_size(split, run, size, missing) for size in (LOW, self.high))
            share = (micro - LOW) / (self.high - LOW)
            for part in missing:
                figures = between(low[part], high[part], share)
                if figures is None:  # not the same operators
                    figures = self._of_size(split, run, micro, missing)[part]
                found[part] = figures
        return found

    def _of_size(self, split: Split, run: Run, micro: int, parts: Sequence[Any]) -> Parts:
        known = self._of_sizes.setdefault((split, micro), {})
        missing = [part for part in parts if part not in known]
        if missing:
            known |= self._of_more_and_fewer_experts(split, micro, missing)
            missing = [part for part in missing if part not in known]
        if missing:
            source: Any = run.source
            # Groups of its own, because they count what is sent.
            found = replace(source, micro_batch_size=micro).figures(missing, run.groups_of(0))
            known |= {part: found[part] for part in missing}
        return known

    def _of_more_and_fewer_experts(self, split: Split, micro: int, parts: Sequence[Any]) -> Parts:
        """Of layers with as many tokens and some of the experts: a rank's weights and messages are linear in 1 / ep."""
        sizes = sorted(one.ep for one in self.runs if one.ep > 1 and one._replace(ep=split.ep) == split)
        if not sizes or not sizes[0] < split.ep < sizes[-1]:
            return {}
        ends = [split._replace(ep=ep) for ep in (sizes[0], sizes[-1])]
        low, high = (self._of_size(end, self.runs[end], micro, parts) for end in ends)
        share = (1 / split.ep - 1 / sizes[0]) / (1 / sizes[-1] - 1 / sizes[0])
        found = {part: between(low[part], high[part], share) for part in parts}
        return {part: figures for part, figures in found.items() if figures is not None}


def between(low: PartFigures, high: PartFigures, share: float) -> PartFigures | None:
    """A part between two sizes of a microbatch or of ep; None where the two do not run the same operators.

    Work and traffic are linear in `share`. The highest points of memory are convex in it, so that between the two
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
    numels = zip(low.params, high.params, strict=True)
    params = [(_mean(numel, other, share), is_expert) for (numel, is_expert), (other, _) in numels]
    return PartFigures(saved, forward, backward, work, sent, params)


def _work_between(low: Mapping[Work, int], high: Mapping[Work, int], share: float) -> Counter[Work] | None:
    if len(low) != len(high):
        return None
    found: Counter[Work] = Counter()
    for (one, count), (other, others) in zip(low.items(), high.items(), strict=True):
        here = one._replace(flops=_mean(one.flops, other.flops, share), nbytes=_mean(one.nbytes, other.nbytes, share))
        if count != others or here != other._replace(flops=here.flops, nbytes=here.nbytes):
            return None
        found[here] += count
    return found


def _mean(low: int, high: int, share: float) -> int:
    return round(low + (high - low) * share)
