"""Loss over a model's labels: one mean over the labels of the entire batch, in any layout.

A model returns the mean over its own rows' labels. Each such mean is weighted by its number of labels, so that the mean
over microbatches and data ranks is the mean over all labels.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from contextlib import nullcontext
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from core.distributed.finalize_model_grads import divisor_of_tokens
from core.groups.process_groups import ProcessGroups
from core.hugging_face.run.loss.label_counts import count_labels
from core.interface import ModelWrapper
from core.watch.waiting import waiting

NUM_ITEMS = "num_items_in_batch"  # transformers' name for the number of labels in the entire batch


class LabelMeanModel(ModelWrapper):
    """Boosted model whose loss from ``labels`` is the mean over the labels of all data ranks.

    Ranks exchange their label counts in each forward that records gradients, so they must run equally many.
    """

    data_groups: Sequence[dist.ProcessGroup] = ()  # groups that gradients are averaged over, one after another
    losses_are_local = False  # True: with num_items_in_batch the loss is over this rank's rows, as under torch's DDP

    @property
    def takes_mean_over_labels(self) -> bool:
        """True if the loss that a forward computes from labels is the mean over all data ranks' labels."""
        return True

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's forward, and replace this rank's loss by the mean over all data ranks' labels."""
        count = total = None
        is_local = self.losses_are_local and kwargs.get(NUM_ITEMS) is not None
        if self.takes_mean_over_labels and torch.is_grad_enabled() and not is_local:
            names = self._positional if args else ()
            count = count_labels(self.unwrap(), {**dict(zip(names, args, strict=False)), **kwargs})
        if count is not None:
            total = items_in_batch(kwargs, count.device)
            kwargs.pop(NUM_ITEMS, None)
        outputs = self.run_module(*args, **kwargs)
        return outputs if count is None else self._with_loss_of_batch(outputs, count, total)

    def run_module(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's forward with this rank's loss."""
        return self.module(*args, **kwargs)

    @cached_property
    def _positional(self) -> list[str]:
        """Return the names of the forward's positional arguments."""
        return list(inspect.signature(type(self.unwrap()).forward).parameters)[1:]

    def _with_loss_of_batch(self, output: Any, count: Tensor, total: Tensor | None) -> Any:
        """Replace the loss of this rank's rows in a model's output, if present. Collective over data ranks."""
        if isinstance(output, tuple):
            loss = loss_of_full_batch(output[0], count, total, self.data_groups) if output[0].dim() == 0 else output[0]
            return (loss, *output[1:])
        if output.get("loss") is None:
            return output
        output["loss"] = loss_of_full_batch(output["loss"], count, total, self.data_groups)
        return output


def replicas_of(groups: ProcessGroups) -> list[dist.ProcessGroup]:
    """Return the groups over which the engine averages a model's gradients."""
    return [groups.require("dp")] if groups.size("dp") > 1 else []


def add_over_replicas(numbers: Tensor, groups: Sequence[dist.ProcessGroup]) -> Tensor:
    """Sum a tensor in place over the data ranks, which are the product of ``groups``. Collective over the groups."""
    for group in groups:
        compiles = torch.compiler.is_compiling()  # a compiler cannot trace the clock of a wait
        with nullcontext() if compiles else waiting("the loss and the labels of the whole batch", group):
            dist.all_reduce(numbers, group=group)
    return numbers


def share_of(loss: Tensor, count: Tensor, total: Tensor, parts: int) -> Tensor:
    """Weight a part's mean loss so that the mean over all parts is the mean over all labels.

    ``count`` is the part's number of labels, and ``total`` that of all parts. Without labels the result is 0. It has
    fp32 or higher precision.
    """
    dtype = torch.promote_types(loss.dtype, torch.float32)
    count, total = count.to(loss.device), total.to(loss.device)
    kept = torch.where(count > 0, loss, torch.zeros_like(loss))
    return kept.to(dtype) * (count * parts / divisor_of_tokens(total)).to(dtype)


def items_in_batch(inputs: Any, device: torch.device) -> Tensor | None:
    """Return num_items_in_batch, if the caller passed it: the batch's number of labels, as an fp64 scalar."""
    given = inputs.get(NUM_ITEMS)
    return None if given is None else torch.as_tensor(given, dtype=torch.float64, device=device).reshape(())


def loss_of_full_batch(
    loss: Tensor, count: Tensor, total: Tensor | None, groups: Sequence[dist.ProcessGroup]
) -> Tensor:
    """Return the entire batch's loss, the same on all data ranks, with the gradient of this rank's part.

    The gradient is scaled for an average over data ranks. ``count`` is this rank's number of labels, and the sum over
    all ranks is divided by ``total``, or by the labels of all ranks if it is ``None``. Collective over the groups.
    """
    count = count.to(loss.device)
    kept = torch.where(count > 0, loss.detach(), torch.zeros_like(loss)).double()
    sums = add_over_replicas(torch.stack([kept * count, count]), groups)
    total = sums[1] if total is None else total
    share = share_of(loss, count, total, math.prod(group.size() for group in groups))
    value = (sums[0] / divisor_of_tokens(total)).to(share.dtype)
    return (share - share.detach()) + value
