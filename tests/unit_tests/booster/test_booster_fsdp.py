"""Every parameter of TorchFSDPPlugin has its effect; each test fails when the parameter is ignored."""

import contextlib
import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import BackwardPrefetch, CPUOffload, CPUOffloadPolicy, MixedPrecision, ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy, size_based_auto_wrap_policy
from torch.distributed.tensor import DTensor

from core.booster import Booster
from core.booster.plugin import TorchFSDPPlugin
from core.booster.plugin import torch_fsdp_plugin as plugin_file
from core.booster.plugin.fsdp_collectives import Allocating
from core.booster.plugin.fsdp_options import units_of
from core.distributed.wire import fp8_communication
from core.optimizer.loss_scaler import DynamicLossScaler
from tests.unit_tests.booster.booster_reference import (
    BOUNDS,
    MAX_NORM,
    STEPS,
    assert_same_training,
    full_weights,
    mean_loss,
    new_model,
    new_optimizer,
    run_steps,
    train,
    trained_on_one_process,
)
from tests.unit_tests.ranks import ranks
from tests.unit_tests.reference import batch

LINEARS = ModuleWrapPolicy({nn.Linear})


def boosted(model: nn.Module, **options: Any) -> tuple[Booster, Any, Any]:
    booster = Booster(plugin=TorchFSDPPlugin(**options))
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    return booster, model, optimizer


@ranks(4)
def test_process_group_is_what_is_sharded_over(rank: int, world: int) -> None:
    pairs = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    pair = rank % 2
    plugin = TorchFSDPPlugin(process_group=pairs[pair], auto_wrap_policy=LINEARS)
    model, _, _ = train(Booster(plugin=plugin), rank)
    assert (plugin.data_rank(), plugin.data_size()) == (rank // 2, 2)
    reference = trained_on(range(pair, 4, 2))
    assert_same_training(model, reference, BOUNDS["fp32"])


def trained_on(members: range) -> nn.Module:
    """One process on the data of some ranks."""
    model = new_model().double()
    optimizer = new_optimizer(model)
    for step in range(STEPS):
        inputs, targets = (torch.cat(part) for part in zip(*[batch(r, step) for r in members], strict=True))
        optimizer.zero_grad()
        mean_loss(model(inputs), targets).backward()
        optimizer.step()
    return model


@ranks(4)
def test_hybrid_strategies_shard_in_a_machine_and_replicate_between(rank: int, world: int) -> None:
    shard = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    replicate = [dist.new_group([0, 2]), dist.new_group([1, 3])][rank % 2]
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
        for group, strategy in (
            ((shard, replicate), ShardingStrategy.HYBRID_SHARD),
            (None, ShardingStrategy._HYBRID_SHARD_ZERO2),
            (DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("r", "s")), ShardingStrategy.HYBRID_SHARD),
        ):
            plugin = TorchFSDPPlugin(group, strategy, auto_wrap_policy=LINEARS)
            model, _, norms = train(Booster(plugin=plugin), rank, 2, True)
            weight = model.unwrap().second.weight
            assert weight.device_mesh.mesh.tolist() == [[0, 1], [2, 3]]
            reference, wanted = trained_on_one_process(world, 2, True)
            assert_same_training(model, reference, BOUNDS["fp32"])
            assert norms == pytest.approx(wanted, rel=1e-5)
            assert (plugin.data_rank(), plugin.data_size()) == (rank, 4)


@ranks(2)
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
def test_sharding_strategy_decides_what_a_rank_keeps(rank: int, world: int, strategy: str) -> None:
    options = {"sharding_strategy": ShardingStrategy[strategy], "auto_wrap_policy": LINEARS}
    _, model, _ = boosted(new_model(), **options)
    inner = model.unwrap().second
    kept = inner.weight.to_local().numel()
    assert kept == 77 if strategy == "NO_SHARD" else kept in (42, 35)  # 6 or 5 of 11 rows
    model(torch.ones(2, 5))
    assert isinstance(inner.weight, DTensor) == (strategy == "FULL_SHARD"), "gathered after forward?"
    model, _, _ = train(Booster(plugin=TorchFSDPPlugin(**options)), rank, 2, True)
    assert_same_training(model, trained_on_one_process(world, 2, True)[0], BOUNDS["fp32"])


@ranks(2)
def test_cpu_offload_reaches_torch_and_trains_the_same(rank: int, world: int) -> None:
    """On CPUs shards lie on the host anyway, so that the policy arrives is all there is to see."""
    given: list[Any] = []
    fully_shard = plugin_file.fully_shard
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(
            plugin_file, "fully_shard", lambda *a, **k: (given.append(k["offload_policy"]), fully_shard(*a, **k))[1]
        )
        for wanted in (CPUOffload(offload_params=True), CPUOffload(offload_params=False), None):
            given.clear()
            model, _, _ = train(Booster(plugin=TorchFSDPPlugin(cpu_offload=wanted)), rank, 1, True)
            offloads = wanted is not None and wanted.offload_params
            assert [isinstance(policy, CPUOffloadPolicy) for policy in given] == [offloads]
            assert_same_training(model, trained_on_one_process(world, 1, True)[0], BOUNDS["fp32"])


def test_auto_wrap_policy_chooses_the_units_in_all_its_forms() -> None:
    from functools import partial

    def names(policy: Any) -> list[str]:
        return sorted(unit.name for unit in units_of(nn.Sequential(new_model(), nn.Linear(3, 3)), policy, None, set()))

    linears = ["", "0.first", "0.second", "0.third", "1"]
    assert names(None) == [""]
    assert names(ModuleWrapPolicy({nn.Linear})) == names({nn.Linear}) == linears
    assert names(lambda module, recurse, nonwrapped_numel: recurse or isinstance(module, nn.Linear)) == linears
    # 7*11 = 77 elements in 0.second; what is left of 0 is smaller than 100
    assert names(partial(size_based_auto_wrap_policy, min_num_params=70)) == ["", "0", "0.second"]
    with pytest.raises(TypeError, match="auto_wrap_policy is 3"):
        names(3)
    with pytest.warns(UserWarning, match=r"no module of \['Conv2d'\], so it is one unit"):
        assert names({nn.Conv2d}) == [""]
    for wrong in (nn.Linear, {"Linear"}, [nn.Linear, int]):
        with pytest.raises(TypeError, match="a set of module classes"):
            names(wrong)


@ranks(2)
def test_backward_prefetch_decides_when_the_next_unit_is_gathered(rank: int, world: int) -> None:
    def order_in_backward(prefetch: BackwardPrefetch | None) -> list[str]:
        """The backward of `third` comes first, then that of `second`: which is gathered when?"""
        events: list[str] = []

        class Noted(Allocating):
            def __init__(self, name: str) -> None:
                self.name = name

            def __call__(
                self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, async_op: bool = False
            ) -> None:
                events.append(f"gather {self.name}")
                fp8_communication.all_gather_bytes(output_tensor, input_tensor, group)

        booster, model, optimizer = boosted(new_model(), auto_wrap_policy=LINEARS, backward_prefetch=prefetch)
        plain = model.unwrap()
        for name in ("second", "third"):
            getattr(plain, name).set_custom_all_gather(Noted(name))
        inner = plain.third.forward

        def forward(x: torch.Tensor) -> torch.Tensor:
            x = x * 1.0
            x.register_hook(lambda grad: events.append("backward of third"))
            return inner(x)

        plain.third.forward = forward
        outputs = model(batch(rank, 0, torch.float32)[0])
        events.clear()
        booster.backward(outputs.sum(), optimizer)
        return events

    pre = ["gather third", "gather second", "backward of third"]
    assert order_in_backward(None) == order_in_backward(BackwardPrefetch.BACKWARD_PRE) == pre
    assert order_in_backward(BackwardPrefetch.BACKWARD_POST) == ["gather third", "backward of third", "gather second"]


class Dtypes(nn.Module):
    """Notes the dtypes that a forward sees."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 4)
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("table", torch.ones(4))
        self.seen: dict[str, torch.dtype] = {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.linear(x)
        normed = self.norm(hidden)
        self.seen = {"x": x.dtype, "hidden": hidden.dtype, "normed": normed.dtype, "table": self.table.dtype}
        return normed * self.table


@ranks(2)
def test_mixed_precision_gives_the_dtypes_and_spares_batch_norms(rank: int, world: int) -> None:
    bf16 = torch.bfloat16
    _, model, _ = boosted(Dtypes(), mixed_precision=MixedPrecision(param_dtype=bf16, buffer_dtype=torch.float16))
    model(torch.randn(6, 5))
    assert model.unwrap().seen == {"x": bf16, "hidden": bf16, "normed": bf16, "table": torch.float16}
    assert model.unwrap().norm.running_mean.dtype == torch.float32
    assert model.unwrap().norm.weight.to_local().dtype == torch.float32
    kept = [param for param in model.parameters() if isinstance(param, DTensor)]
    assert kept and all(param.dtype == torch.float32 for param in kept)
    _, model, _ = boosted(Dtypes(), mixed_precision=MixedPrecision(bf16, cast_root_forward_inputs=False))
    with pytest.raises(RuntimeError, match="dtype"):
        model(torch.randn(6, 5))


@ranks(2)
def test_reduce_dtype_is_the_dtype_that_gradients_travel_in(rank: int, world: int) -> None:
    def gradients(reduce_dtype: torch.dtype | None) -> list[torch.Tensor]:
        precision = MixedPrecision(param_dtype=torch.float32, reduce_dtype=reduce_dtype)
        booster, model, optimizer = boosted(new_model(), mixed_precision=precision)
        booster.backward(
            mean_loss(model(batch(rank, 0, torch.float32)[0]), batch(rank, 0, torch.float32)[1]), optimizer
        )
        return [param.grad.full_tensor() for param in model.parameters()]

    exact, rounded = gradients(None), gradients(torch.bfloat16)
    assert all(torch.equal(grad, grad.bfloat16().float()) for grad in rounded)
    assert any(not torch.equal(a, b) for a, b in zip(exact, rounded, strict=True))


@ranks(1, 2)
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_mixed_precision_of_the_plugin_trains_within_its_bound(rank: int, world: int, dtype: str) -> None:
    wanted = {"bf16": torch.bfloat16, "fp16": torch.float16}[dtype]
    options: dict[str, Any] = {"mixed_precision": MixedPrecision(param_dtype=wanted, reduce_dtype=torch.float32)}
    if dtype == "fp16":
        options["loss_scaler"] = DynamicLossScaler(2.0**10)
    plugin = TorchFSDPPlugin(auto_wrap_policy=LINEARS, **options)
    model, optimizer, _ = train(Booster(plugin=plugin), rank, 2, True)
    assert (optimizer.scaler is not None) == (dtype == "fp16")
    assert dtype == "bf16" or optimizer.scaler.value == 2.0**10
    assert_same_training(model, trained_on_one_process(world, 2, True)[0], BOUNDS[dtype])


@ranks(2)
def test_an_overflow_in_one_rank_s_shard_skips_the_step_of_all(rank: int, world: int) -> None:
    booster = Booster(mixed_precision="fp16", plugin=TorchFSDPPlugin())
    model = new_model()
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=1.0))
    before = full_weights(model)
    booster.backward(model(torch.ones(2, 5)).float().sum() * 1e-3, optimizer)
    if rank == 1:
        first = next(param for param in model.parameters() if param.grad.to_local().numel())
        first.grad.to_local().view(-1)[0] = torch.inf
    optimizer.step()
    assert optimizer.found_inf and optimizer.scaler.value == 2.0**15
    assert all(torch.equal(before[name], now) for name, now in full_weights(model).items())


@ranks(2)
def test_ignored_modules_are_neither_sharded_nor_reduced(rank: int, world: int) -> None:
    model = new_model()
    booster, model, optimizer = boosted(model, ignored_modules=[model.third], auto_wrap_policy=LINEARS)
    plain = model.unwrap()
    assert isinstance(plain.second.weight, DTensor) and not isinstance(plain.third.weight, DTensor)
    booster.backward(mean_loss(model(batch(rank, 0, torch.float32)[0]), batch(rank, 0, torch.float32)[1]), optimizer)
    alone = new_model()
    mean_loss(alone(batch(rank, 0, torch.float32)[0]), batch(rank, 0, torch.float32)[1]).backward()
    torch.testing.assert_close(plain.third.weight.grad, alone.third.weight.grad)
    norm = optimizer.clip_grad_by_norm(1e-3)  # of shards and of whole tensors together
    assert norm > 1e-3


@ranks(2)
def test_a_parameter_that_was_added_after_boost_is_refused_by_name(rank: int, world: int) -> None:
    booster, model, optimizer = boosted(new_model())
    model.unwrap().norm.extra = nn.Parameter(torch.ones(7))  # an adapter: every rank would train its own
    model.unwrap().norm.register_forward_hook(lambda module, _, output: output * module.extra)
    booster.backward(model(batch(rank, 0, torch.float32)[0]).sum(), optimizer)
    with pytest.raises(RuntimeError, match="'norm.extra' was added after TorchFSDPPlugin"):
        optimizer.step()


@ranks(2)
@pytest.mark.parametrize("own", [True, False], ids=["param_init_fn", "reset_parameters"])
def test_a_model_on_the_meta_device_is_given_values(rank: int, world: int, own: bool) -> None:
    with torch.device("meta"):
        model = new_model()
        model.fourth = nn.Linear(5, 5, bias=False)
        model.fifth = nn.Linear(5, 5, bias=False)
        model.fifth.weight = model.fourth.weight  # tied

    def init(module: nn.Module) -> None:
        module.to_empty(device="cpu", recurse=False)
        for param in module.parameters(recurse=False):
            nn.init.constant_(param, 0.25)

    torch.manual_seed(5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plugin = TorchFSDPPlugin(param_init_fn=init if own else None)
    model, optimizer, *_ = Booster(plugin=plugin).boost(model, optimizer)
    weights = full_weights(model)
    assert all(param.device.type == "cpu" for param in model.parameters())
    assert (weights["second.weight"] == 0.25).all() == own
    assert (weights["norm.weight"] == (0.25 if own else 1.0)).all()
    assert model.unwrap().fourth.weight is model.unwrap().fifth.weight
    assert optimizer.parameters[0] is next(model.parameters())


@ranks(1)
def test_a_meta_module_that_no_one_can_fill_is_refused_by_name(rank: int, world: int) -> None:
    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.values = nn.Parameter(torch.empty(3, device="meta"))

    with pytest.raises(ValueError, match="'1'.*Table.*param_init_fn"):
        boosted(nn.Sequential(nn.Linear(2, 2), Table()))


@ranks(2)
@pytest.mark.parametrize("sync", [True, False])
def test_sync_module_states_begins_with_rank_0s_values(rank: int, world: int, sync: bool) -> None:
    model = new_model()
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(float(rank))
    model.register_buffer("table", torch.full((3,), float(rank)))
    with (
        pytest.warns(UserWarning, match="7 parameters, the first 'first.weight', have other values on rank 1")
        if not sync
        else (contextlib.nullcontext())
    ):
        _, model, _ = boosted(model, sync_module_states=sync)
    values = {value for weight in full_weights(model).values() for value in weight.flatten().tolist()}
    assert values == ({0.0} if sync else {0.0, 1.0})
    assert model.unwrap().table.tolist() == [0.0 if sync else float(rank)] * 3


@ranks(2)
def test_no_sync_of_fsdp_reduces_nothing(rank: int, world: int) -> None:
    booster, model, optimizer = boosted(new_model(), auto_wrap_policy=LINEARS)
    inputs, targets = batch(rank, 0, torch.float32)
    with booster.no_sync(model, optimizer):
        booster.backward(mean_loss(model(inputs), targets), optimizer)
    assert all(param.grad is None for param in model.unwrap().parameters() if isinstance(param, DTensor))
    booster.backward(mean_loss(model(inputs), targets), optimizer)
    assert all(param.grad is not None for param in model.parameters())


@ranks(2, 3)
def test_fp8_communication_rounds_parameters_and_gradients_within_bounds(rank: int, world: int) -> None:
    booster, model, optimizer = boosted(nn.Linear(40, 20, bias=False), fp8_communication=True)
    exact = full_weights(model)["weight"]
    inputs = torch.randn(6, 40, generator=torch.Generator().manual_seed(rank))
    seen = []
    model.unwrap().register_forward_pre_hook(lambda module, _: seen.append(module.weight.detach().clone()))
    booster.backward(model(inputs).square().sum(), optimizer)
    largest = exact.abs().max()
    assert ((seen[0] - exact).abs() <= exact.abs() / 16 + largest * 2.0**-18).all()
    assert not torch.equal(seen[0], exact)
    grads = []
    for other in range(world):
        x = torch.randn(6, 40, generator=torch.Generator().manual_seed(other))
        weight = seen[0].clone().requires_grad_()
        (x @ weight.t()).square().sum().backward()
        grads.append(weight.grad)
    stacked = torch.stack(grads)
    error = (model.unwrap().weight.grad.full_tensor() - stacked.mean(0)).abs()
    assert (error <= 0.0626 * stacked.abs().mean(0) + stacked.abs().max() * 2.0**-17).all()
    assert error.max() > 0.001


@ranks(2)
def test_groups_state_and_scheduler_of_an_optimizer_survive_sharding(rank: int, world: int) -> None:
    """ColossalAI makes the optimizer again from its defaults, and drops all three."""
    model = new_model()
    reference = copy.deepcopy(model).double()
    optimizers = [new_optimizer(model), new_optimizer(reference)]
    schedulers = [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5) for optimizer in optimizers]
    for net, optimizer, dtype in ((model, optimizers[0], torch.float32), (reference, optimizers[1], torch.float64)):
        mean_loss(net(batch(7, 0, dtype)[0]), batch(7, 0, dtype)[1]).backward()
        optimizer.step()  # momentum, before the model is sharded
        optimizer.zero_grad()
    booster = Booster(plugin=TorchFSDPPlugin(auto_wrap_policy=LINEARS))
    start = copy.deepcopy(reference)
    model, optimizer, criterion, _, scheduler = booster.boost(model, optimizers[0], mean_loss, None, schedulers[0])
    for step in range(2):
        run_steps(booster, model, optimizer, criterion, rank, steps=range(step, step + 1))
        scheduler.step()
        inputs, targets = (torch.cat(part) for part in zip(*[batch(r, step) for r in range(world)], strict=True))
        optimizers[1].zero_grad()
        mean_loss(reference(inputs), targets).backward()
        optimizers[1].step()
        schedulers[1].step()
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.05, 0.1125])
    assert_same_training(model, reference, BOUNDS["fp32"], start)


class Tied(nn.Module):
    """Embedding and head are one parameter, with a layer between them."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.layer = nn.Linear(6, 6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.layer(self.embedding(tokens))))


@ranks(1, 3)
def test_a_tied_weight_stays_one_and_is_refused_in_two_units(rank: int, world: int) -> None:
    torch.manual_seed(1)
    model = Tied()
    reference = copy.deepcopy(model)
    with pytest.raises(ValueError, match="'head.weight'.*'embedding.weight'.*tied"):
        boosted(copy.deepcopy(model), auto_wrap_policy={nn.Linear, nn.Embedding})
    booster, model, optimizer = boosted(model, auto_wrap_policy=lambda module, recurse, nonwrapped_numel: (
        recurse or module is model.layer
    ))  # fmt: skip
    tokens = [torch.randint(11, (4, 5), generator=torch.Generator().manual_seed(r)) for r in range(world)]
    booster.backward(model(tokens[rank]).square().mean(), optimizer)
    reference(torch.cat(tokens)).square().mean().backward()
    assert model.unwrap().head.weight is model.unwrap().embedding.weight
    torch.testing.assert_close(model.unwrap().head.weight.grad.full_tensor(), reference.head.weight.grad)


@ranks(3)
def test_ranks_with_different_models_are_reported_before_anything_is_cut(rank: int, world: int) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 4 if rank == 1 else 3))
    with pytest.raises(ValueError, match=r"rank 1 has '1.weight' \[4, 2\].*rank 0 has '1.weight' \[3, 2\]"):
        boosted(model)
    model = nn.Sequential(nn.Linear(2, 2), *[nn.Linear(2, 2)] * (rank == 2))
    with pytest.raises(ValueError, match="rank 2 has '1.weight'.*; rank 0 has nothing"):
        boosted(model)


def test_which_unit_casts_its_inputs() -> None:
    for cast, cast_root in ((False, True), (True, False), (False, False)):
        precision = MixedPrecision(torch.bfloat16, cast_forward_inputs=cast, cast_root_forward_inputs=cast_root)
        units = units_of(nn.Sequential(new_model()), LINEARS, precision, set())
        assert [unit.policy.cast_forward_inputs for unit in units] == [cast] * 3 + [cast or cast_root]


@ranks(1)
def test_combinations_that_cannot_be_are_refused_when_the_plugin_is_made(rank: int, world: int) -> None:
    with pytest.raises(ValueError, match="HYBRID_SHARD.*pair"):
        TorchFSDPPlugin(process_group=dist.group.WORLD, sharding_strategy=ShardingStrategy.HYBRID_SHARD)
    mesh = init_device_mesh("cpu", (1,))
    with pytest.raises(ValueError, match="HYBRID_SHARD.*mesh .replicate, shard."):
        TorchFSDPPlugin(process_group=mesh, sharding_strategy=ShardingStrategy.HYBRID_SHARD)
    assert TorchFSDPPlugin(process_group=mesh).data_size() == 1
    with pytest.raises(ValueError, match="loss_scaler is for fp16"):
        TorchFSDPPlugin(loss_scaler=DynamicLossScaler(2.0))
    with pytest.raises(ValueError, match="FULL_SHARD.*one group"):
        TorchFSDPPlugin(process_group=(dist.group.WORLD, dist.group.WORLD))
    with pytest.raises(ValueError, match="keep_low_precision_grads"):
        TorchFSDPPlugin(mixed_precision=MixedPrecision(torch.bfloat16, keep_low_precision_grads=True))
    with pytest.raises(ValueError, match="NO_SHARD"):
        TorchFSDPPlugin(sharding_strategy=ShardingStrategy.NO_SHARD, fp8_communication=True)
    with pytest.raises(TypeError, match="sharding_strategy is 'zero'"):
        TorchFSDPPlugin(sharding_strategy="zero")  # type: ignore[arg-type]
    for option, wrong in (
        ("mixed_precision", "bf16"),
        ("backward_prefetch", "pre"),
        ("cpu_offload", "params"),
        ("process_group", "world"),
        ("param_init_fn", 1),
        ("auto_wrap_policy", nn.Linear),
    ):
        with pytest.raises(TypeError, match=f"{option} is .*; expected "):
            TorchFSDPPlugin(**{option: wrong})
    with pytest.warns(UserWarning, match="decides the precision"):
        Booster(mixed_precision="fp16", plugin=TorchFSDPPlugin(mixed_precision=MixedPrecision(torch.bfloat16)))


@ranks(2, 3)
def test_the_norm_is_that_of_the_whole_gradient(rank: int, world: int) -> None:
    """ColossalAI's is that of a rank's own shard."""
    for order in (2.0, 1.0, float("inf")):
        booster, model, optimizer = boosted(new_model(), auto_wrap_policy=LINEARS)
        inputs, targets = batch(rank, 0, torch.float32)
        booster.backward(mean_loss(model(inputs), targets), optimizer)
        norm = optimizer.clip_grad_by_norm(MAX_NORM, order)
        reference = new_model().double()
        parts = [batch(r, 0) for r in range(world)]
        mean_loss(reference(torch.cat([x for x, _ in parts])), torch.cat([y for _, y in parts])).backward()
        wanted = nn.utils.clip_grad_norm_(reference.parameters(), MAX_NORM, order)
        assert float(norm) == pytest.approx(float(wanted), rel=1e-5)
        for ours, want in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(ours.grad.full_tensor().double(), want.grad, atol=1e-6, rtol=1e-4)
