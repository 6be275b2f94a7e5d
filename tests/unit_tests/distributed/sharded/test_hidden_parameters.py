"""A parameter without gathered values: its attributes, and uses of it."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from core import parallel_state
from core.distributed import SyncError, finalize_model_grads
from core.optimizer import OptimizerConfig, get_megatron_optimizer
from tests.unit_tests.distributed.sharded.test_sharded_parameters import SGD, WIDTH, WRITTEN, Model, loss_of, sharded
from tests.unit_tests.ranks import ranks


@ranks(2)
@pytest.mark.parametrize("share", [True, False])
def test_a_parameter_that_is_not_gathered_has_a_shape_and_no_values(rank: int, world: int, share: bool) -> None:
    parallel_state.initialize_model_parallel()
    ddp = sharded(Model(), share_host_memory=share)
    weight, start = ddp.module.words.weight, Model().words.weight
    assert (weight.shape, weight.numel(), weight.dtype, weight.device) == (start.shape, 132, start.dtype, start.device)
    assert isinstance(weight, nn.Parameter) and weight.requires_grad and weight.is_leaf
    assert ("nan" in repr(weight)) == (not share)
    with torch.no_grad():
        for use in (
            lambda: weight.norm(),
            lambda: weight.data,
            lambda: weight[0],
            lambda: F.linear(torch.ones(WIDTH), weight),
            lambda: copy.deepcopy(weight),
            lambda: copy.deepcopy(ddp),
            lambda: ddp.module.state_dict(),
            lambda: ddp.module.blocks[0].state_dict(),
            lambda: ddp.module.blocks[0].load_state_dict({}),
            lambda: ddp.module.half(),
        ):
            with pytest.raises(SyncError, match="gathered"):
                use()
        for write in (
            lambda: weight.zero_(),
            lambda: weight.copy_(start),
            lambda: weight.__setitem__(0, 1.0),
            lambda: setattr(weight, "data", start),
            lambda: nn.init.normal_(weight),
            lambda: torch.add(start, 1, out=weight),
            lambda: torch._foreach_mul_([weight], 2.0),
        ):
            with pytest.raises(SyncError, match="is sharded and not gathered, so it cannot be written"):
                write()
    with ddp.gathered():
        assert type(weight) is nn.Parameter and torch.equal(weight, start)
    with pytest.raises(SyncError, match="gathered"):
        weight.sum()


@ranks(2)
@pytest.mark.parametrize("share", [True, False])
def test_a_model_is_moved_to_where_it_is_and_nowhere_else(rank: int, world: int, share: bool) -> None:
    parallel_state.initialize_model_parallel()
    alone = Tower()
    ddp = sharded(copy.deepcopy(alone), share_host_memory=share)
    inputs = torch.ones(2, 16)
    assert ddp.to("cpu").float().to(dtype=torch.float32) is ddp
    assert torch.equal(ddp(inputs), alone(inputs))
    for move in (ddp.double, lambda: ddp.to(torch.bfloat16), lambda: ddp.to("meta")):
        with pytest.raises(SyncError, match="'layers.0.weight' is used outside of a forward"):
            move()
    assert torch.equal(ddp(inputs), alone(inputs))


@ranks(1)
def test_a_parameter_in_a_structure_that_is_not_searched_is_refused(rank: int, world: int) -> None:
    parallel_state.initialize_model_parallel()
    ddp = sharded(Model())
    weight = ddp.module.words.weight
    with pytest.raises(SyncError, match="add was given a sharded parameter inside something else than lists"):
        type(weight).__torch_function__(torch.add, (type(weight),), ({weight},))


@ranks(2)
@pytest.mark.parametrize("share", [True, False])
def test_what_is_written_inside_gathered_stays_on_all_ranks(rank: int, world: int, share: bool) -> None:
    parallel_state.initialize_model_parallel()
    ddp = sharded(Model(), share_host_memory=share)
    optimizer = get_megatron_optimizer(OptimizerConfig(**SGD), [ddp])
    with ddp.gathered(), torch.no_grad():
        with ddp.gathered():
            ddp.module.words.weight.mul_(2)
        ddp.module.blocks[0].up.weight.data = torch.full((17, WIDTH), 3.0)
        ddp.module.places.data[1] = -0.0
        inside = {name: value.clone() for name, value in ddp.state_dict().items()}
    after = ddp.state_dict()
    assert all(torch.equal(after[name], value) for name, value in inside.items())
    assert torch.equal(after["words.weight"], 2 * Model().words.weight) and after["blocks.0.up.weight"].eq(3).all()
    ddp.load_state_dict(Model().state_dict())
    loss_of(ddp, rank, 0).backward()
    finalize_model_grads([ddp])
    optimizer.step()
    moved = ddp.state_dict()["words.weight"]
    assert 0 < (moved - Model().words.weight).abs().max() < 1


@ranks(2)
@pytest.mark.parametrize("share", [True, False])
def test_misuse_is_refused_by_name(rank: int, world: int, share: bool) -> None:
    parallel_state.initialize_model_parallel()
    ddp = sharded(Model(), share_host_memory=share)
    optimizer = get_megatron_optimizer(OptimizerConfig(**SGD), [ddp])
    early = loss_of(ddp, rank, 1)
    loss_of(ddp, rank, 0).backward()
    finalize_model_grads([ddp])
    with ddp.gathered(), pytest.raises(SyncError, match=r"an optimizer's step came inside gathered\(\)"):
        optimizer.step()
    optimizer.zero_grad()
    loss_of(ddp, rank, 0).backward()
    finalize_model_grads([ddp])
    optimizer.step()
    with pytest.raises(RuntimeError, match=WRITTEN[share]):
        early.backward()

    def write(module: nn.Module, inputs: Any) -> None:
        with torch.no_grad():
            module.weight.clamp_(-0.01, 0.01)

    def shown_write(module: nn.Module, inputs: Any) -> None:
        with torch.no_grad():
            float(module.weight.sum())  # gathers it
            module.weight.clamp_(-0.01, 0.01)

    for hook in (write, shown_write):
        handle = ddp.module.blocks[1].up.register_forward_pre_hook(hook)
        with pytest.raises(SyncError, match="'blocks.1.up.weight' (is sharded and|was written while its values were)"):
            loss_of(ddp, rank, 0)
        handle.remove()


@ranks(1)
def test_what_is_no_weight_keeps_the_check_of_writes_in_place(rank: int, world: int) -> None:
    parallel_state.initialize_model_parallel()
    ddp = sharded(nn.Sequential(nn.Linear(3, 3), nn.Sigmoid()))
    saved = ddp(torch.ones(2, 3))
    with torch.no_grad():
        saved.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation.*is at version 1; expected version 0"):
        saved.sum().backward()


@ranks(1)
def test_a_forward_without_a_backward_leaves_nothing_behind(rank: int, world: int) -> None:
    parallel_state.initialize_model_parallel()
    kept: list[weakref.ref[torch.Tensor]] = []
    model = nn.Sequential(nn.Linear(3, 3), nn.Sigmoid(), nn.Linear(3, 3))
    model[1].register_forward_hook(lambda module, inputs, output: kept.append(weakref.ref(output)))
    ddp = sharded(model)
    ddp(torch.ones(2, 3))
    gc.collect()
    assert [reference() for reference in kept] == [None]


class ByWeight(nn.Module):
    """Takes its input to its weight's dtype, as many models do."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.linear(x.to(self.linear.weight))
        return found


@ranks(2)
@pytest.mark.parametrize("share", [True, False])
def test_an_input_is_converted_to_what_a_weight_is(rank: int, world: int, share: bool) -> None:
    parallel_state.initialize_model_parallel()
    alone = ByWeight()
    ddp = sharded(copy.deepcopy(alone), share_host_memory=share)
    for dtype in (torch.float32, torch.float64):
        inputs = torch.randn(2, 8, generator=torch.Generator().manual_seed(rank), dtype=dtype)
        assert torch.equal(ddp(inputs), alone(inputs))


class Tower(nn.Module):
    """Layers of one bucket each, in an order that can be changed."""

    def __init__(self, layers: int = 6) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.layers = nn.ModuleList([nn.Linear(16, 16, bias=False) for _ in range(layers)])
        self.order = list(range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number in self.order:
            x = torch.tanh(self.layers[number](x))
        return x


@ranks(1)
def test_options_that_gather_in_the_step_are_refused(rank: int, world: int) -> None:
    parallel_state.initialize_model_parallel()
    with pytest.raises(ValueError, match="nothing is gathered there"):
        sharded(Model(), overlap_param_gather=True)
    config = OptimizerConfig(overlap_param_gather_with_optimizer_step=True, **SGD)
    with pytest.raises(ValueError, match="the step gathers nothing"):
        get_megatron_optimizer(config, [sharded(Model())])
