"""Advice: the layouts of a model that fit on a number of ranks, fastest first, and the fewest ranks that fit.

Planning every layout would take hours. The work and the exchanges of a layout's layers bound its step from below, so
layouts are planned in the order of these bounds, until none of the others can be faster than those that are shown.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

from core.distributed.distributed_data_parallel_config import STRATEGIES
from core.distributed.layout.model_plan import shard_and_replica
from core.groups.rank_grid import DATA_KINDS
from core.number_ranges import divisors
from core.pipeline_parallel.schedules import find_schedule
from core.watch.collector_pause import collector_paused
from core_plan.choices import AXES, Choice, Sizes, axes, choices, flags_of, with_choice
from core_plan.device import Device, read_device
from core_plan.job.config import JobConfig
from core_plan.job.config_file import load_config
from core_plan.job.errors import ConfigError
from core_plan.model_run import ModelRun
from core_plan.report import gib
from core_plan.run_memory import Run, Wrapped, least_activations, parts_of_stages
from core_plan.run_plan import RunPlan, plan_of, plan_run, run_of
from core_plan.state_bytes import GRADIENTS, MASTERS, MOMENTS, PARAMETERS
from core_plan.step_figures import PartFigures
from core_plan.step_time import SHARES, least_seconds
from core_plan.suggestions import MOST_RANKS

EQUAL = 1.01  # steps within this factor count as equally fast: a plan is not more accurate
MOST_PLANNED = 200  # layouts; a plan takes about a tenth of a second
SHARDINGS = (1, 3, 2, 0)  # in the order in which they are tried
STATES = (PARAMETERS, GRADIENTS, MASTERS, MOMENTS)
LEAST = 4  # layouts that are planned to find out whether any fits on a number of ranks


def in_order(found: Iterable[Candidate]) -> list[Candidate]:
    """Sort layouts, best first.

    Layouts whose steps are within a factor EQUAL of the fastest are sorted by peak memory, then the remaining ones in
    the same way. So no layout precedes one that is faster by more than EQUAL.
    """
    by_time = sorted(found, key=lambda one: (one.seconds, one.peak, one.choice))
    ends = [one.seconds for one in by_time]
    ordered: list[Candidate] = []
    while len(ordered) < len(by_time):
        begin = len(ordered)
        equal = by_time[begin : bisect_right(ends, EQUAL * ends[begin])]
        ordered += sorted(equal, key=lambda one: one.peak)
    return ordered


@dataclass(frozen=True)
class Candidate:
    """A layout with its plan.

    ``reason`` says why it is worse than the first candidate, and ``flags`` are the options that change the
    configuration given to ``advise`` into this one; ``advise`` sets both.
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

    @property
    def words(self) -> str:
        """The layout for a table."""
        return self.choice.words(has_experts=Sizes.of(self.config).experts is not None)


@dataclass(frozen=True)
class Advice:
    """Result of ``advise``.

    Attributes:
        candidates: Layouts with their plans, best first, each with different axis sizes; empty if no layout fits.
        considered: Number of layouts that can be built.
        planned: Number of layouts that were planned. The bounds of all others are above those that are shown.
        fewest: Smallest number of ranks on which a layout fits, as found by ``Search.fewest``.
        notes: Sentences: the rank of the layout given as ``compare``, and why the search ended early.
    """

    candidates: list[Candidate]
    considered: int
    planned: int
    fewest: int | None
    notes: tuple[str, ...] = ()

    def describe(self) -> str:
        """Return the advice as text."""
        lines = [f"{self.considered:,} layouts can be built, and {self.planned:,} of them were planned"]
        width = max((len(found.words) for found in self.candidates), default=0)
        for place, found in enumerate(self.candidates, 1):
            cells = f"{found.seconds:>10.3g} s{gib(found.peak):>12}"
            lines.append(f"{place:>3}. {found.words:<{width}}{cells}  {found.reason}".rstrip())
        if self.candidates:
            lines.append(f"the first by options: {self.candidates[0].flags}")
        else:
            lines.append("no layout fits on so many ranks")
        lines += self.notes
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
        fixed: Sizes to keep: axes by name (``tp``, ``dp``, ...), ``micro``, ``zero``, and ``recompute``, which must be
            1.
        compare: Sizes of a layout, in the form of ``fixed``. The advice reports the place of the best layout with them.
        progress: Called with a line when the search begins, and for each layout that is the best so far.

    Returns:
        Layouts with the reason why each is worse than the first. After Ctrl-C, the best of the layouts planned so far.

    Raises:
        ConfigError: If no layout on so many ranks can have this model or batch. The text has the arithmetic.
    """
    if isinstance(config, (str, Path)):
        config = load_config(["--config", str(config)])
    search = Search(config, read_device(device) if isinstance(device, str) else device, fixed or {}, progress)
    progress(f"looking at all layouts of {ranks:,} ranks")
    rows = search.rows(ranks)
    if not rows:
        raise ConfigError(search.why_none(ranks))
    considered = len(rows) * len(search.zeros)
    progress(f"planning the best of {considered:,} layouts; Ctrl-C gives the best so far")
    compared = None if compare is None else search.best_with(compare, ranks)
    best = search.best(rows, ranks, most, compared.seconds if isinstance(compared, Candidate) else 0.0)
    shown = [
        replace(one, flags=flags_of(config, one.choice), reason=_reason(best[0], one) if one is not best[0] else "")
        for one in best[:most]
    ]
    planned, ended = search.planned, search.ended
    if isinstance(compared, Candidate):
        compared = _place(compare or {}, compared, best)
    notes = tuple(filter(None, (compared, ended)))
    return Advice(shown, considered, planned, None if search.is_interrupted else search.fewest(ranks), notes)


def _place(sizes: Mapping[str, int], compared: Candidate, best: Sequence[Candidate]) -> str:
    """Describe the place of a layout among the best of each axis sizes, and why it is not first."""
    others = [one for one in best if one.choice.axes != compared.choice.axes]
    better = list(takewhile(lambda one: one is not compared, in_order([*others, compared])))
    is_best = not better and in_order([compared, *best[:1]])[0] is compared
    reason = "no layout is better" if is_best else _reason(best[0], compared)
    place = f"stands at place {1 + len(better)}, as {compared.words}"
    name = " ".join(f"{axis} {size}" for axis, size in sizes.items())
    return f"{name} {place}: {compared.seconds:.3g} s, {reason}"


class Row(NamedTuple):
    """A layout except for its sharding."""

    bound: float  # no step of it takes fewer seconds
    working: int  # bytes at the highest point of one part of one microbatch
    choice: Choice


class Search:
    """Search over the layouts of one model. Its arguments are those of ``advise``."""

    def __init__(
        self,
        config: JobConfig | ModelRun,
        device: Device,
        fixed: Mapping[str, int],
        progress: Callable[[str], None] = lambda words: None,
    ) -> None:
        self.progress = progress
        self.planned = 0
        self.is_interrupted = False
        self.ended = ""  # a sentence if the search ended before the bounds ended it
        self.least_peak: float = math.inf  # bytes, of the planned layouts that do not fit
        self.config = config
        self.device = device
        self.fixed = fixed
        for name, size in fixed.items():
            low, high = (0, len(STRATEGIES) - 1) if name == "zero" else (1, MOST_RANKS)
            if not low <= size <= high:
                raise ConfigError(f"{name} {size}: expected {low} to {high:,}")
        self.sizes = Sizes.of(config)._replace(most_tp=device.ranks_per_machine)
        self.zeros = [fixed["zero"]] if "zero" in fixed else list(SHARDINGS)
        some = [(False, True)] * self.sizes.has_parts  # (complete layers, parts of layers)
        self.recomputations = [(True, False)] if "recompute" in fixed else [(False, False), *some, (True, False)]
        # What layouts share: figures by the split of a layer and the microbatch, wrapped stages by axes and sharding.
        self._figures: dict[Any, dict[Any, PartFigures]] = {}
        self._wrapped: dict[Any, Wrapped] = {}
        self._refused: set[Any] = set()
        self._element_bytes = 0.0, 0.0, 0.0  # of parameters, gradients and optimizer state; from the first plan

    @collector_paused()
    def rows(self, ranks: int, *, smallest: bool = False) -> list[Row]:
        """Return the layouts that can be built on a number of ranks, in the order of their bounds.

        Microbatches are doubled until the work of one needs more than a rank's memory. If ``smallest`` is True, only
        layouts that may need least memory are returned, least first: the smallest microbatches, one stage per rank,
        and no parts of layers recomputed.
        """
        found: list[Row] = []
        for choice, micros in choices(self.sizes, ranks, self.fixed):
            if smallest and choice.vpp > 1 and "vpp" not in self.fixed:
                continue
            for recompute, parts in self.recomputations:
                one = choice._replace(recompute=recompute, parts=parts, zero=self.zeros[0])
                run = None if smallest and parts else self._run(one, ranks)
                if run is not None:
                    found += self._rows_of(one, run, micros[:1] if smallest else micros)
        if smallest:
            return sorted(found, key=lambda row: row.working)
        # Of nearly equal bounds, the smallest microbatch needs least memory.
        return sorted(found, key=lambda row: (round(math.log(row.bound, EQUAL)), row.choice.micro, row.working))

    def _rows_of(self, choice: Choice, run: Run, micros: Sequence[int]) -> Iterator[Row]:
        before = 0
        for micro in micros:
            if micro < 2 * before or not _is_legal(run, micro):
                continue
            before, one = micro, choice._replace(micro=micro)
            source: Any = run.source
            with_micro = replace(
                run, source=replace(source, micro_batch_size=micro), microbatches=run.microbatches // micro
            )
            split = *choice.split, choice.pp > 1
            if split in self._refused:
                return
            try:
                parts = parts_of_stages(with_micro, self._known(one, with_micro))
            except (ValueError, RuntimeError):  # the layers reject the split
                self._refused.add(split)
                return
            working = max(max(part.forward, part.backward) for row in parts.values() for part in row)
            yield Row(least_seconds(with_micro, parts, self.device), working, one)
            if working > self.device.room(run.grid.world_size):  # larger ones do not fit either
                return

    def _known(self, choice: Choice, run: Run) -> dict[Any, PartFigures]:
        """Return the known figures of layers that are split as in ``choice``."""
        fuses = getattr(run.source.config, "gradient_accumulation_fusion", False) and run.ddp.shards_gradients
        dp = run.grid.dp if self.sizes.experts is not None else 1  # a router's loss may be reduced over it
        return self._figures.setdefault((choice.split, choice.micro, dp, fuses), {})

    def _run(self, choice: Choice, ranks: int) -> Run | None:
        """Return the run of a layout; None if it cannot be built."""
        try:
            return run_of(with_choice(self.config, choice), ranks, self.device)
        except (ValueError, RuntimeError):
            return None

    def plan(self, choice: Choice, ranks: int) -> Candidate | None:
        """Plan a layout; None if it cannot be built."""
        config = with_choice(self.config, choice)
        self.planned += 1
        try:
            run = run_of(config, ranks, self.device)
            key = choice._replace(micro=1, recompute=False, parts=False), ranks
            plan = plan_of(run, self.device, self._known(choice, run), self._wrapped.setdefault(key, {}))
        except (ValueError, RuntimeError):  # this sharding or the split is rejected
            return None
        if not any(self._element_bytes):
            self._element_bytes = _element_bytes(plan)
        return Candidate(choice, config, plan)

    def best(self, rows: Sequence[Row], ranks: int, most: int, until_s: float = 0.0) -> list[Candidate]:
        """Return the best layout of each set of axis sizes, best first.

        Layouts are planned until no bound is below the slowest of the ``most`` best, nor below ``until_s`` seconds. A
        layout takes the first of SHARDINGS that fits, and those that are returned first are planned with all of them.
        """
        found: dict[tuple[int, ...], Candidate] = {}
        too_large: dict[Choice, int] = {}  # smallest microbatch that does not fit
        try:
            for row in rows:
                axes, known = row.choice.axes, in_order(found.values())
                if len(known) >= most and row.bound > EQUAL * max(known[most - 1].seconds, until_s):
                    break
                if axes in found and row.bound > EQUAL * found[axes].seconds:
                    continue
                if self.planned >= MOST_PLANNED:
                    self.ended = f"ended after {self.planned} plans; other layouts may be faster"
                    break
                one = self._first_that_fits(row.choice, ranks, too_large)
                if one is None:
                    continue
                found[axes] = one if axes not in found else in_order([found[axes], one])[0]
                if in_order(found.values())[0] is one:
                    self.progress(f"the best of {self.planned} planned so far: {one.words}, {one.seconds:.3g} s")
            for axes, one in [(one.choice.axes, one) for one in in_order(found.values())[:most]]:
                choices = [one.choice._replace(zero=zero) for zero in self.zeros]
                found[axes] = self._with_instances(self._best_of(one, choices, ranks), ranks)
        except KeyboardInterrupt:
            if not found:
                raise
            self.is_interrupted = True
            self.ended = "interrupted: the best of the layouts that were planned before; others may be faster"
        return in_order(found.values())

    def _first_that_fits(self, choice: Choice, ranks: int, too_large: dict[Choice, int]) -> Candidate | None:
        """Return a layout with the first sharding that fits; None if none fits."""
        for zero in self.zeros:
            one = choice._replace(zero=zero)
            key = one._replace(micro=1)
            if choice.micro >= too_large.get(key, choice.micro + 1):
                continue
            planned = self.plan(one, ranks) if self._may_fit(one, ranks) else None
            if planned is not None and planned.plan.fits:
                return planned
            too_large[key] = choice.micro
            if planned is not None:
                self.least_peak = min(self.least_peak, planned.peak)
        return None

    def _may_fit(self, choice: Choice, ranks: int) -> bool:
        """Return False if the state and the activations of the first pipeline position are larger than the memory.

        Both are lower bounds: most layouts that do not fit are found without building their stages.
        """
        run = self._run(choice, ranks)
        if run is None:
            return False
        parts = parts_of_stages(run, self._known(choice, run))
        groups, nbytes = run.groups_of(0), float(least_activations(run, parts))
        for part in (part for stage in run.layout.stages_of(0) for part in parts[stage]):
            for numel, is_expert in part.params:
                copies = run.ddp.residency.spread(groups.size(DATA_KINDS[is_expert]))
                nbytes += sum(each * numel / shards for each, shards in zip(self._element_bytes, copies, strict=True))
        return nbytes <= self.device.room(ranks)

    def _best_of(self, found: Candidate, choices: Iterable[Choice], ranks: int) -> Candidate:
        planned = (self.plan(choice, ranks) for choice in choices)
        return in_order([found, *(one for one in planned if one is not None and one.plan.fits)])[0]

    def _with_instances(self, found: Candidate, ranks: int) -> Candidate:
        """Return the better of a layout and the same layout with one optimizer instance per machine."""
        choice = found.choice
        sharing = ranks // (choice.tp * choice.pp)  # ranks over which the optimizer is sharded
        near = max(1, self.device.ranks_per_machine // choice.tp)
        if isinstance(self.config, ModelRun) or self.config.ddp.num_distributed_optimizer_instances > 1:
            return found
        if choice.zero == 0 or near == 1 or sharing <= near or sharing % near:
            return found
        return self._best_of(found, [choice._replace(instances=sharing // near)], ranks)

    def best_with(self, sizes: Mapping[str, int], ranks: int) -> Candidate | str:
        """Return the best layout with the given sizes, or a sentence that says why there is none."""
        own = Search(self.config, self.device, {**self.fixed, **sizes})
        own._figures, own._wrapped, own._element_bytes = self._figures, self._wrapped, self._element_bytes
        name, rows = " ".join(f"{axis} {size}" for axis, size in sizes.items()), own.rows(ranks)
        if not rows:
            return f"{name}: {own.why_none(ranks)}"
        found = own.best(rows, ranks, 1)
        if found:
            return found[0]
        if own.least_peak == math.inf:
            return f"{name}: no layout of these sizes can be built after all"
        held, room = gib(own.least_peak), gib(self.device.room(ranks))
        return f"{name} does not fit: the layout that holds least would hold {held} of {room}"

    def why_none(self, ranks: int) -> str:
        """Explain why no layout of ``ranks`` can be built, and name a number of ranks that has one.

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

    def fewest(self, ranks: int) -> int | None:
        """Return the smallest number of ranks on which a layout fits.

        Divisors of ``ranks`` and powers of two up to MOST_RANKS are tried. None if none of these fits.
        """
        least = 0.0  # bytes of all ranks' states together
        for number in sorted({*divisors(ranks), *(1 << power for power in range(MOST_RANKS.bit_length()))}):
            if least > number * self.device.room(number):
                continue
            for row in self.rows(number, smallest=True)[:LEAST]:
                zeros = sorted(self.zeros, reverse=True)
                planned = (self.plan(row.choice._replace(zero=zero), number) for zero in zeros)
                found = next((one.plan for one in planned if one is not None), None)  # no other sharding holds less
                if found is not None and found.fits:
                    return number
                if found is not None:
                    held = [memory.state[kind] for memory in found.memories for kind in STATES if kind in memory.state]
                    least = max(least, sum(held) * number / len(found.memories))
        return None


def _element_bytes(plan: RunPlan) -> tuple[float, float, float]:
    """Return the bytes of a parameter, of its gradient, and of its optimizer state, for each element."""
    memory, run = plan.memories[0], plan.run
    numels, groups = [0, 0, 0], run.groups_of(memory.rank)
    for layout in (layout for chunk in memory.plans for layout in chunk.layout.buffers):
        copies = run.ddp.residency.spread(groups.size(shard_and_replica(layout.key.data_group, run.ddp)[0]))
        numels = [numel + layout.numel // shards for numel, shards in zip(numels, copies, strict=True)]
    kinds = (PARAMETERS,), (GRADIENTS,), (MASTERS, MOMENTS)
    held = [sum(memory.state.get(kind, 0) for kind in row) for row in kinds]
    params, grads, states = (nbytes / max(1, numel) for nbytes, numel in zip(held, numels, strict=True))
    return params, grads, states


def _is_legal(run: Run, micro: int) -> bool:
    kind = find_schedule(run.schedule)
    return run.layout.num_stages == 1 or kind.legal_microbatches(run.microbatches // micro, run.layout)


def _reason(first: Candidate, other: Candidate) -> str:
    """Describe the part of a step that grows most."""
    times = first.plan.time, other.plan.time
    grown = {name: getattr(times[1], name) - getattr(times[0], name) for name in SHARES}
    most = max(grown, key=lambda name: grown[name])
    if other.seconds <= EQUAL * first.seconds and other.peak >= first.peak:
        return f"as fast, and holds {gib(other.peak - first.peak)} more"
    pace = other.seconds / first.seconds
    return f"{pace:.2f} times the time: {grown[most]:.3g} s more of {SHARES[most]}"
