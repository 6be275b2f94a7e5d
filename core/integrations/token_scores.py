"""The forward that TRL sets on a causal model, for a model whose logits are split over ranks.

TRL's trainers call `model(..., labels=labels, fused_lm_head=True)` and get a log-probability for each label. Their own
forward multiplies by `lm_head.weight`, which is a slice here. This one runs the model's forward and takes the numbers
from each rank's part of the logits.
"""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from core.hugging_face.deferred_logits import DeferredLogits
from core.hugging_face.parallel_loss import ParallelCausalLoss
from core.hugging_face.plan import without_adapters
from core.tensor_parallel.cross_entropy import largest_of_ranks
from core.tensor_parallel.mappings import all_reduce, group_rank

FUSED = "fused_lm_head"  # the argument of TRL's forward
IGNORED = -100


def take_off(model: Any) -> bool:
    """Remove TRL's forward from a model, because a copy of the model would call the original. True if there was one."""
    base = without_adapters(model)
    code = getattr(vars(base).get("forward"), "__code__", None)
    if code is None or FUSED not in code.co_varnames:
        return False
    del base.forward
    return True


def score_tokens(model: Any) -> None:
    """Let a model answer to `fused_lm_head=True`."""
    base = without_adapters(model)
    base.forward = types.MethodType(_forward, base)


def _forward(self: Any, *args: Any, fused_lm_head: bool = False, labels: Tensor | None = None, **kwargs: Any) -> Any:
    if not fused_lm_head:
        return type(self).forward(self, *args, **kwargs, **({} if labels is None else {"labels": labels}))
    from trl.trainer.utils import FusedCausalLMOutput

    assert labels is not None, "TRL gives the labels"
    output = type(self).forward(self, *args, **kwargs)
    following = F.pad(labels, (0, 1), value=IGNORED)[..., 1:]
    counted = following != IGNORED
    loss = self.loss_function if isinstance(self.loss_function, ParallelCausalLoss) else None
    if loss is None or (loss.own is not None and not isinstance(output.logits, DeferredLogits)):
        loss = ParallelCausalLoss(None, output.logits.shape[-1])
    numbers = [-loss.token_losses(output.logits, following), *_statistics(output.logits, following, loss)]
    if loss.cut_sequence is not None:
        numbers = [loss.cut_sequence.whole(each.unsqueeze(-1)).squeeze(-1) for each in numbers]
    scores, entropy, mean, top = (each.masked_fill(~counted, 0.0)[..., :-1] for each in numbers)
    return FusedCausalLMOutput(
        log_probs=scores,
        entropy=entropy,
        mean_logits=mean,
        is_top1=top > 0,
        label_mask=counted[..., :-1],
        aux_loss=output.get("aux_loss"),
    )


@torch.no_grad()
def _statistics(logits: Tensor, following: Tensor, loss: ParallelCausalLoss) -> list[Tensor]:
    """Compute the entropy, the mean logit and whether the label is the largest, for each token of this rank's part."""
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
    sums = torch.stack([weights.sum(1), (weights * away).sum(1), logits.sum(1), hit.to(logits)])
    if group is not None:
        sums = all_reduce(sums, group)
    return sums[0].log() - sums[1] / sums[0], sums[2] / vocab_size, sums[3]
