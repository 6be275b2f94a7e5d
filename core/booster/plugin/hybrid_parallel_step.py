"""Step of a HybridParallelModel's pipeline: the implementation of ``booster.execute_pipeline``."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from core.booster.plugin.hybrid_parallel_model import HybridParallelModel
from core.booster.plugin.label_mean import NUM_ITEMS, add_over_replicas, items_in_batch, share_of
from core.booster.plugin.microbatches import joined_outputs, microbatches_of
from core.groups import agree
from core.groups.process_groups import world_groups
from core.hugging_face import gather_logits
from core.hugging_face.run.loss.label_counts import count_labels
from core.hugging_face.run.loss.parallel_loss import refuse_use_of_split_logits
from core.hugging_face.run.refusals import refuse_arguments
from core.hugging_face.run.stages import activations_of, stage_of
from core.interface.whole import note
from core.pipeline_parallel import MicrobatchLoss, PipelineRunner


def run_pipeline(
    data_iter: Iterable[Any],
    model: nn.Module,
    criterion: Callable[[Any, Any], Any] | None,
    optimizer: Any,
    *,
    schedule: str,
    microbatches: tuple[int | None, int | None],
    returns: tuple[bool, bool],
) -> dict[str, Any]:
    """Run forward and backward of an iterator's next batch. See ``HybridParallelPlugin.execute_pipeline``.

    ``microbatches`` is (number of microbatches, rows per microbatch), one of which may be ``None``, and ``returns``
    selects (loss, outputs). Raises RuntimeError if the model has no pipeline stages, TypeError if ``data_iter`` is not
    an iterator, and ValueError if it is exhausted.
    """
    if not isinstance(model, HybridParallelModel) or model.cut.layout is None:
        raise RuntimeError(
            "execute_pipeline needs a model that HybridParallelPlugin has boosted with pp_size > 1; with pp_size=1 "
            "call the model and booster.backward"
        )
    if not hasattr(data_iter, "__next__"):
        raise TypeError(
            f"execute_pipeline takes an iterator, and got a {type(data_iter).__name__}, of which it would take the "
            "first batch each time; pass iter(dataloader), once an epoch"
        )
    model.expect_values()
    returns_loss, returns_outputs = returns
    groups, head = model.cut.groups, stage_of(model.chunks[-1]).model
    trains = optimizer is not None and torch.is_grad_enabled()
    # An evaluation is local to this replica: others may have fewer batches.
    replicas = groups.size("dp") if trains else 1
    of_replica = [groups.control(name) for name in ("tp", "cp", "pp") if groups.size(name) > 1]
    with agree.together(world_groups(groups) if trains else of_replica, "the batch of execute_pipeline", ValueError):
        batch = model.cast(_next_of(data_iter))
        refuse_arguments(head, batch)
        rows = len(batch.get(head.main_input_name, ()))
        if not trains and rows % (microbatches[0] or microbatches[1] or 1):
            microbatches = 1, None  # the last batch of an evaluation
        parts = microbatches_of(batch, *microbatches, main=head.main_input_name, config=head.config)
        shape = activations_of(model.chunks[0], parts[0])
    outputs: list[Any] = []
    total = count_labels(head, batch)
    if total is not None:
        total, items = total.to(head.device), items_in_batch(batch, head.device)
        total = items if items is not None else add_over_replicas(total, model.data_groups) if trains else total

    def forward_step(chunk: nn.Module, microbatch: dict[str, Any], hidden: Any) -> Any:
        count = None if total is None else count_labels(head, microbatch)
        taken = {k: v for k, v in microbatch.items() if count is None or k != NUM_ITEMS}
        output = chunk(received=hidden, **taken)
        if not stage_of(chunk).part.post_process:
            return output
        if total is not None and count is not None and output.get("loss") is not None:
            output["loss"] = share_of(output["loss"], count, total, len(parts) * replicas)
        output = refuse_use_of_split_logits(stage_of(chunk).model, output)
        if returns_outputs:
            tensors = {k: v.detach() for k, v in output.items() if isinstance(v, torch.Tensor)}
            outputs.append({name: gather_logits(value) for name, value in tensors.items()})
        loss = output.loss if criterion is None else criterion(output, microbatch)
        return MicrobatchLoss(loss)

    def loss_of_part(whole: Any, part: dict[str, Any]) -> Any:
        """Return the full model's loss of a part, or (sum over labels, count) if all labels weigh the same."""
        output = whole(**{name: value for name, value in part.items() if name != NUM_ITEMS})
        loss = output.loss if criterion is None else criterion(output, part)
        count = None if total is None else count_labels(whole, part)
        return loss if count is None else (torch.where(count > 0, loss, torch.zeros_like(loss)) * count, count)

    for part in parts if trains else ():
        note(loss_of_part, part, per_token=total is not None)
    if model.runner is None:
        model.runner = PipelineRunner(
            model.chunks, model.cut.layout, forward_step, shape, schedule=schedule, pg_collection=groups
        )
    runner: PipelineRunner = model.runner
    runner.forward_step = forward_step
    if trains:
        is_syncing = all(chunk.require_backward_grad_sync for chunk in model.wrapped)
        outcome = runner.step(parts, finalize=is_syncing, activations=shape)
    else:
        outcome = runner.evaluate(parts, activations=shape)
    loss = add_over_replicas(outcome.loss.clone(), model.data_groups) / replicas if trains else outcome.loss
    return {
        "loss": loss.float() if returns_loss else None,
        "outputs": joined_outputs(outputs) if returns_outputs and outputs else None,
    }


def _next_of(data_iter: Any) -> dict[str, Any]:
    try:
        return dict(next(data_iter))
    except StopIteration:
        raise ValueError(
            "execute_pipeline was given an iterator that has no batch left; make one by iter(dataloader) for each "
            "epoch, and call execute_pipeline at most len(dataloader) times with it, as often on all ranks"
        ) from None
