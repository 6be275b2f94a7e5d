"""The causal loss of logits that stay split: `model.loss_function`, from each rank's part of the vocabulary."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from core.hugging_face.plan import Plan, PlanError
from core.hugging_face.sequence import SequenceParallel
from core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
from core.tensor_parallel.mappings import group_size


class ParallelCausalLoss:
    """Transformers' ForCausalLMLoss of split logits: tokens predict their successors, -100 and num_items_in_batch.

    sequence: how the logits' sequence is cut too, if it is; labels are of the whole sequence in any case.
    """

    def __init__(
        self, group: dist.ProcessGroup | None, vocab_size: int, sequence: SequenceParallel | None = None
    ) -> None:
        self.group, self.vocab_size, self.sequence = group, vocab_size, sequence

    def __call__(
        self,
        logits: Tensor,
        labels: Tensor | None = None,
        vocab_size: int | None = None,
        num_items_in_batch: Tensor | float | None = None,
        ignore_index: int = -100,
        shift_labels: Tensor | None = None,
        **unused: Any,
    ) -> Tensor:
        """The mean over tokens that count, or their sum / num_items_in_batch. logits: [..., ceil(vocabulary / tp)]."""
        sequence = self.sequence
        if vocab_size not in (None, self.vocab_size):
            raise ValueError(f"vocab_size is {vocab_size}, and the output layer has {self.vocab_size} rows")
        if shift_labels is None:
            if labels is None:
                raise ValueError("the loss needs labels")
            shift_labels = F.pad(labels, (0, 1), value=ignore_index)[..., 1:]
        count = (shift_labels != ignore_index).sum() if num_items_in_batch is None else num_items_in_batch
        if sequence is not None:
            shift_labels = sequence.part(shift_labels, -1)
        counted = shift_labels != ignore_index
        target = shift_labels.masked_fill(~counted, 0)
        losses = vocab_parallel_cross_entropy(logits, target, tp_group=self.group, vocab_size=self.vocab_size)
        total = losses.masked_fill(~counted, 0.0).sum()
        total = total if sequence is None else sequence.total(total)
        return total / torch.as_tensor(count).to(total)

    def __deepcopy__(self, memo: dict[int, Any]) -> ParallelCausalLoss:
        return self  # it never changes, and its group cannot be copied


def use_parallel_loss(
    model: Any, plan: Plan, group: dist.ProcessGroup | None, sequence: SequenceParallel | None = None
) -> Plan:
    """Keep the logits split and give the model the loss of the parts; the plan without the gather of the logits."""
    head = model.get_output_embeddings()
    name = next((name for name, module in model.named_modules() if module is head), None)
    seam = plan.seams.get(name or "")
    split = seam is not None and seam.after == "gather"
    if not split and (sequence is None or head is None or group_size(group) > 1):
        raise PlanError(f"{plan.family}: parallel_output needs an output layer that the plan splits, and there is none")
    loss = getattr(model.loss_function, "__name__", str(model.loss_function))
    if loss != "ForCausalLMLoss":
        raise PlanError(
            f"{plan.family}: parallel_output knows the loss ForCausalLMLoss, and the model has {loss}; leave the "
            "logits whole (parallel_output=False)"
        )
    rows = plan.splits[f"{name}.weight"].length if split else head.weight.shape[0]
    model.loss_function = ParallelCausalLoss(group, rows, sequence)
    return (
        plan
        if seam is None
        else dataclasses.replace(plan, seams={**plan.seams, seam.module: dataclasses.replace(seam, after="")})
    )
