"""A job on one rank: initialize groups, build the configured parts, train, write, stop."""

from __future__ import annotations

import gc
import signal
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from core import parallel_state
from core.checkpoint import StopSignal
from core.checkpoint.errors import explain
from core.groups import agree
from core.groups.rank_grid import size_options
from core.optimizer import get_megatron_optimizer
from core.pipeline_parallel import PipelineRunner, build_gpt_stages, gpt_activations, gpt_forward_step, wrap_stages
from core.tensor_parallel import model_parallel_manual_seed
from core.watch.rank_watch import announce_process
from core.watch.waiting import starting, waiting
from core_plan.job.config import JobConfig, RunConfig
from core_plan.job.config_file import to_json
from core_plan.job.errors import ConfigError
from core_plan.job.model_config import ddp_config, optimizer_config, transformer_config
from core_plan.job.plan import JobPlan
from core_plan.job.run_directory import CHECKPOINTS, CONFIGURATION, RunDirectory
from core_plan.job.schedule import make_scheduler
from core_plan.job.sizes import check_vocabulary
from core_plan.machine.launch import Launch
from core_train.checkpoint_options import BEST, check_root
from core_train.checkpoints import JobCheckpoints
from core_train.output import output_is_gone
from core_train.reporter import Reporter
from core_train.step_trace import StepTrace
from core_train.tokens import Tokens, check_windows, open_tokens, prepare_tokens, save_tokenizer
from core_train.trainer import Trainer

NO_LIMIT = timedelta(days=365)
PROFILE = "profile.json"
Result = TypeVar("Result")


@dataclass(frozen=True)
class JobResult:
    """Result of a run, the same on every rank."""

    losses: list[float]  # nats per byte, a step
    validation_loss: float | None
    seconds: float  # time of the steps
    stopped: bool  # asked to stop before the last step


def run_job(config: JobConfig, plan: JobPlan, launch: Launch) -> JobResult:
    """Start torch.distributed, train, and tear everything down. Collective: all ranks of the job."""
    keeps = launch.world_size == launch.local_world_size

    def run(device: torch.device) -> JobResult:
        return train(config, plan, device, prepares_data=launch.local_rank == 0, keeps=keeps)

    return on_started_ranks(run, config.run.device, config.parallel.timeout_minutes, launch)


def on_started_ranks(
    run: Callable[[torch.device], Result], device_name: str, timeout_minutes: int, launch: Launch
) -> Result:
    """Start torch.distributed, call ``run`` with this rank's device, and tear everything down. Collective."""
    device = choose_device(device_name, launch)
    # torchrun keeps one store for all its restarts. Without a name of its own a start would find the addresses that the
    # processes before it have left there.
    store, rank, world_size = next(dist.rendezvous("env://"))
    with starting(dist.PrefixStore(f"start_{launch.restarts}", store), rank, world_size) as own:
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            store=own,
            rank=rank,
            world_size=world_size,
            timeout=timedelta(minutes=timeout_minutes),
            device_id=device if device.type == "cuda" else None,
        )
    announce_process()
    try:
        return run(device)
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
        # gloo's threads end with the last reference to their group, and models hold it in cycles. A thread that frees
        # a tensor after the interpreter is gone aborts the process ("terminate called without an active exception").
        gc.collect()


def choose_device(name: str, launch: Launch) -> torch.device:
    """Return this rank's device; 'auto' selects CUDA only if every local rank has a separate device."""
    devices = torch.cuda.device_count() if name != "cpu" else 0
    if name == "cuda" and devices < launch.local_world_size:
        raise RuntimeError(
            f"--run.device cuda needs a device for each of the {launch.local_world_size} local ranks; "
            f"this machine has {devices}"
        )
    if devices < launch.local_world_size or devices == 0:
        return torch.device("cpu")
    torch.cuda.set_device(launch.local_rank)
    return torch.device("cuda", launch.local_rank)


def train(
    config: JobConfig, plan: JobPlan, device: torch.device, *, prepares_data: bool, keeps: bool = False
) -> JobResult:
    """Run a job on started ranks. Collective.

    One rank of every machine prepares the data, and the others wait for it. If all ranks can write to the run's
    directory (``keeps``), a checkpoint is saved there unless another place is configured.
    """
    start_groups(config, plan)
    trainer = build_trainer(config, plan, job_tokens(config, prepares_data), device)
    checkpoints = None if config.checkpoint.dir is None else JobCheckpoints(trainer, config.checkpoint.dir)
    resumes = config.checkpoint.resume or config.checkpoint.step is not None
    resumed = checkpoints.resume() if checkpoints is not None and resumes else None
    with claim_directory(config, None if checkpoints is None else checkpoints.run) as run:
        if checkpoints is None and keeps and config.checkpoint.at_end:
            checkpoints = JobCheckpoints(trainer, run.path / CHECKPOINTS)
        if checkpoints is not None:
            checkpoints.run = run.path.name
        reporter = None
        if dist.get_rank() == 0:
            reporter = Reporter(config, plan, run.path, trainer.step, trainer.tokens.header.loss_unit)
            with reporter.disk.forgiven():
                (run.path / CONFIGURATION).write_text(to_json(config) + "\n")
                (run.path / "gradients.txt").write_text("\n".join(chunk.describe() for chunk in trainer.chunks) + "\n")
                save_tokenizer(config.data, run.path)
                run.link_latest()
            numel = sum(parameter.numel() for chunk in trainer.chunks for parameter in chunk.parameters())
            print(plan.describe(config))
            print(trainer.tokens.header.describe())
            print(f"{numel:,} parameters and {torch.get_num_threads()} thread(s) a rank; writing to {run.path}/")
            if resumed is not None:
                print(resumed)
            sys.stdout.flush()
        if config.checkpoint.keep_best and (checkpoints is None or trainer.windows[1] == 0):
            lacking = "--checkpoint.dir, where it is kept" if checkpoints is None else "text to validate on"
            raise ConfigError(f"--checkpoint.keep-best needs {lacking}")
        with recorded_steps(trainer, run.path):
            result = run_steps(trainer, reporter, checkpoints)
        if reporter is not None and checkpoints is not None and checkpoints.best_step:
            step, loss = checkpoints.best_step, checkpoints.best_loss
            print(
                f"the lowest validation loss, {loss:.4f}, was that of step {step}; it is in {checkpoints.root / BEST}/"
            )
        return result


def recorded_steps(trainer: Trainer, directory: Path) -> AbstractContextManager[object]:
    """Record the steps inside the context in a run's directory, if the configuration says so. Collective."""
    every = trainer.config.logging.record_every
    if every is None:
        return nullcontext()
    from core.verify.record import record_with
    from core.verify.record.file import FILE_NAME

    model = trainer.runner or trainer.chunks
    return record_with(model, trainer.optimizer, directory / FILE_NAME, every=every, first_step=trainer.step + 1)


def claim_directory(config: RunConfig, saved: str | None) -> RunDirectory:
    """Create and lock the run's directory on rank 0. Collective: if that fails, all ranks raise the error.

    A resumed run has ``saved``, the directory name in its checkpoint.
    """
    parent, name = config.run.directory, config.run.name
    run: RunDirectory | None = None
    failure: str | None = None
    if dist.get_rank() == 0:
        try:
            check_root(config.checkpoint)
            run = RunDirectory.new(parent, name) if saved is None else RunDirectory.again(parent, name, saved)
        except ConfigError as error:
            failure = str(error)
        except OSError as error:
            failure = f"--run.directory {parent} cannot be written and locked by this user: {error}"
    path, failure = agree.gather((None if run is None else str(run.path), failure), None, "the run's directory")[0]
    if failure is not None:
        raise ConfigError(failure)
    return run or RunDirectory(Path(str(path)), None)


def start_groups(config: JobConfig, plan: JobPlan) -> None:
    """Initialize parallel_state with the configured sizes. Collective."""
    layout = plan.layout
    parallel_state.initialize_model_parallel(
        **size_options(config.parallel),
        virtual_pipeline_model_parallel_size=layout.chunks if layout.chunks > 1 else None,
        get_embedding_ranks=layout.embedding_ranks,
        num_distributed_optimizer_instances=config.ddp.num_distributed_optimizer_instances,
        distributed_timeout_minutes=config.parallel.timeout_minutes,
        order=config.parallel.order,
    )


def run_steps(trainer: Trainer, reporter: Reporter | None, checkpoints: JobCheckpoints | None = None) -> JobResult:
    """Run every step, then the validation. Collective; ``reporter`` is on rank 0 only.

    A stop requested on any rank ends the run after the current step, with a checkpoint and without validation; a stop
    during validation ends it. The reporter writes its files in every case, also after an error.
    """
    config = trainer.config
    losses: list[float] = []
    trace: StepTrace | None = None
    validation_loss: float | None = None
    stopped = False
    started_s = time.perf_counter()
    profiler = None if reporter is None or not config.logging.profile else profiler_of(reporter.directory / PROFILE)
    with StopSignal() as signals, reporter or nullcontext(), checkpoints or nullcontext(), profiler or nullcontext():
        while trainer.step < config.run.last_step and not stopped:
            if output_is_gone():
                signals.request(signal.SIGPIPE)
            result = trainer.train_step(stop_requested=signals.requested is not None)
            stopped = result.stop
            losses.append(result.loss)
            trace = result.trace
            if profiler is not None:
                profiler.step()
            if reporter is not None:
                reporter.end_step()
            validation_loss = None
            if not stopped and validates_after(trainer.step, config):
                validation_loss = trainer.validation_loss(signals.agreed)
                stopped = signals.reason is not None
            if reporter is not None:
                reporter.show_step(result, trainer, validation_loss)
            if checkpoints is not None:
                checkpoints.saw_validation(validation_loss)
                checkpoints.step_edge()
        if checkpoints is not None:
            checkpoints.save()
            if reporter is not None:
                reporter.kept = checkpoints.root
        seconds = time.perf_counter() - started_s
        validation_loss = None
        if not stopped:
            validation_loss = trainer.validation_loss(signals.agreed)
            stopped = signals.reason is not None
        if checkpoints is not None:
            checkpoints.saw_validation(validation_loss)
        all_traces = gather_traces(trace) if config.logging.trace and trace is not None else []
        if reporter is not None:
            reporter.show_end(validation_loss, all_traces, stopped=stopped)
    return JobResult(losses, validation_loss, seconds, stopped)


def profiler_of(file: Path) -> Any:
    """Return torch's profiler of steps 3 to 5, because the first two allocate. Call ``step`` after each step."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    return torch.profiler.profile(
        activities=activities,
        schedule=torch.profiler.schedule(skip_first=1, wait=0, warmup=1, active=3, repeat=1),
        on_trace_ready=lambda profiler: profiler.export_chrome_trace(str(file)),
    )


def validates_after(step: int, config: RunConfig) -> bool:
    """True if a validation follows this step. The last step is validated when the run ends."""
    every = config.run.validate_every
    return every > 0 and step % every == 0 and step < config.run.last_step


def gather_traces(trace: StepTrace) -> list[StepTrace]:
    """Gather the last step's traces on rank 0; other ranks return an empty list. Collective."""
    trace.settle()
    gathered: list[StepTrace] | None = None
    if dist.get_rank() == 0:
        gathered = [trace] * dist.get_world_size()
    with waiting("the traces of all ranks", dist.group.WORLD):
        dist.gather_object(trace, gathered)
    return gathered or []


def job_tokens(config: JobConfig, prepares_data: bool) -> Tokens:
    """Open the tokens, prepared by one rank of each machine; if that fails, all ranks raise the error. Collective.

    The other ranks wait without the time limit of the job's groups.
    """
    data = config.data
    with waiting("a group for the text", dist.group.WORLD):
        group = dist.new_group(timeout=NO_LIMIT, backend="gloo")
    name: str | None = None
    failure: str | None = None
    if prepares_data:
        try:
            name = prepare_tokens(data).name
        except OSError as error:
            failure = explain(error, data.cache)
        except Exception as error:  # packages of tokenizers raise errors of any kind, and the others wait
            failure = str(error) or repr(error)
    answers = agree.gather((failure, name), group, "the text")
    dist.destroy_process_group(group)
    for rank, (failed, _) in answers.items():
        if failed is not None:
            raise ConfigError(f"rank {rank} could not prepare the text: {failed}")
    names = {rank: theirs for rank, (_, theirs) in answers.items() if theirs is not None}
    first = min(names)
    for rank, theirs in names.items():
        if theirs != names[first]:
            raise ConfigError(
                f"the text or the tokenizer of rank {rank} differs from rank {first} (token files {theirs} and "
                f"{names[first]}); give all machines the same files"
            )
    tokens = open_tokens(data, data.cache / names[first])
    check_windows(len(tokens.train), config.model.sequence_length)
    return tokens


def build_trainer(config: JobConfig, plan: JobPlan, tokens: Tokens, device: torch.device) -> Trainer:
    """Build the model, its wrapper, the optimizer and the trainer. Collective."""
    groups = parallel_state.get_process_groups()
    model_parallel_manual_seed(config.run.seed)
    vocab_size = check_vocabulary(tokens.header.vocab_size, config.model, config.parallel.tp)
    model_config = transformer_config(config, vocab_size)
    if plan.layout.chunks > 1:
        model_config = replace(model_config, virtual_pipeline_model_parallel_size=plan.layout.chunks)
    stages = [stage.to(device) for stage in build_gpt_stages(model_config, plan.layout, groups)]
    chunks = wrap_stages(model_config, ddp_config(config), stages, groups)
    optimizer = get_megatron_optimizer(
        optimizer_config(config.optimizer, config.model.dtype), chunks, pg_collection=groups
    )
    model_config.grad_scale_func = optimizer.scale_loss  # scales a pipeline's losses
    scheduler = make_scheduler(config, optimizer)
    runner = None
    if plan.layout.pp > 1:
        shape = gpt_activations(model_config, plan.micro_batch_size, config.model.sequence_length)
        schedule = config.parallel.schedule_name
        runner = PipelineRunner(chunks, plan.layout, gpt_forward_step, shape, schedule=schedule, pg_collection=groups)
    return Trainer(config, plan, chunks, optimizer, tokens, groups, device, runner, scheduler=scheduler)
