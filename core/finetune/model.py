"""The model of a fine-tuning job: found and judged before ranks start, then loaded in slices, adapted and wrapped."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import torch

from core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from core.distributed.distributed_data_parallel_config import STRATEGIES
from core.finetune.config import TINY, TuneConfig
from core.hugging_face import PlanError, add_lora, load_split, read_plan, stages_config
from core.hugging_face.experts import check_experts
from core.hugging_face.stages import find_cut
from core.hugging_face.tiny import families, families_with_policy, tiny_config
from core.hugging_face.transformers_plans import transformers_package
from core.pipeline_parallel import PipelineLayout, plan_pipeline, wrap_stages
from core.training.errors import ConfigError
from core.training.model_config import DTYPES

CHAT = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MARKS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


def directory_of(config: TuneConfig) -> Path:
    """Where the model lies; a tiny one is made there by `make_tiny`."""
    path = config.model.path
    if path.startswith(TINY):
        name = path.removeprefix(TINY)
        return config.run.directory / "tiny" / f"{name}-{config.model.sequence_length}-{config.run.seed}"
    return Path(path)


def causal_class(config: Any, path: str) -> Any:
    """The class of models that are trained. ConfigError for a family without one."""
    transformers = transformers_package()
    try:
        return transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    except KeyError:
        raise ConfigError(
            f"--model.path {path}: model type {config.model_type!r} has no causal language model, which is what this "
            "job trains"
        ) from None


def check_model(config: TuneConfig) -> None:
    """ConfigError for a model that cannot be read, or cannot be split as asked. Reads its configuration alone."""
    transformers = transformers_package()
    path = config.model.path
    if path.startswith(TINY):
        make_tiny(config)
    elif not (Path(path) / "config.json").is_file():
        raise ConfigError(
            f"--model.path {path} holds no config.json; give a checkpoint directory, or {TINY}FAMILY for a small "
            "random model"
        )
    directory = directory_of(config)
    try:
        configuration = transformers.AutoConfig.from_pretrained(directory)
        kind = causal_class(configuration, path)
        with torch.device("meta"):
            model = kind(configuration)
        if config.parallel.tp > 1:
            read_plan(model).check_size(config.parallel.tp)
        if config.parallel.ep > 1:
            check_experts(model, config.parallel.ep)
        if config.parallel.pp > 1:
            find_cut(model)
            layout_of(config)
    except PlanError as error:
        parallel = config.parallel
        sizes = f"--parallel.tp {parallel.tp}, --parallel.pp {parallel.pp} and --parallel.ep {parallel.ep}"
        raise ConfigError(f"{sizes}: {error}") from error
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"--model.path {path}: {str(error).strip().splitlines()[0]}") from error
    if getattr(configuration, "output_router_logits", False):
        raise ConfigError(
            f"--model.path {path}: its configuration asks for output_router_logits, a loss of routers that this job "
            "does not add; set it to false in config.json"
        )
    longest = getattr(configuration, "max_position_embeddings", None)
    if isinstance(longest, int) and config.model.sequence_length > longest:
        raise ConfigError(
            f"--model.sequence-length {config.model.sequence_length} is longer than the model's positions, {longest}"
        )


def load_tokenizer(config: TuneConfig) -> Any:
    """The tokenizer beside the model. ConfigError where there is none."""
    directory = directory_of(config)
    try:
        return transformers_package().AutoTokenizer.from_pretrained(directory)
    except Exception as error:  # whatever is missing or broken
        told = str(error).strip().splitlines()[0] if str(error).strip() else repr(error)
        raise ConfigError(f"--model.path {config.model.path}: its tokenizer cannot be read: {told}") from error


def make_tiny(config: TuneConfig) -> None:
    """A small random model of a family, and a tokenizer of bytes with a chat template, unless they are there."""
    directory = directory_of(config)
    if (directory / "config.json").is_file():
        return
    wanted = config.model.path.removeprefix(TINY)
    known = {**families(), **families_with_policy()}
    types = (wanted, f"{wanted}_text")  # a family of several towers has its text model's type beside its own
    found = [kind for name, kind in known.items() if name == wanted or getattr(kind, "model_type", "") in types]
    if not found:
        raise ConfigError(f"--model.path {config.model.path}: no family with a plan or a policy is called {wanted!r}")
    tokenizer = byte_tokenizer()
    sizes: dict[str, Any] = {"vocab_size": len(tokenizer)}
    sizes["max_position_embeddings"] = max(64, config.model.sequence_length)
    sizes |= {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    configuration = tiny_config(found[0], {name: size for name, size in sizes.items() if hasattr(found[0], name)})
    kind = causal_class(configuration, config.model.path)
    with torch.random.fork_rng():
        torch.manual_seed(config.run.seed)
        model = kind(configuration).float()
    partial = directory.with_name(f"{directory.name}.{os.getpid()}.partial")
    model.save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    try:
        partial.rename(directory)
    except OSError:  # another rank of this machine was first
        shutil.rmtree(partial)


def byte_tokenizer() -> Any:
    """A tokenizer of the package `transformers` with one token for each byte, three marks and a chat template."""
    import tokenizers

    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {mark: number for number, mark in enumerate((*MARKS, *alphabet))}
    inner = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = tokenizers.decoders.ByteLevel()
    tokenizer = transformers_package().PreTrainedTokenizerFast(
        tokenizer_object=inner, eos_token=MARKS[2], pad_token=MARKS[0], additional_special_tokens=[MARKS[1]]
    )
    tokenizer.chat_template = CHAT
    return tokenizer


def layout_of(config: TuneConfig) -> PipelineLayout:
    """Where the layers of the model lie. ConfigError for more stages than the model has layers."""
    text = transformers_package().AutoConfig.from_pretrained(directory_of(config)).get_text_config()
    try:
        return plan_pipeline(text.num_hidden_layers, config.parallel.pp)
    except ValueError as error:
        raise ConfigError(f"--parallel.pp {config.parallel.pp}: {error}") from error


def build_stages(config: TuneConfig, device: torch.device) -> list[Any]:
    """The split model on this rank's device, with adapters if asked; of a pipeline, this rank's stage. Collective."""
    directory = directory_of(config)
    parallel = config.parallel
    try:
        configuration = transformers_package().AutoConfig.from_pretrained(directory)
        kind = causal_class(configuration, config.model.path)
        options = {"dtype": DTYPES[config.model.dtype], "device": device, "parallel_output": parallel.tp > 1}
        if parallel.pp > 1:
            stages = load_split(directory, kind, layout=layout_of(config), **options)
        else:
            stages = [load_split(directory, kind, **options)]
        for stage in stages:
            stage.config.use_cache = False
        if config.lora.r is not None:
            adapters = _lora_config(config)
            stages = add_lora(stages, adapters) if parallel.pp > 1 else [add_lora(stages[0], adapters)]
    except PlanError as error:
        raise ConfigError(str(error)) from error
    for stage in stages:
        if config.model.gradient_checkpointing:
            stage.gradient_checkpointing_enable({"use_reentrant": False})
    return stages


def _lora_config(config: TuneConfig) -> Any:
    import peft

    options = config.lora
    return peft.LoraConfig(
        r=options.r,
        lora_alpha=options.alpha,
        lora_dropout=options.dropout,
        target_modules=list(options.targets) or "all-linear",
        task_type="CAUSAL_LM",
    )


def wrap_model(config: TuneConfig, stages: list[Any]) -> list[DistributedDataParallel]:
    """The stages in their wrappers, sharded over data ranks as asked. Collective."""
    zero = config.parallel.zero
    options = DistributedDataParallelConfig(
        data_parallel_sharding_strategy=STRATEGIES[zero],
        use_distributed_optimizer=zero > 0,
        overlap_grad_reduce=True,
        overlap_param_gather=zero in (1, 2),
        check_for_nan_in_grad=True,
    )
    if config.parallel.pp > 1:
        return wrap_stages(stages_config(layout_of(config), config.parallel.tp), options, stages)
    return [DistributedDataParallel(None, options, stage) for stage in stages]
