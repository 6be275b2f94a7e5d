"""State that an algorithm keeps of a parameter: found by letting another one of its class take a first step."""

from __future__ import annotations

import inspect
import logging
from dataclasses import dataclass
from typing import Any

import torch

from core.checkpoint.optimizer_pieces import is_number

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class AlgorithmKeys:
    """Keys of a parameter's state after a step.

    scalars: those that are one number a parameter; numbers: those of them that are Python's and no tensors.
    """

    kept: frozenset[str]
    scalars: frozenset[str] = frozenset({"step"})
    numbers: frozenset[str] = frozenset()


def keys_by_group(inner: torch.optim.Optimizer) -> list[AlgorithmKeys | None]:
    """Keys of the state that each param group's algorithm keeps; None if unknown. Does not change `inner`."""
    members: list[torch.optim.Optimizer] = getattr(inner, "members", [inner])
    home = {id(group): member for member in members for group in member.param_groups}
    return [algorithm_keys(home.get(id(group), inner), group) for group in inner.param_groups]


def algorithm_keys(member: torch.optim.Optimizer, group: dict[str, Any]) -> AlgorithmKeys | None:
    """Keys of the state that a torch optimizer keeps of the parameters of one group, or None.

    A class that needs more to be built than its groups and defaults says it: `state_keys = ("momentum_buffer",)`.
    """
    declared = getattr(member, "state_keys", None)
    if declared is not None:
        return AlgorithmKeys(frozenset(declared))
    device = group["params"][0].device if group["params"] else torch.device("cpu")
    param = torch.nn.Parameter(torch.zeros(2, 2, device=device))
    param.grad = torch.zeros_like(param)
    try:
        # Another instance, which knows of no parameter but this one: a copy could hold on to the real ones.
        takes = inspect.signature(type(member)).parameters
        options = {name: value for name, value in member.defaults.items() if name in takes}
        probe: Any = type(member)([{**group, "params": [param]}], **options)
        probe.step()
        state = dict(probe.state[param])
    except Exception as error:
        logger.debug("no other %s could be built and stepped: %s", type(member).__name__, error)
        return None
    held = {key: value for key, value in state.items() if value is not None}
    return AlgorithmKeys(
        frozenset(held),
        frozenset(key for key, value in held.items() if is_number(value)),
        frozenset(key for key, value in held.items() if isinstance(value, (bool, int, float))),
    )
