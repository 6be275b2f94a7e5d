"""Gradient handlers next to wrappers that reduce gradients themselves, and with ZeRO."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from core import parallel_state
from core.distributed import ContractError, SyncError, finalize_model_grads
from core.gradient_handler import (
    DataParallelGradientHandler,
    GradientHandlerError,
    GradSyncUnsupported,
    MoeGradientHandler,
    PipelineSharedModuleGradientHandler,
    SequenceParallelGradientHandler,
    ZeROGradientHandler,
)
from core.optimizer import OptimizerConfig, get_megatron_optimizer
from tests.unit_tests.gradient_handler.test_gradient_handler import coded, codes_of, counted_calls
from tests.unit_tests.rank_codes import ODD, Bag
from tests.unit_tests.ranks import ranks
from tests.unit_tests.reference import assert_same, loss_of, make_net, mean_over_ranks, wrap

# -- next to wrappers ------------------------------------------------------------------------------------------------


@ranks(4)
def test_handlers_and_finalize_model_grads_give_the_same_bits(rank: int, world: int) -> None:
    """Dense, expert and tied parameters in fp32, added in rank order by both."""

    def filled() -> Bag:
        generator = torch.Generator().manual_seed(rank)
        bag = Bag(torch.float32, dense=ODD, expert=(7, 3), tied=(5, 11))
        bag.expert.allreduce = False
        for param in bag.parameters():
            param.grad = torch.randn(param.shape, generator=generator) * 3**rank
        return bag

    # two stages of two data ranks each, and one of two experts on each data rank
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2, expert_model_parallel_size=2)
    groups = parallel_state.get_process_groups()
    loose, wrapped = filled(), filled()
    loose.tied.pipeline_shared_module_pg = groups.embd
    MoeGradientHandler(loose, None, deterministic=True).handle_gradient()
    PipelineSharedModuleGradientHandler(loose, None, deterministic=True).handle_gradient()

    values = {name: param.grad.clone() for name, param in wrapped.named_parameters()}
    wrapped.tied.shared_embedding = True
    ddp = wrap(wrapped, deterministic_reduction=True)
    for name, param in wrapped.named_parameters():
        param.grad.copy_(values[name])
    finalize_model_grads([ddp])
    for name, param in loose.named_parameters():
        assert param.grad.norm() > 1
        assert torch.equal(param.grad, getattr(wrapped, name).grad), name


@ranks(2)
@pytest.mark.parametrize("handler", [DataParallelGradientHandler, SequenceParallelGradientHandler, MoeGradientHandler])
@pytest.mark.parametrize("wrapper", ["ours", "torch"])
@pytest.mark.in_suite()
def test_what_a_wrapper_averages_is_not_reduced_again(rank: int, world: int, handler: Any, wrapper: str) -> None:
    parallel_state.initialize_model_parallel()
    bag = Bag(w=ODD)
    model: nn.Module = wrap(bag) if wrapper == "ours" else nn.parallel.DistributedDataParallel(bag)
    ours = handler(model, None)
    model(10.0**rank).backward()
    with counted_calls() as calls:
        ours.handle_gradient()
    assert not calls
    if wrapper == "ours":
        finalize_model_grads([model])
        ours.handle_gradient()
    assert codes_of(bag) == {"w": 5.5}


@ranks(3)
@pytest.mark.parametrize("case", ["no_sync", "frozen at the wrap", "half", "twice"])
@pytest.mark.in_suite()
def test_what_torchs_wrapper_leaves_local_is_averaged(rank: int, world: int, case: str) -> None:
    """All microbatches under no_sync and one reduction by the handler; or a wrapper that was told too little."""
    parallel_state.initialize_model_parallel()
    model = make_net()
    expected = mean_over_ranks(model, world, (0, 1))
    model.norm.requires_grad_(case != "frozen at the wrap")
    ddp = nn.parallel.DistributedDataParallel(model)
    model.norm.requires_grad_(True)
    handler = DataParallelGradientHandler(ddp, None)
    for microbatch in range(2):
        ddp.require_backward_grad_sync = case != "no_sync" and (case != "half" or microbatch == 0)
        loss = loss_of(ddp, rank, microbatch)
        if case == "twice":
            (loss / 2).backward(retain_graph=True)
            loss = loss / 2
        loss.backward()
    handler.handle_gradient()
    handler.handle_gradient()  # a mean of equal gradients changes nothing
    assert_same({name: param.grad for name, param in model.named_parameters()}, expected)


@ranks(2)
@pytest.mark.parametrize("strategy", ["no_shard", "optim", "optim_grads"])
def test_gradients_are_averaged_once_their_wrapper_is_deleted(rank: int, world: int, strategy: str) -> None:
    """A warm-up in a wrapper, and a plain loop with the same handler after it."""
    parallel_state.initialize_model_parallel()
    model = make_net()
    expected = mean_over_ranks(model, world)
    ddp = wrap(model, data_parallel_sharding_strategy=strategy)
    handler = DataParallelGradientHandler(model, None)
    loss_of(ddp, rank, 0).backward()
    handler.handle_gradient()
    finalize_model_grads([ddp])
    del ddp
    model.zero_grad()
    loss_of(model, rank, 0).backward()
    handler.handle_gradient()
    assert_same({name: param.grad for name, param in model.named_parameters()}, expected)


@ranks(2)
def test_a_wrapper_that_is_deleted_on_one_rank_only_is_named(rank: int, world: int) -> None:
    parallel_state.initialize_model_parallel()
    bag = Bag(v=(3,), w=ODD)
    ddp = wrap(bag)
    handler = DataParallelGradientHandler(bag, None)
    handler.handle_gradient()
    if rank == 1:
        del ddp
    says = r"'v' is reduced by other wrappers on other ranks: \{0: 'DistributedDataParallel', 1: 'nothing'\}"
    with pytest.raises(GradientHandlerError, match=says):
        handler.handle_gradient()


@ranks(2)
def test_a_sharded_gradient_that_outlives_its_wrapper_is_named(rank: int, world: int) -> None:
    parallel_state.initialize_model_parallel()
    bag = Bag(w=ODD)
    ddp = wrap(bag, data_parallel_sharding_strategy="optim_grads")
    ddp(10.0**rank).backward()
    finalize_model_grads([ddp])
    del ddp
    with pytest.raises(GradientHandlerError, match="'w', which is gone: .* is deleted. Call model.zero_grad()"):
        DataParallelGradientHandler(bag, None).handle_gradient()


@ranks(2)
def test_a_wrapper_that_comes_after_the_first_call_is_known(rank: int, world: int) -> None:
    parallel_state.initialize_model_parallel()
    bag = Bag(w=ODD)
    handler = DataParallelGradientHandler(bag, None)
    handler.handle_gradient()
    ddp = wrap(bag)
    ddp(10.0**rank).backward()
    handler.handle_gradient()
    finalize_model_grads([ddp])
    assert codes_of(bag) == {"w": 5.5}


@ranks(4)
def test_a_wrapper_over_fewer_ranks_than_the_handler_is_refused(rank: int, world: int) -> None:
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    ddp = wrap(Bag(w=ODD))
    handler = SequenceParallelGradientHandler(ddp, None, group=dist.group.WORLD)
    with pytest.raises(ContractError, match=r"over ranks \[\d, \d\] and by this handler over \[0, 1, 2, 3\]"):
        handler.handle_gradient()


@ranks(2)
def test_plain_parameters_next_to_a_wrapped_part_are_reduced(rank: int, world: int) -> None:
    parallel_state.initialize_model_parallel()
    model = nn.Module()
    model.wrapped = wrap(Bag(w=ODD))
    model.plain = coded(rank, v=(3,))
    DataParallelGradientHandler(model, None).handle_gradient()
    assert codes_of(model.plain) == {"v": 5.5}


@ranks(2)
def test_a_shared_module_in_our_wrapper_is_summed_after_finalize_and_not_before(rank: int, world: int) -> None:
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
    bag = Bag(tied=(3, 4))
    bag.tied.pipeline_shared_module_pg = dist.group.WORLD
    ddp = wrap(bag)
    handler = PipelineSharedModuleGradientHandler(ddp, None)
    ddp(10.0**rank).backward()
    with pytest.raises(SyncError, match="finalize_model_grads"):
        handler.handle_gradient()
    finalize_model_grads([ddp])
    handler.handle_gradient()
    assert codes_of(bag) == {"tied": 11.0}


@ranks(2)
@pytest.mark.parametrize(
    ("tags", "options", "says"),
    [({"shared_embedding": True}, {}, "already sums"), ({}, {"use_distributed_optimizer": True}, "is sharded")],
)
def test_a_shared_module_that_would_be_summed_twice_or_never_is_refused(
    rank: int, world: int, tags: dict[str, Any], options: dict[str, Any], says: str
) -> None:
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
    bag = Bag(tied=(3, 4)).tag("tied", **tags)
    bag.tied.pipeline_shared_module_pg = dist.group.WORLD
    with pytest.raises(ContractError, match=says):
        PipelineSharedModuleGradientHandler(wrap(bag, **options), None).handle_gradient()


# -- ZeRO -----------------------------------------------------------------------------------------------------------


def test_zero_asks_the_optimizer_to_reduce() -> None:
    class Sharded:
        calls = 0

        def sync_grad(self) -> None:
            self.calls += 1

    optimizer = Sharded()
    ZeROGradientHandler(nn.Linear(1, 1), optimizer).handle_gradient()
    assert optimizer.calls == 1


def test_zero_refuses_an_optimizer_that_cannot_reduce() -> None:
    model = nn.Linear(1, 1)
    with pytest.raises(GradSyncUnsupported, match="SGD is neither.*DataParallelGradientHandler"):
        ZeROGradientHandler(model, torch.optim.SGD(model.parameters()))


@ranks(3)
@pytest.mark.parametrize("sharded", [False, True])
def test_zero_finalizes_our_optimizers_model_once(rank: int, world: int, sharded: bool) -> None:
    parallel_state.initialize_model_parallel()
    model, start = make_net(), make_net()
    expected = mean_over_ranks(start, world)
    ddp = wrap(model, use_distributed_optimizer=sharded)
    optimizer = get_megatron_optimizer(
        OptimizerConfig(optimizer="sgd", lr=0.5, sgd_momentum=0.0, clip_grad=0.0, weight_decay=0.0), [ddp]
    )
    handler = ZeROGradientHandler(ddp, optimizer)
    loss_of(ddp, rank, 0).backward()
    handler.handle_gradient()
    handler.handle_gradient()
    optimizer.step()
    for (name, ours), before in zip(model.named_parameters(), start.parameters(), strict=True):
        torch.testing.assert_close(ours, before - 0.5 * expected[name], rtol=1e-8, atol=1e-8)
