"""Outputs that are not saved for backward but computed again in it: of norms and activation functions.

An activation function costs little time, and its output is among the largest tensors of a layer. Two functions work
together: `computed_again` runs the function and saves its arguments alone; `run_unsaved` runs the module that consumes
the output, and saves the way to compute the output in place of its values. The output's memory is free as soon as
nothing else refers to it. A tensor that a user's hook has kept stays valid. In backward the function runs a second time
when its consumer asks for the values; a checkpoint around both would run the consumer a second time too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.autograd.graph import get_gradient_edge, saved_tensors_hooks

from core.distributed.buffer.saved_tensors import active_hooks, load_unchanged, save_unchanged


def computed_again(function: Callable[..., Tensor], *args: Tensor | None) -> Tensor:
    """Call function(*args), and save the arguments alone. The gradients are the function's own, to the bit.

    Args:
        function: A differentiable function without random numbers, which gives the same for the same arguments.
        args: All tensors that it reads, parameters among them.

    Returns:
        The function's output. `run_unsaved` may consume it.
    """
    if not torch.is_grad_enabled() or torch.compiler.is_compiling():
        return function(*args)
    output: Tensor = _Again.apply(function, *args)
    recipe = _recipe_of(output)
    if recipe is not None:
        recipe.version = output._version
    return output


def run_unsaved(consumer: Callable[..., Tensor], output: Tensor, *args: Any) -> Tensor:
    """Call consumer(output, *args), which does not save `output` for its backward.

    Args:
        consumer: A module or function. It may save views of `output`, or use it several times.
        output: A tensor from `computed_again`. Any other tensor is saved as usual. So is one that a hook has
            written in place, because the function would not give those values again.
        args: Further arguments of the consumer.

    Returns:
        The consumer's output.
    """
    recipe = None if torch.compiler.is_compiling() else _recipe_of(output)
    if recipe is None or recipe.version != output._version:
        return consumer(output, *args)
    node, outer = output.grad_fn, active_hooks()
    place, start, dtype = id(output.untyped_storage()), output.storage_offset(), output.dtype

    def pack(tensor: Tensor) -> Any:
        is_output = tensor.layout is torch.strided and tensor.dtype is dtype and id(tensor.untyped_storage()) == place
        if is_output and not tensor.is_neg():
            return _Unsaved(node, tensor.shape, tensor.stride(), tensor.storage_offset() - start)
        return save_unchanged(tensor) if outer is None else outer[0](tensor)

    def unpack(saved: Any) -> Tensor:
        if isinstance(saved, _Unsaved):
            return saved.values()
        return load_unchanged(saved) if outer is None else outer[1](saved)

    with saved_tensors_hooks(pack, unpack):
        return consumer(output, *args)


@dataclass
class _Recipe:
    """Recipe of an output.

    cast: torch's state of autocast. version: of the output when it was made. made: the output that was made again, its
    graph's end and the tensors that this graph begins with, until the node's own backward takes them.
    """

    function: Callable[..., Tensor]
    cast: tuple[str, torch.dtype, bool]
    version: int = 0
    made: tuple[Tensor, Any, list[Tensor | None]] | None = None


@dataclass(frozen=True)
class _Unsaved:
    """Place of a saved tensor in the output of a node. offset: counted from the output's first element."""

    node: Any
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int

    def values(self) -> Tensor:
        output = _run_again(self.node)
        return output.as_strided(self.shape, self.stride, output.storage_offset() + self.offset)


class _Again(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, function: Callable[..., Tensor], *args: Tensor | None) -> Tensor:
        ctx.save_for_backward(*args)
        device = next(arg for arg in args if arg is not None).device.type
        cast = device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device)
        ctx.recipe = _Recipe(function, cast)
        return function(*args)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        _run_again(ctx)
        (_, edge, given), ctx.recipe.made = ctx.recipe.made, None
        wanted = [arg for arg in given if arg is not None and arg.requires_grad]
        found = iter(torch.autograd.grad([edge], wanted, [grad]))
        return None, *(next(found) if arg is not None and arg.requires_grad else None for arg in given)


def _recipe_of(output: Tensor) -> _Recipe | None:
    recipe = getattr(output.grad_fn, "recipe", None)
    return recipe if isinstance(recipe, _Recipe) else None


def _run_again(node: Any) -> Tensor:
    """Return the output of a node, computed once for all that ask before the node's own backward."""
    if node.recipe.made is None:
        needs = node.needs_input_grad[1:]
        given = [
            None if arg is None else arg.detach().requires_grad_(needed)
            for arg, needed in zip(node.saved_tensors, needs, strict=True)
        ]
        with torch.enable_grad(), torch.autocast(*node.recipe.cast):
            output: Tensor = node.recipe.function(*given)
        node.recipe.made = output.detach(), get_gradient_edge(output), given
    made: Tensor = node.recipe.made[0]
    return made
