"""The oracle is tested: every rule and divisor, spoilt where it matters, turns it red, and the report names it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from core import parallel_state
from core.distributed import router_state
from core.distributed.buffer.bucket import Bucket
from core.distributed.contract.gradient_contract import DEFAULT_RULES
from core.distributed.reduce.sync_rules import GradSync
from core.distributed.wire.collectives import Collectives, Handle, InFlight, scale_now
from core.moe import MoEAuxLossAutoScaler, TopKRouter
from core.pipeline_parallel import runner
from tests.layouts.gpt import check_gpt
from tests.layouts.layouts import Layout
from tests.unit_tests.booster.test_low_level_zero_options import over_sockets
from tests.unit_tests.rank_codes import mutate_reductions, mutate_scale
from tests.unit_tests.ranks import ranks
from tests.unit_tests.verify.test_verify import red

Spoilt = Callable[[], AbstractContextManager[Any]]

EXPERTS = Layout(dp=2, experts="alltoall", aux="aux_loss", microbatches=3)
PIPELINE = Layout(pp=2, schedule="1F1B", microbatches=3)
HOUSE = Layout(
    dp=2, tp=2, sp=True, pp=2, schedule="1F1B", ep=2, etp=1, experts="alltoall", aux="aux_loss", microbatches=3
)


@dataclass(frozen=True)
class Case:
    """A layout in which a rule matters, the rule spoilt, and what the report must say. cause: in its cause.

    gathers: True where sharded parameters are gathered, as between hosts, and not mapped.
    """

    layout: Layout
    spoil: Spoilt
    parameter: str
    cause: tuple[str, ...]
    nightly: bool = False
    gathers: bool = False


# --- ways to spoil ----------------------------------------------------------------------------------------------------


def rule(name: str, mutation: str) -> Spoilt:
    """One sync rule is dropped, run twice, or takes the mean for the sum and the other way round."""
    assert name in {rule.name for rule in DEFAULT_RULES}
    build = GradSync.__init__

    def spoilt(self: GradSync, order: Any, rules: Any, *rest: Any) -> None:
        changed = []
        for entry in rules:
            other = replace(entry, op="mean" if entry.op == "sum" else "sum")
            again = replace(entry, name=f"{entry.name}, again")
            chosen = {"drop": [], "double": [entry, again], "rescale": [other]}[mutation]
            changed += chosen if entry.name == name else [entry]
        build(self, order, changed, *rest)

    return lambda: mock.patch.object(GradSync, "__init__", spoilt)


def reduction(group: str, mutation: str) -> Spoilt:
    """Every reduction of gradients over a group is dropped, done twice or divided once too often."""

    @contextmanager
    def spoilt() -> Iterator[None]:
        build = parallel_state.initialize_model_parallel
        entered: list[Any] = []

        def built(**sizes: Any) -> None:
            build(**sizes)
            entered.append(mutate_reductions(group, mutation))
            entered[0].__enter__()

        with mock.patch.object(parallel_state, "initialize_model_parallel", built):
            try:
                yield
            finally:
                entered[0].__exit__(None, None, None)

    return spoilt


def over(group: str, instead: str | None, *, counts: bool) -> Spoilt:
    """All-reduces over a group go over another one, or nowhere; those of counts (whole numbers), or of gradients.

    A reduce-scatter becomes an all-reduce over the other group: each rank keeps its shard of that one's sum.
    """
    all_reduce, reduce_scatter = Collectives.start_all_reduce, Collectives.start_reduce_scatter

    def spoilt(launch: Any, self: Collectives, tensor: torch.Tensor, to: Any, op: Any, scale: float) -> InFlight:
        groups = parallel_state.get_process_groups()
        is_count = not tensor.dtype.is_floating_point
        is_tokens = tensor.dim() == 0
        if to is not getattr(groups, group) or is_count != counts or is_tokens:
            return launch(self, tensor, to, op, scale)
        if instead is None:
            scale_now(tensor, scale)
            return Handle()
        return all_reduce(self, tensor, groups.require(instead), op, scale)

    @contextmanager
    def both() -> Iterator[None]:
        with (
            mock.patch.object(Collectives, "start_all_reduce", lambda *of: spoilt(all_reduce, *of)),
            mock.patch.object(Collectives, "start_reduce_scatter", lambda *of: spoilt(reduce_scatter, *of)),
        ):
            yield

    return both


def divisor(factor: float, *, experts_only: bool = False) -> Spoilt:
    """Buckets are multiplied by another factor than their contract's divisor gives."""
    if not experts_only:
        return lambda: mutate_scale(factor)
    launch = Bucket.launch

    def spoilt(self: Bucket, collectives: Collectives, **options: Any) -> None:
        right = self.scale
        self.scale = right * factor if self.contracts[0].is_expert else right
        try:
            launch(self, collectives, **options)
        finally:
            self.scale = right

    return lambda: mock.patch.object(Bucket, "launch", spoilt)


def tokens(count: Callable[[torch.Tensor, Any], torch.Tensor]) -> Spoilt:
    """Gradients are divided by another number of tokens. count: (this rank's, its chunk) -> that number."""
    return lambda: mock.patch("core.distributed.finalize_model_grads._global_num_tokens", count)


def tokens_of(group: str) -> Callable[[torch.Tensor, Any], torch.Tensor]:
    def count(mine: torch.Tensor, chunk: Any) -> torch.Tensor:
        total = mine.detach().double().reshape(()).clone()
        dist.all_reduce(total, group=chunk.groups.require(group))
        return total.clamp(min=1)

    return count


def weight_of_auxiliary(change: Callable[[float], float], *, where: str) -> Spoilt:
    """Auxiliary losses weigh otherwise next to the loss of a microbatch. where: the module that says how much."""
    import core.moe

    return lambda: mock.patch(
        f"{where}.auxiliary_loss_scale", lambda scale: core.moe.auxiliary_loss_scale(change(float(scale)))
    )


def factor_in_router(divide_by: Callable[[TopKRouter, torch.Tensor], float]) -> Spoilt:
    """A router forgets one of its factors. divide_by: the router and its logits -> that factor."""
    with_losses, apply = TopKRouter._with_losses, MoEAuxLossAutoScaler.apply
    forgotten = [1.0]

    def spoilt(self: TopKRouter, probs: Any, logits: torch.Tensor, *rest: Any) -> Any:
        in_layout = self.groups.dp_cp is not None  # and not the reference's
        forgotten[0] = divide_by(self, logits) if in_layout else 1.0
        return with_losses(self, probs, logits, *rest)

    @contextmanager
    def both() -> Iterator[None]:
        with (
            mock.patch.object(TopKRouter, "_with_losses", spoilt),
            mock.patch.object(MoEAuxLossAutoScaler, "apply", lambda probs, loss: apply(probs, loss / forgotten[0])),
        ):
            yield

    return both


def loads_of_a_rank() -> AbstractContextManager[Any]:
    """Each rank balances the load of its own tokens."""
    total = TopKRouter._total
    return mock.patch.object(
        TopKRouter, "_total", lambda self, counts, axes: total(self, counts, axes) if self.groups.dp is None else counts
    )


def bias_moves(factor: float) -> Spoilt:
    update = router_state._move_expert_biases
    return lambda: mock.patch.object(
        router_state, "_move_expert_biases", lambda parts, rate, *others: update(parts, rate * factor, *others)
    )


def microbatches_added() -> AbstractContextManager[Any]:
    record = runner.PipelineRunner._record
    return mock.patch.object(
        runner.PipelineRunner, "_record", lambda self, *args: record(self, *args) * len(self.microbatches)
    )


# --- the cases --------------------------------------------------------------------------------------------------------

SP = Layout(dp=2, tp=2, sp=True)
CONTEXT = Layout(dp=2, cp=2, cp_comm="p2p")
TOKENS = replace(CONTEXT, per_token=True)
EXPERT_DATA = replace(EXPERTS, dp=4, ep=2)
EXPERT_TENSOR = replace(EXPERTS, etp=2)
BIAS = replace(EXPERTS, tp=2, etp=1, expert_bias=True)
TAGGED = replace(PIPELINE, model="tagged")
SMALL_HOUSE = replace(HOUSE, tp=1, sp=False)

# A rule, the layout in which it matters, a parameter that it serves, and the group of ranks that the report names. The
# ranks of a rule across stages differ by their stage.
RULES = {
    "tensor-parallel sum": (SP, "layernorm", "tp"),
    "tensor-parallel mean": (replace(SP, model="tagged"), "input_layernorm.weight", "tp"),
    "expert tensor-parallel sum": (EXPERT_TENSOR, "experts.bias2", "expt_tp"),
    "expert tensor-parallel mean": (replace(EXPERT_TENSOR, model="tagged"), "experts.bias2", "expt_tp"),
    "tied word embedding sum": (PIPELINE, "word_embeddings.weight", "embd"),
    "position embedding sum": (TAGGED, "embedding.position_embeddings.weight", "pos_embd"),
    "pipeline-replicated sum": (TAGGED, "conditioner", "pp"),
}
SUM_WORDS = {"drop": "", "double": "times too large", "rescale": "the mean was taken where the sum was due"}
MEAN_WORDS = {"drop": "", "rescale": "times too large"}  # a mean taken twice is the mean
ALWAYS = {
    ("tied word embedding sum", "drop"),
    ("pipeline-replicated sum", "double"),
    ("position embedding sum", "rescale"),
    ("expert tensor-parallel sum", "drop"),
    ("tensor-parallel mean", "rescale"),
}


# The first wrong gradient lies in one rank's shard, so that of the divisors the report knows that rank's.
OF_ONE_SHARD = {
    "tokens: a rank's own": ("divided by 34 tokens, and the whole batch has 97",),
    "tokens: cp forgotten": ("divided by 47 tokens, and the whole batch has 97",),
}


def rule_cases() -> Iterator[tuple[str, Case]]:
    for name, (layout, parameter, group) in RULES.items():
        kind, words = ("mean", MEAN_WORDS) if name.endswith("mean") else ("sum", SUM_WORDS)
        for mutation, cause in words.items():
            spoilt = Case(layout, rule(name, mutation), parameter, (f"{kind} over {group} ({name})", cause))
            nightly = (name, mutation) not in ALWAYS
            for strategy in ("no_shard", "optim", "optim_grads"):
                case = replace(spoilt, layout=replace(layout, strategy=strategy))
                yield f"{name}: {mutation}, {strategy}", replace(case, nightly=strategy != "no_shard" or nightly)
            yield from with_sharded_parameters(f"{name}: {mutation}", spoilt, nightly)


def with_sharded_parameters(name: str, case: Case, nightly: bool) -> Iterator[tuple[str, Case]]:
    """The case under 'optim_grads_params', mapped and gathered; the suite has one of the two in turn."""
    for gathers in (False, True):
        sharded = replace(
            case,
            layout=replace(case.layout, strategy="optim_grads_params"),
            cause=OF_ONE_SHARD.get(name, case.cause),
            nightly=nightly or gathers != bool(len(name) % 2),
            gathers=gathers,
        )
        yield f"{name}, optim_grads_params{', gathered' if gathers else ''}", sharded


EXPERT_SUM = "'sum over expt_dp / 4'"
OTHERS = {
    "expert data: drop": Case(EXPERT_DATA, reduction("expt_dp", "drop"), "experts", ("over expert dp", EXPERT_SUM)),
    "expert data: double": Case(
        EXPERT_DATA, reduction("expt_dp", "double"), "experts", ("too large", EXPERT_SUM), True
    ),
    "expert data: rescale": Case(EXPERT_DATA, reduction("expt_dp", "rescale"), "experts", ("1/n twice",), True),
    "expert data: divided by its own size": Case(
        EXPERT_DATA, divisor(2.0, experts_only=True), "experts", ("ep times too large (ep is 2)", EXPERT_SUM)
    ),
    "data: drop": Case(CONTEXT, reduction("dp_cp", "drop"), "", ("not reduced over cp and dp",), True),
    "data: double": Case(CONTEXT, reduction("dp_cp", "double"), "", ("cp times too large",), True),
    "data: rescale": Case(CONTEXT, reduction("dp_cp", "rescale"), "", ("cp x dp = 4 times too small",), True),
    "data: cp forgotten": Case(CONTEXT, over("dp_cp", "dp", counts=False), "", ("not reduced over cp",)),
    "data: dp forgotten": Case(CONTEXT, over("dp_cp", "cp", counts=False), "", ("not reduced over dp:",), True),
    "data: not divided by cp": Case(CONTEXT, divisor(2.0), "", ("cp times too large (cp is 2)",), True),
    "tokens: not divided": Case(
        TOKENS,
        tokens(lambda mine, _: torch.ones((), dtype=torch.float64)),
        "",
        ("97 times too large, the number of tokens",),
        True,
    ),
    "tokens: a rank's own": Case(
        TOKENS, tokens(lambda mine, _: mine.double().reshape(())), "", ("divide by [11, 13, 39, 34] tokens",)
    ),
    "tokens: cp forgotten": Case(TOKENS, tokens(tokens_of("dp")), "", ("divide by [50, 47, 50, 47] tokens",), True),
    "auxiliary: not divided by microbatches": Case(
        EXPERTS,
        weight_of_auxiliary(lambda scale: 1.0, where="core.verify.job"),
        "",
        ("auxiliary losses have 3 times", "not divided by the number of microbatches"),
    ),
    "auxiliary: doubled in a pipeline": Case(
        SMALL_HOUSE,
        weight_of_auxiliary(lambda scale: 2 * scale, where="core.pipeline_parallel.runner"),
        "",
        ("auxiliary losses have 2 times",),
        True,
    ),
    "auxiliary: lost in a pipeline": Case(
        SMALL_HOUSE,
        weight_of_auxiliary(lambda scale: 0.0, where="core.pipeline_parallel.runner"),
        "",
        ("auxiliary losses have 0 times",),
    ),
    "auxiliary: cp forgotten": Case(
        replace(EXPERTS, cp=2, cp_comm="p2p"),
        factor_in_router(lambda router, logits: router.groups.size("cp")),
        "",
        ("auxiliary losses have 0.5 times", "the ranks of cp (2) share them"),
    ),
    "auxiliary: not times the tokens": Case(
        replace(EXPERTS, per_token=True),
        factor_in_router(lambda router, logits: logits.shape[0] * router.sharing),
        "",
        ("auxiliary losses have 0.03125 times",),  # of 4 x 8 tokens
        True,
    ),
    "auxiliary: a rank's own load": Case(
        replace(EXPERTS, tp=2, etp=1, ep=2), loads_of_a_rank, "", ("backward is wrong before any reduction",), True
    ),
    "bias: own counts": Case(BIAS, over("tp_dp_cp", None, counts=True), "expert_bias", ("not added over tp and dp",)),
    "bias: counts of dp": Case(BIAS, over("tp_dp_cp", "dp", counts=True), "expert_bias", ("added over tp",), True),
    "bias: counts of tp": Case(BIAS, over("tp_dp_cp", "tp", counts=True), "expert_bias", ("added over dp",), True),
    "bias: rate": Case(BIAS, bias_moves(2.0), "expert_bias", ("2 times as far",), True),
    "bias: unmoved": Case(BIAS, bias_moves(0.0), "expert_bias", ("0 times as far",), True),
    "no own gradients to look at": Case(
        Layout(dp=4, strategy="optim_grads", microbatches=3, every_microbatch=True),
        divisor(4.0),
        "",
        ("dp times too large (dp is 4)",),
        True,
    ),
    "left to the optimizer": Case(
        Layout(dp=4, strategy="optim", scale_in_optimizer=True, whole_shards=True),
        reduction("dp_cp", "drop"),
        "",
        ("not reduced over dp",),
        True,
    ),
    "microbatches: added": Case(PIPELINE, microbatches_added, "", ("number of microbatches: not divided",), True),
    "full house: tied": Case(
        HOUSE, rule("tied word embedding sum", "drop"), "word_embeddings", ("not reduced over pp", "over embd"), True
    ),
    "full house: tp": Case(HOUSE, rule("tensor-parallel sum", "drop"), "", ("not reduced over tp",), True),
    "full house: experts": Case(
        HOUSE, divisor(2.0, experts_only=True), "experts", ("ep times too large", "'sum over expt_dp / 2'"), True
    ),
    "full house: data": Case(HOUSE, reduction("dp_cp", "drop"), "", ("not reduced over dp:",), True),
}
# Those that spoil a reduction or a divisor of gradients.
REDUCTIONS = {
    name: case for name, case in OTHERS.items() if name.startswith(("expert data", "data", "tokens", "full house"))
}
CASES = {
    **dict(rule_cases()),
    **OTHERS,
    **{
        name: case
        for other, spoilt in REDUCTIONS.items()
        for name, case in with_sharded_parameters(other, spoilt, nightly=spoilt.nightly)
    },
}


def of_world(world: int, *, nightly: bool) -> list[str]:
    return [name for name, case in CASES.items() if case.layout.world == world and case.nightly == nightly]


def check_case(name: str) -> None:
    case = CASES[name]
    with over_sockets if case.gathers else nullcontext(), case.spoil():
        report = check_gpt(case.layout)
    red(report, *case.cause)
    names = {entry.name for entry in report.wrong}
    assert any(case.parameter in wrong for wrong in names), names
    if name.startswith(tuple(RULES)) and not name.startswith("tensor-parallel sum"):  # which serves many
        assert all(case.parameter in wrong for wrong in names), f"others are blamed too: {names}"


def test_every_rule_is_spoilt() -> None:
    assert set(RULES) == {rule.name for rule in DEFAULT_RULES}
    assert {case.layout.world for case in CASES.values()} == {2, 4, 8}


@ranks(2)
@pytest.mark.parametrize("case", of_world(2, nightly=False))
def test_a_spoilt_rule_is_named_on_two_ranks(rank: int, world: int, case: str) -> None:
    check_case(case)


@ranks(4)
@pytest.mark.parametrize("case", of_world(4, nightly=False))
def test_a_spoilt_rule_is_named_on_four_ranks(rank: int, world: int, case: str) -> None:
    check_case(case)


@pytest.mark.nightly
@ranks(2)
@pytest.mark.parametrize("case", of_world(2, nightly=True))
def test_every_spoilt_rule_is_named_on_two_ranks(rank: int, world: int, case: str) -> None:
    check_case(case)


@pytest.mark.nightly
@ranks(4)
@pytest.mark.parametrize("case", of_world(4, nightly=True))
def test_every_spoilt_rule_is_named_on_four_ranks(rank: int, world: int, case: str) -> None:
    check_case(case)


@pytest.mark.nightly
@ranks(8, timeout_s=120)
@pytest.mark.parametrize("case", of_world(8, nightly=True))
def test_every_spoilt_rule_is_named_on_eight_ranks(rank: int, world: int, case: str) -> None:
    check_case(case)
