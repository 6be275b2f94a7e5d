"""finalize_model_grads: division by the global number of tokens, and what is refused before anything is sent."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from core import parallel_state
from core.distributed import NonFiniteGradientError, SyncError, finalize_model_grads
from core.distributed.wire.collectives import Collectives
from core.groups.process_groups import ProcessGroups
from core.model_parallel_config import ModelParallelConfig
from tests.unit_tests.distributed.reduce.test_finalize_model_grads import both_strategies, start
from tests.unit_tests.rank_codes import ODD, Bag, backward, check, digits, step
from tests.unit_tests.ranks import ranks
from tests.unit_tests.reference import wrap_unwatched as wrap


def count(number: int) -> torch.Tensor:
    return torch.tensor(number)


@ranks(4)
@both_strategies
@pytest.mark.parametrize(
    "tokens",
    [[5, 5, 5, 5], [1, 7, 2, 10], [0, 3, 0, 8], [0, 0, 0, 0]],
    ids=["even", "uneven", "zero on some", "zero on all"],
)
def test_gradients_are_the_sum_divided_by_all_tokens(rank: int, world: int, strategy: str, tokens: list[int]) -> None:
    config = start(calculate_per_token_loss=True)
    ddp = wrap(Bag(w=ODD), config, data_parallel_sharding_strategy=strategy)
    (found,) = step([ddp], num_tokens=count(tokens[rank]))
    check(found, {"w": 1111 / max(1, sum(tokens))})  # without any token the gradients are left as they are


@ranks(4)
@both_strategies
@pytest.mark.parametrize("shape", [(), (1,)])
def test_a_token_count_keeps_its_value_and_type(rank: int, world: int, strategy: str, shape: tuple[int, ...]) -> None:
    config = start(calculate_per_token_loss=True)
    tokens = torch.full(shape, rank + 3, dtype=torch.int32)
    before = (tokens.data_ptr(), tokens._version)
    ddp = wrap(Bag(w=ODD), config, data_parallel_sharding_strategy=strategy)
    (found,) = step([ddp], num_tokens=tokens)
    assert (tokens.data_ptr(), tokens._version) == before
    assert tokens.dtype == torch.int32 and int(tokens) == rank + 3
    check(found, {"w": 1111 / (3 + 4 + 5 + 6)})


@ranks(4)
@both_strategies
def test_only_the_last_stage_knows_the_number_of_tokens(rank: int, world: int, strategy: str) -> None:
    config = start(pipeline_model_parallel_size=2, calculate_per_token_loss=True)
    # stages [0, 1] and [2, 3]; what the first stage holds is not a count
    tokens = count({2: 3, 3: 8}.get(rank, 999))
    ddp = wrap(Bag(w=ODD), config, data_parallel_sharding_strategy=strategy)
    (found,) = step([ddp], num_tokens=tokens)
    check(found, {"w": (digits(0, 1) if rank < 2 else digits(2, 3)) / 11})


@ranks(4)
def test_tokens_are_counted_once_for_each_tensor_parallel_group(rank: int, world: int) -> None:
    config = start(tensor_model_parallel_size=2, sequence_parallel=True, calculate_per_token_loss=True)
    bag = Bag(norm=ODD, split=ODD).tag("norm", sequence_parallel=True).tag("split", tensor_model_parallel=True)
    tokens = count(5 if rank < 2 else 9)  # ranks 0 and 1 saw the same tokens
    (found,) = step([wrap(bag, config)], num_tokens=tokens)
    check(found, {"norm": 1111 / 14, "split": (digits(0, 2) if rank % 2 == 0 else digits(1, 3)) / 14})


@ranks(4)
@both_strategies
def test_expert_gradients_are_divided_by_the_same_number_of_tokens(rank: int, world: int, strategy: str) -> None:
    config = start(expert_model_parallel_size=2, calculate_per_token_loss=True)
    bag = Bag(dense=ODD, expert=ODD).tag("expert", allreduce=False)
    (found,) = step([wrap(bag, config, data_parallel_sharding_strategy=strategy)], num_tokens=count(rank))
    check(found, {"dense": 1111 / 6, "expert": (digits(0, 2) if rank % 2 == 0 else digits(1, 3)) / 6})


@ranks(2)
def test_every_chunk_is_divided(rank: int, world: int) -> None:
    config = start(
        pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=2, calculate_per_token_loss=True
    )
    chunks = [wrap(Bag(w=ODD), config) for _ in range(2)]
    first, second = step(chunks, num_tokens=count(4))
    check(first, {"w": digits(rank) / 4})
    check(second, {"w": 2 * digits(rank) / 4})


class NothingMayBeSent:
    """Fails a test in which a collective starts."""

    def __enter__(self) -> None:
        def refuse(*_: Any, **__: Any) -> None:
            raise AssertionError("a collective was started before the arguments were refused")

        self.patches = [
            mock.patch.object(Collectives, name, refuse) for name in ("all_reduce", "reduce_scatter", "broadcast")
        ] + [mock.patch.object(dist, "all_reduce", refuse)]
        for patch in self.patches:
            patch.start()

    def __exit__(self, *_: object) -> None:
        for patch in self.patches:
            patch.stop()


@ranks(2)
def test_a_count_that_contradicts_the_config_is_refused_before_anything_is_sent(rank: int, world: int) -> None:
    per_token = start(calculate_per_token_loss=True)
    ddp = wrap(Bag(w=ODD), per_token)
    mean = wrap(Bag(w=ODD), ModelParallelConfig())
    plain = wrap(Bag(w=ODD), None)
    for wrapped in (ddp, mean, plain):
        wrapped(1.0).backward()
    with NothingMayBeSent():
        with pytest.raises(ValueError, match="pass num_tokens"):
            finalize_model_grads([ddp])
        with pytest.raises(ValueError, match="one number"):
            finalize_model_grads([ddp], num_tokens=torch.tensor([1, 2]))
        for wrapped in (mean, plain):
            with pytest.raises(ValueError, match="calculate_per_token_loss is False"):
                finalize_model_grads([wrapped], num_tokens=count(3))
    finalize_model_grads([ddp], num_tokens=count(1))  # the refused calls have changed nothing
    assert float(ddp.module.w.grad.view(-1)[0]) == 1.0


@ranks(2)
def test_finalizing_twice_is_refused(rank: int, world: int) -> None:
    start()
    ddp = wrap(Bag(w=ODD), None)
    step([ddp])
    with NothingMayBeSent(), pytest.raises(SyncError, match="twice"):
        finalize_model_grads([ddp])


# --- router expert bias -----------------------------------------------------------------------------------------------


class Router(torch.nn.Module):
    def __init__(self, tokens: list[float]) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(3, dtype=torch.float64))
        self.register_buffer("expert_bias", torch.tensor([0.5, 0.5, 0.5]))
        self.register_buffer("local_tokens_per_expert", torch.tensor(tokens))

    def forward(self, code: float) -> torch.Tensor:
        return self.weight.sum() * code


@ranks(4)
def test_router_bias_moves_towards_the_experts_that_got_too_few_tokens(rank: int, world: int) -> None:
    config = start(tensor_model_parallel_size=2, moe_router_enable_expert_bias=True, moe_router_bias_update_rate=0.25)
    # Over all ranks [6 + 10 r, 16, 11]: rank 0 alone would move the first bias up, all together move it down.
    router = Router([10.0 * rank, 4.0 + 4.0 * (rank == 3), 7.0])
    total = torch.tensor([60.0, 20.0, 28.0])
    assert torch.equal(torch.sign(total.mean() - total), torch.tensor([-1.0, 1.0, 1.0]))
    ddp = wrap(router, config)
    ddp(1.0).backward()
    finalize_model_grads([ddp])
    assert torch.equal(router.expert_bias, torch.tensor([0.25, 0.75, 0.75]))
    assert torch.equal(router.local_tokens_per_expert, torch.zeros(3))


@ranks(2)
def test_a_router_bias_stays_where_the_config_does_not_ask_for_it(rank: int, world: int) -> None:
    config = start()
    router = Router([5.0, 1.0, 0.0])
    ddp = wrap(router, config)
    ddp(1.0).backward()
    finalize_model_grads([ddp])
    assert torch.equal(router.expert_bias, torch.full((3,), 0.5))


@ranks(2)
def test_frozen_and_evaluated_routers_keep_their_bias_and_their_counts(rank: int, world: int) -> None:
    config = start(moe_router_enable_expert_bias=True, moe_router_bias_update_rate=0.25)
    model = Router([5.0, 1.0, 0.0])
    model.evaluated = Router([5.0, 1.0]).eval()
    model.frozen = Router([5.0, 1.0, 0.0])
    model.frozen.frozen_expert_bias = True
    model.wide = Router([0.0, 9.0, 9.0, 9.0])  # routers may differ in their number of experts
    model.wide.expert_bias = torch.zeros(4)
    ddp = wrap(model, config)
    ddp(1.0).backward()
    finalize_model_grads([ddp])
    assert torch.equal(model.expert_bias, torch.tensor([0.25, 0.75, 0.75]))
    assert torch.equal(model.wide.expert_bias, torch.tensor([0.25, -0.25, -0.25, -0.25]))
    for router in (model.evaluated, model.frozen):
        assert torch.equal(router.expert_bias, torch.full((3,), 0.5))
        assert float(router.local_tokens_per_expert[0]) == 5.0


@ranks(2)
def test_a_missing_group_for_the_router_bias_is_named_before_anything_is_sent(rank: int, world: int) -> None:
    config = start(moe_router_enable_expert_bias=True)
    groups = parallel_state.get_process_groups()
    ddp = wrap(Router([5.0, 1.0, 0.0]), config, pg_collection=ProcessGroups(dp_cp=groups.dp_cp))
    ddp(1.0).backward()
    with NothingMayBeSent(), pytest.raises(RuntimeError, match="tp_dp_cp"):
        finalize_model_grads([ddp])


class MegatronRouter(torch.nn.Module):
    """The attributes of Megatron Core's TopKRouter under global_aux_loss and under quantile_balancing."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(3, dtype=torch.float64))
        self.register_buffer("global_tokens_per_expert", torch.zeros(3), persistent=False)
        self.register_buffer("ga_steps", torch.tensor(0.0), persistent=False)
        self.register_buffer("qb_beta", torch.zeros(3))
        self.register_buffer("qb_beta_accum", torch.zeros(3), persistent=False)
        self.register_buffer("qb_beta_count", torch.zeros((), dtype=torch.long), persistent=False)

    def forward(self, code: float, quantile: torch.Tensor) -> torch.Tensor:
        self.global_tokens_per_expert += torch.tensor([code, 0.0, 1.0])
        self.ga_steps += 1
        if self.training:
            self.qb_beta_accum += quantile
            self.qb_beta_count += 1
        return (self.weight * self.global_tokens_per_expert / self.ga_steps).sum() * code

    def reset_global_aux_loss_tracker(self) -> None:
        self.global_tokens_per_expert.zero_()
        self.ga_steps.zero_()


@ranks(2)
def test_counts_of_megatrons_routers_begin_anew_in_each_step(rank: int, world: int) -> None:
    ddp = wrap(MegatronRouter(), start())
    found = []
    for code in (1.0 + rank, 4.0, 7.0):
        ddp.zero_grad_buffer()
        ddp(code, torch.zeros(3)).backward()
        finalize_model_grads([ddp])
        found.append(ddp.module.weight.grad.tolist())
    assert found == [[2.5, 0.0, 1.5], [16.0, 0.0, 4.0], [49.0, 0.0, 7.0]]  # code * [code, 0, 1] of one step alone


@ranks(4)
def test_a_quantile_bias_is_the_mean_of_data_ranks_and_microbatches(rank: int, world: int) -> None:
    config = start(tensor_model_parallel_size=2)
    config.moe_router_quantile_balancing_ema = 0.25
    model = MegatronRouter()
    model.evaluated = MegatronRouter().eval()
    model.evaluated.qb_beta.fill_(2.0)
    ddp = wrap(model, config)
    expected = torch.zeros(3)
    for step_number in range(3):
        for part in range(2):  # ranks of a tensor group have found one quantile
            ddp(1.0, torch.tensor([1.0 + rank // 2, 4.0 * part, step_number])).backward()
        finalize_model_grads([ddp])
        ddp.zero_grad_buffer()
        expected = 0.25 * expected + 0.75 * torch.tensor([1.5, 2.0, step_number])
        expected -= expected.mean()
        torch.testing.assert_close(model.qb_beta, expected)
        assert model.qb_beta_accum.tolist() == [0.0] * 3 and int(model.qb_beta_count) == 0
    assert expected.abs().max() > 0.2 and model.evaluated.qb_beta.tolist() == [2.0] * 3


@ranks(2)
def test_state_of_megatrons_experts_that_is_not_known_is_refused_at_the_wrap(rank: int, world: int) -> None:
    kind: Any = type("Router", (Router,), {"__module__": "megatron.core.transformer.moe.router"})
    config = start()
    config.moe_router_load_balancing_type = ["aux_loss", "global_aux_loss"]
    wrap(kind([1.0, 2.0, 3.0]), config)
    config.moe_router_load_balancing_type = "entropy_balancing"
    with pytest.raises(ValueError, match="moe_router_load_balancing_type is 'entropy_balancing'"):
        wrap(kind([1.0, 2.0, 3.0]), config)
    config.moe_router_load_balancing_type = "none"
    newer = kind([1.0, 2.0, 3.0])
    if rank == 1:  # both ranks learn of it
        newer.register_buffer("entropy_accum", torch.zeros(3), persistent=False)
    with pytest.raises((ValueError, RuntimeError), match="buffer 'entropy_accum'"):
        wrap(newer, config)
    config.moe_router_load_balancing_type = "entropy_balancing"
    wrap(Router([1.0, 2.0, 3.0]), config)  # not Megatron's: its owner updates it


# --- the decision on non-finite gradients -----------------------------------------------------------------------------


@ranks(8)
@both_strategies
@pytest.mark.parametrize("culprit", [0, 5])
def test_all_ranks_of_every_axis_refuse_a_non_finite_gradient_alike(
    rank: int, world: int, strategy: str, culprit: int
) -> None:
    config = start(tensor_model_parallel_size=2, pipeline_model_parallel_size=2, sequence_parallel=True)
    bag = Bag(split=ODD, norm=ODD).tag("split", tensor_model_parallel=True).tag("norm", sequence_parallel=True)
    ddp = wrap(bag, config, data_parallel_sharding_strategy=strategy, check_for_nan_in_grad=True)
    with pytest.raises(NonFiniteGradientError, match=f"rank {culprit}: the gradient of '.*' became non-finite"):
        step([ddp], code=float("nan") if rank == culprit else 1.0)
    (found,) = step([ddp])  # the next step is not marked by it
    own_data_group = [r for r in range(8) if r % 2 == rank % 2 and r // 4 == rank // 4]
    own_stage = [r for r in range(8) if r // 4 == rank // 4]
    check(found, {"split": digits(*own_data_group) / 2, "norm": digits(*own_stage) / 2})


@ranks(2)
def test_the_microbatch_of_a_non_finite_gradient_is_named(rank: int, world: int) -> None:
    start()
    ddp = wrap(Bag(w=ODD), None, check_for_nan_in_grad=True)
    backward([ddp], 1.0)
    ddp(float("inf") if rank == 1 else 1.0).backward()
    with pytest.raises(NonFiniteGradientError, match="rank 1: the gradient of 'w' became non-finite in microbatch 1"):
        finalize_model_grads([ddp])


# --- what travels -----------------------------------------------------------------------------------------------------


class Sent:
    """Notes (group, elements) of each floating point reduction in a block."""

    def __enter__(self) -> list[tuple[Any, int]]:
        calls: list[tuple[Any, int]] = []
        all_reduce = Collectives.start_all_reduce

        def noted(self: Collectives, tensor: torch.Tensor, group: Any, op: Any, scale: float) -> Any:
            if tensor.dtype.is_floating_point:
                calls.append((group, tensor.numel()))
            return all_reduce(self, tensor, group, op, scale)

        self.patch = mock.patch.object(Collectives, "start_all_reduce", noted)
        self.patch.start()
        return calls

    def __exit__(self, *_: object) -> None:
        self.patch.stop()


def elements(calls: list[tuple[Any, int]], group_name: str) -> int:
    group = getattr(parallel_state.get_process_groups(), group_name)
    return sum(numel for over, numel in calls if over is group)


@ranks(8)
@both_strategies
def test_a_rule_sends_only_the_shard_where_gradients_are_sharded(rank: int, world: int, strategy: str) -> None:
    config = start(tensor_model_parallel_size=2, pipeline_model_parallel_size=2, sequence_parallel=True)
    bag = Bag(norm=(16, 32), embedder=(16, 32)).tag("norm", sequence_parallel=True)
    bag.tag("embedder", sequence_parallel=False, pipeline_parallel=True)
    ddp = wrap(bag, config, data_parallel_sharding_strategy=strategy)
    with Sent() as calls:
        backward([ddp])
        finalize_model_grads([ddp])
    whole, shards = 16 * 32, 1 if strategy == "no_shard" else 2
    counted: list[Any] = [None] * world
    dist.all_gather_object(counted, (elements(calls, "tp"), elements(calls, "pp")))
    # rank 0's and rank 2's shards of norm make up the parameter, whatever lies in which shard
    assert counted[0][0] + counted[2][0] == whole * 2 / shards
    assert counted[rank][1] == whole / shards  # alone in its bucket, so cut evenly
    assert parallel_state.get_data_parallel_world_size() == 2


class Timers:
    """What a trainer of Megatron's style puts into config.timers."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def __call__(self, name: str, log_level: int = 0) -> Timers:
        self.names.append(name)
        return self

    def start(self, barrier: bool = False) -> None: ...

    def stop(self, barrier: bool = False) -> None: ...


@ranks(2)
def test_the_steps_are_timed_under_the_names_that_users_know(rank: int, world: int) -> None:
    config = start()
    config.timers = Timers()
    step([wrap(Bag(w=ODD), config)])
    assert set(config.timers.names) >= {
        "all-grads-sync",
        "non-tensor-parallel-grads-all-reduce",
        "embedding-grads-all-reduce",
    }
