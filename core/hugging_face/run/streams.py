"""Tensors that pass between the stages of a transformers model, and their shapes.

A causal model sends hidden states. An encoder-decoder has two lists of layers and sends more: the encoder's output,
which every decoder layer takes, and tensors that the first layer of a list computes for the later ones (T5's position
biases). One forward of the full model on a small example shows which layer arguments depend on learned values. Further
forwards with other sizes show how their shapes depend on the sizes of the batch.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

Slot = int | str  # position or name of an argument
HIDDEN = "hidden_states"


@dataclass(frozen=True)
class Sizes:
    """Sizes of a microbatch: rows, length of the encoder's (or a causal model's) tokens, and of the decoder's."""

    rows: int
    source: int
    target: int = 0


@dataclass(frozen=True)
class Form:
    """Shape of a tensor as a function of the batch's sizes.

    Attributes:
        dims: For each dimension, a number and the size that is added to it ('' for none).
        is_split: True if a dimension counts this tensor-parallel rank's heads.
    """

    dims: tuple[tuple[int, str], ...]
    dtype: torch.dtype
    is_split: bool = False

    def shape(self, sizes: Sizes) -> list[int]:
        return [number + (getattr(sizes, name) if name else 0) for number, name in self.dims]

    def meta(self, sizes: Sizes) -> Tensor:
        return torch.empty(self.shape(sizes), dtype=self.dtype, device="meta")

    def over(self, heads: Collection[int], tp: int) -> Form:
        """Return the form on one of ``tp`` ranks: a head count in the second of four dimensions is divided by ``tp``.

        ``heads`` are the layers' head counts, which may differ. The form is unchanged if no dimension counts heads.
        """
        if tp == 1 or len(self.dims) != 4 or self.dims[1] not in {(number, "") for number in heads}:
            return self
        first, (number, _), *rest = self.dims
        return replace(self, dims=(first, (number // tp, ""), *rest), is_split=True)


@dataclass(frozen=True)
class Call:
    """Call of a layer: the arguments that depend on learned values, hidden states first, and their forms.

    ``results`` is the length of the tuple that the layer returns, 0 for a tensor, or ``None`` if unknown.
    """

    slots: tuple[Slot, ...]
    forms: tuple[Form, ...]
    results: int | None = None


@dataclass(frozen=True)
class Streams:
    """Tensors that stages send, and forms of the outputs of absent modules.

    Attributes:
        calls: Calls of the layers, over all lists.
        memory: Form of the encoder's output; None without an encoder.
        memory_slot: Argument by which decoder layers take the encoder's output.
        absent: (module used before a list, number of the list) -> form of its output.
        decoder: Number of the decoder's first layer; 0 for a model with one list.
    """

    calls: tuple[Call, ...]
    memory: Form | None
    memory_slot: Slot
    absent: Mapping[tuple[str, int], Form]
    decoder: int = 0

    def sent_to(self, layer: int) -> list[Form]:
        """Return the forms that a stage receives if it starts with this layer."""
        own = [*self.calls[layer].forms]
        if layer < self.decoder:
            return [*own, *self.calls[self.decoder].forms]
        return own if self.memory is None else [self.memory, *own]

    def sizes_at(self, layer: int, received: Sequence[Tensor]) -> Sizes:
        """Return the batch's sizes from the tensors received by the stage that starts with this layer."""
        rows, source = received[0].shape[:2]
        if self.memory is None:
            return Sizes(rows, source)
        return Sizes(rows, source, received[len(self.calls[layer].slots) if layer < self.decoder else 1].shape[1])

    def over(self, heads: Collection[int], tp: int) -> Streams:
        calls = [replace(call, forms=tuple(form.over(heads, tp) for form in call.forms)) for call in self.calls]
        return replace(self, calls=tuple(calls))


def sizes_of(arguments: Mapping[str, Any], main: str) -> Sizes:
    """Return the sizes of a forward's arguments, by the length of the model's main input.

    Audio and pixels have one fixed length from the model's config, so their source is 0.
    """
    ids = arguments[main]
    given = (arguments.get(name) for name in ("decoder_input_ids", "decoder_inputs_embeds", "labels"))
    targets = [value.shape[1] for value in given if isinstance(value, Tensor) and value.dim() > 1]
    source = ids.shape[1] if main == "input_ids" else 0
    return Sizes(ids.shape[0], source, targets[0] if targets else source)
