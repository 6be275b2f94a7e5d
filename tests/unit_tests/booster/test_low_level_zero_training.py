"""What LowLevelZeroPlugin trains: any torch optimizer, unused, frozen and tied parameters, experts, adapters."""

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from core import parallel_state
from core.booster import Booster
from core.booster.plugin import LowLevelZeroPlugin
from core.distributed.buffer.bucket import BucketState
from core.gradient_accumulation import accumulate_gradient
from core.gradient_handler import ZeROGradientHandler
from tests.unit_tests.booster.booster_reference import (
    MAX_NORM,
    assert_same_training,
    full_weights,
    mean_loss,
    new_model,
    new_optimizer,
    run_steps,
    trained_on_one_process,
)
from tests.unit_tests.booster.test_low_level_zero import TINY_BUCKETS, check
from tests.unit_tests.distributed.test_ddp_experts import Experts, expert_loss
from tests.unit_tests.ranks import ranks
from tests.unit_tests.reference import batch

Make = Callable[[nn.Module], torch.optim.Optimizer]
Loss = Callable[[nn.Module, int, int], torch.Tensor]  # (model, rank, step)


def new_booster(stage: int = 1, precision: str = "fp32", **options: Any) -> Booster:
    return Booster(plugin=LowLevelZeroPlugin(stage, precision, reduce_bucket_size_in_m=TINY_BUCKETS, **options))


def net_loss(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    inputs, targets = batch(rank, step, next(model.parameters()).dtype)
    return mean_loss(model(inputs), targets)


def both_ways(
    start: nn.Module, make: Make, loss: Loss, rank: int, world: int, booster: Booster, steps: int = 4
) -> tuple[nn.Module, nn.Module]:
    """The same training with the Booster, and on one process in fp64; each with a schedule made before."""
    reference = copy.deepcopy(start).double()
    plain = make(reference)
    model = copy.deepcopy(start)
    optimizer: Any = make(model)
    schedules = [torch.optim.lr_scheduler.ExponentialLR(each, 0.8) for each in (plain, optimizer)]
    model, optimizer, _, _, schedule = booster.boost(model, optimizer, None, None, schedules[1])
    # A scheduler would warn on a rank that owns nothing and so steps nothing.
    warnings.filterwarnings("error", "Detected call of `lr_scheduler.step")
    for step in range(steps):
        plain.zero_grad()
        sum((loss(reference, r, step) / world for r in range(world)), torch.zeros(())).backward()
        plain.step()
        schedules[0].step()
        optimizer.zero_grad()
        booster.backward(loss(model, rank, step), optimizer)
        optimizer.step()
        schedule.step()
    warnings.resetwarnings()
    return model, reference


def assert_equal_training(model: nn.Module, reference: nn.Module, start: nn.Module, bound: float = 1e-6) -> None:
    ours, before = full_weights(model), dict(start.named_parameters())
    most = 0.0
    for name, want in reference.named_parameters():
        torch.testing.assert_close(ours[name].double(), want, atol=bound, rtol=bound, msg=lambda m, n=name: f"{n}: {m}")
        most = max([most, *(want - before[name].double()).abs().flatten().tolist()])
    assert most > 30 * bound, f"nothing has moved by more than {most}"


def grouped(cls: type[torch.optim.Optimizer], **options: Any) -> Make:
    """Two groups with different options."""

    def make(model: nn.Module) -> torch.optim.Optimizer:
        trained = [param for param in model.parameters() if param.requires_grad]
        weights = [param for param in trained if param.dim() > 1]
        others = [param for param in trained if param.dim() <= 1]
        group = {"params": others, "lr": 2 * options["lr"], "weight_decay": 0.0}
        return cls([{"params": weights}, group], **options)  # type: ignore[call-arg]

    return make


class OwnSGD(torch.optim.SGD):
    """A user's class with torch's step."""


class Unsure(torch.optim.SGD):
    """A user's class with a step of its own."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


class Whole(torch.optim.Optimizer):
    """Moves each parameter along its gradient by a norm of the whole parameter, as LARS does."""

    needs_shapes = True
    couples_parameters = False

    def __init__(self, params: Any, lr: float, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.add_(param.grad, alpha=-group["lr"] * float(param.norm()))


ALGORITHMS: dict[str, Make] = {
    "adam": grouped(torch.optim.Adam, lr=0.05, eps=1e-3),
    "adamw": grouped(torch.optim.AdamW, lr=0.05, eps=1e-3, amsgrad=True),
    "fused adamw": grouped(torch.optim.AdamW, lr=0.05, eps=1e-3, fused=True),
    "nesterov": grouped(torch.optim.SGD, lr=0.2, momentum=0.9, nesterov=True),
    "adagrad": grouped(torch.optim.Adagrad, lr=0.05, initial_accumulator_value=0.1),
    "rmsprop": grouped(torch.optim.RMSprop, lr=0.02, eps=1e-2, momentum=0.5, centered=True),
    "nadam": grouped(torch.optim.NAdam, lr=0.02, eps=1e-3),
    "own": grouped(OwnSGD, lr=0.2),
    "whole": grouped(Whole, lr=0.1),
    "adafactor": lambda model: torch.optim.Adafactor(model.parameters(), lr=0.05, d=100.0),
}


@ranks(3)
@pytest.mark.parametrize("half", [0, 1])
def test_any_torch_optimizer_is_sharded(rank: int, world: int, half: int) -> None:
    for name, make in list(ALGORITHMS.items())[half::2]:
        for stage in (1, 2):
            start = new_model()
            model, reference = both_ways(start, make, net_loss, rank, world, new_booster(stage))
            bound = 3e-6 if name == "adafactor" else 1e-6
            try:
                assert_equal_training(model, reference, start, bound)
            except AssertionError as error:
                raise AssertionError(f"{name}, stage {stage}: {error}") from error


@ranks(2)
def test_an_optimizer_whose_update_is_unknown_is_refused_until_it_says_so(rank: int, world: int) -> None:
    model = new_model()
    with pytest.raises(ValueError, match="Unsure does not say.*Unsure.needs_shapes = False"):
        new_booster().boost(model, Unsure(model.parameters(), lr=0.1))
    with pytest.raises(ValueError, match="LBFGS cannot be used here: its step needs a closure"):
        new_booster().boost(model, torch.optim.LBFGS(model.parameters()))


@ranks(2)
def test_state_of_before_is_taken_over(rank: int, world: int) -> None:
    """Two steps on one process by plain torch, then two under the plugin, are four."""
    start = new_model()
    plain = ALGORITHMS["adamw"](start)
    both: list[Any] = []
    for step in range(4):
        if step == 2:
            model = copy.deepcopy(start)
            optimizer: Any = ALGORITHMS["adamw"](model)
            optimizer.load_state_dict(plain.state_dict())
            booster = new_booster(2)
            both = [booster, *booster.boost(model, optimizer)]
        plain.zero_grad()
        sum((net_loss(start, r, step) / world for r in range(world)), torch.zeros(())).backward()
        plain.step()
        if both:
            both[2].zero_grad()
            both[0].backward(net_loss(both[1], rank, step), both[2])
            both[2].step()
    ours = full_weights(both[1])
    for name, want in start.named_parameters():
        torch.testing.assert_close(ours[name], want, atol=2e-6, rtol=2e-6)


# -- parameters -----------------------------------------------------------------------------------------------------


class Branches(nn.Module):
    """A tied weight, a branch that only some ranks use in some steps, one that no one uses, a frozen one."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 5)
        self.second = nn.Linear(5, 5, bias=False)
        self.second.weight = self.first.weight
        self.branch = nn.Linear(5, 3)
        self.other = nn.Linear(5, 3)
        self.never = nn.Linear(5, 3)
        self.frozen = nn.Linear(5, 3)
        for param in self.frozen.parameters():
            param.requires_grad_(False)
        self.empty = nn.Parameter(torch.zeros(0))

    def forward(self, x: torch.Tensor, branch: bool) -> torch.Tensor:
        x = torch.tanh(self.second(torch.tanh(self.first(x))))
        return self.frozen(x) + (self.branch(x) if branch else self.other(x))


def branch_loss(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    """In step 1 no rank uses `branch`, in step 3 rank 0 alone does."""
    inputs, targets = batch(rank, step, next(model.parameters()).dtype)
    return mean_loss(model(inputs, step in (0, 2) or (step == 3 and rank == 0)), targets)


@ranks(1, 3, nightly=(2,))
def test_parameters_without_a_gradient_are_left_alone_as_by_torch(rank: int, world: int) -> None:
    torch.manual_seed(5)
    start = Branches()
    for stage in (1, 2):
        for make in (
            grouped(torch.optim.AdamW, lr=0.05, eps=1e-3),
            lambda m: torch.optim.SGD(m.parameters(), lr=0.2, momentum=0.9, weight_decay=0.1),
        ):
            model, reference = both_ways(start, make, branch_loss, rank, world, new_booster(stage), steps=6)
            assert_equal_training(model, reference, start)
            plain = model.unwrap()
            assert plain.first.weight is plain.second.weight
            assert torch.equal(plain.never.weight, start.never.weight)
            assert all(param.requires_grad for param in plain.never.parameters())


@ranks(2)
def test_what_is_not_in_the_optimizer_is_not_trained_and_said_so(rank: int, world: int) -> None:
    start = new_model()

    def make(model: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD([*model.first.parameters(), *model.third.parameters()], lr=0.3)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model, reference = both_ways(start, make, net_loss, rank, world, new_booster())
    assert any("3 parameters of the model, the first 'norm.weight', are not in the optimizer" in str(w.message)
               for w in caught)  # fmt: skip
    assert_equal_training(model, reference, start)


@ranks(3)
def test_ranks_start_from_rank_0s_weights(rank: int, world: int) -> None:
    torch.manual_seed(rank)
    model = nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    boosted, *_ = new_booster().boost(model, optimizer)
    torch.manual_seed(0)
    assert torch.equal(boosted.unwrap().weight, nn.Linear(3, 3).weight)


@ranks(4)
@pytest.mark.parametrize("stage", [1, 2])
def test_experts_are_trained_over_their_own_group(rank: int, world: int, stage: int) -> None:
    parallel_state.initialize_model_parallel(expert_model_parallel_size=2)
    booster = new_booster(stage)
    model = Experts(rank % 2)
    start = {name: param.detach().clone() for name, param in model.named_parameters()}
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=1e-3))
    references = [Experts(0), Experts(1)]
    for step in range(3):
        grads: list[dict[str, torch.Tensor]] = [{}, {}]
        for r in range(world):
            local = copy.deepcopy(references[r % 2])
            (expert_loss(local, r, step) / world).backward()
            for name, param in local.named_parameters():
                for expert in (0, 1):
                    if int(name.split(".")[1]) % 2 == 0 or expert == r % 2:
                        grads[expert][name] = grads[expert].get(name, 0) + param.grad
        for expert, reference in enumerate(references):
            for name, param in reference.named_parameters():
                param.data -= 1e-3 * grads[expert][name]
        optimizer.zero_grad()
        booster.backward(expert_loss(model, rank, step), optimizer)
        optimizer.step()
    for name, want in references[rank % 2].named_parameters():
        torch.testing.assert_close(dict(model.unwrap().named_parameters())[name], want, atol=1e-12, rtol=1e-9)
        assert (want - start[name]).abs().max() > 1e-4
    for save in (lambda: booster.save_model(model, "unused"), lambda: booster.save_optimizer(optimizer, "unused")):
        with pytest.raises(ValueError, match="experts are spread over 2 ranks.*core.checkpoint.save_checkpoint"):
            save()


@ranks(2)
def test_layouts_that_are_not_data_parallel_are_refused(rank: int, world: int) -> None:
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    with pytest.raises(ValueError, match="parallel_state has a 'tp' group of 2 ranks"):
        LowLevelZeroPlugin().groups()


@ranks(2)
def test_adapters_alone_are_trained_whenever_the_optimizer_was_made(rank: int, world: int) -> None:
    peft = pytest.importorskip("peft")
    for before in (False, True):
        config = peft.LoraConfig(r=2, target_modules=["first", "third"], init_lora_weights=False)
        booster = new_booster(2)
        plain = new_model()
        optimizer: Any = torch.optim.SGD(plain.parameters(), lr=0.1) if before else None
        torch.manual_seed(3)
        model = booster.enable_lora(plain, lora_config=config)
        reference = copy.deepcopy(model).double()
        if optimizer is None:
            optimizer = torch.optim.SGD([param for param in model.parameters() if param.requires_grad], lr=0.1)
        sgd = torch.optim.SGD([param for param in reference.parameters() if param.requires_grad], lr=0.1)
        start = copy.deepcopy(model)
        model, optimizer, *_ = booster.boost(model, optimizer)
        for step in range(3):
            sgd.zero_grad()
            sum((net_loss(reference, r, step) / world for r in range(world)), torch.zeros(())).backward()
            sgd.step()
            optimizer.zero_grad()
            booster.backward(net_loss(model, rank, step), optimizer)
            optimizer.step()
        assert_equal_training(model, reference, start)
        changed = {name for name, weight in full_weights(model).items()
                   if not torch.equal(weight, dict(start.named_parameters())[name])}  # fmt: skip
        assert len(changed) == 4 and all("lora_" in name for name in changed)


@ranks(2)
def test_adapters_are_put_into_the_group_of_the_weight_that_they_adapt(rank: int, world: int) -> None:
    peft = pytest.importorskip("peft")
    booster = new_booster()
    plain = new_model()
    groups = [{"params": [plain.first.weight], "lr": 0.3}, {"params": [plain.third.weight], "lr": 0.7}]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    model = booster.enable_lora(plain, lora_config=peft.LoraConfig(r=2, target_modules=["first", "third"]))
    assert isinstance(booster.plugin, LowLevelZeroPlugin)
    for _ in range(2):  # the second time there is nothing to add
        booster.plugin.add_lora_params_to_optimizer(model, optimizer)
    named = {id(param): name for name, param in model.named_parameters()}
    for group, layer in zip(optimizer.param_groups, ("first", "third"), strict=True):
        names = [named[id(param)] for param in group["params"]]
        assert len(names) == 3 and all(f".{layer}." in name for name in names)
        assert [name.split(".")[-3] for name in names[1:]] == ["lora_A", "lora_B"]


@ranks(2)
def test_a_gradient_handler_reduces_for_the_optimizer_once(rank: int, world: int) -> None:
    start = new_model()
    model, reference = copy.deepcopy(start), copy.deepcopy(start).double()
    booster = new_booster(overlap_communication=False)
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    plain = torch.optim.SGD(reference.parameters(), lr=0.1)
    handler = ZeROGradientHandler(model, optimizer)
    for step in range(2):
        sum((net_loss(reference, r, step) / world for r in range(world)), torch.zeros(())).backward()
        plain.step()
        plain.zero_grad()
        booster.backward(net_loss(model, rank, step), optimizer)
        handler.handle_gradient()
        assert all(bucket.step.state is BucketState.FINAL for bucket in optimizer.model.reducer.buckets)
        handler.handle_gradient()
        optimizer.step()
        optimizer.zero_grad()
    assert_equal_training(model, reference, start)


# -- a step ---------------------------------------------------------------------------------------------------------


@ranks(2)
def test_accumulation_without_no_sync_is_the_same(rank: int, world: int) -> None:
    for stage, options in ((1, {}), (2, {}), (2, {"reduce_microbatches": "every"})):
        check(rank, world, stage, "fp32", 4, False, sync_all=True, **options)


@ranks(2)
def test_clipping_by_hand_and_looking_at_gradients(rank: int, world: int) -> None:
    for stage, precision in ((1, "fp32"), (2, "fp32"), (1, "fp16")):
        booster = new_booster(stage, precision, initial_scale=2.0**8)
        model = new_model()
        model, optimizer, *_ = booster.boost(model, new_optimizer(model))
        reference = new_model().double()
        if precision == "fp16":
            reference = reference.half().double()
        sgd = new_optimizer(reference)
        bound = 1e-6 if precision == "fp32" else 1e-2
        for step, clip in enumerate((lambda o: o.clip_grad_by_norm(0.3), lambda o: o.clip_grad_by_value(0.02))):
            sgd.zero_grad()
            sum((net_loss(reference, r, step) / world for r in range(world)), torch.zeros(())).backward()
            optimizer.zero_grad()
            booster.backward(mean_loss(model(batch(rank, step)[0].float()), batch(rank, step)[1].float()), optimizer)
            for ours, theirs in zip(model.unwrap().parameters(), reference.parameters(), strict=True):
                gradient = optimizer.get_param_grad(ours).double()
                torch.testing.assert_close(gradient, theirs.grad, atol=bound, rtol=bound)
            if step == 0:
                norm = nn.utils.clip_grad_norm_(reference.parameters(), 0.3)
                assert float(clip(optimizer)) == optimizer.get_grad_norm() == pytest.approx(float(norm), rel=bound)
                assert norm > 0.6
            else:
                nn.utils.clip_grad_value_(reference.parameters(), 0.02)
                clip(optimizer)
            with pytest.raises(RuntimeError, match="backward\\(\\) came after this step's gradients were reduced"):
                booster.backward(torch.ones((), requires_grad=True), optimizer)
            sgd.step()
            optimizer.step()
        for ours, theirs in zip(model.unwrap().parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(ours.double(), theirs, atol=bound, rtol=bound)


ORDERS = ("value", "norm", "norm value", "value norm", "norm norm", "value norm value", "norm value value")


@ranks(2)
@pytest.mark.parametrize(("stage", "precision"), [(1, "fp32"), (2, "bf16")])
def test_clippings_of_one_step_act_in_the_order_of_their_calls(
    rank: int, world: int, stage: int, precision: str
) -> None:
    """Limits that each change the gradient; values, norms and weights are those of torch's functions."""
    bound = 1e-6 if precision == "fp32" else 2e-2
    for order in ORDERS:
        booster, reference = new_booster(stage, precision), new_model().double()
        model, optimizer, *_ = booster.boost(net := new_model(), new_optimizer(net))
        sgd = new_optimizer(reference)
        sum((net_loss(reference, r, 0) / world for r in range(world)), torch.zeros(())).backward()
        booster.backward(net_loss(model, rank, 0), optimizer)
        params = list(reference.parameters())
        calls = order.split()
        for number, call in enumerate(calls):
            if call == "norm":
                limit = (0.3, 0.1, 0.05)[number]
                norm = float(nn.utils.clip_grad_norm_(params, limit))
                assert norm > 1.2 * limit
                assert float(optimizer.clip_grad_by_norm(limit)) == pytest.approx(norm, rel=bound)
            else:
                limit = (0.03, 0.02, 0.01)[number]
                nn.utils.clip_grad_value_(params, limit)
                optimizer.clip_grad_by_value(limit)
                if "norm" not in calls[:number]:
                    norm = float(nn.utils.get_total_norm([param.grad for param in params if param.grad is not None]))
            assert optimizer.get_grad_norm() == pytest.approx(norm, rel=bound)
        if calls[:2] == ["norm", "value"]:
            with pytest.raises(RuntimeError, match="clip_grad_by_norm.. came after .* in one step; leave out"):
                optimizer.clip_grad_by_norm(1.0)
        for ours, theirs in zip(model.unwrap().parameters(), params, strict=True):
            torch.testing.assert_close(optimizer.get_param_grad(ours).double(), theirs.grad, atol=bound, rtol=bound)
        sgd.step()
        optimizer.step()
        for ours, theirs in zip(model.unwrap().parameters(), params, strict=True):
            torch.testing.assert_close(ours.double(), theirs, atol=bound, rtol=bound)


@ranks(2)
def test_calls_that_cannot_be_meant_are_refused(rank: int, world: int) -> None:
    booster = new_booster()
    model = new_model()
    model, optimizer, *_ = booster.boost(model, new_optimizer(model))
    booster.backward(net_loss(model, rank, 0), optimizer)
    for call, words in (
        (lambda: optimizer.step(lambda: None), "step\\(\\) takes no closure"),
        (lambda: optimizer.clip_grad_by_norm(0), "max_norm is 0"),
        (lambda: optimizer.clip_grad_by_norm(1.0, 3.0), "norm_type is 3.0, and the gradient's norm is measured with 2"),
        (lambda: optimizer.clip_grad_by_value(0), "clip_value is 0"),
        (lambda: optimizer.add_param_group({"params": []}), "add the group to the torch optimizer before boost"),
        (lambda: optimizer.scale_loss(torch.ones(())), "no loss scale"),
        (lambda: optimizer.get_param_grad(nn.Parameter(torch.ones(2))), "this optimizer does not train"),
    ):
        with pytest.raises((TypeError, ValueError, RuntimeError, NotImplementedError), match=words):
            call()
    optimizer.step()
    with pytest.raises(RuntimeError, match=r"step\(\) .* came a second time without a backward in between.*zero_grad"):
        optimizer.step()


@ranks(2)
def test_a_dropped_step_leaves_nothing_behind(rank: int, world: int) -> None:
    start = new_model()
    for stage in (1, 2):
        booster = new_booster(stage)
        model = copy.deepcopy(start)
        model, optimizer, *_ = booster.boost(model, new_optimizer(model))
        booster.backward(100 * net_loss(model, rank, 9), optimizer)
        optimizer.clip_grad_by_norm(1.0)
        optimizer.zero_grad()
        booster.backward(100 * net_loss(model, rank, 9), optimizer)
        run_steps(booster, model, optimizer, mean_loss, rank)
        assert_same_training(model, trained_on_one_process(world, 1, False)[0], 1e-6)


@ranks(1, 2)
def test_the_accumulation_wrappers_drive_it(rank: int, world: int) -> None:
    for stage in (1, 2):
        booster = new_booster(stage)
        model = new_model()
        model, optimizer, *_ = booster.boost(model, new_optimizer(model))
        batches = [batch(rank, number, torch.float32) for number in range(20)]
        accumulating, loader, _, _ = accumulate_gradient(model, optimizer, batches, 4)
        for inputs, targets in loader:
            accumulating.zero_grad()
            accumulating.backward(mean_loss(model(inputs), targets))
            accumulating.clip_grad_by_norm(MAX_NORM)
            accumulating.step()
        assert_same_training(model, trained_on_one_process(world, 4, True)[0], 1e-6)


@ranks(3)
def test_each_rank_gets_its_part_of_a_dataset(rank: int, world: int) -> None:
    plugin = LowLevelZeroPlugin()
    dataset = torch.utils.data.TensorDataset(torch.arange(6))
    assert [int(x) for (x,) in plugin.prepare_dataloader(dataset, 1)] == [rank, rank + 3]
    parallel_state.initialize_model_parallel()
    assert (plugin.data_rank(), plugin.data_size()) == (rank, 3)


@ranks(1)
def test_without_an_optimizer_a_model_is_cast_and_runs(rank: int, world: int) -> None:
    booster = new_booster(precision="bf16")
    model, optimizer, *_ = booster.boost(new_model())
    assert optimizer is None and model(torch.ones(1, 5)).dtype == torch.bfloat16
    with booster.no_sync(model):
        pass
