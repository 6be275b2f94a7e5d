"""Job: a wrapped model, its part of the global batch, and the steps that are run to look at their gradients."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from core.distributed import DistributedDataParallel, finalize_model_grads
from core.verify.gathered import on_tensors

LossFn = Callable[[nn.Module, Any], Any]  # (model, part of the batch) -> mean loss, or (summed loss, number of tokens)


@dataclass
class Job:
    """The wrapped model and its part of the batch."""

    ddp: DistributedDataParallel
    loss_fn: LossFn
    batch: Any
    microbatches: int
    per_token: bool

    def parts(self) -> list[Any]:
        """This data rank's microbatches."""
        groups = self.ddp.groups
        axis = "dp" if groups.dp is not None else "dp_cp"
        pieces = groups.size(axis) * self.microbatches
        first = groups.rank(axis) * self.microbatches
        return [
            on_tensors(functools.partial(_piece, pieces=pieces, number=number), self.batch)
            for number in range(first, first + self.microbatches)
        ]

    def backward(self, *, reduce: bool) -> tuple[float, int]:
        """All microbatches of a step: (this rank's loss, its number of tokens)."""
        total, tokens = 0.0, 0
        parts = self.parts()
        for number, part in enumerate(parts):
            last = reduce and number == len(parts) - 1
            with nullcontext() if last else self.ddp.no_sync():
                loss, count = split_loss(self.loss_fn(self.ddp, part), self.per_token)
                loss = loss if self.per_token else loss / self.microbatches
                loss.backward()
            total += float(loss.detach())
            tokens += count
        return total, tokens

    def step(self) -> float:
        """A whole step; the global loss. Collective."""
        self.ddp.zero_grad_buffer()
        loss, tokens = self.backward(reduce=True)
        if self.per_token:
            finalize_model_grads([self.ddp], num_tokens=torch.tensor(tokens, device=self.ddp.plan.device))
        else:
            finalize_model_grads([self.ddp])
        data = self.ddp.groups.require("dp_cp")
        sums = torch.tensor([loss, float(tokens)], dtype=torch.float64, device=self.ddp.plan.device)
        dist.all_reduce(sums, group=data)
        return float(sums[0] / (sums[1].clamp(min=1) if self.per_token else dist.get_world_size(data)))


def _piece(tensor: Tensor, pieces: int, number: int) -> Tensor:
    if tensor.dim() == 0 or tensor.shape[0] % pieces:
        raise ValueError(
            f"a tensor of the batch has shape {list(tensor.shape)}; its first dimension must divide into {pieces} = "
            "data-parallel ranks x microbatches equal parts"
        )
    length = tensor.shape[0] // pieces
    return tensor[number * length : (number + 1) * length]


def split_loss(result: Any, per_token: bool) -> tuple[Tensor, int]:
    """(loss, number of tokens) from what a loss_fn returned; refuses what does not fit the config."""
    if per_token != isinstance(result, tuple):
        raise ValueError(
            "calculate_per_token_loss is set, so loss_fn must return (summed loss, number of tokens)"
            if per_token
            else "loss_fn returned a tuple, which needs calculate_per_token_loss=True; return the mean loss instead"
        )
    return (result[0], int(result[1])) if per_token else (result, 0)
