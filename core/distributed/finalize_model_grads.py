"""finalize_model_grads: the last reductions between backward and the optimizer's step."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import itemgetter
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from core import parallel_state
from core.distributed.buffer.grad_attribute import attributes_alone
from core.distributed.distributed_data_parallel import DistributedDataParallel
from core.distributed.guard.finite import check_finite, check_replicas
from core.distributed.guard.first_steps import compare_first_step
from core.distributed.guard.replicas import compare_weights
from core.distributed.reduce.grad_reducer import StepState, link_chunks
from core.distributed.reduce.sync_rules import agree_on_copies, check_stages, sync_across_stages
from core.distributed.router_state import update_routers
from core.groups import agree
from core.groups.agree import SyncError
from core.groups.process_groups import ProcessGroups
from core.groups.rank_grid import COPY_AXES, DATA_KINDS

Models = list[list[DistributedDataParallel]]  # the chunks of each model


def finalize_model_grads(
    model: nn.Module | Sequence[nn.Module],
    num_tokens: torch.Tensor | float | None = None,
    pg_collection: ProcessGroups | None = None,
    force_all_reduce: bool = False,
) -> None:
    """Complete the gradients of all model chunks, between the last backward and the optimizer's step.

    Backward leaves each rank with local gradients or with a reduction that is still running. An optimizer that used
    them would train every rank on different data. This function reduces every chunk over data parallelism, launching
    buckets that backward has not, runs the sync rules on each reduced bucket (see ``GradSyncRule``), updates the
    routers' biases and counts, divides by the global number of tokens, and runs the guards, in this order.

        for microbatch in microbatches:
            loss_of(model, microbatch).backward()
        finalize_model_grads([model])
        optimizer.step()

    This is a collective over all groups of the model. Every rank must call it exactly once per step.

    Args:
        model (Module or Sequence[Module]): This rank's chunks, or its only chunk. Each is a
            ``DistributedDataParallel`` or a module that contains one.
        num_tokens (Tensor or float, optional): Number of tokens that this rank's loss was summed over, required with
            ``calculate_per_token_loss``: a number, or a tensor of shape [] or [1]. Only the last pipeline stage's value
            is used. It may differ between ranks and be zero on some.
        pg_collection (ProcessGroups, optional): If given, check that the model was wrapped with these groups.
        force_all_reduce (bool, optional): Leave full gradients on every rank even if they are sharded. It is enough if
            one rank of a data-parallel group passes ``True``.

    Raises:
        ValueError: If the arguments contradict the config.
        SyncError: If there are no new gradients since the last call.
        LayoutMismatch: In the first call, if stages do not hold copies of the same weights.
        NonFiniteGradientError: On all ranks, if a gradient is NaN or Inf and ``check_for_nan_in_grad`` is set.
        ReplicaDriftError: On all ranks, if copies of a gradient or weight differ.
    """
    chunks = wrapped_chunks(model, "finalize_model_grads([model])")
    groups, config = chunks[0].groups, chunks[0].config
    if num_tokens is not None and not isinstance(num_tokens, torch.Tensor):
        num_tokens = torch.tensor(num_tokens, dtype=torch.float64, device="cpu")
    models = _by_model(chunks)  # raises if chunks are missing
    _check_arguments(chunks, config, num_tokens, groups, pg_collection)
    with chunks[0].reducer.named("finalize_model_grads"):
        _reduce_and_guard(chunks, models, num_tokens, force_all_reduce)
    with attributes_alone():
        for chunk in chunks:
            chunk.reducer.close()
    for chunk in chunks:
        if chunk.reducer.at_end is not None:
            chunk.reducer.at_end()


def _reduce_and_guard(
    chunks: Sequence[DistributedDataParallel], models: Models, num_tokens: torch.Tensor | None, force_all_reduce: bool
) -> None:
    groups, config = chunks[0].groups, chunks[0].config
    if getattr(config, "virtual_pipeline_model_parallel_size", None) is not None:
        link_chunks([chunk.reducer for chunk in chunks])
    with timed(config, "all-grads-sync"), attributes_alone():
        for chunk in reversed(chunks):
            chunk.reducer.agree_on_order()
        for chunk in reversed(chunks):  # the order of backward
            chunk.reducer.start(force_all_reduce=force_all_reduce, watched=len(chunks) > 1)
        for chunk in chunks:
            if chunk.reducer.open:
                chunk.reducer.finish(force_all_reduce=force_all_reduce, then=chunk.grad_sync.launch)
                continue
            # finish_grad_sync was called, so only the rules are left to run
            problems = [problem for bucket in chunk.reducer.buckets if (problem := bucket.follow_edits()) is not None]
            error = SyncError(f"rank {dist.get_rank()}: {problems[0]}") if problems else None
            agree.refuse(error, chunk.groups.control("dp_cp"), "the edits of gradients", SyncError)
            for bucket in chunk.reducer.buckets:
                chunk.grad_sync.launch(bucket)
    begun = time.perf_counter()
    with timed(config, "non-tensor-parallel-grads-all-reduce"):
        for chunk in chunks:
            chunk.grad_sync.wait()
    with timed(config, "embedding-grads-all-reduce"):
        for parts in models:
            syncs = [chunk.grad_sync for chunk in parts]
            check_stages(syncs)
            sync_across_stages(syncs)
            found = [chunk.reducer.written for chunk in parts]
            written = agree_on_copies(syncs, (any(moved for moved, _ in found), any(loaded for _, loaded in found)))
            parts[0].reducer.written = written
    chunks[0].reducer.report.exposed_ms += (time.perf_counter() - begun) * 1e3
    routers = [router for chunk in chunks for router in chunk.engine.routers]
    if routers:
        update_routers(routers, config, chunks[0].collectives, groups)
    if num_tokens is not None:
        total = _global_num_tokens(num_tokens, chunks[0])
        for chunk in chunks:
            for bucket in chunk.reducer.buckets:
                bucket.defer_scale(total.reciprocal())
    _guard(chunks, models, groups)


def wrapped_chunks(model: nn.Module | Sequence[nn.Module], call: str) -> list[DistributedDataParallel]:
    """Return the wrappers of a rank's chunks, found inside the modules that the user put around them.

    ``call`` is the user's call, spelled correctly, for messages. Raises TypeError if ``model`` is neither a module nor
    a sequence of modules, and ValueError if it is empty, or a chunk is not wrapped or occurs twice.
    """
    containers = (nn.ModuleList, nn.Sequential)
    chunks = [model] if isinstance(model, nn.Module) and not isinstance(model, containers) else model
    if not isinstance(chunks, Iterable) or isinstance(chunks, (str, Mapping)):
        raise TypeError(f"{type(model).__name__} is not a list of wrapped model chunks; call {call}")
    found = [_wrapper_of(chunk, call) for chunk in chunks]
    if not found:
        raise ValueError(f"no model chunk was given; pass this rank's wrapped chunks: {call}")
    for number, chunk in enumerate(found):
        first = next(index for index, other in enumerate(found) if other is chunk)
        if first != number:
            raise ValueError(f"model chunks {first} and {number} are one wrapped model; give it once, and call {call}")
    return found


def _wrapper_of(chunk: nn.Module, call: str) -> DistributedDataParallel:
    part: Any = chunk
    while not isinstance(part, DistributedDataParallel):
        # torch.compile's module has all attributes of the one inside, `module` too.
        inner = getattr(part, "_orig_mod", None) or getattr(part, "module", None)
        if inner is None:
            raise ValueError(
                f"a {type(chunk).__name__} is not wrapped, so its gradients are never reduced; make it one by "
                f"model = DistributedDataParallel(None, DistributedDataParallelConfig(), module), then call {call}"
            )
        part = inner
    return part


def _check_arguments(
    chunks: Sequence[DistributedDataParallel],
    config: Any,
    num_tokens: torch.Tensor | None,
    groups: ProcessGroups,
    pg_collection: ProcessGroups | None,
) -> None:
    """Reject all invalid arguments before the first collective."""
    if getattr(config, "moe_router_enable_expert_bias", False):
        groups.require("tp_dp_cp")
    per_token = getattr(config, "calculate_per_token_loss", False)
    if per_token and num_tokens is None:
        raise ValueError(
            "the config says calculate_per_token_loss, so gradients are sums over tokens; pass num_tokens to divide "
            "them by"
        )
    if not per_token and num_tokens is not None:
        raise ValueError(
            "num_tokens was given but calculate_per_token_loss is False, so gradients are already means over ranks; "
            "set calculate_per_token_loss=True in the model's config, or leave num_tokens out"
        )
    if num_tokens is not None and num_tokens.numel() != 1:
        raise ValueError(
            f"num_tokens has shape {list(num_tokens.shape)}; expected one number, the sum over this rank's microbatches"
        )
    if pg_collection is not None and pg_collection is not groups:
        _check_same_groups(groups, pg_collection)
    for chunk in chunks:
        if chunk.reducer.state is not StepState.REDUCED and not chunk.reducer.has_new_step:
            raise SyncError(
                f"rank {dist.get_rank()}: finalize_model_grads was called twice without a backward in between; the "
                "second call would reduce and scale reduced gradients again. Call it once a step"
            )


def _check_same_groups(wrapped: ProcessGroups, given: ProcessGroups) -> None:
    for name in (*DATA_KINDS, *COPY_AXES, "pp", "embd", "pos_embd"):
        ranks = [
            None if group is None else dist.get_process_group_ranks(group)
            for group in (getattr(wrapped, name), getattr(given, name, None))
        ]
        if ranks[1] is not None and ranks[0] != ranks[1]:
            raise ValueError(
                f"pg_collection.{name} holds ranks {ranks[1]}, and the model was wrapped with {ranks[0]}; pass the "
                "groups it was wrapped with"
            )


@contextmanager
def timed(config: Any, name: str) -> Iterator[None]:
    """Time a block with the user's timer of this name, if the config has Megatron's ``timers``."""
    timers = getattr(config, "timers", None)
    if timers is None:
        yield
        return
    timer = timers(name, log_level=1)
    timer.start(barrier=getattr(config, "barrier_with_L1_time", False))
    try:
        yield
    finally:
        timer.stop()


def _global_num_tokens(num_tokens: torch.Tensor, chunk: DistributedDataParallel) -> torch.Tensor:
    """Return the number of tokens in the global batch as a 0-dim fp64 tensor, or 1 if there are no tokens.

    The data-parallel group adds the last stages' numbers. The result stays on the device to avoid a host sync.
    """
    groups = chunk.groups
    # One dtype on all ranks; exact up to 2**53 tokens. Weights of a loss mask may be fractions.
    total = num_tokens.detach().clone().reshape(()).to(device=chunk.plan.device, dtype=torch.float64)
    if groups.size("pp") > 1:
        chunk.collectives.broadcast(total, groups.require("pp"), "num_tokens", source=groups.size("pp") - 1)
    chunk.collectives.all_reduce(total, groups.require("dp_cp"), "num_tokens").wait()
    return divisor_of_tokens(total)


def divisor_of_tokens(total: torch.Tensor) -> torch.Tensor:
    """Replace a token count of 0 by 1, because gradients are divided by it. A weighted loss mask may give a
    fraction.
    """
    return total.masked_fill(total <= 0, 1)


def compare_before_update(chunks: Sequence[DistributedDataParallel]) -> None:
    """Compare the copies of weights that an optimizer is about to update, if a comparison is due.

    Every rank of the job must call it with all of its wrapped chunks. Raises ``LayoutMismatch`` on all ranks if
    copies differed from the start, and ``ReplicaDriftError`` if they have become different.
    """
    for parts in _by_model(chunks):
        weights = [part.engine.weights for part in parts]
        compare_weights(weights, parts[0].reducer.steps, parts[0].step_guard.describe, at_once=True)


def _by_model(chunks: Sequence[DistributedDataParallel]) -> Models:
    numbered = itertools.groupby(zip(models_of(chunks), chunks, strict=True), key=itemgetter(0))
    return [[chunk for _, chunk in of_model] for _, of_model in numbered]


def _guard(chunks: Sequence[DistributedDataParallel], models: Models, groups: ProcessGroups) -> None:
    for parts in models:
        weights = [part.engine.weights for part in parts]
        is_paused = parts[0].engine.first_steps.is_paused
        step, loaded = parts[0].reducer.steps + 1, parts[0].reducer.written[1] and not is_paused
        for watch in weights:
            watch.is_due |= loaded
        compare_weights(weights, step, parts[0].step_guard.describe, at_once=loaded)
    watches = [c.nan_watch for c in chunks if c.nan_watch is not None and c.ddp_config.check_for_nan_in_grad]
    if watches:
        check_finite(watches, groups)
    for chunk in chunks:
        if chunk.engine.large_grads is not None:
            chunk.engine.large_grads.look(chunk.reducer.steps + 1)
    if any(chunk.ddp_config.check_replicas for chunk in chunks):
        check_replicas([bucket for chunk in chunks for bucket in chunk.reducer.buckets], groups)
    for parts in models:
        first_steps = [part.engine.first_steps for part in parts]
        if first_steps[0].active:
            with attributes_alone():
                compare_first_step(first_steps, [part.engine.weights for part in parts], groups)
        for part in parts:
            part.engine.weights.end_step(part.reducer.steps + 1, counts=not first_steps[0].is_paused)
            part.engine.weights.is_due |= parts[0].reducer.written[0] and not first_steps[0].is_paused


def models_of(chunks: Sequence[Any]) -> list[int]:
    """Return the model index of each chunk, such as [0, 0, 1, 1] for two models with two chunks each.

    A virtual pipeline splits one model into several adjacent chunks. Two chunks of one model that have a parameter of
    the same name hold copies of a tied weight: their gradients are added, and the sum counts once in a norm. In two
    models the same name means two weights. All ranks must have equally many chunks. Raises ValueError on all ranks if
    there are several models and some of a model's chunks are missing.
    """
    given = (getattr(getattr(chunk, "config", None), "virtual_pipeline_model_parallel_size", None) for chunk in chunks)
    size = next(
        (size for size in given if size is not None),
        parallel_state.get_virtual_pipeline_model_parallel_world_size() or 1,
    )
    if len(chunks) > size and len(chunks) % size:
        raise ValueError(
            f"{len(chunks)} model chunks were given and virtual_pipeline_model_parallel_size is {size}, so it is not "
            f"known which of them are one model; pass all {size} chunks of each model, next to one another"
        )
    return [number // size for number in range(len(chunks))]
