"""Every parameter of TorchDDPPlugin has its effect; each test fails when the parameter is ignored."""

from typing import Any

import pytest
import torch
from torch import nn

from core.booster import Booster
from core.booster.plugin import TorchDDPPlugin
from core.booster.plugin import torch_ddp_plugin as plugin_file
from tests.unit_tests.booster.booster_reference import full_weights, new_model, train, trained_on_one_process
from tests.unit_tests.ranks import ranks
from tests.unit_tests.reference import batch


class Counting(nn.Module):
    """Has a buffer that differs on every rank, and a parameter that is used only where asked."""

    def __init__(self, start: float) -> None:
        super().__init__()
        self.used = nn.Linear(5, 3)
        self.unused = nn.Linear(5, 3)
        self.register_buffer("seen", torch.tensor(start))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.used(x) + self.seen


def boosted(model: nn.Module, **options: Any) -> tuple[Booster, Any, Any]:
    booster = Booster(plugin=TorchDDPPlugin(**options))
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    return booster, model, optimizer


@ranks(2)
@pytest.mark.parametrize("broadcast", [True, False])
def test_broadcast_buffers_gives_rank_0s_buffers_to_all(rank: int, world: int, broadcast: bool) -> None:
    _, model, _ = boosted(Counting(float(rank)), broadcast_buffers=broadcast, find_unused_parameters=True)
    model.unwrap().seen.fill_(10.0 + rank)
    model(torch.ones(2, 5))
    assert model.unwrap().seen.item() == (10.0 if broadcast else 10.0 + rank)


@ranks(2)
@pytest.mark.parametrize(("cap_mib", "buckets"), [(25, 1), (1, 4)])
def test_bucket_cap_mb_is_the_size_of_a_bucket(rank: int, world: int, cap_mib: int, buckets: int) -> None:
    model = nn.Sequential(*[nn.Linear(512, 512, bias=False) for _ in range(4)])  # 1 MiB each
    booster, model, optimizer = boosted(model, bucket_cap_mb=cap_mib)
    sizes: list[int] = []

    def count(_, bucket):  # torch reads annotations
        sizes.append(bucket.buffer().numel())
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    model.module.register_comm_hook(None, count)
    for _ in range(2):  # buckets are made again after the first backward
        sizes.clear()
        booster.backward(model(torch.ones(2, 512)).sum(), optimizer)
    assert len(sizes) == buckets


@ranks(2)
def test_find_unused_parameters_and_static_graph_allow_unused_ones(rank: int, world: int) -> None:
    for options, allowed in (({}, False), ({"find_unused_parameters": True}, True), ({"static_graph": True}, True)):
        booster, model, optimizer = boosted(Counting(0.0), **options)
        try:
            for _ in range(3):
                optimizer.zero_grad()
                booster.backward(model(torch.ones(2, 5) * (rank + 1)).sum(), optimizer)
                optimizer.step()
        except RuntimeError as error:
            assert not allowed and "unused" in str(error)
        else:
            assert allowed
            assert torch.equal(model.unwrap().used.weight.grad, torch.full((3, 5), 3.0))  # 2 * mean of 1 and 2


@ranks(1)
def test_gradient_as_bucket_view_lets_gradients_share_memory(rank: int, world: int) -> None:
    for view in (True, False):
        booster, model, optimizer = boosted(new_model(), gradient_as_bucket_view=view)
        booster.backward(model(torch.ones(2, 5)).sum(), optimizer)
        memories = {param.grad.untyped_storage().data_ptr() for param in model.parameters()}
        assert (len(memories) == 1) == view


@ranks(1)
@pytest.mark.parametrize("option", ["check_reduction", "static_graph", "find_unused_parameters"])
def test_options_without_a_visible_effect_reach_torch(rank: int, world: int, option: str) -> None:
    given: dict[str, Any] = {}

    class Recorded(plugin_file.TorchDDP):
        def __init__(self, module: nn.Module, **options: Any) -> None:
            given.update(options)
            super().__init__(module, **options)

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(plugin_file, "TorchDDP", Recorded)
        boosted(new_model(), **{option: True})
        assert given[option] is True
        boosted(new_model())
        assert given[option] is False


@ranks(2, 3)
def test_gradients_travel_in_8_bits_and_stay_within_the_stated_bound(rank: int, world: int) -> None:
    booster, model, optimizer = boosted(new_model(), fp8_communication=True)
    inputs, _ = batch(rank, 0, torch.float32)
    booster.backward(model(inputs).square().sum(), optimizer)
    own = []
    for other in range(world):
        reference = new_model()
        reference(batch(other, 0, torch.float32)[0]).square().sum().backward()
        own.append([param.grad for param in reference.parameters()])
    largest = max(float(grad.abs().max()) for grads in own for grad in grads)
    differences = []
    for param, *grads in zip(model.parameters(), *own, strict=True):
        stacked = torch.stack(grads)
        error = (param.grad - stacked.mean(0)).abs()
        assert (error <= 0.13 * stacked.abs().mean(0) + largest * 2.0**-17 + 1e-6).all()
        differences.append(float((error / stacked.mean(0).abs()).max()))
    assert max(differences) > 0.005, "nothing travelled in 8 bits"


@ranks(2)
def test_training_in_8_bit_gradients_stays_near_exact_training(rank: int, world: int) -> None:
    model, _, _ = train(Booster(plugin=TorchDDPPlugin(fp8_communication=True)), rank, 2, True)
    reference, _ = trained_on_one_process(world, 2, True)
    start = dict(new_model().named_parameters())
    for (name, ours), want in zip(full_weights(model).items(), reference.parameters(), strict=True):
        assert (ours - want).norm() < 0.2 * (want - start[name]).norm(), name


@ranks(2)
def test_no_sync_works_on_a_model_under_mixed_precision(rank: int, world: int) -> None:
    """ColossalAI refuses the model there: it looks for its wrapper under the precision's."""
    booster = Booster(mixed_precision="bf16", plugin=TorchDDPPlugin())
    model, optimizer, *_ = booster.boost(new_model(), None)
    with booster.no_sync(model):
        model(batch(rank, 0, torch.float32)[0]).float().sum().backward()
    weights = [param.grad.clone() for param in model.parameters()]
    gathered: list[Any] = [None] * world
    torch.distributed.all_gather_object(gathered, weights)
    assert any(not torch.equal(a, b) for a, b in zip(*gathered, strict=True)), "gradients were reduced under no_sync"


@ranks(1)
def test_a_bucket_of_no_size_is_refused(rank: int, world: int) -> None:
    with pytest.raises(ValueError, match="bucket_cap_mb is 0"):
        TorchDDPPlugin(bucket_cap_mb=0)


def test_batch_norm_becomes_common_to_all_ranks_off_the_cpu() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(5, 5), nn.BatchNorm1d(5))
    weight = model[1].weight
    converted = plugin_file.with_common_batch_norm(model, 2)
    assert isinstance(converted[1], nn.SyncBatchNorm) and converted[1].weight is weight  # the optimizer's


@ranks(2)
def test_batch_norm_on_cpus_is_left_alone_with_a_warning(rank: int, world: int) -> None:
    with pytest.warns(UserWarning, match="no SyncBatchNorm for CPUs") as caught:
        boosted(nn.Sequential(nn.Linear(5, 5), nn.BatchNorm1d(5)))
    assert "/core/" not in caught[0].filename  # the user's line


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.heads = nn.Linear(5, 4), nn.ModuleList(nn.Linear(4, 3) for _ in range(2))

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        hidden = torch.tanh(self.body(x))
        return [head(hidden) for head in self.heads]


def _by_booster(booster: Booster, optimizer: Any, loss: torch.Tensor) -> None:
    booster.backward(loss, optimizer)


def _by_optimizer(booster: Booster, optimizer: Any, loss: torch.Tensor) -> None:
    optimizer.backward(loss, retain_graph=True)


def _by_torch(booster: Booster, optimizer: Any, loss: torch.Tensor) -> None:
    loss.backward(retain_graph=True)


@ranks(2)
@pytest.mark.parametrize("unused", [False, True])
@pytest.mark.parametrize("door", [_by_booster, _by_optimizer, _by_torch])
@pytest.mark.in_suite()
def test_a_second_loss_of_one_forward_is_refused_because_torch_leaves_it_local(
    rank: int, world: int, door: Any, unused: bool
) -> None:
    booster, model, optimizer = boosted(TwoHeads(), find_unused_parameters=unused)
    x, _ = batch(rank, 0, torch.float32)
    for _ in range(2):
        first, second = (out.sum() for out in model(x))
        (first + 0 * second).backward(retain_graph=True)
        with pytest.raises(RuntimeError, match="adds a second gradient to '.*' after one forward.*Add the losses"):
            door(booster, optimizer, first + second)
        optimizer.zero_grad()


@ranks(2)
def test_two_forwards_before_two_backwards_are_refused_because_torch_reduces_one(rank: int, world: int) -> None:
    """A GAN's discriminator on real and on fake pictures, each with a backward."""
    booster, model, optimizer = boosted(TwoHeads())
    real, fake = (sum(out.sum() for out in model(batch(rank, n, torch.float32)[0])) for n in range(2))
    booster.backward(real, optimizer)
    with pytest.raises(RuntimeError, match="a second gradient to .* after one forward"):
        booster.backward(fake, optimizer)


class Nested(TwoHeads):
    def forward(self, x: torch.Tensor) -> Any:
        first, second = super().forward(x)
        return {"heads": (first, {"second": second})}


def _both(outputs: Any) -> torch.Tensor:
    first, second = outputs if isinstance(outputs, list) else (outputs["heads"][0], outputs["heads"][1]["second"])
    return first.pow(2).sum() + 3 * second.sin().sum()


def _gradient_penalty(model: nn.Module, x: torch.Tensor) -> None:
    x = x.clone().requires_grad_()
    outputs = _both(model(x))
    (slope,) = torch.autograd.grad(outputs, x, create_graph=True)
    (outputs + slope.pow(2).sum()).backward()


def _only_inputs_first(model: nn.Module, x: torch.Tensor) -> None:
    x = x.clone().requires_grad_()
    outputs = _both(model(x))
    outputs.backward(inputs=[x], retain_graph=True)
    outputs.backward()


def _weight_penalty_apart(model: nn.Module, x: torch.Tensor) -> None:
    _both(model(x)).backward()
    sum(param.pow(2).sum() for param in model.parameters()).backward()


def _evaluation_between(model: nn.Module, x: torch.Tensor) -> None:
    loss = _both(model(x))
    with torch.no_grad():
        model(2 * x)
    loss.backward()


def _checkpointed(model: nn.Module, x: torch.Tensor) -> None:
    hidden = torch.utils.checkpoint.checkpoint(torch.tanh, x.clone().requires_grad_(), use_reentrant=True)
    _both(model(hidden)).backward()


def _two_losses_of_two_forwards(model: nn.Module, x: torch.Tensor) -> None:
    for scale in (1, 2):
        _both(model(scale * x)).backward()


def _after_an_error(model: nn.Module, x: torch.Tensor) -> None:
    outputs = _both(model(x))
    outputs.register_hook(lambda grad: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        outputs.backward()
    _both(model(x)).backward()


RIGHT = [
    *(_gradient_penalty, _only_inputs_first, _weight_penalty_apart, _evaluation_between, _checkpointed),
    *(_two_losses_of_two_forwards, _after_an_error),
]


@ranks(2)
@pytest.mark.parametrize("kind", [TwoHeads, Nested])
@pytest.mark.parametrize("program", RIGHT)
@pytest.mark.in_suite()
def test_programs_that_torchs_wrapper_reduces_are_let_through(rank: int, world: int, program: Any, kind: Any) -> None:
    torch.manual_seed(1)
    _, model, _ = boosted(kind())
    whole = kind()
    whole.load_state_dict(model.unwrap().state_dict())
    program(model, batch(rank, 0, torch.float32)[0])
    for other in range(world):
        program(whole, batch(other, 0, torch.float32)[0])
    for (name, param), ours in zip(whole.named_parameters(), model.parameters(), strict=True):
        assert param.grad.norm() > 1e-3, name
        torch.testing.assert_close(ours.grad, param.grad / world)


class TwoTowers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.towers = nn.ModuleList(nn.Linear(5, 3) for _ in range(2))

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        return [tower(x) for tower in self.towers]


@ranks(2)
def test_two_losses_over_other_parameters_of_one_forward_are_right(rank: int, world: int) -> None:
    torch.manual_seed(1)
    booster, model, optimizer = boosted(TwoTowers())
    for out in model(batch(rank, 0, torch.float32)[0]):
        booster.backward(out.sum(), optimizer)
    mean = sum(batch(other, 0, torch.float32)[0].sum(0) for other in range(world)) / world
    for tower in model.unwrap().towers:
        torch.testing.assert_close(tower.weight.grad, mean.expand(3, 5))


@ranks(2)
@pytest.mark.parametrize("how", ["unfrozen", "added", "replaced"])
def test_a_parameter_that_torchs_wrapper_does_not_know_is_refused_by_name(rank: int, world: int, how: str) -> None:
    plain = TwoHeads()
    plain.body.bias.requires_grad_(False)
    booster, model, optimizer = boosted(plain)
    x, _ = batch(rank, 0, torch.float32)
    booster.backward(_both(model(x)), optimizer)
    if how == "unfrozen":
        plain.body.bias.requires_grad_(True)
    elif how == "added":
        plain.heads[1].extra = nn.Parameter(torch.ones(3))
    else:
        plain.body.weight = nn.Parameter(plain.body.weight.detach().clone())
    name = {"unfrozen": "body.bias", "added": "heads.1.extra", "replaced": "body.weight"}[how]
    with pytest.raises(RuntimeError, match=f"parameter '{name}' was frozen, or not there, when TorchDDPPlugin"):
        model(x)
    with torch.no_grad():
        model(x)


@ranks(2)
def test_two_forwards_and_two_losses_are_right(rank: int, world: int) -> None:
    torch.manual_seed(1)
    booster, model, optimizer = boosted(TwoHeads(), find_unused_parameters=True)
    whole = TwoHeads()
    whole.load_state_dict(model.unwrap().state_dict())
    for number in range(2):
        with booster.no_sync(model, optimizer):
            booster.backward(model(batch(rank, number, torch.float32)[0])[number].sum(), optimizer)
        booster.backward(model(batch(rank, number, torch.float32)[0])[number].sum(), optimizer)
        for other in range(2):
            whole(batch(other, number, torch.float32)[0])[number].sum().backward()
    for name, param in whole.named_parameters():
        got = dict(model.unwrap().named_parameters())[name].grad
        torch.testing.assert_close(got, param.grad)
