"""Summary of several workloads of `python -m benchmarks steps`: ratios side by side, and the aims.

An aim of a stage is met by the better of the two settings that a user has, with and without overlap.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.step_figures import Figures, figures_of, formula_of
from benchmarks.step_table import bytes_without_states, ordered

AIMS = {  # of a stage, or of one of its arms
    "no_shard": 0.85,
    "optim": 0.85,
    "optim_grads": 0.95,
    "optim_grads_params": 0.85,
    "optim_grads_params gloo": 1.15,
}
AIMS_OF = {"tiny": {"optim": 0.77, "optim_grads_params": 0.88}}  # where a workload has its own
AIM_ACCUMULATED = 0.97
MEMORY_AIM = 1.05  # of the formula
PARAMS_OVER_OPTIM = {("gpt51m", 4): 0.55}  # memory with sharded parameters over that of 'optim', by workload and ranks
OURS = ("core {stage}", "core {stage} overlapped")
CELL = 18


@dataclass(frozen=True)
class Aim:
    """One aim and what came out. what: 'time' as a ratio to the baseline, or 'memory' over the parameters' bytes.

    peer: the best of the same stage in this run; '' where there was none.
    """

    workload: str
    stage: str
    what: str
    aim: float
    found: float
    setting: str
    peer: str
    peer_found: float | None

    @property
    def met(self) -> bool:
        """As the figures are printed: in hundredths."""
        return round(self.found, 2) <= round(self.aim, 2)

    def line(self) -> str:
        """A sentence."""
        off = abs(round(self.aim, 2) - round(self.found, 2))
        verdict = f"met, {off:.2f} below" if self.met else f"missed by {off:.2f}"
        line = f"{self.workload:<8} {self.stage:<12} {self.what:<7} aim {self.aim:>5.2f}: {self.found:>5.2f}, {verdict}"
        line += f" ({self.setting})"
        if self.peer_found is None:
            return line
        better = "below" if self.found < self.peer_found else "NOT below"
        return f"{line}; {better} {self.peer}, {self.peer_found:.2f}"


def aims_of(result: dict[str, Any]) -> list[Aim]:
    """The aims of one workload, of the stages of which an arm of ours was measured."""
    name, plan, baseline = result["workload"]["name"], result["plan"], result["baseline"]["name"]
    found = _measured(result)
    rest = bytes_without_states(result)
    aims = []
    for setting, aim in (AIMS | AIMS_OF.get(name, {})).items():
        stage = setting.partition(" ")[0]
        mine = {arm: found[arm] for arm in (one.format(stage=setting) for one in OURS) if arm in found}
        peers = {
            row["name"]: found[row["name"]]
            for row in [*result["rows"], result["baseline"]]
            if row["name"] in found and row["kind"] == "peer" and row["stage"] == stage
        }
        wanted = AIM_ACCUMULATED if plan["accumulation"] > 1 else aim
        aims += _aim(name, stage, "time", wanted, _times(mine, baseline), _times(peers, baseline))
        if rest is not None:
            formula = formula_of(stage, result) + rest  # type: ignore[arg-type]
            aims += _aim(name, stage, "memory", MEMORY_AIM * formula, _peaks(mine), _peaks(peers))
        share = PARAMS_OVER_OPTIM.get((name, plan["ranks"]))
        optim = _peaks({"core optim": found["core optim"]} if "core optim" in found else {})
        if setting == "optim_grads_params" and share is not None and optim:
            aims += _aim(name, stage, "memory", share * optim["core optim"], _peaks(mine), optim)
    return aims


def _aim(
    workload: str, stage: str, what: str, aim: float, mine: dict[str, float], peers: dict[str, float]
) -> list[Aim]:
    if not mine:
        return []
    setting = min(mine, key=mine.__getitem__)
    peer = min(peers, key=peers.__getitem__, default="")
    return [Aim(workload, stage, what, aim, mine[setting], setting, peer, peers.get(peer))]


def _times(found: dict[str, Figures], baseline: str) -> dict[str, float]:
    """The baseline's is 1. Only arms that were measured in the same turns."""
    times = {name: one.ratio.median for name, one in found.items() if one.ratio is not None}
    return times | {name: 1.0 for name in found if name == baseline}


def _peaks(found: dict[str, Figures]) -> dict[str, float]:
    return {name: one.peak for name, one in found.items() if one.peak is not None}


def _measured(result: dict[str, Any]) -> dict[str, Figures]:
    rows = [*result["rows"], result["baseline"]]
    numel = result["workload"]["numel"]
    return {row["name"]: one for row in rows if (one := figures_of(row, result["baseline"], numel)) is not None}


def summary(results: Sequence[dict[str, Any]]) -> list[str]:
    """Arms against workloads: step time over the baseline's, in brackets the same of processor time."""
    columns = {result["workload"]["name"]: _column(result) for result in results}
    first = results[0]["baseline"]["name"]
    names = list(dict.fromkeys(row["name"] for result in results for row in _shown(result)))
    lines = [f"{'ratio to ' + first + ' (of cpu)':<31}" + "".join(f"{name:>{CELL}}" for name in columns)]
    for name in names:
        lines.append(f"{name:<31}" + "".join(f"{column.get(name, 'not run'):>{CELL}}" for column in columns.values()))
    return lines


def _shown(result: dict[str, Any]) -> list[dict[str, Any]]:
    return [row for row in ordered([*result["rows"], result["baseline"]]) if row["kind"] != "control"]


def _column(result: dict[str, Any]) -> dict[str, str]:
    found = _measured(result)
    column = {}
    for row in _shown(result):
        one = found.get(row["name"])
        if one is None:
            column[row["name"]] = row["outcome"]
        elif one.ratio is None or one.cpu_ratio is None:
            column[row["name"]] = f"{one.wall_ms:.1f} ms" if row is result["baseline"] else "-"
        else:
            column[row["name"]] = f"{one.ratio.median:.2f} ({one.cpu_ratio.median:.2f})"
    return column


def as_values(results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """For the JSON: every arm's figures by workload, and the aims."""
    return {
        "figures": {
            result["workload"]["name"]: {name: asdict(one) for name, one in _measured(result).items()}
            for result in results
        },
        "aims": [asdict(aim) | {"met": aim.met} for result in results for aim in aims_of(result)],
    }
