"""Loss of a program's microbatch, computed by the model's forward or a pipeline's forward step."""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from core.distributed.finalize_model_grads import divisor_of_tokens
from core.models import GPTModel
from core.pipeline_parallel import MicrobatchLoss, PipelineRunner
from core.verify.microbatches import Microbatch
from core.verify.torch_model import unwrapped
from core.verify.transformers_reference import TransformersGPT

EMPTY = types.CellType()
NUM_ITEMS = "num_items_in_batch"  # transformers' argument: number of labels that count in the global batch


@dataclass(frozen=True)
class Noted:
    """A microbatch and its loss, from ``note`` or from a forward step of Megatron Core's schedule."""

    loss_fn: Callable[..., Any]
    microbatch: Microbatch
    per_token: bool


def with_captured(loss_fn: Callable[..., Any]) -> tuple[Callable[..., Any], tuple[dict[str, Tensor], ...]]:
    """Return a function like ``loss_fn`` that takes the tensors it has captured, and these tensors.

    A loop may define ``loss_fn`` for each microbatch, with tensors of this rank from around it. The reference runs
    the microbatches of all ranks with one function.

    Returns:
        (function of the model, the captured tensors and further arguments, (captured tensors,)), or (loss_fn, ()) if
        it has captured none.
    """
    code, cells = getattr(loss_fn, "__code__", None), getattr(loss_fn, "__closure__", None) or ()
    if code is None:
        return loss_fn, ()
    filled = [(name, cell.cell_contents) for name, cell in zip(code.co_freevars, cells, strict=True) if cell != EMPTY]
    around = [(name, loss_fn.__globals__.get(name)) for name in code.co_names]
    captured = {n: value for n, value in (*filled, *around) if isinstance(value, Tensor) and not value.requires_grad}
    if not captured:
        return loss_fn, ()

    def loss_of(model: nn.Module, tensors: dict[str, Tensor], *args: Any, **kwargs: Any) -> Any:
        own = tuple(
            types.CellType(tensors[name]) if name in tensors else cell
            for name, cell in zip(code.co_freevars, cells, strict=True)
        )
        function = types.FunctionType(code, {**loss_fn.__globals__, **tensors}, code.co_name, loss_fn.__defaults__, own)
        function.__kwdefaults__ = loss_fn.__kwdefaults__
        return function(model, *args, **kwargs)

    return loss_of, (captured,)


def loss_of_stages(runner: PipelineRunner) -> Callable[..., Any]:
    """Return a function that computes a microbatch's loss on an unsplit model by the pipeline's forward step."""

    def loss_of(whole: nn.Module, microbatch: Any) -> Any:
        output = runner.forward_step(whole, microbatch, None)
        loss = output if isinstance(output, MicrobatchLoss) else MicrobatchLoss(output)
        if runner.per_token or loss.num_tokens is None:
            return (loss.value, loss.num_tokens) if runner.per_token else loss.value
        return loss.value / divisor_of_tokens(torch.as_tensor(loss.num_tokens, device=loss.value.device))

    return loss_of


def is_weighted(model: nn.Module, kwargs: Mapping[str, Any]) -> bool:
    """True if every label of the global batch has the same weight, in any microbatch."""
    from core.booster.plugin.label_mean import LabelMeanModel
    from core.hugging_face.run.loss.label_counts import count_labels

    is_boosted = isinstance(model, LabelMeanModel)
    own = model.unwrap() if is_boosted else model
    by_items = kwargs.get(NUM_ITEMS) is not None
    by_plugin = is_boosted and model.takes_mean_over_labels
    return (by_items or by_plugin) and count_labels(unwrapped(own), kwargs) is not None


def loss_of_forward(model: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
    """Return the mean loss from a model's forward.

    Raises:
        ValueError: If the forward returns no loss.
    """
    kwargs.pop(NUM_ITEMS, None)
    output = model(*args, **kwargs)
    found = output if isinstance(output, Tensor) else None
    if found is None and isinstance(output, Mapping):
        found = output.get("loss")
    elif found is None:
        found = getattr(output, "loss", None)
    if isinstance(unwrapped(model), (GPTModel, TransformersGPT)) and isinstance(found, Tensor):
        return found.mean()  # mean over tokens
    if not isinstance(found, Tensor) or found.numel() != 1:
        shape = f" of shape {list(found.shape)}" if isinstance(found, Tensor) else ""
        raise ValueError(
            f"the forward of {type(unwrapped(model)).__name__} gives a {type(output).__name__}{shape}, and no loss. "
            "Name the loss of a microbatch, --loss module:function, which takes the model and the forward's arguments; "
            "or call core.verify.note(loss_fn, ...) in the loop"
        )
    return found


def loss_by_tokens(model: nn.Module, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    """Return the summed loss and the number of labels that count."""
    from core.hugging_face.run.loss.label_counts import count_labels

    loss = loss_of_forward(model, *args, **kwargs)
    count = count_labels(unwrapped(model), kwargs)
    assert count is not None, "counted in the first forward"
    return torch.where(count > 0, loss, torch.zeros_like(loss)) * count, count
