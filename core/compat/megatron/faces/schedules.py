"""get_forward_backward_func with Megatron's arguments."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor, nn

from core.pipeline_parallel import get_forward_backward_func as our_func
from core.process_groups import ProcessGroups


def get_forward_backward_func(
    pp_size: int | None = None, vp_size: int | None = None, schedule_pg_collection: Any = None
) -> Callable[..., list[Any]]:
    """The function that runs a step's microbatches; its schedule follows from the chunks and the group 'pp'.

    pp_size, vp_size: have no part. schedule_pg_collection: must be None; models of several modules are not scheduled.
    """
    if schedule_pg_collection is not None:
        raise ValueError("schedule_pg_collection schedules several modules, which is not built; leave it out")
    return forward_backward


def forward_backward(
    *,
    forward_step_func: Callable[..., Any],
    data_iterator: Iterator[Any] | Sequence[Iterator[Any]] | None,
    model: nn.Module | Sequence[nn.Module],
    num_microbatches: int,
    seq_length: int,
    micro_batch_size: int,
    decoder_seq_length: int | None = None,
    forward_only: bool = False,
    collect_non_loss_data: bool = False,
    first_val_step: bool | None = None,
    adjust_tensor_shapes_fn: Callable[..., Any] | None = None,
    p2p_communicator: Any = None,
    pg_collection: ProcessGroups | None = None,
    force_all_reduce: bool | None = False,
) -> list[Any]:
    """Run forward and backward of every microbatch; the last stage returns each one's report, others [].

    collect_non_loss_data: with forward_only the reports are loss_func(output, non_loss_data=True). first_val_step: has
    no part. The other arguments are those of core.pipeline_parallel.get_forward_backward_func's function.
    """
    for name, value in {
        "adjust_tensor_shapes_fn": adjust_tensor_shapes_fn,
        "p2p_communicator": p2p_communicator,
    }.items():
        if value is not None:
            raise ValueError(
                f"{name} is not supported: stages send hidden states of [seq_length, micro_batch_size, hidden_size] "
                "through the group 'pp'; for other shapes use core.pipeline_parallel.PipelineRunner(activations=...)"
            )
    chunks = list(model) if isinstance(model, Sequence) else [model]
    _check_config(getattr(chunks[0], "config", None))
    if collect_non_loss_data:
        if not forward_only:
            raise ValueError("collect_non_loss_data=True computes no loss, so it goes with forward_only=True")
        forward_step_func = _without_loss(forward_step_func)
    return our_func()(
        forward_step_func=forward_step_func,
        data_iterator=data_iterator,
        model=chunks,
        num_microbatches=num_microbatches,
        seq_length=seq_length,
        micro_batch_size=micro_batch_size,
        decoder_seq_length=decoder_seq_length,
        forward_only=forward_only,
        pg_collection=pg_collection,
        force_all_reduce=bool(force_all_reduce),
    )


def _check_config(config: Any) -> None:
    stages = getattr(config, "pipeline_model_parallel_size", 1)
    if stages > 1 and getattr(config, "variable_seq_lengths", False):
        raise ValueError(
            "variable_seq_lengths=True over several pipeline stages is not built: what stages send has one shape in a "
            "step. Pad the step's microbatches to one length, or pack them"
        )
    size = getattr(config, "microbatch_group_size_per_vp_stage", None)
    if size is not None and size != stages:
        raise ValueError(
            f"microbatch_group_size_per_vp_stage is {size}; the interleaved schedule takes groups of "
            f"pipeline_model_parallel_size {stages}, leave it at None"
        )


def _without_loss(func: Callable[..., Any]) -> Callable[..., Any]:
    def step(data_iterator: Any, chunk: nn.Module) -> tuple[Any, Callable[[Tensor], Any]]:
        output, loss_func = func(data_iterator, chunk)
        return output, lambda last: (last.detach().sum() * 0.0, loss_func(last, non_loss_data=True))

    return step
