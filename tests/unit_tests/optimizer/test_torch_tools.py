"""The optimizer and the wrapper in torch's own tools: schedulers, functional_call, DCP's helpers, meshes."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.func import functional_call
from torch.optim import lr_scheduler

from core import parallel_state
from core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from core.optimizer import ChainedOptimizer, MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from core.parallel_state import initialize_from_device_mesh
from tests.unit_tests.ranks import ranks
from tests.unit_tests.reference import batch, make_net

STRATEGIES = ("no_shard", "optim", "optim_grads_params")
SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "step": lambda optimizer: lr_scheduler.StepLR(optimizer, 2, 0.5),
    "one cycle": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.5, 6, cycle_momentum=False),
    "sequence": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer,
        [lr_scheduler.LinearLR(optimizer, 0.1, total_iters=3), lr_scheduler.ExponentialLR(optimizer, 0.9)],
        [3],
    ),
}


def wrapped(strategy: Any) -> tuple[DistributedDataParallel, MegatronOptimizer]:
    model = DistributedDataParallel(
        None, DistributedDataParallelConfig(data_parallel_sharding_strategy=strategy), make_net(torch.float32)
    )
    config = OptimizerConfig(optimizer="sgd", lr=0.5, sgd_momentum=0.9, weight_decay=0.0, clip_grad=0.0)
    return model, get_megatron_optimizer(config, [model])


def loss_of(model: nn.Module, rank: int, step: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    inputs, targets = batch(rank, step, dtype)
    return (model(inputs) - 3 * targets).square().mean()


@ranks(2)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_torchs_schedulers_drive_the_optimizer(rank: int, world: int, strategy: str) -> None:
    parallel_state.initialize_model_parallel()
    for make in SCHEDULERS.values():
        model, optimizer = wrapped(strategy)
        assert isinstance(optimizer, torch.optim.Optimizer)
        reference = copy.deepcopy(make_net(torch.float32)).double()
        plain = torch.optim.SGD(reference.parameters(), lr=0.5, momentum=0.9)
        schedules = [make(optimizer), make(plain)]
        for step in range(5):
            plain.zero_grad()
            sum((loss_of(reference, r, step, torch.float64) / world for r in range(world)), torch.zeros(())).backward()
            plain.step()
            optimizer.zero_grad()
            loss_of(model, rank, step).backward()
            finalize_model_grads([model])
            optimizer.step()
            for schedule in schedules:
                schedule.step()
            assert optimizer.param_groups[0]["lr"] == plain.param_groups[0]["lr"]
            assert schedules[0].get_last_lr() == [group["lr"] for group in optimizer.param_groups]
        with model.gathered():
            for ours, want, begin in zip(
                model.module.parameters(), reference.parameters(), make_net().parameters(), strict=True
            ):
                torch.testing.assert_close(ours.double(), want, atol=2e-5, rtol=2e-5)
                assert (want - begin).abs().max() > 1e-2


@ranks(2)
def test_groups_state_and_defaults_are_the_inner_optimizers_own(rank: int, world: int) -> None:
    parallel_state.initialize_model_parallel()
    model, optimizer = wrapped("optim")
    assert optimizer.param_groups is optimizer.optimizer.param_groups
    assert optimizer.state is optimizer.optimizer.state and optimizer.defaults is optimizer.optimizer.defaults
    hidden = {"param_groups", "state", "defaults"} & vars(optimizer).keys()
    assert not hidden, f"a second {hidden}"
    chain = ChainedOptimizer([optimizer, wrapped("optim")[1]])
    assert [id(group) for group in chain.param_groups[: len(optimizer.param_groups)]] == [
        id(group) for group in optimizer.param_groups
    ]
    assert chain.defaults is optimizer.defaults
    for call, error, words in (
        (lambda: optimizer.step(lambda: 0.0), TypeError, "takes no closure"),
        (lambda: optimizer.add_param_group({"params": []}), RuntimeError, "get_megatron_optimizer again"),
        (lambda: optimizer.register_step_post_hook(print), AttributeError, "calls no hooks"),
        (lambda: copy.deepcopy(optimizer), TypeError, "save its state_dict"),
        (lambda: optimizer.nothing, AttributeError, "no attribute 'nothing'"),
    ):
        with pytest.raises(error, match=words):
            call()


@ranks(2)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_helpers_of_distributed_checkpoints_take_the_wrapper(rank: int, world: int, strategy: str) -> None:
    parallel_state.initialize_model_parallel()
    model, optimizer = wrapped(strategy)
    start = make_net(torch.float32).state_dict()
    with model.gathered():
        found = {name: value.clone() for name, value in get_model_state_dict(model).items()}
    assert list(found) == list(start) and all(torch.equal(found[name], start[name]) for name in start)
    with model.gathered():
        set_model_state_dict(model, {name: value + 1 for name, value in found.items()})
    optimizer.zero_grad()
    loss_of(model, rank, 0).backward()
    finalize_model_grads([model])
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    optimizer.step()  # from masters that know of the new values
    with model.gathered():
        state = model.state_dict()
        assert all(torch.equal(state[name], start[name] + 1) for name in start)


@ranks(2)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_functional_call_computes_with_other_values(rank: int, world: int, strategy: str) -> None:
    parallel_state.initialize_model_parallel()
    model, _ = wrapped(strategy)
    other = make_net(torch.float32, seed=5)
    inputs, _ = batch(rank, 0, torch.float32)
    with model.gathered(), torch.no_grad():
        before = model(inputs)
        values = {f"module.{name}": value for name, value in other.named_parameters()}
        assert torch.equal(functional_call(model, values, (inputs,)), other(inputs))
        assert torch.equal(model(inputs), before) and not torch.equal(before, other(inputs))


@ranks(2)
def test_the_wrapper_finds_what_its_state_dict_lists_and_nothing_else(rank: int, world: int) -> None:
    parallel_state.initialize_model_parallel()
    model, _ = wrapped("no_shard")
    for name, value in model.state_dict(keep_vars=True).items():
        owner, _, leaf = name.rpartition(".")
        found: Any = model
        for part in [*owner.split("."), leaf] if owner else [leaf]:
            found = getattr(found, part)
        assert found is value
    assert not hasattr(model, "forward_of_the_module") and not hasattr(model, "missing")


@ranks(4)
def test_a_device_mesh_has_the_groups_of_parallel_state(rank: int, world: int) -> None:
    with pytest.raises(RuntimeError, match="initialize_model_parallel first"):
        parallel_state.get_device_mesh()
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2, expert_model_parallel_size=2,
                                             expert_tensor_parallel_size=1)  # fmt: skip
    mesh, groups = parallel_state.get_device_mesh(), parallel_state.get_process_groups()
    assert mesh.mesh_dim_names == ("pp", "dp", "cp", "tp") and mesh.mesh.tolist() == [[[[0, 1]], [[2, 3]]]]
    for name in ("pp", "dp", "cp", "tp"):
        assert dist.get_process_group_ranks(mesh.get_group(name)) == groups.ranks(name)
    assert mesh.get_group("tp") is groups.tp
    whole = torch.arange(8.0)
    part = distribute_tensor(whole, mesh["tp"], [Shard(0)])
    assert torch.equal(part.to_local(), whole.chunk(2)[rank % 2]) and torch.equal(part.full_tensor(), whole)
    experts = parallel_state.get_device_mesh(expert=True)
    assert experts.mesh_dim_names == ("pp", "expt_dp", "ep", "expt_tp")
    assert (
        dist.get_process_group_ranks(experts.get_group("ep"))
        == groups.ranks("ep")
        == [rank // 2 * 2, rank // 2 * 2 + 1]
    )


@ranks(4, 8)
@pytest.mark.parametrize(
    ("names", "shape"),
    [(("dp", "tp"), (-1, 2)), (("tp", "dp"), (2, -1)), (("pp", "dp", "cp", "tp"), (2, -1, 1, 2)), (("dp",), (-1,))],
)
@pytest.mark.in_suite()
def test_groups_come_from_a_device_mesh_with_its_ranks(
    rank: int, world: int, names: tuple[str, ...], shape: tuple[int, ...]
) -> None:
    known = math.prod(size for size in shape if size > 0)
    mesh = init_device_mesh("cpu", tuple(world // known if size < 0 else size for size in shape), mesh_dim_names=names)
    initialize_from_device_mesh(mesh)
    groups = parallel_state.get_process_groups()
    for name in names:
        assert groups.ranks(name) == dist.get_process_group_ranks(mesh.get_group(name)), name
    for name in {"pp", "dp", "cp", "tp"} - set(names):
        assert groups.size(name) == 1


@ranks(4)
@pytest.mark.nightly
def test_an_hsdp_mesh_shards_within_its_second_dimension(rank: int, world: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
    initialize_from_device_mesh(mesh)
    groups = parallel_state.get_process_groups()
    assert groups.ranks("dp_cp") == [0, 1, 2, 3]
    assert groups.ranks("intra_dp_cp") == dist.get_process_group_ranks(mesh.get_group("dp_shard"))


@ranks(4)
def test_a_mesh_that_says_something_else_is_refused_by_name(rank: int, world: int) -> None:
    for names, words in (
        (("dp", "rows"), "dimension 'rows' of the DeviceMesh has no counterpart"),
        (("dp", "fsdp"), "name 'dp' twice"),
    ):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=names)
        with pytest.raises(ValueError, match=words):
            initialize_from_device_mesh(mesh)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    with pytest.raises(ValueError, match="ranks .*; give the mesh of all ranks"):
        initialize_from_device_mesh(mesh["tp"])
    with pytest.raises(ValueError, match="tensor_model_parallel_size is given by the DeviceMesh"):
        initialize_from_device_mesh(mesh, tensor_model_parallel_size=2)
    with pytest.raises(ValueError, match="has no names of dimensions"):
        initialize_from_device_mesh(init_device_mesh("cpu", (2, 2)))
    assert not parallel_state.model_parallel_is_initialized()


@ranks(2)
@pytest.mark.parametrize("trained", [False, True])
def test_dcps_optimizer_helpers_are_refused_by_name_and_change_nothing(rank: int, world: int, trained: bool) -> None:
    parallel_state.initialize_model_parallel()
    for strategy in STRATEGIES:
        model, optimizer = wrapped(strategy)
        if trained:
            loss_of(model, rank, 0).backward()
            finalize_model_grads([model])
            optimizer.step()
        for call in (
            lambda m=model, o=optimizer: get_optimizer_state_dict(m, o),
            lambda m=model, o=optimizer: set_optimizer_state_dict(m, o, {"state": {}, "param_groups": []}),
        ):
            with pytest.raises(TypeError, match="over full parameters, .* core.checkpoint.save_checkpoint"):
                call()
        assert optimizer.param_groups[0]["lr"] == 0.5
        loss_of(model, rank, 1)


@ranks(2)
def test_torch_ddps_methods_that_are_not_here_say_what_is(rank: int, world: int) -> None:
    parallel_state.initialize_model_parallel()
    model, _ = wrapped("no_shard")
    for name, words in (
        ("register_comm_hook", "grad_communication_dtype"),
        ("join", "as many batches"),
    ):
        assert not hasattr(model, name)
        with pytest.raises(AttributeError, match=words):
            getattr(model, name)
