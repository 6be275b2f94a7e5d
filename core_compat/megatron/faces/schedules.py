"""get_forward_backward_func with Megatron's arguments, and the job's microbatch calculator."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

from core import parallel_state
from core.moe import MoEAuxLossAutoScaler
from core.pipeline_parallel import get_forward_backward_func as our_func
from core_compat.megatron.faces.microbatches import MicrobatchCalculator
from core_compat.megatron.faces.refusals import arguments

logger = logging.getLogger(__name__)
# Modules of Megatron's layers -> class that attaches their losses.
ATTACHED = {
    "moe.moe_utils": "MoEAuxLossAutoScaler",
    "multi_token_prediction": "MTPLossAutoScaler",
    "experimental_attention_variant.dsa": "DSAIndexerLossAutoScaler",
}


@arguments("-pp_size=None -vp_size=None !schedule_pg_collection=None")
def get_forward_backward_func() -> Callable[..., list[Any]]:
    """Return the function that runs a step's microbatches. Its schedule follows from the chunks and group 'pp'."""
    return forward_backward


@arguments(
    "* forward_step_func data_iterator model num_microbatches seq_length micro_batch_size decoder_seq_length=None "
    "forward_only=False collect_non_loss_data=False -first_val_step=None !adjust_tensor_shapes_fn=None "
    "!p2p_communicator=None pg_collection=None force_all_reduce=False|None"
)
def forward_backward(
    *, forward_step_func: Any, model: Any, collect_non_loss_data: bool, force_all_reduce: bool | None, **given: Any
) -> list[Any]:
    """Run forward and backward of every microbatch. first_val_step is ignored.

    ``forward_step_func`` runs the forward of one microbatch and returns (output, loss function).
    ``collect_non_loss_data`` reports loss_func(output, non_loss_data=True) instead of the loss, with forward_only.
    ``given`` has other arguments of core.pipeline_parallel.get_forward_backward_func's function. Return the report of
    each microbatch on the last stage, and [] on other stages. Raises ValueError if the options contradict each other or
    are not supported.
    """
    chunks = list(model) if isinstance(model, Sequence) else [model]
    _check_config(getattr(chunks[0], "config", None))
    if collect_non_loss_data and not given["forward_only"]:
        raise ValueError("collect_non_loss_data=True computes no loss, so it goes with forward_only=True")
    if not given["forward_only"]:
        _weigh_losses_of_layers(chunks[0], given["num_microbatches"], given["pg_collection"])
    step = _without_loss(forward_step_func) if collect_non_loss_data else forward_step_func
    return our_func()(forward_step_func=step, model=chunks, force_all_reduce=bool(force_all_reduce), **given)


def _weigh_losses_of_layers(chunk: Any, microbatches: int, groups: Any) -> None:
    """Weight losses attached by Megatron's layers like a microbatch's loss, as Megatron's schedule does."""
    for name, scaler_name in ATTACHED.items():
        scaler = getattr(sys.modules.get(f"megatron.core.transformer.{name}"), scaler_name, None)
        if scaler is None or scaler is MoEAuxLossAutoScaler:  # the runner weights ours
            continue
        pg = groups or getattr(chunk, "groups", None) or parallel_state.get_process_groups()
        parts = 1 if scaler_name == "MTPLossAutoScaler" else pg.size("cp")
        device = next((param.device for param in chunk.parameters()), None)
        share = 1.0 if getattr(chunk.config, "calculate_per_token_loss", False) else parts / microbatches
        grad_scale = getattr(chunk.config, "grad_scale_func", None) or (lambda loss: loss)
        scaler.set_loss_scale(grad_scale(torch.ones((), device=device)) * share)


def _check_config(config: Any) -> None:
    stages = getattr(config, "pipeline_model_parallel_size", 1)
    if stages > 1 and getattr(config, "variable_seq_lengths", False):
        raise ValueError(
            "variable_seq_lengths=True with several pipeline stages is not supported: the tensors sent between stages "
            "must keep one shape in a step. Pad the step's microbatches to one length, or pack them"
        )
    size = getattr(config, "microbatch_group_size_per_vp_stage", None)
    if size is not None and size != stages:
        raise ValueError(
            f"microbatch_group_size_per_vp_stage is {size}; the interleaved schedule takes groups of "
            f"pipeline_model_parallel_size {stages}, leave it at None"
        )


def _without_loss(func: Callable[..., Any]) -> Callable[..., Any]:
    def step(data_iterator: Any, chunk: Any) -> Any:
        output, loss_func = func(data_iterator, chunk)
        return output, lambda last: (last.detach().sum() * 0.0, loss_func(last, non_loss_data=True))

    return step


_of_the_job: list[MicrobatchCalculator] = []  # none or one


def _the() -> MicrobatchCalculator:
    if not _of_the_job:
        raise RuntimeError("there is no microbatch calculator; call init_num_microbatches_calculator first")
    return _of_the_job[0]


@arguments(
    "rank rampup_batch_size>rampup=None global_batch_size=None micro_batch_size=None data_parallel_size=None "
    "decrease_batch_size_if_needed>decrease=False !step_batch_size_schedule=None -seq_length=None"
)
def reconfigure_num_microbatches_calculator(rank: int, rampup: Any, **sizes: Any) -> None:
    """Replace the job's calculator."""
    if None in sizes.values():
        raise ValueError("give global_batch_size, micro_batch_size and data_parallel_size")
    _of_the_job[:] = [MicrobatchCalculator(**sizes, rampup=rampup and list(map(int, rampup)))]
    if rank == 0:
        logger.info("%d microbatches a step", _the().num_micro_batches)


def init_num_microbatches_calculator(*args: object, **kwargs: object) -> None:
    """Create the job's calculator. Raises RuntimeError if there is one already."""
    if _of_the_job:
        raise RuntimeError("there is a microbatch calculator already; call reconfigure_num_microbatches_calculator")
    reconfigure_num_microbatches_calculator(*args, **kwargs)


def destroy_num_microbatches_calculator() -> None:
    """Remove the job's calculator."""
    _of_the_job.clear()


def update_num_microbatches(consumed_samples: int, consistency_check: bool = True, verbose: bool = False) -> None:
    """Set the batch for a number of consumed samples."""
    _the().update(consumed_samples, consistency_check)


def _reader(name: str) -> Callable[[], int]:
    return lambda: int(getattr(_the(), name))


get_num_microbatches = _reader("num_micro_batches")
get_micro_batch_size = _reader("micro_batch_size")
get_current_global_batch_size = _reader("current_global_batch_size")
get_current_running_global_batch_size = _reader("current_running_global_batch_size")
