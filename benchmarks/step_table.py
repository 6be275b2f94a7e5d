"""The table and the picture of `python -m benchmarks steps`, from what it writes to JSON."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.step_figures import flat, formula_ratio, ratio_by_round, ratio_of_medians, spread

STAGES = ("none", "no_shard", "optim", "optim_grads", "optim_grads_params")
KINDS = ("control", "floor", "peer", "ours")
HEADINGS = ("arm", "step ms", "(quartiles)", "ratio", "by round", "cpu ms", "ratio", "peak", "formula", "loss")
KEPT = "no communication, kept"
WIDTHS = (26, 8, 16, 6, 20, 8, 6, 6, 8, 8)
COLORS = {"floor": "#bbbbbb", "peer": "#7fb3d5", "ours": "#2e6da4"}


def table(result: dict[str, Any], ranks: int, accumulation: int, tolerance: float, about: dict[str, Any]) -> list[str]:
    """The lines of one workload's table, what the columns mean included."""
    workload, baselines = result["workload"], result["baselines"]
    lines = [
        f"{workload['name']}: {workload['sizes']}",
        f"{ranks} ranks, gloo, 1 thread each, accumulation {accumulation}; torch {about['torch']}, {about['machine']}, "
        f"{about['date'][:10]}, commit {about['commit'] or 'unknown'}",
        about["command"],
        "",
        _line(HEADINGS),
    ]
    extra = _beside_states(result)
    for row in ordered([*result["rows"], pooled(baselines)]):
        lines.append(_line(_cells(row, baselines, workload["numel"], extra, ranks)))
    medians = [1e3 * spread(flat(row["wall_s"])).median for row in baselines if row["wall_s"]]
    lines += [
        "",
        f"Ratios: to {baselines[0]['name']} of the same batch. It was in all {len(baselines)} batches, with medians of "
        f"{', '.join(f'{median:.0f}' for median in medians) or 'no'} ms; its line pools them.",
        "by round: ratio of the medians of each round, median (quartiles) over rounds. cpu: processor time a rank.",
        "The first step of a turn is not counted: the arms before it have had the caches.",
        "peak: memory a rank (shared pages counted once) over the bytes of the parameters, once warm. "
        + (
            f"formula: the strategy's, with the {extra:.2f} that {KEPT!r} holds beside its states."
            if extra is not None
            else f"formula: the strategy's, without activations ({KEPT!r} was not measured)."
        ),
        f"loss: largest relative difference from one process over the first {len(result['reference'])} steps, "
        f"{tolerance:.0e} allowed.",
    ]
    return lines


def pooled(baselines: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The baseline of all batches as one row."""
    whole = dict(baselines[0])
    for key in ("wall_s", "cpu_s"):
        whole[key] = [steps for row in baselines for steps in row[key]]
    return whole


def ordered(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """By strategy, controls and the floor first, ours after its peers."""
    return sorted(rows, key=lambda row: (STAGES.index(row["stage"]), KINDS.index(row["kind"])))


def peak_ratio(row: dict[str, Any], numel: int) -> float | None:
    """Peak memory of a rank (the mean over ranks) over the bytes of the fp32 parameters; None if not measured."""
    if not row["memory_peak"]:
        return None
    grown = [peak - before for peak, before in zip(row["memory_peak"], row["memory_before"], strict=True)]
    return statistics.fmean(grown) / (4 * numel)


def _beside_states(result: dict[str, Any]) -> float | None:
    """Activations, the batch and all else: what a plain loop holds beside parameters, gradients and moments.

    Of the one that keeps its gradients. Where they are freed, the next forward's activations take their memory, and it
    is not to be told which of the two fills it at the peak.
    """
    for row in result["rows"]:
        if row["name"] == KEPT and (peak := peak_ratio(row, result["workload"]["numel"])) is not None:
            return peak - 4
    return None


def _cells(
    row: dict[str, Any], baselines: Sequence[dict[str, Any]], numel: int, extra: float | None, ranks: int
) -> list[str]:
    name = row["name"]
    if row["kind"] == "control":
        return [name, f"{row['outcome']} (loss {row['deviation']:.1e})"]
    if row["outcome"] == "wrong loss":
        return [name, f"WRONG LOSS: {row['reason']}"]
    if row["outcome"] != "measured" or not row["wall_s"]:
        return [name, f"{row['outcome']}: {row['reason']}"]
    baseline = baselines[row["batch"]]
    wall, cpu = spread(flat(row["wall_s"])), spread(flat(row["cpu_s"]))
    cells = [name, f"{1e3 * wall.median:.1f}", f"({1e3 * wall.low:.1f}..{1e3 * wall.high:.1f})"]
    if name == baseline["name"]:
        cells += ["1", ""]
    elif baseline["outcome"] != "measured":
        cells += ["-", f"baseline {baseline['outcome']}"]
    else:
        by_round = ratio_by_round(row["wall_s"], baseline["wall_s"])
        cells.append(f"{ratio_of_medians(row['wall_s'], baseline['wall_s']):.2f}")
        cells.append(f"{by_round.median:.2f} ({by_round.low:.2f}..{by_round.high:.2f})")
    cells.append(f"{1e3 * cpu.median:.1f}")
    same = name == baseline["name"] or baseline["outcome"] != "measured"
    cells.append("1" if same else f"{ratio_of_medians(row['cpu_s'], baseline['cpu_s']):.2f}")
    peak = peak_ratio(row, numel)
    cells.append("-" if peak is None else f"{peak:.2f}")
    cells.append(f"{formula_ratio(row['stage'], ranks) + (extra or 0.0):.2f}")
    cells.append("own" if row["deviation"] is None else f"{row['deviation']:.0e}")
    return cells


def _line(cells: Sequence[str]) -> str:
    if len(cells) == 2:  # a name and a sentence
        return f"{cells[0]:<{WIDTHS[0]}}  {cells[1]}"
    first, *rest = cells
    return f"{first:<{WIDTHS[0]}}" + "".join(f" {cell:>{width}}" for cell, width in zip(rest, WIDTHS[1:], strict=True))


def draw_ratios(path: Path, result: dict[str, Any], about: dict[str, Any]) -> None:
    """A bar an arm: its step time over the baseline's, with the quartiles over rounds, and processor time as a mark."""
    from core.training.extras import require
    from core.training.plots import figure

    baselines = result["baselines"]
    shown = [row for row in ordered(result["rows"]) if row["outcome"] == "measured" and row["wall_s"]]
    shown = [row for row in shown if baselines[row["batch"]]["outcome"] == "measured"]
    picture = figure(9, 1.6 + 0.32 * len(shown))
    axes = picture.subplots()
    for place, row in enumerate(shown):
        baseline = baselines[row["batch"]]
        ratio = ratio_of_medians(row["wall_s"], baseline["wall_s"])
        by_round = ratio_by_round(row["wall_s"], baseline["wall_s"])
        axes.barh(place, ratio, height=0.7, color=COLORS[row["kind"]])
        axes.plot([by_round.low, by_round.high], [place, place], color="black", linewidth=1)
        cpu = ratio_of_medians(row["cpu_s"], baseline["cpu_s"])
        axes.plot(cpu, place, "|", color="tab:red", markersize=9, label="processor time" if place == 0 else None)
        axes.text(max(ratio, by_round.high, cpu) + 0.02, place, f"{ratio:.2f}", va="center", fontsize="small")
    axes.axvline(1.0, color="black", linewidth=0.8, linestyle="--")
    axes.set_yticks(range(len(shown)), [row["name"] for row in shown])
    axes.invert_yaxis()
    axes.set_xlabel(f"step time, {baselines[0]['name']} = 1 (line: quartiles over rounds)")
    axes.set_title(f"{result['workload']['name']}, torch {about['torch']}, {about['date'][:10]}", fontsize="medium")
    if shown:
        axes.legend(loc="lower right", fontsize="small")
    path.parent.mkdir(parents=True, exist_ok=True)
    picture.savefig(path, dpi=120)
    require("matplotlib.pyplot", "drawing the plots").close(picture)
