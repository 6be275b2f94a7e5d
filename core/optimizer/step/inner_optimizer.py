"""Inner optimizer: the torch optimizer that computes the update of master weights.

It sees master weights as segments: long flat tensors over one or many parameters for elementwise algorithms, and one
unsplit parameter in its shape for others (algorithms/names.py). If groups use several algorithms, each is a member of
one CombinedOptimizer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from core.groups.process_groups import ProcessGroups
from core.optimizer.algorithms.backends import make_with_backend
from core.optimizer.algorithms.lion import Lion
from core.optimizer.algorithms.muon import WHOLE, Muon, layout_of
from core.optimizer.algorithms.names import Algorithm, label, resolve
from core.optimizer.groups.param_groups import BOOKKEEPING
from core.optimizer.masters.master_weights import Segment
from core.optimizer.optimizer_config import OptimizerConfig


class CombinedOptimizer(torch.optim.Optimizer):
    """Several optimizers with shared groups and state that step one after the other, as one torch optimizer.

    ``groups`` are the members' own dict objects, in the order in which they are listed here.
    """

    def __init__(self, groups: list[dict[str, Any]], members: Sequence[torch.optim.Optimizer]) -> None:
        super().__init__(groups, {})
        self.members = list(members)
        for member in self.members:
            self.state.update(member.state)
            member.state = self.state
        # torch's flag for kernels that divide gradients by `self.grad_scale`.
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


def inner_optimizer(
    config: OptimizerConfig,
    torch_groups: list[dict[str, Any]],
    *,
    segments: Sequence[Segment] = (),
    groups: ProcessGroups | None = None,
) -> torch.optim.Optimizer:
    """Create the torch optimizer over param groups that list master weights.

    Each group has its own learning rate, weight decay and algorithm; several algorithms give a CombinedOptimizer. Muon
    reads the layout of split matrices from ``segments`` and gathers them in ``groups``. Raises ValueError if a group
    has an option that its algorithm does not have.
    """
    members: list[torch.optim.Optimizer] = []
    for name in dict.fromkeys(group["optimizer"] for group in torch_groups):
        mine = [group for group in torch_groups if group["optimizer"] == name]
        member = _make(config, resolve(name), mine, segments, groups)
        _check_options(name, member, mine)
        members.append(member)
    return members[0] if len(members) == 1 else CombinedOptimizer(torch_groups, members)


def _make(
    config: OptimizerConfig,
    algorithm: Algorithm,
    mine: list[dict[str, Any]],
    segments: Sequence[Segment],
    groups: ProcessGroups | None,
) -> torch.optim.Optimizer:
    lr = config.lr if config.lr is not None else 0.0
    if algorithm == "sgd":
        return make_with_backend(
            "sgd", mine, wanted=config.optimizer_backend, lr=lr, decoupled=False, momentum=config.sgd_momentum
        )
    if algorithm == "adam":
        betas = config.adam_beta1, config.adam_beta2
        decoupled = config.decoupled_weight_decay
        return make_with_backend(
            "adam", mine, wanted=config.optimizer_backend, lr=lr, decoupled=decoupled, betas=betas, eps=config.adam_eps
        )
    if algorithm == "lion":
        return Lion(mine, lr=lr, betas=(config.lion_beta1, config.lion_beta2))
    if algorithm == "muon":
        blockwise = config.muon_tp_mode == "blockwise"
        layouts = {  # keyed by master; a segment whose master is replaced keeps its own
            id(segment.master): layout_of(
                segment.shards[0].param, groups, split_qkv=config.muon_split_qkv, blockwise=blockwise
            )
            for segment in segments
        }
        return Muon(
            mine,
            lr=lr,
            momentum=config.muon_momentum,
            nesterov=config.muon_nesterov,
            coefficient_type=config.muon_coefficient_type,
            ns_steps=config.muon_num_ns_steps,
            scale_mode=config.muon_scale_mode,
            extra_scale_factor=config.muon_extra_scale_factor,
            fp32_matmul_prec=config.muon_fp32_matmul_prec,
            layout_of=lambda master: layouts.get(id(master), WHOLE),
        )
    options = config.optimizer_kwargs if label(algorithm) == label(config.optimizer) else {}
    make: Any = algorithm
    return make(mine, lr=lr, **options)


def _check_options(name: str, member: torch.optim.Optimizer, mine: list[dict[str, Any]]) -> None:
    """Raise ValueError for overrides that the algorithm never reads, which would silently have no effect."""
    for group in mine:
        unknown = sorted(set(group) - set(member.defaults) - BOOKKEEPING)
        if unknown:
            raise ValueError(
                f"param group {group['name']!r}: {name} has no option {unknown[0]!r}; it has "
                f"{', '.join(sorted(member.defaults))}"
            )
        if group["weight_decay"] and "weight_decay" not in member.defaults:
            raise ValueError(
                f"param group {group['name']!r}: {name} has no weight decay and weight_decay is "
                f"{group['weight_decay']}; set OptimizerConfig(weight_decay=0)"
            )
