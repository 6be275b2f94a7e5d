"""Reference: loss and gradients of the whole batch on one process that splits nothing."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from core.verify.gathered import cast, load_whole_weights, on_tensors, whole_weights
from core.verify.job import Job, split_loss

ModelFn = Callable[[], nn.Module]


@dataclass(frozen=True)
class Reference:
    """What is right. grads: whole, on the CPU, on every rank. tokens: None where the loss is a mean."""

    loss: float
    tokens: int | None
    grads: dict[str, Tensor]


def compute_reference(job: Job, reference_fn: ModelFn, dtype: torch.dtype) -> Reference:
    """Loss and gradients of the whole batch in one piece on rank 0, sent to all. Collective over the world."""
    weights = whole_weights(job.ddp)
    reference: Reference | None = None
    answer: list[Any] = [None]
    if dist.get_rank() == 0:
        try:
            reference = _on_one_process(job, reference_fn, weights, dtype)
            answer[0] = reference.loss, reference.tokens, {name: g.shape for name, g in reference.grads.items()}
        except Exception as error:  # told to the other ranks, which would wait for ever
            answer[0] = error
    dist.broadcast_object_list(answer, src=0)
    if isinstance(answer[0], Exception):
        raise answer[0]
    loss, tokens, shapes = answer[0]
    grads = {}
    for name, shape in shapes.items():
        grad = torch.empty(shape, dtype=dtype) if reference is None else reference.grads[name]
        grad = grad.to(job.ddp.plan.device).contiguous()
        dist.broadcast(grad, src=0)
        grads[name] = grad.cpu()
    return Reference(loss, tokens, grads)


def _on_one_process(job: Job, reference_fn: ModelFn, weights: dict[str, Tensor], dtype: torch.dtype) -> Reference:
    model = reference_fn()
    if model is job.ddp.module:  # a model_fn that gives the same module every time
        model = copy.deepcopy(model)
    model = model.to(dtype)
    load_whole_weights(model, weights)
    for param in model.parameters():
        param.grad = None
    batch = on_tensors(lambda t: cast(t, dtype, t.device), job.batch)
    loss, tokens = split_loss(job.loss_fn(model, batch), job.per_token)
    loss = loss / max(1, tokens) if job.per_token else loss
    loss.backward()
    grads = {
        name: (torch.zeros_like(param) if param.grad is None else param.grad).cpu()
        for name, param in model.named_parameters()
        if name in job.ddp.contracts
    }
    return Reference(float(loss.detach()), tokens if job.per_token else None, grads)
