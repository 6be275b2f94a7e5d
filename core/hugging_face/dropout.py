"""The random streams by which split models drop: alike on ranks that compute the same, others on each of the rest."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from core import agree
from core.process_groups import ProcessGroups
from core.tensor_parallel.random import SEQUENCE_DROPOUT_STREAM, dropout_seed, get_rng_tracker


class ForwardStream:
    """Hooks of a split model: a forward in training draws from the stream that ranks of tp and cp have alike.

    Without `model_parallel_manual_seed` the first one begins the stream, by torch's own seed on the lowest of these
    ranks: collective over them. Recomputation by torch's checkpoint draws the same, because the stream stands in
    torch's default generators while the model runs.
    """

    def __init__(self, groups: ProcessGroups) -> None:
        self.groups = groups
        self._forks: list[ExitStack] = []  # of forwards that run: a wrapper's and the model's own are one

    def __deepcopy__(self, memo: dict[int, Any]) -> ForwardStream:
        return ForwardStream(self.groups)  # groups cannot be copied

    def attach(self, model: nn.Module) -> None:
        """Put the hooks into a model, or into a wrapper around one that has them."""
        model.register_forward_pre_hook(self.enter, prepend=True)
        model.register_forward_hook(self.leave, always_call=True)

    def enter(self, model: nn.Module, *_: Any) -> None:
        """Before a forward."""
        fork = ExitStack()
        if model.training and not self._forks:
            self._begin()
            fork.enter_context(get_rng_tracker().fork(SEQUENCE_DROPOUT_STREAM))
        self._forks.append(fork)

    def leave(self, *_: Any) -> None:
        """After a forward, or after its error."""
        if self._forks:
            self._forks.pop().close()

    def _begin(self) -> None:
        tracker = get_rng_tracker()
        if SEQUENCE_DROPOUT_STREAM in tracker:
            return
        alike = [group for group in (self.groups.tp, self.groups.cp) if group is not None]
        seeds = agree.gather(torch.initial_seed(), alike, "the seed of dropout")
        seed = dropout_seed(SEQUENCE_DROPOUT_STREAM, seeds[min(seeds)], self.groups)
        tracker.add(SEQUENCE_DROPOUT_STREAM, seed)
