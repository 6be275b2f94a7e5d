"""The table and the picture of `python -m benchmarks steps`, from what it writes to JSON."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.step_figures import Spread, figures_of, formula_of, formula_ratio
from benchmarks.step_plan import TOLERANCE

STAGES = ("none", "no_shard", "optim", "optim_grads", "optim_grads_params")
KINDS = ("control", "floor", "peer", "ours")
HEADINGS = ("arm", "step ms", "ratio", "(starts)", "cpu ms", "ratio", "(starts)", "peak", "formula", "loss", "steps")
WIDTHS = (30, 7, 6, 14, 7, 6, 14, 6, 8, 6, 6)
COLUMNS = 120
KEPT = "no communication, kept"
COLORS = {"floor": "#bbbbbb", "peer": "#7fb3d5", "ours": "#2e6da4"}


def table(result: dict[str, Any], about: dict[str, Any]) -> list[str]:
    """The lines of one workload's table, what the columns mean included."""
    workload, plan, baseline = result["workload"], result["plan"], result["baseline"]
    rest = bytes_without_states(result)
    lines = [
        f"{workload['name']}: {workload['sizes']}",
        f"{plan['ranks']} ranks, gloo, 1 thread each, accumulation {plan['accumulation']}; torch {about['torch']}, "
        f"{about['machine']},",
        f"{about['date'][:10]}, commit {about['commit'] or 'unknown'}; took {result['took_s'] / 60:.1f} min",
        *command_lines(about["command"]),
        "",
        _line(HEADINGS),
    ]
    for row in ordered([*result["rows"], baseline]):
        lines.append(_line(_cells(row, result, rest)))
    formula = (
        f"formula: the strategy's, with the {rest:.2f} that {KEPT!r} holds in addition to its states."
        if rest is not None
        else f"formula: the strategy's, without activations ({KEPT!r} was not measured)."
    )
    return [
        *lines,
        "",
        f"Medians over {plan['starts']} starts of all processes, in each {result['rounds']} turns of at most "
        f"{plan['steps_per_turn']} counted steps; steps: counted in all.",
        f"Ratios: to {baseline['name']} of the same start and batch (batches: {len(result['batches'])}); (starts): the "
        "least and the most of a start.",
        "cpu: processor time a rank. The first step of a turn is not counted: other arms have had the caches.",
        "peak: memory of a rank over the bytes of the parameters. loss: largest relative difference from one process,",
        f"{TOLERANCE:.0e} allowed. {formula}",
    ]


def command_lines(command: str) -> list[str]:
    """The command, continued on the next line where it is too long for one."""
    lines = textwrap.wrap(
        command, COLUMNS - 2, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False
    )
    return [*(f"{line} \\" for line in lines[:-1]), *lines[-1:]]


def ordered(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """By strategy, controls and the floor first, ours after its peers."""
    return sorted(rows, key=lambda row: (STAGES.index(row["stage"]), KINDS.index(row["kind"])))


def bytes_without_states(result: dict[str, Any]) -> float | None:
    """Activations, the batch and all else: what a plain loop holds in addition to parameters, gradients and moments.

    Of the one that keeps its gradients. Where they are freed, the next forward's activations take their memory, and it
    is not known which of the two fills it at the peak.
    """
    for row in result["rows"]:
        if row["name"] == KEPT:
            found = figures_of(row, result["baseline"], result["workload"]["numel"])
            return found.peak - formula_ratio("none", 1) if found is not None and found.peak is not None else None
    return None


def _cells(row: dict[str, Any], result: dict[str, Any], rest: float | None) -> list[str]:
    name, baseline = row["name"], result["baseline"]
    if row["kind"] == "control":
        return [name, f"{row['outcome']} (loss {row['starts'][0]['deviation']:.1e})"]
    found = figures_of(row, baseline, result["workload"]["numel"])
    if found is None:
        return [name, f"{row['outcome']}: {row['reason']}"]
    worst = [turns["deviation"] for turns in row["starts"] if turns["deviation"] is not None]
    return [
        name,
        f"{found.wall_ms:.1f}",
        *_ratio_cells(found.ratio, name == baseline["name"]),
        f"{found.cpu_ms:.1f}",
        *_ratio_cells(found.cpu_ratio, name == baseline["name"]),
        "-" if found.peak is None else f"{found.peak:.2f}",
        f"{formula_of(row['stage'], result) + (rest or 0.0):.2f}",
        f"{max(worst):.0e}" if worst else "own",
        f"{found.steps}",
    ]


def _ratio_cells(ratio: Spread | None, is_baseline: bool) -> tuple[str, str]:
    if ratio is None:
        return ("1" if is_baseline else "-"), ""
    return f"{ratio.median:.2f}", f"({ratio.low:.2f}..{ratio.high:.2f})"


def _line(cells: Sequence[str]) -> str:
    if len(cells) == 2:  # a name and a sentence
        return f"{cells[0]:<{WIDTHS[0]}}  {cells[1]}"
    first, *rest = cells
    line = "".join(f" {cell:>{width}}" for cell, width in zip(rest, WIDTHS[1:], strict=True))
    return f"{first:<{WIDTHS[0]}}{line}"


def draw_ratios(path: Path, result: dict[str, Any], about: dict[str, Any]) -> None:
    """A bar an arm: its step time over the baseline's, with the least and most of a start, processor time as a mark."""
    from core.extras import require
    from core_plan.figure import figure

    baseline, workload = result["baseline"], result["workload"]
    shown: list[tuple[dict[str, Any], Spread, Spread]] = []
    for row in ordered(result["rows"]):
        found = figures_of(row, baseline, workload["numel"])
        if found is not None and found.ratio is not None and found.cpu_ratio is not None:
            shown.append((row, found.ratio, found.cpu_ratio))
    picture = figure(9, 1.6 + 0.32 * len(shown))
    axes = picture.subplots()
    for place, (row, ratio, cpu) in enumerate(shown):
        axes.barh(place, ratio.median, height=0.7, color=COLORS[row["kind"]])
        axes.plot([ratio.low, ratio.high], [place, place], color="black", linewidth=1)
        axes.plot(cpu.median, place, "|", color="tab:red", markersize=9, label=None if place else "processor time")
        axes.text(max(ratio.high, cpu.median) + 0.02, place, f"{ratio.median:.2f}", va="center", fontsize="small")
    axes.axvline(1.0, color="black", linewidth=0.8, linestyle="--")
    axes.set_yticks(range(len(shown)), [row["name"] for row, *_ in shown])
    axes.invert_yaxis()
    axes.set_xlabel(f"step time, {baseline['name']} = 1 (line: least and most of {result['plan']['starts']} starts)")
    axes.set_title(f"{workload['name']}, torch {about['torch']}, {about['date'][:10]}", fontsize="medium")
    if shown:
        axes.legend(loc="lower right", fontsize="small")
    path.parent.mkdir(parents=True, exist_ok=True)
    picture.savefig(path, dpi=120)
    require("matplotlib.pyplot", "drawing the plots").close(picture)
