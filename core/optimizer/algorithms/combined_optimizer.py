"""CombinedOptimizer: several torch optimizers over the param groups of one, such as Muon for matrices and Adam."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


class CombinedOptimizer(torch.optim.Optimizer):
    """Members step one after the other; groups and state are shared, so from outside it is one torch optimizer.

    groups: the members' param groups in the order in which they are listed here; the same dicts.
    """

    def __init__(self, groups: list[dict[str, Any]], members: Sequence[torch.optim.Optimizer]) -> None:
        super().__init__(groups, {})
        self.members = list(members)
        for member in self.members:
            self.state.update(member.state)
            member.state = self.state
        # torch's convention for kernels that divide gradients by `self.grad_scale` themselves.
        self._step_supports_amp_scaling = all(
            getattr(member, "_step_supports_amp_scaling", False) for member in self.members
        )

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name in ("grad_scale", "found_inf"):
            for member in self.members:
                setattr(member, name, value)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for member in self.members:
            member.step()
