"""JobPlan: what a configuration comes to on a number of ranks. Pure; all that can be wrong is found here.

Runs before any process group exists, so a wrong size costs a second and a message, not a timeout.
"""

from __future__ import annotations

from dataclasses import dataclass

from core.pipeline_parallel.layout import PipelineLayout
from core.pipeline_parallel.schedules import plan_pipeline
from core.rank_grid import RankGrid
from core.training.config import JobConfig, ModelOptions
from core.training.config_file import ConfigError


@dataclass(frozen=True)
class JobPlan:
    """The resolved sizes of a job."""

    world_size: int
    dp: int
    micro_batch_size: int  # windows in one forward of one rank
    num_microbatches: int  # forwards of one rank in one step
    tokens_per_step: int  # of all ranks together
    layout: PipelineLayout  # where the layers lie

    def describe(self, config: JobConfig) -> str:
        """One line for the log."""
        parallel = config.parallel
        sequence = " with sequence parallelism" if parallel.uses_sequence_parallel else ""
        pipeline = f" x pp {parallel.pp} ({parallel.schedule})" if parallel.pp > 1 else ""
        sharding = "sharded optimizer" if config.ddp.sharded else "replicated optimizer"
        return (
            f"{self.world_size} ranks = tp {parallel.tp}{sequence} x dp {self.dp}{pipeline} ({sharding}); global batch "
            f"{config.run.global_batch_size} = {self.micro_batch_size} windows x {self.num_microbatches} microbatches "
            f"x dp {self.dp}; {self.tokens_per_step:,} tokens a step"
        )


def plan_job(config: JobConfig, world_size: int) -> JobPlan:
    """Check every size against every other; ConfigError with the arithmetic on the first that does not fit."""
    parallel, run, model = config.parallel, config.run, config.model
    for axis in ("cp", "ep"):
        if getattr(parallel, axis) != 1:
            raise ConfigError(
                f"--parallel.{axis} is {getattr(parallel, axis)}, and the GPT of this job is split over tp, pp and "
                f"dp only; use --parallel.{axis} 1"
            )
    try:
        grid = RankGrid(
            world_size,
            tp=parallel.tp,
            pp=parallel.pp,
            cp=parallel.cp,
            ep=parallel.ep,
            expt_tp=parallel.expt_tp,
            order=parallel.order,
        )
    except (ValueError, RuntimeError) as error:
        raise ConfigError(f"these ranks cannot be divided so: {error}") from error
    _check_model(model, parallel.tp, parallel.uses_sequence_parallel)
    _check_positive(config)
    if grid.dp % config.ddp.num_distributed_optimizer_instances:
        raise ConfigError(
            f"dp = {grid.dp} is not divisible by --ddp.num-distributed-optimizer-instances "
            f"{config.ddp.num_distributed_optimizer_instances}"
        )
    if run.global_batch_size % grid.dp:
        raise ConfigError(
            f"--run.global-batch-size {run.global_batch_size} is not divisible by dp = {grid.dp} "
            f"(world {world_size} / tp {parallel.tp}{f' / pp {parallel.pp}' if parallel.pp > 1 else ''})"
        )
    share = run.global_batch_size // grid.dp
    # A pipeline needs several microbatches to be busy; without one the rank takes its whole share at once.
    default = share if parallel.pp == 1 else 1
    micro = default if run.micro_batch_size is None else run.micro_batch_size
    if share % micro:
        raise ConfigError(
            f"--run.micro-batch-size {micro} does not divide a rank's share of the global batch: "
            f"{run.global_batch_size} / dp {grid.dp} = {share}"
        )
    layout = _plan_layers(config, share // micro)
    return JobPlan(world_size, grid.dp, micro, share // micro, run.global_batch_size * model.sequence_length, layout)


def _plan_layers(config: JobConfig, num_microbatches: int) -> PipelineLayout:
    parallel = config.parallel
    try:
        layout = plan_pipeline(
            config.model.num_layers,
            parallel.pp,
            schedule=parallel.schedule,
            chunks=None if parallel.layers_per_stage or parallel.vpp == 1 else parallel.vpp,
            layers_per_stage=parallel.layers_per_stage or None,
            microbatches=num_microbatches,
        )
    except ValueError as error:
        raise ConfigError(f"the pipeline (--parallel.pp, vpp, schedule, layers-per-stage): {error}") from error
    if parallel.pp == 1 and layout.chunks > 1:
        raise ConfigError(
            f"--parallel.pp is 1 and a rank would hold {layout.chunks} stages; a whole model is one stage"
        )
    return layout


def _check_model(model: ModelOptions, tp: int, sequence_parallel: bool) -> None:
    """Every width must divide over heads and tensor ranks."""
    if sequence_parallel and tp == 1:
        raise ConfigError("--parallel.sequence-parallel True splits activations over tp, and tp is 1; use False")
    divisions = [
        ("--model.hidden-size", model.hidden_size, "--model.num-attention-heads", model.num_attention_heads),
        ("--model.num-attention-heads", model.num_attention_heads, "the number of query groups", model.query_groups),
        ("--model.num-attention-heads", model.num_attention_heads, "tp", tp),
        ("the number of query groups", model.query_groups, "tp", tp),
        ("the feed-forward width", model.ffn_width, "tp", tp),
    ]
    if sequence_parallel:
        divisions.append(("--model.sequence-length", model.sequence_length, "tp (sequence parallel)", tp))
    for name, size, divisor_name, divisor in divisions:
        if divisor < 1 or size % divisor:
            raise ConfigError(f"{name} {size} is not divisible by {divisor_name} {divisor}")
    head_size = model.hidden_size // model.num_attention_heads
    if model.position_embedding_type == "rope" and head_size % 2:
        raise ConfigError(
            f"rotary positions need an even head size; --model.hidden-size {model.hidden_size} / "
            f"--model.num-attention-heads {model.num_attention_heads} = {head_size}"
        )


def _check_positive(config: JobConfig) -> None:
    """Counts that must be at least 1, and fractions that must lie between 0 and 1."""
    run = config.run
    counts = {
        "--run.steps": run.steps,
        "--run.stop-after": run.last_step,
        "--run.global-batch-size": run.global_batch_size,
        "--run.micro-batch-size": 1 if run.micro_batch_size is None else run.micro_batch_size,
        "--run.validation-windows": run.validation_windows,
        "--model.num-layers": config.model.num_layers,
        "--model.sequence-length": config.model.sequence_length,
        "--logging.print-every": config.logging.print_every,
        "--logging.trace-steps": config.logging.trace_steps,
    }
    for name, count in counts.items():
        if count < 1:
            raise ConfigError(f"{name} is {count}; it must be at least 1")
    if not 0 < config.data.validation_fraction < 1:
        raise ConfigError(
            f"--data.validation-fraction is {config.data.validation_fraction}; it must lie between 0 and 1"
        )
