"""Parse the command line: this package's options first, then the options of TRL and Transformers."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import make_dataclass, replace
from typing import Any, NamedTuple, NoReturn

from core.extras import require
from core_plan.job.config import RunOptions
from core_plan.job.errors import ConfigError
from core_train.commands.model_directory import one_line
from core_train.finetune.config import TASKS, TINY, TuneConfig, TuneOptions

SHORT = {"--model": "--model_name_or_path", "--steps": "--max_steps"}
# Options of TRL and Transformers that are rejected, and the reason.
REFUSED = {
    "bf16": "give --precision bf16",
    "fp16": "give --precision fp16",
    "load_in_4bit": "weights of 4 bits are not split; leave it out",
    "load_in_8bit": "weights of 8 bits are not split; leave it out",
    "fsdp": "give --zero 3",
    "deepspeed": "give --zero, --offload",
    "router_aux_loss_coef": "a loss of routers is not offered",
    "push_to_hub": "nothing is sent; run hf upload after the run",
    "trust_remote_code": "code of a model's directory is not run; leave it out",
}


class Arguments(NamedTuple):
    """Parsed options of TRL and Transformers.

    Attributes:
        theirs: An SFTConfig, DPOConfig, RewardConfig or TrainingArguments.
        model: TRL's ModelConfig.
    """

    theirs: Any
    model: Any


def load_config(argv: Sequence[str]) -> TuneConfig:
    """Parse this package's options.

    The options of Transformers are parsed later, because TrainingArguments starts torch.distributed under a launcher.

    Args:
        argv: Words of the command line.

    Returns:
        The configuration, with all words for `read_arguments`.

    Raises:
        ConfigError: If an option of this package cannot be read.
    """
    words = [SHORT.get(name, name) + equals + value for name, equals, value in (word.partition("=") for word in argv)]
    early = make_dataclass("Early", [("use_cpu", bool, False)])
    parser = _parser(TuneOptions, early, add_help=False)
    options, found, rest = parser.parse_args_and_config(words, return_remaining_strings=True)
    if {"-h", "--help"} & set(rest):
        _parser(TuneOptions, *_kinds(options.task)).print_help()
        sys.exit(0)
    run = RunOptions(
        ranks=options.ranks,
        threads_per_rank=options.threads_per_rank,
        device="cpu" if found.use_cpu else "auto",
        check_memory=options.check_memory,
    )
    return TuneConfig(run=run, options=options, given=tuple(words))


def read_arguments(config: TuneConfig, dp: int) -> Arguments:
    """Parse the options of TRL and Transformers. A rank must have started torch.distributed.

    Args:
        config: Configuration of `load_config`.
        dp: Number of replicas.

    Returns:
        The options, with this command's defaults.

    Raises:
        ConfigError: If an option cannot be read, or cannot be obeyed.
    """
    options = config.options
    parser = _parser(TuneOptions, *_kinds(options.task))
    multiple = {None: 1, "ring_attn": 2 * options.sp, "all_to_all": options.sp}.get(options.sequence_mode, options.tp)
    if not any("gradient_checkpointing" in word.replace("-", "_") for word in config.given):
        # TRL sets its default by the name that transformers has deprecated, and each rank warns.
        parser.set_defaults_with_config(activation_checkpointing=options.task != "classification")
    parser.set_defaults_with_config(
        model_name_or_path=f"{TINY}qwen3",
        output_dir="runs/finetune",
        report_to="none",
        bf16=False,  # the precision is the layout's
        router_aux_loss_coef=0.0,
        assistant_only_loss=None,  # the records decide
        pad_to_multiple_of=multiple if multiple > 1 else None,
        dataloader_drop_last=options.pp > 1,  # a smaller batch has too few microbatches
    )
    try:
        _, theirs, model = parser.parse_args_and_config(config.given)
        if options.keep_best:
            every = {"eval_steps": theirs.eval_steps or 10, "save_steps": theirs.eval_steps or 10}
            best = {"load_best_model_at_end": True, "metric_for_best_model": "eval_loss", "greater_is_better": False}
            theirs = replace(theirs, eval_strategy="steps", save_strategy="steps", save_total_limit=2, **every, **best)
    except (ValueError, OSError, ImportError) as error:
        raise ConfigError(one_line(error)) from error
    for name, words in REFUSED.items():
        if getattr(theirs, name, None) or getattr(model, name, None):
            raise ConfigError(f"--{name}: {words}")
    if model.dtype not in (None, "auto", "float32"):
        raise ConfigError("--dtype: give --precision")
    if not options.data:
        raise ConfigError(f"--task {options.task} needs records; give --data FILE")
    if options.keep_best and not (options.eval_data or options.validation_fraction):
        raise ConfigError("--keep_best needs data to evaluate on; give --eval_data FILE or --validation_fraction 0.05")
    if options.global_batch_size is not None:
        rows = dp * theirs.per_device_train_batch_size
        theirs.gradient_accumulation_steps, rest = divmod(options.global_batch_size, rows)
        if rest:
            raise ConfigError(
                f"--global_batch_size {options.global_batch_size} is not a multiple of dp {dp} x "
                f"--per_device_train_batch_size {theirs.per_device_train_batch_size} = {rows}"
            )
    return Arguments(theirs, model)


def _kinds(task: str) -> tuple[Any, Any]:
    trl = require("trl", "fine-tuning", "trl")
    place = require("transformers", "fine-tuning", "transformers") if task == "classification" else trl
    return getattr(place, TASKS[task][1]), trl.ModelConfig


def _parser(*kinds: Any, **options: Any) -> Any:
    """Return TRL's parser of dataclasses, which raises ConfigError in one line."""
    trl = require("trl", "fine-tuning", "trl")

    class Parser(trl.TrlParser):  # type: ignore[name-defined]
        def error(self, message: str) -> NoReturn:
            raise ConfigError(message)

    return Parser(kinds, prog="python -m core finetune", allow_abbrev=False, **options)
