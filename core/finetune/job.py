"""A fine-tuning job on one rank: build what the configuration says, train, and write a directory."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist

from core import parallel_state
from core.finetune.card import write_card
from core.finetune.config import SCORED, TuneConfig
from core.finetune.model import (
    boosted,
    configuration_in,
    directory_of,
    drawn_names,
    known_classes,
    load_tokenizer,
    rows_of,
    stop_marks,
)
from core.finetune.model_files import ADAPTER, AUTO_CLASS, add_heads, drop_merged, write_what_stays
from core.finetune.plan import BY_TORCH, TunePlan
from core.finetune.start import make_start, start_of, use_reference
from core.finetune.task_trainer import TaskTrainer
from core.finetune.torch_plugins import TorchModel
from core.finetune.trained import ADAPTER_ALONE, MODEL, load_directory
from core.finetune.trainer import TuneTrainer, tuning_step
from core.finetune.windows import Windows, check_rows, open_windows, prepare_windows
from core.hugging_face import save_split, stage_activations
from core.hugging_face.lora import name_in_base
from core.hugging_face.plan import without_adapters
from core.hugging_face.split_report import REPORT
from core.hugging_face.transformers_plans import transformers_package
from core.pipeline_parallel import PipelineRunner
from core.tensor_parallel import model_parallel_manual_seed
from core.tensor_parallel.random import SEQUENCE_DROPOUT_STREAM, dropout_seed
from core.training.job import JobResult, conduct, on_started_ranks, prepared_by_one
from core.training.launch import Launch
from core.training.model_config import DTYPES
from core.training.reporter import GENERATE, python_command
from core.training.schedule import make_scheduler


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
        context_parallel_size=config.parallel.sp,
        expert_model_parallel_size=config.parallel.ep,
        distributed_timeout_minutes=config.parallel.timeout_minutes,
    )
    tokenizer = load_tokenizer(config)

    def prepare() -> str:
        length, stops = config.model.sequence_length, stop_marks(config, tokenizer)
        name = prepare_windows(config.data, length, tokenizer, stops, known_classes(config))
        make_start(config, tokenizer, open_windows(cache / name).header.classes)
        return name

    cache = config.data.cache
    windows = open_windows(cache / prepared_by_one(prepare, prepares_data, cache))
    check_rows(windows.header, rows_of(config), tokenizer)
    start = start_of(config, windows.header.classes)
    trainer = build_trainer(start, plan, windows, device)
    trainer.check_documents_are_apart()
    if isinstance(trainer, TaskTrainer) and config.data.task == "dpo":
        use_reference(config, trainer)

    def finish(run: Path, result: JobResult) -> None:
        save_model(start, trainer, run / (ADAPTER_ALONE if config.lora.merge else MODEL))
        if dist.get_rank() == 0:
            if config.lora.merge:
                merge_adapter(start, run / ADAPTER_ALONE, run / MODEL)
            for name in (MODEL, ADAPTER_ALONE) if config.lora.merge else (MODEL,):
                write_card(config, plan.describe(config), windows.header, result, run / name)
            chat = " --chat --prompt Hello" if config.data.file and tokenizer.chat_template else ""
            if config.data.task not in SCORED:
                print(GENERATE.format(python=python_command(), directory=run) + chat, flush=True)

    keeps = keeps and config.parallel.plugin not in BY_TORCH
    return conduct(trainer, plan.describe(config), lambda path: None, keeps=keeps, hint="", finish=finish)


def build_trainer(config: TuneConfig, plan: TunePlan, windows: Windows, device: torch.device) -> TuneTrainer:
    """Model, wrapper and optimizer. Collective."""
    groups = parallel_state.get_process_groups()
    model_parallel_manual_seed(config.run.seed)
    model, optimizer = boosted(config, plan.micro_batch_size)
    # A model that is whole on its rank drops by torch's default stream: other elements on each data rank.
    torch.manual_seed(dropout_seed(SEQUENCE_DROPOUT_STREAM, config.run.seed, groups))
    runner = None
    if model.cut.layout is not None:
        shape = stage_activations(model.chunks[0], plan.micro_batch_size, config.model.sequence_length)
        runner = PipelineRunner(model.chunks, model.cut.layout, tuning_step, shape, pg_collection=groups)
    kind = TuneTrainer if config.data.task == "causal" else TaskTrainer
    return kind(
        *(config, plan, model.chunks, optimizer.engine, windows, groups, device),
        model=model,
        runner=runner,
        scheduler=make_scheduler(config, optimizer.engine),
        windows=(len(windows.train), len(windows.validation)),
        packing=config.data.packing and config.data.task == "causal",
    )


def save_model(config: TuneConfig, trainer: TuneTrainer, directory: Path) -> None:
    """The trained model, or its adapters, as a plain directory, with the base's other files. Collective."""
    (part, *_) = trainer.model.parts()
    scored = config.data.task in SCORED
    with trainer.model.gathered():
        whole = trainer.model.whole_tensors() if isinstance(trainer.model, TorchModel) else None
        if getattr(part, REPORT, None) is not None:
            save_split(trainer.chunks, directory)
        elif dist.get_rank() == 0:  # each rank has the model whole, or gets it
            part.save_pretrained(directory, state_dict=whole)
        names = drawn_names(config.data.task, without_adapters(part))
        tensors = dict(part.named_parameters()) if whole is None else whole
        heads = {name_in_base(n): p.detach().cpu() for n, p in tensors.items() if name_in_base(n) in names}
    if dist.get_rank() == 0:
        if config.lora.r is not None:
            drop_merged(directory)
            add_heads(directory, heads)
        write_what_stays(directory_of(config), directory, configuration_in if config.lora.r is None else None)
        what, loads = "model", f"{AUTO_CLASS[scored]}.from_pretrained"
        if config.lora.r is not None:
            what, loads = "adapter", "peft.PeftModel.from_pretrained, on the base model"
        print(f"the {what} is in {directory}/, for {loads}", flush=True)


def merge_adapter(config: TuneConfig, adapter: Path, directory: Path) -> None:
    """Write the base model with an adapter added to its weights as a plain directory. One process, on the CPU.

    The adapter is read from its files, so the layout that has trained it does not matter.
    """
    model = load_directory(adapter, DTYPES[config.model.dtype]).merged()
    for file in (directory / ADAPTER, directory / "adapter_model.safetensors"):
        file.unlink(missing_ok=True)  # of this run, from before it went on with another --lora.merge
    model.save_pretrained(directory)
    write_what_stays(directory_of(config), directory, configuration_in)
    loads = AUTO_CLASS[config.data.task in SCORED]
    print(f"the model with the adapter merged is in {directory}/, for {loads}.from_pretrained", flush=True)
