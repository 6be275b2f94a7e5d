"""Choices: the layouts that a model and a batch can have on some ranks, by arithmetic alone."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import NamedTuple

from core.distributed.distributed_data_parallel_config import STRATEGIES
from core.training.config import JobConfig
from core.training.sizes import divisors

FEWEST_TOKENS = 1024  # of a sequence on one rank: shorter parts are not considered for context parallelism
AXES = ("tp", "pp", "cp", "ep", "etp")


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
        """How the ranks are divided, in the order of AXES."""
        return self[: len(AXES)]

    @property
    def split(self) -> tuple[int, ...]:
        """What one layer's cost depends on, beside the microbatch."""
        return self.tp, self.cp, self.ep, self.etp, self.recompute

    def words(self, *, has_experts: bool) -> str:
        """The layout for a table."""
        axes = [f"{name} {size}" for name, size in zip(AXES, self, strict=False) if has_experts or name[0] != "e"]
        more = [f"zero {self.zero}", f"micro-batch {self.micro}", *["recompute"] * self.recompute]
        return "  ".join([*axes, *more])


def choices(config: JobConfig, ranks: int, fixed: Mapping[str, int]) -> Iterator[tuple[Choice, list[int]]]:
    """(layout, the microbatches that its share of the batch can be cut into), without what numbers alone rule out.

    fixed: sizes of axes, `dp` or `micro`, that are given. What is sharded and computed again is left to the caller.
    """
    model, batch = config.model, config.run.global_batch_size
    sizes = {axis: [fixed[axis]] if axis in fixed else divisors(ranks) for axis in ("tp", "pp", "cp")}
    for tp, pp, cp in itertools.product(*sizes.values()):
        if ranks % (tp * pp * cp) or pp > model.num_layers:
            continue
        dp = ranks // (tp * pp * cp)
        if (
            batch % dp
            or dp != fixed.get("dp", dp)
            or any(size % tp for size in (model.num_attention_heads, model.query_groups, model.ffn_width))
        ):
            continue
        if cp > 1 and "cp" not in fixed and model.sequence_length < cp * FEWEST_TOKENS:
            continue
        micros = [micro for micro in divisors(batch // dp) if micro == fixed.get("micro", micro)]
        for ep, etp in _expert_sizes(config, ranks // pp, tp, fixed) if micros else ():
            yield Choice(tp, pp, cp, ep, etp), micros


def _expert_sizes(config: JobConfig, ranks: int, tp: int, fixed: Mapping[str, int]) -> Iterator[tuple[int, int]]:
    """(ep, etp) of the ranks of one stage."""
    experts = config.model.num_experts
    if experts is None:
        yield 1, tp
        return
    eps = [fixed["ep"]] if "ep" in fixed else divisors(experts)
    etps = [fixed["etp"]] if "etp" in fixed else sorted({1, tp})
    for ep, etp in itertools.product(eps, etps):
        if ranks % (ep * etp) == 0 and experts % ep == 0 and config.model.expert_width % etp == 0:
            yield ep, etp


def with_choice(config: JobConfig, choice: Choice) -> JobConfig:
    """The configuration of a layout. Its schedule stays where the layout has a pipeline."""
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


def flags_of(config: JobConfig, choice: Choice) -> str:
    """The options of the main job that are this layout."""
    told = [f"--parallel.{axis} {getattr(choice, axis)}" for axis in ("tp", "pp", "cp")]
    if config.model.num_experts is not None:
        told += [f"--parallel.{axis} {getattr(choice, axis)}" for axis in ("ep", "etp")]
    told.append(f"--run.micro-batch-size {choice.micro}")
    if choice.zero == 0:
        told.append("--ddp.no-use-distributed-optimizer")
    told.append(f"--ddp.data-parallel-sharding-strategy {STRATEGIES[choice.zero]}")
    if choice.zero in (0, 3):
        told.append("--ddp.no-overlap-param-gather")
    if choice.recompute:
        told.append("--model.recompute-granularity full")
    return " ".join(told)
