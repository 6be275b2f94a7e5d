"""Logits that an output layer only computes when they are used, so that the loss can compute them in chunks.

Full logits are often the largest tensor of a step. A ``DeferringHead`` replaces the output layer's ``forward``; in a
forward with labels it returns DeferredLogits. These record the elementwise functions that the model applies to its
logits: a scale, a soft cap, a cast. The loss then computes them over chunks of tokens. Every other use computes all
logits first, by the layer's own forward, so a user who reads logits gets them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from core.distributed.buffer.grad_attribute import attributes_alone
from core.groups.process_groups import ProcessGroups
from core.hugging_face.read.plan import PlanError, without_adapters
from core.hugging_face.run.seams import SeamForward
from core.tensor_parallel.chunked_loss import chunk_of, chunked_cross_entropy
from core.tensor_parallel.mappings import group_size

Step = Callable[[Tensor], Tensor]  # elementwise function that a model applies to its logits

# Attributes and functions that need no values.
ATTRIBUTES = frozenset({"shape", "dtype", "device", "ndim", "layout", "is_cuda", "is_meta", "itemsize"})
ABOUT = frozenset({"size", "dim", "numel", "__len__", "is_floating_point", "element_size"})
# Functions that are recorded, provided that all other arguments are numbers, dtypes, or devices.
ELEMENTWISE = frozenset(
    {
        *("mul", "multiply", "div", "divide", "true_divide", "tanh", "neg", "contiguous", "detach"),
        *("__mul__", "__rmul__", "__truediv__", "__neg__", "float", "double", "half", "bfloat16", "to"),
    }
)


class DeferringHead:
    """Forward of an output layer that defers its logits until they are used.

    Attributes:
        expects_loss: True in a forward of the model with labels, or inside ``loss_follows``.
        asked_by: Name of the function that first needed all logits in that forward, if any.
        loss_follows: True if the caller computes the loss after each forward.
    """

    def __init__(self, module: nn.Linear, logits_chunk: int | None, family: str) -> None:
        self.module, self.logits_chunk, self.family = module, logits_chunk, family
        self.inner: Any = vars(module).get("forward")  # the seam's forward, if any
        self.expects_loss = self.loss_follows = False
        self.asked_by = ""

    def __call__(self, hidden: Tensor) -> Tensor:
        """Return logits [..., columns], deferred if a loss is expected and they are large."""
        if self.expects_loss and not torch.compiler.is_compiling():
            shape = self.shape_of(hidden)
            chunk = chunk_of(self.logits_chunk, shape[:-1].numel(), shape[-1])
            if chunk:
                return DeferredLogits.of(self, hidden, shape, chunk)
        return self.whole(hidden)

    def whole(self, hidden: Tensor) -> Tensor:
        """Compute all logits by the layer's own forward."""
        forward = self.inner or type(self.module).forward.__get__(self.module)
        logits: Tensor = forward(hidden)
        return logits

    def prepared(self, hidden: Tensor) -> Tensor:
        """Return the hidden states that are multiplied by the weight."""
        return self.inner.prepared(hidden) if isinstance(self.inner, SeamForward) else hidden

    def shape_of(self, hidden: Tensor) -> torch.Size:
        sizes = list(hidden.shape)
        if isinstance(self.inner, SeamForward) and self.inner.seam.before == "gather sequence":
            sizes[-2] *= group_size(self.inner.group)
        return torch.Size((*sizes[:-1], self.module.weight.shape[0]))

    def __deepcopy__(self, memo: dict[int, Any]) -> DeferringHead:
        copied = memo[id(self)] = copy.copy(self)
        copied.module = memo.get(id(self.module), self.module)
        copied.inner = copy.deepcopy(self.inner, memo)
        return copied


class DeferredLogits(Tensor):
    """Placeholder for logits that are computed only if they are read.

    Attributes:
        hidden: Input of the output layer.
        tokens_at_once: Number of tokens per chunk.
        steps: Elementwise functions applied so far.
        refusal: Creates the error to raise on a read. Set if the logits are split over the vocabulary.
        records: True if gradients were enabled in the forward.
        value: All logits, once computed.
        source: The loss that knows how the logits are split; an argument of ``refusal``.
    """

    head: DeferringHead
    hidden: Tensor
    tokens_at_once: int
    steps: tuple[Step, ...]
    refusal: Callable[[str], Exception] | None
    records: bool  # True if gradients were enabled in the forward
    value: Tensor | None
    source: Any  # for the refusal: the loss that knows how logits are split

    @classmethod
    def of(cls, head: DeferringHead, hidden: Tensor, shape: torch.Size, chunk: int) -> DeferredLogits:
        kind = hidden.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype
        # NaN makes C++ functions that bypass __torch_function__ visible.
        empty = torch.full((), torch.nan, dtype=dtype, device=hidden.device).expand(shape)
        made = empty.as_subclass(cls)
        made.head, made.hidden, made.tokens_at_once, made.steps = head, hidden, chunk, ()
        made.refusal, made.records, made.value = None, torch.is_grad_enabled(), None
        return made

    def after(self, step: Step) -> DeferredLogits:
        """Return these logits with one more elementwise function recorded."""
        with attributes_alone():
            changed: Any = step(self.as_subclass(Tensor)[(0,) * self.dim()]).expand(self.shape).as_subclass(type(self))
        vars(changed).update(vars(self))
        changed.steps = (*self.steps, step)
        return changed

    def computed(self, asked_by: str = "") -> Tensor:
        """Compute all logits [..., columns] of this rank, once. Collective if parameters are sharded."""
        if self.value is None:
            self.head.asked_by = self.head.asked_by or asked_by
            with torch.set_grad_enabled(self.records), self._reading():
                value = self.head.whole(self.hidden)
                for step in self.steps:
                    value = step(value)
            self.value = value
        return self.value

    @torch.no_grad()
    def chunks(self) -> Iterator[Tensor]:
        """Yield this rank's logits [tokens, columns] in chunks of tokens. Collective if parameters are sharded."""
        module = self.head.module
        with self._reading():
            for part in self.head.prepared(self.hidden).flatten(0, -2).split(self.tokens_at_once):
                logits = F.linear(part, module.weight, module.bias)
                for step in self.steps:
                    logits = step(logits)
                yield logits

    def losses(self, target: Tensor, vocab_size: int, multiple: int, groups: ProcessGroups) -> Tensor:
        """Compute the loss of each token, [...], over chunks of tokens.

        ``target`` has token ids [...], as in ``chunked_cross_entropy``. ``vocab_size`` is the number of rows of the
        unsplit output layer, and each rank's columns are padded to a multiple of ``multiple``.
        """
        module, steps = self.head.module, self.steps

        def transform(logits: Tensor) -> Tensor:
            for step in steps:
                logits = step(logits)
            return logits

        with self._reading():
            return chunked_cross_entropy(
                *(self.head.prepared(self.hidden), module.weight, target, self.tokens_at_once),
                bias=module.bias,
                transform=transform if steps else None,
                vocab_size=vocab_size,
                multiple=multiple,
                pg_collection=groups,
            )

    def _reading(self) -> AbstractContextManager[None]:
        """Make the layer's parameters readable after the model's forward. Collective if they are sharded."""
        owner = getattr(type(self.head.module.weight), "owner", lambda: None)()
        found: AbstractContextManager[None] = nullcontext() if owner is None else owner.reading()
        return found

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return copy.deepcopy(self.computed("copy.deepcopy"), memo)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", str(func))
        attribute = getattr(getattr(func, "__self__", None), "__name__", "") if name == "__get__" else ""
        if name in ABOUT or attribute in ATTRIBUTES:
            with attributes_alone():
                return func(*args, **kwargs)
        first = args[0] if args else None
        if isinstance(first, DeferredLogits) and first.value is None and name in ELEMENTWISE:
            others, kinds = (*args[1:], *kwargs.values()), (int, float, bool, torch.dtype, torch.device)
            if all(isinstance(one, kinds) for one in others):
                return first.after(lambda value: func(value, *args[1:], **kwargs))
        return func(*_computed(args, name), **_computed(kwargs, name))


def _computed(value: Any, asked_by: str) -> Any:
    """Compute all deferred logits in nested lists, tuples, and dictionaries."""
    if isinstance(value, DeferredLogits):
        if value.refusal is not None:
            raise value.refusal(asked_by)
        return value.computed(asked_by)
    if isinstance(value, dict):
        return {key: _computed(item, asked_by) for key, item in value.items()}
    return type(value)(_computed(item, asked_by) for item in value) if type(value) in (list, tuple) else value


def head_of(model: Any) -> Any:
    """Return the output layer, or ``None`` for a model or stage without one."""
    try:
        return model.get_output_embeddings()
    except AttributeError:  # the family looks inside a head that is on another stage
        return None


def deferring_head(model: Any) -> DeferringHead | None:
    """Return the deferring forward of a model's output layer, with or without adapters, or ``None``."""
    head = head_of(without_adapters(model))
    if hasattr(head, "modules_to_save"):  # peft's wrapper of a head that is trained and saved next to adapters
        head = head.modules_to_save[head.active_adapters[0]] if head.active_adapters else head.original_module
    forward = vars(head).get("forward") if isinstance(head, nn.Module) else None
    return forward if isinstance(forward, DeferringHead) else None


def expect_loss(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *, names: tuple[str, ...]) -> None:
    """Defer logits in this forward if there are labels. A forward pre-hook of the model."""
    head = deferring_head(model)
    if head is not None:
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        head.expects_loss = head.loss_follows or any(given.get(name) is not None for name in ("labels", "shift_labels"))
        head.asked_by = ""


@contextmanager
def loss_follows(model: Any) -> Iterator[None]:
    """Defer logits inside the context also in forwards without labels.

    The caller passes them to the model's loss_function.
    """
    head = deferring_head(model)
    if head is not None:
        head.loss_follows = True
    try:
        yield
    finally:
        if head is not None:
            head.loss_follows = False


def end_forward(model: nn.Module, *_: Any) -> None:
    """Stop expecting a loss. A forward hook of the model.

    Raises PlanError if chunks were requested but the model has used all logits at once.
    """
    head = deferring_head(model)
    if head is None or not head.expects_loss:
        return
    head.expects_loss = False
    if head.asked_by and head.logits_chunk:
        raise PlanError(
            f"{head.family}: logits_chunk={head.logits_chunk}, and its forward with labels computes {head.asked_by!r} "
            "of all logits before its loss, or instead of it; leave logits_chunk out"
        )
