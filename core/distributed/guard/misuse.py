"""Checks for misuse that would raise no error: a model changed after its wrap, a step on unreduced gradients."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Sequence
from itertools import chain
from operator import attrgetter
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from core.distributed.buffer.bucket import Bucket, BucketState
from core.distributed.buffer.grad_attribute import weakly
from core.distributed.guard.weights import WeightWatch
from core.distributed.layout.model_plan import ModelPlan
from core.groups.agree import SyncError

REMEDY = "Do it before wrapping, or delete the wrapper and wrap the model again"


class Snapshot(NamedTuple):
    """State of a wrapped model: identities and addresses only."""

    thawed: list[bool]  # requires_grad of parameters without a place in a buffer
    dtypes: list[torch.dtype]  # dtypes of all parameters
    grads: list[int]  # addresses of their gradients
    housed: list[int]  # addresses of parameters in buffers
    tables: int  # hash of the modules' contents


class ModelWatch:
    """Finds changes of a wrapped model that its buffers cannot follow.

    It checks once a step, in one pass over modules and parameters. Only after a change it looks for the details.

    Args:
        module: The wrapped module.
        plan: Its plan.
        buckets: Its buckets.
    """

    def __init__(self, module: nn.Module, plan: ModelPlan, buckets: Sequence[Bucket]) -> None:
        self.module = module
        self.plan = plan
        self.names = [contract.name for bucket in buckets for contract in bucket.contracts]
        self.params = [param for bucket in buckets for param in bucket.params]
        self.views = [view for bucket in buckets for view in bucket.storage]
        self.housed = [param for bucket in buckets if bucket.param_data is not None for param in bucket.params]
        self.shapes = [param.shape for param in self.params]
        self.numels = list(map(torch.Tensor.numel, self.params))
        self.placed = set(map(id, self.params))
        self._watch_tables()
        self.before = self._look()

    def problems(self) -> list[str]:
        """Return a message about the first problem of each kind; empty without problems."""
        now = self._look()
        if now == self.before:
            return []
        changed = now.tables != self.before.tables
        problems = [*self._unplaced(), *self._moved(now), *(self._removed() if changed else ())]
        if not problems:  # such as a submodule without parameters that was added
            self._watch_tables()
            self.before = self._look()
        return problems

    def _look(self) -> Snapshot:
        address = torch.Tensor.data_ptr
        return Snapshot(
            list(map(attrgetter("requires_grad"), self.unplaced)),
            list(map(attrgetter("dtype"), self.params)),
            list(map(address, self.views)),
            list(map(address, self.housed)),
            hash(tuple(map(id, chain.from_iterable(self.tables)))),
        )

    def _unplaced(self) -> list[str]:
        """Return a message about the first trained parameter without a place in a buffer, whenever it was added."""
        frozen = set(map(id, self.plan.frozen.values()))
        for name, param in self.module.named_parameters():
            if param.requires_grad and id(param) not in self.placed:
                was = "was exchanged for another one" if name in self.plan.named else "was added"
                was = "was frozen when the model was wrapped" if id(param) in frozen else f"{was} after the wrap"
                return [
                    f"parameter {name!r} {was} and has requires_grad=True now; it has no place in the gradient buffer, "
                    "and each rank would train its own copy. Freeze it, or delete the wrapper and wrap the model again"
                ]
        return []

    def _moved(self, now: Snapshot) -> list[str]:
        before = self.before
        for name, was, dtype in zip(self.names, before.dtypes, now.dtypes, strict=True):
            if was is not dtype:
                return [f"parameter {name!r} is {dtype} now and was {was} when the model was wrapped. {REMEDY}"]
        moved = {id(p) for p, a, b in zip(self.params, before.grads, now.grads, strict=True) if a != b}
        moved |= {id(p) for p, a, b in zip(self.housed, before.housed, now.housed, strict=True) if a != b}
        first = next((name for name, param in zip(self.names, self.params, strict=True) if id(param) in moved), None)
        if first is None:
            return []
        return [f"parameter {first!r} or its gradient was moved out of the buffers since the wrap. {REMEDY}"]

    def _removed(self) -> list[str]:
        present = set(map(id, self.module.parameters()))
        for name, param in self.plan.params.items():
            if id(param) not in present:
                return [f"parameter {name!r} is no longer part of the model, and was when it was wrapped. {REMEDY}"]
        return []

    def _watch_tables(self) -> None:
        modules = list(self.module.modules())
        held = [module._parameters.values() for module in modules]  # live views, which show later changes
        self.tables = [*held, *(module._modules.values() for module in modules)]
        self.kept = list(chain.from_iterable(self.tables))  # keep references, so that no id is used again
        params = chain.from_iterable(held)
        self.unplaced = [param for param in params if param is not None and id(param) not in self.placed]


class Reduction(Protocol):
    """Interface of a reducer for StepGuard."""

    buckets: list[Bucket]
    gradients: int

    @property
    def open(self) -> bool: ...


class StepGuard:
    """Rejects an optimizer's step on unreduced gradients of one wrapped model chunk.

    Without `finalize_model_grads` every rank would train on its own data, without any error. torch calls a hook before
    every `optimizer.step()`. The check costs one flag, and one pass over the parameters of a new optimizer.

    Args:
        owner: The hooks are removed when it is deleted.
        reducer: Reducer of the chunk.
        params: Ids of the reduced parameters.
        weights: Weight check that runs after each step.
    """

    def __init__(self, owner: nn.Module, reducer: Reduction, params: Collection[int], weights: WeightWatch) -> None:
        self.reducer = reducer
        self.params = params
        self.weights = weights
        self.needs_rules = any(contract.rules for bucket in reducer.buckets for contract in bucket.contracts)
        self.steps = 0  # steps of such optimizers since the wrap
        self.concerned: weakref.WeakKeyDictionary[torch.optim.Optimizer, bool] = weakref.WeakKeyDictionary()
        weakref.finalize(owner, register_optimizer_step_pre_hook(weakly(self.check)).remove)
        weakref.finalize(owner, register_optimizer_step_post_hook(weakly(self.note_step)).remove)

    def check(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Reject a step of an optimizer that is about to use incomplete gradients.

        Args:
            optimizer: Any optimizer.

        Raises:
            SyncError: If it has parameters of this chunk whose gradients are incomplete.
        """
        ours = self.concerned.get(optimizer)
        if ours is None:
            held = (param for group in getattr(optimizer, "param_groups", ()) for param in group["params"])
            ours = self.concerned[optimizer] = any(id(param) in self.params for param in held)
        if not ours:
            return
        if any(not bucket.whole for bucket in self.reducer.buckets) and not self.reducer.open:
            raise SyncError(
                f"{type(optimizer).__name__} holds parameters whose gradients are sharded, so that `.grad` holds none "
                "for it. Use core.optimizer.get_megatron_optimizer, or finalize_model_grads(..., "
                "force_all_reduce=True)"
            )
        reason = self.not_ready()
        if reason is not None:
            raise SyncError(
                f"rank {dist.get_rank()}: {type(optimizer).__name__}.step() was called {reason}. Call "
                "finalize_model_grads([model]) after the last backward and before the step. For steps on a rank's own "
                "gradients, as in local SGD, train the module without the wrapper and average its weights"
            )
        if not self.reducer.open and any(bucket.scale_is_due for bucket in self.reducer.buckets):
            raise SyncError(
                f"{type(optimizer).__name__} would step on gradients that are not divided yet: scale_in_optimizer=True "
                "leaves that to the optimizer of core.optimizer.get_megatron_optimizer. Use that one, or set it False"
            )
        self.steps += 1

    def note_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Record an optimizer's step.

        Args:
            optimizer: Any optimizer.
        """
        if self.concerned.get(optimizer):
            self.weights.note(again=True)

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

    def not_ready(self) -> str | None:
        """Return why an optimizer may not step now, or None if it may."""
        reducer = self.reducer
        if reducer.open:
            return "on gradients that were not reduced over the data-parallel ranks" if reducer.gradients else None
        if self.needs_rules and any(bucket.state is BucketState.REDUCED for bucket in reducer.buckets):
            return "after finish_grad_sync and before the sync rules (see describe()) had run"
        return None


def refuse_reshaped(names: Sequence[str], params: Sequence[nn.Parameter], shapes: Sequence[torch.Size]) -> None:
    """Check that parameters have their shapes from the wrap. Local.

    Args:
        names: Names of the parameters.
        params: Parameters.
        shapes: Shapes at the wrap.

    Raises:
        SyncError: If a parameter has another shape.
    """
    for name, param, was in zip(names, params, shapes, strict=True):
        if param.shape != was:
            raise SyncError(
                f"parameter {name!r} is {list(param.shape)} now and was {list(was)} when the model was wrapped; was it "
                f"resized (resize_token_embeddings)? {REMEDY}"
            )
