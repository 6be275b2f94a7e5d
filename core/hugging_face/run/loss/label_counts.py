"""Label counts of transformers heads, over which they average their loss, to weight that loss among batches."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from core.hugging_face.read.plan import without_adapters

IGNORED = -100
CAUSAL = ("ForCausalLM", "ForConditionalGeneration")  # transformers' losses of shifted labels
KINDS = (
    *CAUSAL,
    *("ForMaskedLM", "ForTokenClassification", "ForSequenceClassification"),
    *("ForImageClassification", "ForVideoClassification", "ForAudioClassification"),
)
UNNAMED = ("LMHeadModel", "EncoderDecoderModel")  # suffixes of classes without a loss type


def count_labels(model: Any, inputs: Mapping[str, Any]) -> Tensor | None:
    """Count the labels that contribute to the loss of a forward, like Trainer's num_items_in_batch.

    Labels of -100 do not count, nor does the first label of a row if the head predicts the next token. Return the count
    as a 0-dim fp64 tensor, or ``None`` if the loss is not a mean over labels.
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
    """Return ``True`` if the causal loss shifts the labels. The decoder of an encoder-decoder already gets shifted
    ids.
    """
    is_causal = getattr(head, "loss_type", None) in (None, *CAUSAL)
    return is_causal and not head.config.is_encoder_decoder and calls_loss_function(type(head).forward)


@functools.cache
def calls_loss_function(forward: Callable[..., Any]) -> bool:
    """Return ``True`` if a forward gets its loss from ``loss_function``. Other classes use unshifted labels."""
    return "loss_function" in getattr(getattr(inspect.unwrap(forward), "__code__", None), "co_names", ())
