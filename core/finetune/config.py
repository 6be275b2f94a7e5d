"""Configuration of the fine-tuning job: its own sections, and those that it shares with the main job."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from core.training.config import OptimizerOptions, RunConfig, RunOptions
from core.training.config_file import read_over, read_toml, spell_out, split_config_files
from core.training.errors import ConfigError

TINY = "tiny:"  # before a model type, in place of a directory: a small random model


@dataclass(frozen=True)
class TunedModel:
    """The model to begin from."""

    path: str = (
        "tiny:qwen3"  # a checkpoint directory, a name in huggingface_hub's cache, or tiny:FAMILY, small and random
    )
    dtype: Literal["float32", "bfloat16"] = "float32"  # of the parameters; bfloat16 has fp32 masters in the optimizer
    sequence_length: int = 256  # tokens of one window
    gradient_checkpointing: bool = False  # compute each layer again in backward
    beta: float = 0.1  # of --task dpo: the larger it is, the closer the model stays to the one it begins from
    # tokens whose logits are computed at a time, and again in backward; 0 for all; None: by the size of the logits.
    # torch_ddp and torch_fsdp compute all
    logits_chunk: int | None = None


@dataclass(frozen=True)
class LoraOptions:
    """Adapters in place of all weights."""

    r: int | None = None  # the rank of the adapters; None trains all weights
    alpha: int = 16  # the adapters' product is multiplied by alpha / r
    dropout: float = 0.0  # of an adapter's input
    targets: tuple[str, ...] = ()  # names of linear layers; empty for all but the output layer
    merge: bool = False  # add the adapters to the weights at the end, and write a plain model


Task = Literal["causal", "classification", "reward", "dpo"]
SCORED: tuple[Task, ...] = ("classification", "reward")  # trained with a head of numbers in place of a vocabulary
ROWS: dict[Task, int] = {"causal": 1, "classification": 1, "reward": 2, "dpo": 2}  # of tokens, a record


@dataclass(frozen=True)
class TunedData:
    """Records with "messages" (a chat), "prompt" and "completion", "text", or as Alpaca or ShareGPT has them."""

    # causal: the answers of such records. classification: the "label" of a "text". reward and dpo: that
    # "chosen" is better than "rejected" after a "prompt".
    task: Task = "causal"
    # files of JSON or parquet, directories, or names in huggingface_hub's cache; none for Python's library, as text
    file: tuple[Path, ...] = ()
    weights: tuple[float, ...] = ()  # how often the documents of each file are trained on; none for once
    limit: int | None = None  # so many lines of each file; None for all, and for 100 files of the standard library
    packing: bool = True  # several documents in one window, each seeing itself alone
    eval_file: Path | None = None  # such a file for the validation loss, in place of a fraction of the documents
    validation_fraction: float = 0.05  # of the documents; they are not trained on
    cache: Path = Path("runs/tokens")  # directory of the windows; made once for each file and tokenizer


@dataclass(frozen=True)
class TunedParallel:
    """Sizes of the parallel axes, and the plugin of the Booster."""

    # low_level_zero: dp alone; gemini: dp and tp; torch_ddp and torch_fsdp: dp alone, by torch's own wrappers.
    plugin: Literal["hybrid", "low_level_zero", "gemini", "torch_ddp", "torch_fsdp"] = "hybrid"
    dp: int | None = None  # None for what tp, pp and sp leave; a number is compared with that
    tp: int = 1  # tensor parallel: ranks that share each layer
    pp: int = 1  # stages of a pipeline, by the schedule 1F1B
    ep: int = 1  # data ranks that share the experts of a layer
    sp: int = 1  # ranks that share the sequence of each window, in addition to those of tp
    sp_mode: Literal["split_gather", "ring", "all_to_all", "ring_attn"] | None = None  # None: ring_attn where sp > 1
    # Shards over dp: 1 the optimizer's state, 2 gradients too, 3 parameters too. None: the docs' default.
    zero: Literal[0, 1, 2, 3] | None = None
    timeout_minutes: int = 30  # of a collective


@dataclass(frozen=True)
class TuneConfig(RunConfig):
    """Configuration of the fine-tuning job."""

    optimizer: OptimizerOptions = field(
        default_factory=lambda: OptimizerOptions(lr=1e-4, min_lr=1e-5, warmup_steps=10, adam_beta2=0.999)
    )
    run: RunOptions = field(
        default_factory=lambda: RunOptions(name="finetune", steps=100, global_batch_size=8, ranks=2)
    )
    model: TunedModel = field(default_factory=TunedModel)
    lora: LoraOptions = field(default_factory=LoraOptions)
    data: TunedData = field(default_factory=TunedData)
    parallel: TunedParallel = field(default_factory=TunedParallel)


SHORT_FLAGS = {
    **{"--model": "--model.path", "--data": "--data.file"},
    **{"--task": "--data.task", "--beta": "--model.beta"},
    **{"--eval-data": "--data.eval-file", "--eval-every": "--run.validate-every"},
    **{"--keep-best": "--checkpoint.keep-best"},
    **{f"--{name}": f"--parallel.{name}" for name in ("plugin", "tp", "pp", "dp", "ep", "sp", "zero")},
}
SEVERAL_TIMES = ("--data.file", "--data.weights")  # options whose values may follow one flag, or one flag each


def load_config(argv: Sequence[str]) -> TuneConfig:
    """Read `[--config FILE.toml ...] [--section.option value ...]` over the defaults. ConfigError in one line."""
    files, flags = split_config_files(argv)
    about = "Fine-tune a checkpoint directory. Flags win over --config FILE.toml (may be repeated), files over the "
    about += f"defaults. Short: {', '.join(f'{short} for {long}' for short, long in SHORT_FLAGS.items())}."
    flags = spell_out(flags, {**SHORT_FLAGS, "--checkpoint.async": "--checkpoint.asynchronous"})
    tables = [(file, read_toml(file)) for file in files]
    return read_over(TuneConfig(), tables, gathered(flags, SEVERAL_TIMES), "core.finetune", about, SHORT_FLAGS)


def gathered(flags: Sequence[str], names: Sequence[str]) -> list[str]:
    """Flags in which each of `names` that is given several times is given once, with all its values.

    ConfigError for one without a value.
    """
    values: dict[str, list[str]] = {}
    others: list[str] = []
    place = others
    for word in flags:
        name, equals, value = word.partition("=")
        if word.startswith("--"):
            place = values.setdefault(name, []) if name in names else others
        if place is others:
            others.append(word)
        elif not word.startswith("--"):
            place.append(word)
        elif equals:
            place.append(value)
    for name, found in values.items():
        if not found:
            raise ConfigError(f"{name} has no value; give one or more, or leave it out")
    return [*others, *(word for name, found in values.items() for word in (name, *found))]
