"""Forward of one pipeline stage of a transformers model.

The model's own forward runs on every stage with all of the model's arguments, but starts and ends in the middle. When
it calls a layer of a later stage, an exception leaves the forward with that layer's inputs. The first layer of this
stage takes the received tensors instead of its own inputs.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from core.hugging_face.read.plan import PlanError
from core.hugging_face.run.streams import HIDDEN, Slot, Streams
from core.pipeline_parallel.layout import PipelineLayout, StageSpec

GIVEN = "encoder_outputs"  # the argument that passes the encoder's output to a forward
PIXELS = "pixel_values"  # prefix of arguments that hold images or videos
NOT_RECEIVED = "a stage takes what the stage before it sent as received="


@dataclass(frozen=True)
class ModelCut:
    """Places where a model can be cut into stages.

    Attributes:
        lists: Names of the lists of layers, the encoder's first, if any.
        counts: Lengths of these lists.
        entry: Modules with parameters that are used before the layers of a list.
        between: Modules with parameters that are used after the encoder's layers.
        exit: Modules with parameters that are used after the last layer.
        around: Parameters of modules that contain a list themselves; every stage has a copy.
        tied: Names of the parameters that the first and the last stage share.
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
        return sum(self.counts)

    @property
    def layers(self) -> list[str]:
        return [f"{name}.{i}" for name, n in zip(self.lists, self.counts, strict=True) for i in range(n)]


def refuse_router_loss(family: str, model: Any, requested: bool | None = None) -> None:
    """Raise PlanError if the routers' loss is requested, because a stage only has its own layers' routers.

    ``requested`` is the forward's argument ``output_router_logits``; ``None`` reads the config.
    """
    if getattr(model.config.get_text_config(), "output_router_logits", False) if requested is None else requested:
        raise PlanError(
            f"{family}: output_router_logits adds a loss of all layers' routers, and a stage has its own layers only; "
            "set output_router_logits=False in the config"
        )


class _Leave(Exception):
    """Exception that ends a stage's forward at the first layer of a later stage. It carries that layer's inputs."""


class StageForward:
    """Forward of one stage: takes ``received=``, and returns the tensors for the next stage or the model's output.

    It is set as the model's ``forward`` attribute. All other arguments are the model's own and the same on every stage:
    token ids give the shapes, masks, and positions.

    Attributes:
        absent: Names of the modules that are on other stages.
        received: Tensors from the previous stage, during a forward.
        entered: Number of lists of which a layer has run.
    """

    def __init__(self, model: Any, cut: ModelCut, layout: PipelineLayout, part: StageSpec, streams: Streams) -> None:
        self.model, self.cut, self.layout, self.part, self.streams = model, cut, layout, part, streams
        self.first, self.behind = part.layer_numbers[0], part.layer_numbers[-1] + 1
        self.takes_cache = "use_cache" in inspect.signature(type(model).forward).parameters
        self.received: tuple[Tensor, ...] = ()
        self.entered = 0  # number of lists of layers that have started to run
        self.absent: list[str] = []

    def __call__(self, *args: Any, received: Tensor | tuple[Tensor, ...] | None = None, **kwargs: Any) -> Any:
        """Run the stage, and return the tensors to send, or on the last stage the model's output.

        ``received`` are the tensors that the previous stage sent, and ``None`` only on the first stage. The tensors to
        send are hidden states [batch, sequence, hidden], or a tuple as ``streams`` describes. Raises PlanError if the
        forward ends without reaching the next stage's layer, or router logits are requested.
        """
        if (received is None) != self.part.pre_process:
            what = "and got none" if received is None else "and this is the first stage, which has none before it"
            raise ValueError(f"{self.cut.family}, stage {self.part.index}: {NOT_RECEIVED}, {what}")
        refuse_router_loss(self.cut.family, self.model, kwargs.get("output_router_logits"))
        if self.takes_cache:
            kwargs.setdefault("use_cache", False)  # caches of keys and values are for generation
        if not self.part.pre_process:  # the hidden states already contain the image features
            kwargs = {name: value for name, value in kwargs.items() if not name.startswith(PIXELS)}
        self.received = () if received is None else (received,) if isinstance(received, Tensor) else tuple(received)
        self.entered = int(0 < self.streams.decoder <= self.first)
        try:
            if self.entered:
                kwargs[GIVEN] = self._encoder_outputs(self.received[0])
            sent, output = self._run(args, kwargs)
            if sent and self.behind < self.streams.decoder:
                sent = (*sent, *self._of_decoder(sent[0], args, kwargs))
            elif sent and self.first < self.behind == self.streams.decoder and not self.part.pre_process:
                sent = (sent[0], *self._of_decoder(sent[0], args, kwargs))
        finally:
            self.received = ()
        if sent:
            # A tensor that is only passed on needs its own autograd node, and sent tensors must be contiguous.
            sent = tuple((value.view_as(value) if value.is_leaf else value).contiguous() for value in sent)
            return sent[0] if len(sent) == 1 else sent
        if not self.part.post_process:
            raise PlanError(f"{self.cut.family}: stage {self.part.index} came to the end without its next layer")
        return output

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Tensor, ...], Any]:
        """Run the model's own forward. Return the tensors to send and no output, or nothing to send and the output."""
        try:
            return (), type(self.model).forward(self.model, *args, **kwargs)
        except _Leave as leave:
            return leave.args[0], None

    def _of_decoder(self, like: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, ...]:
        """Return the inputs of the decoder's first layer on an encoder stage. The first stage computes them."""
        if not self.part.pre_process:
            return self.received[len(self.streams.calls[self.first].slots) :]
        self.entered = 1
        sent, _ = self._run(args, {**kwargs, GIVEN: self._encoder_outputs(torch.full_like(like, torch.nan))})
        return sent[1:]

    def _encoder_outputs(self, memory: Tensor) -> Any:
        """Wrap the encoder's output in the type that the model's forward expects."""
        from transformers.modeling_outputs import BaseModelOutput

        return BaseModelOutput(last_hidden_state=memory)

    def enter(self, number: int, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Replace the inputs of this stage's first layer of a list by the received tensors. A forward pre-hook."""
        self.entered = 1 + int(0 < self.streams.decoder <= number)
        if not self.received:
            return None
        values = self.received[len(self.streams.calls[self.first].slots) :]  # for a decoder that starts on this stage
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
        """Forward of a layer on another stage: earlier layers do nothing, and a later one ends the stage's forward."""
        call = self.streams.calls[number]
        slots: dict[Slot, Any] = {**dict(enumerate(args)), **kwargs}  # type: ignore[dict-item]
        if number < self.first:
            # Some models index a layer's result; the value is not used.
            hidden = slots.get(self._slots_of(number, args)[0])
            return hidden if call.results == 0 else (hidden, *[None] * ((call.results or 1) - 1))
        names = list(self._slots_of(number, args))
        if 0 < self.streams.decoder <= number:
            names = [self.streams.memory_slot, *names]
        values = tuple(slots.get(name) for name in names)
        if not all(isinstance(value, Tensor) for value in values):
            raise PlanError(
                f"{self.cut.family}: its layers are called without {HIDDEN}, so the tensor to send to the next stage "
                "is unknown"
            )
        raise _Leave(values)

    def absent_entry(self, name: str, *args: Any, **kwargs: Any) -> Tensor:
        """Forward of a first-stage module on another stage. It returns NaN, so that any use of the result is
        detected.
        """
        form = self.streams.absent.get((name, self.entered))
        if not self.received or form is None:
            raise PlanError(
                f"{self.cut.family}: stage {self.part.index} uses a module of the first stage outside its layers, so "
                "this model cannot be cut into stages"
            )
        shape = form.shape(self.streams.sizes_at(self.first, self.received))
        return self.received[0].new_full(shape, torch.nan)

    def absent_exit(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Forward of a last-stage module on another stage. Nothing should call it, so it raises PlanError."""
        raise PlanError(
            f"{self.cut.family}: {name!r} was assigned to the last stage but is used before the last layer; load the "
            "full model with from_pretrained, so that a forward can find its stage"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> StageForward:
        copied = memo[id(self)] = copy.copy(self)
        copied.model = memo.get(id(self.model), self.model)
        return copied
