"""AdoptedOptimizer: a user's torch optimizer that steps this rank's shard of a wrapped model.

The user's optimizer object keeps stepping with its own param group dictionaries, so learning rate schedulers that
reference them keep working. Only the listed tensors change: master weights replace the parameters.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict, defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from core.distributed.distributed_data_parallel import DistributedDataParallel
from core.distributed.wire.collectives import Collectives
from core.optimizer.algorithms.names import Scope, update_scope
from core.optimizer.groups.model_check import (
    all_rank_groups,
    check_model,
    cut_by_shards,
    split_parameter,
    spread_group,
)
from core.optimizer.groups.param_groups import ParamGroups
from core.optimizer.masters.master_weights import Segment
from core.optimizer.masters.param_shards import NORM_GROUP
from core.optimizer.norm.clip_grads import clip_coefficient
from core.optimizer.optimizer import DistributedOptimizer
from core.optimizer.optimizer_config import OptimizerConfig
from core.optimizer.optimizer_state import cut_entry


class AdoptedGroups(ParamGroups):
    """Param groups of a user's torch optimizer, with the interface of ParamGroups."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.groups: list[dict[str, Any]] = optimizer.param_groups
        self.params: list[list[nn.Parameter]] = [list(group["params"]) for group in self.groups]
        self._group_of = {id(param): number for number, params in enumerate(self.params) for param in params}

    def of(self, param: nn.Parameter) -> int:
        return self._group_of[id(param)]

    def torch_groups(self, config: OptimizerConfig) -> list[dict[str, Any]]:
        """Return the user's dictionaries, emptied of parameters."""
        for group in self.groups:
            group["params"] = []
        return self.groups


class AdoptedOptimizer(DistributedOptimizer):
    """Sharded optimizer that steps a wrapped model with a user's torch optimizer.

    State that the user's optimizer already has is sharded and kept. Every trainable parameter of the model must be in
    ``user``, whose groups are emptied and filled with master weights; they also set the hyperparameters. Every rank of
    the job must create it, and call ``prepare_grads`` and ``apply``, together. Raises ValueError if the algorithm may
    need unsplit parameters, and shards or a parallel axis may split one.
    """

    def __init__(
        self,
        config: OptimizerConfig,
        model: DistributedDataParallel | Sequence[DistributedDataParallel],
        user: torch.optim.Optimizer,
    ) -> None:
        chunks = [model] if isinstance(model, DistributedDataParallel) else list(model)
        check_model(config, chunks)
        self.user = user
        self.scope = update_scope(type(user))
        if self.scope != "element":
            cut = (find(chunks, lambda param: type(user).__name__) for find in (split_parameter, cut_by_shards))
            problem = spread_group(chunks, [type(user)]) or next(filter(None, cut), None)
            if problem is not None:
                raise ValueError(problem)
        groups = AdoptedGroups(user)
        self.user_params = groups.params
        before = dict(user.state)
        user.state.clear()
        super().__init__(config, chunks, groups, all_rank_groups(chunks[0].groups))
        if before:
            self._shard_state(before)

    def _scope_of(self, torch_group: dict[str, Any]) -> Scope:
        return self.scope

    def _listed(self, segments: list[Segment]) -> list[Segment]:
        """Return segments in the order of the user's parameters.

        The order matters because transformers' AdafactorSchedule reads a group's learning rate from the state of the
        group's first parameter.
        """
        place = {id(param): number for number, param in enumerate(itertools.chain.from_iterable(self.user_params))}
        return sorted(segments, key=lambda segment: place[id(segment.shards[0].param)])

    def _inner_optimizer(self, torch_groups: list[dict[str, Any]], segments: list[Segment]) -> torch.optim.Optimizer:
        return self.user

    def _shard_state(self, state: dict[nn.Parameter, dict[str, Any]]) -> None:
        """Cut the state that the user's optimizer had for full parameters into this rank's shards."""
        entries: dict[str, Any] = {}
        for param in itertools.chain.from_iterable(self.user_params):
            if id(param) in self.names:
                entries[self.names[id(param)]] = cut_entry(state.get(param, {}), param, 0, param.numel())
        self.load_state_by_parameter(entries)

    # -- a step -----------------------------------------------------------------------------------------------------

    @property
    def measured_norm(self) -> float:
        """Return the global norm of the full gradient, without the loss scale and before clipping."""
        return self._measured().norm

    def clamp(self, limit: float, max_norm: float = 0.0) -> None:
        """Clamp each element of the measured gradient to [-limit, limit] in place. Collective over the job.

        ``max_norm`` is the norm that the gradient was clipped to before, or 0. Since ``apply`` multiplies by the clip
        factor later, the bound in memory is raised by the same factor. Without norm clipping, the clamped gradient is
        measured again.
        """
        stats = self._measured()
        for masters, factor in zip(self.masters, stats.factors, strict=True):
            for segment in masters.segments:
                bound = limit / (factor * clip_coefficient(max_norm, stats.norms[segment.norm_group]))
                masters.bucket.memory.owned_grad[segment.start : segment.start + segment.numel].clamp_(-bound, bound)
        if max_norm == 0:
            self._stats = self.meter.measure(loss_scale=self._scale)

    @torch.no_grad()
    def apply(self, max_norm: float) -> bool:
        """Update the parameters from measured gradients, after ``prepare_grads``. Collective over the job.

        ``max_norm`` is the largest global gradient norm, or 0 for no clipping. Return ``False`` if the step was skipped
        because a gradient was not finite.
        """
        stats = self._measured()
        # torch's schedulers check this flag; a rank that owns nothing, or skips, does not call the user's step.
        self.user._opt_called = True
        if not stats.finite:
            self._skip(stats)
            return False
        self.clip_grad_norm(max_norm)
        self.step_with_ready_grads()
        return True

    # -- looking in -------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def full_gradient(self, param: nn.Parameter, max_norm: float = 0.0) -> torch.Tensor:
        """Return a parameter's reduced, unscaled, unsharded gradient in fp32. Call it after ``prepare_grads``.

        Every rank of the parameter's shard group must call it. ``max_norm`` is the norm that ``apply`` will clip to, or
        0. Raises ValueError if this optimizer does not train ``param``.
        """
        for masters, factor in zip(self.masters, self._measured().factors, strict=True):
            if not any(own is param for own in masters.bucket.params):
                continue
            reduced = masters.bucket.memory.owned_grad
            whole = torch.zeros(param.numel(), dtype=torch.float32, device=masters.bucket.device)
            for shard in masters.shards:
                if shard.param is param:
                    whole[shard.offset : shard.offset + shard.numel] = reduced[shard.start : shard.end]
            Collectives().all_reduce(whole, masters.bucket.groups.shard, "a whole gradient").wait()
            norm = self._measured().norms[getattr(param, NORM_GROUP, None)]
            return whole.view(param.shape) * (factor * clip_coefficient(max_norm, norm))
        raise ValueError(f"a parameter of shape {list(param.shape)} was asked for that this optimizer does not train")


def twin_of(optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """Return an optimizer like a user's over other groups, without state.

    The arguments that created the user's optimizer are unknown, so its attributes are copied instead. The ``step`` that
    a scheduler has patched, and the user's hooks, stay with the original.
    """
    twin: Any = object.__new__(type(optimizer))
    twin.__dict__.update({key: value for key, value in vars(optimizer).items() if key != "step"})
    for name, value in vars(optimizer).items():
        if name.startswith("_optimizer_") and isinstance(value, OrderedDict):
            setattr(twin, name, OrderedDict())
    twin.param_groups = groups
    twin.state = defaultdict(dict)
    return twin
