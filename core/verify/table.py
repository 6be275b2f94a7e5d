"""Runs a table of layouts, prints a line for each, and one with the verdict."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from core.verify.gpt import check_gpt
from core.verify.layouts import Layout
from core.verify.rank_pool import RankFailure, RankPool
from core.verify.report import GradientReport

Runner = Callable[[Layout, str], GradientReport]


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
        """Was every gradient right, and were bits equal where they must be?"""
        return not self.wrong and self.right > 0

    def note_bits(self, layout: Layout, dtype: str, digest: str) -> str:
        """Compare with the layouts of the same family that have run; the difference in words, or nothing."""
        if layout.family is None:
            return ""
        key = layout.family, dtype
        self.family_members[key] = self.family_members.get(key, 0) + 1
        seen = self.families.setdefault(key, {})
        if seen and digest not in seen:
            other = next(iter(seen.values()))
            seen[digest] = layout
            return f"in deterministic mode its bits differ from those of [{other}]"
        seen.setdefault(digest, layout)
        return ""

    def summary(self) -> str:
        """One line."""
        total = self.right + len(self.wrong)
        errors = ", ".join(f"{dtype} {error:.2g}" for dtype, error in self.largest.items())
        compared = [key for key, count in self.family_members.items() if count > 1]
        word = "PASSED" if self.ok else "FAILED"
        return (
            f"{word}: {self.right} of {total} layouts right; largest relative error {errors or 'none'}; bits compared "
            f"in {len(compared)} families; {self.seconds:.0f} s"
        )


def run_table(layouts: Sequence[Layout], dtypes: Sequence[str], run: Runner, write: Callable[[str], None]) -> Verdict:
    """Check each layout in each dtype, writing a line as soon as it is known, and the summary last."""
    verdict = Verdict()
    begun = time.perf_counter()
    width = max((len(str(layout)) for layout in layouts), default=0)
    for dtype in dtypes:
        for layout in layouts:
            start = time.perf_counter()
            try:
                report = run(layout, dtype)
                trouble = "" if report.ok else str(report)
                trouble = trouble or verdict.note_bits(layout, dtype, report.digest)
                verdict.largest[dtype] = max(verdict.largest.get(dtype, 0.0), report.largest_error)
                error = f"{report.largest_error:.1e}"
            except RankFailure as failure:
                trouble, error = str(failure), "no result"
            seconds = time.perf_counter() - start
            write(f"{'WRONG' if trouble else 'right'}  {dtype}  {str(layout):<{width}}  {error:>9}  {seconds:5.1f} s")
            if trouble:
                write(f"  {trouble}")
                verdict.wrong.append(f"{dtype} {layout}")
            else:
                verdict.right += 1
    verdict.seconds = time.perf_counter() - begun
    write(verdict.summary())
    return verdict


def run_on_own_ranks(
    layouts: Sequence[Layout], dtypes: Sequence[str], write: Callable[[str], None], *, limit_s: float
) -> Verdict:
    """The table on processes of this machine; at most `limit_s` a layout."""
    with RankPool(max((layout.world for layout in layouts), default=1)) as pool:
        return run_table(
            layouts,
            dtypes,
            lambda layout, dtype: pool.run(check_gpt, layout.world, (layout, dtype), limit_s=limit_s),
            write,
        )
