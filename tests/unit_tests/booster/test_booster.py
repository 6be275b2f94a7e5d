"""The Booster itself: what it accepts and returns, the plugin contract, precisions, loaders, adapters."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from core.booster import Booster
from core.booster.accelerator import device_of_group, devices_here
from core.booster.mixed_precision import FP16TorchMixedPrecision, mixed_precision_factory
from core.booster.mixed_precision import fp8 as fp8_file
from core.booster.plugin import DPPluginBase, Plugin, TorchDDPPlugin, TorchFSDPPlugin
from core.booster.plugin.plugin_base import Boosted
from core.gradient_accumulation import accumulate_gradient
from core.interface import ModelWrapper, OptimizerWrapper
from tests.unit_tests.booster.booster_reference import (
    BOUNDS,
    MAX_NORM,
    assert_same_training,
    full_weights,
    mean_loss,
    new_model,
    new_optimizer,
    train,
)
from tests.unit_tests.booster.booster_reference import trained_on_one_process as on_one_process
from tests.unit_tests.ranks import ranks
from tests.unit_tests.reference import batch


class SumPlugin(Plugin):
    """A user's plugin: gradients are averaged by a hook on each parameter. Only what must be written."""

    def supported_devices(self) -> list[str]:
        return ["cpu"]

    def supported_precisions(self) -> list[str]:
        return ["fp32", "bf16"]

    def control_precision(self) -> bool:
        return False

    def control_device(self) -> bool:
        return False

    def configure(self, model, optimizer=None, criterion=None, dataloader=None, lr_scheduler=None) -> Boosted:
        def average(param: nn.Parameter) -> None:
            dist.all_reduce(param.grad)
            param.grad /= dist.get_world_size()

        for param in model.parameters():
            param.register_post_accumulate_grad_hook(average)
        return ModelWrapper(model), OptimizerWrapper(optimizer), criterion, dataloader, lr_scheduler

    def prepare_dataloader(self, dataset, batch_size, **options) -> DataLoader:
        return DataLoader(dataset, batch_size)


@ranks(1, 3)
def test_a_users_plugin_trains_and_refuses_by_name_what_it_has_not(rank: int, world: int) -> None:
    booster = Booster(plugin=SumPlugin(), device="cpu")
    model, _, _ = train(booster, rank, 1, True)
    assert_same_training(model, on_one_process(world, 1, True)[0], BOUNDS["fp32"])
    with pytest.raises(RuntimeError, match="SumPlugin does not support no_sync"):
        booster.no_sync(model)
    with pytest.raises(RuntimeError, match="SumPlugin does not support LoRA"):
        booster.enable_lora(new_model())
    with pytest.raises(RuntimeError, match="The plugin SumPlugin does not support pipeline"):
        booster.execute_pipeline([], model, mean_loss)
    with pytest.raises(ValueError, match="SumPlugin does not train in 'fp16'"):
        Booster(plugin=SumPlugin(), mixed_precision="fp16")


def test_a_plugin_that_lacks_a_method_cannot_be_made() -> None:
    class Half(Plugin):
        def supported_devices(self) -> list[str]:
            return ["cpu"]

    with pytest.raises(TypeError, match="abstract"):
        Half()  # type: ignore[abstract]


def test_without_a_plugin_the_device_and_the_precision_are_applied() -> None:
    """ColossalAI moves the model only for a plugin that leaves the device to it."""
    booster = Booster(device="cpu", mixed_precision="bf16")
    model = new_model()
    loader, scheduler = DataLoader(TensorDataset(torch.ones(2))), object()
    boosted = booster.boost(model, new_optimizer(model), mean_loss, loader, scheduler)
    assert len(boosted) == 5 and boosted[3] is loader and boosted[4] is scheduler
    assert boosted[0](torch.ones(2, 5)).dtype == torch.bfloat16
    assert boosted[0].unwrap() is model
    assert Booster().boost(model)[1:] == (None, None, None, None)
    assert Booster().accelerator.device.type == devices_here()[-1]
    booster.accelerator.device = torch.device("meta")  # the one other device that every machine has
    assert all(param.is_meta for param in booster.boost(new_model())[0].parameters())
    with pytest.raises(ValueError, match="'xla' is not on this machine"):
        Booster(device="xla")
    with pytest.raises(RuntimeError, match="The plugin None does not support no_sync"):
        booster.no_sync()


def test_arguments_in_a_wrong_order_are_distinguished() -> None:
    booster, model = Booster(device="cpu"), new_model()
    optimizer, loader = new_optimizer(model), DataLoader(TensorDataset(torch.ones(2)))
    for arguments, words in (
        ((model, optimizer, loader, mean_loss), "DataLoader for the criterion.*five values in this order"),
        ((model, loader), "DataLoader for the optimizer"),
        ((optimizer, model), "SGD for the model"),
        ((model, optimizer, mean_loss, model), "Net for the dataloader"),
    ):
        with pytest.raises(TypeError, match=words):
            booster.boost(*arguments)
    boosted, *_ = booster.boost(model, optimizer)
    with pytest.raises(RuntimeError, match="boosted already"):
        booster.boost(boosted)
    with pytest.raises(TypeError, match="plugin must be a Plugin"):
        Booster(plugin=TorchDDPPlugin)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="mixed_precision must be a name"):
        Booster(mixed_precision=16)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"'int3' is none of \['bf16', 'fp16', 'fp32', 'fp8'\]"):
        Booster(mixed_precision="int3")
    with pytest.raises(ValueError, match="use 'fp16'"):
        mixed_precision_factory("fp16_naive")


def test_a_plugin_without_torch_distributed_says_what_to_call() -> None:
    for plugin in (TorchDDPPlugin, TorchFSDPPlugin):
        with pytest.raises(RuntimeError, match=f"{plugin.__name__} trains on the ranks.*init_process_group"):
            plugin()


@ranks(1)
def test_an_optimizer_of_other_parameters_is_refused(rank: int, world: int) -> None:
    for plugin in (TorchDDPPlugin(), TorchFSDPPlugin()):
        stranger = nn.Linear(2, 3)
        model = new_model()
        optimizer = torch.optim.SGD([{"params": model.parameters()}, {"params": stranger.parameters()}], lr=0.1)
        with pytest.raises(ValueError, match=r"parameter 0 \(shape \[3, 2\]\) of the optimizer's group 1"):
            Booster(plugin=plugin).boost(model, optimizer)


@ranks(1)
def test_a_device_that_a_plugin_does_not_run_on_is_refused_by_its_name(rank: int, world: int) -> None:
    class CudaOnly(TorchDDPPlugin):
        def supported_devices(self) -> list[str]:
            return ["cuda"]

    assert device_of_group().type == "cpu"  # gloo
    with pytest.raises(RuntimeError, match=r"CudaOnly does not run on 'cpu', only on \['cuda'\]"):
        Booster(plugin=CudaOnly()).boost(new_model())
    with pytest.warns(UserWarning, match="TorchDDPPlugin decides the device"):
        Booster(device="cpu", plugin=TorchDDPPlugin())


# -- fp16 -----------------------------------------------------------------------------------------------------------


def new_fp16(**options: Any) -> tuple[Booster, Any, Any, nn.Parameter]:
    weight = nn.Linear(1, 1, bias=False)
    nn.init.ones_(weight.weight)
    booster = Booster(device="cpu", mixed_precision=FP16TorchMixedPrecision(**options))
    model, optimizer, *_ = booster.boost(weight, torch.optim.SGD(weight.parameters(), lr=1.0))
    return booster, model, optimizer, weight.weight


def test_the_loss_scale_follows_all_of_its_options() -> None:
    booster, _, optimizer, weight = new_fp16(
        init_scale=64.0, growth_factor=4.0, backoff_factor=0.25, growth_interval=2, min_scale=8.0, max_scale=512.0,
        hysteresis=2,
    )  # fmt: skip
    scales, weights = [], []
    for overflow in (False, False, False, False, True, True, True, True):
        optimizer.zero_grad()
        booster.backward((weight * (torch.inf if overflow else 0.125)).sum(), optimizer)
        optimizer.step()
        scales.append(optimizer.scaler.value)
        weights.append(weight.item())
    # 64, grown by 4 after two, to at most 512; the first overflow is forgiven, then a quarter, to at least 8.
    assert scales == [64.0, 256.0, 256.0, 512.0, 512.0, 128.0, 32.0, 8.0]
    assert weights == [0.875, 0.75, 0.625, 0.5, 0.5, 0.5, 0.5, 0.5]


def test_clipping_and_norms_are_of_the_unscaled_gradient() -> None:
    booster, _, optimizer, weight = new_fp16(init_scale=1024.0)
    booster.backward((weight * 3.0).sum(), optimizer)
    assert weight.grad.item() == 3.0 * 1024
    assert optimizer.get_grad_norm() is None
    assert float(optimizer.clip_grad_by_norm(1.0)) == optimizer.get_grad_norm() == 3.0
    assert weight.grad.item() == pytest.approx(1.0, rel=1e-5)
    with pytest.raises(RuntimeError, match="after this step's gradients were unscaled"):
        booster.backward((weight * 3.0).sum(), optimizer)
    optimizer.zero_grad()
    booster.backward((weight * 3.0).sum(), optimizer)
    optimizer.clip_grad_by_value(0.5)
    assert weight.grad.item() == 0.5
    _, plain, *_ = Booster(device="cpu").boost(new_model(), torch.optim.SGD([weight], lr=1.0))
    for wrapped in (optimizer, plain):
        with pytest.raises(ValueError, match="max_norm is 0.*leave out"):
            wrapped.clip_grad_by_norm(0)
    with pytest.raises(NotImplementedError, match="no loss scale"):
        plain.scale_loss(torch.ones(1))
    with pytest.raises(TypeError, match="closure"):
        optimizer.step(lambda: None)


def test_a_scale_above_the_largest_fp16_number_works() -> None:
    booster, model, optimizer, weight = new_fp16(init_scale=2.0**20)
    loss = (model(torch.ones(1, 1)).float() * 2.0**-10).sum()
    assert optimizer.scale_loss(loss.half()).item() == 2.0**10
    booster.backward(loss, optimizer)
    optimizer.unscale_grad()
    assert weight.grad.item() == 2.0**-10


def test_backward_by_grad_is_not_scaled() -> None:
    _, model, optimizer, weight = new_fp16(init_scale=1024.0)
    optimizer.backward_by_grad(model(torch.ones(1, 1)), torch.full((1, 1), 2.0, dtype=torch.float16))
    assert weight.grad.item() == 2.0


@pytest.mark.parametrize("option", ["init_scale", "growth_factor", "backoff_factor", "growth_interval", "hysteresis"])
def test_numbers_that_make_no_scaler_are_refused(option: str) -> None:
    with pytest.raises(ValueError, match=option.replace("init_", "initial_")):
        FP16TorchMixedPrecision(**{option: 0})


# -- other precisions -----------------------------------------------------------------------------------------------


def test_colossalais_other_kinds_of_fp16_are_refused_by_name() -> None:
    for name in ("fp16_naive", "fp16_apex"):
        with pytest.raises(ValueError, match=f"'{name}' of ColossalAI is not here; use 'fp16'"):
            Booster(mixed_precision=name, device="cpu")


def test_fp8_says_why_it_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: Any, **__: Any) -> None:
        raise RuntimeError("no such kernel\nlong trace")

    monkeypatch.setattr(torch.nn.functional, "scaled_mm", none)
    with pytest.raises(RuntimeError, match=r"'fp8' cannot run here: torch .* for cpu \(no such kernel\). Use 'bf16'"):
        Booster(mixed_precision="fp8", device="cpu")


@pytest.mark.skipif(fp8_file.why_not(torch.device("cpu")) is not None, reason="no 8-bit product on this CPU")
def test_fp8_products_are_near_exact_ones_and_really_in_8_bits() -> None:
    generator = torch.Generator().manual_seed(0)
    exact = nn.Linear(32, 48)
    booster = Booster(mixed_precision="fp8", device="cpu")
    model = nn.Sequential(nn.Linear(32, 48), nn.GELU(), nn.Linear(48, 5))
    model[0].load_state_dict(exact.state_dict())
    boosted, *_ = booster.boost(model)
    assert "forward" in vars(model[0]) and "forward" not in vars(model[2])  # 5 is no multiple of 16
    x = torch.randn(3, 7, 32, generator=generator)
    grad = torch.randn(3, 7, 48, generator=generator)
    inputs = [x.clone().requires_grad_(), x.clone().requires_grad_()]
    for layer, own in ((model[0], inputs[0]), (exact, inputs[1])):
        outputs = layer(own)
        outputs.backward(grad.to(outputs.dtype))
    pairs = [
        (model[0](x).float(), exact(x)),
        (inputs[0].grad, inputs[1].grad),
        (model[0].weight.grad, exact.weight.grad),
        (model[0].bias.grad, exact.bias.grad),
    ]
    for number, (got, want) in enumerate(pairs):
        error = (got - want).norm() / want.norm()
        assert error < 0.08, number
        assert error > 0.005 or number == 3, number
    assert boosted(x).dtype == torch.bfloat16
    with pytest.raises(ValueError, match="change nothing"):
        booster.boost(nn.Linear(5, 5))


@pytest.mark.skipif(fp8_file.why_not(torch.device("cpu")) is not None, reason="no 8-bit product on this CPU")
@ranks(2)
@pytest.mark.parametrize("plugin", [TorchDDPPlugin, TorchFSDPPlugin])
def test_fp8_trains_under_both_plugins_near_exact_training(rank: int, world: int, plugin: Any) -> None:
    def model_of() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 16))

    booster, model, reference = Booster(mixed_precision="fp8", plugin=plugin()), model_of(), model_of()
    boosted, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.5))
    exact = torch.optim.SGD(reference.parameters(), lr=0.5)
    data = [torch.randn(12, 16, generator=torch.Generator().manual_seed(r)) for r in range(world)]
    for _ in range(5):
        optimizer.zero_grad()
        booster.backward(boosted(data[rank]).float().sub(1).square().mean(), optimizer)
        optimizer.step()
        exact.zero_grad()
        reference(torch.cat(data)).sub(1).square().mean().backward()
        exact.step()
    weights = full_weights(boosted).values()
    for got, want, start in zip(weights, reference.parameters(), model_of().parameters(), strict=True):
        assert (got - want).norm() < 0.15 * (want - start).norm()


@ranks(2)
@pytest.mark.parametrize("plugin", [TorchDDPPlugin, TorchFSDPPlugin])
def test_accumulate_gradient_takes_what_boost_returns(rank: int, world: int, plugin: Any) -> None:
    booster = Booster(plugin=plugin(), mixed_precision=FP16TorchMixedPrecision(init_scale=2.0**10))
    plain = new_model()
    model, optimizer, criterion, *_ = booster.boost(plain, new_optimizer(plain), mean_loss)
    batches = [batch(rank, number, torch.float32) for number in range(20)]
    optimizer, loader, _, _ = accumulate_gradient(model, optimizer, batches, 4)
    for inputs, targets in loader:
        optimizer.zero_grad()
        optimizer.backward(criterion(model(inputs), targets))
        optimizer.clip_grad_by_norm(MAX_NORM)
        optimizer.step()
    assert_same_training(model, on_one_process(world, 4, True)[0], BOUNDS["fp16"])


# -- loaders --------------------------------------------------------------------------------------------------------


class Noisy(Dataset):
    """Each item is its number, and random numbers of the worker."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, item: int) -> tuple[int, float, float, float]:
        return item, random.random(), float(np.random.rand()), torch.rand(()).item()


def new_loader(rank: int, world: int, **options: Any) -> DataLoader:
    plugin = TorchDDPPlugin()
    assert isinstance(plugin, DPPluginBase) and (plugin.data_rank(), plugin.data_size()) == (rank, world)
    return plugin.prepare_dataloader(Noisy(), 2, **options)


def everyones(values: Any) -> list[Any]:
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, values)
    return gathered


@ranks(3)
def test_ranks_share_a_dataset_and_the_seed_of_its_shuffle(rank: int, world: int) -> None:
    """ColossalAI's seed never reaches the sampler, and drop_last only the loader."""

    def items(**options: Any) -> list[int]:
        return [int(item) for batch in new_loader(rank, world, **options) for item in batch[0]]

    assert items() == [(rank + world * number) % 10 for number in range(4)]  # padded to 12
    parts = everyones(items(shuffle=True, drop_last=True))
    assert sum(map(len, parts)) == 6 and len(set().union(*parts)) == 6  # 9 of 10, in whole batches of 2
    assert items(shuffle=True, seed=1) == items(shuffle=True, seed=1) != items(shuffle=True, seed=2)
    loader = new_loader(rank, world, shuffle=True)
    before = [batch[0].tolist() for batch in loader]
    loader.sampler.set_epoch(1)
    assert [batch[0].tolist() for batch in loader] != before


@ranks(2)
def test_workers_have_seeds_of_their_own_and_the_users_function_runs(rank: int, world: int) -> None:
    loader = new_loader(rank, world, num_workers=2, worker_init_fn=seed_python, seed=5, multiprocessing_context="fork")
    got = [tuple(float(column[0]) for column in batch) for batch in loader]
    for worker, (_, python, by_numpy, by_torch) in enumerate(got[:2]):
        seed = 5 + 2 * rank + worker
        assert python == random.Random(1000 + worker).random()
        assert by_numpy == np.random.RandomState(seed).rand()
        assert by_torch == torch.rand((), generator=torch.Generator().manual_seed(seed)).item()


def seed_python(worker: int) -> None:
    """What a user gives as worker_init_fn."""
    random.seed(1000 + worker)


class Reversed(torch.utils.data.Sampler):
    """A user's sampler, that knows no seed."""

    def __init__(self, dataset: Dataset, num_replicas: int, rank: int, shuffle: bool) -> None:
        self.items = list(range(len(dataset)))[::-1][rank::num_replicas]  # type: ignore[arg-type]

    def __iter__(self) -> Any:
        return iter(self.items)

    def __len__(self) -> int:
        return len(self.items)


class Stream(IterableDataset):
    def __iter__(self) -> Any:
        return iter(range(3))


@ranks(2)
def test_samplers_of_the_user_and_what_a_loader_cannot_do(rank: int, world: int) -> None:
    loader = new_loader(rank, world, distributed_sampler_cls=Reversed, pin_memory=False)
    assert next(iter(loader))[0].tolist() == [9 - rank, 7 - rank]
    with pytest.raises(TypeError, match="distributed_sampler_cls rather than sampler"):
        new_loader(rank, world, sampler=Reversed(Noisy(), 1, 0, False))
    with pytest.raises(TypeError, match="cannot split an IterableDataset"):
        TorchDDPPlugin().prepare_dataloader(Stream(), 2)
    assert len(TorchFSDPPlugin().prepare_train_dataloader(Noisy(), 5)) == 1


# -- adapters -------------------------------------------------------------------------------------------------------


@ranks(2)
@pytest.mark.parametrize("plugin", [TorchDDPPlugin, TorchFSDPPlugin])
def test_adapters_train_and_are_saved_for_peft(rank: int, world: int, tmp_path: Path, plugin: Any) -> None:
    peft = pytest.importorskip("peft")
    folder = everyones(str(tmp_path))[0]
    booster = Booster(plugin=plugin())
    config = peft.LoraConfig(r=2, target_modules=["first", "third"], init_lora_weights=False)
    torch.manual_seed(3)
    model = booster.enable_lora(new_model(), lora_config=config)
    optimizer = torch.optim.SGD([param for param in model.parameters() if param.requires_grad], lr=0.1)
    boosted, optimizer, *_ = booster.boost(model, optimizer)
    before = {name: weight.clone() for name, weight in full_weights(boosted).items()}
    inputs, targets = batch(rank, 0, torch.float32)
    booster.backward(mean_loss(boosted(inputs), targets), optimizer)
    optimizer.step()
    after = full_weights(boosted)
    changed = {name for name, weight in after.items() if not torch.equal(weight, before[name])}
    assert changed == {name for name in after if "lora_" in name}
    booster.save_lora_as_pretrained(boosted, folder)
    dist.barrier()
    again = booster.enable_lora(new_model(), pretrained_dir=folder)
    for name, param in again.named_parameters():
        torch.testing.assert_close(param.detach(), after[name])
        assert param.requires_grad == ("lora_" in name)


@ranks(1)
def test_adapters_that_cannot_be_are_refused(rank: int, world: int) -> None:
    pytest.importorskip("peft")
    booster = Booster(plugin=TorchDDPPlugin())
    with pytest.raises(NotImplementedError, match="bitsandbytes"):
        booster.enable_lora(new_model(), quantize=True)
    with pytest.raises(TypeError, match="must be a peft.LoraConfig"):
        booster.enable_lora(new_model())
    with pytest.raises(RuntimeError, match="comes before boost"):
        booster.enable_lora(booster.boost(new_model())[0])
    with pytest.raises(TypeError, match="call booster.enable_lora first"):
        booster.save_lora_as_pretrained(booster.boost(new_model())[0], "nowhere")
