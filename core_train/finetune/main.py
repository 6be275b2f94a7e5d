"""The fine-tuning command: check a job in one process, then train on ranks with TRL's and Transformers' trainers."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from core import integrations, parallel_state
from core.booster.plugin import GradientCheckpointConfig, MoeHybridParallelPlugin
from core.booster.plugin.dp_plugin_base import planned_world
from core.checkpoint import StopSignal
from core.checkpoint.weights.index import weight_files
from core.extras import require, require_installed
from core.groups.rank_grid import RankGrid
from core.hugging_face.checkpoint import is_of_head
from core.hugging_face.cut.experts import check_experts
from core.hugging_face.cut_model import Cutting
from core.hugging_face.read.directory import read_configuration
from core.hugging_face.read.ties import untie_by_files
from core.hugging_face.read.tiny import keeps_records_apart, write_tiny
from core.hugging_face.read.transformers_plans import peft_by_old_names, read_plan, transformers_package
from core.integrations.trainer_layout import check_layout
from core_plan.dry_run import dry_run, refuse_what_cannot_fit, this_machine
from core_plan.job.errors import ConfigError
from core_plan.job.hub import cached_model, how_to_download, is_hub_name
from core_plan.job.run_directory import check_writable
from core_plan.machine.launch import Launch
from core_plan.machine.own_ranks import STARTED_BY_US
from core_plan.model_run import ModelRun
from core_train.commands.model_directory import check_weights, classifies
from core_train.finetune.arguments import TASKS, TINY, Arguments, TuneConfig, load_config, read_arguments, refusing
from core_train.finetune.data import describe, read_data
from core_train.job import on_started_ranks
from core_train.main import Command, run_command
from core_train.reporter import GENERATE, python_command

FLAGS = {  # options of a plan, and their names here
    "--micro-batch": "--per_device_train_batch_size",
    "--recompute": "--activation_checkpointing",
    "--cp": "--sp",
    "--sequence-parallel": "--sp_mode",
    "--run.no-check-memory": "--check_memory false",
}


def check_sizes(config: TuneConfig, world: int) -> int:
    """Return the number of replicas on ``world`` ranks. Raises ConfigError if sizes do not fit."""
    options = config.options
    with refusing("--tp, --pp, --sp, --ep"):
        return RankGrid(world, tp=options.tp, pp=options.pp, cp=options.sp, ep=options.ep, expt_tp=options.tp).dp


def check(config: TuneConfig, world: int) -> Any:
    """Make every check of a start in this process, and return the trainer on a model without memory."""
    if "RANK" in os.environ:  # the ranks check it themselves
        return None
    given = read_arguments(config.options, config.words)
    check_writable(Path(given.theirs.output_dir), "--output_dir")
    resume = given.theirs.resume_from_checkpoint
    if resume not in (None, "true", "True") and not (Path(resume) / "trainer_state.json").is_file():
        raise ConfigError(f"--resume_from_checkpoint {resume}: it holds no trainer_state.json; give a checkpoint-N")
    with planned_world(0, world, torch.device("cpu")):
        plugin = plugin_of(given)
    with refusing(f"--task {given.options.task}"):
        check_layout(plugin, trainer_class(given.options.task), given.theirs)
    check_model(given, plugin.cutting)
    return build(given)


def plugin_of(given: Arguments) -> MoeHybridParallelPlugin:
    """Create the plugin of a job. Raises ConfigError if options contradict each other."""
    options = given.options
    with refusing("--tp, --pp, --ep, --sp and --sp_mode"):
        return MoeHybridParallelPlugin(
            tp_size=options.tp,
            pp_size=options.pp,
            ep_size=options.ep,
            sp_size=options.sp if options.sp > 1 else None,
            precision=options.precision,
            zero_stage=options.zero,
            enable_sequence_parallelism=options.sp_mode is not None,
            sequence_parallelism_mode=options.sp_mode,
            microbatch_size=1 if options.pp > 1 else None,
            gradient_checkpoint_config=GradientCheckpointConfig() if given.theirs.activation_checkpointing else None,
            cpu_offload=options.offload,
            parallel_output=options.task in ("sft", "dpo"),
            make_vocab_size_divisible_by=1,  # no padding but for equal parts
            logits_chunk=options.logits_chunk,
            overlap_communication=options.ep == 1,
            moe_dp_outside=False if options.ep > 1 else None,
        )


def directory_of(given: Arguments) -> Path:
    """Return the model's directory as an absolute path. A name on the Hub is looked up in the local cache."""
    path = given.model.model_name_or_path
    if path.startswith(TINY):
        return Path(given.theirs.output_dir).resolve().parent / f"tiny/{path.removeprefix(TINY)}-{given.theirs.seed}"
    return Path(cached_model(path)).resolve()


def check_model(given: Arguments, cutting: Cutting) -> None:
    """Check a model's files and its split. Reads no tensor. Raises ConfigError."""
    task, path, directory = given.options.task, given.model.model_name_or_path, directory_of(given)
    with refusing(f"--model {path}"):
        if path.startswith(TINY):
            write_tiny(directory, path.removeprefix(TINY), 1024, given.theirs.seed)
        elif not (directory / "config.json").is_file():
            raise ValueError(f"there is no {directory}/config.json; give {TINY}FAMILY{how_to_download(path, 'model')}")
        configuration = read_configuration(directory)
        model = on_meta(task, configuration)
        drawn = {name for name, _ in model.named_parameters() if is_of_head(model, name)}
        check_weights(f"--model {directory}", directory, model, drawn if task not in ("sft", "dpo") else ())
        if cutting.tp_size > 1:
            read_plan(model).check_size(cutting.tp_size)
        if cutting.ep_size > 1:
            check_experts(model, cutting.ep_size)
        cutting.layout_of(model)
    if getattr(given.theirs, "packing", False) and not keeps_records_apart(configuration):
        raise ConfigError(
            f"--packing: models of type {configuration.model_type!r} do not keep packed records apart by their "
            "position_ids; leave it out"
        )


def on_meta(task: str, configuration: Any, attention: str | None = None) -> Any:
    """Create a task's model on the meta device, in fp32."""
    if task == "reward":
        configuration.num_labels = 1
    auto = getattr(transformers_package(), TASKS[task][2])
    with torch.device("meta"):
        return auto.from_config(configuration, dtype=torch.float32, attn_implementation=attention)


def load_tokenizer(given: Arguments) -> Any:
    """Load the tokenizer in the model's directory. Raises ConfigError if there is none."""
    with refusing(f"--model {given.model.model_name_or_path}: its tokenizer cannot be read"):
        tokenizer = transformers_package().AutoTokenizer.from_pretrained(directory_of(given), trust_remote_code=False)
        if not tokenizer("text", add_special_tokens=False)["input_ids"]:  # transformers makes one without a file
            raise ValueError("it makes no token of a text; copy tokenizer.json and tokenizer_config.json to the model")
    return tokenizer


def trainer_class(task: str) -> Any:
    """Return the trainer of a task, which takes a plugin too."""
    place = "transformers" if task == "classification" else "trl"
    return integrations.over(getattr(require(place, "fine-tuning", "trl"), TASKS[task][0]))


def build(given: Arguments, plugin: MoeHybridParallelPlugin | None = None) -> Any:
    """Create the trainer of a job, which tokenizes the records. Without a plugin its model has no memory."""
    import peft

    task, theirs, directory = given.options.task, replace(given.theirs), directory_of(given)
    transformers, trl = transformers_package(), require("trl", "fine-tuning", "trl")
    transformers.utils.logging.disable_progress_bar()
    tokenizer, configuration = load_tokenizer(given), read_configuration(directory)
    train, held = read_data(given.options, theirs.seed, [*configuration.id2label.values()] * classifies(configuration))
    place, adapters, attention = trainer_class(task), trl.get_peft_config(given.model), given.model.attn_implementation
    more: dict[str, Any] = {"processing_class": tokenizer, "plugin": plugin}
    where = f"--task {task} over records of {', '.join(train.column_names)}"
    if task == "sft" and theirs.assistant_only_loss is None:
        theirs.assistant_only_loss = "messages" in train.column_names  # answers alone are learned
    if task == "classification":
        configuration.id2label = dict(enumerate(train.features["label"].names))
        configuration.label2id = {name: number for number, name in configuration.id2label.items()}
        configuration.pad_token_id = tokenizer.pad_token_id
        configuration.problem_type = "single_label_classification"
        longest = min(tokenizer.model_max_length, getattr(configuration, "max_position_embeddings", 1 << 20))

        def encode(row: Any) -> Any:
            return {**tokenizer(row["text"], truncation=True, max_length=longest), "labels": row["label"]}

        with refusing(where):
            train, held = (rows and rows.map(encode, remove_columns=rows.column_names) for rows in (train, held))
        more["data_collator"] = transformers.DataCollatorWithPadding(tokenizer, pad_to_multiple_of=given.pad_to)
    else:
        more["peft_config"] = adapters
    model: Any = str(directory)  # TRL reads the model
    settings = {"dtype": "float32", "attn_implementation": attention}
    if plugin is None:
        model = on_meta(task, configuration)
        if task == "dpo":
            theirs.precompute_ref_log_probs = theirs.sync_ref_model = False
            more["peft_config"] = adapters or peft.LoraConfig(target_modules="all-linear")  # needs no reference model
    elif task == "sft" and adapters is None:
        place = type(place.__name__, (_ReadInSlices, place), {"directory": directory})
        model = on_meta(task, configuration, attention)
        untie_by_files(model, directory, weight_files(directory))
        if (directory / "generation_config.json").is_file():
            model.generation_config = transformers.GenerationConfig.from_pretrained(directory)
    elif task == "classification":
        transformers.set_seed(theirs.seed)
        auto = transformers.AutoModelForSequenceClassification
        model = auto.from_pretrained(directory, config=configuration, **settings)
    else:
        theirs.model_init_kwargs = settings
    places = None if plugin is not None and task == "dpo" else False  # the split moves each rank's slices
    unmoved = mock.patch.object(transformers.TrainingArguments, "place_model_on_device", places)
    with refusing(where), unmoved, peft_by_old_names():
        if task == "classification" and adapters is not None:
            model = peft.get_peft_model(model, adapters)
        trainer = place(model=model, args=theirs, train_dataset=train, eval_dataset=held, **more)
    if task == "classification":
        trainer.model_accepts_loss_kwargs = False  # heads of classes take a mean, also if they are given a number
    return trainer


def sample(trainer: Any) -> str:
    """Return the first record of a job in one line, with the learned tokens in [[ ]]."""
    return describe(trainer.train_dataset[0], trainer.processing_class, trainer.model.config.id2label)


class _ReadInSlices:
    """Trainer methods with which each rank reads its slices from a directory once the model is split."""

    directory: Path | str

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        self.directory = resume_from_checkpoint

    def _boost(self, model: Any, optimizer: Any) -> Any:
        boosted, prepared = super()._boost(model, optimizer)  # type: ignore[misc]
        self.booster.load_model(boosted, self.directory)  # type: ignore[attr-defined]
        return boosted, prepared


def tune(config: TuneConfig, dp: int, launch: Launch | None = None) -> Any:
    """Fine-tune on started ranks, and return the trainer. Collective."""
    options, is_first = config.options, dist.get_rank() == 0
    given = read_arguments(options, config.words)
    theirs, path, folder = given.theirs, given.model.model_name_or_path, Path(given.theirs.output_dir).resolve()
    transformers = transformers_package()
    if not is_first:
        transformers.utils.logging.set_verbosity_error()
    plugin = plugin_of(given)
    if launch is not None and STARTED_BY_US not in os.environ:  # no process has checked
        check_model(given, plugin.cutting)
    theirs.activation_checkpointing = theirs.gradient_checkpointing = False  # the plugin does it
    trainer = build(given, plugin)
    if is_hub_name(path):  # other machines have another cache
        trainer.model.config.name_or_path = path
        for adapter in getattr(trainer.model, "peft_config", {}).values():
            adapter.base_model_name_or_path = path
    if is_first:
        rows = f"{theirs.per_device_train_batch_size} x {theirs.gradient_accumulation_steps} x dp {dp} of a step"
        print(
            f"data: {', '.join(options.data)}, {len(trainer.train_dataset):,} rows, {rows}; the first, learned in "
            f"[[ ]]: {sample(trainer)}\nwriting to {folder}/",
            flush=True,
        )
    resume = theirs.resume_from_checkpoint
    if resume in (True, "true", "True") or (resume is None and launch is not None and launch.restarts):
        resume = transformers.trainer_utils.get_last_checkpoint(str(folder))
    with StopSignal() as stop:
        trainer.add_callback(_stopper(stop))
        trainer.train(resume_from_checkpoint=resume)
    trainer.save_model(str(folder))
    trainer.hub_model_id = trainer.args.output_dir = str(folder)  # the card's lines run from any directory
    if is_first:
        trainer.create_model_card(model_name=folder.name)
        print(f"the {'adapter' if given.model.use_peft else 'model'} is in {folder}/", flush=True)
        if options.task in ("sft", "dpo"):
            command = GENERATE.format(python=python_command(), directory=shlex.quote(str(folder)))
            print(command + " --chat" * bool(trainer.processing_class.chat_template), "--prompt Hello", flush=True)
    parallel_state.destroy_model_parallel()
    return trainer


def _stopper(stop: StopSignal) -> Any:
    """Return a callback that saves and ends training after a signal, on all ranks after the same step."""
    from transformers import TrainerCallback

    class Stop(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **options: Any) -> None:
            if stop.agreed():
                control.should_training_stop = control.should_save = True

    return Stop()


def planned(config: TuneConfig, dp: int) -> ModelRun:
    """Describe a job to ``core_plan``. Raises ConfigError if the task is not planned."""
    options = config.options
    given = read_arguments(options, config.words)
    if options.task != "sft":
        raise ConfigError(f"--task {options.task} is not planned; --dry-run has made all other checks")
    theirs, name = given.theirs, given.model.model_name_or_path
    rows = theirs.per_device_train_batch_size
    return ModelRun(
        name if name.startswith(TINY) else str(directory_of(given)),
        tp=options.tp,
        pp=options.pp,
        cp=options.sp,
        ep=options.ep,
        zero=options.zero,
        sequence_parallel=options.sp_mode,
        dtype="float32" if options.precision == "fp32" else "bfloat16",
        sequence_length=int(theirs.max_length or 1024),
        global_batch_size=rows * theirs.gradient_accumulation_steps * dp,
        micro_batch_size=1 if options.pp > 1 else rows,
        recompute=theirs.activation_checkpointing,
        documents=theirs.packing,
        logits_chunk=options.logits_chunk,
        adapters=require("trl", "fine-tuning", "trl").get_peft_config(given.model),
        offload=options.offload,
        flags=FLAGS,
        is_batch_of_replica=True,
    )


def check_extras(config: TuneConfig, ranks_here: int) -> None:
    """Check that the packages are installed."""
    for package in ("transformers", "trl", "datasets", "accelerate", "peft"):
        require_installed(package, "fine-tuning", "trl")


def check_fit(config: TuneConfig, ranks: int, ranks_here: int) -> None:
    """Reject a job whose plan does not fit. A job that is far below the memory is not planned."""
    if config.run.check_memory and config.options.task == "sft" and "RANK" not in os.environ:
        job = planned(config, check_sizes(config, ranks))
        if job.most_bytes > this_machine(config.run, ranks_here).room(ranks_here):
            refuse_what_cannot_fit(job, config.run, ranks, ranks_here)


def _run(config: TuneConfig, dp: int, launch: Launch) -> None:
    """Start torch.distributed, fine-tune, and tear everything down. Collective over the job."""
    on_started_ranks(lambda *_: tune(config, dp, launch), config.run.device, -(-config.timeout_s // 60), launch)


def _dry_run(config: TuneConfig, ranks: int, ranks_here: int, device: str | None, says: bool, checked: Any) -> int:
    """Print the plan, and show which tokens are learned if the records were read."""
    if says and checked is not None:
        print(f"the first record, learned in [[ ]]: {sample(checked)}")
    return dry_run(planned(config, check_sizes(config, ranks)), config.run, ranks, ranks_here, device, says=says)


FINETUNE: Command[TuneConfig, int] = Command(load_config, check_sizes, check_extras, check, _run, _dry_run, check_fit)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one rank, or start all of them; return the exit status."""
    return run_command(FINETUNE, argv)
