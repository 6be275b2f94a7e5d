"""Choices: the layouts that a model and a batch can have on some ranks, by arithmetic alone."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import NamedTuple

from core.distributed.distributed_data_parallel_config import STRATEGIES
from core.hugging_face.sequence import OVER_CONTEXT, OVER_TENSOR
from core.plan.model_run import ModelRun
from core.training.config import JobConfig
from core.training.sizes import count_parameters, divisors

FEWEST_TOKENS = 1024  # of a sequence on one rank: shorter parts are not considered for context parallelism
AXES = ("tp", "pp", "cp", "ep", "etp")
NO_MODE = "none"  # of sequence parallelism, as an option


class Sizes(NamedTuple):
    """Sizes of a model and a batch by which arithmetic rules layouts out.

    of_tp: sizes that tp has to divide; others are refused when a model is cut. experts: None for a model without.
    expert_width: what etp has to divide; None for experts that tp splits. numel: of all parameters.
    """

    batch: int
    layers: int
    sequence: int
    of_tp: tuple[int, ...]
    experts: int | None
    expert_width: int | None
    numel: int

    @classmethod
    def of(cls, config: JobConfig | ModelRun) -> Sizes:
        """Of the main job's model, or of a Hugging Face model."""
        if isinstance(config, ModelRun):
            whole = config.whole
            numel = sum(parameter.numel() for parameter in whole.model.parameters())
            batch, length = config.global_batch_size, config.sequence_length
            return cls(batch, config.num_layers, length, (), whole.num_experts, None, numel)
        model, batch = config.model, config.run.global_batch_size
        of_tp = model.num_attention_heads, model.query_groups, model.ffn_width
        width = None if model.num_experts is None else model.expert_width
        return cls(
            batch, model.num_layers, model.sequence_length, of_tp, model.num_experts, width, count_parameters(model)
        )


class Choice(NamedTuple):
    """One layout. etp: 1, or tp. zero: 0 to 3, what is sharded. micro: sequences of a microbatch."""

    tp: int
    pp: int
    cp: int = 1
    ep: int = 1
    etp: int = 1
    zero: int = 0
    micro: int = 1
    recompute: bool = False

    @property
    def axes(self) -> tuple[int, ...]:
        """Sizes of the axes, in the order of AXES."""
        return self[: len(AXES)]

    @property
    def split(self) -> tuple[int, ...]:
        """Fields that one layer's cost depends on, in addition to the microbatch."""
        return self.tp, self.cp, self.ep, self.etp, self.recompute

    def words(self, *, has_experts: bool) -> str:
        """The layout for a table."""
        axes = [f"{name} {size}" for name, size in zip(AXES, self, strict=False) if has_experts or name[0] != "e"]
        more = [f"zero {self.zero}", f"micro-batch {self.micro}", *["recompute"] * self.recompute]
        return "  ".join([*axes, *more])


def choices(model: Sizes, ranks: int, fixed: Mapping[str, int]) -> Iterator[tuple[Choice, list[int]]]:
    """(layout, the microbatches that its share of the batch can be cut into), without what numbers alone rule out.

    fixed: sizes of axes, `dp` or `micro`, that are given. What is sharded and computed again is left to the caller.
    """
    for tp, pp, cp, dp in axes(model, ranks, fixed):
        if model.batch % dp:
            continue
        micros = [micro for micro in divisors(model.batch // dp) if micro == fixed.get("micro", micro)]
        for ep, etp in _expert_sizes(model, ranks // pp, tp, fixed) if micros else ():
            yield Choice(tp, pp, cp, ep, etp), micros


def axes(model: Sizes, ranks: int, fixed: Mapping[str, int]) -> Iterator[tuple[int, int, int, int]]:
    """(tp, pp, cp, dp) that the model has room for, with any batch."""
    sizes = {axis: [fixed[axis]] if axis in fixed else divisors(ranks) for axis in ("tp", "pp", "cp")}
    for tp, pp, cp in itertools.product(*sizes.values()):
        if ranks % (tp * pp * cp) or pp > model.layers or any(size % tp for size in model.of_tp):
            continue
        if cp > 1 and "cp" not in fixed and model.sequence < cp * FEWEST_TOKENS:
            continue
        dp = ranks // (tp * pp * cp)
        if dp == fixed.get("dp", dp):
            yield tp, pp, cp, dp


def _expert_sizes(model: Sizes, ranks: int, tp: int, fixed: Mapping[str, int]) -> Iterator[tuple[int, int]]:
    """(ep, etp) of the ranks of one stage."""
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
    """Configuration of a run in a layout. All that is not part of a layout is unchanged."""
    return _model_with(config, choice) if isinstance(config, ModelRun) else _job_with(config, choice)


def _model_with(config: ModelRun, choice: Choice) -> ModelRun:
    """A mode of sequence parallelism stays where its axis has several ranks. Context parallelism always has one."""
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
    )


def _job_with(config: JobConfig, choice: Choice) -> JobConfig:
    """Its schedule stays where the layout has a pipeline."""
    etp = choice.etp if config.model.num_experts is not None else None
    parallel = replace(config.parallel, dp=None, tp=choice.tp, pp=choice.pp, cp=choice.cp, ep=choice.ep, etp=etp)
    if choice.tp == 1:
        parallel = replace(parallel, sequence_parallel=None)
    if choice.pp == 1:
        parallel = replace(parallel, vpp=1, schedule=None, layers_per_stage=())
    ddp = replace(
        config.ddp,
        data_parallel_sharding_strategy=STRATEGIES[choice.zero],
        use_distributed_optimizer=choice.zero > 0,
        overlap_param_gather=config.ddp.overlap_param_gather and choice.zero in (1, 2),
    )
    granularity = config.model.recompute_granularity
    if choice.recompute or granularity == "full":
        granularity = "full" if choice.recompute else None
    return replace(
        config,
        parallel=parallel,
        ddp=ddp,
        model=replace(config.model, recompute_granularity=granularity),
        run=replace(config.run, micro_batch_size=choice.micro),
    )


def flags_of(config: JobConfig | ModelRun, choice: Choice) -> str:
    """The options that turn a configuration into a layout when they are added: those of the main job, or of a plan
    of a Hugging Face model. Options that a layout resets are among them.
    """
    if isinstance(config, ModelRun):
        return _flags_of_model(config, _model_with(config, choice))
    return _flags_of_job(config, _job_with(config, choice))


def _flags_of_model(config: ModelRun, found: ModelRun) -> str:
    given: dict[str, object] = {axis: getattr(found, axis) for axis in ("tp", "pp", "cp", "ep")}
    given |= {"zero": found.zero, "micro-batch": found.micro_batch_size}
    if (found.sequence_parallel, config.sequence_parallel) != (None, None):
        given["sequence-parallel"] = found.sequence_parallel or NO_MODE
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
    if not ddp.overlap_param_gather:
        words.append("--ddp.no-overlap-param-gather")
    granularity = found.model.recompute_granularity
    if granularity != config.model.recompute_granularity:
        words.append(f"--model.recompute-granularity {granularity}")
    for name in ("dp", "etp", "sequence_parallel", "vpp", "schedule"):
        value = getattr(parallel, name)
        if value != getattr(config.parallel, name) and name not in (AXES if has_experts else ()):
            words.append(f"--parallel.{name.replace('_', '-')} {value}")
    if parallel.layers_per_stage != config.parallel.layers_per_stage:
        words.append("--parallel.layers-per-stage")  # none
    return " ".join(words)
