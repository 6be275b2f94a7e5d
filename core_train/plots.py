"""Pictures at the end of a run: the loss curve, and one step's buckets on a time line."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from core.extras import require
from core_plan.figure import SPAN_COLORS, figure
from core_train.step_log import StepRecord
from core_train.step_trace import StepTrace

IN_FLIGHT, EXPOSED = "#cc79a7", "#222222"


def draw_loss_curve(path: Path, records: Sequence[StepRecord], validation_loss: float | None, unit: str) -> None:
    """Loss and gradient norm over the steps; validation losses as points, and the one at the end as a line."""
    picture = figure(8, 6)
    losses, norms = picture.subplots(2, 1, sharex=True, height_ratios=[3, 1])
    steps = [record.step for record in records]
    losses.plot(steps, [record.loss for record in records], linewidth=1, label="training, each step's batch")
    validated = [(record.step, record.validation_loss) for record in records if record.validation_loss is not None]
    if validated:
        losses.plot(*zip(*validated, strict=True), "o", color="tab:red", markersize=4, label="validation")
    if validation_loss is not None:
        text = f"validation at the end: {validation_loss:.3f}"
        losses.axhline(validation_loss, color="tab:red", linestyle="--", linewidth=1, label=text)
    losses.set_ylabel(unit)
    losses.grid(alpha=0.3)
    losses.legend()
    measured = [(record.step, record.grad_norm) for record in records if record.grad_norm is not None]
    norms.plot(*zip(*measured, strict=True) if measured else ([], []), linewidth=1, color="tab:gray")
    norms.set_yscale("log")
    norms.set_ylabel("gradient norm")
    norms.set_xlabel("step")
    norms.grid(alpha=0.3)
    _save(picture, path)


def draw_bucket_timeline(path: Path, trace: StepTrace) -> None:
    """Draw one step of one rank: the main thread on top, below it each bucket from launched to reduced, and the
    gathers of its parameters, in launch order.
    """
    collectives = (*trace.gathers, *trace.buckets)
    buckets = [event for event in collectives if event.launched_s is not None and event.done_s is not None]
    buckets.sort(key=lambda event: event.launched_s or 0.0)
    lines = TimeLines((10, 2.0 + 0.28 * len(buckets)), trace.start_s)
    for span in trace.spans:
        lines.bar(0, 0.7, span.start_s, span.end_s, span.name, SPAN_COLORS.get(span.name, "#999999"))
    for row, event in enumerate(buckets, start=1):
        lines.bar(row, 0.7, event.launched_s, event.done_s, "in flight", IN_FLIGHT)
        lines.bar(row, 0.7, event.wait_start_s, event.wait_end_s, "exposed", EXPOSED, alpha=0.8)
    rows = ["main thread", *(event.label for event in buckets)]
    lines.save(path, rows, f"rank {trace.rank}, step {trace.step}")


def draw_schedule(path: Path, traces: Sequence[StepTrace]) -> None:
    """Draw one step of all ranks: each main thread's work, with its reductions in flight below. Gaps are bubbles.

    Ranks of one machine share a clock; ranks of several machines are drawn as if they did.
    """
    last = max(trace.step for trace in traces)
    step = sorted((trace for trace in traces if trace.step == last), key=lambda trace: trace.rank)
    lines = TimeLines((12, 1.5 + 0.5 * len(step)), min(trace.start_s for trace in step))
    edge = {"edgecolor": "white", "linewidth": 0.3}
    for row, trace in enumerate(step):
        for span in trace.spans:
            color = SPAN_COLORS.get(span.name, "#999999")
            lines.bar(row - 0.12, 0.55, span.start_s, span.end_s, span.name, color, **edge)
        for event in trace.buckets:
            lines.bar(row + 0.3, 0.2, event.launched_s, event.done_s, "reduction in flight", IN_FLIGHT, **edge)
    lines.save(path, [f"rank {trace.rank}" for trace in step], f"step {last}")


class TimeLines:
    """A picture of named bars over milliseconds since ``origin_s``."""

    def __init__(self, size: tuple[float, float], origin_s: float) -> None:
        self.picture = figure(*size)
        self.axes = self.picture.subplots()
        self.origin_s = origin_s
        self.labelled: set[str] = set()

    def bar(
        self, row: float, height: float, start_s: float | None, end_s: float | None, name: str, color: str, **style: Any
    ) -> None:
        """Draw a bar, unless one of its ends is unknown."""
        if start_s is None or end_s is None:
            return
        style["label"] = None if name in self.labelled else name
        self.labelled.add(name)
        left = 1e3 * (start_s - self.origin_s)
        self.axes.barh(row, 1e3 * (end_s - start_s), left=left, height=height, color=color, **style)

    def save(self, path: Path, rows: Sequence[str], title: str) -> None:
        """Write the picture."""
        self.axes.set_yticks(range(len(rows)), rows)
        self.axes.invert_yaxis()
        self.axes.set_xlabel("ms since the step began")
        self.axes.set_title(title)
        self.axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize="small")
        _save(self.picture, path)


def _save(picture: Any, path: Path) -> None:
    picture.savefig(path, dpi=120)
    require("matplotlib.pyplot", "drawing the plots").close(picture)
