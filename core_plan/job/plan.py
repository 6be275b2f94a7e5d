"""JobPlan: a configuration's sizes on a number of ranks.

All sizes are checked here, before any process group exists, so a wrong size is a message and not a timeout.
"""

from __future__ import annotations

from dataclasses import dataclass

from core.groups.rank_grid import RankGrid
from core.number_ranges import divisors
from core.pipeline_parallel.layout import PipelineLayout
from core.pipeline_parallel.schedules import check_microbatches, find_schedule, plan_pipeline
from core_plan.job.config import JobConfig, ParallelOptions, RunConfig
from core_plan.job.errors import ConfigError
from core_plan.job.limits import check_numbers
from core_plan.job.model_config import optimizer_config, transformer_config
from core_plan.job.run_directory import check_run_name
from core_plan.job.schedule import schedule_numbers
from core_plan.job.sizes import check_divides, check_model, check_ranks, check_vocabulary

BYTES = 256  # the vocabulary of the tokenizer 'bytes'


@dataclass(frozen=True)
class JobPlan:
    """The resolved sizes of a job."""

    world_size: int
    dp: int
    micro_batch_size: int  # windows in one forward of one rank
    num_microbatches: int  # forwards of one rank in one step
    tokens_per_step: int  # tokens of all ranks together
    layout: PipelineLayout  # placement of the layers

    def describe(self, config: JobConfig) -> str:
        """One line for the log."""
        parallel = config.parallel
        axes = [f"tp {parallel.tp}{' with sequence parallelism' if parallel.uses_sequence_parallel else ''}"]
        if parallel.cp > 1:
            axes.append(f"cp {parallel.cp} ({parallel.cp_comm_type})")
        axes.append(f"dp {self.dp}")
        if parallel.pp > 1:
            chunks = f" x {self.layout.chunks} stages" if self.layout.chunks > 1 else ""
            axes.append(f"pp {parallel.pp}{chunks} ({parallel.schedule_name})")
        experts = ""
        if config.model.num_experts is not None:
            etp = parallel.tp if parallel.etp is None else parallel.etp
            experts = f"; {config.model.num_experts} experts over ep {parallel.ep} x etp {etp}"
        sharding = "sharded optimizer" if config.ddp.sharded else "replicated optimizer"
        return (
            f"{self.world_size} ranks = {' x '.join(axes)} ({sharding}){experts}; global batch "
            f"{config.run.global_batch_size} = {self.micro_batch_size} windows x {self.num_microbatches} "
            f"microbatches x dp {self.dp}; {self.tokens_per_step:,} tokens a step"
        )


def plan_job(config: JobConfig, world_size: int) -> JobPlan:
    """Check all sizes against each other. Raise ConfigError with the arithmetic of the first that does not fit."""
    parallel, run, model = config.parallel, config.run, config.model
    check_numbers(config)
    check_run(config)
    grid = check_ranks(parallel, world_size)
    check_model(config)
    instances = config.ddp.num_distributed_optimizer_instances
    check_divides("dp x cp", grid.dp * grid.cp, "--ddp.num-distributed-optimizer-instances", instances)
    check_divides("the experts' dp", grid.expt_dp, "--ddp.num-distributed-optimizer-instances", instances)
    layout = _plan_layers(config)
    micro, count = share_batch(grid, parallel, layout, run.global_batch_size, run.micro_batch_size)
    _check_the_rest(config)
    return JobPlan(world_size, grid.dp, micro, count, run.global_batch_size * model.sequence_length, layout)


def share_batch(
    grid: RankGrid, parallel: ParallelOptions, layout: PipelineLayout, global_batch: int, micro: int | None
) -> tuple[int, int]:
    """Return the sequences of a microbatch and the microbatches of a step on one rank.

    Raises:
        ConfigError: If the sizes do not divide.
    """
    arithmetic = " x ".join(f"{axis} {getattr(parallel, axis)}" for axis in ("tp", "cp", "pp"))
    dp = f"dp (world {grid.world_size} / ({arithmetic}) =)"
    check_divides("--run.global-batch-size", global_batch, dp, grid.dp, instead="other parallel sizes or ranks")
    share = global_batch // grid.dp
    micro = default_micro_batch(share, parallel, layout) if micro is None else micro
    share_in_words = f"a rank's share of the global batch, {global_batch} / dp {grid.dp} ="
    check_divides(share_in_words, share, "--run.micro-batch-size", micro)
    check_pipeline_batch(parallel, layout, global_batch, grid.dp, micro)
    return micro, share // micro


def check_pipeline_batch(
    parallel: ParallelOptions, layout: PipelineLayout, global_batch_size: int, dp: int, micro: int
) -> None:
    """Raise ConfigError if the pipeline's schedule cannot run this number of microbatches."""
    if parallel.pp == 1:
        return
    count = global_batch_size // dp // micro
    try:
        check_microbatches(find_schedule(parallel.schedule_name), layout, count)
    except ValueError as error:
        arithmetic = f"{global_batch_size} / (dp {dp} x micro batch {micro}) = {count}"
        raise ConfigError(f"{error} (microbatches = --run.global-batch-size {arithmetic})") from error


def _plan_layers(config: JobConfig) -> PipelineLayout:
    parallel = config.parallel
    if parallel.pp == 1 and (parallel.vpp > 1 or len(parallel.layers_per_stage) > 1):
        raise ConfigError(
            f"--parallel.pp is 1, and --parallel.vpp {parallel.vpp} and --parallel.layers-per-stage "
            f"{list(parallel.layers_per_stage)} cut the model into several stages; use --parallel.pp 2 or more, or "
            "leave these out"
        )
    try:
        find_schedule(parallel.schedule_name)
        if parallel.pp == 1:  # under any schedule
            layout = PipelineLayout(parallel.layers_per_stage or (config.model.num_layers,), pp=1)
            layout.check_model(config.model.num_layers)
            return layout
        return plan_pipeline(
            config.model.num_layers,
            parallel.pp,
            schedule=parallel.schedule_name,
            chunks=parallel.vpp if parallel.vpp > 1 else None,
            layers_per_stage=parallel.layers_per_stage or None,
        )
    except ValueError as error:
        raise ConfigError(f"the pipeline (--parallel.pp, vpp, schedule, layers-per-stage): {error}") from error


def default_micro_batch(share: int, parallel: ParallelOptions, layout: PipelineLayout) -> int:
    """Return the rank's share; in a pipeline, a size with two microbatches a stage in its first round, or else 1."""
    if parallel.pp == 1:
        return share
    kind = find_schedule(parallel.schedule_name)
    enough = max(2 * parallel.pp, layout.num_stages)
    sizes = [size for size in divisors(share) if share // size >= enough]
    return max((size for size in sizes if kind.legal_microbatches(share // size, layout)), default=1)


def _check_the_rest(config: JobConfig) -> None:
    """Run the checks of the model's and the optimizer's own configurations too."""
    tokens = {"bytes": BYTES, "bpe": config.data.bpe_vocab_size}.get(config.data.tokenizer)
    known = None if tokens is None else check_vocabulary(tokens, config.model, config.parallel.tp)
    if config.optimizer.name == "muon" and config.ddp.sharded and not config.ddp.keep_params_whole:
        raise ConfigError(
            "--optimizer.name muon updates full matrices, but a sharded optimizer splits them at any element; add "
            "--ddp.keep-params-whole True, or use --ddp.no-use-distributed-optimizer"
        )
    try:
        transformer_config(config, known or config.parallel.tp)
        optimizer_config(config.optimizer, config.model.dtype)
        schedule_numbers(config)
    except ValueError as error:
        raise ConfigError(str(error)) from error


def check_run(config: RunConfig) -> None:
    """Check a run's names, and the requirements of its checkpoints."""
    check_run_name(config.run.name)
    checkpoint = config.checkpoint
    asks = checkpoint.every is not None or checkpoint.resume or checkpoint.step is not None
    if checkpoint.dir is None and asks:
        raise ConfigError("--checkpoint.every, resume and step need --checkpoint.dir, the directory of checkpoints")
    if checkpoint.keep_best and checkpoint.dir is None and not checkpoint.at_end:
        raise ConfigError("--checkpoint.keep-best needs --checkpoint.dir, the directory of checkpoints")
    if checkpoint.keep_best and config.run.validate_every == 0:
        raise ConfigError(
            "--checkpoint.keep-best compares validation losses, and --run.validate-every 0 takes one at the end only; "
            "give a number of steps"
        )
