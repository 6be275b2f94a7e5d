"""Choices: the layouts that a model and a batch can have on a number of ranks, by arithmetic alone."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from core.distributed.distributed_data_parallel_config import STRATEGIES
from core.hugging_face.run.sequence import OVER_CONTEXT, OVER_TENSOR
from core.number_ranges import divisors
from core.pipeline_parallel.layout import PipelineLayout, spread
from core_plan.job.config import JobConfig
from core_plan.job.limits import flag
from core_plan.model_run import ModelRun

FEWEST_TOKENS = 1024  # tokens per rank: context parallelism is not considered for shorter parts of a sequence
AXES = ("tp", "pp", "cp", "ep", "etp")
NO_MODE = "none"  # option value: no sequence parallelism
CHUNKS = (2, 3, 4, 8)  # considered numbers of stages per rank, if they divide the layers
PARTS = ("layernorm", "mlp_act", "moe_act")  # modules that are recomputed, at almost no cost
STAGES = ("vpp", "layers_per_stage")
# Options of the wrapper that belong to a layout. The first three are only correct together.
SHARDING = (
    *("data_parallel_sharding_strategy", "use_distributed_optimizer", "overlap_param_gather"),
    "num_distributed_optimizer_instances",
)


class Sizes(NamedTuple):
    """Sizes of a model and a batch by which arithmetic excludes layouts."""

    batch: int  # sequences of a step
    layers: int
    sequence: int  # tokens
    of_tp: tuple[int, ...]  # sizes that tp must divide; other limits are checked when a model is split
    experts: int | None  # None for a model without experts
    expert_width: int | None  # size that etp must divide; None if tp splits experts
    frees_stages: bool = True  # the configuration fixes only the number of stages
    has_parts: bool = False  # parts of layers can be recomputed
    empty_ends: bool = False  # the first and the last stage may have no layer
    most_tp: int = 1 << 30  # unless tp is given: links between machines are too slow for exchanges in layers

    @classmethod
    def of(cls, config: JobConfig | ModelRun) -> Sizes:
        """Read the sizes of the main job's model or of a Hugging Face model."""
        if isinstance(config, ModelRun):
            own = config.global_batch_size, config.num_layers, config.sequence_length
            return cls(*own, (), config.whole.num_experts, None, _frees_stages(config))
        model, batch = config.model, config.run.global_batch_size
        of_tp = model.num_attention_heads, model.query_groups, model.ffn_width
        width = None if model.num_experts is None else model.expert_width
        known = batch, model.num_layers, model.sequence_length, of_tp, model.num_experts, width
        return cls(*known, _frees_stages(config), model.recompute_granularity != "selective", empty_ends=True)


def _frees_stages(config: JobConfig | ModelRun) -> bool:
    """Return True if the configuration fixes only the number of stages."""
    pipeline = config if isinstance(config, ModelRun) else config.parallel
    return not pipeline.layers_per_stage and pipeline.vpp == 1 and getattr(pipeline, "schedule", None) is None


class Choice(NamedTuple):
    """One layout."""

    tp: int
    pp: int
    cp: int = 1
    ep: int = 1
    etp: int = 1  # 1, or the value of tp
    zero: int = 0  # ZeRO stage, 0 to 3
    micro: int = 1  # sequences of a microbatch; 0 keeps the configured number
    recompute: bool = False  # complete layers are recomputed
    parts: bool = False  # the modules PARTS of layers are recomputed
    vpp: int = 1  # stages per rank
    instances: int = 1  # optimizer instances, each sharded over some data ranks; 1 keeps the configured number

    @classmethod
    def of(cls, config: JobConfig | ModelRun) -> Choice:
        """Return the layout of a configuration, with its own microbatch."""
        sizes = config if isinstance(config, ModelRun) else config.parallel
        one = cls(sizes.tp, sizes.pp, sizes.cp, sizes.ep, sizes.tp, vpp=sizes.vpp, micro=0)
        if isinstance(config, ModelRun):
            return one._replace(zero=config.zero, recompute=config.recompute)
        again = config.model.recompute_granularity == "full"
        etp = config.parallel.etp or one.tp
        return one._replace(etp=etp, zero=STRATEGIES.index(config.ddp.strategy), recompute=again)

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
    """Generate (layout, its microbatch sizes), without layouts that arithmetic excludes.

    Sharding and recomputation are left to the caller. ``fixed`` are the sizes of axes, ``dp`` or ``micro`` that are
    kept.
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
    axes = {axis: getattr(choice, axis) for axis in ("tp", "pp", "cp", "ep", "zero", "recompute")}
    stages = _stages_of(choice, config, config.num_layers)
    micro = choice.micro or config.micro_batch_size
    return config.in_layout(**axes, sequence_parallel=mode, micro_batch_size=micro, **stages)


def _stages_of(choice: Choice, config: JobConfig | ModelRun, layers: int) -> dict[str, Any]:
    """Return the options of a pipeline. A configured division into stages is kept."""
    if choice.pp == 1:
        return {"vpp": 1, "layers_per_stage": ()}
    if not _frees_stages(config):
        return {}
    return {"vpp": choice.vpp, "layers_per_stage": uneven_stages(layers, choice.pp * choice.vpp)}


def _job_with(config: JobConfig, choice: Choice) -> JobConfig:
    """Apply a layout to the main job's configuration. Its schedule is kept if the layout has a pipeline."""
    model, ddp, has_experts = config.model, config.ddp, config.model.num_experts is not None
    follows_tp = not has_experts or (config.parallel.etp is None and choice.etp == choice.tp)
    parallel = replace(
        config.parallel,
        dp=None,
        tp=choice.tp,
        pp=choice.pp,
        cp=choice.cp,
        ep=choice.ep,
        etp=None if follows_tp else choice.etp,
        sequence_parallel=None if choice.tp == 1 else config.parallel.sequence_parallel,
        schedule=None if choice.pp == 1 else config.parallel.schedule,
        **_stages_of(choice, config, model.num_layers),
    )
    ddp = replace(
        ddp,
        data_parallel_sharding_strategy=STRATEGIES[choice.zero],
        use_distributed_optimizer=choice.zero > 0,
        overlap_param_gather=ddp.overlap_param_gather and choice.zero in (1, 2),
    )
    if choice.instances > 1:
        ddp = replace(ddp, num_distributed_optimizer_instances=choice.instances)
    if choice.recompute or model.recompute_granularity == "full":
        model = replace(model, recompute_granularity="full" if choice.recompute else None)
    if choice.parts:
        names = PARTS if has_experts else PARTS[:2]
        model = replace(model, recompute_granularity="selective", recompute_modules=names)
    run = replace(config.run, micro_batch_size=choice.micro or config.run.micro_batch_size)
    return replace(config, parallel=parallel, ddp=ddp, model=model, run=run)


def flags_of(config: JobConfig | ModelRun, choice: Choice, *, complete: bool = True) -> str:
    """Return the options that change a configuration into a layout when they are added.

    If ``complete`` is True, sizes and sharding are among them even if they do not change.
    """
    found: Any = with_choice(config, choice)
    if isinstance(config, ModelRun):
        names = [*AXES[:4], "zero", "sequence_parallel", "micro_batch_size", *["recompute"] * found.recompute]
        always: Sequence[str] = names if complete else ()
        options = {name: f"--{name.removesuffix('_size').replace('_', '-')}" for name in (*names, *STAGES)}
        pairs = [(config.flags.get(option, option), name, config, found) for name, option in options.items()]
    else:
        always = (*AXES[:4], "micro_batch_size", *SHARDING[:3]) if complete else ()
        sections = ["parallel", "run", *["ddp"] * (complete or found.ddp.strategy != config.ddp.strategy), "model"]
        pairs = [
            (f"--{name}" if name in AXES[:4] else flag(section, name), name, getattr(config, section), new)
            for section, new in ((name, getattr(found, name)) for name in sections)
            for name in (SHARDING if section == "ddp" else vars(new))
        ]
    words = []
    for option, name, old, new in pairs:
        value = getattr(new, name)
        if value == getattr(old, name) and (name not in always or value is None):
            continue
        if value is None and isinstance(new, ModelRun):
            value = NO_MODE
        if isinstance(value, bool):
            words.append(option if value else option.replace(".", ".no-"))
        else:
            words += [option, *map(str, value if isinstance(value, tuple) else [value])]
    return " ".join(words)
