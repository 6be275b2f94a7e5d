"""GradientReport: the result of a comparison, in numbers and in one paragraph."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from core.verify.place import ALLOWANCE, Where

LAYERS_SHOWN = 6


class WrongGradientError(AssertionError):
    """Error for gradients that differ from the single process; the message is the report."""


@dataclass(frozen=True)
class Comparison:
    """One parameter on one rank in one step.

    Attributes:
        name: Name of the parameter.
        rank: The rank.
        step: The step.
        error: Error relative to the norm of the reference gradient.
        ratio: Projection on the reference; nan if the reference is zero.
        bound: Largest error of a right gradient.
    """

    name: str
    rank: int
    step: int
    error: float
    ratio: float
    bound: float


@dataclass(frozen=True)
class GradientReport:
    """Result of checking one layout; the same on all ranks.

    Attributes:
        title: First words of the report.
        bound: Bound of every gradient's error; None if each has its own, from the dtype's rounding error.
        parameters: Number of compared parameters.
        largest_error: Largest relative error.
        loss_error: Relative error of the loss.
        wrong: Comparisons out of bounds, in registration order, one entry per rank.
        cause: Likely cause for the first wrong parameter.
        unmoved: Parameters whose reference gradient is zero, so they were not tested.
        digest: Hash of the bits of every rank's gradients.
        details: Further lines about the cause.
        drift: Message of the guard against drifting replicas, if it fires on right gradients.
        loss_bound: Bound of the loss's error.
        share: Largest error relative to its bound.
        names: Names of all parameters, in order.
        where: Modules where the fault begins, if no reduction explains it.
        broken: Faults that layout and reference share.
        notes: Suspicious findings although no gradient is wrong; see core/verify/also_seen.py.
        reference: Kind of the reference model, if there is a choice.
        compared: 'updates' if the wrong tensors are weights after a step.
        weights: Line about right weights after each step; '' if they were not compared.
    """

    title: str
    bound: float | None
    parameters: int
    largest_error: float
    loss_error: float
    wrong: tuple[Comparison, ...] = ()
    cause: str = ""
    unmoved: tuple[str, ...] = ()
    digest: str = ""
    details: tuple[str, ...] = field(default=())
    drift: str = ""
    loss_bound: float = 0.0
    share: float = 0.0
    names: tuple[str, ...] = ()
    where: Where | None = None
    broken: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    reference: str = ""
    compared: str = "gradients"
    weights: str = ""

    @property
    def ok(self) -> bool:
        """True if all gradients and the loss are within their bounds."""
        return not self.wrong and not self.drift and not self.broken and self.loss_error <= self.loss_bound

    @property
    def first_wrong(self) -> Comparison | None:
        """The first wrong parameter, on the first rank with a wrong gradient of it."""
        return self.wrong[0] if self.wrong else None

    def __str__(self) -> str:
        seen = [f"also seen: {note}" for note in self.notes]
        return "\n  ".join([self._verdict(), *filter(None, [self.weights]), *seen, *filter(None, [self.reference])])

    def _verdict(self) -> str:
        if self.ok:
            silent = f"; zero in the reference, so not tested: {', '.join(self.unmoved)}" if self.unmoved else ""
            return (
                f"{self.title}: {self.parameters} gradients right, largest relative error {self.largest_error:.2g} "
                f"({self._bound()}){silent}"
            )
        first = self.first_wrong
        places = self.where.lines if self.where is not None else ()
        if first is None and self.drift:
            return f"{self.title}: every gradient is right, and the guard against drifting copies raises: {self.drift}"
        if first is None:
            shared = f"{self.parameters} gradients are those of one process; it has a fault all the same"
            return "\n  ".join([f"{self.title}: {self.cause or shared}", *self.broken, *places])
        names = list(dict.fromkeys(entry.name for entry in self.wrong))
        wrong_ranks = sorted({entry.rank for entry in self.wrong if entry.name == first.name})
        lines = [
            f"{self.title}: {len(names)} of {self.parameters} {self.compared} are wrong, first {first.name!r} on ranks "
            f"{wrong_ranks} in step {first.step}: relative error {first.error:.3g} (bound {first.bound:.2g}), "
            f"{first.ratio:.6g} times the reference",
            wrong_by_layer(self.names, names),
            f"likely cause: {self.cause}",
            *self.details,
            *places,
        ]
        return "\n  ".join(lines)

    def _bound(self) -> str:
        if self.bound is not None:
            return f"bound {self.bound:g}"
        return f"{self.share:.2g} of what is allowed, {ALLOWANCE:g} times what the dtype costs the reference"

    def raise_if_wrong(self) -> None:
        """Raise WrongGradientError with the report as message, unless everything is right."""
        if not self.ok:
            raise WrongGradientError(str(self))


def wrong_by_layer(names: Sequence[str], wrong: Sequence[str]) -> str:
    """Describe in one line which layers hold wrong parameters."""
    layers = list(dict.fromkeys(name.rpartition(".")[0] for name in names))
    faulty = {name.rpartition(".")[0] for name in wrong}
    marks = [layer in faulty for layer in layers]
    right = sum(name not in set(wrong) for name in names)
    count = marks.count(True)
    if not right:
        text = "all parameters"
    elif all(marks):
        text = "some parameters of each layer"
    elif marks == [True] * count + [False] * (len(marks) - count) and count > 1:
        text = f"everything before {layers[count] or 'the model itself'}"
    elif marks == [False] * (len(marks) - count) + [True] * count and count > 1:
        text = f"everything from {layers[-count] or 'the model itself'} on"
    else:
        shown = [layer or "the model itself" for layer in layers if layer in faulty]
        text = ", ".join(shown[:LAYERS_SHOWN]) + (
            f" and {len(shown) - LAYERS_SHOWN} more" if len(shown) > LAYERS_SHOWN else ""
        )
    return f"wrong: {text}; right: {right} of {len(names)} parameters"
