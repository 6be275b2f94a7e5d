"""Number of labels that a transformers head takes the mean over: the weight of its loss among batches."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from core.hugging_face.plan import without_adapters

IGNORED = -100
CAUSAL = ("ForCausalLM", "ForConditionalGeneration")  # transformers' names of losses of shifted labels
KINDS = (
    *CAUSAL,
    *("ForMaskedLM", "ForTokenClassification", "ForSequenceClassification"),
    *("ForImageClassification", "ForVideoClassification", "ForAudioClassification"),
)
UNNAMED = ("LMHeadModel", "EncoderDecoderModel")  # endings of classes that name no loss


def count_labels(model: Any, inputs: Mapping[str, Any]) -> Tensor | None:
    """The number of labels that count in the loss of a forward, 0-dim fp64; None where the loss is no mean over them.

    model: of transformers, with adapters or without. inputs: the forward's arguments. Labels of -100 do not count, nor
    does the first of a row where the head predicts successors: what Trainer counts as num_items_in_batch.
    """
    labels = inputs.get("labels")
    head = without_adapters(model)
    if not isinstance(labels, Tensor) or not _is_mean_over_labels(head):
        return None
    shifted = inputs.get("shift_labels")
    if isinstance(shifted, Tensor):
        labels = shifted
    elif labels.dim() > 1 and _predicts_successors(head):
        labels = labels[..., 1:]
    return (labels != IGNORED).sum(dtype=torch.float64)


def _is_mean_over_labels(head: Any) -> bool:
    return getattr(head, "loss_type", "") in KINDS or type(head).__name__.endswith(UNNAMED)


def _predicts_successors(head: Any) -> bool:
    """True if labels are shifted: by the causal loss, where it is called; an encoder's decoder is given shifted ids."""
    is_causal = getattr(head, "loss_type", None) in (None, *CAUSAL)
    return is_causal and not head.config.is_encoder_decoder and calls_loss_function(type(head).forward)


@functools.cache
def calls_loss_function(forward: Callable[..., Any]) -> bool:
    """True if a class's forward takes its loss from `loss_function`; others compute one of the labels as given."""
    return "loss_function" in getattr(getattr(inspect.unwrap(forward), "__code__", None), "co_names", ())
