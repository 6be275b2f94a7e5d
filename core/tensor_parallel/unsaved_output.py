"""Outputs of norms and activation functions that backward recomputes instead of saving.

An activation function is cheap, and its output is among the largest tensors of a layer. ``computed_again`` runs the
function and saves only its arguments; ``run_unsaved`` runs the module that consumes the output, and saves a recipe
instead of the values. The output's memory is freed once nothing else refers to it; a tensor that a user's hook has kept
stays valid. In backward the function runs a second time when its consumer needs the values. A checkpoint around both
would run the consumer a second time too.
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
    """Call function(*args) and save only the arguments for backward. Gradients are bitwise those of a plain call.

    ``function`` must be differentiable and deterministic, and ``args`` must contain all tensors that it reads,
    including parameters. ``run_unsaved`` may consume the output.
    """
    if not torch.is_grad_enabled() or torch.compiler.is_compiling():
        return function(*args)
    output: Tensor = _Again.apply(function, *args)
    recipe = _recipe_of(output)
    if recipe is not None:
        recipe.version = output._version
    return output


def run_unsaved(consumer: Callable[..., Tensor], output: Tensor, *args: Any) -> Tensor:
    """Call consumer(output, *args) without saving ``output`` for backward.

    ``output`` comes from ``computed_again``. Any other tensor is saved as usual, and so is an output that a hook
    modified in place, because recomputation would not reproduce its values. The consumer may save views of ``output``
    or use it several times.
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
    """Recipe for recomputing an output.

    Attributes:
        function: The function that computes the output.
        cast: torch's autocast state at the call.
        version: Version counter of the output right after the call.
        made: The recomputed output, the end of its graph, and the leaf tensors of that graph. Cleared by the node's own
            backward.
    """

    function: Callable[..., Tensor]
    cast: tuple[str, torch.dtype, bool]
    version: int = 0
    made: tuple[Tensor, Any, list[Tensor | None]] | None = None


@dataclass(frozen=True)
class _Unsaved:
    """Strides and offset of a saved tensor, with ``offset`` counted from the first element of a node's output."""

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
    """Return a node's recomputed output, which all consumers share."""
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
