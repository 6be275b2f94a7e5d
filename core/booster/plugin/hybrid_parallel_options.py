"""Checks of HybridParallelPlugin's combined options. Each is obeyed, rejected by name, or named in a warning."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from core.hugging_face.run.sequence import MODES, OVER_CONTEXT
from core.watch.warn_user import warn_user

SCHEDULES = {"1f1b": "1F1B", "interleaved": "Interleaved1F1B", "zbv": "ZBVZeroBubble"}
# Option -> (its default, why another value changes nothing). The numbers are the same with and without it.
WITHOUT_EFFECT: dict[str, tuple[Any, str]] = {
    "enable_all_optimization": (False, "modules stay as the family wrote them; set enable_flash_attention=True alone"),
    "enable_fused_normalization": (False, "modules stay as the family wrote them, and so do its norms"),
    "enable_jit_fused": (False, "modules stay as the family wrote them; compile the model with torch.compile yourself"),
    "enable_sequence_overlap": (False, "a gather waits for its module; the option went from ColossalAI too"),
    "find_unused_parameters": (False, "parameters without a gradient are always found"),
    "check_reduction": (False, "the first step always compares the gradients of copies"),
    "gradient_as_bucket_view": (False, "gradients are always views of their buckets"),
    "static_graph": (False, "the graph may change in every step, at no cost"),
    "enable_metadata_cache": (True, "shapes are known before a step, so no metadata is sent"),
    "overlap_p2p": (True, "stages always send while they compute"),
    "scheduler_nodes": (None, "the schedule of pp_style='zbv' is torch's"),
    "inner_ring_size": (None, "keys and values travel in one ring of sp_size ranks"),
}


def warn_without_effect(plugin: str, given: Mapping[str, Any]) -> None:
    """Warn once about all options without effect, because ColossalAI's programs set many of them."""
    rows = dict(WITHOUT_EFFECT)
    if not given.get("enable_sequence_parallelism"):
        rows["sequence_parallelism_mode"] = None, "sequences are not cut without enable_sequence_parallelism=True"
    known = {name: row for name, row in rows.items() if name in given and given[name] != row[0]}
    if known:
        what = "; ".join(f"{name}={given[name]!r}: {reason}" for name, (_, reason) in known.items())
        warn_user(f"{plugin}: these options change nothing here. {what}")


def check_sizes(world: int, sp_size: int, **sizes: int) -> None:
    """Raise ValueError unless tp_size, pp_size and sp_size are positive and their product divides the world size.

    ``sp_size`` counts the separate ranks of sequence parallelism.
    """
    for name, size in sizes.items():
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ValueError(f"HybridParallelPlugin: {name} is {size!r}; it is a number of ranks, at least 1")
    tp_size, pp_size = sizes["tp_size"], sizes["pp_size"]
    if world % (tp_size * pp_size * sp_size):
        own_ranks = f" * sp_size {sp_size}" if sp_size > 1 else ""
        raise ValueError(
            f"World size {world} is not divisible by tp_size {tp_size} * pp_size {pp_size}{own_ranks}; sizes must "
            "multiply to a divisor of the world"
        )


def check_pipeline(
    pp_size: int, style: str, chunks: int, microbatches: int | None, microbatch_size: int | None
) -> None:
    """Raise ValueError unless the pipeline options can be combined. ``style`` is a key of SCHEDULES."""
    if style not in SCHEDULES:
        raise ValueError(f"pp_style {style!r} is none of {', '.join(SCHEDULES)}")
    fits = {"1f1b": chunks == 1, "interleaved": chunks > 1, "zbv": chunks in (1, 2)}[style]
    if not fits:
        raise ValueError(
            f"num_model_chunks is {chunks} with pp_style={style!r}; expected 1 for '1f1b', more for 'interleaved', "
            "and 2 for 'zbv'"
        )
    if pp_size == 1 and style != "1f1b":
        raise ValueError(f"pp_style={style!r} needs a pipeline, and pp_size is 1")
    if pp_size > 1 and microbatches is None and microbatch_size is None:
        raise ValueError(f"pp_size is {pp_size}; give num_microbatches or microbatch_size")
    for name, value in (("num_microbatches", microbatches), ("microbatch_size", microbatch_size)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise ValueError(f"{name} is {value!r}; expected an integer of at least 1")


def check_zero(stage: int, cpu_offload: bool, overlap_allgather: bool) -> None:
    """Raise ValueError if the ZeRO stage is not 0 to 3, or does not use an option that is set."""
    if isinstance(stage, bool) or stage not in (0, 1, 2, 3):
        raise ValueError(f"zero_stage is {stage!r}; expected 0, 1, 2 or 3")
    if stage == 0 and (cpu_offload or overlap_allgather):
        name = "cpu_offload" if cpu_offload else "overlap_allgather"
        raise ValueError(f"{name}=True is an option of ZeRO, and zero_stage is 0; set zero_stage=1")
    if stage == 3 and overlap_allgather:
        raise ValueError(
            "overlap_allgather=True gathers parameters within the optimizer's step, and with zero_stage=3 nothing is "
            "gathered there; leave it False"
        )


def resolve_sequence(enabled: bool, mode: str | None, tp_size: int, sp_size: int | None) -> tuple[str | None, int]:
    """Return the mode of sequence parallelism and its number of separate ranks, or (None, 1) without it.

    ``mode`` is one of MODES, and defaults to 'split_gather'. A mode without sequence parallelism has no effect, as in
    ColossalAI, whose examples always set one. Raises ValueError if the mode is unknown, or the sizes do not fit it.
    """
    if mode is not None and mode not in MODES:
        raise ValueError(f"sequence_parallelism_mode {mode!r} is none of {', '.join(MODES)}")
    if sp_size is not None and (isinstance(sp_size, bool) or not isinstance(sp_size, int) or sp_size < 1):
        raise ValueError(f"HybridParallelPlugin: sp_size is {sp_size!r}; it is a number of ranks, at least 1")
    if not enabled:
        if sp_size not in (None, 1):
            raise ValueError(f"sp_size={sp_size} needs enable_sequence_parallelism=True, which is False")
        return None, 1
    mode = mode or "split_gather"
    if mode in OVER_CONTEXT:
        if sp_size is None or sp_size < 2:
            raise ValueError(
                f"sequence_parallelism_mode={mode!r} needs separate ranks for the sequence, but sp_size is {sp_size}; "
                "set it to at least 2"
            )
        return mode, sp_size
    if tp_size < 2:
        raise ValueError(f"sequence_parallelism_mode={mode!r} is over the tensor-parallel ranks, and tp_size is 1")
    if sp_size not in (None, 1, tp_size):
        raise ValueError(f"sp_size is {sp_size}, and {mode!r} takes the {tp_size} tensor-parallel ranks; leave it out")
    return mode, 1
