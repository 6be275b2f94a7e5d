"""State keys of an optimizer algorithm, found by stepping a fresh instance of the same class once."""

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
    """Keys that an algorithm stores for a parameter after one step.

    ``kept`` has all keys, ``scalars`` the keys with a single number per parameter, and ``numbers`` those of them that
    are stored as Python numbers instead of tensors.
    """

    kept: frozenset[str]
    scalars: frozenset[str] = frozenset({"step"})
    numbers: frozenset[str] = frozenset()


def keys_by_group(inner: torch.optim.Optimizer) -> list[AlgorithmKeys | None]:
    """Return the state keys of each param group's algorithm, or ``None`` if unknown. ``inner`` is not changed."""
    members: list[torch.optim.Optimizer] = getattr(inner, "members", [inner])
    home = {id(group): member for member in members for group in member.param_groups}
    return [algorithm_keys(home.get(id(group), inner), group) for group in inner.param_groups]


def algorithm_keys(member: torch.optim.Optimizer, group: dict[str, Any]) -> AlgorithmKeys | None:
    """Return the state keys that a torch optimizer stores for parameters of one group. It is not changed.

    The result is ``None`` if another instance cannot be created and stepped. A class whose constructor needs more than
    param groups and defaults declares its keys instead: ``state_keys = ("momentum_buffer",)``.
    """
    declared = getattr(member, "state_keys", None)
    if declared is not None:
        return AlgorithmKeys(frozenset(declared))
    device = group["params"][0].device if group["params"] else torch.device("cpu")
    param = torch.nn.Parameter(torch.zeros(2, 2, device=device))
    param.grad = torch.zeros_like(param)
    try:
        # Create a new instance with only this parameter: a copy could keep references to the real ones.
        takes = inspect.signature(type(member)).parameters
        options = {name: value for name, value in member.defaults.items() if name in takes}
        probe: Any = type(member)([{**group, "params": [param]}], **options)
        probe.step()
        state = dict(probe.state[param])
    except Exception as error:
        logger.debug("no other %s could be built and stepped: %s", type(member).__name__, error)
        return None
    state_after_step = {key: value for key, value in state.items() if value is not None}
    return AlgorithmKeys(
        frozenset(state_after_step),
        frozenset(key for key, value in state_after_step.items() if is_number(value)),
        frozenset(key for key, value in state_after_step.items() if isinstance(value, (bool, int, float))),
    )
