"""Reference: loss and gradients of the global batch on one process that splits nothing."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from core import agree
from core.moe import auxiliary_loss_scale
from core.verify.gathered import BIAS, cast, load_whole_weights, on_tensors, piece_of
from core.verify.job import Job, LossFn, split_loss

ModelFn = Callable[[], nn.Module]


@dataclass(frozen=True)
class Expected:
    """What is right after one step. Whole and on the CPU, on every rank. tokens: None where the loss is a mean.

    biases: those of the routers, as this step leaves them.
    """

    loss: float
    tokens: float | None
    grads: dict[str, Tensor]
    biases: dict[str, Tensor] = field(default_factory=dict)


class Reference:
    """A model on rank 0 that splits nothing, with the layout's weights. Every method is collective over the world.

    Where the model has experts, their auxiliary loss is of one microbatch of one data rank (or of all data ranks), so
    the batch is run in the same pieces as in the layout; else in one.
    """

    def __init__(self, job: Job, reference_fn: ModelFn, dtype: torch.dtype, loss_fn: LossFn) -> None:
        self.config: Any = job.model.chunks[0].config
        self.device = job.model.device
        self.dtype = dtype
        self.loss_fn = loss_fn
        self.per_token = job.per_token
        self.data_ranks = job.groups.size("dp" if job.groups.dp is not None else "dp_cp")
        self.microbatches = job.microbatches
        weights = job.model.whole_weights()
        self.model: nn.Module | None = None
        self.biases: dict[str, Tensor] = {}  # before the last step, by router
        self._on_rank_zero(lambda: self._build(reference_fn, job, weights))

    @property
    def moves(self) -> bool:
        """Does a step change what the next one computes, although no weight is updated?"""
        return bool(getattr(self.config, "moe_router_enable_expert_bias", False))

    @property
    def has_auxiliary(self) -> bool:
        """Are there losses that are not in the loss?"""
        config = self.config
        has = getattr(config, "moe_aux_loss_coeff", 0.0) or getattr(config, "moe_z_loss_coeff", None)
        return bool(has) and getattr(config, "num_moe_experts", None) is not None

    def step(self, batch: Any) -> Expected:
        """Loss and gradients of the global batch."""
        return self._shared(lambda model: self._compute(model, batch, 1.0))

    def without_auxiliary(self, batch: Any) -> Expected:
        """The last step once more, without what auxiliary losses add to the gradients."""
        return self._shared(lambda model: self._compute(model, batch, 0.0))

    def gather(self, values: Callable[[nn.Module], dict[str, Tensor]]) -> dict[str, Tensor]:
        """Tensors of rank 0's model, on every rank."""
        return self._shared(lambda model: Expected(0.0, None, values(model))).grads

    def _build(self, reference_fn: ModelFn, job: Job, weights: dict[str, Tensor]) -> None:
        model = reference_fn()
        if any(model is chunk.module for chunk in job.model.chunks):  # a model_fn that gives the same one every time
            model = copy.deepcopy(model)
        self.model = model.to(self.dtype)
        load_whole_weights(self.model, weights)
        for param in self.model.parameters():
            param.grad = None

    def pieces(self, batch: Any) -> list[Any]:
        """What the whole batch is cut into; each piece goes through the model by itself."""
        if getattr(self.config, "num_moe_experts", None) is None:
            return [batch]
        count = self.data_ranks * self.microbatches
        parts = [piece_of(batch, count, number) for number in range(count)]
        if getattr(self.config, "moe_router_load_balancing_type", "") != "global_aux_loss":
            return parts
        return [_joined(parts[number :: self.microbatches]) for number in range(self.microbatches)]

    def _compute(self, model: nn.Module, batch: Any, auxiliary: float) -> Expected:
        batch = on_tensors(lambda t: cast(t, self.dtype, t.device), batch)
        routers = {n: m for n, m in model.named_modules() if getattr(m, BIAS, None) is not None}
        if auxiliary:
            self.biases = {name: getattr(router, BIAS).clone() for name, router in routers.items()}
        for name, router in routers.items():
            getattr(router, BIAS).copy_(self.biases[name])
        total, tokens = 0.0, 0.0
        pieces = self.pieces(batch)
        for param in model.parameters():
            param.grad = None
        with auxiliary_loss_scale(auxiliary):
            for piece in pieces:
                loss, count = split_loss(self.loss_fn(model, piece), self.per_token)
                loss.backward()
                total += float(loss.detach())
                tokens += count
        divisor = (tokens or 1.0) if self.per_token else len(pieces)
        grads = {
            name: (torch.zeros_like(param) if param.grad is None else param.grad / divisor).cpu()
            for name, param in model.named_parameters()
            if param.requires_grad
        }
        biases = {f"{name}.{BIAS}": self._moved_bias(router) for name, router in routers.items()}
        return Expected(total / divisor, tokens if self.per_token else None, grads, biases)

    def _moved_bias(self, router: Any) -> Tensor:
        """Up for experts with fewer tokens than the mean, down for those with more; one by one, as one does by hand."""
        bias, counts = getattr(router, BIAS), router.local_tokens_per_expert
        loads = [int(count) for count in counts]
        for expert, load in enumerate(loads):
            excess = load * len(loads) - sum(loads)
            bias[expert] += self.config.moe_router_bias_update_rate * ((excess < 0) - (excess > 0))
        counts.zero_()
        moved: Tensor = bias.detach().cpu().clone()
        return moved

    def _on_rank_zero(self, act: Callable[[], Any]) -> Any:
        """Run there alone; what it raises is raised on every rank, which would wait for ever otherwise."""
        result, failure = None, None
        if dist.get_rank() == 0:
            try:
                result = act()
            except Exception as error:
                failure = error
        failure = agree.gather(failure, None, "the reference")[0]
        if failure is not None:
            raise failure
        return result

    def _shared(self, compute: Callable[[nn.Module], Expected]) -> Expected:
        def on_model() -> Expected:
            assert self.model is not None, "rank 0 has built it"
            return compute(self.model)

        mine: Expected | None = self._on_rank_zero(on_model)
        answer: Any = None
        if mine is not None:
            shapes = {name: (grad.shape, grad.dtype) for name, grad in mine.grads.items()}
            answer = mine.loss, mine.tokens, shapes, mine.biases
        loss, tokens, shapes, biases = agree.gather(answer, None, "the reference")[0]
        grads = {}
        for name, (shape, dtype) in shapes.items():
            grad = torch.empty(shape, dtype=dtype) if mine is None else mine.grads[name]
            grad = grad.to(self.device).contiguous()
            dist.broadcast(grad, src=0)
            grads[name] = grad.cpu()
        return Expected(loss, tokens, grads, biases)


def _joined(parts: list[Any]) -> Any:
    """Parts of a batch as one, along the first dimension."""
    first = parts[0]
    if isinstance(first, Tensor):
        return torch.cat(parts)
    if isinstance(first, dict):
        return {key: _joined([part[key] for part in parts]) for key in first}
    if isinstance(first, (tuple, list)):
        return type(first)(_joined([part[i] for part in parts]) for i in range(len(first)))
    return first
