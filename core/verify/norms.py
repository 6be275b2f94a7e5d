"""Compare the gradient norm by which an optimizer clips with the norm of the gradients that were compared."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from torch import Tensor

from core.verify.gathered import Held
from core.verify.place import around, in_any_layer, is_in

CLOSE = 1e-5  # relative error of a norm; Megatron Core adds squares in fp32
PLACED = 0.02  # relative error of a difference of squares, at which a parameter explains it


def squares_of(held: Sequence[Held], gradients: Mapping[tuple[int, str], Tensor]) -> dict[str, float]:
    """Return the squared norms of this rank's gradients by name in any layer, without copies on other ranks."""
    found: dict[str, float] = {}
    for each in held:
        if each.place.replica == 0:
            name = in_any_layer(each.name)
            found[name] = found.get(name, 0.0) + float(gradients[each.key].double().square().sum())
    return found


def wrong_norm(norm: float, squares: Mapping[int, Mapping[str, float]]) -> str:
    """Describe a norm that is not the norm of these gradients, and the parameter or module that explains it. Pure.

    Args:
        norm: Norm that the optimizer uses.
        squares: Squared norms by rank and name; each element of the model counts on one rank.
    """
    names = list(dict.fromkeys(name for of_rank in squares.values() for name in of_rank))
    right = math.sqrt(sum(sum(of_rank.values()) for of_rank in squares.values()))
    if abs(norm - right) <= CLOSE * right:
        return ""
    excess = norm**2 - right**2
    found = {*names, *(outer for name in names for outer in around(name))} - {""}
    modules = sorted(found, key=lambda module: (-len(module), module))
    causes = [text for module in modules if (text := _explained(module, excess, squares))]
    return (
        f"the optimizer clips by a gradient norm of {norm:.6g}, and the gradients, which are right, have {right:.6g}"
        f"{f': {causes[0]}' if causes else ''}"
    )


def _explained(module: str, excess: float, squares: Mapping[int, Mapping[str, float]]) -> str:
    """Return how often the gradients of a module or parameter count, if this explains a norm; '' otherwise."""
    parts = {
        rank: sum(square for name, square in of_rank.items() if is_in(name, module))
        for rank, of_rank in squares.items()
    }
    own = sum(parts.values())
    if own == 0.0:
        return ""
    for rank, part in parts.items():
        if 0.0 < part < own and abs(excess + own - part) <= PLACED * abs(excess):
            return f"of {module!r} only the part of rank {rank} counts"
    times = 1.0 + excess / own
    if round(times) in range(9) and abs(times - round(times)) <= PLACED * abs(times - 1.0):
        return f"{module!r} is left out" if round(times) == 0 else f"{module!r} counts {round(times)} times"
    return ""
