"""Events of a program for `python -m core.verify`: a model to be cut, the loss of a microbatch, ranks to be started."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

# All lists are empty unless the command runs.
KEEPERS: list[Callable[[nn.Module], None]] = []
NOTES: list[Callable[[Callable[..., Any], tuple[Any, ...], bool], None]] = []

STARTS: list[Callable[[], None]] = []


def about_to_change(model: nn.Module) -> None:
    """Call it with a whole model, before it is cut or sharded in place."""
    for keep in KEEPERS:
        keep(model)


def about_to_start_ranks() -> None:
    """Call it before the program starts processes that run it as its ranks."""
    for listen in STARTS:
        listen()


def note(loss_fn: Callable[..., Any], *arguments: Any, per_token: bool = False) -> None:
    """Say what a microbatch's loss is, where the model's forward does not give it. Does nothing but under the command.

    loss_fn(whole, *arguments): the mean loss of the microbatch, divided by nothing. per_token: True if it returns the
    summed loss and the number of tokens. Call it once for each microbatch, on every rank, before its backward.

        verify.note(mean_loss, inputs, targets)
        (mean_loss(model, inputs, targets) / microbatches).backward()
    """
    for listen in NOTES:
        listen(loss_fn, arguments, per_token)
