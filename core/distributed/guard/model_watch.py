"""ModelWatch: what was done to a model after it was wrapped that its buffers cannot follow."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from operator import attrgetter

import torch
from torch import nn

from core.distributed.buffer.bucket import Bucket
from core.distributed.layout.model_plan import ModelPlan

REMEDY = "Do it before wrapping, or delete the wrapper and wrap the model again"


class ModelWatch:
    """Looks once a step, at the edge: a pass over modules and parameters that reads identities and addresses only."""

    def __init__(self, module: nn.Module, plan: ModelPlan, order: Sequence[Bucket]) -> None:
        self.module = module
        self.plan = plan
        self._watch_tables(plan.modules)
        plan.modules.clear()  # or one that is exchanged later would live as long as the wrapper
        self.order = order
        self.params = [param for bucket in order for param in bucket.params]
        self.views = [view for bucket in order for view in bucket.homes]
        self.housed = [param for bucket in order if bucket.sharded for param in bucket.params]
        self.places = self._places()

    def problems(self) -> list[str]:
        """In words, the first one of each kind; empty when all is well."""
        return [*self._thawed(), *self._moved(), *self._exchanged()]

    def _thawed(self) -> list[str]:
        for name, param in self.plan.frozen.items():
            if param.requires_grad:
                return [
                    f"parameter {name!r} was frozen when the model was wrapped and has requires_grad=True now; it has "
                    "no place in the gradient buffer and would not be reduced. Wrap the model again after unfreezing"
                ]
        return []

    def _moved(self) -> list[str]:
        now = self._places()
        if now == self.places:
            return []
        (dtypes, grads, params), (dtypes_now, grads_now, params_now) = self.places, now
        names = [contract.name for bucket in self.order for contract in bucket.contracts]
        for name, before, after in zip(names, dtypes, dtypes_now, strict=True):
            if before is not after:
                return [f"parameter {name!r} is {after} now and was {before} when the model was wrapped. {REMEDY}"]
        moved = {id(p) for p, a, b in zip(self.params, grads, grads_now, strict=True) if a != b}
        moved |= {id(p) for p, a, b in zip(self.housed, params, params_now, strict=True) if a != b}
        name = next(name for name, param in zip(names, self.params, strict=True) if id(param) in moved)
        return [f"parameter {name!r} or its gradient was moved out of the buffers since the wrap. {REMEDY}"]

    def _places(self) -> tuple[list[torch.dtype], list[int], list[int]]:
        """Dtypes of all parameters, addresses of their gradients, and of the parameters that have a home of ours."""
        address = torch.Tensor.data_ptr
        dtypes = list(map(attrgetter("dtype"), self.params))
        return dtypes, list(map(address, self.views)), list(map(address, self.housed))

    def _exchanged(self) -> list[str]:
        if self._signature() == self.signature:
            return []
        now = dict(self.module.named_parameters())
        known = set(map(id, self.plan.named.values()))
        for name, param in now.items():
            if id(param) not in known and param.requires_grad:
                change = "was exchanged for another one" if name in self.plan.named else "was added"
                return [f"parameter {name!r} {change} after the wrap and has no place in the gradient buffer. {REMEDY}"]
        present = set(map(id, now.values()))
        for name, param in self.plan.params.items():
            if id(param) not in present:
                return [f"parameter {name!r} is no longer part of the model, and was when it was wrapped. {REMEDY}"]
        self._watch_tables(self.module.modules())
        return []

    def _watch_tables(self, modules: Iterable[nn.Module]) -> None:
        tables = chain.from_iterable((module._parameters, module._modules) for module in modules)
        self.tables = [table.values() for table in tables]  # these show later changes
        self.kept = list(chain.from_iterable(self.tables))  # alive, so that nothing new can have an id of theirs
        self.signature = self._signature()

    def _signature(self) -> int:
        return hash(tuple(map(id, chain.from_iterable(self.tables))))
