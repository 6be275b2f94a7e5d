"""The arms of `python -m benchmarks optimizer`: who makes the optimizer's step, on which numbers, moving which bytes.

An arm holds parameters with the same values and is given the same gradients. torch's arms are what a user writes in
plain torch: fused AdamW, over fp32 masters where the parameters are in bf16. Ours are plain `optimizer.step()`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from benchmarks.workloads import WORKLOADS

if TYPE_CHECKING:
    from core.distributed.distributed_data_parallel_config import Strategy

BF16, FP32, INT16 = torch.bfloat16, torch.float32, torch.int16
LR, BETAS, EPS, WEIGHT_DECAY = 0.1, (0.9, 0.999), 1e-8, 0.1
CLIP = 1.0  # the gradients' norm is the root of their number, so that every clipped step multiplies
SEED = 1234


@dataclass(frozen=True, slots=True)
class AdamNumbers:
    """Numbers that are the same for all elements of a step.

    factors: the gradient is multiplied by both; their product need not be an fp32 number. step: counted from 1.
    """

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    decoupled: bool
    step: int
    factors: tuple[float, float] = (1.0, 1.0)


@dataclass(frozen=True)
class Precision:
    """Dtypes of what is kept. master: None where the parameter is its own; int16 for a remainder."""

    param: torch.dtype
    grad: torch.dtype
    master: torch.dtype | None
    moment: torch.dtype = FP32
    options: dict[str, Any] = field(default_factory=dict)

    def bytes_per_element(self, *, clipped: bool) -> int:
        """Bytes that an AdamW step must move: all it needs is read once, all that changes is written once.

        Gradients are read a second time where their norm must be known before the first element may change.
        """
        gradients = self.grad.itemsize * (2 if clipped else 1)
        moments = 2 * 2 * self.moment.itemsize
        parameter = self.param.itemsize * (1 if self.master not in (None, INT16) else 2)  # else only written
        master = 0 if self.master is None else 2 * self.master.itemsize
        return gradients + moments + parameter + master


def _aware(grad: torch.dtype, master: torch.dtype | None, moment: torch.dtype, **options: Any) -> Precision:
    """bf16 parameters under use_precision_aware_optimizer."""
    options = {
        "use_precision_aware_optimizer": True,
        "main_grads_dtype": grad,
        "exp_avg_dtype": moment,
        "exp_avg_sq_dtype": moment,
        **options,
    }
    return Precision(BF16, grad, master, moment, options)


PRECISIONS: dict[str, Precision] = {
    "fp32": Precision(FP32, FP32, None),
    "bf16, fp32 gradients and masters": Precision(BF16, FP32, FP32),
    "bf16, bf16 gradients, fp32 masters": Precision(BF16, BF16, FP32),
    "bf16, fp32 gradients, remainders": _aware(FP32, INT16, FP32),
    "bf16, bf16 gradients, remainders": _aware(BF16, INT16, FP32),
    "bf16, bf16 gradients and moments, remainders": _aware(BF16, INT16, BF16),
    "bf16 throughout, no masters": _aware(BF16, None, BF16, main_params_dtype=BF16),
}


@dataclass(frozen=True)
class Problem:
    """The shapes of the parameters and their precision; every arm draws the same values from it."""

    shapes: tuple[tuple[int, ...], ...]
    precision: Precision

    @property
    def numel(self) -> int:
        """Elements of all parameters."""
        return sum(torch.Size(shape).numel() for shape in self.shapes)

    def values(self, what: int, dtype: torch.dtype) -> list[torch.Tensor]:
        """Normally distributed numbers in the shapes of the parameters; `what` says which ones."""
        generator = torch.Generator().manual_seed(SEED + what)
        return [torch.randn(shape, generator=generator).to(dtype) for shape in self.shapes]

    def gradients(self, number: int) -> list[torch.Tensor]:
        """Those of a step, as autograd makes them: in the parameters' dtype."""
        return self.values(1 + number, self.precision.param)


def shapes_of(workload: str, ranks: int) -> tuple[tuple[int, ...], ...]:
    """The parameters of a workload of `python -m benchmarks steps`; with several ranks every n-th of them.

    So each rank's share is of about the size that its shard would be.
    """
    with torch.device("meta"):
        shapes = [tuple(param.shape) for param in WORKLOADS[workload].model().parameters()]
    return tuple(shapes[::ranks])


class StepArm:
    """One arm: `prepare` gives it gradients, untimed; `step` is what is timed; `weights` are what came out."""

    params: list[nn.Parameter]

    def prepare(self, grads: Sequence[torch.Tensor]) -> None:
        """Take the gradients of a step."""
        raise NotImplementedError

    def step(self) -> None:
        """Update the parameters."""
        raise NotImplementedError

    def weights(self) -> list[torch.Tensor]:
        """The parameters' values."""
        return [param.detach() for param in self.params]


class TorchArm(StepArm):
    """torch.optim.AdamW(fused=True) over tensors, or over one flat one; clipping is torch's own."""

    def __init__(self, problem: Problem, *, flat: bool, clipped: bool) -> None:
        self.clipped = clipped
        values = problem.values(0, problem.precision.param)
        self.params = [nn.Parameter(value) for value in values]
        shapes = [torch.Size([problem.numel])] if flat else [value.shape for value in values]
        self.low_precision = problem.precision.param != FP32
        if self.low_precision or flat:
            joined = torch.cat([value.reshape(-1) for value in values]).to(FP32)
            masters = joined.split([shape.numel() for shape in shapes])
            self.masters = [nn.Parameter(m.view(s).clone()) for m, s in zip(masters, shapes, strict=True)]
        else:
            self.masters = self.params
        self.grads = [torch.zeros(shape, dtype=problem.precision.grad) for shape in shapes]
        for master, grad in zip(self.masters, self.grads, strict=True):
            master.grad = grad if grad.dtype == FP32 else torch.zeros_like(master)
        self.flat = flat
        self.optimizer = torch.optim.AdamW(
            self.masters, lr=LR, betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY, fused=True
        )
        self.targets: list[torch.Tensor] = list(self.params)
        if flat and self.low_precision:
            whole = torch.cat([value.reshape(-1) for value in values])
            self.targets = [whole]
            for param, part in zip(self.params, whole.split([value.numel() for value in values]), strict=True):
                param.data = part.view(param.shape)
        if flat and not self.low_precision:
            parts = self.masters[0].data.split([value.numel() for value in values])
            for param, part in zip(self.params, parts, strict=True):
                param.data = part.view(param.shape)

    def prepare(self, grads: Sequence[torch.Tensor]) -> None:
        if self.flat:
            grads = [torch.cat([grad.reshape(-1) for grad in grads])]
        torch._foreach_copy_(self.grads, list(grads))

    @torch.no_grad()
    def step(self) -> None:
        masters, grads = [master.data for master in self.masters], [master.grad for master in self.masters]
        if self.grads[0].dtype != FP32:
            torch._foreach_copy_(grads, self.grads)
        if self.clipped:
            nn.utils.clip_grad_norm_(self.masters, CLIP)
        self.optimizer.step()
        if self.low_precision:
            torch._foreach_copy_([target.data for target in self.targets], masters)


class CoreArm(StepArm):
    """`optimizer.step()` of core.optimizer over a wrapped model, replicated or sharded, alone in its data group.

    Ranks of a run are tensor-parallel ones: they decide together, and each steps a shard of its own. A parameter gather
    would be communication, and is in the figures of `python -m benchmarks steps`.
    """

    def __init__(self, problem: Problem, *, strategy: Strategy, clipped: bool) -> None:
        from core.distributed import DistributedDataParallel, DistributedDataParallelConfig
        from core.optimizer import OptimizerConfig, get_megatron_optimizer

        precision = problem.precision
        model = nn.ParameterList(problem.values(0, precision.param))
        self.params = list(model)
        ddp_config = DistributedDataParallelConfig(
            data_parallel_sharding_strategy=strategy,
            grad_reduce_in_fp32=precision.grad == FP32,
        )
        self.ddp = DistributedDataParallel(None, ddp_config, model)
        config = OptimizerConfig(
            lr=LR,
            adam_beta1=BETAS[0],
            adam_beta2=BETAS[1],
            adam_eps=EPS,
            weight_decay=WEIGHT_DECAY,
            bf16=precision.param == BF16,
            clip_grad=CLIP if clipped else 0.0,
            **precision.options,
        )
        self.optimizer = get_megatron_optimizer(config, [self.ddp], no_weight_decay_cond=lambda name, param: False)

    def prepare(self, grads: Sequence[torch.Tensor]) -> None:
        from core.distributed import finalize_model_grads

        self.optimizer.zero_grad()
        torch.autograd.backward(self.params, list(grads))
        finalize_model_grads([self.ddp])

    def step(self) -> None:
        updated, _, _ = self.optimizer.step()
        if not updated:
            raise RuntimeError("the optimizer skipped a step of finite gradients")


@dataclass(frozen=True)
class StepArmSpec:
    """An arm by name. clipped arms are compared with clipped ones."""

    name: str
    clipped: bool
    make: Callable[[Problem], StepArm]


def _torch(name: str, *, flat: bool, clipped: bool) -> StepArmSpec:
    return StepArmSpec(name, clipped, lambda problem: TorchArm(problem, flat=flat, clipped=clipped))


def _core(name: str, *, strategy: Strategy, clipped: bool) -> StepArmSpec:
    return StepArmSpec(name, clipped, lambda problem: CoreArm(problem, strategy=strategy, clipped=clipped))


ARMS = (
    _torch("torch fused AdamW, a tensor a parameter", flat=False, clipped=False),
    _torch("torch fused AdamW, one flat tensor", flat=True, clipped=False),
    _core("core, replicated (no_shard)", strategy="no_shard", clipped=False),
    _core("core, shard (optim)", strategy="optim", clipped=False),
    _torch("torch, a tensor a parameter, clipped", flat=False, clipped=True),
    _core("core, replicated, clipped", strategy="no_shard", clipped=True),
    _core("core, shard, clipped", strategy="optim", clipped=True),
)


class WrongWeights(RuntimeError):
    """An arm does not compute what the others do."""


def check_weights(name: str, got: Sequence[torch.Tensor], want: Sequence[torch.Tensor], start: Sequence[torch.Tensor],
                  tolerance: float) -> None:  # fmt: skip
    """Raise WrongWeights unless `got` is within `tolerance` of `want`, of the way that `want` has gone from `start`."""
    gone = sum((w.double() - s.double()).square().sum().item() for w, s in zip(want, start, strict=True)) ** 0.5
    off = sum((g.double() - w.double()).square().sum().item() for g, w in zip(got, want, strict=True)) ** 0.5
    if not off <= tolerance * gone or gone == 0:
        raise WrongWeights(
            f"{name}: weights are {off / gone if gone else float('nan'):.2g} of their way off after the first steps, "
            f"{tolerance:g} is allowed; what it does is not the same AdamW step, and its time would mean nothing"
        )
