"""SeamForward: a module's own forward between what its plan says of input and output. The module itself is not copied.

It stands in the module's attribute `forward`, so hooks, recomputation and adapters around the module work as before.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from core.hugging_face.plan import PlanError, Seam
from core.hugging_face.sequence_seams import ACTIONS, on_first_tensor, on_output, on_sequence
from core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_tensor_model_parallel_region,
    group_rank,
    group_size,
    reduce_from_tensor_model_parallel_region,
    scatter_to_tensor_model_parallel_region,
)

if TYPE_CHECKING:
    from core.hugging_face.dataflow import Dataflow


class SeamForward:
    """The forward of a module at a seam.

    length: of the last dimension of a gathered output in the whole model, without padding; or the rows of a whole
    vocabulary. group: the tensor-parallel group. watch: the dataflow that is being recorded, if any.
    """

    def __init__(self, module: nn.Module, seam: Seam, group: dist.ProcessGroup | None, length: int) -> None:
        if "forward" in vars(module):
            raise PlanError(
                f"module {seam.module!r} has a forward of its own on the instance, put there by somebody else; split "
                "the model before it is changed"
            )
        self.module, self.seam, self.group, self.length = module, seam, group, length
        self.watch: Dataflow | None = None
        if seam.before == "vocabulary":
            self._localize_padding_index()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The module's output, as the model around it expects it."""
        elsewhere: Tensor | None = None
        if self.seam.before == "copy":
            args = tuple(self._copied(value) for value in args)
            kwargs = {key: self._copied(value) for key, value in kwargs.items()}
        elif self.seam.before == "heads":
            names = self.seam.arguments
            kwargs = {key: self._own_heads(value) if key in names else value for key, value in kwargs.items()}
        elif self.seam.before.endswith("sequence"):
            args, kwargs = on_first_tensor(
                partial(self._over_sequence, self.seam.before), self.seam.module, args, kwargs
            )
        elif self.seam.before:
            first, *others = args or (None,)
            if not isinstance(first, Tensor):
                raise PlanError(
                    f"module {self.seam.module!r} ({self.seam.style}) was called without a positional tensor, which is "
                    "what its rule is about"
                )
            if self.seam.before == "scatter":
                part = scatter_to_tensor_model_parallel_region(first, self.group)
                if self.watch is not None:
                    self.watch.cut(first, part)
                first = part
            elif self.seam.before == "divide":
                first = first / group_size(self.group)
            else:
                first, elsewhere = self._local_rows(first)
            args = (first, *others)
        with self._without_bias() as bias:
            output = self.run(*args, **kwargs)
        if elsewhere is not None:
            output = output.masked_fill(elsewhere.unsqueeze(-1), 0.0)
        output = self._after(output)
        return output if bias is None else output + bias.to(output.dtype)

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own forward."""
        return type(self.module).forward(self.module, *args, **kwargs)

    def _after(self, output: Any) -> Any:
        before = output
        if self.seam.after.endswith("sequence"):
            return on_output(partial(self._over_sequence, self.seam.after), self.seam.module, output)
        if self.seam.after == "reduce":
            output = reduce_from_tensor_model_parallel_region(output, self.group)
        elif self.seam.after == "gather":
            output = gather_from_tensor_model_parallel_region(output, self.group)[..., : self.length]
        elif self.seam.after == "copy tail":
            head, tail = output.split([output.shape[-1] - self.seam.tail, self.seam.tail], dim=-1)
            output = torch.cat([head, copy_to_tensor_model_parallel_region(tail, self.group)], dim=-1)
        elif self.seam.after == "select":
            output = self._selected(output)
        if self.watch is not None:
            if self.seam.after == "select":
                self.watch.select(before, output)
            elif self.seam.after == "copy tail":
                self.watch.copy_tail(before, output, self.seam.tail)
            elif self.seam.after:
                self.watch.leave(before, output)
            elif self.seam.before == "copy":
                self.watch.leave_split(output)
        return output

    def _over_sequence(self, action: str, value: Tensor) -> Tensor:
        """Hidden states [..., s, h]: the whole sequence from this rank's part of it, or the other way."""
        given = on_sequence(ACTIONS[action], value, self.group)
        if self.watch is not None and action == "split sequence":
            self.watch.cut(value, given)
        elif self.watch is not None:
            self.watch.leave(value, given)
            if action == "gather sequence":
                given = self.watch.enter(given, given)
            elif action == "reduce sequence":
                self.watch.cut(given, given)
        return given

    def _selected(self, output: Tensor) -> Tensor:
        """Of [..., heads + shared ones], what this rank's queries use: its heads, or the one that it shares."""
        features = output.shape[-1] - self.seam.tail
        first, count = self._rank_heads()
        parts = [output.narrow(-1, first * features // self.seam.heads, count * features // self.seam.heads)]
        if self.seam.tail:
            parts.append(output.narrow(-1, features, self.seam.tail))
        return torch.cat(parts, dim=-1)

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
        """A bias that is whole beside a split weight is hidden from the forward, and added once, after the sum."""
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
        first, rows = self._first_row()
        local = ids - first
        elsewhere = (local < 0) | (local >= rows)
        return local.masked_fill(elsewhere, 0).masked_fill(outside, -1), elsewhere

    def _first_row(self) -> tuple[int, int]:
        rows = -(-self.length // group_size(self.group))
        return group_rank(self.group) * rows, rows

    def _localize_padding_index(self) -> None:
        """torch leaves out the gradient of the row `padding_idx`; on the rank that holds it, and on no other."""
        padding = getattr(self.module, "padding_idx", None)
        if getattr(self.module, "max_norm", None) is not None:
            raise PlanError(f"embedding {self.seam.module!r} has max_norm, which changes rows that are split")
        if padding is not None:
            first, rows = self._first_row()
            self.module.padding_idx = padding - first if first <= padding < first + rows else None

    def __deepcopy__(self, memo: dict[int, Any]) -> SeamForward:
        # The copied module's own seam; the group is this rank's and cannot be copied.
        copied = object.__new__(type(self))
        vars(copied).update(vars(self))
        memo[id(self)] = copied
        copied.module = memo.get(id(self.module), self.module)
        return copied
