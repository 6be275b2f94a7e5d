"""The command line: options of this package first, and those of TRL and Transformers when a process may read them."""

from __future__ import annotations

import argparse
import difflib
import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple, NoReturn

from core.extras import require
from core.finetune.config import TASKS, TINY, TuneConfig, TuneOptions
from core.training.config import RunOptions
from core.training.errors import ConfigError

SHORT = {"--model": "--model_name_or_path", "--steps": "--max_steps"}


class Arguments(NamedTuple):
    """theirs: an SFTConfig, DPOConfig, RewardConfig or TrainingArguments. model: TRL's ModelConfig."""

    theirs: Any
    model: Any


def load_config(argv: Sequence[str]) -> TuneConfig:
    """Read the options of this package alone: those of the others start torch.distributed in a launcher's process.

    Raises:
        ConfigError: If an option of this package cannot be read.
    """
    words = [SHORT.get(name, name) + equals + value for name, equals, value in (word.partition("=") for word in argv)]
    if {"-h", "--help"} & set(words):
        task = next((value for name, value in zip(words, words[1:], strict=False) if name == "--task"), "sft")
        _parser(TuneOptions, *_kinds(task)).print_help()
        sys.exit(0)
    options = _parser(TuneOptions).parse_args_and_config(words, return_remaining_strings=True)[0]
    device: Any = "cpu" if _flag(words, "use_cpu") else "auto"
    run = RunOptions(
        ranks=options.ranks,
        threads_per_rank=options.threads_per_rank,
        device=device,
        check_memory=options.check_memory,
    )
    return TuneConfig(run=run, options=options, given=tuple(words))


def read_arguments(config: TuneConfig, dp: int) -> Arguments:
    """Read the options of TRL and Transformers. In a rank torch.distributed has started.

    Args:
        config: What `load_config` returned.
        dp: Number of replicas.

    Raises:
        ConfigError: If an option cannot be read, or cannot be obeyed.
    """
    options = config.options
    parser = _parser(TuneOptions, *_kinds(options.task))
    defaults: dict[str, Any] = {"output_dir": "runs/finetune", "report_to": "none"}
    if options.task != "classification":
        defaults["bf16"] = False  # the precision is the layout's
        defaults["pad_to_multiple_of"] = options.multiple if options.multiple > 1 else None
    if options.pp > 1:
        defaults["dataloader_drop_last"] = True  # a smaller batch has too few microbatches
    if options.task in ("sft", "dpo"):
        defaults["router_aux_loss_coef"] = 0.0
    if options.keep_best:
        every = _value(config.given, "eval_steps") or "10"
        defaults |= {"load_best_model_at_end": True, "metric_for_best_model": "eval_loss", "greater_is_better": False}
        defaults |= {"eval_strategy": "steps", "save_strategy": "steps", "eval_steps": every, "save_steps": every}
        defaults["save_total_limit"] = 2
    if _value(config.given, "gradient_checkpointing") is None and not _flag(config.given, "no_gradient_checkpointing"):
        # TRL sets its default by the name that transformers has deprecated, and each rank warns.
        defaults["activation_checkpointing"] = options.task != "classification"
    parser.set_defaults(**defaults)
    try:
        _, theirs, model, unknown = parser.parse_args_and_config(config.given, return_remaining_strings=True)
    except (ValueError, OSError, ImportError) as error:
        raise ConfigError(" ".join(str(error).split())) from error
    if unknown:
        raise ConfigError(_what_is_meant(unknown[0], parser))
    _check_theirs(options, theirs, model)
    if options.global_batch_size is not None:
        rows = dp * theirs.per_device_train_batch_size
        if options.global_batch_size % rows:
            raise ConfigError(
                f"--global_batch_size {options.global_batch_size} is not a multiple of dp {dp} x "
                f"--per_device_train_batch_size {theirs.per_device_train_batch_size} = {rows}"
            )
        theirs.gradient_accumulation_steps = options.global_batch_size // rows
    return Arguments(theirs, model)


def changed(config: TuneConfig, **options: Any) -> TuneConfig:
    """Return the configuration with other options of this package."""
    return replace(config, options=replace(config.options, **options))


def _check_theirs(options: TuneOptions, theirs: Any, model: Any) -> None:
    """Refuse options of TRL and Transformers whose place another option has here."""
    instead = {
        "bf16": (theirs.bf16, "give --precision bf16"),
        "fp16": (theirs.fp16, "give --precision fp16"),
        "dtype": (model.dtype not in (None, "auto", "float32"), "give --precision"),
        "load_in_4bit": (model.load_in_4bit, "weights of 4 bits are not split; leave it out"),
        "load_in_8bit": (model.load_in_8bit, "weights of 8 bits are not split; leave it out"),
        "fsdp": (bool(theirs.fsdp), "give --zero 3"),
        "deepspeed": (theirs.deepspeed is not None, "give --zero, --offload"),
        "router_aux_loss_coef": (bool(getattr(theirs, "router_aux_loss_coef", 0)), "a loss of routers is not offered"),
        "push_to_hub": (theirs.push_to_hub, "nothing is sent; run hf upload after the run"),
        "trust_remote_code": (
            getattr(theirs, "trust_remote_code", False),
            "code of a model's directory is not run; leave it out",
        ),
    }
    for name, (given, words) in instead.items():
        if given:
            raise ConfigError(f"--{name}: {words}")
    if model.model_name_or_path is None:
        model.model_name_or_path = f"{TINY}qwen3"
    if not options.data:
        raise ConfigError(f"--task {options.task} needs records; give --data FILE")
    if options.keep_best and not (options.eval_data or options.validation_fraction):
        raise ConfigError("--keep_best needs data to evaluate on; give --eval_data FILE or --validation_fraction 0.05")
    if model.use_peft and options.task in ("reward", "classification") and options.tp * options.pp > 1:
        raise ConfigError(
            f"--use_peft: --task {options.task} trains the head too, which adapters of a split model do not "
            "carry; use --zero in place of --tp and --pp"
        )
    if not 0 <= options.validation_fraction < 1:
        raise ConfigError(f"--validation_fraction {options.validation_fraction:g}: expected at least 0, and below 1")


def _kinds(task: str) -> tuple[Any, Any]:
    trl = require("trl", "fine-tuning", "trl")
    place = require("transformers", "fine-tuning", "transformers") if task == "classification" else trl
    if task not in TASKS:
        raise ConfigError(f"--task {task}: expected one of {', '.join(TASKS)}")
    return getattr(place, TASKS[task][1]), trl.ModelConfig


def _parser(*kinds: Any) -> Any:
    """Return a parser of dataclasses that raises ConfigError in one line."""
    trl = require("trl", "fine-tuning", "trl")

    class Parser(trl.TrlParser):  # type: ignore[name-defined]
        def error(self, message: str) -> NoReturn:
            raise ConfigError(message)

    return Parser(kinds, prog="python -m core.finetune", allow_abbrev=False, formatter_class=argparse.HelpFormatter)


def _value(words: Sequence[str], name: str) -> str | None:
    """Return the word after `--name`, spelled with underscores or dashes."""
    for place, word in enumerate(words):
        found, equals, value = word.partition("=")
        if found.replace("-", "_") == f"__{name}":
            return value if equals else next(iter(words[place + 1 : place + 2]), None)
    return None


def _flag(words: Sequence[str], name: str) -> bool:
    value = _value(words, name)
    given = any(word.partition("=")[0].replace("-", "_") == f"__{name}" for word in words)
    return given and (value is None or value.lower() not in ("false", "0", "no"))


def _what_is_meant(word: str, parser: Any) -> str:
    """Return the refusal of an unknown option, with the nearest one."""
    name = word.partition("=")[0]
    near = difflib.get_close_matches(name, re.findall(r"--[a-z]\w+", parser.format_usage()), 1)
    hint = f"; perhaps you meant {near[0]}" if near else ""
    if "." in name:
        hint += "; the page on fine-tuning lists what options with a dot are called now"
    return f"unknown option {name}{hint}. --help lists the options"
