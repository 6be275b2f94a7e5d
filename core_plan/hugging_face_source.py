"""A Hugging Face model to plan: its stages on the meta device, and the figures of its parts, from its own code.

Equal layers have equal costs, so one layer of each kind runs. All others are replaced by identity modules.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from core.booster.mixed_precision.fp8 import use_fp8_linears
from core.distributed import DistributedDataParallelConfig
from core.distributed.contract.gradient_contract import declare_gradient
from core.hugging_face import Plan, PlanError, stages_config
from core.hugging_face.cut import parts as cut_parts
from core.hugging_face.cut.attach import attach
from core.hugging_face.cut.places import find_cut, list_of_layers
from core.hugging_face.cut.report import REPORT, SplitReport, Splitting
from core.hugging_face.lora import cut_adapters, finish_adapters, with_adapters
from core.hugging_face.read.example import example_of
from core.hugging_face.read.transformers_plans import checkpoint_each_layer, read_experts, transformers_package
from core.hugging_face.run.loss.parallel_loss import ParallelCausalLoss
from core.hugging_face.run.sequence import OVER_TENSOR
from core.pipeline_parallel import PipelineLayout
from core_plan.chunked_head import ChunkedHead
from core_plan.fake_collectives import fake_collectives
from core_plan.job.errors import ConfigError
from core_plan.live_memory import AFTER, BEFORE
from core_plan.planned_groups import PlannedGroups
from core_plan.step_figures import PartFigures, layers_in_words, watch_step, with_more
from core_plan.without_values import WithoutValues, take_values

BETWEEN = "before the layers"  # in a later stage
NUMBERS = {"layer_idx", "layer_id", "layer_number"}  # attributes of a layer's modules that distinguish equal layers
AROUND_ADAPTERS = "base_model.model."  # prefix of names in a model with adapters
CHOSEN = ("num_experts_per_tok", "top_k_experts", "moe_topk", "num_experts_per_token", "moe_k")


class PassBy:
    """Identity forward of a skipped layer. The last type in `given` is the output type of a layer."""

    def __init__(self, given: list[type]) -> None:
        self.given = given

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        hidden = args[0] if args else kwargs["hidden_states"]
        return (hidden,) if self.given and self.given[-1] is tuple else hidden


@contextmanager
def as_config_error(what: str, but: type[Exception] = ConfigError) -> Iterator[None]:
    """Convert any error of transformers inside, except `but`, to a ConfigError with `what` and the first line."""
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


class MetaModel:
    """A causal model without memory. `recompute` is True if each layer is recomputed in backward."""

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


# By dtype and recomputation, of one configuration.
MetaModels = dict[tuple[torch.dtype, bool], MetaModel]


def full_model(made: MetaModels, configuration: Any, dtype: torch.dtype, recompute: bool) -> MetaModel:
    """Return the cached model, or create it."""
    key = dtype, recompute
    if key not in made:
        made[key] = MetaModel(configuration, dtype, recompute)
    return made[key]


@dataclass(frozen=True, eq=False)
class HuggingFaceSource:
    """A causal model of a transformers configuration, with microbatches of [micro_batch_size, sequence_length] tokens.

    Attributes:
        sequence_parallel: A mode of `split_model`.
        recompute: True if each layer is recomputed in backward.
        has_documents: True if position ids are passed with the tokens.
        full_loss: Loss of unsplit logits; None: loss of split fp32 logits, or the model's own with sequence_parallel.
        splits_sequence_of_logits: True if context parallelism leaves logits split.
        adapters: A peft.LoraConfig of the trained adapters; None trains all weights.
        logits_chunk: The option of `use_chunked_loss`.
        vocabulary_multiple: A rank's rows of a split vocabulary are padded to a multiple of this.
        use_fp8: True if linear layers multiply in 8 bits.
        made: Models of this configuration, which sources of several layouts may share.
    """

    configuration: Any
    dtype: torch.dtype
    micro_batch_size: int
    sequence_length: int
    layout: PipelineLayout
    tp: int = 1
    sequence_parallel: str | None = None
    recompute: bool = False
    has_documents: bool = False
    full_loss: Callable[..., Tensor] | None = None
    splits_sequence_of_logits: bool = False
    adapters: Any = None
    logits_chunk: int | None = None
    vocabulary_multiple: int = 1
    use_fp8: bool = False
    made: MetaModels = field(default_factory=dict, repr=False)
    contracts: dict[str, tuple[str, ...]] = field(default_factory=dict, init=False, repr=False)

    @property
    def config(self) -> Any:
        """Configuration of the stage wrappers; None for a model without a pipeline."""
        return stages_config(self.layout, self.tp) if self.layout.pp > 1 else None

    @property
    def is_tied(self) -> bool:
        """True if the head shares the embedding's weight."""
        return bool(self.configuration.get_text_config().tie_word_embeddings)

    @property
    def _full_model(self) -> MetaModel:
        return full_model(self.made, self.configuration, self.dtype, self.recompute)

    @property
    def whole(self) -> Any:
        """The complete model without memory; stages are created from copies."""
        return self._full_model.model

    @property
    def layers(self) -> str:
        """Name of the list of layers."""
        return self._full_model.layers

    @property
    def kinds(self) -> list[int]:
        """For each layer, the number of the first equal layer."""
        return self._full_model.kinds

    def plan(self, groups: PlannedGroups) -> Plan:
        """Plan the model's split over groups. Raises PlanError if the family does not support it."""
        return self._full_model.plan(groups).with_vocabulary(self.vocabulary_multiple)

    def is_expert(self, name: str, param: nn.Parameter) -> bool:
        """Return True for a parameter of experts, whether or not they are distributed over ranks."""
        return name.removeprefix(AROUND_ADAPTERS) in self._full_model.experts

    def sent_bytes(self) -> int:
        """Return the bytes that one stage sends to the next for a microbatch."""
        width = self.configuration.get_text_config().hidden_size
        return self.micro_batch_size * self.sequence_length * width * self.dtype.itemsize

    def parts_of_stage(self, layout: PipelineLayout, stage: int) -> list[str | int]:
        """Return the parts of a stage in order: names of its ends and kinds of its layers."""
        spec = layout.stage(stage)
        if layout.num_layers != len(self.kinds):
            raise PlanError(
                f"{self.configuration.model_type}: its configuration says {layout.num_layers} layers, and its model "
                f"has {len(self.kinds)}; such a model is not planned"
            )
        kinds = [self.kinds[number] for number in spec.layer_numbers]
        return [BEFORE if spec.pre_process else BETWEEN, *kinds, *[AFTER] * spec.post_process]

    def name_of_layers(self, kind: int) -> str:
        """Describe layers of a kind."""
        experts = self._full_model.experts
        has_experts = any(name.startswith(f"{self.layers}.{kind}.") for name in experts) if experts else None
        types = getattr(self.configuration.get_text_config(), "layer_types", None) or ()
        return layers_in_words(has_experts, "computed again" * self.recompute, types[kind] if len({*types}) > 1 else "")

    # -- contents of a rank ----------------------------------------------------------------------------------------

    def stages(self, layout: PipelineLayout, groups: PlannedGroups) -> Sequence[nn.Module]:
        """Build the stages of the planned rank on the meta device, split and tagged as by `load_split`."""
        plan, indices = self.plan(groups), layout.stages_of(groups.rank("pp"))
        model = self._copy([number for index in indices for number in layout.stage(index).layer_numbers])
        chunks = [model]
        if layout.pp > 1:
            cut = find_cut(self.whole)
            cut_parts.check_cut(cut, layout, groups)
            copies = [cut_parts.copied(model) for _ in indices] if len(indices) > 1 else [model]
            chunks = [cut_parts.keep_stage(chunk, cut, layout, n) for chunk, n in zip(copies, indices, strict=True)]
        found = self._contracts(groups)
        for chunk in chunks:
            own = cut_parts.of_stage(plan, chunk)
            cut_parts.cut_parameters(chunk, own, groups)
            cut_parts.tag_slices(dict(chunk.named_parameters()), own, groups)
            for name in cut.around if layout.pp > 1 else ():
                chunk.get_parameter(name).pipeline_parallel = True
        if layout.pp > 1:
            cut_parts.tie_ends(chunks, layout)
        if self.adapters is not None:
            chunks = [self._with_adapters(chunk, plan, groups) for chunk in chunks]
        for chunk in chunks:
            for name, parameter in chunk.named_parameters():
                declared = found.get(self._of_first(name))
                if declared is not None and parameter.requires_grad:
                    declare_gradient(parameter, partial_over=declared)
        return chunks

    def _with_adapters(self, chunk: Any, plan: Plan, groups: PlannedGroups) -> Any:
        """Return a stage with adapters that are split like its layers."""
        own = cut_parts.of_stage(plan, chunk)
        if groups.size("tp") > 1:
            cut_parts.place_seams(dict(chunk.named_modules()), own, groups)
        adapted = with_adapters(chunk, own, copy.deepcopy(self.adapters), without_memory=True).to(self.dtype)
        if groups.size("tp") > 1:
            cut_adapters(adapted, own, groups)
        return adapted

    def _of_first(self, name: str) -> str:
        """Return the name of the same parameter in the first equal layer."""
        before, of_layer, rest = name.partition(f"{self.layers}.")
        if not of_layer or before not in ("", AROUND_ADAPTERS):
            return name
        number, _, leaf = rest.partition(".")
        return f"{before}{of_layer}{self.kinds[int(number)]}.{leaf}"

    def _contracts(self, groups: PlannedGroups) -> Mapping[str, tuple[str, ...]]:
        """Map unsplit parameters that were reached to the groups over which their gradients are partial sums."""
        if groups.size("tp") > 1 and not self.contracts:
            model = self._thin(sorted(set(self.kinds)))
            model, report = self._split(model, groups)
            whole = {name for name, _ in model.named_parameters() if name not in report.plan.splits} - report.unseen
            self.contracts.update({name: ("tp",) if name in report.partial else () for name in whole})
        return self.contracts

    # -- costs of a microbatch -------------------------------------------------------------------------------------

    def figures(
        self, parts: Sequence[str | int], groups: PlannedGroups, ddp: DistributedDataParallelConfig
    ) -> dict[str | int, PartFigures]:
        """Return the figures of the ends, and of the layer kinds among `parts`, for one microbatch."""
        found: dict[str | int, PartFigures] = {}
        if {*parts} != {BETWEEN}:
            numbers = sorted({part for part in parts if isinstance(part, int)}) or self.kinds[:1]
            last = len(self.kinds) - 1
            # With tp the first layer splits the sequence, and the last one joins it. With cp it is 3 % of memory.
            ends_differ = self.sequence_parallel in OVER_TENSOR and self.kinds[1:2] == [0] and last > 1
            if self.recompute or ends_differ:  # the next layer stores a recomputed layer's output
                numbers = sorted({*numbers, *([0, 1] if ends_differ else ()), last})
            watched = self._watch(numbers, groups, ddp)
            found = {number: watched[str(place)] for place, number in enumerate(numbers)}
            found |= {BEFORE: watched[BEFORE], AFTER: watched[AFTER]}
            if ends_differ:
                found[BEFORE] = with_more(found[BEFORE], found[0], found[1])
                found[0] = found[1]
                found[AFTER] = with_more(found[AFTER], found[last], found.get(self.kinds[last], found[last]))
        if BETWEEN in parts:
            found[BETWEEN] = self._watch([len(self.kinds) - 1], groups, ddp, later=True)[BEFORE]
        return found

    def _watch(
        self, numbers: Sequence[int], groups: PlannedGroups, ddp: DistributedDataParallelConfig, later: bool = False
    ) -> dict[str, PartFigures]:
        """Measure a step of some layers.

        `later` selects a stage that begins with the last layer, after other stages.
        """
        family = self.plan(groups).family
        try:
            known = self._full_model.split
            sizes = tuple(groups.size(name) for name in ("tp", "cp", "ep", "expt_tp"))
            key = *sizes, *numbers, later, self.sequence_parallel, groups.ledger.over_gloo
            if key not in known:
                bare = self._stage_of_last() if later else self._thin(numbers)
                layers = [bare.get_submodule(f"{self.layers}.{number}") for number in numbers]
                model, _ = self._split(bare, groups, later)
                if self.use_fp8 and not use_fp8_linears(model):
                    raise PlanError(f"{family}: use_fp8 would change nothing: no nn.Linear's sizes are multiples of 16")
                head = ChunkedHead(model, self.logits_chunk, groups, self.vocabulary_multiple)
                known[key] = model, layers, head, groups
            model, layers, head, groups = known[key]
            with self._without_values(groups) as mode:
                run = self._run(model, head, groups, later)
                return watch_step(model, layers, run, groups.ledger, mode, ddp)
        except PlanError:
            raise
        except Exception as error:  # the model's own code can raise anything
            raise PlanError(
                f"{family}: a step of it fails on tensors without values, so it is not planned; or such a model cannot "
                f"run: {first_line(error)}"
            ) from error

    def _run(self, model: Any, head: ChunkedHead, groups: PlannedGroups, later: bool) -> Callable[[], Tensor]:
        """Return a function that runs the forward of a microbatch and returns the loss."""
        shape = self.micro_batch_size, self.sequence_length
        tokens, labels, positions = (torch.empty(shape, dtype=torch.int64) for _ in range(3))
        given: dict[str, Any] = {"input_ids": tokens, "use_cache": False}
        if self.has_documents:
            given["position_ids"] = positions
        if later:
            given["received"] = self._hidden(*shape)
        sizes = {"vocab_size": self.configuration.get_text_config().vocab_size, "multiple": self.vocabulary_multiple}
        loss = self.full_loss or ParallelCausalLoss(groups.tp, **sizes)
        own = self.sequence_parallel is not None and self.full_loss is None  # uses the model's own loss

        def run() -> Tensor:
            output = model(**given, labels=labels) if own else model(**given)
            if own:
                found: Tensor = output.loss
                return found
            if head.chunk:
                return head.loss(output.logits, labels)
            return loss(output.logits.float(), labels=labels, num_items_in_batch=1.0)

        return run

    def _split(self, model: Any, groups: PlannedGroups, later: bool = False) -> tuple[Any, SplitReport]:
        """Apply slices, tags, seams, contracts and adapters with the code for real models. Returns (model, report)."""
        with self._without_values(groups):
            take_values(model)
            plan = cut_parts.of_stage(self.plan(groups), model)
            cut_parts.cut_parameters(model, plan, groups)
            arguments = example_of(model, groups)
            if later:
                arguments["received"] = (self._hidden(*arguments["input_ids"].shape),)
            is_local = (self.tp > 1 and self.full_loss is None) or self.splits_sequence_of_logits
            how = Splitting(groups, None, is_local, self.sequence_parallel)
            report = attach(model, plan, arguments, how)
        if self.adapters is None:
            return model, report
        adapted = with_adapters(model, report.plan, copy.deepcopy(self.adapters), without_memory=True)
        with self._without_values(groups):
            take_values(adapted, self.dtype)
            finish_adapters(adapted, report, groups, arguments)
        return adapted, getattr(adapted, REPORT)

    def _hidden(self, *shape: int) -> Tensor:
        """Return hidden states as sent by the stage before."""
        width = self.configuration.get_text_config().hidden_size
        return torch.empty(*shape, width, dtype=self.dtype, requires_grad=True)

    def _thin(self, numbers: Sequence[int]) -> Any:
        """Return the model with some of its layers; the others become identity modules."""
        model = self._copy(numbers)
        given: list[Any] = []
        for number, layer in enumerate(model.get_submodule(self.layers)):
            if number in numbers:
                layer.register_forward_hook(lambda _, args, output: given.append(type(output)))
            else:
                cut_parts.empty_module(layer, PassBy(given))
        return model

    def _stage_of_last(self) -> Any:
        """Return a stage that begins with the last layer."""
        last = len(self.kinds) - 1
        return cut_parts.keep_stage(self._copy([last]), find_cut(self.whole), PipelineLayout((last, 1), 2), 1)

    def _copy(self, numbers: Collection[int]) -> Any:
        """Copy the model with some of its layers; of the others only the module object is copied."""
        copies: dict[int, Any] = {}
        for number, layer in enumerate(self.whole.get_submodule(self.layers)):
            if number not in numbers:
                kind: Any = type(layer)
                copies[id(layer)] = bare = kind.__new__(kind)
                nn.Module.__init__(bare)
                vars(bare).update({name: value for name, value in vars(layer).items() if name not in vars(bare)})
        return copy.deepcopy(self.whole, copies)

    @contextmanager
    def _without_values(self, groups: PlannedGroups) -> Iterator[WithoutValues]:
        """Run without values inside: experts get equal numbers of tokens, and masks need no values."""
        import transformers.masking_utils as masks

        found = masks.find_packed_sequence_indices
        if not self.has_documents:  # else positions without values give a document mask
            masks.find_packed_sequence_indices = _no_documents
        try:
            with fake_collectives(self._chosen(), on_cpu=groups.ledger.over_gloo), WithoutValues() as mode:
                yield mode
        finally:
            masks.find_packed_sequence_indices = found

    def _chosen(self) -> float:
        """Return the fraction of all experts per token; 1 for a model without experts."""
        experts = self._full_model.num_experts
        if experts is None:
            return 1.0
        text = self.configuration.get_text_config()
        chosen = next((getattr(text, name) for name in CHOSEN if getattr(text, name, None)), None)
        if chosen is None:
            raise PlanError(f"{text.model_type}: its configuration does not say how many experts a token goes to")
        return float(chosen / experts)


def _no_documents(position_ids: Any) -> None:
    """Replace the search for documents in positions: there is one document."""


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
