"""TunePlan: a configuration's sizes on a number of ranks. Pure; all sizes that can be wrong are found here."""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Real

from core.booster.plugin.hybrid_parallel_options import resolve_sequence
from core.finetune.config import ROWS, TuneConfig, TunedModel
from core.number_ranges import Range, either, whole
from core.pipeline_parallel.schedules import plan_pipeline
from core.training.config import ParallelOptions
from core.training.errors import ConfigError
from core.training.limits import RANGES, SIZE, check_numbers
from core.training.model_config import optimizer_config
from core.training.plan import BatchPlan, check_pipeline_batch, check_run, default_micro_batch
from core.training.schedule import schedule_numbers
from core.training.sizes import check_divides, check_ranks

TUNE_RANGES: dict[str, dict[str, Range]] = {
    **{section: RANGES[section] for section in ("optimizer", "run", "checkpoint", "logging")},
    "model": {
        "sequence_length": whole(2, SIZE.high),
        "logits_chunk": RANGES["model"]["logits_chunk"],
        "beta": Range(Real, 0, 1000, open_low=True),
    },
    "lora": {"r": SIZE, "alpha": SIZE, "dropout": Range(Real, 0, 1, open_high=True)},
    "data": {"limit": SIZE, "validation_fraction": Range(Real, 0, 0.5, open_high=True)},
    "parallel": {
        **dict.fromkeys(("tp", "pp", "dp", "ep", "sp"), SIZE),
        "timeout_minutes": RANGES["parallel"]["timeout_minutes"],
    },
}

# Plugin -> (the stages of --zero that it has, the sizes that it has in addition to dp).
SERVED: dict[str, tuple[tuple[int, ...], tuple[str, ...]]] = {
    "hybrid": ((1, 0, 2, 3), ("tp", "pp", "ep", "sp")),
    "low_level_zero": ((1, 2), ()),
    "gemini": ((3,), ("tp",)),
    "torch_ddp": ((0,), ()),
    "torch_fsdp": ((3,), ()),
}
BY_TORCH = ("torch_ddp", "torch_fsdp")
MOST_TIMES = 100  # that a document is trained on in one pass over the data


@dataclass(frozen=True)
class TunePlan(BatchPlan):
    """The resolved sizes of a fine-tuning job."""

    def describe(self, config: TuneConfig) -> str:
        """One line for the log."""
        sharding = ("replicated optimizer", "sharded optimizer", "sharded gradients", "sharded parameters")
        parallel = config.parallel
        stages = f" x pp {parallel.pp} (1F1B)" if parallel.pp > 1 else ""
        mode = sequence_mode(config)
        stages += f" x sp {parallel.sp}" if parallel.sp > 1 else ""
        stages += f", sequence by {mode}" if mode is not None else ""
        stages += f", ep {parallel.ep}" if parallel.ep > 1 else ""
        stages += "" if parallel.plugin == "hybrid" else f", by {parallel.plugin}"
        return (
            f"{self.world_size} ranks = tp {parallel.tp} x dp {self.dp}{stages} ({sharding[zero_stage(config)]}); "
            f"{self.describe_batch(config)}"
        )


def zero_stage(config: TuneConfig) -> int:
    """The ZeRO stage; the plugin's first one if none is given."""
    given, (stages, _) = config.parallel.zero, SERVED[config.parallel.plugin]
    return stages[0] if given is None else given


def check_plugin(config: TuneConfig) -> None:
    """ConfigError for an option that the plugin does not have."""
    sizes = config.parallel
    stages, axes = SERVED[sizes.plugin]
    if zero_stage(config) not in stages:
        raise ConfigError(
            f"--parallel.zero {sizes.zero}: --parallel.plugin {sizes.plugin} has {either(sorted(stages))}; leave "
            "--parallel.zero out, or use --parallel.plugin hybrid"
        )
    asked = {"tp": sizes.tp, "pp": sizes.pp, "ep": sizes.ep, "sp": sizes.sp}
    wanted = {name: str(size) for name, size in asked.items() if size > 1 and name not in axes}
    if sizes.sp_mode is not None and "sp" not in axes:
        wanted["sp-mode"] = sizes.sp_mode
    if sizes.plugin in BY_TORCH and config.model.dtype != "float32":
        raise ConfigError(
            f"--model.dtype {config.model.dtype}: --parallel.plugin {sizes.plugin} keeps no fp32 masters; use "
            "--parallel.plugin low_level_zero, or leave --model.dtype out"
        )
    if sizes.plugin in BY_TORCH and (config.checkpoint.dir is not None or config.checkpoint.keep_best):
        what = "keep-best" if config.checkpoint.dir is None else f"dir {config.checkpoint.dir}"
        raise ConfigError(
            f"--checkpoint.{what}: a run by --parallel.plugin {sizes.plugin} keeps no checkpoints "
            "to resume from; use --parallel.plugin low_level_zero, or leave it out"
        )
    for name, value in wanted.items():
        having = " and ".join(("dp", *axes))
        raise ConfigError(
            f"--parallel.{name} {value}: --parallel.plugin {sizes.plugin} has {having} only; use --parallel.plugin "
            "hybrid, or leave it out"
        )


def check_weights(config: TuneConfig) -> None:
    """ConfigError unless each file of data has a weight, or none has."""
    files, weights = config.data.file, config.data.weights
    if weights and len(weights) != len(files):
        raise ConfigError(
            f"--data.weights has {len(weights)} numbers, and --data names {len(files)} files; give one weight for each"
        )
    for weight in weights:
        if not 0 < weight <= MOST_TIMES:
            raise ConfigError(f"--data.weights {weight:g}: expected numbers above 0, and at most {MOST_TIMES}")


def check_task(config: TuneConfig) -> None:
    """ConfigError for an option that the task does not have."""
    task, sizes = config.data.task, config.parallel
    if task != "dpo" and config.model.beta != TunedModel.beta:
        raise ConfigError(f"--model.beta is of --task dpo, and --task is {task}; leave --model.beta out")
    if task == "causal":
        return
    if not config.data.file:
        raise ConfigError(f"--task {task} needs records of its own; give --data FILE")
    asked = {"pp": sizes.pp > 1, "sp": sizes.sp > 1, "sp-mode": sizes.sp_mode is not None}
    for name in (name for name, is_asked in asked.items() if is_asked):
        raise ConfigError(
            f"--parallel.{name}: --task {task} trains over dp, tp, ep and --zero; leave --parallel.{name} out"
        )


def sequence_mode(config: TuneConfig) -> str | None:
    """The mode that splits the sequence over ranks; None if it is not split."""
    return config.parallel.sp_mode or ("ring_attn" if config.parallel.sp > 1 else None)


def plan_tuning(config: TuneConfig, world_size: int) -> TunePlan:
    """Check every size against every other; ConfigError with the arithmetic on the first that does not fit."""
    check_numbers(config, TUNE_RANGES)
    check_run(config)
    run, lora = config.run, config.lora
    if lora.r is None and (lora.targets or lora.dropout or lora.merge):
        raise ConfigError(
            "--lora.targets, --lora.dropout and --lora.merge are of adapters; add their rank too, --lora.r 8 for "
            "example"
        )
    if config.optimizer.name == "muon":
        raise ConfigError("--optimizer.name muon is for matrices that are trained from the start; use adam")
    if config.optimizer.loss_scale is not None:
        raise ConfigError("--optimizer.loss-scale is for float16; float32 and bfloat16 need no factor, so leave it out")
    check_plugin(config)
    check_weights(config)
    check_task(config)
    sizes = config.parallel
    parallel = ParallelOptions(tp=sizes.tp, pp=sizes.pp, dp=sizes.dp, ep=sizes.ep, cp=sizes.sp)
    grid = check_ranks(parallel, world_size, "sp")
    mode = sequence_mode(config)
    if mode is not None:
        try:
            resolve_sequence(True, mode, sizes.tp, sizes.sp if sizes.sp > 1 else None)
        except ValueError as error:
            raise ConfigError(f"--parallel.sp-mode {mode}: {error}") from error
        parts = {"ring_attn": 2 * sizes.sp, "all_to_all": sizes.sp}.get(mode, sizes.tp)
        length = "--model.sequence-length"
        check_divides(length, config.model.sequence_length, f"what {mode} cuts it into,", parts)
    arithmetic = f"world {world_size} / (tp {parallel.tp} x pp {parallel.pp}{f' x sp {sizes.sp}' * (sizes.sp > 1)})"
    check_divides("--run.global-batch-size", run.global_batch_size, f"dp ({arithmetic} =)", grid.dp)
    share = run.global_batch_size // grid.dp
    layout = plan_pipeline(parallel.pp, parallel.pp)  # the layers are the model's, which is not read here
    micro = default_micro_batch(share, parallel, layout) if run.micro_batch_size is None else run.micro_batch_size
    share_in_words = f"a rank's share of the global batch, {run.global_batch_size} / dp {grid.dp} ="
    check_divides(share_in_words, share, "--run.micro-batch-size", micro)
    check_pipeline_batch(parallel, layout, run.global_batch_size, grid.dp, micro)
    try:
        optimizer_config(config.optimizer, config.model.dtype)
        schedule_numbers(config)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    tokens = run.global_batch_size * config.model.sequence_length * ROWS[config.data.task]
    return TunePlan(world_size, grid.dp, micro, share // micro, tokens)
