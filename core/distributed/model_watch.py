"""ModelWatch: what was done to a model after it was wrapped that its buffers cannot follow."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from core.distributed.bucket import Bucket
from core.distributed.model_plan import ModelPlan

REMEDY = "Do it before wrapping, or delete the wrapper and wrap the model again"


class ModelWatch:
    """Looks once a step, at the edge: a pass over modules and parameters that reads identities and addresses only."""

    def __init__(self, module: nn.Module, plan: ModelPlan, order: Sequence[Bucket]) -> None:
        self.module = module
        self.plan = plan
        self.modules = list(module.modules())
        self.signature = self._signature()
        self.homes = [
            (contract.name, param, view, view.data_ptr(), param.data_ptr() if bucket.sharded else None, param.dtype)
            for bucket in order
            for param, view, contract in zip(bucket.params, bucket.homes, bucket.contracts, strict=True)
        ]

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
        for name, param, view, grad_home, param_home, dtype in self.homes:
            if param.dtype is not dtype:
                return [f"parameter {name!r} is {param.dtype} now and was {dtype} when the model was wrapped. {REMEDY}"]
            if view.data_ptr() != grad_home or (param_home is not None and param.data_ptr() != param_home):
                return [f"parameter {name!r} or its gradient was moved out of the buffers since the wrap. {REMEDY}"]
        return []

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
        self.modules = list(self.module.modules())
        self.signature = self._signature()
        return []

    def _signature(self) -> int:
        return hash(
            tuple(
                (*map(id, module._parameters.values()), *map(id, module._modules.values())) for module in self.modules
            )
        )
