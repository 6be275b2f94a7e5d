"""The tests of finalize_model_grads are tested: a reduction dropped, done twice or rescaled must turn them red."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch

from core.distributed import ContractError, DistributedDataParallel, declare_gradient, finalize_model_grads
from core.distributed.contract.gradient_contract import DEFAULT_RULES, GradSyncRule
from core.model_parallel_config import ModelParallelConfig
from tests.unit_tests.booster.test_low_level_zero_options import over_sockets
from tests.unit_tests.distributed.reduce.test_finalize_model_grads import both_strategies, own_data_group, start
from tests.unit_tests.rank_codes import (
    MUTATIONS,
    ODD,
    Bag,
    digits,
    mutate_reductions,
    mutate_scale,
    red_somewhere,
    somewhere,
    step,
)
from tests.unit_tests.ranks import ranks
from tests.unit_tests.reference import wrap_unwatched as wrap

Scenario = tuple[list[DistributedDataParallel], list[dict[str, float]], dict[str, Any]]


def one(bag: Bag, config: ModelParallelConfig, expected: dict[str, float], strategy: str, **options: Any) -> Scenario:
    return [wrap(bag, config, data_parallel_sharding_strategy=strategy, **options)], [expected], {}


def data_parallel(rank: int, strategy: str) -> Scenario:
    return one(Bag(w=ODD), start(), {"w": 1111 / 4}, strategy)


def sequence_parallel(rank: int, strategy: str) -> Scenario:
    config = start(tensor_model_parallel_size=2, sequence_parallel=True)
    bag = Bag(norm=ODD, split=ODD).tag("norm", sequence_parallel=True).tag("split", tensor_model_parallel=True)
    return one(bag, config, {"norm": 1111 / 2, "split": own_data_group(rank) / 2}, strategy)


def declared(rank: int, strategy: str) -> Scenario:
    config = start(tensor_model_parallel_size=2)
    bag = Bag(q_norm=ODD)
    declare_gradient(bag.q_norm, partial_over=("tp",))
    return one(bag, config, {"q_norm": 1111 / 2}, strategy)


def averaged(rank: int, strategy: str) -> Scenario:
    config = start(tensor_model_parallel_size=2)
    bag = Bag(router=ODD).tag("router", average_gradients_across_tp_domain=True)
    return one(bag, config, {"router": 1111 / 4}, strategy)


def pipeline_replicated(rank: int, strategy: str) -> Scenario:
    config = start(pipeline_model_parallel_size=2)
    return one(Bag(w=ODD).tag("w", pipeline_parallel=True), config, {"w": 1111 / 2}, strategy)


def word_embedding(rank: int, strategy: str) -> Scenario:
    config = start(pipeline_model_parallel_size=4)
    bag = Bag(w=ODD)
    if rank in (0, 3):
        bag.tag("w", shared_embedding=True)
    return one(bag, config, {"w": digits(0, 3) if rank in (0, 3) else digits(rank)}, strategy)


def position_embedding(rank: int, strategy: str) -> Scenario:
    from core import parallel_state

    parallel_state.initialize_model_parallel(
        pipeline_model_parallel_size=4, get_position_embedding_ranks=lambda stages: stages[:2]
    )
    bag = Bag(w=ODD)
    if rank < 2:
        bag.tag("w", shared_position_embedding=True)
    expected = {"w": digits(0, 1) if rank < 2 else digits(rank)}
    return one(bag, ModelParallelConfig(pipeline_model_parallel_size=4), expected, strategy)


def expert(rank: int, strategy: str) -> Scenario:
    config = start(expert_model_parallel_size=2)
    return one(Bag(w=ODD).tag("w", allreduce=False), config, {"w": own_data_group(rank) / 4}, strategy)


def expert_sequence_parallel(rank: int, strategy: str) -> Scenario:
    # expert tp [0, 1] [2, 3] x ep 2 fill the world: the data size is 2, and no one shares an expert
    config = start(tensor_model_parallel_size=2, expert_model_parallel_size=2, sequence_parallel=True)
    bag = Bag(w=ODD).tag("w", allreduce=False, sequence_parallel=True)
    return one(bag, config, {"w": (digits(0, 1) if rank < 2 else digits(2, 3)) / 2}, strategy)


def expert_averaged(rank: int, strategy: str) -> Scenario:
    config = start(tensor_model_parallel_size=2, expert_model_parallel_size=2, sequence_parallel=True)
    bag = Bag(w=ODD).tag("w", allreduce=False, average_gradients_across_tp_domain=True)
    return one(bag, config, {"w": (digits(0, 1) if rank < 2 else digits(2, 3)) / 4}, strategy)


def users_rule(rank: int, strategy: str) -> Scenario:
    config = start(expert_model_parallel_size=2)
    bag = Bag(w=ODD).tag("w", allreduce=False)
    declare_gradient(bag.w, partial_over=("ep",))
    rule = GradSyncRule("shared by experts", "ep", "sum", lambda contract: "ep" in contract.partial_over)
    return one(bag, config, {"w": 1111 / 4}, strategy, sync_rules=(rule,))


def per_token(rank: int, strategy: str) -> Scenario:
    config = start(calculate_per_token_loss=True)
    chunks, expected, _ = one(Bag(w=ODD), config, {"w": 1111 / (2 + 3 + 4 + 5)}, strategy)
    return chunks, expected, {"num_tokens": torch.tensor(rank + 2)}


SCENARIOS = {
    "data parallel": (data_parallel, "dp_cp"),
    "data parallel beside sequence parallel": (sequence_parallel, "dp_cp"),
    "sequence parallel": (sequence_parallel, "tp"),
    "declared": (declared, "tp"),
    "averaged": (averaged, "tp"),
    "pipeline replicated": (pipeline_replicated, "pp"),
    "word embedding": (word_embedding, "embd"),
    "position embedding": (position_embedding, "pos_embd"),
    "expert": (expert, "expt_dp"),
    "expert sequence parallel": (expert_sequence_parallel, "expt_tp"),
    "expert averaged": (expert_averaged, "expt_tp"),
    "rule of the user": (users_rule, "ep"),
    "per token": (per_token, "dp_cp"),
}


# What comes after the data groups' reduction works on shards, and does not ask which of the strategies made them.
STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params", "optim_grads_params, gathered")
SPOILT = [
    pytest.param(scenario, strategy, marks=[pytest.mark.nightly] if strategy not in STRATEGIES[:2] and later else [])
    for scenario, later in {name: group not in ("dp_cp", "expt_dp") for name, (_, group) in SCENARIOS.items()}.items()
    for strategy in STRATEGIES
]


@ranks(4)
@pytest.mark.parametrize(("scenario", "strategy"), SPOILT)
def test_a_spoilt_reduction_turns_the_check_red(rank: int, world: int, scenario: str, strategy: str) -> None:
    with over_sockets if strategy.endswith("gathered") else nullcontext():
        check_spoilt(rank, scenario, strategy.split(",")[0])


def check_spoilt(rank: int, scenario: str, strategy: str) -> None:
    build, group_name = SCENARIOS[scenario]
    chunks, expected, arguments = build(rank, strategy)
    assert not red_somewhere(step(chunks, **arguments), expected)
    for mutation in MUTATIONS:
        with mutate_reductions(group_name, mutation) as hits:
            found = step(chunks, **arguments)
        assert red_somewhere(found, expected), f"{mutation} over {group_name} went unnoticed"
        assert somewhere(bool(hits)), f"nothing over {group_name} was spoilt"
    assert not red_somewhere(step(chunks, **arguments), expected)


@ranks(4)
@both_strategies
@pytest.mark.parametrize("scenario", ["data parallel", "expert", "per token"])
def test_a_wrong_divisor_turns_the_check_red(rank: int, world: int, scenario: str, strategy: str) -> None:
    chunks, expected, arguments = SCENARIOS[scenario][0](rank, strategy)
    for name, factor in {"sum for mean": 4.0, "mean twice": 0.25, "doubled": 2.0}.items():
        assert not red_somewhere(step(chunks, **arguments), expected)
        with mutate_scale(factor):
            assert red_somewhere(step(chunks, **arguments), expected), f"{name} went unnoticed"


@ranks(4)
def test_a_count_of_this_ranks_tokens_only_turns_the_check_red(rank: int, world: int) -> None:
    chunks, expected, arguments = per_token(rank, "no_shard")
    mine = torch.tensor(float(rank + 2), dtype=torch.float64)
    with mock.patch("core.distributed.finalize_model_grads._global_num_tokens", lambda *_: mine):
        assert red_somewhere(step(chunks, **arguments), expected)


@ranks(4)
def test_copies_in_virtual_chunks_that_are_not_added_turn_the_check_red(rank: int, world: int) -> None:
    config = start(pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=2)
    chunks = [wrap(Bag(w=ODD).tag("w", pipeline_parallel=True), config) for _ in range(2)]
    expected = [{"w": 3333 / 2}] * 2
    assert not red_somewhere(step(chunks), expected)
    with mock.patch("core.distributed.finalize_model_grads.sync_across_stages", _first_chunk_only):
        assert red_somewhere(step(chunks), expected)


def _first_chunk_only(syncs: Any) -> None:
    from core.distributed.reduce.sync_rules import sync_across_stages

    sync_across_stages(syncs[:1])


@ranks(4)
def test_a_router_bias_of_this_ranks_tokens_only_is_noticed(rank: int, world: int) -> None:
    """The values of test_finalize_tokens tell the load of all ranks from that of rank 0."""
    from tests.unit_tests.distributed.reduce.test_finalize_tokens import Router

    config = start(tensor_model_parallel_size=2, moe_router_enable_expert_bias=True, moe_router_bias_update_rate=0.25)
    router = Router([10.0 * rank, 4.0 + 4.0 * (rank == 3), 7.0])
    ddp = wrap(router, config)
    ddp(1.0).backward()
    with mutate_reductions("tp_dp_cp", "drop") as hits:
        finalize_model_grads([ddp])
    bias = {"bias": float(router.expert_bias[0])}
    assert hits and red_somewhere([bias], [{"bias": 0.25}])


RULES = {  # scenario -> the rule that it needs
    "sequence parallel": "tensor-parallel sum",
    "averaged": "tensor-parallel mean",
    "expert sequence parallel": "expert tensor-parallel sum",
    "expert averaged": "expert tensor-parallel mean",
    "pipeline replicated": "pipeline-replicated sum",
    "word embedding": "tied word embedding sum",
    "position embedding": "position embedding sum",
}


def test_every_built_in_rule_is_tested() -> None:
    assert {rule.name for rule in DEFAULT_RULES} == set(RULES.values())


@ranks(4)
@pytest.mark.parametrize("scenario", RULES)
def test_a_rule_with_the_other_operation_turns_the_check_red(rank: int, world: int, scenario: str) -> None:
    changed = tuple(
        replace(rule, op="mean" if rule.op == "sum" else "sum") if rule.name == RULES[scenario] else rule
        for rule in DEFAULT_RULES
    )
    with mock.patch("core.distributed.layout.model_plan.DEFAULT_RULES", changed):
        chunks, expected, arguments = SCENARIOS[scenario][0](rank, "no_shard")
        assert red_somewhere(step(chunks, **arguments), expected)


@ranks(4)
@pytest.mark.parametrize("scenario", RULES)
def test_a_model_that_needs_a_missing_rule_is_refused(rank: int, world: int, scenario: str) -> None:
    remaining = tuple(rule for rule in DEFAULT_RULES if rule.name != RULES[scenario])
    refused = False
    with mock.patch("core.distributed.layout.model_plan.DEFAULT_RULES", remaining):
        try:
            SCENARIOS[scenario][0](rank, "no_shard")
        except ContractError as refusal:
            refused = True
            assert "no sync rule reduces it" in str(refusal)
    assert somewhere(refused)
