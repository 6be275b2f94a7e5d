"""Range of each number of a job, by section and option. Conditions between numbers are in sizes."""

from __future__ import annotations

import functools
from numbers import Real

from core.distributed.distributed_data_parallel_config import RANGES as DDP_RANGES
from core.number_ranges import POSITIVE, Range, check_ranges, whole
from core.optimizer.optimizer_config import RANGES as OPTIMIZER_RANGES
from core.transformer.expert_config import EXPERT_RANGES
from core.transformer.transformer_config import RANGES as MODEL_RANGES
from core_plan.job.config import AXIS_OPTIONS, JobConfig
from core_plan.job.errors import ConfigError

SIZE = whole(1, 2**31 - 1)  # far above what any machine holds, and small enough to look for divisors

RANGES: dict[str, dict[str, Range]] = {
    "model": {
        **{name: MODEL_RANGES[name] for name in ("hidden_dropout", "attention_dropout", "init_method_std")},
        **{name: MODEL_RANGES[name] for name in ("logits_chunk", "recompute_num_layers")},
        **{name: EXPERT_RANGES[name] for name in ("moe_aux_loss_coeff", "moe_z_loss_coeff")},
        "moe_expert_capacity_factor": EXPERT_RANGES["moe_expert_capacity_factor"],
        "num_layers": whole(1, 2**16),
        **dict.fromkeys(("hidden_size", "num_attention_heads", "num_query_groups"), SIZE),
        **dict.fromkeys(("ffn_hidden_size", "sequence_length", "vocab_size", "num_experts", "moe_layer_freq"), SIZE),
        **dict.fromkeys(("moe_router_topk", "moe_ffn_hidden_size", "moe_shared_expert_intermediate_size"), SIZE),
    },
    "parallel": {
        **dict.fromkeys(AXIS_OPTIONS, SIZE),
        "vpp": whole(1, 64),
        "timeout_minutes": whole(1, 60 * 24 * 365),
    },
    "ddp": DDP_RANGES,
    "optimizer": {**OPTIMIZER_RANGES, "warmup_steps": whole(0, SIZE.high)},
    "data": {
        "documents": SIZE,
        "bpe_vocab_size": whole(257, SIZE.high),  # 256 bytes and the end mark
        "validation_fraction": Range(Real, 0, 1, open_low=True, open_high=True),
    },
    "run": {
        **dict.fromkeys(("steps", "stop_after", "global_batch_size", "micro_batch_size"), SIZE),
        "validation_windows": SIZE,
        "validate_every": whole(0, SIZE.high),
        "seed": whole(0, 2**32 - 1),
        **dict.fromkeys(("ranks", "threads_per_rank"), whole(1, 1024)),  # per machine
    },
    "checkpoint": {"every": SIZE, "keep": SIZE, "step": whole(0, SIZE.high)},
    "logging": {"print_every": SIZE, "peak_tflops": POSITIVE, "record_every": SIZE},
}


def check_numbers(config: JobConfig) -> None:
    """Raise ConfigError for the first number outside its range, with its flag."""
    for section, ranges in RANGES.items():
        try:
            check_ranges(getattr(config, section), ranges, functools.partial(flag, section))
        except ValueError as error:
            raise ConfigError(str(error)) from error


def flag(section: str, option: str) -> str:
    """'--run.global-batch-size'."""
    return f"--{section}.{option.replace('_', '-')}"
