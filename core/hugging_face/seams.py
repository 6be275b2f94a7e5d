"""SeamForward: a module's own forward between what its plan says of input and output. The module itself is not copied.

It stands in the module's attribute `forward`, so hooks, recomputation and adapters around the module work as before.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from core.groups.process_groups import ProcessGroups
from core.hugging_face.plan import PlanError, Seam
from core.tensor_parallel.dataflow import Dataflow
from core.tensor_parallel.initialization import rows_on_rank
from core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    gather_from_tensor_model_parallel_region,
    group_rank,
    group_size,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
    scatter_to_sequence_parallel_region,
    scatter_to_tensor_model_parallel_region,
)

OVER_SEQUENCE: dict[str, Callable[..., Tensor]] = {
    "split sequence": scatter_to_sequence_parallel_region,
    "join sequence": partial(gather_from_sequence_parallel_region, tensor_parallel_output_grad=False),
    "gather sequence": gather_from_sequence_parallel_region,
    "reduce sequence": reduce_scatter_to_sequence_parallel_region,
}


def is_hidden(value: Any) -> bool:
    """True for what can be hidden states."""
    return isinstance(value, Tensor) and value.is_floating_point() and value.dim() >= 2


def on_first(
    change: Callable[[Tensor], Tensor], module: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments with the first tensor of hidden states changed, which may be given by keyword."""
    place = next((number for number, value in enumerate(args) if is_hidden(value)), None)
    if place is not None:
        return (*args[:place], change(args[place]), *args[place + 1 :]), kwargs
    name = next((name for name, value in kwargs.items() if is_hidden(value) and "mask" not in name), None)
    if name is None:
        raise PlanError(f"module {module!r} was called without hidden states, which its seam changes")
    return args, {**kwargs, name: change(kwargs[name])}


def on_output(change: Callable[[Tensor], Tensor], module: str, output: Any) -> Any:
    """A module's output, a tensor or a tuple that begins with one, with the hidden states changed."""
    if is_hidden(output):
        return change(output)
    if isinstance(output, tuple) and output and is_hidden(output[0]):
        return (change(output[0]), *output[1:])
    raise PlanError(f"module {module!r} gave a {type(output).__name__} that does not begin with hidden states")


def change_by_rows(change: Callable[[Tensor], Tensor], rows: tuple[int, ...], value: Tensor) -> Tensor:
    """A change of [batch, s, h], made to an output [batch x s, h] too: experts of llama4 give one.

    rows: (batch, s) of the module's input.
    """
    if value.dim() != 2 or len(rows) < 2 or len(value) != math.prod(rows):
        return change(value)
    return change(value.unflatten(0, rows)).flatten(0, -2)


class SeamForward:
    """The forward of a module at a seam.

    length: of the last dimension of a gathered output in the whole model, without padding; or the rows of a whole
    vocabulary, of which a rank has a multiple of `multiple`. watch: the dataflow that is being recorded, if any.
    """

    def __init__(self, module: nn.Module, seam: Seam, groups: ProcessGroups, length: int, multiple: int = 1) -> None:
        if "forward" in vars(module):
            raise PlanError(
                f"module {seam.module!r} has a forward of its own on the instance, put there by other code; split "
                "the model before it is changed"
            )
        self.module, self.seam, self.group, self.length = module, seam, groups.tp, length
        self.watch: Dataflow | None = None
        self.rows = rows_on_rank(length, group_size(self.group), multiple)  # of the vocabulary, on a rank
        if seam.before != "vocabulary":
            return
        if getattr(module, "max_norm", None) is not None:
            raise PlanError(f"embedding {seam.module!r} has max_norm, which changes rows that are split")
        padding: Any = getattr(module, "padding_idx", None)
        if padding is not None:  # torch leaves out the gradient of this row: on the rank that holds it, and no other
            local = padding - group_rank(self.group) * self.rows
            module.padding_idx = local if 0 <= local < self.rows else None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The module's output, as the model around it expects it."""
        seam, elsewhere = self.seam, None
        if seam.before == "copy":
            args = tuple(self._copied(value) for value in args)
            kwargs = {key: self._copied(value) for key, value in kwargs.items()}
        elif seam.before == "heads":
            kwargs = {key: self._own_heads(value) if key in seam.arguments else value for key, value in kwargs.items()}
        elif seam.before == "vocabulary":
            if not args:
                raise PlanError(f"module {seam.module!r} ({seam.style}) was called without token ids by position")
            ids, elsewhere = self._local_rows(args[0])
            args = (ids, *args[1:])
        elif seam.before:
            args, kwargs = on_first(partial(self._changed, seam.before), seam.module, args, kwargs)
        change = partial(self._changed, seam.after)
        if seam.after in OVER_SEQUENCE:
            hidden = next((value for value in (*args, *kwargs.values()) if is_hidden(value)), None)
            change = partial(change_by_rows, change, () if hidden is None else hidden.shape[:-1])
        with self._without_bias() as bias:
            output = self.run(*args, **kwargs)
        if elsewhere is not None:
            output = output.masked_fill(elsewhere.unsqueeze(-1), 0.0)
        if seam.after:
            output = on_output(change, seam.module, output)
        elif seam.before == "copy" and self.watch is not None:
            self.watch.leave_split(output)
        return output if bias is None else output + bias.to(output.dtype)

    def prepared(self, value: Tensor) -> Tensor:
        """A linear layer's input, as it meets the weight."""
        action = self.seam.before
        return self._copied(value) if action == "copy" else self._changed(action, value) if action else value

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own forward."""
        return type(self.module).forward(self.module, *args, **kwargs)

    def _changed(self, action: str, value: Tensor) -> Tensor:
        """Apply an action of the seam to an input or output, and report it to `watch`."""
        if action in OVER_SEQUENCE:  # of [..., s, h]
            over_first = OVER_SEQUENCE[action]
            changed = over_first(value.transpose(0, -2), group=self.group).transpose(0, -2).contiguous()
        elif action == "divide":
            return value / group_size(self.group)
        elif action == "scatter":
            changed = scatter_to_tensor_model_parallel_region(value, self.group)
        elif action == "reduce":
            changed = reduce_from_tensor_model_parallel_region(value, self.group)
        elif action == "reduce, copy":
            return self._copied(self._changed("reduce", value))
        elif action == "gather":
            changed = gather_from_tensor_model_parallel_region(value, self.group)[..., : self.length]
        elif action == "copy tail":
            head, tail = value.split([value.shape[-1] - self.seam.tail, self.seam.tail], dim=-1)
            changed = torch.cat([head, copy_to_tensor_model_parallel_region(tail, self.group)], dim=-1)
        else:
            changed = self._selected(value)
        if self.watch is None:
            return changed
        if action in ("scatter", "split sequence"):
            self.watch.cut(value, changed)
        elif action == "select":
            self.watch.select(value, changed)
        elif action == "copy tail":
            self.watch.copy_tail(value, changed, self.seam.tail)
        else:
            self.watch.leave(value, changed)
        if action == "gather sequence":
            return self.watch.enter(changed, changed)
        if action == "reduce sequence":
            self.watch.cut(changed, changed)
        return changed

    def _selected(self, output: Tensor) -> Tensor:
        """Of [..., heads + shared ones], what this rank's queries use: its heads, or the one that it shares."""
        own, shared = output.split([output.shape[-1] - self.seam.tail, self.seam.tail], dim=-1)
        own = own.unflatten(-1, (self.seam.heads, -1))
        if self.seam.copies:
            tp, queries = group_size(self.group), torch.arange(self.seam.copies, device=own.device)
            mine = queries.chunk(tp)[group_rank(self.group)]
            own = own.index_select(-2, mine * self.seam.heads // self.seam.copies)
        else:
            own = own.narrow(-2, *self._rank_heads())
        return torch.cat([own.flatten(-2), shared], dim=-1)

    def _rank_heads(self) -> tuple[int, int]:
        """(first, number) of this rank's heads; of fewer heads than ranks, the one that it shares with others."""
        tp, heads = group_size(self.group), self.seam.heads
        return group_rank(self.group) * heads // tp, max(1, heads // tp)

    def _own_heads(self, value: Any) -> Any:
        """This rank's heads of [batch, heads, ...] or of [batch x heads, ...]; other shapes are for all heads."""
        heads = self.seam.heads
        if isinstance(value, Tensor) and value.dim() == 4 and value.shape[1] == heads:
            return value.narrow(1, *self._rank_heads())
        if isinstance(value, Tensor) and value.dim() == 3 and value.shape[0] % heads == 0:
            return value.unflatten(0, (-1, heads)).narrow(1, *self._rank_heads()).flatten(0, 1)
        return value

    def _copied(self, value: Any) -> Any:
        """Floating-point tensors are used by each rank in its own way, so their gradients are added."""
        if not isinstance(value, Tensor) or not value.is_floating_point():
            return value
        copied = copy_to_tensor_model_parallel_region(value, self.group)
        if self.watch is not None:
            copied = self.watch.enter(value, copied)
        return copied

    @contextmanager
    def _without_bias(self) -> Iterator[Tensor | None]:
        """A bias that is whole next to a split weight is hidden from the forward, and added once, after the sum."""
        bias = self.module._parameters.get("bias") if self.seam.after.startswith("reduce") else None
        if bias is None or getattr(bias, "tensor_model_parallel", False):
            yield None
            return
        # Linear has a forward without a bias; Conv1D has none, and adds zeros.
        hidden = None if isinstance(self.module, nn.Linear) else torch.zeros_like(bias, requires_grad=False)
        self.module._parameters["bias"] = hidden
        try:
            yield bias
        finally:
            self.module._parameters["bias"] = bias

    def _local_rows(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Row numbers in this rank's part of the vocabulary, and which ids lie in another rank's."""
        outside = (ids < 0) | (ids >= self.length)
        if ids.device.type == "cpu" and bool(outside.any()):
            raise ValueError(
                f"module {self.seam.module!r}: token ids lie in [{int(ids.min())}, {int(ids.max())}], expected "
                f"0 <= id < {self.length}, the size of the vocabulary"
            )
        local = ids - group_rank(self.group) * self.rows
        elsewhere = (local < 0) | (local >= self.rows)
        return local.masked_fill(elsewhere, 0).masked_fill(outside, -1), elsewhere

    def __deepcopy__(self, memo: dict[int, Any]) -> SeamForward:
        # The copied module's own seam; the group is this rank's and cannot be copied.
        copied = memo[id(self)] = copy.copy(self)
        copied.module = memo.get(id(self.module), self.module)
        return copied
