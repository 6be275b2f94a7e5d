"""The forward that TRL sets on a causal model, for a model whose logits are split over ranks.

TRL's trainers call ``model(..., labels=labels, fused_lm_head=True)`` and get a log-probability for each label. Their
own forward multiplies by ``lm_head.weight``, which is a slice here. This one runs the model's forward and takes the
numbers from each rank's part of the logits.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from core.hugging_face.read.plan import without_adapters
from core.hugging_face.run.loss.deferred_logits import DeferredLogits
from core.hugging_face.run.loss.parallel_loss import ParallelCausalLoss
from core.tensor_parallel.cross_entropy import largest_of_ranks
from core.tensor_parallel.mappings import all_reduce, group_rank

FUSED = "fused_lm_head"  # the argument of TRL's forward
IGNORED = -100
STATISTICS = ("entropy", "log_sum_sq_probs", "mean_logits", "is_top1")


class Asked(NamedTuple):
    """Options of TRL's ``add_fused_lm_head``, by its names."""

    temperature: float = 1.0
    cast_lm_head_to_fp32: bool = False
    outputs: tuple[str, ...] = ("log_probs",)


def take_off(model: Any) -> Asked | None:
    """Remove TRL's forward from a model, because a copy of the model would call the original.

    Returns:
        The options of TRL's forward; None if there was none.

    Raises:
        ValueError: If an option cannot be obeyed for split logits.
    """
    base = without_adapters(model)
    forward = getattr(vars(base).get("forward"), "__func__", None)
    if forward is None or FUSED not in forward.__code__.co_varnames:
        return None
    closed = zip(forward.__code__.co_freevars, forward.__closure__ or (), strict=True)
    asked = Asked(**{name: cell.cell_contents for name, cell in closed if name in Asked.__annotations__})
    if asked.cast_lm_head_to_fp32:
        raise ValueError("cast_lm_head_to_fp32=True with a plugin: the head is split in the plugin's precision")
    del base.forward
    return asked


def score_tokens(model: Any, asked: Asked) -> None:
    """Let a model answer to ``fused_lm_head=True``."""
    base = without_adapters(model)
    base.forward = types.MethodType(functools.partial(_forward, asked=asked), base)


def _forward(
    self: Any, *args: Any, asked: Asked, fused_lm_head: bool = False, labels: Tensor | None = None, **kwargs: Any
) -> Any:
    if not fused_lm_head:
        return type(self).forward(self, *args, **kwargs, **({} if labels is None else {"labels": labels}))
    from trl.trainer.utils import FusedCausalLMOutput

    if labels is None or kwargs.pop("shift_labels", None) is not None:
        raise ValueError("a model with a plugin scores the tokens of labels; shift_labels is not obeyed")
    number = kwargs.pop("num_items_in_batch", None)
    output = type(self).forward(self, *args, **kwargs)
    logits: Any = output.logits
    if asked.temperature != 1.0:
        if isinstance(logits, DeferredLogits) and logits.value is None:
            raise ValueError(f"temperature={asked.temperature} with logits_chunk: give the plugin logits_chunk=0")
        logits = getattr(logits, "value", logits) / asked.temperature
    following = F.pad(labels, (0, 1), value=IGNORED)[..., 1:]
    counted = following != IGNORED
    loss = self.loss_function if isinstance(self.loss_function, ParallelCausalLoss) else None
    if loss is None or (loss.own is not None and not isinstance(logits, DeferredLogits)):
        loss = ParallelCausalLoss(None, logits.shape[-1])
    numbers = {"log_probs": -loss.token_losses(logits, following)}
    numbers |= zip(STATISTICS, _statistics(logits, following, loss), strict=True)
    numbers = {name: each for name, each in numbers.items() if name == "log_probs" or name in asked.outputs}
    if loss.cut_sequence is not None:
        numbers = {name: loss.cut_sequence.whole(each.unsqueeze(-1)).squeeze(-1) for name, each in numbers.items()}
    scores = {name: each.masked_fill(~counted, 0.0)[..., :-1] for name, each in numbers.items()}
    if "is_top1" in scores:
        scores["is_top1"] = scores["is_top1"] > 0
    total = counted.sum().clamp(min=1) if number is None else number
    return FusedCausalLMOutput(
        loss=-scores["log_probs"].sum() / total,
        **scores,
        label_mask=counted[..., :-1],
        aux_loss=output.get("aux_loss"),
    )


@torch.no_grad()
def _statistics(logits: Tensor, following: Tensor, loss: ParallelCausalLoss) -> list[Tensor]:
    """Compute STATISTICS for each token of this rank's part."""
    target = following if loss.cut_sequence is None else loss.cut_sequence.part(following, -1)
    shape, target = target.shape, target.clamp(min=0).flatten()
    found = []
    for part in _chunks(logits):
        column, target = target[: len(part)], target[len(part) :]
        found.append(_numbers(part.float(), column, loss.group, loss.vocab_size))
    return [torch.cat(each).view(shape) for each in zip(*found, strict=True)]


def _chunks(logits: Tensor) -> Iterator[Tensor]:
    """Yield logits [tokens, columns], chunk by chunk if they are computed in chunks."""
    if isinstance(logits, DeferredLogits) and logits.value is None:
        yield from logits.chunks()
    else:
        yield logits.flatten(0, -2)


def _numbers(logits: Tensor, target: Tensor, group: dist.ProcessGroup | None, vocab_size: int) -> tuple[Tensor, ...]:
    columns = logits.shape[-1]
    first = group_rank(group) * columns
    logits = logits[:, : min(max(vocab_size - first, 0), columns)]  # the rest is padding
    lowest = logits.new_full((len(logits), 1), torch.finfo(logits.dtype).min)
    largest = torch.cat([logits, lowest], 1).amax(1)
    if group is not None:
        largest = largest_of_ranks(largest, group)
    away = logits - largest.unsqueeze(1)
    weights = away.exp()
    column = target - first
    here = (column >= 0) & (column < logits.shape[1])
    own = torch.cat([logits, lowest], 1).gather(1, column.where(here, column.new_tensor(0)).unsqueeze(1)).squeeze(1)
    hit = here & (own >= largest)
    parts = [weights.sum(1), (weights * away).sum(1), logits.sum(1), hit.to(logits), weights.square().sum(1)]
    sums = torch.stack(parts)
    if group is not None:
        sums = all_reduce(sums, group)
    entropy, squares = sums[0].log() - sums[1] / sums[0], sums[4].log() - 2 * sums[0].log()
    return entropy, squares, sums[2] / vocab_size, sums[3]
