"""Tensors that pass between the stages of a transformers model, and their shapes.

A causal model sends hidden states. An encoder-decoder has two lists of layers and sends more: the encoder's output,
which every decoder layer takes, and tensors that the first layer of a list computes for the later ones (T5's position
biases). One forward of the full model on a small example shows which layer arguments depend on learned values. Further
forwards with other sizes show how their shapes depend on the sizes of the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from core.hugging_face.read.plan import PlanError

Slot = int | str  # position or name of an argument
HIDDEN = "hidden_states"
OF_DECODER = ("decoder_", "labels")  # prefixes of arguments as long as the decoder's tokens


@dataclass(frozen=True)
class Sizes:
    """Sizes of a microbatch.

    Attributes:
        rows: Number of rows.
        source: Length of the encoder's tokens, or of a causal model's.
        target: Length of the decoder's tokens.
    """

    rows: int
    source: int
    target: int = 0


@dataclass(frozen=True)
class Form:
    """Shape of a tensor as a function of the batch's sizes.

    Attributes:
        dims: For each dimension, a number and the size that is added to it ('' for none).
        dtype: The tensor's dtype.
        is_split: True if a dimension counts this tensor-parallel rank's heads.
    """

    dims: tuple[tuple[int, str], ...]
    dtype: torch.dtype
    is_split: bool = False

    def shape(self, sizes: Sizes) -> list[int]:
        """Return the shape for these sizes."""
        return [number + (getattr(sizes, name) if name else 0) for number, name in self.dims]

    def meta(self, sizes: Sizes) -> Tensor:
        """Return a tensor of this shape on the meta device."""
        return torch.empty(self.shape(sizes), dtype=self.dtype, device="meta")

    def over(self, heads: Collection[int], tp: int) -> Form:
        """Return the form on one of `tp` ranks: a head count in the second of four dimensions is divided by `tp`.

        Args:
            heads: Numbers of heads of the layers, which may differ.
            tp: Tensor-parallel size.

        Returns:
            The form of the local tensor; unchanged if no dimension counts heads.
        """
        if tp == 1 or len(self.dims) != 4 or self.dims[1] not in {(number, "") for number in heads}:
            return self
        first, (number, _), *rest = self.dims
        return replace(self, dims=(first, (number // tp, ""), *rest), is_split=True)


@dataclass(frozen=True)
class Call:
    """One call of a layer.

    Attributes:
        slots: Arguments that depend on learned values, hidden states first.
        forms: Forms of these arguments.
        results: Length of the tuple that the layer returns; 0 for a tensor; None if unknown.
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
        """Return the streams on one of `tp` ranks."""
        calls = [replace(call, forms=tuple(form.over(heads, tp) for form in call.forms)) for call in self.calls]
        return replace(self, calls=tuple(calls))


def of_hidden_states(model: Any, count: int, widths: Mapping[str, int | None]) -> Streams:
    """Return the streams of a model with one list, whose layers take hidden states [batch, sequence, hidden].

    Args:
        model: Transformers model.
        count: Number of layers.
        widths: Module used before the layers -> width of its output; None for the width of hidden states.

    Returns:
        The streams.
    """
    hidden = model.config.get_text_config().hidden_size
    forms = {
        (name, 0): Form(((0, "rows"), (0, "source"), (width or hidden, "")), model.dtype)
        for name, width in widths.items()
    }
    form = Form(((0, "rows"), (0, "source"), (hidden, "")), model.dtype)
    return Streams((Call((), (form,)),) * count, None, HIDDEN, forms)


@dataclass
class Seen:
    """Record of one forward.

    Attributes:
        called: Layers and modules in call order: (name, arguments by slot that depend on learned values).
        given: (name, number of the call) -> result.
        memory: Output of the encoder, if any.
    """

    called: list[tuple[str, dict[Slot, Tensor]]]
    given: dict[tuple[str, int], Any]
    memory: Tensor | None = None


@contextmanager
def watched(model: Any, layers: Sequence[str], others: Sequence[str]) -> Iterator[Seen]:
    """Record a forward of the model that runs inside the context.

    Args:
        model: Transformers model.
        layers: Names of layers; their arguments are recorded.
        others: Names of further modules; their calls and results are recorded.

    Yields:
        The record.
    """
    seen = Seen([], {})
    known = {*layers}

    def before(name: str) -> Callable[..., None]:
        def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            slots: dict[Slot, Any] = {**dict(enumerate(args)), **kwargs}  # type: ignore[dict-item]
            taken = {slot: v for slot, v in slots.items() if isinstance(v, Tensor) and v.requires_grad}
            seen.called.append((name, taken if name in known else {}))

        return note

    def after(name: str) -> Callable[..., None]:
        def note(module: nn.Module, args: Any, output: Any) -> None:
            seen.given[name, sum(1 for called, _ in seen.called if called == name) - 1] = output

        return note

    def remember(module: nn.Module, args: Any, output: Any) -> None:
        seen.memory = output if isinstance(output, Tensor) else output[0]

    handles = [model.get_encoder().register_forward_hook(remember)] if model.config.is_encoder_decoder else []
    for name in (*layers, *others):
        module = model.get_submodule(name)
        handles.append(module.register_forward_pre_hook(before(name), with_kwargs=True))
        handles.append(module.register_forward_hook(after(name)))
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def all_learning(model: nn.Module) -> Iterator[None]:
    """Record gradients for all parameters inside the context, frozen ones too."""
    frozen = [p for p in model.parameters() if not p.requires_grad and p.is_floating_point()]
    try:
        for parameter in frozen:
            parameter.requires_grad_(True)
        with torch.enable_grad(), torch.random.fork_rng():
            yield
    finally:
        for parameter in frozen:
            parameter.requires_grad_(False)


def streams_of(
    model: Any, family: str, lists: Sequence[Sequence[str]], others: Sequence[str], example: Mapping[str, Any]
) -> tuple[Streams, Seen, Any]:
    """Find the streams of an encoder-decoder by running the example at several sizes.

    Args:
        model: Full encoder-decoder.
        family: Name of the model in errors.
        lists: Names of the encoder's layers and of the decoder's.
        others: Modules with parameters outside the layers.
        example: Keyword arguments of one small forward.

    Returns:
        The streams, the record of the example's forward, and its output.

    Raises:
        PlanError: If the layers of a list do not run one after another, or the decoder does not take the encoder's
            output unchanged.
    """
    layers = [name for names in lists for name in names]
    runs: list[tuple[Sizes, Seen]] = []
    output: Any = None
    with all_learning(model):
        for fewer in ("", "rows", "source", "target"):
            arguments = _with_fewer(example, fewer)
            if fewer and arguments is None:
                continue
            with watched(model, layers, others) as seen:
                given = model(**(arguments or example))
            output = given if output is None else output
            runs.append((sizes_of(arguments or example, model.main_input_name), seen))
    seen = runs[0][1]
    calls = {name: taken for name, taken in seen.called if taken}
    in_order = [name for name, taken in seen.called if taken]
    if in_order != layers:
        raise PlanError(f"{family}: its layers do not run once each, the encoder's first and the decoder's after them")
    first = len(lists[0])
    slots = {name: [s for s, value in taken.items() if value is not seen.memory] for name, taken in calls.items()}
    memories = {slot for name in lists[1] for slot, value in calls[name].items() if value is seen.memory}
    if len(memories) != 1 or seen.memory is None:
        raise PlanError(f"{family}: the layers of its decoder do not take the encoder's output as the encoder gives it")
    forms = _forms_of(
        [
            (
                sizes,
                {
                    **{(n, s): dict(r.called)[n][s] for n in layers for s in slots[n]},
                    **{key: value for key, value in r.given.items() if isinstance(value, Tensor)},
                    ("", ""): r.memory,
                },
            )
            for sizes, r in runs
        ],
        family,
    )
    order = [name for name, _ in seen.called]
    start = order.index(lists[1][0])
    absent: dict[tuple[str, int], Form] = {}
    for name, time in seen.given:
        places = [place for place, called in enumerate(order) if called == name]
        if name not in layers and (name, time) in forms and places[time] < start:
            absent[name, int(places[time] > order.index(lists[0][0]))] = forms[name, time]
    made = tuple(
        Call(
            tuple(slots[name]),
            tuple(forms[name, slot] for slot in slots[name]),
            len(seen.given[name, 0]) if isinstance(seen.given[name, 0], tuple) else 0,
        )
        for name in layers
    )
    streams = Streams(made, forms["", ""], next(iter(memories)), absent, first)
    return streams, seen, output


def sizes_of(arguments: Mapping[str, Any], main: str) -> Sizes:
    """Return the sizes of a forward's arguments.

    Audio and pixels have one fixed length from the model's config, so their source is 0.

    Args:
        arguments: Keyword arguments of the forward.
        main: Name of the model's main input.

    Returns:
        The sizes of the microbatch.
    """
    ids = arguments[main]
    given = (arguments.get(name) for name in ("decoder_input_ids", "decoder_inputs_embeds", "labels"))
    targets = [value.shape[1] for value in given if isinstance(value, Tensor) and value.dim() > 1]
    source = ids.shape[1] if main == "input_ids" else 0
    return Sizes(ids.shape[0], source, targets[0] if targets else source)


def _with_fewer(example: Mapping[str, Any], what: str) -> dict[str, Any] | None:
    """Return the example with one more row, or one token less for encoder or decoder; None if impossible."""
    tensors = {name: value for name, value in example.items() if isinstance(value, Tensor)}
    if not what:
        return dict(example)
    if what == "rows":
        return {**example, **{name: torch.cat([value, value[:1]]) for name, value in tensors.items()}}
    theirs = {n: v for n, v in tensors.items() if n.startswith(OF_DECODER) == (what == "target") and v.dim() == 2}
    return {**example, **{name: value[:, :-1] for name, value in theirs.items()}} if theirs else None


def _forms_of(runs: Sequence[tuple[Sizes, Mapping[Any, Any]]], family: str) -> dict[Any, Form]:
    """Derive each tensor's form from runs that each change one size of the first run."""
    sizes, tensors = runs[0]
    forms: dict[Any, Form] = {}
    for key, tensor in tensors.items():
        dims = [(size, "") for size in tensor.shape]
        for other, theirs in runs[1:]:
            name = next(n for n in ("rows", "source", "target") if getattr(other, n) != getattr(sizes, n))
            step = getattr(other, name) - getattr(sizes, name)
            for place, size in enumerate(theirs[key].shape):
                if size == tensor.shape[place]:
                    continue
                if size - tensor.shape[place] != step:
                    raise PlanError(f"{family}: the shape {list(tensor.shape)} of {key!r} does not follow its input's")
                dims[place] = (tensor.shape[place] - getattr(sizes, name), name)
        forms[key] = Form(tuple(dims), tensor.dtype)
    return forms
