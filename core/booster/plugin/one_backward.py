"""OneBackward: rejects gradients that torch's DistributedDataParallel would silently leave local.

torch's reducer expects one gradient per parameter after each forward. Gradients of a later backward are added to
``.grad`` on each rank separately, and so are those of a parameter that was frozen or absent when the model was wrapped.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import torch
from torch import nn

from core.distributed.buffer.grad_attribute import call_after_backward
from core.distributed.buffer.grad_placeholder import tensors_in


class OneBackward:
    """Check for gradients that torch's wrapper does not reduce, from any kind of backward call.

    Outside ``no_sync``, a parameter may get gradients in one backward after each forward. A backward that does not
    start at outputs is accepted: a penalty on the parameters themselves has equal gradients on all ranks. No forward of
    ``ddp`` may have run yet.
    """

    def __init__(self, ddp: nn.parallel.DistributedDataParallel) -> None:
        named = dict(ddp.module.named_parameters())
        ignored = ddp.parameters_to_ignore
        self.known = {param for name, param in named.items() if param.requires_grad or name in ignored}
        self.expects = False  # True after a forward outside of no_sync: torch reduces the next gradients
        self.backward = 0  # number of the last backward
        self.runs = False  # True while it runs
        self.through_outputs = False  # True if that backward has passed through an output of a forward
        self.first: dict[str, int] = {}  # parameter's name -> backward of its first gradient since the forward
        for name, param in named.items():
            if param.requires_grad and name not in ignored:
                param.register_post_accumulate_grad_hook(partial(self._arrive, name))
        ddp.register_forward_hook(self._end_forward)

    def _end_forward(self, ddp: nn.parallel.DistributedDataParallel, _: Any, output: Any) -> None:
        if not torch.is_grad_enabled():
            return
        if not all(param in self.known for param in ddp.module.parameters() if param.requires_grad):
            self._refuse_unknown(ddp.module)
        self.expects, self.runs = ddp.require_backward_grad_sync, False
        self.first.clear()
        if self.expects:
            for tensor in tensors_in(vars(output) if dataclasses.is_dataclass(output) else output):
                if tensor.requires_grad:
                    tensor.register_hook(self._pass_output)

    def _refuse_unknown(self, module: nn.Module) -> None:
        name = next(name for name, p in module.named_parameters() if p.requires_grad and p not in self.known)
        raise RuntimeError(
            f"parameter {name!r} was frozen, or not there, when TorchDDPPlugin boosted the model and has "
            "requires_grad=True now; torch's DistributedDataParallel does not reduce its gradient, so each rank would "
            "train its own copy. Freeze it, or boost the plain model again"
        )

    def _begin(self) -> None:
        if not self.runs:
            self.backward += 1
            self.through_outputs = False
            self.runs = call_after_backward(self._end)

    def _end(self) -> None:
        self.runs = False

    def _pass_output(self, _: torch.Tensor) -> None:
        self._begin()
        self.through_outputs = True

    def _arrive(self, name: str, _: torch.Tensor) -> None:
        if not self.expects:
            return
        self._begin()
        first = self.first.setdefault(name, self.backward)
        if first != self.backward and self.through_outputs:
            raise RuntimeError(
                f"backward {self.backward} adds a second gradient to {name!r} after one forward, but torch's "
                f"DistributedDataParallel already reduced the first one in backward {first}, so this one would not be "
                "reduced. Add the losses and call backward once, or run the model again before each backward; "
                "zero_grad() discards the gradients"
            )
