"""get_forward_backward_func with Megatron's arguments."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from core.compat.arguments import arguments
from core.pipeline_parallel import get_forward_backward_func as our_func

_SHAPES = (
    "stages send hidden states of [seq_length, micro_batch_size, hidden_size] through the group 'pp'; for other shapes "
    "use core.pipeline_parallel.PipelineRunner(activations=...)"
)


@arguments(
    "-pp_size=None -vp_size=None !schedule_pg_collection=None",
    {"schedule_pg_collection": "several modules are not scheduled together; run a schedule for each"},
)
def get_forward_backward_func() -> Callable[..., list[Any]]:
    """The function that runs a step's microbatches; its schedule follows from the chunks and the group 'pp'."""
    return forward_backward


@arguments(
    "* forward_step_func data_iterator model num_microbatches seq_length micro_batch_size decoder_seq_length=None "
    "forward_only=False collect_non_loss_data=False -first_val_step=None !adjust_tensor_shapes_fn=None "
    "!p2p_communicator=None pg_collection=None force_all_reduce=False|None",
    {"adjust_tensor_shapes_fn": _SHAPES, "p2p_communicator": _SHAPES},
)
def forward_backward(
    *, forward_step_func: Any, model: Any, collect_non_loss_data: bool, force_all_reduce: bool | None, **given: Any
) -> list[Any]:
    """Run forward and backward of every microbatch; the last stage returns each one's report, others [].

    collect_non_loss_data: with forward_only the reports are loss_func(output, non_loss_data=True). first_val_step: has
    no part. The other arguments are those of core.pipeline_parallel.get_forward_backward_func's function.
    """
    chunks = list(model) if isinstance(model, Sequence) else [model]
    _check_config(getattr(chunks[0], "config", None))
    if collect_non_loss_data and not given["forward_only"]:
        raise ValueError("collect_non_loss_data=True computes no loss, so it goes with forward_only=True")
    step = _without_loss(forward_step_func) if collect_non_loss_data else forward_step_func
    return our_func()(forward_step_func=step, model=chunks, force_all_reduce=bool(force_all_reduce), **given)


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
