"""A fine-tuning job on one rank: build what the configuration says, train, and write a directory."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from core import parallel_state
from core.finetune.config import TuneConfig
from core.finetune.model import build_stages, layout_of, load_tokenizer, wrap_model
from core.finetune.plan import TunePlan
from core.finetune.trainer import TuneTrainer, tuning_step
from core.finetune.windows import Windows, open_windows, prepare_windows
from core.hugging_face import save_split, stage_activations
from core.hugging_face.transformers_plans import transformers_package
from core.optimizer import get_megatron_optimizer
from core.pipeline_parallel import PipelineRunner
from core.tensor_parallel import model_parallel_manual_seed
from core.training.job import JobResult, conduct, on_started_ranks, prepared_by_one
from core.training.launch import Launch
from core.training.model_config import optimizer_config
from core.training.schedule import make_scheduler

MODEL = "model"  # the folder of what is trained, in the run's directory


def run_tuning(config: TuneConfig, plan: TunePlan, launch: Launch) -> JobResult:
    """Start torch.distributed, fine-tune, and tear everything down. Collective: all ranks of the job."""

    def run(device: torch.device, prepares_data: bool, keeps: bool) -> JobResult:
        return tune(config, plan, device, prepares_data=prepares_data, keeps=keeps)

    return on_started_ranks(run, config.run.device, config.parallel.timeout_minutes, launch)


def tune(
    config: TuneConfig, plan: TunePlan, device: torch.device, *, prepares_data: bool, keeps: bool = False
) -> JobResult:
    """The run, on started ranks. Collective. The arguments are those of `core.training.job.train`."""
    transformers_package().utils.logging.disable_progress_bar()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=config.parallel.tp,
        pipeline_model_parallel_size=config.parallel.pp,
        expert_model_parallel_size=config.parallel.ep,
        get_embedding_ranks=layout_of(config).embedding_ranks if config.parallel.pp > 1 else None,
        distributed_timeout_minutes=config.parallel.timeout_minutes,
    )
    tokenizer = load_tokenizer(config)

    def prepare() -> str:
        return prepare_windows(config.data, config.model.sequence_length, tokenizer)

    cache = config.data.cache
    windows = open_windows(cache / prepared_by_one(prepare, prepares_data, cache))
    trainer = build_trainer(config, plan, windows, device)
    trainer.check_documents_are_apart()

    def finish(run: Path) -> None:
        save_model(config, trainer, tokenizer, run / MODEL)

    return conduct(trainer, plan.describe(config), lambda path: None, keeps=keeps, hint="", finish=finish)


def build_trainer(config: TuneConfig, plan: TunePlan, windows: Windows, device: torch.device) -> TuneTrainer:
    """Model, wrapper and optimizer. Collective."""
    groups = parallel_state.get_process_groups()
    model_parallel_manual_seed(config.run.seed)
    stages = build_stages(config, device)
    vocab_size = stages[-1].config.get_text_config().vocab_size
    wrapped = wrap_model(config, stages)
    # Dropout of data ranks must differ, and that of tensor-parallel ranks must not.
    model_parallel_manual_seed(config.run.seed + 1 + groups.rank("dp"))
    optimizer = get_megatron_optimizer(
        optimizer_config(config.optimizer, config.model.dtype), wrapped, pg_collection=groups
    )
    runner = None
    if config.parallel.pp > 1:
        shape = stage_activations(stages[0], plan.micro_batch_size, config.model.sequence_length)
        runner = PipelineRunner(wrapped, layout_of(config), tuning_step, shape, pg_collection=groups)
    return TuneTrainer(
        *(config, plan, wrapped, optimizer, windows, groups, device),
        runner=runner,
        scheduler=make_scheduler(config, optimizer),
        windows=(len(windows.train), len(windows.validation)),
        packing=config.data.packing,
        vocab_size=vocab_size,
    )


def save_model(config: TuneConfig, trainer: TuneTrainer, tokenizer: Any, directory: Path) -> None:
    """The trained model, or its adapters, as a plain directory, with the tokenizer. Collective."""
    with ExitStack() as whole:
        for chunk in trainer.chunks:
            whole.enter_context(chunk.gathered())
        save_split(trainer.chunks, directory)
    if dist.get_rank() == 0:
        tokenizer.save_pretrained(directory)
        what, loads = "model", "AutoModelForCausalLM.from_pretrained"
        if config.lora.r is not None:
            what, loads = "adapter", "peft.PeftModel.from_pretrained, on the base model"
        print(f"the {what} is in {directory}/, for {loads}", flush=True)
