"""``python -m core convert``: convert a trained model to a directory of transformers, and back. One process.

convert runs/latest my-model       a directory that AutoModelForCausalLM.from_pretrained loads
convert my-model runs/start        a checkpoint of step 0, for python -m core generate and load_checkpoint
convert runs/finetune my-model     the result of fine-tuning, a run, checkpoints or an adapter, with adapters merged
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from core.checkpoint import CheckpointError, save_checkpoint
from core.checkpoint.bounded_read import parse_json, read_bytes
from core.checkpoint.plain_files import parse_size
from core.checkpoint.transformers_files import CONFIG, is_of_transformers, read_transformers, write_transformers
from core.extras import MissingExtra
from core.hugging_face.read.directory import look_at
from core.models.gpt import GPTModel
from core.models.transformers_layouts import DTYPES, layout_of
from core.transformer.transformer_config import TransformerConfig
from core_plan.job.config import JobConfig, ModelOptions, ParallelOptions
from core_plan.job.errors import ConfigError
from core_plan.job.hub import cached_model
from core_plan.job.model_config import transformer_config
from core_plan.job.run_directory import CHECKPOINTS
from core_train.commands.generate import UNKNOWN, load_trained, load_tuned, tokenizer_of
from core_train.commands.model_directory import AUTO_CLASS, CLASSIFIER, Tuned
from core_train.tokenizer import END_OF_TEXT, FileTokenizer
from core_train.tokens import TOKENIZER

BYTES = 256  # the vocabulary of a model that was trained on bytes


def export(place: Path, target: Path, *, step: int | None = None, shard_bytes: int) -> str:
    """Write the model of a run for transformers, and return a sentence about the files."""
    trained = load_trained(place, step)
    tokenizer = None if trained.tokenizer == UNKNOWN else tokenizer_of(place, trained)
    more = {} if tokenizer is None else dict.fromkeys(("bos_token_id", "eos_token_id"), tokenizer.end)
    config = trained.model.config
    count, files = write_transformers(target, config, trained.model.state_dict(), more=more, shard_bytes=shard_bytes)
    if isinstance(tokenizer, FileTokenizer):
        (target / TOKENIZER).write_text(tokenizer.tokenizer.to_str())
        named = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END_OF_TEXT}
        (target / "tokenizer_config.json").write_text(json.dumps(named, indent=2) + "\n")
    return f"{target}: {layout_of(config)} of step {trained.step}, {count} tensors in {files} file(s)"


def export_tuned(tuned: Tuned, target: Path, *, shard_bytes: int) -> str:
    """Write a fine-tuned model for transformers with adapters merged, and return a sentence about the files."""
    model = tuned.merged()
    model.save_pretrained(target, max_shard_size=shard_bytes)
    tuned.tokenizer.save_pretrained(target)
    loads = AUTO_CLASS[type(model).__name__.endswith(CLASSIFIER)]
    return f"{target}: {model.config.model_type}, for {loads}.from_pretrained"


def bring_in(place: Path, target: Path) -> str:
    """Write a transformers model as a checkpoint of step 0, and return a sentence about the files."""
    theirs, state = read_transformers(place)
    options = options_for(theirs)
    model = GPTModel(dataclasses.replace(theirs, perform_initialization=False))
    model.load_state_dict(state)
    words = tokenizer_in(place)
    tokenizer = TOKENIZER if words is not None else "bytes" if theirs.vocab_size == BYTES else UNKNOWN
    configuration = {"model": dataclasses.asdict(options), "data": {"tokenizer": tokenizer}}
    report = save_checkpoint(target / CHECKPOINTS, 0, [model], configuration=configuration)
    if words is not None:
        (target / TOKENIZER).write_bytes(words)
    return f"{report.directory}: {len(state)} tensors"


def tokenizer_in(place: Path) -> bytes | None:
    """Return the bytes of a tokenizer's file, if any. Raise ConfigError for a link, or another file under its name."""
    file = place / TOKENIZER
    if not file.exists():
        return None
    try:
        words = read_bytes(file)
        found = parse_json(words)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} cannot be read: {error}") from error
    if not isinstance(found, dict) or "model" not in found:
        raise ConfigError(f"{file} holds no tokenizer, which is a JSON object with a 'model'; it is not copied")
    return words


def options_for(config: TransformerConfig) -> ModelOptions:
    """Return the main job's options for a model. Raise ConfigError for features that they cannot express."""
    options = ModelOptions(
        num_layers=config.num_layers,
        hidden_size=config.hidden_size,
        num_attention_heads=config.num_attention_heads,
        num_query_groups=config.num_query_groups,
        ffn_hidden_size=config.ffn_size,
        sequence_length=config.max_sequence_length,
        normalization=config.normalization,  # type: ignore[arg-type]
        activation=config.activation,  # type: ignore[arg-type]
        position_embedding_type=config.position_embedding_type,  # type: ignore[arg-type]
        add_bias_linear=config.add_bias_linear,
        share_embeddings_and_output_weights=config.share_embeddings_and_output_weights,
        dtype=DTYPES[config.params_dtype],  # type: ignore[arg-type]
        vocab_size=config.vocab_size,
    )
    job = transformer_config(JobConfig(model=options, parallel=ParallelOptions(tp=1)), config.vocab_size)
    for name in ("head_size", "rotary_base", "layernorm_epsilon"):
        ours, asked = getattr(job, name), getattr(config, name)
        if ours != asked:
            raise ConfigError(f"the model's {name} is {asked}; the main job's GPT has {ours}, and no option for it")
    return options


def read_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line; status 2 for one that cannot be."""
    parser = argparse.ArgumentParser(
        prog="python -m core convert", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source", type=Path, help="a run's directory, or a directory that save_pretrained has written")
    parser.add_argument("target", type=Path, help="a directory that is not there yet, or is empty")
    parser.add_argument("--step", type=int, help="of a run: the checkpoint of this step (default: the newest)")
    parser.add_argument("--max-shard-size", default="5GB", help="of a safetensors file (default 5GB)")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Convert in the direction that the source asks for; the exit status."""
    options = read_arguments(arguments)
    try:
        print(convert(options))
    except KeyError as error:
        print(f"error: {options.source / CONFIG} has no entry {error}", file=sys.stderr)
        return 2
    except (ConfigError, CheckpointError, MissingExtra, OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def convert(options: Any) -> str:
    """Convert the model, and return a sentence about the files."""
    source, target = Path(cached_model(str(options.source))), options.target
    if target.exists() and (target.is_file() or any(target.iterdir())):
        raise ConfigError(f"{target} exists; choose another target, or move it away")
    if (source / CONFIG).exists():
        look_at(source)
    if not is_of_transformers(source):
        tuned = load_tuned(source, options.step)
        if tuned is not None:
            return export_tuned(tuned, target, shard_bytes=parse_size(options.max_shard_size))
        return export(source, target, step=options.step, shard_bytes=parse_size(options.max_shard_size))
    if options.step is not None:
        raise ConfigError(f"--step is for a run, and {source} is a model of transformers")
    return bring_in(source, target)
