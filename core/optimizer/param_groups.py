"""Which hyperparameters each parameter gets. Pure: from names and parameters to a short list of groups."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from torch import nn

from core.optimizer.optimizer_config import OptimizerConfig

Condition = Callable[[str, nn.Parameter], bool]


@dataclass(frozen=True, slots=True)
class GroupKey:
    """Parameters with equal keys are updated with the same numbers."""

    wd_mult: float
    lr_mult: float
    is_expert_parallel: bool


def decays_by_default(name: str, param: nn.Parameter) -> bool:
    """Weight decay is for matrices: not for biases, nor for norm weights and other one-dimensional parameters."""
    return param.dim() > 1 and not name.endswith(".bias") and name != "bias"


class ParamGroups:
    """The groups of a model, in order of first use, and the group of every parameter.

    Built from all parameters of all chunks, not from this rank's shard, so that a data group's ranks list the same.
    """

    def __init__(
        self,
        params: Iterable[tuple[str, nn.Parameter, bool]],
        *,
        no_weight_decay_cond: Condition | None = None,
        scale_lr_cond: Condition | None = None,
        lr_mult: float = 1.0,
    ) -> None:
        """params: (name, parameter, is it an expert's)."""
        self.keys: list[GroupKey] = []
        self._index: dict[int, int] = {}
        for name, param, is_expert in params:
            if no_weight_decay_cond is None:
                decays = decays_by_default(name, param)
            else:
                decays = not no_weight_decay_cond(name, param)
            scaled = scale_lr_cond is not None and scale_lr_cond(name, param)
            key = GroupKey(1.0 if decays else 0.0, lr_mult if scaled else 1.0, is_expert)
            if key not in self.keys:
                self.keys.append(key)
            self._index[id(param)] = self.keys.index(key)

    def of(self, param: nn.Parameter) -> int:
        """The index of a parameter's group."""
        return self._index[id(param)]

    def torch_groups(self, config: OptimizerConfig) -> list[dict[str, Any]]:
        """One empty torch param group a key, with its lr and weight decay; one where a stage has no parameters."""
        if config.lr is None:
            raise ValueError("OptimizerConfig.lr is None; set the learning rate that training starts with")
        lr, min_lr = config.lr, config.min_lr or 0.0
        return [
            {
                "params": [],
                "lr": lr * key.lr_mult,
                "max_lr": lr * key.lr_mult,
                "min_lr": min_lr * key.lr_mult,
                "weight_decay": config.weight_decay * key.wd_mult,
                "wd_mult": key.wd_mult,
                "lr_mult": key.lr_mult,
                "is_expert_parallel": key.is_expert_parallel,
            }
            for key in self.keys or [GroupKey(1.0, 1.0, False)]
        ]
