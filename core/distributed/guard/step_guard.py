"""StepGuard: no optimizer may step on gradients that are not reduced yet.

Forgetting `finalize_model_grads` trains every rank on its own data, and nothing tells. torch lets one look at every
`optimizer.step()`; the look is one flag, and on a new optimizer one pass over its parameters.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from core.agree import SyncError
from core.distributed.buffer.bucket import BucketState
from core.distributed.reduce.grad_reducer import GradReducer


class StepGuard:
    """Watches the optimizers that hold parameters of one wrapped model chunk. Ends with the chunk."""

    def __init__(self, owner: nn.Module, reducer: GradReducer) -> None:
        self.reducer = reducer
        self.needs_rules = any(contract.rules for bucket in reducer.order for contract in bucket.contracts)
        self.ours = frozenset(id(param) for bucket in reducer.order for param in bucket.params)
        self.concerned: weakref.WeakKeyDictionary[torch.optim.Optimizer, bool] = weakref.WeakKeyDictionary()
        guard = weakref.ref(self)

        def before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
            alive = guard()
            if alive is not None:
                alive.check(optimizer)

        weakref.finalize(owner, register_optimizer_step_pre_hook(before_step).remove)

    def check(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise SyncError if this optimizer is about to use gradients of ours that are not whole."""
        if not self._holds_ours(optimizer):
            return
        if any(not bucket.full for bucket in self.reducer.order) and not self.reducer.open:
            raise SyncError(
                f"{type(optimizer).__name__} holds parameters whose gradients are sharded, so that `.grad` holds none "
                "for it. Use core.optimizer.get_megatron_optimizer, or finalize_model_grads(..., "
                "force_all_reduce=True)"
            )
        reason = self.not_ready()
        if reason is not None:
            raise SyncError(
                f"rank {dist.get_rank()}: {type(optimizer).__name__}.step() was called {reason}. Call "
                "finalize_model_grads([model]) after the last backward and before the step"
            )
        if not self.reducer.open and any(bucket.scale_is_due for bucket in self.reducer.order):
            raise SyncError(
                f"{type(optimizer).__name__} would step on gradients that are not divided yet: scale_in_optimizer=True "
                "leaves that to the optimizer of core.optimizer.get_megatron_optimizer. Use that one, or set it False"
            )

    def not_ready(self) -> str | None:
        """Why an optimizer may not step now; None when it may."""
        reducer = self.reducer
        if reducer.open:
            return "on gradients that were not reduced over the data-parallel ranks" if reducer.dirty else None
        if self.needs_rules and any(bucket.state is BucketState.REDUCED for bucket in reducer.order):
            return "after finish_grad_sync and before the sync rules (see describe()) had run"
        return None

    def _holds_ours(self, optimizer: torch.optim.Optimizer) -> bool:
        known = self.concerned.get(optimizer)
        if known is None:
            held = (param for group in optimizer.param_groups for param in group["params"])
            known = any(id(param) in self.ours for param in held)
            self.concerned[optimizer] = known
        return known
