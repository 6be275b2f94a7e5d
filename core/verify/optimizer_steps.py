"""Optimizer steps as values: the gradients of one process, and causes of wrong weights. Pure functions."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from core.optimizer.norm.clip_grads import clip_coefficient
from core.verify.report import Comparison

CHANGED = 1e-4  # relative change of a gradient between its comparison and the step; smaller ones are round-off
Gradients = Mapping[str, Tensor]


@dataclass(frozen=True)
class Clip:
    """A clip of gradients that the program has called.

    Attributes:
        names: Parameters whose gradients are clipped.
        limit: Largest norm, or largest absolute value of an element.
        norm_type: Order of the norm; None for a clip by value.
    """

    names: tuple[str, ...]
    limit: float
    norm_type: float | None


@dataclass(frozen=True)
class Step:
    """One optimizer's step on one rank. Sent between ranks.

    Attributes:
        kind: Class of the optimizer.
        groups: Settings of its groups.
        names: Parameters of each group.
        without: Parameters without a gradient.
        clips: Clips between the comparison of the gradients and the step.
        own_clip: Largest norm to which the optimizer itself clips; 0 for no limit.
    """

    kind: str
    groups: tuple[dict[str, Any], ...]
    names: tuple[tuple[str, ...], ...]
    without: frozenset[str]
    clips: tuple[Clip, ...]
    own_clip: float

    @property
    def stepped(self) -> list[str]:
        """Names of all parameters with a gradient."""
        return [name for names in self.names for name in names if name not in self.without]


def joined(steps: Sequence[Step]) -> Step:
    """Return one step for the steps of ranks that each hold a part of the model.

    Returns:
        The step with the first rank's settings and the parameters of all ranks.
    """
    first = steps[0]
    clips = [
        replace(clip, names=_union(step.clips[number].names for step in steps if number < len(step.clips)))
        for number, clip in enumerate(first.clips)
    ]
    names = [_union(step.names[group] for step in steps) for group in range(len(first.groups))]
    seen = {name for step in steps for name in step.stepped}
    without = frozenset(name for of_group in names for name in of_group if name not in seen)
    return replace(first, names=tuple(names), without=without, clips=tuple(clips))


def _union(names: Iterable[Iterable[str]]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name for some in names for name in some))


def gradients_of_step(step: Step, compared: Gradients, at_step: Gradients) -> tuple[dict[str, Tensor], str, str]:
    """Return the gradients that one process steps with.

    A loop may change reduced gradients by hand. What it does is not known, so the changed gradients are used.

    Returns:
        (gradients, note about a change by hand or '', cause of wrong weights or '').
    """
    expected = dict(compared)
    for clip in step.clips:
        expected |= _clipped(expected, clip)
    own = Clip(tuple(expected), step.own_clip, 2.0)
    factors = {name: _factor(at_step[name], grad) for name, grad in expected.items()}
    changed = [name for name, factor in factors.items() if factor is None or abs(factor - 1.0) > CHANGED]
    if not changed:
        return _clipped(expected, own), "", ""
    values = [factors[name] for name in changed]
    known = [value for value in values if value is not None]
    same = len(known) == len(factors) and max(known) - min(known) < CHANGED
    some = f"{len(changed)} of {len(factors)} parameters, first {changed[0]!r}"
    if any(value == 0.0 for value in values):
        zero = (
            f"the gradients of {some} are zero when the optimizer steps: zero_grad runs between backward and the step"
        )
        return _clipped(expected, own), "", zero
    if same and step.clips:
        wrong = (
            f"clipped gradients are {known[0]:.4g} times those that one process clips: by the norm of a part of the "
            "gradients, or before a scale is divided out"
        )
        return _clipped(expected, own), "", wrong
    if same and 0.0 < known[0] < 1.0:
        return _clipped(at_step, own), "", ""  # a clip that the loop has written itself
    how = f" by {known[0]:.4g}" if same else ""
    note = f"the gradients of {some}, have been changed{how} between their reduction and the optimizer's step"
    return _clipped(at_step, own), note, ""


def _clipped(grads: Gradients, clip: Clip) -> dict[str, Tensor]:
    """Return clipped gradients."""
    mine = {name: grads[name] for name in clip.names if name in grads}
    if clip.norm_type is None:
        return {**grads, **{name: grad.clamp(-clip.limit, clip.limit) for name, grad in mine.items()}}
    norms = torch.stack([torch.linalg.vector_norm(grad, clip.norm_type) for grad in mine.values()])
    coefficient = clip_coefficient(clip.limit, float(torch.linalg.vector_norm(norms, clip.norm_type)))
    return {**grads, **{name: grad * coefficient for name, grad in mine.items()}}


def _factor(have: Tensor, want: Tensor) -> float | None:
    """Return by which factor a tensor is another one; None if it is no multiple of it."""
    size = float(want.norm())
    if size == 0.0:
        return 1.0 if not bool(have.any()) else None
    factor = float((have * want).sum()) / size**2
    return factor if float((have - factor * want).norm()) <= CHANGED * float(have.norm()) else None


def cause_of_updates(
    wrong: Sequence[Comparison], everything: Sequence[Comparison], steps: Sequence[Sequence[Step]]
) -> str:
    """Name the likely cause of wrong weights."""
    counts = [len(of_rank) for of_rank in steps]
    if len(set(counts)) > 1:
        return f"the ranks have made {counts} optimizer steps: a rank leaves out one that others make"
    for number, first in enumerate(steps[0]):
        for rank, of_rank in enumerate(steps[1:], start=1):
            for group, (mine, other) in enumerate(zip(first.groups, of_rank[number].groups, strict=False)):
                for key in mine:
                    if key in other and repr(mine[key]) != repr(other[key]):
                        return (
                            f"group {group} of {first.kind} has {key}={other[key]} on rank {rank} and {mine[key]} on "
                            "rank 0"
                        )
    ranks, all_ranks = sorted({each.rank for each in wrong}), sorted({each.rank for each in everything})
    where = "" if ranks == all_ranks else f" on ranks {ranks} alone"
    ratios = [each.ratio for each in wrong if not math.isnan(each.ratio)]
    if ratios and max(map(abs, ratios)) < CHANGED:
        return f"the optimizer has not moved them{where}: the step does not reach the weights of the model"
    if ratios and max(ratios) - min(ratios) < CHANGED * max(map(abs, ratios)):
        return (
            f"their updates are {ratios[0]:.6g} times those of one process{where}: a clip, a scale or a learning rate"
        )
    return (
        f"their updates are other ones than those of one process{where}: an optimizer's state, or gradients that it got"
    )
