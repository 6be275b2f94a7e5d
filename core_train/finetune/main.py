"""The fine-tuning command: check a job in one process, then train and save on ranks.

The trainers are TRL's and Transformers', in the layouts of `core.integrations`.
"""

from __future__ import annotations

import contextlib
import os
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from core import integrations, parallel_state
from core.booster.plugin import GradientCheckpointConfig, HybridParallelPlugin, MoeHybridParallelPlugin
from core.booster.plugin.dp_plugin_base import planned_world
from core.checkpoint import StopSignal
from core.checkpoint.weights.index import weight_files
from core.extras import require, require_installed
from core.hugging_face import PlanError, read_plan
from core.hugging_face.checkpoint import is_of_head
from core.hugging_face.cut.experts import check_experts
from core.hugging_face.cut.places import find_cut
from core.hugging_face.read.directory import read_configuration
from core.hugging_face.read.ties import untie_by_files
from core.hugging_face.read.tiny import keeps_records_apart, write_tiny
from core.hugging_face.read.transformers_plans import peft_by_old_names, transformers_package
from core_plan.dry_run import dry_run, refuse_what_cannot_fit, this_machine
from core_plan.job.config import ParallelOptions
from core_plan.job.errors import ConfigError
from core_plan.job.hub import cached_model, how_to_download, is_hub_name
from core_plan.job.run_directory import check_writable
from core_plan.job.sizes import check_ranks
from core_plan.machine.launch import Launch
from core_plan.machine.own_ranks import STARTED_BY_US
from core_plan.model_run import ModelRun
from core_train.commands.model_directory import check_weights, classifies, one_line
from core_train.finetune.arguments import Arguments, load_config, read_arguments
from core_train.finetune.config import TASKS, TINY, TuneConfig
from core_train.finetune.data import Data, describe, read_data
from core_train.job import on_started_ranks
from core_train.main import Command, run_command
from core_train.reporter import GENERATE, python_command

TINY_LENGTH = 1024  # positions of a tiny model, TRL's default length of a record
FLAGS = {  # options of a plan, and their names here
    "--micro-batch": "--per_device_train_batch_size",
    "--recompute": "--activation_checkpointing",
    "--cp": "--sp",
    "--sequence-parallel": "--sp_mode",
}


def directory_of(given: Arguments) -> Path:
    """Return the model's directory as an absolute path. A name on the Hub is looked up in the local cache."""
    path = given.model.model_name_or_path
    if path.startswith(TINY):
        name = f"{path.removeprefix(TINY)}-{given.theirs.seed}"
        return Path(given.theirs.output_dir).resolve().parent / "tiny" / name
    return Path(cached_model(path)).resolve()


def check_model(config: TuneConfig, given: Arguments) -> None:
    """Check a model's files and its split. Reads no tensor.

    Raises:
        ConfigError: If the model cannot be read, split or trained as asked.
    """
    options, theirs, directory = config.options, given.theirs, directory_of(given)
    path = given.model.model_name_or_path
    where = f"--model {path}"
    if not path.startswith(TINY) and not (directory / "config.json").is_file():
        lacks = "holds no config.json" if directory.is_dir() else "is no directory"
        raise ConfigError(f"{where} {lacks}; give one, or {TINY}FAMILY{how_to_download(path, 'model')}")
    try:
        if path.startswith(TINY):
            write_tiny(directory, path.removeprefix(TINY), TINY_LENGTH, theirs.seed)
        configuration = read_configuration(directory)
        model = on_meta(options.task, configuration)
        drawn = {name for name, _ in model.named_parameters() if is_of_head(model, name)}
        check_weights(f"--model {directory}", directory, model, drawn if options.task not in ("sft", "dpo") else ())
        if options.tp > 1:
            read_plan(model).check_size(options.tp)
        if options.ep > 1:
            check_experts(model, options.ep)
        if options.pp > 1 and find_cut(model).count < options.pp:
            raise PlanError(f"{find_cut(model).count} layers do not fill so many stages")
    except PlanError as error:
        raise ConfigError(f"--tp {options.tp}, --pp {options.pp} and --ep {options.ep}: {error}") from error
    except ConfigError:
        raise
    except Exception as error:  # any fault of a file, or result of a configuration's values
        raise ConfigError(f"{where}: {one_line(error)}") from error
    if getattr(theirs, "packing", False) and not keeps_records_apart(configuration):
        raise ConfigError(
            f"--packing: models of type {configuration.model_type!r} do not keep packed records apart by their "
            "position_ids; leave it out"
        )
    longest, length = getattr(configuration, "max_position_embeddings", None), getattr(theirs, "max_length", None)
    if isinstance(longest, int) and length is not None and length > longest:
        raise ConfigError(f"--max_length {length} is longer than the model's positions; give {longest} or less")


def on_meta(task: str, configuration: Any, attention: str | None = None) -> Any:
    """Create a task's model on the meta device, in fp32. Raises ValueError if the task cannot train it."""
    if task in ("reward", "classification"):
        problem = getattr(configuration, "problem_type", None)
        if problem not in (None, "single_label_classification"):
            raise ValueError(
                f"its config.json has problem_type {problem!r}, and --task {task} trains one class of a text, or a "
                "score of pairs; train it with core.integrations.Trainer, or change problem_type"
            )
    if task == "reward":
        configuration.num_labels = 1
    auto = getattr(transformers_package(), TASKS[task][2])
    with torch.device("meta"):
        return auto.from_config(configuration, dtype=torch.float32, attn_implementation=attention)


def check_sizes(config: TuneConfig, world: int) -> int:
    """Return the number of replicas on `world` ranks. Raises ConfigError, with the arithmetic, if sizes do not fit."""
    options = config.options
    if min(options.tp, options.pp, options.sp, options.ep) < 1:
        raise ConfigError("--tp, --pp, --sp and --ep: expected at least 1")
    sizes = ParallelOptions(tp=options.tp, pp=options.pp, cp=options.sp, ep=options.ep, dp=options.dp)
    try:
        dp = check_ranks(sizes, world, "sp").dp
    except ConfigError as error:
        raise ConfigError(str(error).replace("--run.", "--").replace("--parallel.", "--")) from error
    for name, size, tasks in (("pp", options.pp, ("sft", "classification")), ("sp", options.sp, ("sft",))):
        if size > 1 and options.task not in tasks:
            raise ConfigError(
                f"--{name} {size}: --task {options.task} compares outputs that are not on one rank then; use dp, tp, "
                "ep and --zero"
            )
    return dp


def plugin_of(config: TuneConfig, given: Arguments) -> HybridParallelPlugin:
    """Create the plugin of a job. Raises ConfigError if options contradict each other."""
    options, mode = config.options, config.options.sequence_mode
    kind: Any = HybridParallelPlugin
    more: dict[str, Any] = {}
    if options.ep > 1:
        kind, more = MoeHybridParallelPlugin, {"ep_size": options.ep, "moe_dp_outside": False}
    try:
        plugin: HybridParallelPlugin = kind(
            tp_size=options.tp,
            pp_size=options.pp,
            sp_size=options.sp if options.sp > 1 else None,
            precision=options.precision,
            zero_stage=options.zero,
            enable_sequence_parallelism=mode is not None,
            sequence_parallelism_mode=mode,
            microbatch_size=1 if options.pp > 1 else None,
            gradient_checkpoint_config=GradientCheckpointConfig() if given.theirs.activation_checkpointing else None,
            cpu_offload=options.offload,
            parallel_output=options.task in ("sft", "dpo"),
            make_vocab_size_divisible_by=1,  # no padding but for equal parts
            logits_chunk=options.logits_chunk,
            **more,
        )
    except ValueError as error:
        raise ConfigError(one_line(error)) from error
    return plugin


def load_tokenizer(given: Arguments) -> Any:
    """Load the tokenizer in the model's directory. Raises ConfigError if there is none."""
    try:
        tokenizer = transformers_package().AutoTokenizer.from_pretrained(directory_of(given), trust_remote_code=False)
        made = tokenizer("text", add_special_tokens=False)["input_ids"]
    except Exception as error:  # any missing or broken file
        where = f"--model {given.model.model_name_or_path}"
        raise ConfigError(f"{where}: its tokenizer cannot be read: {one_line(error)}") from error
    if not made:  # transformers makes one without words if no file is there
        raise ConfigError(
            f"the model's tokenizer, a {type(tokenizer).__name__}, makes no token of a text; copy the tokenizer's "
            "files (tokenizer.json, tokenizer_config.json) next to config.json"
        )
    return tokenizer


def adapters_of(task: str, given: Arguments) -> Any:
    """Return the peft configuration of a job; None without adapters."""
    adapters = require("trl", "fine-tuning", "trl").get_peft_config(given.model)
    if adapters is not None:
        adapters.task_type = "CAUSAL_LM" if task in ("sft", "dpo") else "SEQ_CLS"
        adapters.target_modules = adapters.target_modules or "all-linear"
    return adapters


def build(config: TuneConfig, given: Arguments, plugin: Any = None) -> tuple[Any, Data]:
    """Create the trainer of a job. It tokenizes the records.

    Args:
        config: Configuration of the job.
        given: Options of TRL and Transformers.
        plugin: The layout; None to check a job on a model without memory.

    Returns:
        The trainer and its records.

    Raises:
        ConfigError: If the records, the template or an option cannot be obeyed.
    """
    task, theirs, directory = config.options.task, replace(given.theirs), directory_of(given)
    transformers, trl = transformers_package(), require("trl", "fine-tuning", "trl")
    transformers.utils.logging.disable_progress_bar()
    tokenizer, configuration = load_tokenizer(given), read_configuration(directory)
    data = read_data(config.options, theirs.seed, [*configuration.id2label.values()] * classifies(configuration))
    place: Any = getattr(trl, TASKS[task][0], None) or getattr(transformers, TASKS[task][0])
    more: dict[str, Any] = {"processing_class": tokenizer}
    adapters, attention = adapters_of(task, given), given.model.attn_implementation
    if task == "classification":
        data = _tokenized(data, tokenizer, configuration)
        more["data_collator"] = transformers.DataCollatorWithPadding(tokenizer)
    else:
        more["peft_config"] = adapters
    if task == "sft" and theirs.assistant_only_loss is None:
        theirs.assistant_only_loss = "messages" in data.train.column_names  # answers alone are learned
    settings = {"dtype": "float32", "attn_implementation": attention}
    model: Any = str(directory)  # TRL reads the model
    if plugin is None:
        model = on_meta(task, configuration)
        if task == "dpo":
            theirs.precompute_ref_log_probs = False
            more |= {} if adapters else {"ref_model": on_meta(task, configuration)}
    elif task == "sft" and adapters is None:
        place = type(place.__name__, (_ReadInSlices, integrations.over(place)), {"directory": directory})
        model = on_meta(task, configuration, attention)
        untie_by_files(model, directory, weight_files(directory))
        if (directory / "generation_config.json").is_file():
            model.generation_config = transformers.GenerationConfig.from_pretrained(directory)
    elif task == "classification":
        transformers.set_seed(theirs.seed)
        model = transformers.AutoModelForSequenceClassification.from_pretrained(
            directory, config=configuration, **settings
        )
    else:
        theirs.model_init_kwargs = settings
    if task == "classification" and adapters is not None:
        import peft

        with peft_by_old_names():
            model = peft.get_peft_model(model, adapters)
    if plugin is not None:
        place, more["plugin"] = integrations.over(place), plugin
    try:
        with contextlib.nullcontext() if plugin is not None and task == "dpo" else _unmoved(), peft_by_old_names():
            trainer = place(model=model, args=theirs, train_dataset=data.train, eval_dataset=data.held, **more)
    except (ValueError, TypeError, RuntimeError, KeyError, ImportError) as error:  # TRL's refusals
        raise ConfigError(one_line(error)) from error
    if task == "classification":
        trainer.model_accepts_loss_kwargs = False  # heads of classes take a mean, also if they are given a number
    return trainer, data


def sample(trainer: Any, data: Data) -> str:
    """Return the first record of a job in one line, with the learned tokens in [[ ]]."""
    return describe(trainer.train_dataset[0], trainer.processing_class, data.classes)


def _tokenized(data: Data, tokenizer: Any, configuration: Any) -> Data:
    """Return texts of classification as token ids, and name the classes in the model's configuration."""
    configuration.id2label = dict(enumerate(data.classes))
    configuration.label2id = {each: number for number, each in configuration.id2label.items()}
    configuration.pad_token_id = tokenizer.pad_token_id
    length = min(tokenizer.model_max_length, getattr(configuration, "max_position_embeddings", 1 << 20))

    def encode(rows: Any) -> Any:
        made = rows.map(lambda row: {"input_ids": tokenizer(row["text"], truncation=True, max_length=length).input_ids})
        return made.remove_columns("text").rename_column("label", "labels")

    return data._replace(train=encode(data.train), held=data.held and encode(data.held))


@contextlib.contextmanager
def _unmoved() -> Iterator[None]:
    """Keep trainers that are created in this block from moving their models: the split moves each rank's slices."""
    import accelerate
    import transformers

    with (
        mock.patch.object(transformers.TrainingArguments, "place_model_on_device", False),
        mock.patch.object(accelerate.Accelerator, "prepare_model", lambda self, model, **options: model),
    ):
        yield


class _ReadInSlices:
    """Trainer methods with which each rank reads its slices from a directory once the model is split."""

    directory: Path | str

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        self.directory = resume_from_checkpoint

    def _boost(self, model: Any, optimizer: Any) -> Any:
        boosted, prepared = super()._boost(model, optimizer)  # type: ignore[misc]
        self.booster.load_model(boosted, self.directory)  # type: ignore[attr-defined]
        return boosted, prepared


def check(config: TuneConfig, world: int) -> tuple[Any, Data]:
    """Make every check of a start in this process.

    Args:
        config: Configuration of the job.
        world: Number of ranks.

    Returns:
        The result of `build`, with a model without memory.

    Raises:
        ConfigError: If the job cannot start.
    """
    given = read_arguments(config, check_sizes(config, world))
    check_writable(Path(given.theirs.output_dir), "--output_dir")
    check_model(config, given)
    with planned_world(0, world, torch.device("cpu")):
        plugin_of(config, given)
    trainer, data = build(config, given)
    if not len(trainer.train_dataset):
        raise ConfigError("no record is left to train on; --max_length is shorter than all of them")
    return trainer, data


def tune(config: TuneConfig, dp: int, launch: Launch | None = None) -> Any:
    """Fine-tune on started ranks, and return the trainer. Collective."""
    given, is_first, options = read_arguments(config, dp), dist.get_rank() == 0, config.options
    theirs, path, folder = given.theirs, given.model.model_name_or_path, Path(given.theirs.output_dir).resolve()
    transformers = transformers_package()
    if not is_first:
        transformers.utils.logging.set_verbosity_error()
    if launch is not None and STARTED_BY_US not in os.environ:  # no process has checked
        check_model(config, given)
    plugin = plugin_of(config, given)
    theirs.activation_checkpointing = theirs.gradient_checkpointing = False  # the plugin does it
    trainer, data = build(config, given, plugin)
    if is_hub_name(path):  # the cache is of this machine alone
        trainer.model.config.name_or_path = path
        for adapter in getattr(trainer.model, "peft_config", {}).values():
            adapter.base_model_name_or_path = path
    if is_first:
        rows = f"{theirs.per_device_train_batch_size} x {theirs.gradient_accumulation_steps} x dp {dp} rows a step"
        unused = f"; fields that are not used: {', '.join(map(repr, data.unused))}" if data.unused else ""
        print(
            f"tp {options.tp} x dp {dp} x pp {options.pp} x sp {options.sp}, ep {options.ep}, zero {options.zero}, "
            f"{options.precision}; {rows}\ndata: {', '.join(options.data)}, {len(data.train):,} records{unused}; "
            f"the first, learned in [[ ]]: {sample(trainer, data)}\nwriting to {folder}/",
            flush=True,
        )
    resume = theirs.resume_from_checkpoint
    if resume in (True, "true", "True") or (resume is None and launch is not None and launch.restarts):
        resume = transformers.trainer_utils.get_last_checkpoint(str(folder))
    with _stopping(trainer):
        try:
            trainer.train(resume_from_checkpoint=resume)
        except ValueError as error:
            raise ConfigError(one_line(error)) from error
    trainer.save_model(str(folder))
    trainer.hub_model_id = trainer.args.output_dir = str(folder)  # the card's lines run from any directory
    if is_first:
        trainer.create_model_card(model_name=folder.name)
        best = trainer.state.best_model_checkpoint
        words = f", that of {Path(best).name} with the lowest evaluation loss" if best else ""
        print(f"the {'adapter' if given.model.use_peft else 'model'} is in {folder}/{words}", flush=True)
        if options.task in ("sft", "dpo"):
            chat = " --chat" * (trainer.processing_class.chat_template is not None)
            command = GENERATE.format(python=python_command(), directory=shlex.quote(str(folder)))
            print(f"{command}{chat} --prompt Hello", flush=True)
    parallel_state.destroy_model_parallel()
    return trainer


@contextlib.contextmanager
def _stopping(trainer: Any) -> Iterator[None]:
    """Save a checkpoint and end training after a signal, on all ranks after the same step."""
    from transformers import TrainerCallback

    with StopSignal() as stop:

        class Stop(TrainerCallback):
            def on_step_end(self, args: Any, state: Any, control: Any, **options: Any) -> None:
                if stop.agreed():
                    control.should_training_stop = control.should_save = True

        trainer.add_callback(Stop())
        yield


def planned(config: TuneConfig, dp: int) -> ModelRun:
    """Describe a job to `core_plan`. Raises ConfigError if the task is not planned."""
    options, given = config.options, read_arguments(config, dp)
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
        sequence_parallel=options.sequence_mode,
        dtype="float32" if options.precision == "fp32" else "bfloat16",
        sequence_length=int(theirs.max_length or 1024),
        global_batch_size=rows * theirs.gradient_accumulation_steps * dp,
        micro_batch_size=1 if options.pp > 1 else rows,
        recompute=theirs.activation_checkpointing,
        documents=theirs.packing,
        logits_chunk=options.logits_chunk,
        adapters=adapters_of(options.task, given),
        offload=options.offload,
        flags=FLAGS,
        is_batch_of_replica=True,
    )


def check_extras(config: TuneConfig, ranks_here: int) -> None:
    """Check that the packages are installed."""
    for package in ("transformers", "trl", "datasets", "accelerate", "peft"):
        require_installed(package, "fine-tuning", "trl")


def _check(config: TuneConfig, ranks: int) -> Any:
    """Check a job in the process that starts its ranks. Under a launcher the ranks check it themselves."""
    return None if "RANK" in os.environ else check(config, ranks)


def _run(config: TuneConfig, dp: int, launch: Launch) -> None:
    """Start torch.distributed, fine-tune, and tear everything down. Collective over the job."""
    on_started_ranks(lambda *_: tune(config, dp, launch), config.run.device, config.options.timeout_minutes, launch)


def _dry_run(config: TuneConfig, ranks: int, ranks_here: int, device: str | None, says: bool, checked: Any) -> int:
    """Print the plan, and show which tokens are learned if the records were read."""
    if not says:
        return 0
    if checked is not None:
        print(f"the first record, learned in [[ ]]: {sample(*checked)}")
    job = planned(config, check_sizes(config, ranks))
    return dry_run(job, config.run, ranks, ranks_here, device, says=says)


def check_fit(config: TuneConfig, ranks: int, ranks_here: int) -> None:
    """Reject a job whose plan does not fit. A job that is far below the memory is not planned."""
    if not config.run.check_memory or config.options.task != "sft" or "RANK" in os.environ:
        return
    job = planned(config, check_sizes(config, ranks))
    if job.most_bytes > this_machine(config.run, ranks_here).room(ranks_here):
        try:
            refuse_what_cannot_fit(job, config.run, ranks, ranks_here)
        except ConfigError as error:
            raise ConfigError(str(error).replace("--run.no-check-memory", "--check_memory false")) from None


FINETUNE: Command[TuneConfig, int] = Command(load_config, check_sizes, check_extras, _check, _run, _dry_run, check_fit)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one rank, or start all of them; return the exit status."""
    return run_command(FINETUNE, argv)
