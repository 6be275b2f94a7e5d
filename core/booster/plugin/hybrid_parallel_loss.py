"""Loss over a model's labels: one mean over the labels of the entire batch, in any layout.

A model returns the mean over the labels of its own rows. Each such mean is weighted by its number of labels. The
engine's mean over microbatches and data ranks is then the mean over all labels.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from core.distributed.finalize_model_grads import divisor_of_tokens
from core.groups.process_groups import ProcessGroups
from core.watch.waiting import waiting

NUM_ITEMS = "num_items_in_batch"  # transformers' name for the number of labels in the entire batch


def add_over_replicas(numbers: Tensor, groups: ProcessGroups) -> Tensor:
    """Sum numbers over the data ranks, in place. Collective over 'dp'.

    Args:
        numbers: The tensor to sum.
        groups: Process groups of the model.
    """
    if groups.size("dp") > 1:
        group = groups.require("dp")
        with waiting("the loss and the labels of the whole batch", group):
            dist.all_reduce(numbers, group=group)
    return numbers


def share_of(loss: Tensor, count: Tensor, total: Tensor, parts: int) -> Tensor:
    """Weight a part's loss so that the mean over all parts is the mean over all labels. 0 without labels.

    Args:
        loss: Mean over the part's labels.
        count: Number of the part's labels.
        total: Number of all labels.
        parts: Number of parts.

    Returns:
        The weighted loss, in fp32 or higher precision.
    """
    dtype = torch.promote_types(loss.dtype, torch.float32)
    count, total = count.to(loss.device), total.to(loss.device)
    kept = torch.where(count > 0, loss, torch.zeros_like(loss))
    return kept.to(dtype) * (count * parts / divisor_of_tokens(total)).to(dtype)


def given_items(inputs: Any, device: torch.device) -> Tensor | None:
    """Return the number of labels of the entire batch that the caller passed as num_items_in_batch.

    Args:
        inputs: Arguments of the model.
        device: Device of the result.

    Returns:
        A scalar in fp64; None if it was not passed.
    """
    given = inputs.get(NUM_ITEMS)
    return None if given is None else torch.as_tensor(given, dtype=torch.float64, device=device).reshape(())


def loss_of_whole_batch(loss: Tensor, count: Tensor, total: Tensor | None, groups: ProcessGroups) -> Tensor:
    """Return the entire batch's loss, equal on all data ranks, with the gradient of this rank's part.

    The gradient fits an average over data ranks. Collective over 'dp'.

    Args:
        loss: Mean over this rank's labels.
        count: Number of this rank's labels.
        total: Number of labels that the sum over all ranks is divided by; None for the labels of all ranks.
        groups: Process groups of the model.
    """
    count = count.to(loss.device)
    kept = torch.where(count > 0, loss.detach(), torch.zeros_like(loss)).double()
    sums = add_over_replicas(torch.stack([kept * count, count]), groups)
    total = sums[1] if total is None else total
    share = share_of(loss, count, total, groups.size("dp"))
    value = (sums[0] / divisor_of_tokens(total)).to(share.dtype)
    return (share - share.detach()) + value
