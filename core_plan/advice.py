"""Advice: the layouts of a model that fit on a number of ranks, fastest first, and the fewest ranks that fit.

All layouts that can be built are estimated. Layouts that may be shown are planned exactly and sorted by their plans.
"""

from __future__ import annotations

import contextlib
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path
from typing import Any, TypeVar

from core.distributed.distributed_data_parallel_config import STRATEGIES
from core.pipeline_parallel.schedules import find_schedule
from core.watch.collector_pause import collector_paused
from core_plan.choices import AXES, Choice, Sizes, axes, choices, flags_of, with_choice
from core_plan.device import Device, read_device
from core_plan.estimates import Estimate, Estimates, Sharding
from core_plan.job.config import JobConfig
from core_plan.job.config_file import load_config
from core_plan.job.errors import ConfigError
from core_plan.model_run import ModelRun
from core_plan.report import gib
from core_plan.run_memory import Run
from core_plan.run_plan import RunPlan, plan_run, run_of
from core_plan.shared_figures import SharedFigures
from core_plan.state_bytes import SCRATCH
from core_plan.suggestions import MOST_RANKS

SURE = 1.2  # an estimate is within this factor of its plan; a test checks it
PLANNED = 4  # at most this many times `most` layouts are planned exactly; the same limit for layouts that do not fit
LEAST = 5  # number of layouts with the lowest peak that are planned if no other is found
EQUAL = 1.01  # steps within this factor count as equally fast: a plan is not more accurate
STEPS = 16  # at most this many numbers of ranks are tried up to the next power of two


Layout = TypeVar("Layout", bound="Estimate | Candidate")


def in_order(found: Iterable[Layout]) -> list[Layout]:
    """Sort layouts, best first.

    Layouts whose steps are within a factor EQUAL of the fastest are sorted by peak memory, then the remaining ones in
    the same way. So no layout precedes one that is faster by more than EQUAL.
    """
    by_time = sorted(found, key=lambda one: (one.seconds, one.peak, one.choice))
    ends = [one.seconds for one in by_time]
    ordered: list[Layout] = []
    while len(ordered) < len(by_time):
        begin = len(ordered)
        equal = by_time[begin : bisect_right(ends, EQUAL * ends[begin])]
        ordered += sorted(equal, key=lambda one: one.peak)
    return ordered


@dataclass(frozen=True)
class Candidate:
    """A layout with its exact plan.

    Attributes:
        choice: The layout.
        config: Configuration of a run in this layout.
        plan: The exact plan.
        reason: Reason why it is worse than the first candidate; empty for the first.
        flags: Options that change the configuration given to `advise` into this one.
    """

    choice: Choice
    config: JobConfig | ModelRun
    plan: RunPlan
    reason: str = ""
    flags: str = ""

    @property
    def seconds(self) -> float:
        """Seconds of a step."""
        return self.plan.time.seconds

    @property
    def peak(self) -> int:
        """Bytes of the fullest rank."""
        return self.plan.fullest.peak


@dataclass(frozen=True)
class Advice:
    """Result of `advise`.

    Attributes:
        candidates: Exactly planned layouts, best first, each with different axis sizes; empty if no layout fits.
        considered: Number of layouts that can be built.
        fitting: Number of layouts that fit, by estimate.
        fewest: Smallest number of ranks on which a layout fits, as found by `Search.fewest`.
        compared: Sentence with the rank of the layout given as `compare`.
    """

    candidates: Sequence[Candidate]
    considered: int
    fitting: int
    fewest: int | None
    compared: str = ""

    def describe(self) -> str:
        """Return the advice as text."""
        lines = [f"{self.considered:,} layouts can be built, and {self.fitting:,} of them fit by estimate"]
        rows = [(c.choice.words(has_experts=Sizes.of(c.config).experts is not None), c) for c in self.candidates]
        width = max((len(words) for words, _ in rows), default=0)
        for place, (words, found) in enumerate(rows, 1):
            cells = f"{found.plan.time.seconds:>8.3g} s{gib(found.plan.fullest.peak):>12}"
            lines.append(f"{place:>3}. {words:<{width}}{cells}  {found.reason}".rstrip())
        if self.candidates:
            first = self.candidates[0]
            lines.append(f"the first by options: {first.flags}")
        else:
            lines.append("no layout fits on so many ranks")
        if self.compared:
            lines.append(self.compared)
        if self.fewest is not None:
            lines.append(f"the smallest number of ranks that fits is {self.fewest}")
        elif not self.candidates:
            lines.append(f"and none on any number of ranks that was tried up to {MOST_RANKS:,}")
        return "\n".join(lines)


def advise(
    config: JobConfig | ModelRun | Path | str,
    ranks: int,
    device: str | Device = "h100",
    *,
    most: int = 5,
    fixed: Mapping[str, int] | None = None,
    compare: Mapping[str, int] | None = None,
    progress: Callable[[str], None] = lambda words: None,
) -> Advice:
    """Find the layouts of a model that fit on a number of ranks, fastest first.

    Args:
        config: Configuration of the main job, the path of its TOML file, or a ModelRun of a Hugging Face model. Its
            layout, sharding, microbatch size and recomputation are ignored; all other settings are kept.
        ranks: Number of ranks.
        device: Name of a known device, the path of a device file, or a Device.
        most: Number of layouts to return.
        fixed: Sizes to keep: axes by name (`tp`, `dp`, ...), `micro`, `zero`, and `recompute`, which must be 1.
        compare: Sizes of a layout, in the form of `fixed`. The advice reports the place of the best layout with them.
        progress: Called with a line when estimates and plans begin, and for each layout that is the best so far.

    Returns:
        Layouts with the reason why each is worse than the first. If none fits, the fewest ranks are searched above
        `ranks`. After Ctrl-C, the best of the layouts planned so far.

    Raises:
        ConfigError: If no layout on so many ranks can have this model or batch. The text has the arithmetic.
    """
    if isinstance(config, (str, Path)):
        config = load_config(["--config", str(config)])
    search = Search(config, read_device(device) if isinstance(device, str) else device, fixed or {}, progress)
    progress(f"estimating all layouts of {ranks:,} ranks")
    found = in_order(search.estimates(ranks))
    if not found:
        raise ConfigError(search.why_none(ranks))
    progress(f"planning the best of {len(found):,} layouts; Ctrl-C gives the best so far")
    room = search.device.room(ranks)
    best = search.planned([estimate for estimate in found if estimate.peak <= SURE * room], ranks, most)
    shown = [replace(one, reason=_reason(best[0], one)) if place else one for place, one in enumerate(best)]
    if search.is_interrupted:
        words = "interrupted: the best of the layouts that were planned before; others may be faster"
        return Advice(shown, len(found), sum(one.peak <= room for one in found), None, words)
    words = "" if compare is None else _compared(search, found, compare, shown, ranks)
    return Advice(shown, len(found), sum(one.peak <= room for one in found), search.fewest(ranks), words)


def _compared(
    search: Search, found: Sequence[Estimate], sizes: Mapping[str, int], best: Sequence[Candidate], ranks: int
) -> str:
    """Describe the place of the best layout with the given sizes, and why it is not first."""
    name = " ".join(f"{axis} {size}" for axis, size in sizes.items())
    own = Search(search.config, search.device, {**search.fixed, **sizes})
    mine = in_order(own.estimates(ranks))
    if not mine:
        return f"{name}: {own.why_none(ranks)}"
    room = search.device.room(ranks)
    fitting = [one for one in mine if one.peak <= room]
    planned = next(filter(None, (own.planned_as(one.choice, ranks) for one in (fitting or mine)[:LEAST])), None)
    if planned is None:
        return f"{name}: no layout of these sizes can be built after all"
    words = planned.choice.words(has_experts=search.sizes.experts is not None)
    if not planned.plan.fits:
        held = gib(min(one.peak for one in mine))
        return f"{name} does not fit: the layout that holds least would hold {held} of {gib(room)}"
    shown = {one.choice.axes: one for one in best if one.choice.axes != planned.choice.axes}
    everything: list[Estimate | Candidate] = in_order([planned, *shown.values()])
    if everything[-1] is planned:  # last of the shown layouts; others may be better by estimate
        known = {planned.choice.axes, *shown}
        others = [one for one in found if one.peak <= room and one.choice.axes not in known]
        everything = in_order([planned, *shown.values(), *others])
    better = {one.choice.axes for one in takewhile(lambda one: one is not planned, everything)}
    is_best = not better and in_order([planned, *best[:1]])[0] is planned
    reason = "no layout is better" if is_best or not best else _reason(best[0], planned)
    return f"{name} stands at place {1 + len(better)}, as {words}: {planned.seconds:.3g} s, {reason}"


class Search:
    """Search over the layouts of one model.

    Args:
        config: The model; see `advise`.
        device: The device of each rank.
        fixed: Sizes to keep; see `advise`.
        progress: Called with a line about the progress; see `advise`.

    Attributes:
        is_interrupted: True after Ctrl-C, once a layout has been planned.
    """

    def __init__(
        self,
        config: JobConfig | ModelRun,
        device: Device,
        fixed: Mapping[str, int],
        progress: Callable[[str], None] = lambda words: None,
    ) -> None:
        self.progress = progress
        self.is_interrupted = False
        self.config = config
        self.device = device
        self.fixed = fixed
        for name, size in fixed.items():
            low, high = (0, len(STRATEGIES) - 1) if name == "zero" else (1, MOST_RANKS)
            if not low <= size <= high:
                raise ConfigError(f"{name} {size}: expected {low} to {high:,}")
        self.sizes = Sizes.of(config)
        self.figures = SharedFigures(self.sizes.batch)
        self.shardings: dict[bool, dict[int, Sharding]] = {}  # key True: ranks with several stages
        self.refused: set[tuple[Any, ...]] = set()  # splits that the layers reject, without and with a pipeline
        some = [(False, True)] * self.sizes.has_parts  # (complete layers, parts of layers)
        self.recomputations = [(True, False)] if "recompute" in fixed else [(False, False), *some, (True, False)]

    @collector_paused()
    def estimates(self, ranks: int, *, smallest: bool = False) -> list[Estimate]:
        """Estimate all layouts that can be built on a number of ranks.

        Args:
            ranks: Number of ranks.
            smallest: Only consider layouts that may need the least memory: the smallest microbatches, one stage per
                rank, with and without recomputation of layers.
        """
        built: list[tuple[Choice, Run, list[int]]] = []
        for choice, micros in choices(self.sizes, ranks, self.fixed):
            for recompute, parts in self.recomputations:
                if smallest and (parts or (choice.vpp > 1 and "vpp" not in self.fixed)):
                    continue
                one = choice._replace(recompute=recompute, parts=parts)
                run = self._run(one, ranks)
                if run is None:  # not with any recomputation
                    break
                legal = [micro for micro in micros if _is_legal(run, micro)]
                built.append((one, run, legal[:1] if smallest else legal))
        of_ranks: dict[bool, Estimates] = {}
        for several in {run.layout.chunks > 1 for _, run, _ in built}:
            if not self.shardings.get(several):
                self.shardings[several] = self._shardings(
                    [row for row in built if several == (row[1].layout.chunks > 1)]
                )
            of_ranks[several] = Estimates(self.device, ranks, self.figures, self.shardings[several])
        found: list[Estimate] = []
        for choice, run, micros in built:
            split = *choice.split, choice.pp > 1
            shared = of_ranks[run.layout.chunks > 1]
            if split in self.refused or not shared.shardings:
                continue
            try:
                found += shared.of_layout(choice, run, micros)
            except (ValueError, RuntimeError):  # the layers reject the split
                self.refused.add(split)
        return found

    def _shardings(self, built: Sequence[tuple[Choice, Run, list[int]]]) -> dict[int, Sharding]:
        """Return the sharding for each `zero`, read from the first layout that its layers accept.

        Layouts are tried in order of layers per rank, fewest first.
        """
        found: dict[int, Sharding] = {}
        for choice, run, _ in sorted(built, key=lambda row: -row[0].pp * row[0].tp * row[0].ep):
            split = *choice.split, choice.pp > 1
            if split in self.refused:
                continue
            for zero in [self.fixed["zero"]] if "zero" in self.fixed else range(4):
                sharded = self._run(choice._replace(zero=zero), run.grid.world_size)
                with contextlib.suppress(ValueError, RuntimeError):  # this sharding or the split is rejected
                    found |= {zero: Sharding.of(sharded)} if sharded is not None else {}
            if found:
                break
            self.refused.add(split)
        return found

    def _run(self, choice: Choice, ranks: int) -> Run | None:
        """Return the run of a layout; None if it cannot be built."""
        try:
            return run_of(with_choice(self.config, choice), ranks, self.device)
        except (ValueError, RuntimeError):
            return None

    def why_none(self, ranks: int) -> str:
        """Explain why no layout of `ranks` can be built, and name a number of ranks that has one.

        Raises:
            ConfigError: If planning itself reports the reason.
        """
        dps = sorted({dp for *_, dp in axes(self.sizes, ranks, self.fixed)})
        near = (n for step in range(1, ranks + 1) for n in (ranks - step, ranks + step) if n > 0)
        built = next((n for n in near if next(choices(self.sizes, n, self.fixed), None) is not None), None)
        other = "" if built is None else f", or {built} ranks"
        if not dps:
            given = "".join(f", of which {axis} {size} is given," for axis, size in self.fixed.items() if axis in AXES)
            return f"no sizes of tp, pp and cp that the model allows{given} divide {ranks} ranks; use others{other}"
        if all(self.sizes.batch % dp for dp in dps):
            words = ", ".join(map(str, dps))
            return (
                f"no layout of {ranks} ranks can be built: they leave {words} data ranks, by which a batch of "
                f"{self.sizes.batch} sequences is not divisible; use another --global-batch{other}"
            )
        chosen = next((choice for choice, _ in choices(self.sizes, ranks, self.fixed)), None)
        plan_run(self.config if chosen is None else with_choice(self.config, chosen), ranks, self.device)
        return f"no layout of {ranks} ranks can be built with these options; use others{other}"

    def exactly(self, choice: Choice, ranks: int) -> Candidate | None:
        """Plan a layout exactly; None if it cannot be built after all, or does not fit."""
        found = self.planned_as(choice, ranks)
        return None if found is None or not found.plan.fits else found

    def planned_as(self, choice: Choice, ranks: int) -> Candidate | None:
        """Plan a layout exactly; None if it cannot be built after all."""
        config = with_choice(self.config, choice)
        try:
            plan = plan_run(config, ranks, self.device)
        except (ValueError, RuntimeError):
            return None
        return Candidate(choice, config, plan, flags=flags_of(self.config, choice))

    def planned(self, fitting: Sequence[Estimate], ranks: int, most: int) -> list[Candidate]:
        """Return the best layouts by their plans, each with different axis sizes.

        All layouts are planned that may be better than the last one shown, given the error of an estimate. If too many
        turn out not to fit, only layouts with a larger margin to the memory limit are planned.

        Args:
            fitting: Layouts that fit by estimate, fastest first.
            ranks: Number of ranks.
            most: Number of layouts to return.
        """
        best: dict[tuple[int, ...], Candidate] = {}
        room, limit = self.device.room(ranks), PLANNED * most
        fits = misfits = 0
        for estimate in fitting:
            if self.is_interrupted:
                break
            if estimate.choice.axes in best or estimate.peak > room * (SURE, 1.0, 1 / SURE)[min(misfits // limit, 2)]:
                continue
            ordered = in_order(best.values())
            enough = len(ordered) >= most and estimate.seconds > SURE * ordered[most - 1].seconds
            if enough or fits == limit or misfits == 3 * limit:
                break
            try:
                found = self.exactly(estimate.choice, ranks)
            except KeyboardInterrupt:
                if not best:
                    raise
                self.is_interrupted = True
                continue
            if found is None:
                misfits += 1
                continue
            fits += 1
            best[found.choice.axes] = found
            if in_order(best.values())[0] is found:
                words = found.choice.words(has_experts=self.sizes.experts is not None)
                self.progress(f"the best of {fits} planned so far: {words}, {found.seconds:.3g} s")
        if not best:
            least = sorted(fitting, key=lambda one: one.peak)[:LEAST]
            planned = (self.exactly(estimate.choice, ranks) for estimate in least)
            best = {found.choice.axes: found for found in planned if found is not None}
        first = in_order(best.values())[:most]
        return first if self.is_interrupted else in_order(self._with_instances(one, ranks) for one in first)

    def _with_instances(self, found: Candidate, ranks: int) -> Candidate:
        """Return the better of a layout and the same layout with one optimizer instance per machine."""
        choice = found.choice
        sharing = ranks // (choice.tp * choice.pp)  # ranks over which the optimizer is sharded
        near = max(1, self.device.ranks_per_machine // choice.tp)
        if isinstance(self.config, ModelRun) or self.config.ddp.num_distributed_optimizer_instances > 1:
            return found
        if choice.zero == 0 or near == 1 or sharing <= near or sharing % near:
            return found
        other = self.exactly(choice._replace(instances=sharing // near), ranks)
        return found if other is None else in_order([found, other])[0]

    def fewest(self, ranks: int) -> int | None:
        """Return the smallest number of ranks on which a layout fits.

        All numbers up to `ranks` are tried. Above, powers of two are tried up to MOST_RANKS, and numbers of complete
        machines between the first that fits and the power before it. None if none of these fits.
        """
        found = next(filter(self.fits_on, range(1, ranks + 1)), None)
        few, many = ranks, 1 << ranks.bit_length()
        while found is None and many <= MOST_RANKS:
            if self.fits_on(many):
                found = next(filter(self.fits_on, self._between(few, many)), many)
            few, many = many, 2 * many
        return found

    def _between(self, few: int, many: int) -> range:
        """Return numbers of ranks on complete machines between two numbers, at least `many` / STEPS apart."""
        machine = self.device.ranks_per_machine
        step = -(-many // STEPS // machine) * machine
        return range(few // step * step + step, many, step)

    def fits_on(self, ranks: int) -> bool:
        """Return True if a layout fits on a number of ranks. The layouts with the lowest estimated peak are planned."""
        room = self.device.room(ranks)
        if self.least > ranks * room:
            return False
        for estimate in sorted(self.estimates(ranks, smallest=True), key=lambda one: one.peak)[:LEAST]:
            if estimate.peak > SURE * room:
                return False
            if self.exactly(estimate.choice, ranks) is not None:
                return True
        return False

    @property
    def least(self) -> float:
        """Lower bound of the bytes on all ranks together: parameters, gradients, master weights and moments once."""
        shardings = [sharding for known in self.shardings.values() for sharding in known.values()]
        kept = [sum(size for kind, size in one.each.items() if kind != SCRATCH) for one in shardings]
        return self.sizes.numel * min(kept, default=0)


def _is_legal(run: Run, micro: int) -> bool:
    kind = find_schedule(run.schedule)
    return run.layout.num_stages == 1 or kind.legal_microbatches(run.microbatches // micro, run.layout)


def _reason(first: Candidate, other: Candidate) -> str:
    """Describe the part of a step that grows most."""
    words = {
        "compute": "forward and backward",
        "exchanges": "exchanges within layers",
        "bubble": "the bubble of the pipeline",
        "slower_ranks": "waits for slower ranks of the pipeline",
        "gradients": "reductions that nothing hides",
        "optimizer": "the optimizer",
    }
    times = first.plan.time, other.plan.time
    grown = {name: getattr(times[1], name) - getattr(times[0], name) for name in words}
    most = max(grown, key=lambda name: grown[name])
    if other.seconds <= EQUAL * first.seconds and other.peak >= first.peak:
        return f"as fast, and holds {gib(other.peak - first.peak)} more"
    pace = other.seconds / first.seconds
    return f"{pace:.2f} times the time: {grown[most]:.3g} s more of {words[most]}"
