"""Algorithms against their written-out formulas and against plain torch.optim on one process, unsharded, in fp64."""

import copy
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import nn

from core import parallel_state
from core.booster import Booster
from core.booster.plugin import LowLevelZeroPlugin
from core.optimizer import (
    OptimizerConfig,
    ParamKey,
    ParamPredicate,
    get_megatron_optimizer,
    get_standard_config_overrides,
)
from core.optimizer.algorithms.lion import Lion
from core.optimizer.algorithms.names import label, resolve, update_scope
from core.optimizer.step.inner_optimizer import CombinedOptimizer, inner_optimizer
from core.optimizer.step.inner_step import InnerStep
from tests.unit_tests.ranks import ranks
from tests.unit_tests.reference import loss_of, make_net, train, wrap

STRATEGIES = ("no_shard", "optim")
STEPS = 4


class HalvingSGD(torch.optim.Optimizer):
    """A class of a user's: no weight decay, a state of one tensor and one number."""

    needs_shapes = False

    def __init__(self, params: Iterable[Any], lr: float, rate: float = 0.5) -> None:
        super().__init__(params, {"lr": lr, "rate": rate})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                state["count"] = state.get("count", 0) + 1
                state.setdefault("mean", torch.zeros_like(param)).lerp_(param.grad, group["rate"])
                param.sub_(state["mean"], alpha=group["lr"] / state["count"])


class WritesItsShape(torch.optim.SGD):
    """Says that it must see whole parameters."""

    needs_shapes = True


# torch class -> options; each moves the reference far more than the tolerance in four steps.
PLUGGED: dict[str, dict[str, Any]] = {
    "Adagrad": {"lr": 0.1, "lr_decay": 0.1},
    "RMSprop": {"lr": 0.01, "momentum": 0.5, "centered": True},
    "NAdam": {"lr": 0.05},
    "RAdam": {"lr": 0.5},
    "Adadelta": {"lr": 20.0},
    "Adamax": {"lr": 0.05},
    "Rprop": {"lr": 0.05},
}


def decay_groups(model: nn.Module, decay: float) -> list[dict[str, Any]]:
    params = list(model.parameters())
    return [
        {"params": [p for p in params if p.dim() > 1], "weight_decay": decay},
        {"params": [p for p in params if p.dim() <= 1], "weight_decay": 0.0},
    ]


def reference_step(model: nn.Module, optimizer: Any, world: int, microbatch: int) -> None:
    optimizer.zero_grad()
    for rank in range(world):
        (loss_of(model, rank, microbatch) / world).backward()
    optimizer.step()


def assert_equal_after_moving(model: nn.Module, reference: nn.Module, start: nn.Module, rtol: float = 1e-9) -> None:
    for (name, got), want, before in zip(
        model.named_parameters(), reference.parameters(), start.parameters(), strict=True
    ):
        moved = (want - before).norm()
        assert moved > 1e-2, f"{name}: the reference moved by {moved} only"
        error = (got - want).norm()
        assert error <= rtol * moved, f"{name}: off by {error} after a move of {moved}"


# -- Lion -------------------------------------------------------------------------------------------------------------


def lion_by_the_paper(params: list[torch.Tensor], gradients: list[list[torch.Tensor]], **numbers: Any) -> None:
    """Algorithm 2 of arXiv:2302.06675, number by number."""
    lr, beta1, beta2, decay = numbers["lr"], numbers["beta1"], numbers["beta2"], numbers["decay"]
    for index, param in enumerate(params):
        flat = param.view(-1)
        momentum = [0.0] * flat.numel()
        for step in gradients:
            for i, g in enumerate(step[index].view(-1).tolist()):
                c = beta1 * momentum[i] + (1 - beta1) * g
                sign = (c > 0) - (c < 0)
                theta = flat[i].item()
                flat[i] = theta - lr * (sign + decay * theta)
                momentum[i] = beta2 * momentum[i] + (1 - beta2) * g


@pytest.mark.parametrize("decay", [0.0, 0.3])
def test_lion_follows_the_paper(decay: float) -> None:
    torch.manual_seed(0)
    shapes = [(3, 4), (5,), (0,), (2, 3), (1,)]
    params = [nn.Parameter(torch.randn(shape, dtype=torch.float64)) for shape in shapes]
    gradients = [[torch.randn(shape, dtype=torch.float64) for shape in shapes] for _ in range(6)]
    gradients[0][4].zero_()  # a sign of zero is zero
    expected = [param.detach().clone() for param in params]
    optimizer = Lion(params, lr=0.1, betas=(0.9, 0.7), weight_decay=decay)
    for step in gradients:
        for param, gradient in zip(params, step, strict=True):
            param.grad = gradient.clone()
        optimizer.step()
    lion_by_the_paper(expected, gradients, lr=0.1, beta1=0.9, beta2=0.7, decay=decay)
    for param, want in zip(params, expected, strict=True):
        torch.testing.assert_close(param.detach(), want, rtol=1e-12, atol=1e-12)
    with pytest.raises(ValueError, match="betas"):
        Lion(params, betas=(1.0, 0.5))


def test_lion_leaves_parameters_without_a_gradient_alone() -> None:
    moving, still = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    moving.grad = torch.ones(3)
    optimizer = Lion([moving, still], lr=0.5, weight_decay=0.5)
    optimizer.step()
    assert torch.equal(still, torch.ones(3)) and still not in optimizer.state
    assert torch.allclose(moving, torch.full((3,), 0.25))


@ranks(1, 3, nightly=(2,))
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_lion_trains_in_shards_as_it_does_on_one_process(rank: int, world: int, strategy: str) -> None:
    parallel_state.initialize_model_parallel()
    model = make_net(width=61)
    start, reference = copy.deepcopy(model), copy.deepcopy(model)
    plain = Lion(decay_groups(reference, 0.1), lr=0.05, betas=(0.9, 0.8))
    ddp = wrap(model, data_parallel_sharding_strategy=strategy, bucket_size=60)
    config = OptimizerConfig(optimizer="lion", lr=0.05, lion_beta1=0.9, lion_beta2=0.8, weight_decay=0.1, clip_grad=0.0)
    optimizer = get_megatron_optimizer(config, [ddp])
    for microbatch in range(STEPS):
        train(ddp, optimizer, rank, microbatch)
        reference_step(reference, plain, world, microbatch)
    assert_equal_after_moving(model, reference, start)


# -- classes of torch, and of users -----------------------------------------------------------------------------------


@ranks(1, 3, nightly=(2, 4))
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", ["Adagrad", "RMSprop", "NAdam"])
@pytest.mark.in_suite()
def test_a_torch_class_trains_in_shards_as_it_does_on_one_process(
    rank: int, world: int, strategy: str, name: str
) -> None:
    check_plugged(rank, world, strategy, name)


@ranks(3)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", sorted(set(PLUGGED) - {"Adagrad", "RMSprop", "NAdam"}))
@pytest.mark.in_suite()
def test_so_do_the_other_elementwise_classes(rank: int, world: int, strategy: str, name: str) -> None:
    check_plugged(rank, world, strategy, name)


def check_plugged(rank: int, world: int, strategy: str, name: str) -> None:
    parallel_state.initialize_model_parallel()
    model = make_net(width=61)
    start, reference = copy.deepcopy(model), copy.deepcopy(model)
    options = dict(PLUGGED[name])
    lr = options.pop("lr")
    decay = 0.0 if name == "Rprop" else 0.1
    groups = decay_groups(reference, decay)
    if name == "Rprop":  # it has no weight decay
        groups = [{"params": group["params"]} for group in groups]
    plain = getattr(torch.optim, name)(groups, lr=lr, **options)
    ddp = wrap(model, data_parallel_sharding_strategy=strategy, bucket_size=60)
    config = OptimizerConfig(optimizer=name, optimizer_kwargs=options, lr=lr, weight_decay=decay, clip_grad=0.0)
    optimizer = get_megatron_optimizer(config, [ddp])
    assert type(optimizer.optimizer) is getattr(torch.optim, name)
    for microbatch in range(STEPS):
        train(ddp, optimizer, rank, microbatch)
        reference_step(reference, plain, world, microbatch)
    assert_equal_after_moving(model, reference, start)


@ranks(1, 2)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_class_of_a_user_is_plugged_in_with_its_options(rank: int, world: int, strategy: str) -> None:
    parallel_state.initialize_model_parallel()
    model = make_net(width=61)
    start, reference = copy.deepcopy(model), copy.deepcopy(model)
    plain = HalvingSGD(reference.parameters(), lr=0.05, rate=0.25)
    ddp = wrap(model, data_parallel_sharding_strategy=strategy, bucket_size=60)
    options = {"optimizer": HalvingSGD, "optimizer_kwargs": {"rate": 0.25}, "lr": 0.05, "clip_grad": 0.0}
    with pytest.raises(ValueError, match="HalvingSGD has no weight decay and weight_decay is 0.01"):
        get_megatron_optimizer(OptimizerConfig(**options), [ddp])
    optimizer = get_megatron_optimizer(OptimizerConfig(weight_decay=0.0, **options), [ddp])
    for microbatch in range(STEPS):
        train(ddp, optimizer, rank, microbatch)
        reference_step(reference, plain, world, microbatch)
    assert_equal_after_moving(model, reference, start)


def test_names_and_classes_are_resolved_and_what_cannot_work_is_refused() -> None:
    assert resolve("adam") == label("adam") == "adam"
    assert resolve("Adagrad") is torch.optim.Adagrad and label(torch.optim.Adagrad) == "Adagrad"
    assert resolve(label(HalvingSGD)) is HalvingSGD
    assert {update_scope(each) for each in ("adam", "lion", "Adagrad", HalvingSGD)} == {"element"}
    assert {update_scope(each) for each in ("muon", "came", "Adafactor", WritesItsShape)} == {"parameter"}

    class Hidden(torch.optim.SGD):
        pass

    for bad, why in {
        Hidden: "define it in a module",
        "adamw": "decoupled_weight_decay=True",
        "adagrad": "is not one of adam, sgd, lion, muon",
        "LBFGS": "closure",
        torch.optim.SparseAdam: "dense",
        torch.optim.Optimizer: "subclass",
        nn.Linear: "subclass",
    }.items():
        with pytest.raises(ValueError, match=why):
            OptimizerConfig(optimizer=bad)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="optimizer_kwargs .* options of 'adam' as fields"):
        OptimizerConfig(optimizer_kwargs={"amsgrad": True})
    with pytest.raises(ValueError, match="optimizer_backend is 'gpu'"):
        OptimizerConfig(optimizer_backend="gpu")


@ranks(2)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_groups_with_algorithms_and_options_of_their_own_step_together(rank: int, world: int, strategy: str) -> None:
    parallel_state.initialize_model_parallel()
    model = make_net(width=61)
    start, reference = copy.deepcopy(model), copy.deepcopy(model)
    lion = [p for n, p in reference.named_parameters() if n.startswith("second")]
    eps = [reference.first.weight]
    taken = {id(p) for p in (*lion, *eps)}
    rest = [p for p in reference.parameters() if id(p) not in taken]
    plain = [
        Lion(lion, lr=0.02, betas=(0.95, 0.98), weight_decay=0.1),
        torch.optim.AdamW(
            [
                {"params": eps, "eps": 0.5, "weight_decay": 0.1},
                {"params": [p for p in rest if p.dim() > 1], "weight_decay": 0.1},
                {"params": [p for p in rest if p.dim() == 1], "weight_decay": 0.0},
            ],
            lr=0.02,
        ),
    ]
    ddp = wrap(model, data_parallel_sharding_strategy=strategy, bucket_size=60)
    config = OptimizerConfig(lr=0.02, weight_decay=0.1, clip_grad=0.0)
    standard = get_standard_config_overrides(config)
    overrides = {ParamKey(name="second.*"): {"optimizer": "lion"}, ParamKey(name="first.weight"): {"eps": 0.5}}
    optimizer = get_megatron_optimizer(config, [ddp], config_overrides={**standard, **overrides})
    assert isinstance(optimizer.optimizer, CombinedOptimizer)
    for microbatch in range(STEPS):
        train(ddp, optimizer, rank, microbatch)
        reference.zero_grad()
        for each in range(world):
            (loss_of(reference, each, microbatch) / world).backward()
        for each in plain:
            each.step()
    assert_equal_after_moving(model, reference, start)
    saved, weights = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(model.state_dict())
    keys = {name: set(entry) for name, entries in saved["state"].items() for entry in entries}
    assert all("exp_avg" in found for found in keys.values())
    assert {name for name, found in keys.items() if "exp_avg_sq" not in found} <= {"second.weight"}
    resumed = make_net(width=61, seed=9)
    resumed_ddp = wrap(resumed, data_parallel_sharding_strategy=strategy, bucket_size=60)
    resumed_optimizer = get_megatron_optimizer(config, [resumed_ddp], config_overrides={**standard, **overrides})
    with torch.no_grad():
        resumed.load_state_dict(weights)
    resumed_optimizer.reload_model_params()
    resumed_optimizer.load_state_dict(saved)
    train(ddp, optimizer, rank, STEPS)
    train(resumed_ddp, resumed_optimizer, rank, STEPS)
    for (name, got), want in zip(resumed.named_parameters(), model.parameters(), strict=True):
        assert torch.equal(got, want), f"{name}: a step after loading is another one"
    with pytest.raises(ValueError, match="lion has no option 'eps'"):
        get_megatron_optimizer(
            config, [ddp], config_overrides={ParamKey(name="second.*"): {"optimizer": "lion", "eps": 0.5}}
        )


def test_stepping_some_runs_steps_those_alone() -> None:
    class OneRun:
        group = 0

        def __init__(self) -> None:
            self.master = nn.Parameter(torch.ones(4))
            self.grad = self.master.grad = torch.ones(4)

    segments = [OneRun(), OneRun(), OneRun()]
    config = OptimizerConfig(lr=0.1, optimizer="sgd", sgd_momentum=0.0, weight_decay=0.0)
    group = {"params": [segment.master for segment in segments], "optimizer": "sgd", "weight_decay": 0.0, "name": "sgd"}
    optimizer = inner_optimizer(config, [group])
    InnerStep(optimizer).step_segments(segments[1:2], [1.0])  # type: ignore[arg-type]
    assert [segment.master[0].item() for segment in segments] == pytest.approx([1.0, 0.9, 1.0])
    assert [id(p) for p in optimizer.param_groups[0]["params"]] == [id(segment.master) for segment in segments]


# -- algorithms that need whole parameters, and parameters that are split -----------------------------------------


def split_model() -> nn.Module:
    """A column-parallel matrix and a replicated one."""
    model = nn.Module()
    model.column = nn.Parameter(torch.ones(2, 4))
    model.column.tensor_model_parallel, model.column.partition_dim = True, 0
    model.replicated = nn.Parameter(torch.ones(4, 4))
    return model


REST = ParamKey(predicate=ParamPredicate("all but the replicated matrix", lambda param: param.shape != (4, 4)))


@ranks(2)
@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("algorithm", ["Adafactor", "Muon", WritesItsShape])
@pytest.mark.in_suite()
def test_an_algorithm_that_needs_whole_parameters_is_refused_where_tensor_parallelism_splits_one(
    rank: int, world: int, sharded: bool, algorithm: Any
) -> None:
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    ddp = wrap(split_model(), use_distributed_optimizer=sharded, keep_params_whole=sharded and "all")
    config = OptimizerConfig(optimizer=algorithm, lr=0.1)
    name = algorithm if isinstance(algorithm, str) else ".*:WritesItsShape"
    with pytest.raises(ValueError, match=rf"'column' is split over the 2 ranks of 'tp', and {name} .*'column'.*'muon'"):
        get_megatron_optimizer(config, [ddp])
    get_megatron_optimizer(config, [ddp], config_overrides={REST: {"optimizer": "adam"}})
    get_megatron_optimizer(config, [ddp], config_overrides={REST: {"optimizer": "muon"}})


@ranks(2)
@pytest.mark.parametrize("axis", ["expt_tp", "ep"])
def test_it_is_refused_where_ranks_hold_parts_of_experts_or_of_a_stack_of_them(
    rank: int, world: int, axis: str
) -> None:
    experts = 2 if axis == "ep" else 1
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=2 // experts, expert_model_parallel_size=experts
    )

    def make() -> nn.Module:
        model = nn.Module()
        model.stack, model.one = nn.Parameter(torch.ones(2, 4)), nn.Parameter(torch.ones(4, 4))
        model.stack.allreduce = model.one.allreduce = False
        if axis == "ep":
            model.stack.expert_dim = 0  # biases of two experts
        else:
            model.stack.tensor_model_parallel = True
        return model

    ddp = wrap(make(), initial_weights="ignore")
    with pytest.raises(ValueError, match=f"'stack' is split over the 2 ranks of '{axis}', and Adafactor"):
        get_megatron_optimizer(OptimizerConfig(optimizer="Adafactor", lr=0.1), [ddp])
    get_megatron_optimizer(
        OptimizerConfig(optimizer="Adafactor", lr=0.1), [ddp], config_overrides={REST: {"optimizer": "adam"}}
    )
    if axis == "ep":
        model = make()
        adafactor = torch.optim.Adafactor(model.parameters())
        with pytest.raises(ValueError, match="'stack' is split over the 2 ranks of 'ep', and Adafactor"):
            Booster(plugin=LowLevelZeroPlugin(precision="fp32")).boost(model, adafactor)


@ranks(2)
def test_a_split_parameter_of_one_stage_is_refused_on_all_stages(rank: int, world: int) -> None:
    """Every rank learns of it before any of them allocates, whoever holds the parameter."""
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    model = split_model()
    ddp = wrap(model, initial_weights="ignore")
    key = ParamKey(predicate=ParamPredicate("the column of rank 1", lambda param: param is model.column and rank == 1))
    with pytest.raises(ValueError, match="'column' is split over the 2 ranks of 'tp', and Adafactor"):
        get_megatron_optimizer(OptimizerConfig(lr=0.1), [ddp], config_overrides={key: {"optimizer": "Adafactor"}})
