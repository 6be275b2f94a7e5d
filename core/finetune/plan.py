"""TunePlan: what a configuration comes to on a number of ranks. Pure; all sizes that can be wrong are found here."""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Real

from core.finetune.config import TuneConfig
from core.number_ranges import Range, whole
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
    "model": {"sequence_length": whole(2, SIZE.high)},
    "lora": {"r": SIZE, "alpha": SIZE, "dropout": Range(Real, 0, 1, open_high=True)},
    "data": {"limit": SIZE, "validation_fraction": Range(Real, 0, 0.5, open_high=True)},
    "parallel": {
        **dict.fromkeys(("tp", "pp", "dp", "ep"), SIZE),
        "timeout_minutes": RANGES["parallel"]["timeout_minutes"],
    },
}


@dataclass(frozen=True)
class TunePlan(BatchPlan):
    """The resolved sizes of a fine-tuning job."""

    def describe(self, config: TuneConfig) -> str:
        """One line for the log."""
        sharding = ("replicated optimizer", "sharded optimizer", "sharded gradients", "sharded parameters")
        parallel = config.parallel
        stages = f" x pp {parallel.pp} (1F1B)" if parallel.pp > 1 else ""
        stages += f", ep {parallel.ep}" if parallel.ep > 1 else ""
        return (
            f"{self.world_size} ranks = tp {parallel.tp} x dp {self.dp}{stages} ({sharding[parallel.zero]}); "
            f"{self.describe_batch(config)}"
        )


def plan_tuning(config: TuneConfig, world_size: int) -> TunePlan:
    """Check every size against every other; ConfigError with the arithmetic on the first that does not fit."""
    check_numbers(config, TUNE_RANGES)
    check_run(config)
    run, lora = config.run, config.lora
    if lora.r is None and (lora.targets or lora.dropout):
        raise ConfigError(
            "--lora.targets and --lora.dropout are of adapters; add their rank too, --lora.r 8 for example"
        )
    if config.optimizer.name == "muon":
        raise ConfigError("--optimizer.name muon is for matrices that are trained from the start; use adam")
    sizes = config.parallel
    parallel = ParallelOptions(tp=sizes.tp, pp=sizes.pp, dp=sizes.dp, ep=sizes.ep)
    grid = check_ranks(parallel, world_size)
    if parallel.pp > 1 and config.parallel.zero == 3:
        raise ConfigError("--parallel.zero 3 with --parallel.pp above 1 is not here yet; use --zero 2")
    arithmetic = f"world {world_size} / (tp {parallel.tp} x pp {parallel.pp})"
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
    tokens = run.global_batch_size * config.model.sequence_length
    return TunePlan(world_size, grid.dp, micro, share // micro, tokens)
