"""Forwards that change the inputs and outputs of a module according to its plan, without copying the module.

A SeamForward is set as the module's ``forward`` attribute, so hooks, recomputation, and adapters around the module work
as before.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from core.groups.process_groups import ProcessGroups
from core.hugging_face.read.plan import PlanError, Seam
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
    """Return ``True`` for tensors that can be hidden states."""
    return isinstance(value, Tensor) and value.is_floating_point() and value.dim() >= 2


def on_first(
    change: Callable[[Tensor], Tensor], module: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Apply a function to the first hidden-states tensor of the arguments, positional or keyword, and return them.

    Raises PlanError, naming the module, if no argument can be hidden states.
    """
    place = next((number for number, value in enumerate(args) if is_hidden(value)), None)
    if place is not None:
        return (*args[:place], change(args[place]), *args[place + 1 :]), kwargs
    name = next((name for name, value in kwargs.items() if is_hidden(value) and "mask" not in name), None)
    if name is None:
        raise PlanError(f"module {module!r} was called without hidden states, which its seam changes")
    return args, {**kwargs, name: change(kwargs[name])}


def on_output(change: Callable[[Tensor], Tensor], module: str, output: Any) -> Any:
    """Apply a function to the hidden states of a module's output, a tensor or a tuple that begins with one.

    Raises PlanError if the output does not begin with hidden states.
    """
    if is_hidden(output):
        return change(output)
    if isinstance(output, tuple) and output and is_hidden(output[0]):
        return (change(output[0]), *output[1:])
    raise PlanError(f"module {module!r} gave a {type(output).__name__} that does not begin with hidden states")


def _change_by_rows(change: Callable[[Tensor], Tensor], rows: tuple[int, ...], value: Tensor) -> Tensor:
    """Apply a function of [batch, s, h] also to a flattened output [batch x s, h], which llama4's experts return.

    ``rows`` is (batch, s) of the module's input.
    """
    if value.dim() != 2 or len(rows) < 2 or len(value) != math.prod(rows):
        return change(value)
    return change(value.unflatten(0, rows)).flatten(0, -2)


class SeamForward:
    """Forward of a module at a seam.

    Args:
        length: Size of the last dimension of a gathered output in the full model, without padding. For an embedding,
            the rows of the full vocabulary.
        multiple: Each rank's rows of a vocabulary are a multiple of this.

    Attributes:
        watch: The dataflow that is being recorded, if any.

    Raises:
        PlanError: If the module already has its own ``forward`` attribute, or is an embedding with max_norm.
    """

    def __init__(self, module: nn.Module, seam: Seam, groups: ProcessGroups, length: int, multiple: int = 1) -> None:
        if "forward" in vars(module):
            raise PlanError(
                f"forward of module {seam.module!r} was already replaced on the instance by other code; split the "
                "model before changing it"
            )
        self.module, self.seam, self.group, self.length = module, seam, groups.tp, length
        self.watch: Dataflow | None = None
        self.rows = rows_on_rank(length, group_size(self.group), multiple)  # vocabulary rows per rank
        if seam.before != "vocabulary":
            return
        if getattr(module, "max_norm", None) is not None:
            raise PlanError(f"embedding {seam.module!r} has max_norm, which changes rows that are split")
        padding: Any = getattr(module, "padding_idx", None)
        if padding is not None:  # torch skips this row's gradient; only its rank may do so
            local = padding - group_rank(self.group) * self.rows
            module.padding_idx = local if 0 <= local < self.rows else None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module and return the output that the surrounding model expects."""
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
            change = partial(_change_by_rows, change, () if hidden is None else hidden.shape[:-1])
        with self._without_bias() if seam.after.startswith("reduce") else nullcontext() as bias:
            output = self.run(*args, **kwargs)
        if elsewhere is not None:
            output = output.masked_fill(elsewhere.unsqueeze(-1), 0.0)
        if seam.after:
            output = on_output(change, seam.module, output)
        elif seam.before == "copy" and self.watch is not None:
            self.watch.leave_split(output)
        return output if bias is None else output + bias.to(output.dtype)

    def prepared(self, value: Tensor) -> Tensor:
        """Return a linear layer's input after the seam's action, which the weight multiplies."""
        action = self.seam.before
        return self._copied(value) if action == "copy" else self._changed(action, value) if action else value

    def run(self, *args: Any, **kwargs: Any) -> Any:
        return type(self.module).forward(self.module, *args, **kwargs)

    def _changed(self, action: str, value: Tensor) -> Tensor:
        """Apply one of the seam's actions to an input or output, and report it to ``watch``."""
        if action in OVER_SEQUENCE:  # value: [..., s, h]
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
        """Select the heads of this rank's queries from [..., heads + shared ones]."""
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
        """Return (first, number) of this rank's heads. With fewer heads than ranks, return the head that it shares."""
        tp, heads = group_size(self.group), self.seam.heads
        return group_rank(self.group) * heads // tp, max(1, heads // tp)

    def _own_heads(self, value: Any) -> Any:
        """Return this rank's heads of [batch, heads, ...] or [batch x heads, ...]. Other shapes apply to all heads."""
        heads = self.seam.heads
        if isinstance(value, Tensor) and value.dim() == 4 and value.shape[1] == heads:
            return value.narrow(1, *self._rank_heads())
        if isinstance(value, Tensor) and value.dim() == 3 and value.shape[0] % heads == 0:
            return value.unflatten(0, (-1, heads)).narrow(1, *self._rank_heads()).flatten(0, 1)
        return value

    def _copied(self, value: Any) -> Any:
        """Copy a floating-point tensor to the tp region.

        Each rank uses the copy differently, so backward sums the gradients.
        """
        if not isinstance(value, Tensor) or not value.is_floating_point():
            return value
        copied = copy_to_tensor_model_parallel_region(value, self.group)
        if self.watch is not None:
            copied = self.watch.enter(value, copied)
        return copied

    @contextmanager
    def _without_bias(self) -> Iterator[Tensor | None]:
        """Hide an unsplit bias of a split weight from the forward. The caller adds it once, after the sum."""
        bias = self.module._parameters.get("bias")
        if bias is None or getattr(bias, "tensor_model_parallel", False):
            yield None
            return
        # Linear can run without a bias; Conv1D cannot, so it adds zeros.
        hidden = None if isinstance(self.module, nn.Linear) else torch.zeros_like(bias, requires_grad=False)
        self.module._parameters["bias"] = hidden
        try:
            yield bias
        finally:
            self.module._parameters["bias"] = bias

    def _local_rows(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return ids as row numbers of this rank's part of the vocabulary, and a mask of other ranks' ids."""
        outside = (ids < 0) | (ids >= self.length)
        if ids.device.type == "cpu" and bool(outside.any()):
            raise ValueError(
                f"module {self.seam.module!r}: token ids are in [{int(ids.min())}, {int(ids.max())}], expected 0 <= id "
                f"< {self.length}, the size of the vocabulary"
            )
        local = ids - group_rank(self.group) * self.rows
        elsewhere = (local < 0) | (local >= self.rows)
        return local.masked_fill(elsewhere, 0).masked_fill(outside, -1), elsewhere

    def __deepcopy__(self, memo: dict[int, Any]) -> SeamForward:
        # The copy belongs to the copied module. Process groups cannot be copied.
        copied = memo[id(self)] = copy.copy(self)
        copied.module = memo.get(id(self.module), self.module)
        return copied
