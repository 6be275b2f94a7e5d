"""A Hugging Face model as a run to plan: its layout, batch and options."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from core.extras import require_installed
from core.hugging_face.read.directory import MOST_LAYERS, read_configuration
from core.hugging_face.read.tiny import tiny_of_bytes
from core.hugging_face.run.sequence import MODES, OVER_CONTEXT, OVER_TENSOR
from core.pipeline_parallel.schedules import plan_pipeline
from core_plan.config_notes import config_notes
from core_plan.hugging_face_source import (
    HuggingFaceSource,
    MetaModel,
    MetaModels,
    as_config_error,
    full_model,
)
from core_plan.job.config import OptimizerOptions, ParallelOptions
from core_plan.job.errors import ConfigError
from core_plan.job.hub import how_to_download
from core_plan.job.model_config import DTYPES, optimizer_config, zero_config
from core_plan.job.plan import share_batch
from core_plan.job.sizes import check_ranks
from core_plan.run_memory import Run

TINY = "tiny:"
MOST = 8 * 4  # bytes of each number in the rule of thumb
MODELS = Path(__file__).parent / "models"  # published models by common name: .json, or .toml of the job


def known_models() -> list[str]:
    """Return the names of published models whose shapes are in the package."""
    return sorted(path.stem for path in MODELS.iterdir())


@dataclass(frozen=True)
class ModelRun:
    """Configuration of a run of a Hugging Face model, as in fine-tuning and `split_model`.

    Attributes:
        model: Path of a config.json, a directory with one, a name in known_models(), or tiny:FAMILY.
        tp, pp, cp, ep: Ranks along each axis.
        dtype: Dtype of the parameters.
        sequence_length: Tokens of a sequence.
        global_batch_size: Sequences of a step.
        optimizer: Options of the optimizer.
        zero: ZeRO stage, 0 to 3.
        sequence_parallel: A mode of `split_model`.
        micro_batch_size: Sequences of a microbatch; None for the job's default.
        recompute: True if each layer is recomputed in backward.
        documents: True if position ids are passed with the tokens, as in fine-tuning's packed windows.
        vpp: Stages per rank, under Interleaved1F1B.
        layers_per_stage: Layers of each stage; empty for an even split.
        logits_chunk: The option of `use_chunked_loss`.
        make_vocab_size_divisible_by: With tp, each rank's vocabulary rows are padded to a multiple of this.
        use_fp8: True if linear layers multiply in 8 bits, as in plugins.
        adapters: A peft.LoraConfig of the trained adapters; None trains all weights.
        offload: True to keep the optimizer's state on the CPU, and step there.
        flags: Names of options in the job's command, by the names in core_plan's. Suggestions use them.
        is_batch_of_replica: True if more ranks have a larger global batch in suggestions, False if they share it.
    """

    model: str
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    zero: int = 1
    sequence_parallel: str | None = None
    dtype: Literal["float32", "bfloat16"] = "float32"
    sequence_length: int = 256
    global_batch_size: int = 8
    micro_batch_size: int | None = None
    recompute: bool = False
    documents: bool = False
    optimizer: OptimizerOptions = field(default_factory=OptimizerOptions)
    vpp: int = 1
    layers_per_stage: tuple[int, ...] = ()
    logits_chunk: int | None = None
    make_vocab_size_divisible_by: int = 1
    use_fp8: bool = False
    adapters: Any = None
    offload: bool = False
    flags: Mapping[str, str] = field(default_factory=dict)
    is_batch_of_replica: bool = False

    @cached_property
    def configuration(self) -> Any:
        """The transformers configuration. No model is built.

        Raises:
            ConfigError: If there is no configuration, or it does not describe a model.
        """
        require_installed("transformers", "planning a Hugging Face model", "transformers")
        try:
            if self.model.startswith(TINY):
                with as_config_error(f"--model {self.model}", LookupError):
                    found = tiny_of_bytes(self.model.removeprefix(TINY), self.sequence_length)
                found.update({"_experts_implementation": None})  # like a configuration read from a directory
                return found
            path = self._file
            if not path.is_file():
                raise LookupError(
                    f"there is no {path}; give a config.json, a directory with one, {', '.join(known_models())}, or "
                    f"{TINY}FAMILY for a small model" + how_to_download(self.model, "model", "config.json")
                )
        except (LookupError, OSError, ValueError) as error:
            words = error.args[0] if isinstance(error, LookupError) else str(error).strip().splitlines()[0]
            raise ConfigError(f"--model {self.model}: {words}") from error
        with as_config_error(f"--model {self.model}"):
            found = read_configuration(path)
        vocabulary = getattr(found.get_text_config(), "vocab_size", None)
        if isinstance(vocabulary, int) and vocabulary < 1:
            raise ConfigError(f"--model {self.model}: its vocab_size is {vocabulary}; expected at least 1")
        layers = getattr(found.get_text_config(), "num_hidden_layers", None)
        if type(layers) is not int or not 1 <= layers <= MOST_LAYERS:
            says = "does not say num_hidden_layers" if layers is None else f"says num_hidden_layers {layers}"
            raise ConfigError(f"--model {self.model}: its configuration {says}; expected 1 to {MOST_LAYERS:,}")
        return found

    @cached_property
    def notes(self) -> tuple[str, ...]:
        """Sentences about entries of the configuration's file that the plan does not follow."""
        if self.model.startswith(TINY):
            return ()
        return tuple(config_notes(json.loads(self._file.read_bytes()), self.configuration))

    @property
    def _file(self) -> Path:
        path = Path(self.model)
        if path.is_dir():
            return path / "config.json"
        published = MODELS / f"{self.model}.json"
        return published if published.is_file() else path

    @property
    def num_layers(self) -> int:
        """Number of layers in the configuration."""
        return int(self.configuration.get_text_config().num_hidden_layers)

    @cached_property
    def made(self) -> MetaModels:
        """Models without memory, shared by plans of this run."""
        return {}

    @property
    def whole(self) -> MetaModel:
        """The complete model without memory."""
        return full_model(self.made, self.configuration, DTYPES[self.dtype], False)

    @property
    def most_bytes(self) -> int:
        """More bytes than a rank holds, by a rule of thumb: a run far below its memory needs no plan.

        Each parameter counts, and so does, for a token, each number that goes into a matrix or comes out. 0 for a model
        that cannot be built.
        """
        try:
            shapes = [param.shape for param in self.whole.model.parameters()]
        except (ValueError, RuntimeError):
            return 0
        text = self.configuration.get_text_config()
        scores = text.num_hidden_layers * getattr(text, "num_attention_heads", 1) * self.sequence_length
        width = sum(2 * max(shape) + sum(shape) for shape in shapes) + scores + 2 * text.vocab_size
        tokens = (self.micro_batch_size or self.global_batch_size) * self.sequence_length
        return MOST * (sum(shape.numel() for shape in shapes) + tokens * width)

    def in_layout(self, **options: Any) -> ModelRun:
        """Return a copy with other options that do not change the configuration, which is not read again."""
        found = replace(self, **options)
        vars(found).update(configuration=self.configuration, notes=self.notes, made=self.made)
        return found


def run_of_model(config: ModelRun, world_size: int, *, on_cpu: bool = False, one_host: bool = True) -> Run:
    """Create the run of a Hugging Face model on `world_size` ranks.

    Raises:
        ConfigError: If it cannot be built. The text has the arithmetic.
    """
    parallel = ParallelOptions(
        tp=config.tp, pp=config.pp, cp=config.cp, ep=config.ep, vpp=config.vpp, layers_per_stage=config.layers_per_stage
    )
    schedule = parallel.schedule_name
    grid = check_ranks(parallel, world_size)
    text, num_layers = config.configuration.get_text_config(), config.num_layers
    try:
        layout = plan_pipeline(
            num_layers,
            config.pp,
            schedule=schedule,
            chunks=config.vpp if config.vpp > 1 else None,
            layers_per_stage=config.layers_per_stage or None,
        )
    except ValueError as error:
        words = str(error).replace("layers_per_stage=", "--layers-per-stage ")
        raise ConfigError(f"--pp {config.pp}: {words}") from error
    micro, count = share_batch(grid, parallel, layout, config.global_batch_size, config.micro_batch_size)
    _check_lengths(config, text)
    source = HuggingFaceSource(
        config.configuration,
        DTYPES[config.dtype],
        micro,
        config.sequence_length,
        layout,
        config.tp,
        config.sequence_parallel,
        config.recompute,
        config.documents,
        adapters=config.adapters,
        logits_chunk=config.logits_chunk,
        vocabulary_multiple=config.make_vocab_size_divisible_by,
        use_fp8=config.use_fp8,
        made=config.made,
    )
    tokens = config.global_batch_size * config.sequence_length
    ddp, optimizer = zero_config(config.zero), optimizer_config(config.optimizer, config.dtype)
    if config.offload:
        optimizer = replace(optimizer, optimizer_cpu_offload=True, optimizer_offload_fraction=1.0)
    return Run(source, grid, layout, schedule, count, tokens, ddp, optimizer, on_cpu, one_host, notes=config.notes)


def _check_lengths(config: ModelRun, text: Any) -> None:
    if config.zero not in range(4):
        raise ConfigError(f"--zero is {config.zero}; expected 0 to 3")
    if config.sequence_parallel not in (None, *MODES):
        raise ConfigError(f"--sequence-parallel is {config.sequence_parallel!r}; expected one of {', '.join(MODES)}")
    for modes, axis, size in ((OVER_TENSOR, "tp", config.tp), (OVER_CONTEXT, "cp", config.cp)):
        if config.sequence_parallel in modes and size == 1:
            raise ConfigError(
                f"--sequence-parallel {config.sequence_parallel} cuts the sequence over --{axis}, which is 1; give "
                f"--{axis} 2 or more"
            )
    if config.cp > 1 and config.sequence_parallel not in OVER_CONTEXT:
        words = " or ".join(OVER_CONTEXT)
        raise ConfigError(f"--cp {config.cp} cuts the sequence by --sequence-parallel {words}; give one of these")
    if config.use_fp8 and config.dtype != "bfloat16":
        raise ConfigError(f"--use-fp8 gives products in bf16, and --dtype is {config.dtype}; give --dtype bfloat16")
    if config.use_fp8 and config.tp * config.pp * config.cp > 1:
        raise ConfigError(
            f"--use-fp8 supports unsplit linear layers only, got tp {config.tp} x pp {config.pp} x cp {config.cp}; set "
            "these sizes to 1, or leave --use-fp8 out"
        )
    longest = getattr(text, "max_position_embeddings", None)
    if isinstance(longest, int) and longest > 0 and config.sequence_length > longest:
        raise ConfigError(f"--seq {config.sequence_length} is longer than the model's positions, {longest}")
