"""A Hugging Face model to plan: its stages on the meta device, and the figures of its parts, from its own code.

Equal layers have equal costs, so one layer of each kind runs. All others are replaced by identity modules.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from core.booster.mixed_precision.fp8 import use_fp8_linears
from core.distributed import DistributedDataParallelConfig
from core.distributed.contract.gradient_contract import declare_gradient
from core.hugging_face import Plan, PlanError, stages_config
from core.hugging_face.cut import parts as cut_parts
from core.hugging_face.cut.attach import attach
from core.hugging_face.cut.places import find_cut
from core.hugging_face.cut.report import REPORT, SplitReport, Splitting
from core.hugging_face.lora import cut_adapters, finish_adapters, with_adapters
from core.hugging_face.read.example import example_of
from core.hugging_face.run.loss.parallel_loss import ParallelCausalLoss
from core.hugging_face.run.sequence import MODES, OVER_CONTEXT, OVER_TENSOR
from core.pipeline_parallel import PipelineLayout
from core.pipeline_parallel.schedules import plan_pipeline
from core_plan.chunked_head import ChunkedHead
from core_plan.fake_collectives import fake_collectives
from core_plan.job.config import ParallelOptions
from core_plan.job.errors import ConfigError
from core_plan.job.model_config import DTYPES, optimizer_config, zero_config
from core_plan.job.plan import share_batch
from core_plan.job.sizes import check_ranks
from core_plan.live_memory import AFTER, BEFORE
from core_plan.model_run import MetaModel, ModelRun, first_line
from core_plan.planned_groups import PlannedGroups
from core_plan.run_memory import Run
from core_plan.step_figures import PartFigures, layers_in_words, watch_step, with_more
from core_plan.without_values import WithoutValues, take_values

BETWEEN = "before the layers"  # in a later stage
AROUND_ADAPTERS = "base_model.model."  # prefix of names in a model with adapters
CHOSEN = ("num_experts_per_tok", "top_k_experts", "moe_topk", "num_experts_per_token", "moe_k")


class PassBy:
    """Identity forward of a skipped layer. The last type in ``given`` is the output type of a layer."""

    def __init__(self, given: list[type]) -> None:
        self.given = given

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        hidden = args[0] if args else kwargs["hidden_states"]
        return (hidden,) if self.given and self.given[-1] is tuple else hidden


@dataclass(frozen=True, eq=False)
class HuggingFaceSource:
    """A Hugging Face model in the layout and with the options of ``run``."""

    run: ModelRun
    layout: PipelineLayout
    micro_batch_size: int
    contracts: dict[str, tuple[str, ...]] = field(default_factory=dict, init=False, repr=False)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the parameters."""
        return DTYPES[self.run.dtype]

    @property
    def sequence_length(self) -> int:
        """Tokens of a sequence."""
        return self.run.sequence_length

    @property
    def config(self) -> Any:
        """Configuration of the stage wrappers; None for a model without a pipeline."""
        return stages_config(self.layout, self.run.tp) if self.layout.pp > 1 else None

    @property
    def full(self) -> MetaModel:
        """The complete model without memory; stages are created from copies."""
        return self.run.meta_model(self.run.recompute)

    def plan(self, groups: PlannedGroups) -> Plan:
        """Plan the model's split over groups. Raises PlanError if the family does not support it."""
        return self.full.plan(groups).with_vocabulary(self.run.make_vocab_size_divisible_by)

    def sent_bytes(self) -> int:
        """Return the bytes that one stage sends to the next for a microbatch."""
        width = self.run.text.hidden_size
        return self.micro_batch_size * self.sequence_length * width * self.dtype.itemsize

    def parts_of_stage(self, layout: PipelineLayout, stage: int) -> list[str | int]:
        """Return the parts of a stage in order: names of its ends and kinds of its layers."""
        spec = layout.stage(stage)
        if layout.num_layers != len(self.full.kinds):
            raise PlanError(
                f"{self.run.configuration.model_type}: its configuration says {layout.num_layers} layers, and its "
                f"model has {len(self.full.kinds)}; such a model is not planned"
            )
        kinds = [self.full.kinds[number] for number in spec.layer_numbers]
        return [BEFORE if spec.pre_process else BETWEEN, *kinds, *[AFTER] * spec.post_process]

    def name_of_layers(self, kind: int) -> str:
        """Describe layers of a kind."""
        experts = self.full.experts
        has_experts = any(name.startswith(f"{self.full.layers}.{kind}.") for name in experts) if experts else None
        types = getattr(self.run.text, "layer_types", None) or ()
        return layers_in_words(
            has_experts, "computed again" * self.run.recompute, types[kind] if len({*types}) > 1 else ""
        )

    # -- contents of a rank ----------------------------------------------------------------------------------------

    def stages(self, layout: PipelineLayout, groups: PlannedGroups) -> Sequence[nn.Module]:
        """Build the stages of the planned rank on the meta device, split and tagged as by ``load_split``."""
        plan, indices = self.plan(groups), layout.stages_of(groups.rank("pp"))
        model = self._copy([number for index in indices for number in layout.stage(index).layer_numbers])
        chunks = [model]
        if layout.pp > 1:
            cut = find_cut(self.full.model)
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
        if self.run.adapters is not None:
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
        adapted = with_adapters(chunk, own, copy.deepcopy(self.run.adapters), without_memory=True).to(self.dtype)
        if groups.size("tp") > 1:
            cut_adapters(adapted, own, groups)
        return adapted

    def _of_first(self, name: str) -> str:
        """Return the name of the same parameter in the first equal layer."""
        before, of_layer, rest = name.partition(f"{self.full.layers}.")
        if not of_layer or before not in ("", AROUND_ADAPTERS):
            return name
        number, _, leaf = rest.partition(".")
        return f"{before}{of_layer}{self.full.kinds[int(number)]}.{leaf}"

    def _contracts(self, groups: PlannedGroups) -> Mapping[str, tuple[str, ...]]:
        """Map unsplit parameters that were reached to the groups over which their gradients are partial sums."""
        if groups.size("tp") > 1 and not self.contracts:
            model = self._thin(sorted(set(self.full.kinds)))
            model, report = self._split(model, groups)
            whole = {name for name, _ in model.named_parameters() if name not in report.plan.splits} - report.unseen
            self.contracts.update({name: ("tp",) if name in report.partial else () for name in whole})
        return self.contracts

    # -- costs of a microbatch -------------------------------------------------------------------------------------

    def figures(
        self, parts: Sequence[str | int], groups: PlannedGroups, ddp: DistributedDataParallelConfig
    ) -> dict[str | int, PartFigures]:
        """Return the figures of the ends, and of the layer kinds among ``parts``, for one microbatch."""
        found: dict[str | int, PartFigures] = {}
        if {*parts} != {BETWEEN}:
            numbers = sorted({part for part in parts if isinstance(part, int)}) or self.full.kinds[:1]
            last = len(self.full.kinds) - 1
            # With tp the first layer splits the sequence, and the last one joins it. With cp it is 3 % of memory.
            ends_differ = self.run.sequence_parallel in OVER_TENSOR and self.full.kinds[1:2] == [0] and last > 1
            if self.run.recompute or ends_differ:  # the next layer stores a recomputed layer's output
                numbers = sorted({*numbers, *([0, 1] if ends_differ else ()), last})
            watched = self._watch(numbers, groups, ddp)
            found = {number: watched[str(place)] for place, number in enumerate(numbers)}
            found |= {BEFORE: watched[BEFORE], AFTER: watched[AFTER]}
            if ends_differ:
                found[BEFORE] = with_more(found[BEFORE], found[0], found[1])
                found[0] = found[1]
                found[AFTER] = with_more(found[AFTER], found[last], found.get(self.full.kinds[last], found[last]))
        if BETWEEN in parts:
            found[BETWEEN] = self._watch([len(self.full.kinds) - 1], groups, ddp, later=True)[BEFORE]
        return found

    def _watch(
        self, numbers: Sequence[int], groups: PlannedGroups, ddp: DistributedDataParallelConfig, later: bool = False
    ) -> dict[str, PartFigures]:
        """Measure a step of some layers.

        ``later`` selects a stage that begins with the last layer, after other stages.
        """
        family = self.plan(groups).family
        try:
            known = self.full.split
            sizes = tuple(groups.size(name) for name in ("tp", "cp", "ep", "expt_tp"))
            key = *sizes, *numbers, later, self.run.sequence_parallel, groups.ledger.over_gloo
            if key not in known:
                bare = self._stage_of_last() if later else self._thin(numbers)
                layers = [bare.get_submodule(f"{self.full.layers}.{number}") for number in numbers]
                model, _ = self._split(bare, groups, later)
                if self.run.use_fp8 and not use_fp8_linears(model):
                    raise PlanError(f"{family}: use_fp8 would change nothing: no nn.Linear's sizes are multiples of 16")
                head = ChunkedHead(model, self.run.logits_chunk, groups, self.run.make_vocab_size_divisible_by)
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
        if self.run.documents:
            given["position_ids"] = positions
        if later:
            given["received"] = self._hidden(*shape)
        sizes = {"vocab_size": self.run.text.vocab_size, "multiple": self.run.make_vocab_size_divisible_by}
        loss = ParallelCausalLoss(groups.tp, **sizes)

        def run() -> Tensor:
            if self.run.sequence_parallel is not None:
                found: Tensor = model(**given, labels=labels).loss
                return found
            output = model(**given)
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
            how = Splitting(groups, None, self.run.tp > 1, self.run.sequence_parallel)
            report = attach(model, plan, arguments, how)
        if self.run.adapters is None:
            return model, report
        adapted = with_adapters(model, report.plan, copy.deepcopy(self.run.adapters), without_memory=True)
        with self._without_values(groups):
            take_values(adapted, self.dtype)
            finish_adapters(adapted, report, groups, arguments)
        return adapted, getattr(adapted, REPORT)

    def _hidden(self, *shape: int) -> Tensor:
        """Return hidden states as sent by the stage before."""
        width = self.run.text.hidden_size
        return torch.empty(*shape, width, dtype=self.dtype, requires_grad=True)

    def _thin(self, numbers: Sequence[int]) -> Any:
        """Return the model with some of its layers; the others become identity modules."""
        model = self._copy(numbers)
        given: list[Any] = []
        for number, layer in enumerate(model.get_submodule(self.full.layers)):
            if number in numbers:
                layer.register_forward_hook(lambda _, args, output: given.append(type(output)))
            else:
                cut_parts.empty_module(layer, PassBy(given))
        return model

    def _stage_of_last(self) -> Any:
        """Return a stage that begins with the last layer."""
        last = len(self.full.kinds) - 1
        return cut_parts.keep_stage(self._copy([last]), find_cut(self.full.model), PipelineLayout((last, 1), 2), 1)

    def _copy(self, numbers: Collection[int]) -> Any:
        """Copy the model with some of its layers; of the others only the module object is copied."""
        copies: dict[int, Any] = {}
        for number, layer in enumerate(self.full.model.get_submodule(self.full.layers)):
            if number not in numbers:
                kind: Any = type(layer)
                copies[id(layer)] = bare = kind.__new__(kind)
                nn.Module.__init__(bare)
                vars(bare).update({name: value for name, value in vars(layer).items() if name not in vars(bare)})
        return copy.deepcopy(self.full.model, copies)

    @contextmanager
    def _without_values(self, groups: PlannedGroups) -> Iterator[WithoutValues]:
        """Run without values inside: experts get equal numbers of tokens, and masks need no values."""
        import transformers.masking_utils as masks

        found = masks.find_packed_sequence_indices
        if not self.run.documents:  # else positions without values give a document mask
            masks.find_packed_sequence_indices = _no_documents
        try:
            with fake_collectives(self._chosen(), on_cpu=groups.ledger.over_gloo), WithoutValues() as mode:
                yield mode
        finally:
            masks.find_packed_sequence_indices = found

    def _chosen(self) -> float:
        """Return the fraction of all experts per token; 1 for a model without experts."""
        experts = self.full.num_experts
        if experts is None:
            return 1.0
        text = self.run.text
        chosen = next((getattr(text, name) for name in CHOSEN if getattr(text, name, None)), None)
        if chosen is None:
            raise PlanError(f"{text.model_type}: its configuration does not say how many experts a token goes to")
        return float(chosen / experts)


def _no_documents(position_ids: Any) -> None:
    """Replace the search for documents in positions: there is one document."""


def run_of_model(config: ModelRun, world_size: int, *, on_cpu: bool = False, one_host: bool = True) -> Run:
    """Create the run of a Hugging Face model on ``world_size`` ranks.

    Raises:
        ConfigError: If it cannot be built. The text has the arithmetic.
    """
    parallel = ParallelOptions(
        tp=config.tp, pp=config.pp, cp=config.cp, ep=config.ep, vpp=config.vpp, layers_per_stage=config.layers_per_stage
    )
    schedule = parallel.schedule_name
    grid, num_layers = check_ranks(parallel, world_size), config.num_layers
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
    _check_lengths(config)
    source = HuggingFaceSource(config, layout, micro)
    tokens = config.global_batch_size * config.sequence_length
    ddp, optimizer = zero_config(config.zero), optimizer_config(config.optimizer, config.dtype)
    if config.offload:
        optimizer = replace(optimizer, optimizer_cpu_offload=True, optimizer_offload_fraction=1.0)
    return Run(source, grid, layout, schedule, count, tokens, ddp, optimizer, on_cpu, one_host, notes=config.notes)


def _check_lengths(config: ModelRun) -> None:
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
    longest = getattr(config.text, "max_position_embeddings", None)
    if isinstance(longest, int) and longest > 0 and config.sequence_length > longest:
        raise ConfigError(f"--seq {config.sequence_length} is longer than the model's positions, {longest}")
