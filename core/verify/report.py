"""GradientReport: what a comparison found, in numbers and in one paragraph."""

from __future__ import annotations

from dataclasses import dataclass, field


class WrongGradientError(AssertionError):
    """Gradients are not those of one process; the message is the report's."""


@dataclass(frozen=True)
class Comparison:
    """One parameter of one rank in one step. `error` is relative to the norm of the whole reference gradient."""

    name: str
    rank: int
    step: int
    error: float
    ratio: float  # projection on the reference; nan where the reference is zero


@dataclass(frozen=True)
class GradientReport:
    """The verdict on one layout; equal on all ranks.

    wrong: what is out of bounds, in registration order, one entry a rank. cause: the likely one, of the first wrong
    parameter. unmoved: parameters whose reference gradient is zero, about which nothing was shown. digest: a hash over
    the bits of every rank's whole gradients.
    """

    title: str
    bound: float
    parameters: int
    largest_error: float
    loss_error: float
    wrong: tuple[Comparison, ...] = ()
    cause: str = ""
    unmoved: tuple[str, ...] = ()
    digest: str = ""
    details: tuple[str, ...] = field(default=())

    @property
    def ok(self) -> bool:
        """Were all gradients, and the loss, within the bound?"""
        return not self.wrong and self.loss_error <= self.bound

    @property
    def first_wrong(self) -> Comparison | None:
        """The first wrong parameter, on the first rank that has it wrong."""
        return self.wrong[0] if self.wrong else None

    def __str__(self) -> str:
        if self.ok:
            silent = f"; zero in the reference, so not tested: {', '.join(self.unmoved)}" if self.unmoved else ""
            return (
                f"{self.title}: {self.parameters} gradients right, largest relative error {self.largest_error:.2g} "
                f"(bound {self.bound:g}){silent}"
            )
        first = self.first_wrong
        if first is None:
            return f"{self.title}: {self.cause}"
        names = dict.fromkeys(entry.name for entry in self.wrong)
        wrong_ranks = sorted({entry.rank for entry in self.wrong if entry.name == first.name})
        lines = [
            f"{self.title}: {len(names)} of {self.parameters} gradients are wrong, first {first.name!r} on ranks "
            f"{wrong_ranks} in step {first.step}: relative error {first.error:.3g} (bound {self.bound:g}), "
            f"{first.ratio:.6g} times the reference",
            f"likely cause: {self.cause}",
            *self.details,
        ]
        return "\n  ".join(lines)

    def raise_if_wrong(self) -> None:
        """WrongGradientError with the report as its message, unless everything is right."""
        if not self.ok:
            raise WrongGradientError(str(self))
