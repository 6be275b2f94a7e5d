"""LostRank: a finding about a rank that others wait for, and its description in errors of failed waits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from core.watch.waiting import in_words

DEAD, PAUSED, SILENT, MISSED, BACK = "dead", "paused", "silent", "missed", "back"  # kinds of findings


@dataclass(frozen=True)
class LostRank:
    """A finding about a rank."""

    kind: str  # one of the constants above
    words: str  # description for logs and errors
    seen: float  # monotonic seconds


def in_order_found(lost: Mapping[int, LostRank]) -> list[str]:
    """Return the descriptions of the findings. The first of several is marked as such."""
    words = [finding.words for finding in lost.values()]
    if len(words) < 2:
        return words
    return [f"found first: {words[0]}", *(f"found later: {each}" for each in words[1:])]


def next_step(lost: Mapping[int, LostRank]) -> str:
    """Return the next step if a rank has died, else an empty text."""
    dead = [rank for rank, finding in lost.items() if finding.kind == DEAD]
    if not dead:
        return ""
    return (
        f"The output of {in_words(dead[:1])} says why it ended; if it says nothing, the process was killed, often for "
        "lack of memory (see dmesg). Restart from the last checkpoint"
    )
