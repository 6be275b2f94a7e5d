"""Choices: the layouts that a model and a batch can have on a number of ranks, by arithmetic alone."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from core.distributed.distributed_data_parallel_config import STRATEGIES
from core.hugging_face.run.sequence import OVER_CONTEXT, OVER_TENSOR
from core.number_ranges import divisors
from core.pipeline_parallel.layout import PipelineLayout, spread
from core_plan.job.config import JobConfig
from core_plan.job.sizes import count_parameters
from core_plan.model_run import ModelRun

FEWEST_TOKENS = 1024  # tokens per rank: context parallelism is not considered for shorter parts of a sequence
AXES = ("tp", "pp", "cp", "ep", "etp")
NO_MODE = "none"  # option value: no sequence parallelism
CHUNKS = (2, 3, 4, 8)  # considered numbers of stages per rank, if they divide the layers
PARTS = ("layernorm", "mlp_act", "moe_act")  # modules that are recomputed, at almost no cost


class Sizes(NamedTuple):
    """Sizes of a model and a batch by which arithmetic excludes layouts.

    Attributes:
        batch: Sequences of a step.
        layers: Number of layers.
        sequence: Tokens of a sequence.
        of_tp: Sizes that tp must divide; other limits are checked when a model is split.
        experts: Number of experts; None for a model without experts.
        expert_width: Size that etp must divide; None if tp splits experts.
        numel: Elements of all parameters.
        frees_stages: True if the configuration fixes only the number of stages.
        has_parts: True if parts of layers can be recomputed.
        empty_ends: True if the first and the last stage may have no layer.
        most_tp: Largest size of tp, unless it is given: links between machines are too slow for exchanges in layers.
    """

    batch: int
    layers: int
    sequence: int
    of_tp: tuple[int, ...]
    experts: int | None
    expert_width: int | None
    numel: int
    frees_stages: bool = True
    has_parts: bool = False
    empty_ends: bool = False
    most_tp: int = 1 << 30

    @classmethod
    def of(cls, config: JobConfig | ModelRun) -> Sizes:
        """Read the sizes of the main job's model or of a Hugging Face model."""
        if isinstance(config, ModelRun):
            whole = config.whole
            numel = sum(parameter.numel() for parameter in whole.model.parameters())
            batch, length = config.global_batch_size, config.sequence_length
            return cls(batch, config.num_layers, length, (), whole.num_experts, None, numel, _frees_stages(config))
        model, batch = config.model, config.run.global_batch_size
        of_tp = model.num_attention_heads, model.query_groups, model.ffn_width
        width = None if model.num_experts is None else model.expert_width
        numel, parts = count_parameters(model), model.recompute_granularity != "selective"
        known = batch, model.num_layers, model.sequence_length, of_tp, model.num_experts, width, numel
        return cls(*known, _frees_stages(config), parts, empty_ends=True)


def _frees_stages(config: JobConfig | ModelRun) -> bool:
    """Return True if the configuration fixes only the number of stages."""
    pipeline = config if isinstance(config, ModelRun) else config.parallel
    return not pipeline.layers_per_stage and pipeline.vpp == 1 and getattr(pipeline, "schedule", None) is None


class Choice(NamedTuple):
    """One layout.

    Attributes:
        etp: 1, or the value of tp.
        zero: ZeRO stage, 0 to 3.
        micro: Sequences of a microbatch.
        recompute: True if complete layers are recomputed.
        parts: True if the modules PARTS of layers are recomputed.
        vpp: Stages per rank.
        instances: Optimizer instances, each sharded over its part of the data ranks; 1 keeps the configured number.
    """

    tp: int
    pp: int
    cp: int = 1
    ep: int = 1
    etp: int = 1
    zero: int = 0
    micro: int = 1
    recompute: bool = False
    parts: bool = False
    vpp: int = 1
    instances: int = 1

    @property
    def axes(self) -> tuple[int, ...]:
        """Sizes of the axes, in the order of AXES."""
        return self[: len(AXES)]

    @property
    def split(self) -> tuple[int, ...]:
        """Fields that determine the cost of one layer, together with the microbatch size."""
        return self.tp, self.cp, self.ep, self.etp, self.recompute, self.parts

    def words(self, *, has_experts: bool) -> str:
        """Format the layout for a table."""
        axes = [f"{name} {size}" for name, size in zip(AXES, self, strict=False) if has_experts or name[0] != "e"]
        stages = [f"vpp {self.vpp}"] * (self.vpp > 1)
        more = [*stages, f"zero {self.zero}", f"micro-batch {self.micro}", *["recompute"] * self.recompute]
        more += [*["recompute parts"] * self.parts, *[f"instances {self.instances}"] * (self.instances > 1)]
        return "  ".join([*axes, *more])


def choices(model: Sizes, ranks: int, fixed: Mapping[str, int]) -> Iterator[tuple[Choice, list[int]]]:
    """Generate layouts with their possible microbatch sizes, without layouts that arithmetic excludes.

    Sharding and recomputation are left to the caller.

    Args:
        model: Sizes of the model and the batch.
        ranks: Number of ranks.
        fixed: Sizes of axes, `dp` or `micro` that are kept.

    Yields:
        (layout, microbatch sizes that divide a data rank's share of the batch).
    """
    for tp, pp, cp, dp in axes(model, ranks, fixed):
        if model.batch % dp:
            continue
        micros = [micro for micro in divisors(model.batch // dp) if micro == fixed.get("micro", micro)]
        for ep, etp in _expert_sizes(model, ranks // pp, tp, fixed) if micros else ():
            for vpp in stages_a_rank(model, pp):
                if vpp == fixed.get("vpp", vpp) or not model.frees_stages:
                    yield Choice(tp, pp, cp, ep, etp, vpp=vpp), micros


def stages_a_rank(model: Sizes, pp: int) -> list[int]:
    """Return the possible numbers of stages per rank."""
    if pp == 1 or not model.frees_stages:
        return [1]
    both = model.layers, model.layers + 2  # embeddings and head may count as a layer each
    most = max(both) if model.empty_ends else model.layers
    return [1, *(n for n in CHUNKS if pp * n <= most and any(layers % (pp * n) == 0 for layers in both))]


def uneven_stages(layers: int, stages: int) -> tuple[int, ...]:
    """Return the layers of each stage if they do not divide evenly; empty if they do.

    Embeddings and head count as one layer each if the total then divides; else the first and last stages have fewer.
    """
    if layers % stages == 0:
        return ()
    ends = (layers + 2) % stages == 0
    whole = PipelineLayout.even(layers, stages, count_embedding=True, count_head=True) if ends else None
    return spread(layers, stages) if whole is None else whole.layers_per_stage


def axes(model: Sizes, ranks: int, fixed: Mapping[str, int]) -> Iterator[tuple[int, int, int, int]]:
    """Generate (tp, pp, cp, dp) that the model allows, for any batch."""
    sizes = {axis: [fixed[axis]] if axis in fixed else divisors(ranks) for axis in ("tp", "pp", "cp")}
    for tp, pp, cp in itertools.product(*sizes.values()):
        if ranks % (tp * pp * cp) or pp > model.layers or any(size % tp for size in model.of_tp):
            continue
        if tp > model.most_tp and "tp" not in fixed:
            continue
        if cp > 1 and "cp" not in fixed and model.sequence < cp * FEWEST_TOKENS:
            continue
        dp = ranks // (tp * pp * cp)
        if dp == fixed.get("dp", dp):
            yield tp, pp, cp, dp


def _expert_sizes(model: Sizes, ranks: int, tp: int, fixed: Mapping[str, int]) -> Iterator[tuple[int, int]]:
    """Generate (ep, etp) for the ranks of one stage."""
    if model.experts is None:
        if fixed.get("ep", 1) == 1:
            yield 1, tp
        return
    eps = [fixed["ep"]] if "ep" in fixed else divisors(model.experts)
    etps = [fixed["etp"]] if "etp" in fixed else sorted({1, tp}) if model.expert_width is not None else [tp]
    for ep, etp in itertools.product(eps, etps):
        if ranks % (ep * etp) == 0 and model.experts % ep == 0 and (model.expert_width or etp) % etp == 0:
            yield ep, etp


def with_choice(config: JobConfig | ModelRun, choice: Choice) -> JobConfig | ModelRun:
    """Return the configuration of a run in a layout. Settings that are not part of a layout are unchanged."""
    return _model_with(config, choice) if isinstance(config, ModelRun) else _job_with(config, choice)


def _model_with(config: ModelRun, choice: Choice) -> ModelRun:
    """Apply a layout to a ModelRun.

    A mode of sequence parallelism is kept if its axis has several ranks. Context parallelism always has a mode.
    """
    mode = config.sequence_parallel
    if choice.cp > 1:
        mode = mode if mode in OVER_CONTEXT else OVER_CONTEXT[0]
    elif choice.tp == 1 or mode not in OVER_TENSOR:
        mode = None
    return config.in_layout(
        tp=choice.tp,
        pp=choice.pp,
        cp=choice.cp,
        ep=choice.ep,
        zero=choice.zero,
        sequence_parallel=mode,
        micro_batch_size=choice.micro,
        recompute=choice.recompute,
        **_stages_of(choice, config.num_layers, is_free=_frees_stages(config)),
    )


def _stages_of(choice: Choice, layers: int, *, is_free: bool) -> dict[str, Any]:
    """Return the options of a pipeline. Configured options are kept: then `is_free` is False."""
    if choice.pp == 1:
        return {"vpp": 1, "layers_per_stage": ()}
    return {"vpp": choice.vpp, "layers_per_stage": uneven_stages(layers, choice.pp * choice.vpp)} if is_free else {}


def _job_with(config: JobConfig, choice: Choice) -> JobConfig:
    """Apply a layout to the main job's configuration. Its schedule is kept if the layout has a pipeline."""
    etp = choice.etp if config.model.num_experts is not None else None
    parallel = replace(config.parallel, dp=None, tp=choice.tp, pp=choice.pp, cp=choice.cp, ep=choice.ep, etp=etp)
    if choice.tp == 1:
        parallel = replace(parallel, sequence_parallel=None)
    parallel = replace(parallel, **_stages_of(choice, config.model.num_layers, is_free=_frees_stages(config)))
    if choice.pp == 1:
        parallel = replace(parallel, schedule=None)
    ddp = replace(
        config.ddp,
        data_parallel_sharding_strategy=STRATEGIES[choice.zero],
        use_distributed_optimizer=choice.zero > 0,
        overlap_param_gather=config.ddp.overlap_param_gather and choice.zero in (1, 2),
    )
    if choice.instances > 1:
        ddp = replace(ddp, num_distributed_optimizer_instances=choice.instances)
    model = config.model
    if choice.recompute or model.recompute_granularity == "full":
        model = replace(model, recompute_granularity="full" if choice.recompute else None)
    if choice.parts:
        names = PARTS if model.num_experts is not None else PARTS[:2]
        model = replace(model, recompute_granularity="selective", recompute_modules=names)
    return replace(
        config,
        parallel=parallel,
        ddp=ddp,
        model=model,
        run=replace(config.run, micro_batch_size=choice.micro),
    )


def flags_of(config: JobConfig | ModelRun, choice: Choice) -> str:
    """Return the options that change a configuration into a layout when they are added.

    They are options of the main job, or of the plan of a Hugging Face model, including options that a layout resets.
    """
    if isinstance(config, ModelRun):
        return _flags_of_model(config, _model_with(config, choice))
    return _flags_of_job(config, _job_with(config, choice))


def _flags_of_model(config: ModelRun, found: ModelRun) -> str:
    given: dict[str, object] = {axis: getattr(found, axis) for axis in ("tp", "pp", "cp", "ep")}
    given |= {"zero": found.zero, "micro-batch": found.micro_batch_size}
    if (found.sequence_parallel, config.sequence_parallel) != (None, None):
        given["sequence-parallel"] = found.sequence_parallel or NO_MODE
    if found.vpp != config.vpp:
        given["vpp"] = found.vpp
    if found.layers_per_stage != config.layers_per_stage:
        given["layers-per-stage"] = " ".join(map(str, found.layers_per_stage))
    return " ".join([*(f"--{name} {value}" for name, value in given.items()), *["--recompute"] * found.recompute])


def _flags_of_job(config: JobConfig, found: JobConfig) -> str:
    parallel, ddp = found.parallel, found.ddp
    has_experts = found.model.num_experts is not None
    words = [f"--parallel.{axis} {getattr(parallel, axis)}" for axis in (AXES if has_experts else AXES[:3])]
    words.append(f"--run.micro-batch-size {found.run.micro_batch_size}")
    if not ddp.use_distributed_optimizer:
        words.append("--ddp.no-use-distributed-optimizer")
    elif not config.ddp.use_distributed_optimizer:
        words.append("--ddp.use-distributed-optimizer")
    words.append(f"--ddp.data-parallel-sharding-strategy {ddp.data_parallel_sharding_strategy}")
    instances = ddp.num_distributed_optimizer_instances
    if instances != config.ddp.num_distributed_optimizer_instances:
        words.append(f"--ddp.num-distributed-optimizer-instances {instances}")
    if not ddp.overlap_param_gather:
        words.append("--ddp.no-overlap-param-gather")
    granularity = found.model.recompute_granularity
    if granularity != config.model.recompute_granularity:
        words.append(f"--model.recompute-granularity {granularity}")
    if found.model.recompute_modules != config.model.recompute_modules:
        words.append(f"--model.recompute-modules {' '.join(found.model.recompute_modules)}")
    for name in ("dp", "etp", "sequence_parallel", "vpp", "schedule"):
        value = getattr(parallel, name)
        if value != getattr(config.parallel, name) and name not in (AXES if has_experts else ()):
            words.append(f"--parallel.{name.replace('_', '-')} {value}")
    if parallel.layers_per_stage != config.parallel.layers_per_stage:
        words.append(" ".join(["--parallel.layers-per-stage", *map(str, parallel.layers_per_stage)]))
    return " ".join(words)
