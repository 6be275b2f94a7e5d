"""TunePlan: what a configuration comes to on a number of ranks. Pure; all sizes that can be wrong are found here."""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Real

from core.finetune.config import TuneConfig
from core.number_ranges import Range, whole
from core.training.config import ParallelOptions
from core.training.errors import ConfigError
from core.training.limits import RANGES, SIZE, check_numbers
from core.training.model_config import optimizer_config
from core.training.plan import BatchPlan, check_run
from core.training.schedule import schedule_numbers
from core.training.sizes import check_divides, check_ranks

TUNE_RANGES: dict[str, dict[str, Range]] = {
    **{section: RANGES[section] for section in ("optimizer", "run", "checkpoint", "logging")},
    "model": {"sequence_length": whole(2, SIZE.high)},
    "lora": {"r": SIZE, "alpha": SIZE, "dropout": Range(Real, 0, 1, open_high=True)},
    "data": {"limit": SIZE, "validation_fraction": Range(Real, 0, 0.5, open_high=True)},
    "parallel": {**dict.fromkeys(("tp", "dp"), SIZE), "timeout_minutes": RANGES["parallel"]["timeout_minutes"]},
}


@dataclass(frozen=True)
class TunePlan(BatchPlan):
    """The resolved sizes of a fine-tuning job."""

    def describe(self, config: TuneConfig) -> str:
        """One line for the log."""
        sharding = ("replicated optimizer", "sharded optimizer", "sharded gradients", "sharded parameters")
        return (
            f"{self.world_size} ranks = tp {config.parallel.tp} x dp {self.dp} ({sharding[config.parallel.zero]}); "
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
    grid = check_ranks(ParallelOptions(tp=config.parallel.tp, dp=config.parallel.dp), world_size)
    arithmetic = f"world {world_size} / tp {config.parallel.tp}"
    check_divides("--run.global-batch-size", run.global_batch_size, f"dp ({arithmetic} =)", grid.dp)
    share = run.global_batch_size // grid.dp
    micro = share if run.micro_batch_size is None else run.micro_batch_size
    share_in_words = f"a rank's share of the global batch, {run.global_batch_size} / dp {grid.dp} ="
    check_divides(share_in_words, share, "--run.micro-batch-size", micro)
    try:
        optimizer_config(config.optimizer, config.model.dtype)
        schedule_numbers(config)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    tokens = run.global_batch_size * config.model.sequence_length
    return TunePlan(world_size, grid.dp, micro, share // micro, tokens)
