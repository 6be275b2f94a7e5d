"""The model of a job: found and judged before ranks start, and the plugin that lays it out over them."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import torch

from core.booster.plugin import GradientCheckpointConfig, HybridParallelPlugin, MoeHybridParallelPlugin
from core.finetune.arguments import Arguments
from core.finetune.config import TASKS, TINY, TuneConfig
from core.hugging_face import PlanError, read_plan
from core.hugging_face.checkpoint import is_of_head
from core.hugging_face.cut_places import find_cut
from core.hugging_face.directory import read_configuration
from core.hugging_face.experts import check_experts
from core.hugging_face.tiny import BYTE_MARKS, tiny_config, tiny_model, tiny_of_bytes
from core.hugging_face.transformers_plans import transformers_package
from core.jobs.model_directory import check_weights, classifies, one_line
from core.training.errors import ConfigError
from core.training.hub import cached_model, how_to_download
from core.training.sizes import check_divides

CHAT = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] }}<|im_end|>{% endgeneration %}{% else %}{{ message['content'] }}<|im_end|>"
    "{% endif %}{{ '\n' }}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TINY_LENGTH = 1024  # positions of a tiny model, TRL's default length of a record


def directory_of(given: Arguments) -> Path:
    """Return the model's directory: given, in the cache of huggingface_hub, or of a tiny one. Absolute."""
    path = given.model.model_name_or_path
    if path.startswith(TINY):
        return (
            Path(given.theirs.output_dir).resolve().parent / "tiny" / f"{path.removeprefix(TINY)}-{given.theirs.seed}"
        )
    return Path(cached_model(path)).resolve()


def check_model(config: TuneConfig, given: Arguments) -> Any:
    """Judge a model's directory, and how it is to be split; return its configuration. Reads no tensor.

    Raises:
        ConfigError: If the model cannot be read, split or trained as asked.
    """
    path, directory = given.model.model_name_or_path, directory_of(given)
    where = f"--model {path}"
    if path.startswith(TINY):
        make_tiny(given)
    elif not (directory / "config.json").is_file():
        lacks = "holds no config.json" if directory.is_dir() else "is no directory"
        raise ConfigError(
            f"{where} {lacks}; give a checkpoint directory, or {TINY}FAMILY for a small random model"
            f"{how_to_download(path, 'model')}"
        )
    try:
        configuration = read_configuration(directory)
    except Exception as error:  # any fault of a file
        raise ConfigError(f"{where}: {one_line(error)}") from error
    model = on_meta(config, configuration, where)
    drawn = {name for name, _ in model.named_parameters() if is_of_head(model, name)}
    check_weights(
        f"--model {directory}", directory, model, drawn if "Sequence" in TASKS[config.options.task][2] else ()
    )
    _check_split(config, model)
    if getattr(given.theirs, "packing", False):
        _check_records_are_apart(configuration)
    longest, length = getattr(configuration, "max_position_embeddings", None), getattr(given.theirs, "max_length", None)
    if isinstance(longest, int) and length is not None and length > longest:
        raise ConfigError(
            f"--max_length {length} is longer than the model's positions; give --max_length {longest} or less"
        )
    return configuration


def on_meta(config: TuneConfig, configuration: Any, where: str) -> Any:
    """Return the model of a job without memory. ConfigError for one that the task cannot train."""
    task = config.options.task
    kind = problem = getattr(configuration, "problem_type", None)
    if task in ("reward", "classification") and problem in ("multi_label_classification", "regression"):
        raise ConfigError(
            f"{where}: its config.json has problem_type {problem!r}, and --task {task} trains one class of a text, or "
            "a score of pairs; train it with core.integrations.Trainer, or change problem_type"
        )
    if task == "reward" and classifies(configuration) and configuration.num_labels > 1:
        raise ConfigError(f"{where} has {configuration.num_labels} classes, and --task reward needs one score")
    transformers = transformers_package()
    causal = TASKS[task][2] == "AutoModelForCausalLM"
    kinds = (
        transformers.MODEL_FOR_CAUSAL_LM_MAPPING if causal else transformers.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING
    )
    try:
        kind = kinds[type(configuration)]
    except KeyError:
        what = "causal language model" if causal else "sequence classifier"
        raise ConfigError(
            f"{where}: model type {configuration.model_type!r} has no {what}, for --task {task}"
        ) from None
    try:
        with torch.device("meta"):
            return kind(configuration)
    except Exception as error:  # any result of a configuration's values
        raise ConfigError(f"{where}: {one_line(error)}") from error


def _check_split(config: TuneConfig, model: Any) -> None:
    options = config.options
    try:
        if options.tp > 1:
            read_plan(model).check_size(options.tp)
        if options.ep > 1:
            check_experts(model, options.ep)
        if options.pp > 1 and find_cut(model).count < options.pp:
            raise ConfigError(f"--pp {options.pp}: {find_cut(model).count} layers do not fill so many stages")
    except PlanError as error:
        raise ConfigError(f"--tp {options.tp}, --pp {options.pp} and --ep {options.ep}: {error}") from error


def _check_records_are_apart(configuration: Any) -> None:
    """Refuse a family whose packed records see each other. Found on a tiny model of the family.

    Two rows differ in their first record. The change of the second record's logits is compared with the change if both
    are one record.
    """
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        try:
            model = tiny_model(tiny_config(type(configuration))).eval()
        except Exception:  # a family whose small copy cannot be made: TRL's word counts
            return
        one = torch.arange(16).unsqueeze(0) % 7 + 1
        other = one.clone()
        other[:, :8] = other[:, :8] % 5 + 3
        changes = []
        for positions in (torch.arange(8).repeat(2), torch.arange(16)):
            try:
                given = {"position_ids": positions.unsqueeze(0), "use_cache": False}  # a cache hides the positions
                logits = [model(input_ids=ids, **given).logits for ids in (one, other)]
            except (TypeError, ValueError):  # it takes no position_ids
                changes = [1.0, 1.0]
                break
            changes.append(float((logits[0] - logits[1])[:, 8:].abs().max()))
    if changes[0] > 1e-6 * changes[1]:
        raise ConfigError(
            f"--packing: models of type {configuration.model_type!r} do not keep packed records apart by their "
            "position_ids; leave it out"
        )


def check_sizes(config: TuneConfig, world: int) -> int:
    """Return the number of replicas on so many ranks. ConfigError, with the arithmetic, if there is none."""
    options = config.options
    sizes = {"tp": options.tp, "pp": options.pp, "sp": options.sp, "ep": options.ep}
    for name, size in sizes.items():
        if size < 1:
            raise ConfigError(f"--{name} {size}: expected at least 1")
    shared = options.tp * options.pp * options.sp
    check_divides("the number of ranks,", world, f"tp {options.tp} x pp {options.pp} x sp {options.sp} =", shared)
    dp = world // shared
    if options.dp not in (None, dp):
        raise ConfigError(f"--dp {options.dp}: {world} ranks leave {dp} replicas of tp x pp x sp = {shared} ranks each")
    check_divides("data and sequence ranks,", dp * options.sp, "--ep", options.ep)
    for name, size in (("pp", options.pp), ("sp", options.sp)):
        allowed = ("sft", "classification") if name == "pp" else ("sft",)
        if size > 1 and options.task not in allowed:
            raise ConfigError(
                f"--{name} {size}: --task {options.task} compares outputs that are not on one rank then; use dp, tp, "
                "ep and --zero"
            )
    return dp


def plugin_of(config: TuneConfig, given: Arguments) -> HybridParallelPlugin:
    """Return the plugin of a job. ValueError for options that do not go together."""
    options, theirs = config.options, given.theirs
    mode = options.sequence_mode
    sizes = (options.tp, options.pp, *([options.ep] if options.ep > 1 else []))
    kind: Any = MoeHybridParallelPlugin if options.ep > 1 else HybridParallelPlugin
    more = {"moe_dp_outside": False} if options.ep > 1 else {}
    plugin: HybridParallelPlugin = kind(
        *sizes,
        sp_size=options.sp if options.sp > 1 else None,
        precision=options.precision,
        zero_stage=options.zero,
        enable_sequence_parallelism=mode is not None,
        sequence_parallelism_mode=mode,
        microbatch_size=1 if options.pp > 1 else None,
        gradient_checkpoint_config=GradientCheckpointConfig() if theirs.activation_checkpointing else None,
        cpu_offload=options.offload,
        parallel_output=TASKS[options.task][2] == "AutoModelForCausalLM",
        make_vocab_size_divisible_by=1,  # no padding but for equal parts
        logits_chunk=options.logits_chunk,
        **more,
    )
    return plugin


def load_tokenizer(given: Arguments) -> Any:
    """Return the tokenizer in the model's directory. ConfigError if there is none."""
    try:
        tokenizer = transformers_package().AutoTokenizer.from_pretrained(directory_of(given), trust_remote_code=False)
        made = tokenizer("text", add_special_tokens=False)["input_ids"]
    except Exception as error:  # any missing or broken file
        reason = one_line(error)
        raise ConfigError(
            f"--model {given.model.model_name_or_path}: its tokenizer cannot be read: {reason}"
        ) from error
    if not made:  # transformers makes one without words if no file is there
        raise ConfigError(
            f"the model's tokenizer, a {type(tokenizer).__name__}, makes no token of a text; copy the tokenizer's "
            "files (tokenizer.json, tokenizer_config.json) next to config.json"
        )
    return tokenizer


def make_tiny(given: Arguments) -> None:
    """Write a small random model of a family, and a tokenizer of bytes with a chat template, unless they are there."""
    directory, path = directory_of(given), given.model.model_name_or_path
    if (directory / "config.json").is_file():
        return
    try:
        configuration = tiny_of_bytes(path.removeprefix(TINY), TINY_LENGTH)
        kind = transformers_package().MODEL_FOR_CAUSAL_LM_MAPPING[type(configuration)]
    except (LookupError, KeyError) as error:
        raise ConfigError(f"--model {path}: {error.args[0]}") from error
    with torch.random.fork_rng():
        torch.manual_seed(given.theirs.seed)
        model = kind(configuration).float()
    partial = directory.with_name(f"{directory.name}.{os.getpid()}.partial")
    model.save_pretrained(partial)
    byte_tokenizer().save_pretrained(partial)
    try:
        partial.rename(directory)
    except OSError:  # another process was first
        shutil.rmtree(partial)


def byte_tokenizer() -> Any:
    """Return a tokenizer of transformers with one token for each byte, three marks and a chat template."""
    import tokenizers

    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {mark: number for number, mark in enumerate((*BYTE_MARKS, *alphabet))}
    inner = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = tokenizers.decoders.ByteLevel()
    tokenizer = transformers_package().PreTrainedTokenizerFast(
        tokenizer_object=inner,
        eos_token=BYTE_MARKS[2],
        pad_token=BYTE_MARKS[0],
        additional_special_tokens=[BYTE_MARKS[1]],
    )
    tokenizer.chat_template = CHAT
    return tokenizer
