"""Checks for misuse that would raise no error: a model changed after its wrap, a step on unreduced gradients."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Sequence
from itertools import chain
from operator import attrgetter
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from core.distributed.buffer.bucket import Bucket, BucketState
from core.distributed.buffer.grad_attribute import weakly
from core.distributed.guard.replicas import WeightWatch
from core.distributed.layout.model_plan import ModelPlan
from core.groups.agree import SyncError

REMEDY = "Do it before wrapping, or delete the wrapper and wrap the model again"


# requires_grad of parameters without a place in a buffer; dtypes of all others; addresses of their gradients and of
# parameters in buffers; hash of the modules' contents
Snapshot = tuple[list[bool], list[torch.dtype], list[int], int]


class ModelWatch:
    """Detector of changes of a wrapped model that its buffers cannot follow.

    It checks once a step, in one pass over modules and parameters, and searches for details only after a change.
    """

    def __init__(self, module: nn.Module, plan: ModelPlan, buckets: Sequence[Bucket]) -> None:
        self.module = module
        self.plan = plan
        self.names = [contract.name for bucket in buckets for contract in bucket.contracts]
        self.params = [param for bucket in buckets for param in bucket.params]
        in_buffers = [bucket for bucket in buckets if bucket.memory.param_data is not None]
        self.views = [view for bucket in buckets for view in bucket.memory.permanent]
        self.views += [param for bucket in in_buffers for param in bucket.params]
        self.view_names = [*self.names, *(contract.name for bucket in in_buffers for contract in bucket.contracts)]
        self.shapes = [param.shape for param in self.params]
        self.numels = list(map(torch.Tensor.numel, self.params))
        self.placed = set(map(id, self.params))
        self._watch_tables()
        self.before = self._snapshot()

    def problems(self) -> list[str]:
        """Return a message about the first problem of each kind; empty without problems."""
        now = self._snapshot()
        if now == self.before:
            return []
        found = [self._unplaced(), self._moved(now), self._removed() if now[-1] != self.before[-1] else ""]
        if not any(found):  # such as a submodule without parameters that was added
            self._watch_tables()
            self.before = self._snapshot()
        return list(filter(None, found))

    def _snapshot(self) -> Snapshot:
        trains, dtypes = map(attrgetter("requires_grad"), self.unplaced), map(attrgetter("dtype"), self.params)
        addresses, contents = map(torch.Tensor.data_ptr, self.views), map(id, chain.from_iterable(self.tables))
        return list(trains), list(dtypes), list(addresses), hash(tuple(contents))

    def _unplaced(self) -> str:
        """Describe the first trained parameter without a place in a buffer, whenever it was added."""
        frozen = set(map(id, self.plan.frozen.values()))
        for name, param in self.module.named_parameters():
            if param.requires_grad and id(param) not in self.placed:
                was = "was exchanged for another one" if name in self.plan.named else "was added"
                was = "was frozen when the model was wrapped" if id(param) in frozen else f"{was} after the wrap"
                return (
                    f"parameter {name!r} {was} and has requires_grad=True now; it has no place in the gradient buffer, "
                    "and each rank would train its own copy. Freeze it, or delete the wrapper and wrap the model again"
                )
        return ""

    def _moved(self, now: Snapshot) -> str:
        _, old_dtypes, old_addresses, _ = self.before
        _, dtypes, addresses, _ = now
        for name, was, dtype in zip(self.names, old_dtypes, dtypes, strict=True):
            if was is not dtype:
                return f"parameter {name!r} is {dtype} now and was {was} when the model was wrapped. {REMEDY}"
        for name, old_address, address in zip(self.view_names, old_addresses, addresses, strict=True):
            if old_address != address:
                return f"parameter {name!r} or its gradient was moved out of the buffers since the wrap. {REMEDY}"
        return ""

    def _removed(self) -> str:
        present = set(map(id, self.module.parameters()))
        for name, param in self.plan.params.items():
            if id(param) not in present:
                return f"parameter {name!r} is no longer part of the model, and was when it was wrapped. {REMEDY}"
        return ""

    def _watch_tables(self) -> None:
        modules = list(self.module.modules())
        params = [module._parameters.values() for module in modules]  # live views, which show later changes
        self.tables = [*params, *(module._modules.values() for module in modules)]
        self.kept = list(chain.from_iterable(self.tables))  # references, so that no id is used again
        everyone = chain.from_iterable(params)
        self.unplaced = [param for param in everyone if param is not None and id(param) not in self.placed]


class Reduction(Protocol):
    """Interface of a reducer for StepGuard."""

    buckets: list[Bucket]
    gradients: int

    @property
    def open(self) -> bool: ...


class StepGuard:
    """Rejects an optimizer's step on unreduced gradients of one wrapped model chunk.

    Without ``finalize_model_grads`` every rank would train on its own data, without any error. torch calls a hook
    before every ``optimizer.step()``, until ``owner`` is deleted. The check costs one flag, and one pass over the
    parameters of a new optimizer. ``params`` are the ids of the reduced parameters.
    """

    def __init__(self, owner: nn.Module, reducer: Reduction, params: Collection[int], weights: WeightWatch) -> None:
        self.reducer = reducer
        self.params = params
        self.weights = weights
        self.needs_rules = any(contract.rules for bucket in reducer.buckets for contract in bucket.contracts)
        self.steps = 0  # steps of such optimizers since the wrap
        self.concerned: weakref.WeakKeyDictionary[torch.optim.Optimizer, bool] = weakref.WeakKeyDictionary()
        weakref.finalize(owner, register_optimizer_step_pre_hook(weakly(self.check)).remove)
        weakref.finalize(owner, register_optimizer_step_post_hook(weakly(self.record_step)).remove)

    def check(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Raise SyncError if an optimizer is about to step on incomplete gradients of this chunk's parameters."""
        if optimizer not in self.concerned:
            params = (param for group in getattr(optimizer, "param_groups", ()) for param in group["params"])
            self.concerned[optimizer] = any(id(param) in self.params for param in params)
        if not self.concerned[optimizer]:
            return
        reducer, name = self.reducer, type(optimizer).__name__
        reason = ""
        if not reducer.open:
            if any(not bucket.step.is_full_grad for bucket in reducer.buckets):
                raise SyncError(
                    f"{name} holds parameters whose gradients are sharded, so that `.grad` holds none for it. Use "
                    "core.optimizer.get_megatron_optimizer, or finalize_model_grads(..., force_all_reduce=True)"
                )
            if self.needs_rules and any(bucket.step.state is BucketState.REDUCED for bucket in reducer.buckets):
                reason = "after finish_grad_sync and before the sync rules (see describe()) had run"
            elif any(bucket.scale_is_due for bucket in reducer.buckets):
                raise SyncError(
                    f"{name} would step on gradients that are not divided yet: scale_in_optimizer=True leaves that to "
                    "the optimizer of core.optimizer.get_megatron_optimizer. Use that one, or set it False"
                )
        elif reducer.gradients:
            reason = "on gradients that were not reduced over the data-parallel ranks"
        if reason:
            raise SyncError(
                f"rank {dist.get_rank()}: {name}.step() was called {reason}. Call finalize_model_grads([model]) after "
                "the last backward and before the step. For steps on a rank's own gradients, as in local SGD, train "
                "the module without the wrapper and average its weights"
            )
        self.steps += 1

    def record_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Compute the checksums of the weights after an optimizer's step."""
        if self.concerned.get(optimizer):
            self.weights.record(again=True)

    def describe(self) -> list[str]:
        """List the steps made on this rank's parameters, and the settings of torch's optimizers that made them."""
        of_ours = max((bucket.optimizer_steps for bucket in self.reducer.buckets), default=0)
        lines = [f"made {self.steps + of_ours} optimizer steps"]
        for optimizer in (each for each, is_ours in self.concerned.items() if is_ours):
            for group in optimizer.param_groups:
                numbers = sorted((k, value) for k, value in group.items() if isinstance(value, (int, float)) and value)
                settings = ", ".join(f"{name}={value:g}" for name, value in numbers)
                lines.append(f"{type(optimizer).__name__} with {settings}")
        return lines


def refuse_reshaped(names: Sequence[str], params: Sequence[nn.Parameter], shapes: Sequence[torch.Size]) -> None:
    """Raise SyncError if a parameter no longer has its shape from the wrap. Local."""
    for name, param, was in zip(names, params, shapes, strict=True):
        if param.shape != was:
            raise SyncError(
                f"parameter {name!r} is {list(param.shape)} now and was {list(was)} when the model was wrapped; was it "
                f"resized (resize_token_embeddings)? {REMEDY}"
            )
