"""The forward of one stage of a transformers model: the model's own, which begins and ends in the middle.

All arguments of the model are given to every stage. Where a layer is called that lies on a later stage, the forward is
left by an exception, with what that layer takes; this stage's first layer takes what was received instead.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from core.hugging_face.plan import PlanError
from core.hugging_face.streams import HIDDEN, Slot, Streams
from core.pipeline_parallel.layout import PipelineLayout, StageSpec

GIVEN = "encoder_outputs"  # the argument by which a forward is given what the encoder has made
PIXELS = "pixel_values"  # the beginning of names of arguments that hold images or films
NOT_RECEIVED = "a stage takes what the stage before it sent as received="


@dataclass(frozen=True)
class ModelCut:
    """Places at which a model can be cut into stages.

    lists: the names of its lists of layers, the encoder's first where it has one. counts: their lengths. entry, exit:
    modules with parameters that are used before the layers of a list, and after the last layer of all. between: those
    behind the encoder's layers. around: parameters of modules that hold a list itself; every stage has a copy. tied:
    the names of parameters that are one and lie on the first stage and on the last.
    """

    family: str
    lists: tuple[str, ...]
    counts: tuple[int, ...]
    entry: frozenset[str]
    between: frozenset[str]
    exit: frozenset[str]
    around: frozenset[str]
    tied: frozenset[str]

    @property
    def count(self) -> int:
        """The number of layers."""
        return sum(self.counts)

    @property
    def layers(self) -> list[str]:
        """The names of the layers, in order."""
        return [f"{name}.{i}" for name, n in zip(self.lists, self.counts, strict=True) for i in range(n)]


def refuse_router_loss(family: str, model: Any, asked: bool | None = None) -> None:
    """PlanError where the routers' loss is asked for: by an argument of a forward, or else by the config."""
    if getattr(model.config.get_text_config(), "output_router_logits", False) if asked is None else asked:
        raise PlanError(
            f"{family}: output_router_logits adds a loss of all layers' routers, and a stage has its own layers only; "
            "set output_router_logits=False in the config"
        )


class _Leave(Exception):
    """A layer that lies on a later stage was called: the forward of this stage ends, with what that layer takes."""


class StageForward:
    """A model's own forward on one stage: takes `received=`, and gives what the next one receives, or the output.

    It stands in the model's attribute `forward`. part: which layers lie here; absent: modules that lie on other stages.
    All other arguments are the model's, the same on every stage: token ids give the shape, masks and positions.
    """

    def __init__(self, model: Any, cut: ModelCut, layout: PipelineLayout, part: StageSpec, streams: Streams) -> None:
        self.model, self.cut, self.layout, self.part, self.streams = model, cut, layout, part, streams
        self.first, self.behind = part.layer_numbers[0], part.layer_numbers[-1] + 1
        self.takes_cache = "use_cache" in inspect.signature(type(model).forward).parameters
        self.received: tuple[Tensor, ...] = ()
        self.entered = 0  # the number of lists of which a layer has run
        self.absent: list[str] = []

    def __call__(self, *args: Any, received: Tensor | tuple[Tensor, ...] | None = None, **kwargs: Any) -> Any:
        """Hidden states [batch, sequence, hidden], or what `streams` says; on the last stage what the model gives."""
        if (received is None) != self.part.pre_process:
            what = "and got none" if received is None else "and this is the first stage, which has none before it"
            raise ValueError(f"{self.cut.family}, stage {self.part.index}: {NOT_RECEIVED}, {what}")
        refuse_router_loss(self.cut.family, self.model, kwargs.get("output_router_logits"))
        if self.takes_cache:
            kwargs.setdefault("use_cache", False)  # caches of keys and values are for generation
        if not self.part.pre_process:  # what has become of images is in the hidden states
            kwargs = {name: value for name, value in kwargs.items() if not name.startswith(PIXELS)}
        self.received = () if received is None else (received,) if isinstance(received, Tensor) else tuple(received)
        self.entered = int(0 < self.streams.decoder <= self.first)
        try:
            if self.entered:
                kwargs[GIVEN] = self._as_given(self.received[0])
            sent, output = self._run(args, kwargs)
            if sent and self.behind < self.streams.decoder:
                sent = (*sent, *self._of_decoder(sent[0], args, kwargs))
            elif sent and self.first < self.behind == self.streams.decoder and not self.part.pre_process:
                sent = (sent[0], *self._of_decoder(sent[0], args, kwargs))
        finally:
            self.received = ()
        if sent:
            # A tensor that is only passed on needs a graph of its own, and what is sent lies in one piece.
            sent = tuple((value.view_as(value) if value.is_leaf else value).contiguous() for value in sent)
            return sent[0] if len(sent) == 1 else sent
        if not self.part.post_process:
            raise PlanError(f"{self.cut.family}: stage {self.part.index} came to the end without its next layer")
        return output

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Tensor, ...], Any]:
        """The model's own forward: what it leaves with, or nothing and what it gives."""
        try:
            return (), type(self.model).forward(self.model, *args, **kwargs)
        except _Leave as leave:
            return leave.args[0], None

    def _of_decoder(self, like: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, ...]:
        """Arguments of the decoder's first layer, on a stage that ends in the encoder: made on the first stage."""
        if not self.part.pre_process:
            return self.received[len(self.streams.calls[self.first].slots) :]
        self.entered = 1
        sent, _ = self._run(args, {**kwargs, GIVEN: self._as_given(torch.full_like(like, torch.nan))})
        return sent[1:]

    def _as_given(self, memory: Tensor) -> Any:
        """The encoder's output, as a forward takes it."""
        from transformers.modeling_outputs import BaseModelOutput

        return BaseModelOutput(last_hidden_state=memory)

    def enter(self, number: int, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Before this stage's first layer of a list: what was received takes the place of its arguments."""
        self.entered = 1 + int(0 < self.streams.decoder <= number)
        if not self.received:
            return None
        values = self.received[len(self.streams.calls[self.first].slots) :]  # of a decoder that begins here
        if number == self.first:
            values = self.received[int(self.entered > 1) :]
        for slot, value in zip(self._slots_of(number, args), values, strict=False):
            if isinstance(slot, int):
                args = (*args[:slot], value, *args[slot + 1 :])
            else:
                kwargs = {**kwargs, slot: value}
        return args, kwargs

    def _slots_of(self, number: int, args: tuple[Any, ...]) -> Sequence[Slot]:
        return self.streams.calls[number].slots or ((0,) if args else (HIDDEN,))

    def absent_layer(self, number: int, *args: Any, **kwargs: Any) -> Any:
        """The forward of a layer that lies on another stage."""
        call = self.streams.calls[number]
        slots: dict[Slot, Any] = {**dict(enumerate(args)), **kwargs}  # type: ignore[dict-item]
        if number < self.first:
            # Some models take the first of what a layer gives; it is not read.
            hidden = slots.get(self._slots_of(number, args)[0])
            return hidden if call.results == 0 else (hidden, *[None] * ((call.results or 1) - 1))
        names = list(self._slots_of(number, args))
        if 0 < self.streams.decoder <= number:
            names = [self.streams.memory_slot, *names]
        values = tuple(slots.get(name) for name in names)
        if not all(isinstance(value, Tensor) for value in values):
            raise PlanError(
                f"{self.cut.family}: its layers are called without {HIDDEN}, so what a stage would send is unknown"
            )
        raise _Leave(values)

    def absent_entry(self, name: str, *args: Any, **kwargs: Any) -> Tensor:
        """The forward of a module of the first stage, on another one: nothing that a layer of this stage may use."""
        form = self.streams.absent.get((name, self.entered))
        if not self.received or form is None:
            raise PlanError(
                f"{self.cut.family}: stage {self.part.index} uses a module of the first stage outside its layers, so "
                "this model cannot be cut into stages"
            )
        shape = form.shape(self.streams.sizes_at(self.first, self.received))
        return self.received[0].new_full(shape, torch.nan)

    def absent_exit(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """The forward of a module of the last stage, on another one: nothing should call it."""
        raise PlanError(
            f"{self.cut.family}: {name!r} is used before the last layer, and was taken to belong to the last stage; "
            "load the whole model by from_pretrained, whose forward shows where it belongs"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> StageForward:
        copied = memo[id(self)] = copy.copy(self)
        copied.model = memo.get(id(self.model), self.model)
        return copied
