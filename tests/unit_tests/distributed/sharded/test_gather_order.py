"""The order in which ranks gather sharded parameters: ranks compare it, and the bucket that comes next is guessed."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from core import parallel_state
from core.distributed import Placement, SyncError, finalize_model_grads
from core.distributed.sharded.eviction import WINDOW, Budget, Window
from core.distributed.sharded.param_unit import ParamUnit
from core.optimizer import OptimizerConfig, get_megatron_optimizer
from tests.unit_tests.distributed.sharded.test_hidden_parameters import Tower
from tests.unit_tests.distributed.sharded.test_sharded_parameters import SGD, sharded, unsharder_of
from tests.unit_tests.ranks import ranks


class TwoOrders(nn.Module):
    """Two layers of one size, in an order that a rank chooses."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 8)
        self.turned = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second = (self.two, self.one) if self.turned else (self.one, self.two)
        return second(torch.tanh(first(x)))


@ranks(2)
def test_ranks_that_use_parameters_in_other_orders_are_shown_the_first_that_differs(rank: int, world: int) -> None:
    parallel_state.initialize_model_parallel()
    ddp = sharded(TwoOrders(), bucket_size=1, share_host_memory=False)
    ddp.module.turned = rank == 1
    ddp(torch.ones(2, 8)).sum().backward()
    with pytest.raises(SyncError, match="gathered sharded parameters in different orders.*for 'two.weight'"):
        finalize_model_grads([ddp])
    ddp = sharded(TwoOrders(), bucket_size=1)  # with mapped memory no one waits for anybody
    ddp.module.turned = rank == 1
    ddp(torch.ones(2, 8)).sum().backward()
    finalize_model_grads([ddp])


@ranks(2)
def test_an_evaluation_in_which_ranks_take_other_branches_is_refused(rank: int, world: int) -> None:
    parallel_state.initialize_model_parallel()
    inputs = torch.randn(2, 8, generator=torch.Generator().manual_seed(rank))
    for share, gathers in ((False, False), (True, False), (False, True)):
        torch.manual_seed(7)
        alone = TwoOrders()
        ddp = sharded(copy.deepcopy(alone), bucket_size=1, share_host_memory=share)
        alone.turned = ddp.module.turned = rank == 1
        refused = pytest.raises(SyncError, match="different orders.*rank 1 has parameters of.*for 'two.weight'")
        held = ddp.gathered() if gathers else nullcontext()
        with torch.no_grad(), held, nullcontext() if share or gathers else refused:
            assert torch.equal(ddp(inputs), alone(inputs))


@ranks(2)
def test_the_next_bucket_of_the_learned_order_is_gathered_one_ahead(rank: int, world: int) -> None:
    parallel_state.initialize_model_parallel()
    ddp = sharded(Tower(), bucket_size=256, share_host_memory=False)
    unsharder = unsharder_of(ddp)
    optimizer = get_megatron_optimizer(OptimizerConfig(**SGD), [ddp])
    number_of = {unsharder.unit_of[id(layer.weight)]: number for number, layer in enumerate(ddp.module.layers)}
    launch, complete, most = ParamUnit.start_all_gather, ParamUnit.finish_all_gather, list[int]()
    events: list[tuple[str, int]] = []

    def launched(self: ParamUnit, *arguments: Any) -> Any:
        events.append(("begun", number_of[self]))
        return launch(self, *arguments)

    def completed(self: ParamUnit, *arguments: Any) -> Any:
        events.append(("whole", number_of[self]))
        whole = complete(self, *arguments)
        most.append(sum(unit.full is not None for unit in unsharder.units))
        return whole

    for number, layer in enumerate(ddp.module.layers):
        layer.register_forward_hook(lambda *_, number=number: events.append(("used", number)))
        layer.weight.register_hook(lambda *_, number=number: events.append(("used", number)))
    with (
        mock.patch.object(ParamUnit, "start_all_gather", launched),
        mock.patch.object(ParamUnit, "finish_all_gather", completed),
    ):
        for step in range(3):
            events.clear()
            optimizer.zero_grad()
            ddp(torch.ones(3, 16)).sum().backward()
            finalize_model_grads([ddp])
            optimizer.step()
            needs = [number for event, number in events if event == "whole"]
            assert needs == [0, 1, 2, 3, 4, 5, 3, 2, 1]
            assert [number for event, number in events if event == "begun"] == needs  # no guess is wrong
            begun = [at for at, (event, _) in enumerate(events) if event == "begun"]
            whole = [at for at, (event, _) in enumerate(events) if event == "whole"]
            used = [events.index(("used", number), at) for number, at in zip(needs, whole, strict=True)]
            early = [after < before for after, before in zip(begun[1:], used, strict=False)]
            assert early == [step > 0] * 8, events
    assert max(most) == WINDOW


@ranks(2)
def test_nothing_is_gathered_ahead_under_a_budget(rank: int, world: int) -> None:
    parallel_state.initialize_model_parallel()
    on_three_buckets = Placement(
        offload_param_frac=1, offload_optim_frac=1, memory_budget_bytes=3 * 1024, warmup_non_model_data_ratio=0
    )
    for residents, ahead in ((Window, 5), (Budget, 0)):
        ddp = sharded(Tower(), bucket_size=256, share_host_memory=False)
        unsharder = unsharder_of(ddp)
        if residents is Budget:
            unsharder.eviction = Budget(unsharder.units, on_three_buckets, 0)
        with mock.patch.object(unsharder.order, "record", wraps=unsharder.order.record) as note, torch.no_grad():
            for _ in range(2):
                ddp(torch.ones(3, 16))
        assert sum(call.args[1] == " prefetched" for call in note.call_args_list) == ahead


@ranks(2)
def test_a_wrong_guess_of_the_order_gives_no_wrong_value(rank: int, world: int) -> None:
    """Each pass goes another way through the layers, with a write after some; all ranks go the same way."""
    parallel_state.initialize_model_parallel()
    ddp, alone = sharded(Tower(), bucket_size=256, share_host_memory=False), Tower()
    inputs = torch.randn(3, 16, generator=torch.Generator().manual_seed(8))
    ways = torch.Generator().manual_seed(1)
    wrong = 0
    unsharder = unsharder_of(ddp)
    for turn in range(30):
        order = list(range(6)) if turn % 3 else torch.randperm(6, generator=ways).tolist()
        ddp.module.order = alone.order = order
        wrong += unsharder.prefetched is not None
        if turn % 4 == 3:
            with ddp.gathered(), torch.no_grad():
                for model in (ddp.module, alone):
                    for layer in model.layers:
                        layer.weight.mul_(1.1)
        if turn % 5 == 4:
            with torch.no_grad():
                for layer in alone.layers:
                    layer.weight.mul_(0.5)
            ddp.begin_param_update()
            for unit in unsharder.units:
                unit.shard.mul_(0.5)
            ddp.start_param_sync()
        with torch.no_grad() if turn % 2 else nullcontext():
            got, expected = ddp(inputs), alone(inputs)
        assert torch.equal(got, expected), turn
    assert wrong > 5


@ranks(2)
def test_the_notes_of_gathers_do_not_grow_where_nothing_is_trained(rank: int, world: int) -> None:
    parallel_state.initialize_model_parallel()
    ddp = sharded(TwoOrders(), bucket_size=1, share_host_memory=False)
    gathers = unsharder_of(ddp).order.gathers
    with mock.patch("core.distributed.sharded.gather_order.MOST_GATHERS", 10):
        for step in range(40):
            ddp(torch.ones(2, 8))
            if rank == 1 and step == 3:
                gathers["dp_cp"][-1] += " and another one"
    assert len(gathers["dp_cp"]) <= 10
    ddp(torch.ones(2, 8)).sum().backward()
    with pytest.raises(SyncError, match="sharded parameters in different orders.*earlier ones of checksum"):
        finalize_model_grads([ddp])
