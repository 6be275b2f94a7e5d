"""Outputs that are freed once they are used, and computed again in backward: of norms and activation functions.

An activation function costs little time, and its output is among the largest tensors of a layer. `computed_again` keeps
the arguments alone. `discard` frees the output when its consumer has run. In backward a hook on the gradient of what
the consumer gave fills the same storage again before it is read. The function runs twice and its consumer once, whereas
a checkpoint around both would run both twice.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.autograd.graph import get_gradient_edge

from core.distributed.buffer.grad_attribute import backward_runs

# Called with each storage that has got another size: torch reports such a change to no mode.
WATCHERS: list[Callable[[torch.UntypedStorage], None]] = []


def computed_again(function: Callable[..., Tensor], *args: Tensor | None) -> Tensor:
    """function(*args), of which autograd keeps the arguments. `discard` may free the result.

    function: differentiable, without random numbers, equal for equal arguments. Gradients are those of `function`, to
    the bit. args: all tensors that it reads, parameters among them.
    """
    if not torch.is_grad_enabled() or torch.compiler.is_compiling():
        return function(*args)
    output: Tensor = _Again.apply(function, *args)
    return output


def discard(output: Tensor, consumed: Tensor) -> None:
    """Free an output of `computed_again` until the backward of what its only consumer made of it. Others stay.

    consumed: what the consumer gave; nothing may read `output` from here on but the consumer's own backward.
    """
    node: Any = output.grad_fn
    if not isinstance(getattr(node, "recipe", None), Recipe) or not consumed.requires_grad:
        return
    if backward_runs():  # a checkpoint runs this forward again, for a backward that has begun
        return
    alias = output.data  # a version counter of its own: autograd need not know that the values come and go
    storage = alias.untyped_storage()
    consumed.register_hook(partial(_fill, node, alias, storage.nbytes()))
    _resize(storage, 0)


@dataclass
class Recipe:
    """Recipe of an output. cast: torch's state of autocast. made: the graph of an output that was made again,
    by its end and the tensors that it begins with, until its own backward takes it.
    """

    function: Callable[..., Tensor]
    cast: tuple[str, torch.dtype, bool]
    made: tuple[Any, list[Tensor | None]] | None = None


class _Again(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, function: Callable[..., Tensor], *args: Tensor | None) -> Tensor:
        ctx.save_for_backward(*args)
        device = next(arg for arg in args if arg is not None).device.type
        cast = device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device)
        ctx.recipe = Recipe(function, cast)
        return function(*args)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.recipe.made is None:
            _run_again(ctx)
        (edge, given), ctx.recipe.made = ctx.recipe.made, None
        wanted = [arg for arg in given if arg is not None and arg.requires_grad]
        found = iter(torch.autograd.grad([edge], wanted, [grad]))
        return None, *(next(found) if arg is not None and arg.requires_grad else None for arg in given)


def _run_again(node: Any) -> Tensor:
    """The output of a node; its graph is left in the recipe."""
    needs = node.needs_input_grad[1:]
    given = [
        None if arg is None else arg.detach().requires_grad_(needed)
        for arg, needed in zip(node.saved_tensors, needs, strict=True)
    ]
    with torch.enable_grad(), torch.autocast(*node.recipe.cast):
        output: Tensor = node.recipe.function(*given)
    node.recipe.made = get_gradient_edge(output), given
    return output.detach()


def _fill(node: Any, alias: Tensor, nbytes: int, _gradient: Tensor) -> None:
    """Give an output its values again."""
    _resize(alias.untyped_storage(), nbytes)
    alias.copy_(_run_again(node))


def _resize(storage: torch.UntypedStorage, nbytes: int) -> None:
    storage.resize_(nbytes)
    for watcher in WATCHERS:
        watcher(storage)
