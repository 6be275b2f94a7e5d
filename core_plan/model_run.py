"""A Hugging Face model as a run to plan: its layout, batch and options."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from core.extras import require_installed
from core.hugging_face import Plan, PlanError
from core.hugging_face.cut import parts as cut_parts
from core.hugging_face.cut.places import list_of_layers
from core.hugging_face.read.directory import MOST_LAYERS, read_configuration
from core.hugging_face.read.tiny import tiny_of_bytes
from core.hugging_face.read.transformers_plans import checkpoint_each_layer, read_experts, transformers_package
from core_plan.chunked_head import ChunkedHead
from core_plan.config_notes import config_notes
from core_plan.job.config import OptimizerOptions
from core_plan.job.errors import ConfigError
from core_plan.job.hub import how_to_download
from core_plan.job.model_config import DTYPES
from core_plan.planned_groups import PlannedGroups

NUMBERS = {"layer_idx", "layer_id", "layer_number"}  # attributes of a layer's modules that distinguish equal layers
TINY = "tiny:"
MOST = 8 * 4  # bytes of each number in the rule of thumb
MODELS = Path(__file__).parent / "models"  # published models by common name: .json, or .toml of the job


def known_models() -> list[str]:
    """Return the names of published models whose shapes are in the package."""
    return sorted(path.stem for path in MODELS.iterdir())


@contextmanager
def as_config_error(what: str, but: type[Exception] = ConfigError) -> Iterator[None]:
    """Convert any error of transformers inside, except ``but``, to a ConfigError with ``what`` and the first line."""
    try:
        yield
    except but:
        raise
    except Exception as error:  # type checks, torch's shape errors, a division by zero heads: no common class
        raise ConfigError(f"{what}: {first_line(error)}") from error


def first_line(error: Exception) -> str:
    """Return an error's first line, extended if it ends with a colon, and its type if that is informative."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    count = next((n for n, line in enumerate(lines, 1) if not line.endswith(":")), len(lines))
    words = " ".join(lines[:count])
    if isinstance(error, KeyError):
        return f"it does not know {words}"
    speaks = count > 1 or (count == 1 and isinstance(error, (ValueError, OSError, ImportError)))
    return words if speaks else f"{type(error).__name__}: {words}"


def _signature(layer: nn.Module) -> Any:
    """Return a key that is equal for layers of equal cost: modules, their numbers and strings, parameter shapes."""
    return tuple(
        (
            name,
            type(module),
            tuple(
                (key, value)
                for key, value in sorted(vars(module).items())
                if isinstance(value, (int, float, str, type(None))) and key not in NUMBERS
            ),
            tuple((leaf, parameter.shape) for leaf, parameter in module.named_parameters(recurse=False)),
        )
        for name, module in layer.named_modules()
    )


class MetaModel:
    """A causal model without memory. ``recompute`` is True if each layer is recomputed in backward."""

    def __init__(self, configuration: Any, dtype: torch.dtype, recompute: bool) -> None:
        self.configuration = copy.deepcopy(configuration)
        self.plans: dict[tuple[int, ...], Plan | str] = {}  # key: group sizes; the error text if there is no plan
        # Split models with some of the layers, these layers, their heads, and the groups that count their traffic.
        # Sources that share this model differ only in the options of the key.
        self.split: dict[tuple[Any, ...], tuple[Any, list[Any], ChunkedHead, PlannedGroups]] = {}
        auto = transformers_package().AutoModelForCausalLM
        name = getattr(configuration, "name_or_path", "") or configuration.model_type
        with as_config_error(f"{name}: transformers makes no model of it"), torch.device("meta"):
            self.model = auto.from_config(self.configuration, dtype=dtype)
        self.model.config.use_cache = False
        if recompute:
            with as_config_error(f"{name}: transformers does not run its layers again"):
                checkpoint_each_layer(self.model)
        self.model.train()

    @cached_property
    def layers(self) -> str:
        """Name of the list of layers."""
        return list_of_layers(self.model, f"{self.configuration.model_type}: a plan needs a model with")

    @cached_property
    def kinds(self) -> list[int]:
        """For each layer, the number of the first equal layer."""
        kinds = getattr(self.configuration.get_text_config(), "layer_types", None)
        first: dict[Any, int] = {}
        return [
            first.setdefault((_signature(layer), kinds[number] if kinds else None), number)
            for number, layer in enumerate(self.model.get_submodule(self.layers))
        ]

    def plan(self, groups: PlannedGroups) -> Plan:
        """Plan the model's split over groups. Raises PlanError if the family does not support it."""
        sizes = tuple(groups.size(name) for name in ("tp", "ep", "expt_tp"))
        if sizes not in self.plans:
            try:
                self.plans[sizes] = cut_parts.prepare(self.model, None, groups)
            except PlanError as error:
                self.plans[sizes] = str(error)
        found = self.plans[sizes]
        if isinstance(found, str):
            raise PlanError(found)
        return found

    @cached_property
    def experts(self) -> dict[str, tuple[int, ...]]:
        """Names and shapes of experts' parameters, if they can be distributed over ranks."""
        return {name: shape for held in read_experts(self.model).values() for name, shape in held.items()}

    @property
    def num_experts(self) -> int | None:
        """Experts of a layer, if they can be distributed over ranks; None for a model without such experts."""
        return next(iter(self.experts.values()))[0] if self.experts else None


@dataclass(frozen=True)
class ModelRun:
    """Configuration of a run of a Hugging Face model, as in fine-tuning and ``split_model``.

    Attributes:
        model: Path of a config.json, a directory with one, a name in known_models(), or tiny:FAMILY.
        tp, pp, cp, ep: Ranks along each axis.
        dtype: Dtype of the parameters.
        sequence_length: Tokens of a sequence.
        global_batch_size: Sequences of a step.
        optimizer: Options of the optimizer.
        zero: ZeRO stage, 0 to 3.
        sequence_parallel: A mode of ``split_model``.
        micro_batch_size: Sequences of a microbatch; None for the job's default.
        recompute: True if each layer is recomputed in backward.
        documents: True if position ids are passed with the tokens, as in fine-tuning's packed windows.
        vpp: Stages per rank, under Interleaved1F1B.
        layers_per_stage: Layers of each stage; empty for an even split.
        logits_chunk: The option of ``use_chunked_loss``.
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
        return int(self.text.num_hidden_layers)

    @cached_property
    def made(self) -> dict[tuple[str, bool], MetaModel]:
        """Models without memory, by dtype and recomputation, shared by plans of this run."""
        return {}

    @property
    def text(self) -> Any:
        """Configuration of the text model."""
        return self.configuration.get_text_config()

    def meta_model(self, recompute: bool) -> MetaModel:
        """Return the complete model without memory. It is made once."""
        key = self.dtype, recompute
        if key not in self.made:
            self.made[key] = MetaModel(self.configuration, DTYPES[self.dtype], recompute)
        return self.made[key]

    @property
    def whole(self) -> MetaModel:
        """The complete model without memory and recomputation."""
        return self.meta_model(False)

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
        text = self.text
        scores = text.num_hidden_layers * getattr(text, "num_attention_heads", 1) * self.sequence_length
        width = sum(2 * max(shape) + sum(shape) for shape in shapes) + scores + 2 * text.vocab_size
        tokens = (self.micro_batch_size or self.global_batch_size) * self.sequence_length
        return MOST * (sum(shape.numel() for shape in shapes) + tokens * width)

    def in_layout(self, **options: Any) -> ModelRun:
        """Return a copy with other options that do not change the configuration, which is not read again."""
        found = replace(self, **options)
        vars(found).update(configuration=self.configuration, notes=self.notes, made=self.made)
        return found
