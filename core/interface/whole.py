"""Program events for ``python -m core verify``: a model before sharding, the loss of a microbatch, the start of
ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

# All lists are empty unless the command runs.
KEEPERS: list[Callable[[nn.Module], None]] = []
NOTES: list[Callable[[Callable[..., Any], tuple[Any, ...], bool], None]] = []

STARTS: list[Callable[[], None]] = []


def about_to_change(model: nn.Module) -> None:
    """Report an unsharded model, before it is split or sharded in place."""
    for keep in KEEPERS:
        keep(model)


def about_to_start_ranks() -> None:
    """Report that the program is about to start processes that run it as its ranks."""
    for listen in STARTS:
        listen()


def note(loss_fn: Callable[..., Any], *arguments: Any, per_token: bool = False) -> None:
    """Report a microbatch's loss to ``python -m core verify``, if the model's forward does not return it.

    Without the command it is a no-op. Call it once for each microbatch, on every rank, before its backward.

        verify.note(mean_loss, inputs, targets)
        (mean_loss(model, inputs, targets) / microbatches).backward()

    Args:
        loss_fn (Callable[..., Any]): Called as loss_fn(model, *arguments) with the unsharded model. Returns the mean
            loss of the microbatch, not divided by the number of microbatches.
        arguments: Further arguments of ``loss_fn``.
        per_token (bool, optional): True if ``loss_fn`` returns the summed loss and the number of tokens.
    """
    for listen in NOTES:
        listen(loss_fn, arguments, per_token)
