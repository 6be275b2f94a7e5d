"""Forwards of the full model that show the order of its modules, and the tensors between its layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from core.hugging_face.cut.places import Side, find_cut, lists_of_layers
from core.hugging_face.read.plan import PlanError
from core.hugging_face.read.quiet import in_mode, run_quietly
from core.hugging_face.run.stage_forward import ModelCut
from core.hugging_face.run.streams import HIDDEN, Call, Form, Sizes, Slot, Streams, sizes_of

OF_DECODER = ("decoder_", "labels")  # prefixes of arguments as long as the decoder's tokens


@dataclass(frozen=True)
class Watched:
    """Findings of a forward of the full model: the side on which each module was used, and tensors between layers."""

    sides: Mapping[str, Side]
    streams: Streams


def watch_order(model: Any, example: Mapping[str, Any]) -> tuple[Watched, Any]:
    """Run the full model on an example to learn the order of its modules and the tensors between its layers.

    Return the findings, and the model's output. Raises PlanError if the example does not reach a vision tower, or the
    layers pass more than a stage can send.
    """
    cut = find_cut(model)
    outside, mode = sorted(cut.entry | cut.between | cut.exit), in_mode(model, training="labels" in example)
    if len(cut.lists) > 1:
        names = cut.layers
        lists = names[: cut.counts[0]], names[cut.counts[0] :]
        with mode:
            streams, seen, output = _streams_of(model, cut.family, lists, outside, example)
        return Watched(_sides_of(model, cut, seen), streams), output
    towers, first = {*lists_of_layers(model)} - {*cut.lists}, cut.layers[0]
    with _recorded(model, cut.layers, outside) as seen:
        if towers:
            with mode, _all_learning(model):
                output = model(**example)
        else:
            output = run_quietly(model, example)
    order = [name for name, _ in seen.called]
    for tower in towers:
        if not any(name.startswith(f"{tower}.") for name in order):
            raise PlanError(
                f"{cut.family}: the example does not reach {tower!r}, so this module cannot be assigned to a stage; "
                "pass the plugin or split_stages an example= with images, equal on all ranks"
            )
    more = next((name for name, taken in seen.called if len(taken) > 1), None)
    if more is not None:
        raise PlanError(
            f"{cut.family}: {more!r} takes more than hidden states, and a stage sends no features of images"
        )
    before = order[: order.index(first)] if first in order else order
    sides: dict[str, Side] = {name: "entry" if name in before else "exit" for name in order if name not in cut.layers}
    return Watched(sides, hidden_streams(model, find_cut(model, sides))), output


def _sides_of(model: Any, cut: ModelCut, seen: _Seen) -> dict[str, Side]:
    """Return the sides on which an encoder-decoder uses its modules.

    Modules after the encoder's layers are stored with the encoder's last layer.
    """
    order = [name for name, _ in seen.called]
    decoder = order.index(cut.layers[cut.counts[0]])
    encoder = next(name for name, module in model.named_modules() if module is model.get_encoder())
    sides: dict[str, Side] = {}
    for name in dict.fromkeys(order):
        is_behind = order.index(name) > order.index(cut.layers[0])
        if order.index(name) > decoder:
            sides[name] = "exit"
        else:
            sides[name] = "between" if is_behind and name.startswith(encoder + ".") else "entry"
    return sides


def hidden_streams(model: Any, cut: ModelCut) -> Streams:
    """Return the streams of a model with one list, whose layers only take hidden states [batch, sequence, hidden]."""
    hidden = model.config.get_text_config().hidden_size

    def form(width: int | None) -> Form:
        return Form(((0, "rows"), (0, "source"), (width or hidden, "")), model.dtype)

    modules = {name: model.get_submodule(name) for name in cut.entry}
    absent = {
        (name, 0): form(getattr(module, "embedding_dim", getattr(module, "out_features", None)))
        for name, module in modules.items()
    }
    return Streams((Call((), (form(None),)),) * cut.count, None, HIDDEN, absent)


@dataclass
class _Seen:
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
def _recorded(model: Any, layers: Sequence[str], others: Sequence[str]) -> Iterator[_Seen]:
    """Record a forward that runs inside the context: arguments of layers, and calls and results of other modules."""
    seen = _Seen([], {})
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
def _all_learning(model: nn.Module) -> Iterator[None]:
    """Record gradients for all parameters inside the context, including frozen ones."""
    frozen = [p for p in model.parameters() if not p.requires_grad and p.is_floating_point()]
    try:
        for parameter in frozen:
            parameter.requires_grad_(True)
        with torch.enable_grad(), torch.random.fork_rng():
            yield
    finally:
        for parameter in frozen:
            parameter.requires_grad_(False)


def _streams_of(
    model: Any, family: str, lists: Sequence[Sequence[str]], others: Sequence[str], example: Mapping[str, Any]
) -> tuple[Streams, _Seen, Any]:
    """Find the streams of an encoder-decoder by running the example at several sizes.

    ``lists`` are the names of the encoder's layers and of the decoder's, ``others`` the modules with parameters outside
    of them. Return the streams, the record of the example's forward, and its output. Raises PlanError if the layers of
    a list do not run one after another, or the decoder does not take the encoder's output unchanged.
    """
    layers = [name for names in lists for name in names]
    runs: list[tuple[Sizes, _Seen]] = []
    output: Any = None
    with _all_learning(model):
        for fewer in ("", "rows", "source", "target"):
            arguments = _with_fewer(example, fewer)
            if fewer and arguments is None:
                continue
            with _recorded(model, layers, others) as seen:
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


def _with_fewer(example: Mapping[str, Any], what: str) -> dict[str, Any] | None:
    """Return the example with one more row, or one token less for encoder or decoder, or ``None`` if impossible."""
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
