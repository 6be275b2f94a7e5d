"""DeferredLogits: logits that an output layer has not computed yet, because the model's loss takes them in chunks.

`DeferringHead` stands in the output layer's `forward`. In a forward with labels it gives DeferredLogits, which remember
what the model does to its logits elementwise: a scale, a soft cap, another dtype. The loss computes them over chunks of
tokens. Every other use computes all of them first, with the layer's own forward, so a user who reads logits has them.
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
from core.hugging_face.plan import PlanError, without_adapters
from core.hugging_face.seams import SeamForward
from core.tensor_parallel.chunked_loss import chunk_of, chunked_cross_entropy
from core.tensor_parallel.mappings import group_size

Step = Callable[[Tensor], Tensor]  # what a model does to its logits, elementwise

# What is answered without logits ...
ATTRIBUTES = frozenset({"shape", "dtype", "device", "ndim", "layout", "is_cuda", "is_meta", "itemsize"})
ABOUT = frozenset({"size", "dim", "numel", "__len__", "is_floating_point", "element_size"})
# ... and what is remembered, where all other arguments are numbers or dtypes.
ELEMENTWISE = frozenset(
    {
        *("mul", "multiply", "div", "divide", "true_divide", "tanh", "neg", "contiguous", "detach"),
        *("__mul__", "__rmul__", "__truediv__", "__neg__", "float", "double", "half", "bfloat16", "to"),
    }
)


class DeferringHead:
    """The forward of an output layer whose logits wait for their use. logits_chunk: the option of `use_chunked_loss`.

    expects_loss: True in a forward of the model with labels, or inside `loss_follows`. asked_by: the function that had
    all logits computed in that forward, if any. loss_follows: True if a program computes the loss behind each forward.
    """

    def __init__(self, module: nn.Linear, logits_chunk: int | None, family: str) -> None:
        self.module, self.logits_chunk, self.family = module, logits_chunk, family
        self.inner: Any = vars(module).get("forward")  # of a seam
        self.expects_loss = self.loss_follows = False
        self.asked_by = ""

    def __call__(self, hidden: Tensor) -> Tensor:
        """Logits [..., columns], deferred if a loss is expected and they are large."""
        if self.expects_loss and not torch.compiler.is_compiling():
            shape = self.shape_of(hidden)
            chunk = chunk_of(self.logits_chunk, shape[:-1].numel(), shape[-1])
            if chunk:
                return DeferredLogits.of(self, hidden, shape, chunk)
        return self.whole(hidden)

    def whole(self, hidden: Tensor) -> Tensor:
        """All logits, as the layer computes them."""
        forward = self.inner or type(self.module).forward.__get__(self.module)
        logits: Tensor = forward(hidden)
        return logits

    def prepared(self, hidden: Tensor) -> Tensor:
        """The hidden states that meet the weight."""
        return self.inner.prepared(hidden) if isinstance(self.inner, SeamForward) else hidden

    def shape_of(self, hidden: Tensor) -> torch.Size:
        """The shape of the logits on this rank."""
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
    """Logits without values. refusal: what is raised if values are read, because they are a part of the vocabulary."""

    head: DeferringHead
    hidden: Tensor
    tokens_at_once: int
    steps: tuple[Step, ...]
    refusal: Callable[[str], Exception] | None
    records: bool  # gradients, at the time of the forward
    value: Tensor | None
    source: Any  # of the refusal: the loss that knows how logits are split

    @classmethod
    def of(cls, head: DeferringHead, hidden: Tensor, shape: torch.Size, chunk: int) -> DeferredLogits:
        """Of an output layer's input."""
        kind = hidden.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype
        # One NaN in all places: a function of C++ that does not ask would show it.
        empty = torch.full((), torch.nan, dtype=dtype, device=hidden.device).expand(shape)
        made = empty.as_subclass(cls)
        made.head, made.hidden, made.tokens_at_once, made.steps = head, hidden, chunk, ()
        made.refusal, made.records, made.value = None, torch.is_grad_enabled(), None
        return made

    def after(self, step: Step) -> DeferredLogits:
        """These logits with one more elementwise function applied."""
        with attributes_alone():
            changed: Any = step(self.as_subclass(Tensor)[(0,) * self.dim()]).expand(self.shape).as_subclass(type(self))
        vars(changed).update(vars(self))
        changed.steps = (*self.steps, step)
        return changed

    def computed(self, asked_by: str = "") -> Tensor:
        """All logits [..., columns] of this rank; computed once. Collective where parameters are sharded."""
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
        """Yield this rank's logits [tokens, columns], so many tokens at once. Collective if parameters are sharded."""
        module = self.head.module
        with self._reading():
            for part in self.head.prepared(self.hidden).flatten(0, -2).split(self.tokens_at_once):
                logits = F.linear(part, module.weight, module.bias)
                for step in self.steps:
                    logits = step(logits)
                yield logits

    def losses(self, target: Tensor, vocab_size: int, multiple: int, groups: ProcessGroups) -> Tensor:
        """The loss of each token, over chunks of tokens. target: [...], as for chunked_cross_entropy."""
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
        """Inside, the layer's parameters can be read after its model's forward too. Collective if they are sharded."""
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
    """The same with all logits in place of deferred ones, in nested lists, tuples and dictionaries."""
    if isinstance(value, DeferredLogits):
        if value.refusal is not None:
            raise value.refusal(asked_by)
        return value.computed(asked_by)
    if isinstance(value, dict):
        return {key: _computed(item, asked_by) for key, item in value.items()}
    return type(value)(_computed(item, asked_by) for item in value) if type(value) in (list, tuple) else value


def head_of(model: Any) -> Any:
    """The output layer; None for a model, or a stage of one, that has none."""
    try:
        return model.get_output_embeddings()
    except AttributeError:  # families look for it inside of a head that lies on another stage
        return None


def deferring_head(model: Any) -> DeferringHead | None:
    """The deferring forward of a model's output layer, with adapters or without; None where there is none."""
    head = head_of(without_adapters(model))
    forward = vars(head).get("forward") if isinstance(head, nn.Module) else None
    return forward if isinstance(forward, DeferringHead) else None


def expect_loss(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *, names: tuple[str, ...]) -> None:
    """Before a forward of the model, a hook: logits wait for the loss if there are labels. names: of arguments."""
    head = deferring_head(model)
    if head is not None:
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        head.expects_loss = head.loss_follows or any(given.get(name) is not None for name in ("labels", "shift_labels"))
        head.asked_by = ""


@contextmanager
def loss_follows(model: Any) -> Iterator[None]:
    """Inside, a forward without labels defers its logits too: the caller gives them to the model's loss_function."""
    head = deferring_head(model)
    if head is not None:
        head.loss_follows = True
    try:
        yield
    finally:
        if head is not None:
            head.loss_follows = False


def end_forward(model: nn.Module, *_: Any) -> None:
    """After a forward of the model, a hook. PlanError if chunks were asked for and the model has read all logits."""
    head = deferring_head(model)
    if head is None or not head.expects_loss:
        return
    head.expects_loss = False
    if head.asked_by and head.logits_chunk:
        raise PlanError(
            f"{head.family}: logits_chunk={head.logits_chunk}, and its forward with labels computes {head.asked_by!r} "
            "of all logits before its loss, or instead of it; leave logits_chunk out"
        )
