"""A job on one rank: TRL's trainer, or Transformers', over our layouts; trained, saved, and said how to use."""

from __future__ import annotations

import contextlib
import os
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from core import integrations, parallel_state
from core.checkpoint import StopSignal
from core.checkpoint.weights.index import weight_files
from core.extras import require
from core.finetune.arguments import Arguments, read_arguments
from core.finetune.config import TASKS, TuneConfig
from core.finetune.data import Data, describe, read_data, tokenized
from core.finetune.model import check_model, check_sizes, directory_of, load_tokenizer, on_meta, plugin_of
from core.hugging_face.directory import read_configuration
from core.hugging_face.ties import untie_by_files
from core.hugging_face.transformers_plans import peft_by_old_names, transformers_package
from core.jobs.model_directory import classifies, one_line
from core.training.errors import ConfigError
from core.training.hub import is_hub_name
from core.training.job import on_started_ranks
from core.training.launch import Launch
from core.training.own_ranks import STARTED_BY_US
from core.training.reporter import GENERATE, python_command
from core.training.run_directory import check_writable

CARD = "README.md"


@dataclass
class Started:
    """A job whose files are read. trainer: of TRL or Transformers."""

    trainer: Any
    data: Data
    tokenizer: Any

    def sample(self) -> str:
        """Return the first record in one line, with the learned tokens in [[ ]]."""
        return describe(self.trainer.train_dataset[0], self.tokenizer, self.data.classes)


def build(config: TuneConfig, given: Arguments, *, plugin: Any = None, on_ranks: bool = True) -> Started:
    """Make the trainer of a job, which prepares the data.

    Args:
        config: Of the job.
        given: What `read_arguments` returned.
        plugin: The layout; None for one process.
        on_ranks: False to check a job: its model has no memory, and nothing is moved.

    Raises:
        ConfigError: If the records, the template or an option cannot be obeyed.
    """
    options, theirs, directory = config.options, given.theirs, directory_of(given)
    transformers, trl = transformers_package(), require("trl", "fine-tuning", "trl")
    _quiet(transformers)
    tokenizer = load_tokenizer(given)
    configuration = read_configuration(directory)
    known = list(configuration.id2label.values()) if classifies(configuration) else []
    data = read_data(options, theirs.seed, known)
    name, _, auto = TASKS[options.task]
    theirs = replace(theirs) if on_ranks else _for_a_check(options.task, theirs)
    more: dict[str, Any] = {"processing_class": tokenizer}
    adapters = trl.get_peft_config(given.model)
    if adapters is not None:
        adapters.task_type = "CAUSAL_LM" if auto == "AutoModelForCausalLM" else "SEQ_CLS"
        if adapters.target_modules is None:
            adapters.target_modules = "all-linear"
        if adapters.task_type == "SEQ_CLS" and adapters.modules_to_save is None:
            adapters.modules_to_save = ["score"]
    settings = {"dtype": "float32", "attn_implementation": given.model.attn_implementation}
    model: Any = str(directory)
    if options.task == "classification":
        configuration.num_labels = len(data.classes)
        configuration.id2label = dict(enumerate(data.classes))
        configuration.label2id = {each: number for number, each in enumerate(data.classes)}
        configuration.pad_token_id = tokenizer.pad_token_id
        length = min(tokenizer.model_max_length, getattr(configuration, "max_position_embeddings", 1 << 20))
        data = data._replace(train=tokenized(data.train, tokenizer, length))
        if data.held is not None:
            data = data._replace(held=tokenized(data.held, tokenizer, length))
        collate = transformers.DataCollatorWithPadding(tokenizer)
        more["data_collator"] = collate
    elif (
        options.task == "sft" and "messages" in data.train.column_names and "assistant_only_loss" not in _names(config)
    ):
        theirs.assistant_only_loss = True  # answers alone are learned
    place: Any = getattr(trl, name, None) or getattr(transformers, name)
    if options.task == "reward":
        configuration.num_labels = 1
    if not on_ranks:
        place = type(name, (_Checked, place), {})
        model = on_meta(config, configuration, f"--model {directory}")
        if options.task == "dpo" and adapters is None:
            more["ref_model"] = on_meta(config, configuration, f"--model {directory}")
    elif options.task == "sft" and adapters is None and plugin is not None:
        place = type(name, (_ReadInSlices, integrations.over(place)), {"directory": directory})
        model = on_meta(config, configuration, f"--model {directory}").float()
        untie_by_files(model, directory, weight_files(directory))
        if (directory / "generation_config.json").is_file():
            model.generation_config = transformers.GenerationConfig.from_pretrained(directory)
        if given.model.attn_implementation is not None:
            model.set_attn_implementation(given.model.attn_implementation)
    elif options.task == "classification":
        transformers.set_seed(theirs.seed)
        model = getattr(transformers, auto).from_pretrained(directory, config=configuration, **settings)
    else:
        theirs.model_init_kwargs = settings  # TRL reads the model
    if options.task != "classification":
        more["peft_config"] = adapters
    elif adapters is not None:
        import peft

        with peft_by_old_names():
            model = peft.get_peft_model(model, adapters)
    if plugin is not None:
        place, more["plugin"] = integrations.over(place), plugin
        if options.task != "dpo" and not issubclass(place, _Unmoved):  # TRL may compute the reference before the split
            place = type(name, (_Unmoved, place), {})
    try:
        with peft_by_old_names():
            trainer = place(model=model, args=theirs, train_dataset=data.train, eval_dataset=data.held, **more)
    except (ValueError, TypeError, RuntimeError, KeyError, ImportError) as error:  # TRL's refusals
        raise ConfigError(one_line(error)) from error
    if options.task == "classification":
        trainer.model_accepts_loss_kwargs = False  # heads of classes take a mean, also if they are given a number
    elif options.pp > 1 and theirs.packing:
        trainer.data_collator = _in_rows(trainer.data_collator)
    return Started(trainer, data, tokenizer)


def _in_rows(collate: Any) -> Any:
    """Return TRL's collator of packed records with a row for each, which a pipeline cuts a batch by."""
    collate.padding_free, collate.return_position_ids = False, True

    def stacked(rows: Any) -> Any:
        batch = collate(rows)
        del batch["attention_mask"]  # documents are kept apart by their positions
        batch["labels"][batch["position_ids"] == 0] = -100
        return batch

    return stacked


class _Unmoved:
    """Parts of a trainer that leaves its model where it is. The split moves each rank's slices."""

    def _move_model_to_device(self, model: Any, device: Any) -> None:
        pass


class _Checked(_Unmoved):
    """Parts of a trainer that is built to check a job."""

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()  # type: ignore[misc]
        self.accelerator.prepare_model = lambda model, **options: model  # type: ignore[attr-defined]


class _ReadInSlices(_Unmoved):
    """Parts of a trainer whose ranks read their slices of a directory, when the model is split."""

    directory: Path | str

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        self.directory = resume_from_checkpoint

    def _boost(self, model: Any, optimizer: Any) -> Any:
        boosted, prepared = super()._boost(model, optimizer)  # type: ignore[misc]
        self.booster.load_model(boosted, self.directory)  # type: ignore[attr-defined]
        return boosted, prepared


def _for_a_check(task: str, theirs: Any) -> Any:
    return replace(theirs, precompute_ref_log_probs=False) if task == "dpo" else replace(theirs)


def check(config: TuneConfig, world: int) -> Started:
    """Make every check of a start in this process, and return the job on a model without memory.

    Raises:
        ConfigError: If the job cannot start.
    """
    given = read_arguments(config, check_sizes(config, world))
    check_writable(Path(given.theirs.output_dir), "--output_dir")
    check_model(config, given)
    _check_trackers(given.theirs.report_to)
    started = build(config, given, on_ranks=False)
    if not len(started.trainer.train_dataset):
        raise ConfigError("no record is left to train on; --max_length is shorter than all of them")
    return started


def _check_trackers(names: list[str]) -> None:
    """Refuse a tracker that is unknown or not installed: each callback looks for its package when it is made."""
    import transformers.integrations

    try:
        for kind in transformers.integrations.get_reporting_integration_callbacks(names):
            kind()
    except (ValueError, RuntimeError, ImportError) as error:
        raise ConfigError(f"--report_to {' '.join(names)}: {one_line(error)}") from error


def run_tuning(config: TuneConfig, plan: int, launch: Launch) -> None:
    """Start torch.distributed, fine-tune, and tear everything down. Collective over the job."""

    def run(device: torch.device, prepares_data: bool, keeps: bool) -> None:
        tune(config, plan, launch)

    on_started_ranks(run, config.run.device, config.options.timeout_minutes, launch)


def tune(config: TuneConfig, dp: int, launch: Launch | None = None) -> Any:
    """Fine-tune on started ranks, and return the trainer. Collective."""
    given = read_arguments(config, dp)
    if launch is not None and STARTED_BY_US not in os.environ:  # no process has checked
        check_model(config, given)
        _check_trackers(given.theirs.report_to)
    theirs = given.theirs
    try:
        plugin = plugin_of(config, given)
    except ValueError as error:
        raise ConfigError(one_line(error)) from error
    theirs.activation_checkpointing = theirs.gradient_checkpointing = False  # the plugin does it
    started = build(config, given, plugin=plugin)
    trainer, folder = started.trainer, Path(theirs.output_dir).resolve()
    if is_hub_name(given.model.model_name_or_path):  # the cache is of this machine alone
        _name_base(trainer.model, given.model.model_name_or_path)
    first = dist.get_rank() == 0
    if first:
        print(_says(config, dp, theirs, started, folder), flush=True)
    resume = theirs.resume_from_checkpoint
    if resume in (True, "true", "True") or (resume is None and launch is not None and launch.restarts):
        resume = transformers_package().trainer_utils.get_last_checkpoint(str(folder))
    with _stopping(trainer):
        try:
            trainer.train(resume_from_checkpoint=resume)
        except ValueError as error:
            raise ConfigError(one_line(error)) from error
    trainer.save_model(str(folder))
    if first:
        if trainer.state.best_model_checkpoint is not None:
            best = Path(trainer.state.best_model_checkpoint)
            print(f"the lowest evaluation loss, {trainer.state.best_metric:.4f}, is that of {best.name}", flush=True)
        write_card(config, given, trainer, folder)
        print(f"the {'adapter' if given.model.use_peft else 'model'} is in {folder}/", flush=True)
        if TASKS[config.options.task][2] == "AutoModelForCausalLM":
            has_template = started.tokenizer.chat_template is not None
            print(how_to_generate(folder, chat=has_template, python=python_command()), flush=True)
    parallel_state.destroy_model_parallel()
    return trainer


def how_to_generate(folder: Path, *, chat: bool, python: str = "python") -> str:
    """Return the command that continues a text, which runs from any directory."""
    words = GENERATE.format(python=python, directory=shlex.quote(str(folder)))
    return words + (" --chat --prompt Hello" if chat else " --prompt Hello")


def write_card(config: TuneConfig, given: Arguments, trainer: Any, folder: Path) -> None:
    """Write the card that TRL or Transformers makes, with this run's command. Its lines run from any directory."""
    trainer.hub_model_id = str(folder)
    trainer.args.output_dir = str(folder)
    trainer.create_model_card(model_name=folder.name)
    command = f"cd {shlex.quote(os.getcwd())} && python -m core finetune {shlex.join(config.given)}"
    words = [f"## Layout\n\nOn {dist.get_world_size()} ranks:\n\n    {command}"]
    if TASKS[config.options.task][2] == "AutoModelForCausalLM":
        use = how_to_generate(folder, chat=trainer.processing_class.chat_template is not None)
        words.append("To " + use.replace(": ", ":\n\n    ", 1))
    with (folder / CARD).open("a", encoding="utf-8") as card:
        card.write("\n\n" + "\n\n".join(words) + "\n")


def _says(config: TuneConfig, dp: int, theirs: Any, started: Started, folder: Path) -> str:
    options = config.options
    sharding = ("replicated optimizer", "sharded optimizer", "sharded gradients", "sharded parameters")[options.zero]
    sizes = f"tp {options.tp} x dp {dp} x pp {options.pp} x sp {options.sp}, ep {options.ep}"
    rows = f"{theirs.per_device_train_batch_size} x {theirs.gradient_accumulation_steps} x dp {dp} rows a step"
    unused = f"; fields that are not used: {', '.join(map(repr, started.data.unused))}" if started.data.unused else ""
    held = len(started.data.held) if started.data.held is not None else 0
    return (
        f"{dist.get_world_size()} ranks = {sizes} ({sharding}, {options.precision}); {rows}\n"
        f"data: {', '.join(options.data)}, {len(started.data.train):,} records and {held:,} to evaluate on{unused}; "
        f"the first, learned in [[ ]]: {started.sample()}\n"
        f"writing to {folder}/"
    )


def _name_base(model: Any, name: str) -> None:
    model.config.name_or_path = name
    for adapter in getattr(model, "peft_config", {}).values():
        adapter.base_model_name_or_path = name


def _names(config: TuneConfig) -> set[str]:
    return {word.partition("=")[0].lstrip("-").replace("-", "_") for word in config.given if word.startswith("--")}


@contextlib.contextmanager
def _stopping(trainer: Any) -> Iterator[None]:
    """Inside, a signal that asks to stop ends training with a checkpoint, on all ranks after the same step."""
    from transformers import TrainerCallback

    with StopSignal() as stop:

        class Stop(TrainerCallback):
            def on_step_end(self, args: Any, state: Any, control: Any, **options: Any) -> None:
                if stop.agreed():
                    control.should_training_stop = control.should_save = True

        trainer.add_callback(Stop())
        yield


def _quiet(transformers: Any) -> None:
    transformers.utils.logging.disable_progress_bar()
    if dist.is_initialized() and dist.get_rank() > 0:
        transformers.utils.logging.set_verbosity_error()
