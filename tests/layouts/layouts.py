"""Layout: how a model's training is split over ranks, what makes one legal, and how it is written. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from core.context_parallel import check_sequence_length
from core.distributed.distributed_data_parallel_config import Strategy
from core.groups.rank_grid import DEFAULT_ORDER, RankGrid, group_ranks
from core.pipeline_parallel import PipelineLayout, plan_pipeline

SEQUENCE, HEADS, QUERY_GROUPS, EXPERTS, FFN, EXPERT_FFN = 8, 8, 4, 4, 48, 24  # of the models in tests.layouts.gpt
MODELS = ("classic", "modern", "tagged")
FLAGS = (
    *("per_token", "average", "fusion", "recompute", "deterministic"),
    *("scale_in_optimizer", "whole_shards", "every_microbatch", "overlap_gather"),
)


@dataclass(frozen=True)
class Layout:
    """One row of the table. Everything has the default of a plain run on one process.

    Ranks: dp, tp, pp, cp and of the experts ep and etp (None: as tp) are sizes; order is that of the axes in the rank's
    number; instances: distributed optimizer instances.

    Axes: sp: sequence parallelism. schedule: of the pipeline, by its name in core.pipeline_parallel; vpp: chunks a
    rank; uneven: the first stage gives a layer to the second. cp_comm: 'p2p' (a ring), 'all_gather' or 'a2a'. experts:
    the dispatcher, 'alltoall' or 'allgather', and every second layer has experts; aux: over what their balance is
    measured, with a z-loss next to it; expert_bias: routers with a bias, moved by the counts of each step; shared: an
    expert for all tokens, with a gate.

    Steps: microbatches: backwards a step. per_token: the loss is a sum, with another number of tokens on every rank
    (none on some), divided by all of them at the end. recompute: layers are computed again in backward. fusion: linear
    layers write their weight gradients into the buffer.

    Gradients: strategy; overlap; bucket_size: elements, None for the default; average: the collective divides;
    deterministic: reductions add in rank order; scale_in_optimizer: divided at the very end; whole_shards: no parameter
    lies in two shards; every_microbatch: whole gradients are not even kept for a step; overlap_gather: a bucket's
    parameters are gathered while the optimizer steps the next bucket.

    model: 'classic' (learned positions, GELU, LayerNorm), 'modern' (rotary, SwiGLU, RMSNorm, grouped queries, q/k norm)
    or 'tagged' (classic, with a parameter for every sync rule that those two do not need). tied: do embedding and
    output share a weight? By default all but 'modern' do.
    """

    dp: int = 1
    tp: int = 1
    sp: bool = False
    pp: int = 1
    schedule: str | None = None
    vpp: int = 1
    uneven: bool = False
    cp: int = 1
    cp_comm: str | None = None
    ep: int = 1
    etp: int | None = None
    experts: str | None = None
    aux: str | None = None
    expert_bias: bool = False
    shared: bool = False
    order: str = DEFAULT_ORDER
    strategy: Strategy = "no_shard"
    overlap: bool = False
    bucket_size: int | None = None
    microbatches: int = 1
    instances: int = 1
    per_token: bool = False
    average: bool = False
    fusion: bool = False
    recompute: bool = False
    deterministic: bool = False
    scale_in_optimizer: bool = False
    whole_shards: bool = False
    every_microbatch: bool = False
    overlap_gather: bool = False
    model: str = "classic"
    tied: bool | None = None

    @property
    def world(self) -> int:
        """The number of ranks."""
        return self.dp * self.tp * self.cp * self.pp

    @property
    def shares_embedding(self) -> bool:
        """Do embedding and output share a weight?"""
        return self.model != "modern" if self.tied is None else self.tied

    @property
    def num_layers(self) -> int:
        """Layers of the model: two, or four and more where there are stages, at least one for each."""
        return 2 if self.pp == 1 else max(4, self.pp * self.vpp)

    @property
    def pipeline(self) -> PipelineLayout | None:
        """The stages; None without a pipeline. ValueError where they do not come out."""
        return _pipeline(self.pp, self.schedule, self.vpp, self.uneven, self.microbatches)

    @property
    def problem(self) -> str | None:
        """Why no such layout can run, in words; None for a legal one."""
        for rule in RULES:
            trouble = rule.problem(*(getattr(self, axis) for axis in rule.axes))
            if trouble:
                return trouble
        return None

    @property
    def family(self) -> Layout | None:
        """In deterministic mode layouts of one family give the same bits; None outside of that mode.

        Of such layouts only strategy, overlap and bucket size differ.
        """
        if not self.deterministic:
            return None
        return replace(self, strategy="no_shard", overlap=False, bucket_size=None)

    def __str__(self) -> str:
        words = [f"dp{self.dp}", f"tp{self.tp}{'+sp' if self.sp else ''}"]
        if self.pp > 1:
            words += [f"pp{self.pp}{f'x{self.vpp}' if self.vpp > 1 else ''}", str(self.schedule)]
            words += ["uneven"] if self.uneven else []
        words += [f"cp{self.cp}", str(self.cp_comm)] if self.cp > 1 else []
        if self.experts:
            words += [f"ep{self.ep}", *([] if self.etp is None else [f"etp{self.etp}"]), self.experts]
            words += [self.aux] if self.aux else []
            words += [flag.replace("_", "-") for flag in ("expert_bias", "shared") if getattr(self, flag)]
        words += [self.order] if self.order != DEFAULT_ORDER else []
        words += [self.strategy]
        words += ["overlap"] if self.overlap else []
        words += [f"bucket {self.bucket_size}"] if self.bucket_size else []
        words += [f"{self.microbatches} microbatches"] if self.microbatches > 1 else []
        words += [f"{self.instances} instances"] if self.instances > 1 else []
        words += [flag.replace("_", " ") for flag in FLAGS if getattr(self, flag)]
        words += [self.model] if self.model != "classic" else []
        words += [] if self.tied is None else ["tied" if self.tied else "untied"]
        return " ".join(words)


# --- what makes a layout legal ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rule:
    """Something that holds between a few axes. `problem`: their values -> what is wrong, in words, or None.

    Knowing which axes a rule reads lets a search give up as soon as those are chosen.
    """

    axes: tuple[str, ...]
    problem: Callable[..., str | None]


def _only_with(axis: str, other: str, why: str, alone: Any = False, needed: Any = None) -> Rule:
    """`axis` may differ from `alone` only where `other` is set (or is above `needed`)."""

    def problem(value: Any, given: Any) -> str | None:
        present = bool(given) if needed is None else given > needed
        return None if value == alone or present else f"{axis}={value!r} without {other}: {why}"

    return Rule((axis, other), problem)


@cache
def _pipeline(pp: int, schedule: str | None, vpp: int, uneven: bool, microbatches: int) -> PipelineLayout | None:
    if (pp > 1) != (schedule is not None):
        raise ValueError(f"pp {pp} and schedule {schedule!r}: a pipeline has both, and nothing else has either")
    if pp == 1:
        if vpp > 1 or uneven:
            raise ValueError("vpp and uneven are of a pipeline; pp is 1")
        return None
    assert schedule is not None, "compared above"
    layers = Layout(pp=pp, vpp=vpp).num_layers
    if not uneven:
        return plan_pipeline(layers, pp, schedule=schedule, chunks=vpp, microbatches=microbatches)
    counts = [layers // (pp * vpp)] * (pp * vpp)
    counts[0], counts[1] = counts[0] - 1, counts[1] + 1
    return plan_pipeline(
        layers, pp, schedule=schedule, chunks=vpp, microbatches=microbatches, layers_per_stage=tuple(counts)
    )


def _stages(pp: int, schedule: str | None, vpp: int, uneven: bool, microbatches: int) -> str | None:
    try:
        _pipeline(pp, schedule, vpp, uneven, microbatches)
    except ValueError as error:
        return str(error)
    return None


@cache
def _grid(dp: int, tp: int, pp: int, cp: int, ep: int, etp: int | None, order: str, instances: int) -> str | None:
    try:
        grid = RankGrid(dp * tp * pp * cp, tp=tp, pp=pp, cp=cp, ep=ep, expt_tp=etp, order=order)
        group_ranks(grid, 0, num_instances=instances)
    except (ValueError, RuntimeError) as error:
        return str(error)
    return None


def _sequence(cp: int, tp: int, sp: bool, experts: str | None) -> str | None:
    try:
        check_sequence_length(SEQUENCE, cp, tp, sp)
    except ValueError as error:
        return str(error)
    if experts and SEQUENCE // cp % tp:
        return f"experts split a rank's {SEQUENCE // cp} positions over tp {tp}"
    return None


def _heads(tp: int, cp: int, cp_comm: str | None, model: str) -> str | None:
    groups = QUERY_GROUPS if model == "modern" else HEADS
    if groups % tp or FFN % tp:
        return f"{groups} heads of keys and values, {FFN} channels, tp {tp}"
    if cp_comm == "a2a" and groups // tp % cp:
        return f"a2a exchanges positions for heads, and {groups} / tp {tp} heads do not divide over cp {cp}"
    return None


def _expert_sizes(experts: str | None, ep: int, etp: int | None, tp: int) -> str | None:
    if experts and (EXPERTS % ep or EXPERT_FFN % (etp or tp)):
        return f"{EXPERTS} experts of {EXPERT_FFN} channels, ep {ep}, etp {etp or tp}"
    return None


def _copies(model: str, schedule: str | None) -> str | None:
    if model == "tagged" and schedule in ("ZBVZeroBubble", "DualPipeV"):
        return f"'tagged' has position embeddings on the first and the last stage, which share a rank under {schedule}"
    return None


RULES: tuple[Rule, ...] = (
    Rule(("pp", "schedule", "vpp", "uneven", "microbatches"), _stages),
    _only_with("sp", "tp", "the sequence is split over tensor-parallel ranks", needed=1),
    _only_with("cp_comm", "cp", "nothing is exchanged", alone=None, needed=1),
    Rule(("cp", "cp_comm"), lambda cp, kind: f"cp {cp} needs cp_comm" if cp > 1 and kind is None else None),
    _only_with("ep", "experts", "there are none", alone=1),
    _only_with("etp", "experts", "there are none", alone=None),
    _only_with("aux", "experts", "there are none", alone=None),
    _only_with("expert_bias", "experts", "there are none"),
    _only_with("shared", "experts", "there are none"),
    Rule(("cp", "tp", "sp", "experts"), _sequence),
    Rule(("tp", "cp", "cp_comm", "model"), _heads),
    Rule(("experts", "ep", "etp", "tp"), _expert_sizes),
    Rule(("model", "schedule"), _copies),
    Rule(
        ("instances", "strategy"),
        lambda n, strategy: "instances shard, and nothing is sharded" if n > 1 and strategy == "no_shard" else None,
    ),
    Rule(
        ("whole_shards", "overlap_gather", "strategy"),
        lambda whole, gather, strategy: "nothing is sharded" if (whole or gather) and strategy == "no_shard" else None,
    ),
    Rule(
        ("every_microbatch", "strategy"),
        lambda every, strategy: (
            "gradients are not sharded" if every and strategy not in ("optim_grads", "optim_grads_params") else None
        ),
    ),
    Rule(
        ("strategy", "schedule"),
        lambda strategy, schedule: (
            "a tied weight belongs to one chunk, and the other one of the rank cannot gather it"
            if strategy == "optim_grads_params" and schedule in ("ZBVZeroBubble", "DualPipeV")
            else None
        ),
    ),
    Rule(
        ("overlap_gather", "strategy"),
        lambda gather, strategy: "the step gathers nothing" if gather and strategy == "optim_grads_params" else None,
    ),
    Rule(
        ("every_microbatch", "vpp"),
        lambda every, vpp: "ranks may differ in which chunk had a backward" if every and vpp > 1 else None,
    ),
    Rule(
        ("average", "scale_in_optimizer"),
        lambda average, later: "two places would divide" if average and later else None,
    ),
    Rule(
        ("per_token", "average"),
        lambda tokens, average: "a sum over tokens is not averaged by a collective" if tokens and average else None,
    ),
    Rule(("dp", "tp", "pp", "cp", "ep", "etp", "order", "instances"), _grid),
)
