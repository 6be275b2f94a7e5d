"""The loss of a model's labels: one mean over those of the whole batch, in any layout.

A model gives the mean over the labels of its own rows. Each is weighted by its labels, so that the mean over
microbatches and data ranks, which the engine takes, is the mean over the labels of all of them.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from core.distributed.finalize_model_grads import divisor_of_tokens
from core.groups.process_groups import ProcessGroups
from core.watch.waiting import waiting

NUM_ITEMS = "num_items_in_batch"  # transformers' name for the labels that count in the whole batch


def add_over_replicas(numbers: Tensor, groups: ProcessGroups) -> Tensor:
    """Numbers added over the data ranks, in place. Collective over 'dp'."""
    if groups.size("dp") > 1:
        group = groups.require("dp")
        with waiting("the loss and the labels of the whole batch", group):
            dist.all_reduce(numbers, group=group)
    return numbers


def share_of(loss: Tensor, count: Tensor, total: Tensor, parts: int) -> Tensor:
    """A part's loss, so weighted that the mean over `parts` parts is the mean over `total` labels. 0 without labels.

    loss: the mean over `count` labels. In fp32 at least.
    """
    dtype = torch.promote_types(loss.dtype, torch.float32)
    count, total = count.to(loss.device), total.to(loss.device)
    kept = torch.where(count > 0, loss, torch.zeros_like(loss))
    return kept.to(dtype) * (count * parts / divisor_of_tokens(total)).to(dtype)


def given_items(inputs: Any, device: torch.device) -> Tensor | None:
    """The number of labels of the whole batch that the caller gives; None where none is given."""
    given = inputs.get(NUM_ITEMS)
    return None if given is None else torch.as_tensor(given, dtype=torch.float64, device=device).reshape(())


def loss_of_whole_batch(loss: Tensor, count: Tensor, total: Tensor | None, groups: ProcessGroups) -> Tensor:
    """The whole batch's loss, equal on all data ranks, whose gradient here is that of this rank's part.

    loss: the mean over this rank's `count` labels. total: the labels that all ranks' sums are divided by; None for
    those of all ranks. Gradients are averaged over data ranks. Collective over 'dp'.
    """
    count = count.to(loss.device)
    kept = torch.where(count > 0, loss.detach(), torch.zeros_like(loss)).double()
    sums = add_over_replicas(torch.stack([kept * count, count]), groups)
    total = sums[1] if total is None else total
    share = share_of(loss, count, total, groups.size("dp"))
    value = (sums[0] / divisor_of_tokens(total)).to(share.dtype)
    return (share - share.detach()) + value
