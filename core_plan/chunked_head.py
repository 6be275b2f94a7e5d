"""ChunkedHead: the chunked loss of ``use_chunked_loss`` in a planned step of a Hugging Face model.

Deferred logits and tensors without values are both tensor subclasses that cannot be combined. Here the output layer
therefore returns its input, and the loss is called with it.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from core.hugging_face.read.plan import without_adapters
from core.hugging_face.run.loss.chunked_loss import why_not_in_chunks
from core.hugging_face.run.loss.deferred_logits import DeferringHead
from core.hugging_face.run.loss.parallel_loss import output_layer
from core.tensor_parallel.chunked_loss import chunk_of, chunked_cross_entropy
from core_plan.planned_groups import PlannedGroups


class ChunkedHead:
    """The output layer of a model, whose output layer and loss it replaces.

    ``chunk`` is the number of tokens of a chunk in the last forward, or 0 if the layer returned logits.
    """

    def __init__(self, model: Any, logits_chunk: int | None, groups: PlannedGroups, multiple: int = 1) -> None:
        base = without_adapters(model)
        self.chunk = 0
        self.logits_chunk, self.groups, self.multiple = logits_chunk, groups, multiple
        if logits_chunk == 0 or why_not_in_chunks(base) is not None:
            return
        self.layer = output_layer(base)[1]
        self.inner = DeferringHead(self.layer, logits_chunk, base.config.model_type)
        self.layer.forward = self
        own, self.vocab_size = base.loss_function, base.config.get_text_config().vocab_size

        def loss_function(logits: Tensor, labels: Tensor, *given: Any, **more: Any) -> Tensor:
            found: Tensor = self.loss(logits, labels) if self.chunk else own(logits, labels, *given, **more)
            return found

        base.loss_function = loss_function

    def __call__(self, hidden: Tensor) -> Tensor:
        """Return logits, or the layer's input if the loss is computed in chunks."""
        shape = self.inner.shape_of(hidden)
        self.chunk = chunk_of(self.logits_chunk, shape[:-1].numel(), shape[-1])
        return self.inner.prepared(hidden) if self.chunk else self.inner.whole(hidden)

    def loss(self, hidden: Tensor, labels: Tensor) -> Tensor:
        """Return the sum of the losses of this rank's tokens, from the output of ``__call__`` and all labels."""
        target = F.pad(labels, (0, 1))[..., 1 : hidden.shape[-2] + 1]
        losses = chunked_cross_entropy(
            *(hidden, self.layer.weight, target, self.chunk),
            bias=self.layer.bias,
            vocab_size=self.vocab_size,
            multiple=self.multiple,
            pg_collection=self.groups,
        )
        return losses.sum()
