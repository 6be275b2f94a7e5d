"""Which state an algorithm keeps of a parameter: found by letting it take a step on a parameter of its own."""

from __future__ import annotations

import logging
from collections import OrderedDict, defaultdict
from dataclasses import dataclass
from typing import Any

import torch

from core.checkpoint.optimizer_pieces import is_number

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class AlgorithmKeys:
    """State keys that every param group keeps (`needed`), or any does (`kept`).

    scalars: those that are one number a parameter; numbers: those of them that are Python's and no tensors.
    """

    needed: frozenset[str]
    kept: frozenset[str]
    scalars: frozenset[str]
    numbers: frozenset[str]


def algorithm_keys(inner: torch.optim.Optimizer) -> AlgorithmKeys | None:
    """What a torch optimizer keeps, or None where it cannot be found out. Touches neither its state nor its params."""
    states = []
    for group in inner.param_groups:
        state = _first_state(inner, group)
        if state is None:
            return None
        states.append(state)
    keys = [frozenset(key for key, value in state.items() if value is not None) for state in states]
    if not keys:
        return None
    values = [(key, value) for state in states for key, value in state.items()]
    return AlgorithmKeys(
        frozenset.intersection(*keys),
        frozenset.union(*keys),
        frozenset(key for key, value in values if is_number(value)),
        frozenset(key for key, value in values if isinstance(value, (bool, int, float))),
    )


def _first_state(inner: torch.optim.Optimizer, group: dict[str, Any]) -> dict[str, Any] | None:
    """The state after a step from zero gradients on a small matrix."""
    device = group["params"][0].device if group["params"] else torch.device("cpu")
    param = torch.nn.Parameter(torch.zeros(2, 2, device=device))
    param.grad = torch.zeros_like(param)
    probe = object.__new__(type(inner))
    probe.__dict__.update({name: value for name, value in inner.__dict__.items() if name != "step"})
    probe.state = defaultdict(dict)
    probe.param_groups = [{**group, "params": [param]}]
    for hooks in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
        probe.__dict__[hooks] = OrderedDict()  # a user's hook must not hear of it
    try:
        probe.step()
    except Exception as error:
        logger.debug("%s took no step on a parameter of its own: %s", type(inner).__name__, error)
        return None
    return dict(probe.state[param])
