"""This package's options of the fine-tuning command. TRL and Transformers have the others."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from core_plan.job.config import RunConfig

TINY = "tiny:"  # before a model type, in place of a directory: a small random model
# Task -> (the trainer, the class of its arguments, the auto class of its model).
TASKS: dict[str, tuple[str, str, str]] = {
    "sft": ("SFTTrainer", "SFTConfig", "AutoModelForCausalLM"),
    "dpo": ("DPOTrainer", "DPOConfig", "AutoModelForCausalLM"),
    "reward": ("RewardTrainer", "RewardConfig", "AutoModelForSequenceClassification"),
    "classification": ("Trainer", "TrainingArguments", "AutoModelForSequenceClassification"),
}


def option(default: Any, words: str) -> Any:
    """Return a dataclass field with its help."""
    if isinstance(default, list):
        return field(default_factory=list, metadata={"help": words})
    return field(default=default, metadata={"help": words})


@dataclass(frozen=True)
class TuneOptions:
    """Options of this package."""

    task: Literal["sft", "dpo", "reward", "classification"] = option("sft", "what the model learns from its records")
    data: list[str] = option([], "files of JSON, parquet or csv, directories, or names in huggingface_hub's cache")
    eval_data: list[str] = option([], "such files for the evaluation loss")
    validation_fraction: float = option(0.0, "share of the data that is held out for the evaluation loss")
    ranks: int = option(2, "processes to start, if no launcher (torchrun, SLURM) has started this one")
    threads_per_rank: int | None = option(None, "CPU threads; by default the cores, shared out")
    global_batch_size: int | None = option(None, "rows of a step in any layout; sets gradient_accumulation_steps")
    dp: int | None = option(None, "replicas; a number is compared with the one that the other sizes leave")
    tp: int = option(1, "tensor parallel: ranks that share each layer")
    pp: int = option(1, "stages of a pipeline, by the schedule 1F1B")
    ep: int = option(1, "data ranks that share the experts of a layer")
    sp: int = option(1, "ranks that share each sequence, in addition to those of tp")
    sp_mode: Literal["split_gather", "ring", "all_to_all", "ring_attn"] | None = option(
        None, "how the sequence is split; ring_attn if sp is larger than 1"
    )
    zero: Literal[0, 1, 2, 3] = option(1, "shard 1 the optimizer's state, 2 gradients too, 3 parameters too")
    offload: bool = option(False, "keep the optimizer's state on the CPU, and step there")
    precision: Literal["fp32", "bf16", "fp16"] = option("fp32", "of parameters; the optimizer keeps fp32 copies")
    logits_chunk: int | None = option(None, "tokens whose logits are computed at a time; 0 for all")
    keep_best: bool = option(False, "the model that is written is the one with the lowest evaluation loss")
    timeout_minutes: int = option(30, "of a collective")
    check_memory: bool = option(True, "refuse a job whose plan needs far more memory than is here")

    @property
    def sequence_mode(self) -> str | None:
        """The mode that splits the sequence; None if it is not split."""
        return self.sp_mode or ("ring_attn" if self.sp > 1 else None)


@dataclass(frozen=True)
class TuneConfig(RunConfig):
    """Configuration of a fine-tuning job.

    Attributes:
        options: This package's options.
        given: All words of the command line, for TRL's parser.
    """

    options: TuneOptions = field(default_factory=TuneOptions)
    given: tuple[str, ...] = ()
