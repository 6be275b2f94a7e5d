"""The model of a fine-tuning job: found and judged before ranks start, then boosted by a plugin, and read in slices."""

from __future__ import annotations

import copy
import dataclasses
import difflib
import os
import shutil
import warnings
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from core.booster import Booster
from core.booster.plugin import (
    GeminiPlugin,
    GradientCheckpointConfig,
    LowLevelZeroPlugin,
    MoeHybridParallelPlugin,
    TorchDDPPlugin,
    TorchFSDPPlugin,
)
from core.booster.plugin.low_level_zero_model import LowLevelZeroModel
from core.booster.plugin.low_level_zero_optimizer import LowLevelZeroOptimizer
from core.booster.plugin.zero_plugin_base import ZeroPluginBase
from core.checkpoint.weights.index import weight_files
from core.finetune.config import SCORED, TINY, Task, TuneConfig
from core.finetune.model_files import (
    CONFIGURATION,
    GENERATION,
    check_weights,
    classifies,
    model_of_files,
    one_line,
    read_settings,
)
from core.finetune.plan import sequence_mode, zero_stage
from core.finetune.torch_plugins import TorchEngine, boosted_by_torch
from core.hugging_face import PlanError, read_plan, use_chunked_loss
from core.hugging_face.checkpoint import is_of_head
from core.hugging_face.cut_places import find_cut
from core.hugging_face.directory import check_files, read_configuration
from core.hugging_face.experts import check_experts
from core.hugging_face.layer_checkpointing import checkpoint_layers
from core.hugging_face.lora import name_in_base, take_off
from core.hugging_face.precision import cast_model
from core.hugging_face.ties import untie_by_files
from core.hugging_face.tiny import BYTE_MARKS, tiny_of_bytes
from core.hugging_face.transformers_plans import transformers_package
from core.optimizer.algorithms.lion import Lion
from core.optimizer.groups.param_key import decays_by_default
from core.training.config import OptimizerOptions
from core.training.errors import ConfigError
from core.training.hub import cached_model, how_to_download, is_hub_name
from core.training.model_config import DTYPES

CHAT = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MARKS = BYTE_MARKS


def directory_of(config: TuneConfig) -> Path:
    """The model's directory: given, in the cache of huggingface_hub, or where `make_tiny` makes a tiny one."""
    path = config.model.path
    if path.startswith(TINY):
        name = path.removeprefix(TINY)
        return config.run.directory / "tiny" / f"{name}-{config.model.sequence_length}-{config.run.seed}"
    return Path(cached_model(path))


def model_class(config: Any, path: str, task: Task = "causal") -> Any:
    """The class of models that are trained. ConfigError for a family without one."""
    transformers = transformers_package()
    what, kinds = "causal language model", transformers.MODEL_FOR_CAUSAL_LM_MAPPING
    if task in SCORED:
        what, kinds = "sequence classifier", transformers.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING
    try:
        return kinds[type(config)]
    except KeyError:
        raise ConfigError(
            f"--model.path {path}: model type {config.model_type!r} has no {what}, which is what --task {task} trains"
        ) from None


def drawn_names(task: Task, model: Any) -> set[str]:
    """The parameters of a classifier's head and pooler, which a directory may lack; none of a task without a head."""
    if task not in SCORED:
        return set()
    return {name for name, _ in model.named_parameters() if is_of_head(model, name)}


def known_classes(config: TuneConfig) -> list[str]:
    """Names of the classes of a directory whose model classifies already; none of another model."""
    if config.data.task not in SCORED:
        return []
    configuration = read_configuration(directory_of(config))
    if not classifies(configuration):
        return []
    return [name for _, name in sorted(configuration.id2label.items())]


def check_model(config: TuneConfig) -> None:
    """ConfigError for a model that cannot be read, or cannot be split as asked. Reads no tensor."""
    path = config.model.path
    if path.startswith(TINY):
        make_tiny(config)
    elif not (directory_of(config) / "config.json").is_file():
        lacks = "holds no config.json" if directory_of(config).is_dir() else "is no directory"
        raise ConfigError(
            f"--model.path {path} {lacks}; give a checkpoint directory, or {TINY}FAMILY for a small random model"
            f"{how_to_download(path, 'model')}"
        )
    directory = directory_of(config)
    try:
        configuration = read_configuration(directory)
    except Exception as error:  # any fault of a file
        raise ConfigError(f"--model.path {path}: {one_line(error)}") from error
    model = check_configuration(config, configuration)
    if not path.startswith(TINY):
        check_weights(f"--model.path {directory}", directory, model, drawn_names(config.data.task, model))
    if config.data.task == "reward" and len(known := known_classes(config)) > 1:
        raise ConfigError(f"--model.path {path} has {len(known)} classes, and --task reward needs a model of one score")


def check_configuration(config: TuneConfig, configuration: Any) -> Any:
    """The model without memory. ConfigError for one that cannot be made, or split or trained as asked."""
    path = config.model.path
    try:
        kind = model_class(configuration, path, config.data.task)
        with torch.device("meta"):
            model = kind(configuration)
    except ConfigError:
        raise
    except Exception as error:  # any result of a configuration's values
        raise ConfigError(f"--model.path {path}: {one_line(error)}") from error
    try:
        if config.parallel.tp > 1:
            read_plan(model).check_size(config.parallel.tp)
        if config.parallel.ep > 1:
            check_experts(model, config.parallel.ep)
        if config.parallel.pp > 1:
            layers = find_cut(model).count
            if layers < config.parallel.pp:
                raise ConfigError(f"--parallel.pp {config.parallel.pp}: {layers} layers do not fill so many stages")
    except PlanError as error:
        parallel = config.parallel
        sizes = f"--parallel.tp {parallel.tp}, --parallel.pp {parallel.pp} and --parallel.ep {parallel.ep}"
        raise ConfigError(f"{sizes}: {error}") from error
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
    if config.lora.r is not None:
        check_adapters(config, model)
    return model


def check_adapters(config: TuneConfig, model: Any) -> None:
    """ConfigError for adapters that cannot be added to the model, which has no memory, and for a name of no layer."""
    import peft

    names = [f".{name}" for name, _ in model.named_modules()]
    for target in config.lora.targets:
        if not any(name.endswith(f".{target}") for name in names):
            layers = {name.rpartition(".")[2] for name, each in model.named_modules() if isinstance(each, nn.Linear)}
            near = difflib.get_close_matches(target, layers, n=1) or sorted(layers)
            raise ConfigError(f"--lora.targets {target}: no layer has this name; there is {', '.join(near)}")
    lora = lora_config_of(config, drawn_names(config.data.task, model))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # ranks print them
            adapted = peft.get_peft_model(copy.deepcopy(model), lora, low_cpu_mem_usage=True)
        if reads_slices(config):
            take_off(adapted)
    except ValueError as error:
        raise ConfigError(f"--lora.r {config.lora.r}: {one_line(error)}") from error


def load_tokenizer(config: TuneConfig) -> Any:
    """The tokenizer in the model's directory. ConfigError where there is none."""
    directory = directory_of(config)
    try:
        return transformers_package().AutoTokenizer.from_pretrained(directory, trust_remote_code=False)
    except Exception as error:  # any missing or broken file
        reason = one_line(error)
        raise ConfigError(f"--model.path {config.model.path}: its tokenizer cannot be read: {reason}") from error


def stop_marks(config: TuneConfig, tokenizer: Any) -> list[str]:
    """Marks at which `generate` stops by the files of the model. ConfigError for a file that is broken."""
    marks = {number: str(token) for number, token in tokenizer.added_tokens_decoder.items()}
    found: set[str] = set()
    for name in (GENERATION, CONFIGURATION):
        ids = read_settings(directory_of(config), name).get("eos_token_id")
        found |= {
            marks[number]
            for number in (ids if isinstance(ids, list) else [ids])
            if isinstance(number, int) and number in marks
        }
    return sorted(found)


def configuration_in(directory: Path) -> dict[str, Any]:
    """The configuration in a directory, with all defaults."""
    return dict(read_configuration(directory).to_dict())


def rows_of(config: TuneConfig) -> int:
    """Number of rows of the model's embedding, by its configuration."""
    return int(read_configuration(directory_of(config)).get_text_config(decoder=True).vocab_size)


def make_tiny(config: TuneConfig) -> None:
    """A small random model of a family, and a tokenizer of bytes with a chat template, unless they are there."""
    directory = directory_of(config)
    if (directory / "config.json").is_file():
        return
    tokenizer = byte_tokenizer()
    try:
        configuration = tiny_of_bytes(config.model.path.removeprefix(TINY), config.model.sequence_length)
    except LookupError as error:
        raise ConfigError(f"--model.path {config.model.path}: {error.args[0]}") from error
    kind = model_class(configuration, config.model.path)
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


def plugin_of(config: TuneConfig, micro_batch_size: int) -> ZeroPluginBase:
    """The plugin of a job, if not of torch. A gradient that is not finite ends the run on all ranks, and is named."""
    sizes, mode, zero = config.parallel, sequence_mode(config), zero_stage(config)
    common: dict[str, Any] = {
        "precision": {"float32": "fp32", "bfloat16": "bf16"}[config.model.dtype],
        "max_norm": config.optimizer.clip_grad,
    }
    plugin: ZeroPluginBase
    if sizes.plugin == "gemini":
        plugin = GeminiPlugin(tp_size=sizes.tp, **common)
    elif sizes.plugin == "low_level_zero":
        plugin = LowLevelZeroPlugin(stage=zero, overlap_allgather=True, **common)
    else:
        plugin = MoeHybridParallelPlugin(
            *(sizes.tp, sizes.pp, sizes.ep, sizes.sp if sizes.sp > 1 else None),
            zero_stage=zero,
            enable_sequence_parallelism=mode is not None,
            sequence_parallelism_mode=mode,
            microbatch_size=micro_batch_size,
            gradient_checkpoint_config=GradientCheckpointConfig() if config.model.gradient_checkpointing else None,
            overlap_communication=True,
            overlap_allgather=zero in (1, 2),
            moe_dp_outside=False,
            parallel_output=config.data.task not in SCORED,  # a head of numbers is whole
            make_vocab_size_divisible_by=1,  # no padding but what equal parts need
            logits_chunk=config.model.logits_chunk,
            **common,
        )
    plugin.ddp_config = dataclasses.replace(plugin.ddp_config, check_for_nan_in_grad=True)
    return plugin


def reads_slices(config: TuneConfig) -> bool:
    """True if a rank reads its slices of the directory alone."""
    return config.parallel.plugin == "hybrid" or config.parallel.tp > 1


def boosted(config: TuneConfig, micro_batch_size: int) -> tuple[LowLevelZeroModel, LowLevelZeroOptimizer | TorchEngine]:
    """Model and optimizer, boosted. Collective.

    Each rank has read its slices of the directory; the whole of it where the plugin cuts nothing.
    """
    directory = directory_of(config)
    of_torch = {"torch_ddp": TorchDDPPlugin, "torch_fsdp": TorchFSDPPlugin}.get(config.parallel.plugin)
    plugin = plugin_of(config, micro_batch_size) if of_torch is None else of_torch()
    booster = Booster(plugin=plugin)
    in_slices = reads_slices(config)
    try:
        configuration = read_configuration(directory)
        kind = model_class(configuration, config.model.path, config.data.task)
        dtype = DTYPES[config.model.dtype]
        if in_slices:
            with torch.device("meta"):
                model = kind(configuration)
            model = model.float() if dtype is torch.float32 else cast_model(model, dtype)
            untie_by_files(model, directory, weight_files(directory))
        else:
            check_files(directory, dist.get_rank(), dist.get_world_size())
            model = model_of_files(kind, directory, dtype=dtype).train()
        if config.model.gradient_checkpointing and config.parallel.plugin != "hybrid":  # which has an option for it
            checkpoint_layers([model], GradientCheckpointConfig(), find_cut(model).lists)
        if is_hub_name(config.model.path):  # which adapters name as their base: the cache is of this machine alone
            model.name_or_path = config.model.path
        if config.lora.r is not None:
            with torch.random.fork_rng():  # what is drawn for adapters without memory is lost, and drawn by boost
                torch.manual_seed(config.run.seed)
                heads = drawn_names(config.data.task, model)
                model = booster.enable_lora(model, lora_config=lora_config_of(config, heads))
                train_heads(model, heads)
        optimizer = torch_optimizer(config.optimizer, model)
        if isinstance(plugin, (TorchDDPPlugin, TorchFSDPPlugin)):
            return boosted_by_torch(plugin, model, optimizer, config.optimizer.clip_grad)
        if not in_slices:  # the plugin `hybrid` has an option for it
            use_chunked_loss(model, config.model.logits_chunk)
        model, optimizer, *_ = booster.boost(model, optimizer)
        if in_slices:
            booster.load_model(model, directory)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    return model, optimizer


def torch_optimizer(options: OptimizerOptions, model: nn.Module) -> torch.optim.Optimizer:
    """A torch optimizer over what learns; biases and vectors do not decay."""
    learning = [(name, param) for name, param in model.named_parameters() if param.requires_grad]
    groups: list[dict[str, Any]] = [
        {"params": [p for n, p in learning if decays_by_default(n, p)], "wd_mult": 1.0},
        {"params": [p for n, p in learning if not decays_by_default(n, p)], "weight_decay": 0.0, "wd_mult": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    common: dict[str, Any] = {"lr": options.lr, "weight_decay": options.weight_decay}
    betas = options.adam_beta1, options.adam_beta2
    if options.name == "sgd":
        return torch.optim.SGD(groups, momentum=options.sgd_momentum, **common)
    if options.name == "lion":
        return Lion(groups, betas=betas, **common)
    return torch.optim.AdamW(groups, betas=betas, eps=options.adam_eps, **common)


def lora_config_of(config: TuneConfig, heads: Collection[str] = ()) -> Any:
    """A peft.LoraConfig. heads: names of parameters that are trained whole, so that their layers get no adapters."""
    import peft

    options = config.lora
    return peft.LoraConfig(
        r=options.r,
        lora_alpha=options.alpha,
        lora_dropout=options.dropout,
        target_modules=list(options.targets) or "all-linear",
        task_type=None if heads else "CAUSAL_LM",
        exclude_modules=sorted({name.rpartition(".")[0] for name in heads}) or None,
    )


def train_heads(adapted: Any, heads: Collection[str]) -> None:
    """Train the parameters of these names, of a model with adapters, in addition to them."""
    for name, param in adapted.named_parameters():
        if name_in_base(name) in heads:
            param.requires_grad_(True)
