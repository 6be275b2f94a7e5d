"""Options of the fine-tuning command: layouts have theirs here, and TRL and Transformers name all others."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, make_dataclass
from typing import Any, Literal, NamedTuple, NoReturn

from core.extras import require
from core_plan.job.config import RunConfig, RunOptions
from core_plan.job.errors import ConfigError
from core_train.commands.model_directory import one_line

TINY = "tiny:"  # before a model type, in place of a directory: a small random model
# Task -> (trainer, class of its arguments, auto class of its model).
TASKS: dict[str, tuple[str, str, str]] = {
    "sft": ("SFTTrainer", "SFTConfig", "AutoModelForCausalLM"),
    "dpo": ("DPOTrainer", "DPOConfig", "AutoModelForCausalLM"),
    "reward": ("RewardTrainer", "RewardConfig", "AutoModelForSequenceClassification"),
    "classification": ("Trainer", "TrainingArguments", "AutoModelForSequenceClassification"),
}
# Options that would have no effect here, or another one than in TRL.
REFUSED = {
    "dtype": "give --precision",
    "load_in_4bit": "weights of 4 bits are not split; leave it out",
    "load_in_8bit": "weights of 8 bits are not split; leave it out",
    "router_aux_loss_coef": "a loss of routers is not offered",
    "push_to_hub": "nothing is sent; run hf upload after the run",
    "trust_remote_code": "code of a model's directory is not run; leave it out",
}
KEEP_BEST: dict[str, Any] = {"load_best_model_at_end": True, "metric_for_best_model": "eval_loss"}
KEEP_BEST |= {"eval_strategy": "steps", "eval_steps": 10, "save_strategy": "best", "save_total_limit": 2}


def option(default: Any, words: str) -> Any:
    """Return a dataclass field with its help."""
    given: dict[str, Any] = {"default_factory": list} if default == [] else {"default": default}
    return field(metadata={"help": words}, **given)


@dataclass(frozen=True)
class TuneOptions:
    """Options of this package."""

    task: Literal["sft", "dpo", "reward", "classification"] = option("sft", "what the model learns from its records")
    data: list[str] = option([], "files of JSON, parquet or csv, directories, or names in huggingface_hub's cache")
    eval_data: list[str] = option([], "such files for the evaluation loss")
    validation_fraction: float = option(0.0, "share of the data that is held out for the evaluation loss")
    ranks: int = option(2, "processes to start, if no launcher (torchrun, SLURM) has started this one")
    tp: int = option(1, "tensor parallel: ranks that share each layer")
    pp: int = option(1, "stages of a pipeline, by the schedule 1F1B")
    ep: int = option(1, "data ranks that share the experts of a layer")
    sp: int = option(1, "ranks that share each sequence, in addition to those of tp")
    sp_mode: Literal["split_gather", "ring", "all_to_all", "ring_attn"] | None = option(None, "how sequences are split")
    zero: Literal[0, 1, 2, 3] = option(1, "shard 1 the optimizer's state, 2 gradients too, 3 parameters too")
    offload: bool = option(False, "keep the optimizer's state on the CPU, and step there")
    precision: Literal["fp32", "bf16", "fp16"] = option("fp32", "of parameters; the optimizer keeps fp32 copies")
    logits_chunk: int | None = option(None, "tokens whose logits are computed at a time; 0 for all")
    keep_best: bool = option(False, "the model that is written is the one with the lowest evaluation loss")
    check_memory: bool = option(True, "refuse a job whose plan needs far more memory than is here")


@dataclass(frozen=True)
class TuneConfig(RunConfig):
    """The words of a command line, of which only this package's options are parsed."""

    options: TuneOptions = field(default_factory=TuneOptions)
    words: tuple[str, ...] = ()
    timeout_s: int = 1800  # --ddp_timeout


class Arguments(NamedTuple):
    """All options of a command line."""

    options: TuneOptions
    theirs: Any  # SFTConfig, DPOConfig, RewardConfig or TrainingArguments
    model: Any  # TRL's ModelConfig
    pad_to: int | None  # tokens of a row are padded to a multiple of this


@contextlib.contextmanager
def refusing(where: str) -> Iterator[None]:
    """Raise every error inside as a ConfigError of one line that begins with ``where``."""
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:  # each library has its own
        words = repr(error) if isinstance(error, (KeyError, AttributeError)) else one_line(error)
        raise ConfigError(f"{where}: {words}") from error


def load_config(argv: Sequence[str]) -> TuneConfig:
    """Parse this package's options. TrainingArguments is made later, because it starts torch.distributed."""
    words = ["--model_name_or_path" + word[7:] if word.partition("=")[0] == "--model" else word for word in argv]
    early = make_dataclass("Early", [("use_cpu", bool, False), ("ddp_timeout", int, 1800)])
    parser = _parser(TuneOptions, early, add_help=False)
    options, found, rest = parser.parse_args_and_config(words, return_remaining_strings=True)
    if {"-h", "--help"} & set(rest):
        _parser(TuneOptions, *_kinds(options.task)).print_help()
        sys.exit(0)
    device: Literal["cpu", "auto"] = "cpu" if found.use_cpu else "auto"
    run = RunOptions(ranks=options.ranks, device=device, check_memory=options.check_memory)
    return TuneConfig(run=run, options=options, words=tuple(words), timeout_s=found.ddp_timeout)


def read_arguments(options: TuneOptions, words: Sequence[str]) -> Arguments:
    """Parse all options, with this command's defaults. A rank must have started torch.distributed."""
    parser = _parser(TuneOptions, *_kinds(options.task))
    pad_to = {None: None, "ring_attn": 2 * options.sp, "all_to_all": options.sp}.get(options.sp_mode, options.tp)
    if not any("gradient_checkpointing" in word for word in words):  # TRL's default, and it warns of the name
        parser.set_defaults_with_config(activation_checkpointing=options.task != "classification")
    parser.set_defaults_with_config(
        model_name_or_path=f"{TINY}qwen3",
        output_dir="runs/finetune",
        report_to="none",
        lora_target_modules=["all-linear"],
        lora_task_type="CAUSAL_LM" if options.task in ("sft", "dpo") else "SEQ_CLS",
        dtype=None,
        bf16=False,  # the precision is the layout's
        router_aux_loss_coef=0.0,
        assistant_only_loss=None,  # the records decide
        pad_to_multiple_of=pad_to,
        dataloader_drop_last=options.pp > 1,  # a smaller batch has too few microbatches
        **(KEEP_BEST if options.keep_best else {}),
    )
    with refusing("an option of TRL or Transformers"):
        _, theirs, model = parser.parse_args_and_config(words)
    for name, reason in REFUSED.items():
        if getattr(theirs, name, None) or getattr(model, name, None):
            raise ConfigError(f"--{name}: {reason}")
    if not options.data:
        raise ConfigError(f"--task {options.task} needs records; give --data FILE")
    return Arguments(options, theirs, model, pad_to)


def _kinds(task: str) -> tuple[Any, Any]:
    """Return the classes of a task's arguments and of the model's."""
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
