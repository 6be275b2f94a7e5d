"""Weights of which several ranks hold copies: they start equal, stay equal, or an error on every rank names them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from core import parallel_state
from core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    GradSyncRule,
    LayoutMismatch,
    ReplicaDriftError,
    finalize_model_grads,
)
from core.model_parallel_config import ModelParallelConfig
from core.optimizer import OptimizerConfig, get_megatron_optimizer
from tests.unit_tests.rank_codes import Bag
from tests.unit_tests.ranks import ranks
from tests.unit_tests.reference import wrap


def start(**sizes: int) -> ModelParallelConfig:
    parallel_state.initialize_model_parallel(**sizes)
    virtual = sizes.get("virtual_pipeline_model_parallel_size")
    return ModelParallelConfig(
        virtual_pipeline_model_parallel_size=virtual,
        **{key: size for key, size in sizes.items() if key.endswith("parallel_size") and "virtual" not in key},
    )


def step(*chunks: DistributedDataParallel, lr: float = 0.1) -> None:
    for chunk in chunks:
        chunk.zero_grad_buffer()
        chunk(1.0).backward()
    finalize_model_grads(list(chunks))
    with torch.no_grad():
        for param in (param for chunk in chunks for param in chunk.parameters() if param.requires_grad):
            param -= lr * param.main_grad


def flip_a_bit(param: nn.Parameter) -> None:
    """The lowest one of the last element."""
    param.data.view(torch.int64).view(-1)[-1] ^= 1


# --- at the start -----------------------------------------------------------------------------------------------------


def layer(rank: int, odd: str) -> Bag:
    """Split over tensor parallelism but for norm and table; `odd` has other values on odd tensor-parallel ranks."""
    bag = Bag(split=(3, 4), norm=(5,), table=(2, 3)).tag("split", tensor_model_parallel=True, partition_dim=0)
    bag.table.requires_grad_(False)
    with torch.no_grad():
        bag.split += rank % 2
        getattr(bag, odd)[-1] += rank % 2
    return bag


@ranks(2, 4)
@pytest.mark.parametrize("odd", ["norm", "table"])
def test_a_copy_that_another_seed_has_drawn_on_a_tensor_parallel_rank_is_named(rank: int, world: int, odd: str) -> None:
    """A slice may differ; a trained copy and a frozen one may not."""
    config = start(tensor_model_parallel_size=2)
    wrap(layer(rank, "split"), config)
    for strategy in ("no_shard", "optim"):
        with pytest.raises(LayoutMismatch, match=rf"'{odd}' has other values on ranks \[.\] than on rank .*'tp'.*seed"):
            wrap(layer(rank, odd), config, data_parallel_sharding_strategy=strategy)
        ddp = wrap(layer(rank, odd), config, initial_weights="broadcast", data_parallel_sharding_strategy=strategy)
        assert ddp.module.get_parameter(odd).sum() == 0
        assert ddp.module.split.sum() == (rank % 2) * 12
        ddp = wrap(layer(rank, odd), config, initial_weights="ignore", data_parallel_sharding_strategy=strategy)
        assert (ddp.module.get_parameter(odd).sum() > 0) == (rank % 2 == 1)


@ranks(2)
def test_a_copy_of_an_expert_is_compared_over_the_experts_tensor_parallelism(rank: int, world: int) -> None:
    config = start(tensor_model_parallel_size=2, expert_tensor_parallel_size=2)
    for odd in (False, True):
        bag = Bag(w=(3,), bias=(3,)).tag("bias", allreduce=False)
        with torch.no_grad():
            bag.bias += rank * odd
        if odd:
            with pytest.raises(LayoutMismatch, match=r"'bias' has other values .* 'expt_tp' \[0, 1\]"):
                wrap(bag, config)
        else:
            wrap(bag, config)


@ranks(4)
def test_a_difference_in_one_data_group_is_reported_to_the_others_of_the_stage(rank: int, world: int) -> None:
    config = start(tensor_model_parallel_size=2)  # data groups [0, 2] and [1, 3]
    bag = Bag(split=(3, 4)).tag("split", tensor_model_parallel=True, partition_dim=0)
    with torch.no_grad():
        bag.split += rank == 3
    with pytest.raises(
        LayoutMismatch, match=r"'split' has other values on ranks \[3\] than on rank 1 .*'dp_cp' \[1, 3"
    ):
        wrap(bag, config)


def tied(rank: int, kind: str, *, trains: bool = True, odd: float = 0.0) -> Bag:
    """A stage that holds a copy of a weight under a name of its own."""
    name = "embedding" if rank == 0 else "head"
    bag = Bag(other=(2,), **{name: (4, 3)}).tag(name, **{kind: True})
    with torch.no_grad():
        bag.other += rank
        bag.get_parameter(name)[1, 2] += odd * rank
    bag.get_parameter(name).requires_grad_(trains)
    return bag


KINDS = {"shared_embedding": "embd", "shared_position_embedding": "pos_embd", "pipeline_parallel": "pp"}


@ranks(2)
@pytest.mark.parametrize("trains", [True, False])
@pytest.mark.parametrize("kind", ["shared_embedding", "pipeline_parallel"])
def test_copies_on_other_stages_are_compared_before_the_first_step(
    rank: int, world: int, kind: str, trains: bool
) -> None:
    config = start(pipeline_model_parallel_size=2)
    step(wrap(tied(rank, kind, trains=trains), config))
    named = (
        rf"'embedding' has other values on ranks \[1\] \(there it is 'head'\) than on rank 0 of group '{KINDS[kind]}'"
    )
    for weights in ("check", "broadcast"):
        bag = tied(rank, kind, trains=trains, odd=1.0)
        ddp = wrap(bag, config, initial_weights=weights)
        with pytest.raises(LayoutMismatch, match=named):
            step(ddp)
        assert bag.other.tolist() == [rank, rank], "trained before the check"
    step(wrap(tied(rank, kind, trains=trains, odd=1.0), config, initial_weights="ignore"))


@ranks(4)
def test_stages_between_hear_of_unequal_tied_weights_too(rank: int, world: int) -> None:
    config = start(pipeline_model_parallel_size=4)
    bag = tied(rank, "shared_embedding", odd=1.0) if rank in (0, 3) else Bag(other=(2,))
    ddp = wrap(bag, config)
    with pytest.raises(LayoutMismatch, match=r"'embedding' has other values on ranks \[3\]"):
        step(ddp)


@ranks(2)
def test_copies_in_two_chunks_of_one_rank_are_compared_too(rank: int, world: int) -> None:
    """All ranks have the same two values, so between ranks there is nothing to see."""
    config = start(pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=2)
    for odd in (0.0, 1.0):
        chunks = []
        for number in range(2):
            bag = Bag(shared=(3,)).tag("shared", pipeline_parallel=True)
            with torch.no_grad():
                bag.shared += odd * number
            chunks.append(wrap(bag, config))
        if odd:
            with pytest.raises(LayoutMismatch, match="'shared' has other values"):
                step(*chunks)
        else:
            step(*chunks)


@ranks(2)
def test_what_a_rule_of_the_users_makes_equal_is_a_copy(rank: int, world: int) -> None:
    config = start(pipeline_model_parallel_size=2)
    rule = GradSyncRule("of the user", "pp", "sum", lambda contract: contract.name == "w")
    for odd in (0, 1):
        bag = Bag(w=(3,), v=(3,))
        with torch.no_grad():
            bag.w += rank * odd
            bag.v += rank
        ddp = wrap(bag, config, sync_rules=(rule,))
        if odd:
            with pytest.raises(LayoutMismatch, match="'w' has other values .* 'pp'"):
                step(ddp)
        else:
            step(ddp)


# --- in training ------------------------------------------------------------------------------------------------------


@ranks(2)
@pytest.mark.parametrize("strategy", ["no_shard", "optim"])
def test_a_flipped_bit_is_found_at_the_interval_and_not_before(rank: int, world: int, strategy: str) -> None:
    start()
    ddp = wrap(Bag(a=(3,), b=(4, 5)), check_weights_interval=3, data_parallel_sharding_strategy=strategy)
    for number in range(1, 7):
        if number == 4 and rank == 1:
            flip_a_bit(ddp.module.b)
        ddp.zero_grad_buffer()
        ddp(1.0).backward()
        if number == 6:
            with pytest.raises(
                ReplicaDriftError, match=r"'b' has other values on ranks \[1\] than on rank 0 .*'dp_cp'"
            ):
                finalize_model_grads([ddp])
        else:
            finalize_model_grads([ddp])


@ranks(2)
def test_a_step_left_out_on_one_rank_is_found_and_without_an_interval_is_not(rank: int, world: int) -> None:
    start()
    for interval in (1, 0):
        ddp = wrap(Bag(a=(3,)), check_weights_interval=interval, first_steps="check" if interval else "ignore")
        step(ddp)
        step(ddp, lr=0.1 if rank == 0 else 0.0)
        if interval:
            with pytest.raises(ReplicaDriftError, match="left out an optimizer's step"):
                step(ddp)
        else:
            step(ddp)


@ranks(4)
def test_a_drift_between_optimizer_instances_is_found(rank: int, world: int) -> None:
    parallel_state.initialize_model_parallel(num_distributed_optimizer_instances=2)
    options: dict[str, Any] = {"num_distributed_optimizer_instances": 2, "use_distributed_optimizer": True}
    ddp = wrap(Bag(a=(8,)), check_weights_interval=1, **options)
    for number in range(2):
        if number == 1:
            if rank >= 2:  # both ranks of an instance
                flip_a_bit(ddp.module.a)
            ddp.zero_grad_buffer()
        ddp(1.0).backward()
        if number == 1:
            with pytest.raises(ReplicaDriftError, match=r"'a' has other values on ranks \[2, 3\] than on rank 0"):
                finalize_model_grads([ddp])
        else:
            finalize_model_grads([ddp])


@ranks(4)
@pytest.mark.parametrize("drifts", ["norm", "shared", None])
def test_copies_over_tensor_parallelism_and_stages_are_compared_at_the_interval(
    rank: int, world: int, drifts: str | None
) -> None:
    config = start(tensor_model_parallel_size=2, pipeline_model_parallel_size=2)
    bag = Bag(norm=(3,), shared=(2, 2), split=(4,)).tag("shared", pipeline_parallel=True)
    bag.tag("split", tensor_model_parallel=True, partition_dim=0)
    with torch.no_grad():
        bag.split += rank
    ddp = wrap(bag, config, check_weights_interval=2)
    step(ddp)
    if rank == 3 and drifts:
        flip_a_bit(bag.get_parameter(drifts))
    if drifts is None:
        step(ddp)
        step(ddp)
        step(ddp)
        assert bag.norm.abs().sum() > 0.1
        return
    with pytest.raises(ReplicaDriftError, match=rf"'{drifts}' has other values on ranks \[3\] than on rank 2 .*'tp'"):
        step(ddp)


@ranks(2)
def test_a_nan_that_all_copies_have_is_no_drift(rank: int, world: int) -> None:
    start()
    ddp = wrap(Bag(a=(3,)), check_weights_interval=1)
    with torch.no_grad():
        ddp.module.a[1] = float("nan")
    step(ddp)


def test_an_interval_below_zero_is_refused() -> None:
    with pytest.raises(ValueError, match="check_weights_interval must be an integer of at least 0, got -1"):
        DistributedDataParallelConfig(check_weights_interval=-1)


# --- written by one rank alone, long after the first steps ------------------------------------------------------------

STATE = {"a": torch.ones(3, dtype=torch.float64), "b": torch.ones(4, 5, dtype=torch.float64)}


def loads(ddp: DistributedDataParallel) -> None:
    ddp.module.load_state_dict(STATE)


def writes_data(ddp: DistributedDataParallel) -> None:
    for name, param in ddp.module.named_parameters():
        param.data.copy_(STATE[name])


@ranks(2)
@pytest.mark.parametrize("kind", ["torch", "ours", "ours, sharded"])
@pytest.mark.parametrize("write", [loads, writes_data])
def test_weights_that_one_rank_alone_writes_at_step_5_are_found_before_another_step_is_made_of_them(
    rank: int, world: int, write: Any, kind: str
) -> None:
    """Loaded weights in that step; others before our optimizer would gather them, or after torch's has stepped."""
    start()
    ddp = wrap(Bag(a=(3,), b=(4, 5)), use_distributed_optimizer=kind.endswith("sharded"))
    config = OptimizerConfig(optimizer="sgd", lr=0.1)
    optimizer: Any = torch.optim.SGD(ddp.parameters(), lr=0.1)
    if kind != "torch":
        optimizer = get_megatron_optimizer(config, [ddp])
    found = 0
    for number in range(1, 8):
        ddp.zero_grad_buffer()
        if number == 5 and rank == 1:
            write(ddp)
        ddp(1.0).backward()
        try:
            finalize_model_grads([ddp])
            optimizer.step()
        except ReplicaDriftError as error:
            assert "'a' has other values on ranks [1]" in str(error) or "'b' has other values" in str(error)
            found = number
            break
    assert found == (6 if write is writes_data and kind == "torch" else 5)
    assert not torch.equal(ddp.module.a, STATE["a"]) or rank == 1, "nothing was mixed"


@ranks(4)
@pytest.mark.parametrize("sizes", [{"tensor_model_parallel_size": 2}, {"pipeline_model_parallel_size": 2}])
def test_weights_that_one_rank_of_several_axes_loads_are_found(rank: int, world: int, sizes: dict[str, int]) -> None:
    """Ranks of other data groups learn of it, and compare too."""
    config = start(**sizes)
    ddp = wrap(Bag(a=(3,), b=(4, 5)), config)
    for number in range(1, 6):
        if number == 5:
            if rank == 3:
                loads(ddp)
            with pytest.raises(ReplicaDriftError, match="has other values on ranks"):
                step(ddp)
        else:
            step(ddp)
