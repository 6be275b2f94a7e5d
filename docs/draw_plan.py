"""Draws docs/source/plan/*.png: the pictures of the page's first plan, for light and for dark pages.

python docs/draw_plan.py
"""

from __future__ import annotations

import re
import runpy
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import matplotlib.pyplot as plt

from core_plan import RunPlan, plan_run
from core_plan.figure import SPAN_COLORS, figure
from core_plan.job.config_file import load_config
from core_plan.report import KINDS
from core_plan.step_time import flops_of, model_flops
from core_plan.time_line import TimedAction

DOCS = Path(__file__).parent
FOLDER = DOCS / "source" / "plan"
RUN: dict[str, Any] = runpy.run_path(str(DOCS / "draw_run.py"))
GIB = 1 << 30
# Okabe and Ito's colours and a violet, ordered so that neighbours in a stack differ most, also for the colour-blind.
COLORS = ("#0072b2", "#e69f00", "#9933ff", "#009e73", "#f0e442", "#56b4e9", "#d55e00", "#dddddd", "#222222", "#cc79a7")
ENDS = 8  # microbatches of a long step that its time line shows at each end
ACTIONS = {"F": ("forward", SPAN_COLORS["forward"]), "B": ("backward", SPAN_COLORS["backward"])}
ACTIONS |= {
    "I": ("input gradients", SPAN_COLORS["input gradient"]),
    "W": ("weight gradients", SPAN_COLORS["weight gradient"]),
}


def draw_memory(path: Path, plan: RunPlan) -> None:
    """Draw the memory of the fullest rank in each action of a step, by kind, with a line at the limit."""
    memory = plan.fullest
    numbers = range(len(memory.moments))
    held = {kind: [{**memory.state, **moment.held}.get(kind, 0) / GIB for moment in memory.moments] for kind in KINDS}
    held = {kind: values for kind, values in held.items() if any(values)}
    picture = figure(9, 4.2)
    axes = picture.subplots()
    # Repeat the last value, so that the last action has a width too.
    steps = [*numbers, len(memory.moments)]
    layers = [[*values, values[-1]] for values in held.values()]
    axes.stackplot(steps, *layers, labels=list(held), colors=COLORS, step="post", linewidth=0)
    if plan.room < 2 * memory.peak:
        label = "of the device, without the headroom" if plan.headroom else "of the device"
        axes.axhline(plan.room / GIB, color="#c0392b", linestyle="--", label=label)
    axes.set_xlim(0, len(memory.moments))
    axes.set_ylim(bottom=0)
    axes.set_xlabel("forwards and backwards of a step, in their order")
    axes.set_ylabel("GiB")
    axes.set_title(f"rank {memory.rank} (stage {', '.join(map(str, memory.stages))})")
    handles, names = axes.get_legend_handles_labels()
    axes.legend(handles[::-1], names[::-1], loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize="small")
    picture.savefig(path)
    plt.close(picture)


def time_panels(spans: Sequence[TimedAction], end_s: float) -> list[tuple[float, float]]:
    """Return the ranges of time to draw: the step, or the first and last ENDS microbatches of a long one.

    Args:
        spans: Actions of the pipeline.
        end_s: End of the step.
    """
    last = max(span.action.microbatch for span in spans)
    if last < 2 * ENDS:
        return [(0.0, end_s)]
    first_end = max(span.end_s for span in spans if span.action.microbatch < ENDS)
    last_start = min(span.start_s for span in spans if span.action.microbatch > last - ENDS)
    return [(0.0, first_end), (last_start, end_s)] if first_end < last_start else [(0.0, end_s)]


def draw_time_line(path: Path, plan: RunPlan) -> None:
    """Draw the working times of each pipeline position, followed by the slowest one's gradients and optimizer.

    The middle of a step with many microbatches is left out, because its bars would be too thin to see.
    """
    time = plan.time
    places = 1 + max(span.place for span in time.spans)
    end = max(span.end_s for span in time.spans)
    panels = time_panels(time.spans, end + time.gradients + time.optimizer)
    picture = figure(9, 1.8 + 0.35 * places)
    widths = [stop - start for start, stop in panels]
    all_axes = picture.subplots(1, len(panels), sharey=True, squeeze=False, width_ratios=widths)[0]
    for axes, (start, stop) in zip(all_axes, panels, strict=True):
        _draw_bars(axes, [span for span in time.spans if span.start_s < stop and span.end_s > start], places)
        for name, seconds, color in (
            ("gradients", (end, time.gradients), SPAN_COLORS["finalize"]),
            ("optimizer", (end + time.gradients, time.optimizer), SPAN_COLORS["optimizer"]),
        ):
            axes.broken_barh([seconds], (-0.35, places - 0.3), facecolors=color, label=name)
        axes.set_xlim(start, stop)
    all_axes[0].set_yticks(range(places), [f"rank {memory.rank}" for memory in plan.memories])
    all_axes[0].invert_yaxis()
    cut = f", its first and last {ENDS} microbatches" if len(panels) > 1 else ""
    picture.supxlabel(f"seconds since the step began{cut}; {time.tokens_per_s:,.0f} tokens a second")
    all_axes[-1].legend(loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize="small")
    picture.savefig(path)
    plt.close(picture)


def _draw_bars(axes: Any, spans: Sequence[TimedAction], places: int) -> None:
    for kind, (name, color) in ACTIONS.items():
        label: str | None = name
        for place in range(places):
            bars = [
                (span.start_s, span.end_s - span.start_s)
                for span in spans
                if span.place == place and span.action.kind == kind
            ]
            if bars:
                width = 0.3 if len(bars) < 50 else 0.0  # width of the line around a bar
                axes.broken_barh(
                    bars, (place - 0.35, 0.7), facecolors=color, edgecolor="white", linewidth=width, label=label
                )
                label = None


def draw_roofline(path: Path, plan: RunPlan) -> None:
    """Draw a step's operations per byte sent over each axis, and the highest speed that its link allows.

    An axis far left of the corner of its line slows the step down, unless its communication is hidden.
    """
    device, time = plan.device, plan.time
    work = sum((model_flops(row) for row in plan.parts.values()), start=model_flops([]))
    ranks = plan.run.layout.pp  # ranks of one copy of the stages, which share the parts
    flops = plan.run.microbatches * sum(work.values()) / ranks
    peak = flops_of(device.peak_flops, work.most_common(1)[0][0])
    sent: dict[tuple[str, str], int] = {}
    for row in time.communication:
        sent[row.group, row.link] = sent.get((row.group, row.link), 0) + row.nbytes
    points = {key: flops / nbytes for key, nbytes in sent.items() if nbytes}
    links = {"inside": device.inside.bytes_per_s, "between": device.between.bytes_per_s}
    names = {"inside": "inside a machine", "between": "between machines"}
    corner = peak / min(links.values())
    least, most = min([*points.values(), corner]) / 4, max([*points.values(), corner]) * 4
    picture = figure(9, 4.6)
    axes = picture.subplots()
    for color, (where, speed) in zip((COLORS[0], COLORS[6]), links.items(), strict=True):
        turn = min(max(peak / speed, least), most)
        axes.plot([least, turn, most], [min(peak, least * speed), min(peak, turn * speed), peak], color=color,
                  label=f"{names[where]}, {speed / 1e9:,.3g} GB a second")  # fmt: skip
    for number, ((group, where), intensity) in enumerate(sorted(points.items())):
        height = min(peak, intensity * links[where])
        axes.plot([intensity], [height], "o", color=COLORS[number % len(COLORS)])
        axes.annotate(group, (intensity, height), textcoords="offset points", xytext=(6, -12))
    reached = flops / time.seconds
    axes.axhline(reached, color="#7f8c8d", linestyle=":", label=f"the step, {reached / 1e12:,.3g} TFLOP a second")
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("operations for each byte that a rank sends over a group")
    axes.set_ylabel("operations a second of a rank")
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right", fontsize="small")
    picture.savefig(path)
    plt.close(picture)


PICTURES: dict[str, Callable[[Path, RunPlan], None]] = {
    "memory": draw_memory,
    "time_line": draw_time_line,
    "roofline": draw_roofline,
}


def first_plan() -> RunPlan:
    """That of the page's first command."""
    page = (DOCS / "source" / "plan.md").read_text()
    command = re.search(r"\$ python -m core plan ((?:.*\\\n)*.*)\n", page)
    assert command is not None, "the page begins with a plan"
    flags = shlex.split(command[1].replace("\\\n", " "))
    short = {"--seq": "--model.sequence-length", "--global-batch": "--run.global-batch-size"}
    short |= {"--micro-batch": "--run.micro-batch-size", "--tp": "--parallel.tp", "--pp": "--parallel.pp"}
    told = {name: flags.pop(flags.index(name) + 1) for name in ("--ranks", "--device")}
    flags = [short.get(flag, flag) for flag in flags if flag not in told]
    return plan_run(load_config(flags), int(told["--ranks"]), told["--device"])


def main(directory: Path = FOLDER) -> None:
    """Each picture twice, without a background."""
    plan = first_plan()
    directory.mkdir(exist_ok=True)
    for name, draw in PICTURES.items():
        for theme, ink in RUN["THEMES"].items():
            style = {**RUN["COMMON"], **dict.fromkeys(RUN["INK"], ink), "legend.framealpha": 0, "savefig.dpi": 120}
            with matplotlib.rc_context(style):
                draw(directory / f"{name}_{theme}.png", plan)


if __name__ == "__main__":
    main()
