"""Runs tables of layouts: a heading for each group, a line for each layout as soon as it is known, and the verdict."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from core.verify.rank_pool import RankFailure, RankPool
from tests.layouts.gpt import check_gpt
from tests.layouts.layouts import Layout
from tests.layouts.training import train_gpt


class Report(Protocol):
    """What a table needs to know of one row."""

    @property
    def ok(self) -> bool:
        """Was everything within the bound?"""

    @property
    def largest_error(self) -> float:
        """The largest relative one."""

    @property
    def digest(self) -> str:
        """A hash over bits that layouts of one family share; empty where there is nothing to share."""


Groups = Mapping[str, Sequence[Layout]]  # heading -> layouts
Runner = Callable[[Layout, str], Report]  # (layout, kind: a dtype or an optimizer)
Write = Callable[[str], None]


@dataclass(frozen=True)
class Work:
    """What is done with each layout. kinds: the dtypes, or with `steps` the optimizers that train so many of them."""

    kinds: Sequence[str]
    steps: int = 0

    def task(self, layout: Layout, kind: str) -> tuple[Callable[..., Report], tuple[Any, ...], dict[str, Any]]:
        """The function that each rank calls, and its arguments."""
        if self.steps:
            return train_gpt, (layout, "fp64"), {"optimizer": kind, "steps": self.steps}
        return check_gpt, (layout, kind), {}

    def run(self, layout: Layout, kind: str) -> Report:
        """On this rank, in the running process group."""
        function, arguments, options = self.task(layout, kind)
        return function(*arguments, **options)


@dataclass
class Verdict:
    """What a table came to."""

    right: int = 0
    wrong: list[str] = field(default_factory=list)
    families: dict[tuple[Layout, str], dict[str, Layout]] = field(default_factory=dict)  # digest -> a layout with it
    family_members: dict[tuple[Layout, str], int] = field(default_factory=dict)
    largest: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        """Was every layout right, and were bits equal where they must be?"""
        return not self.wrong and self.right > 0

    def note_bits(self, layout: Layout, kind: str, digest: str) -> str:
        """Compare with the layouts of the same family that have run; the difference in words, or nothing."""
        if layout.family is None or not digest:
            return ""
        key = layout.family, kind
        self.family_members[key] = self.family_members.get(key, 0) + 1
        seen = self.families.setdefault(key, {})
        if seen and digest not in seen:
            other = next(iter(seen.values()))
            seen[digest] = layout
            return f"in deterministic mode its bits differ from those of [{other}]"
        seen.setdefault(digest, layout)
        return ""

    def summary(self) -> str:
        """One line, and one for each layout that is wrong."""
        total = self.right + len(self.wrong)
        errors = ", ".join(f"{kind} {error:.2g}" for kind, error in self.largest.items())
        compared = sum(count > 1 for count in self.family_members.values())
        bits = f"; bits compared in {compared} families" if compared else ""
        word = "PASSED" if self.ok else "FAILED"
        line = (
            f"{word}: {self.right} of {total} layouts right; largest relative error {errors or 'none'}{bits}; "
            f"{self.seconds:.0f} s"
        )
        return "\n".join([*(f"WRONG  {layout}" for layout in self.wrong), line])


def run_table(groups: Groups, kinds: Sequence[str], run: Runner, write: Write) -> Verdict:
    """Check each layout in each kind, writing a line as soon as it is known, and the summary last."""
    verdict = Verdict()
    begun = time.perf_counter()
    for heading, layouts in groups.items():
        write(f"{heading}: {len(layouts)} layout{'s' if len(layouts) != 1 else ''}")
        for layout in layouts:
            _run_layout(layout, kinds, run, verdict, write)
    verdict.seconds = time.perf_counter() - begun
    write(verdict.summary())
    return verdict


def _run_layout(layout: Layout, kinds: Sequence[str], run: Runner, verdict: Verdict, write: Write) -> None:
    start = time.perf_counter()
    troubles: list[str] = []
    errors: list[str] = []
    for kind in kinds:
        try:
            report = run(layout, kind)
        except RankFailure as failure:
            troubles.append(f"{kind}: {failure}")
            errors.append(f"{kind} no result")
            continue
        trouble = "" if report.ok else str(report)
        trouble = trouble or verdict.note_bits(layout, kind, report.digest)
        troubles += [trouble] if trouble else []
        verdict.largest[kind] = max(verdict.largest.get(kind, 0.0), report.largest_error)
        errors.append(f"{kind} {report.largest_error:.1e}")
    word = "WRONG" if troubles else "right"
    write(f"  {word}  {'  '.join(errors)}  {time.perf_counter() - start:5.1f} s  {layout}")
    for trouble in troubles:
        write(f"    {trouble}")
    if troubles:
        verdict.wrong.append(str(layout))
    else:
        verdict.right += 1


def run_on_own_ranks(groups: Groups, work: Work, write: Write, *, limit_s: float) -> Verdict:
    """The table on processes of this machine; at most `limit_s` for one layout in one kind."""
    with RankPool(max((layout.world for layouts in groups.values() for layout in layouts), default=1)) as pool:
        pool.start()
        return run_table(groups, work.kinds, partial(_run_in_pool, pool, work, limit_s), write)


def _run_in_pool(pool: RankPool, work: Work, limit_s: float, layout: Layout, kind: str) -> Report:
    function, arguments, options = work.task(layout, kind)
    report: Report = pool.run(function, layout.world, arguments, options, limit_s=limit_s)
    return report
