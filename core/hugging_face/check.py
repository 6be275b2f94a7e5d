"""check: a tiny random copy of a family, split over tp, against one process that splits nothing. All in fp64.

Output and every gradient are compared, after DistributedDataParallel and finalize_model_grads, so the contracts are
checked too. Families cast to fp32 inside; here such casts give fp64, so that equal means 1e-9.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.overrides import TorchFunctionMode

from core import parallel_state
from core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from core.hugging_face.plan import Plan, PlanError
from core.hugging_face.split import split_model
from core.hugging_face.tiny import tiny_config, tiny_inputs, tiny_model
from core.tensor_parallel.initialization import tensor_parallel_join

TOLERANCE = 1e-9
Answer = Literal["equal", "refused", "wrong", "not built"]


@dataclass(frozen=True)
class Verdict:
    """What became of one family. off: the largest difference, relative to the largest value it is compared with.

    summed: how many whole parameters had their gradients summed over tp, and of these without a rule in the plan.
    """

    name: str
    answer: Answer
    why: str = ""
    off: float = 0.0
    summed: tuple[int, int] = (0, 0)

    def __str__(self) -> str:
        words = {"equal": f"at most {self.off:.1e} off"}.get(self.answer, self.why)
        return f"{self.name}: {self.answer}: {words}"


class InDouble(TorchFunctionMode):
    """Whatever asks for fp32 gets fp64: softmax of routers, norms and rotary tables are computed in it by families."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is Tensor.float:
            func = Tensor.double
        args = tuple(torch.float64 if value is torch.float32 else value for value in args)
        kwargs = {key: torch.float64 if value is torch.float32 else value for key, value in (kwargs or {}).items()}
        return func(*args, **kwargs)


def check_on_rank(name: str, kind: type, tp: int, overrides: Mapping[str, Any] | None = None) -> Verdict:
    """The verdict on a configuration class, on every rank alike. Collective over `tp` ranks: the whole job."""
    torch.set_default_dtype(torch.float64)
    try:
        with InDouble():
            try:
                model = tiny_model(tiny_config(kind, overrides))
                inputs = tiny_inputs(model)
                reference = copy.deepcopy(model)
                expected = _backward(reference, reference, inputs)
            except Exception as error:
                text = (str(error).strip().splitlines() or [""])[0]
                return Verdict(name, "not built", f"{type(error).__name__}: {text}")
            if not _all_finite(expected, reference):
                return Verdict(name, "not built", "the tiny copy's own output or gradients are not finite")
            if not parallel_state.model_parallel_is_initialized():
                parallel_state.initialize_model_parallel(tensor_model_parallel_size=tp)
            try:
                report = split_model(model, example=inputs)
            except PlanError as error:
                return Verdict(name, "refused", str(error))
            wrapped = DistributedDataParallel(None, DistributedDataParallelConfig(), model)
            found = _backward(wrapped, model, inputs)
            finalize_model_grads([wrapped])
    finally:
        torch.set_default_dtype(torch.float32)
    worst = _worst(found, expected, model, reference, report.plan)
    summed = len(report.partial), len(report.partial - report.plan.partial)
    answer: Answer = "equal" if worst[0] <= TOLERANCE else "wrong"
    why = "" if answer == "equal" else f"{worst[1]} is {worst[0]:.2g} off"
    return Verdict(name, answer, why, worst[0], summed)


def _backward(call: Any, model: Any, inputs: dict[str, Any]) -> Tensor:
    """Backward from a random projection of the output, so that every element of it counts; the output."""
    output = call(**inputs)
    for name in ("logits", "last_hidden_state", "pred_masks"):
        value = output.get(name) if hasattr(output, "get") else None
        if isinstance(value, Tensor):
            break
    else:
        value = next(value for value in output.values() if isinstance(value, Tensor))
    weights = torch.randn(value.shape, generator=torch.Generator().manual_seed(11), dtype=torch.float64)
    (value * weights).mean().backward()
    return value.detach()


def _all_finite(output: Tensor, model: torch.nn.Module) -> bool:
    grads = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    return all(bool(tensor.isfinite().all()) for tensor in (output, *grads))


def _worst(found: Tensor, expected: Tensor, model: Any, reference: Any, plan: Plan) -> tuple[float, str]:
    """(largest relative difference, where): of the output, and of each gradient beside the model's largest one."""
    references = dict(reference.named_parameters())
    largest = max(float(p.grad.abs().max()) for p in references.values() if p.grad is not None)
    differences = [(float((found - expected).abs().max() / expected.abs().max()), "the output")]
    for name, parameter in model.named_parameters():
        grad, wanted = whole_gradient(name, parameter, plan), references[name].grad
        if grad is None or wanted is None:
            if (grad is None or not grad.any()) and (wanted is None or not wanted.any()):
                continue
            return math.inf, f"the gradient of {name!r}, which only one of the two has,"
        off = float((grad - wanted).abs().max()) / largest
        differences.append((off if math.isfinite(off) else math.inf, f"the gradient of {name!r}"))
    return max(differences)


def whole_gradient(name: str, parameter: torch.nn.Parameter, plan: Plan) -> Tensor | None:
    """A finalized gradient in the shape of the whole model. Collective over the tensor-parallel group for a slice."""
    split, grad = plan.splits.get(name), parameter.grad
    group = parallel_state.get_process_groups().tp
    if split is None or grad is None or group is None or group.size() == 1:
        return grad
    parts = [torch.empty_like(grad) for _ in range(group.size())]
    dist.all_gather(parts, grad.contiguous(), group=group)
    return tensor_parallel_join(parts, split.dim, split.blocks).narrow(split.dim, 0, split.length)
