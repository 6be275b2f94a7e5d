"""A part of the optimizer on the CPU: the bits of a fraction of 0, whatever the fraction.

Without the option segments are longer, and torch's kernels round their ends in another way: the last bit may differ.

Here both sides are the CPU, and the path is the same but for streams and pinned memory; those are tested where there
is a device (`gpu`).
"""

import copy
from typing import Any

import pytest
import torch
from torch import nn

from core import parallel_state
from core.distributed import DistributedDataParallel, finalize_model_grads
from core.optimizer import OptimizerConfig, get_megatron_optimizer
from core.optimizer.algorithms import backends
from core.optimizer.step.cpu_offload import OffloadedOptimizer, choose_segments
from tests.unit_tests.ranks import ranks
from tests.unit_tests.reference import loss_of, make_net, wrap

ALGORITHMS: dict[str, dict[str, Any]] = {
    "adam": {"optimizer": "adam", "lr": 0.05, "weight_decay": 0.1, "clip_grad": 3.0},
    "sgd": {"optimizer": "sgd", "lr": 0.02, "weight_decay": 0.1, "clip_grad": 0.0},
    "lion": {"optimizer": "lion", "lr": 0.02, "weight_decay": 0.1, "clip_grad": 0.0},
    "Adagrad": {"optimizer": "Adagrad", "lr": 0.05, "weight_decay": 0.1, "clip_grad": 0.0},
    "muon": {"optimizer": "muon", "lr": 0.02, "weight_decay": 0.1, "clip_grad": 0.0},
}


def offload(fraction: float, **more: Any) -> dict[str, Any]:
    return {"optimizer_cpu_offload": True, "optimizer_offload_fraction": fraction, **more}


def build(model: nn.Module, strategy: str, options: dict[str, Any], **wrapping: Any) -> tuple[Any, Any]:
    whole = strategy == "optim" and options["optimizer"] == "muon"
    ddp = wrap(model, data_parallel_sharding_strategy=strategy, bucket_size=60, keep_params_whole=whole, **wrapping)
    return ddp, get_megatron_optimizer(OptimizerConfig(**options), [ddp])


def train(ddp: DistributedDataParallel, optimizer: Any, rank: int, microbatch: int) -> None:
    optimizer.zero_grad()
    loss_of(ddp, rank, microbatch).backward()
    finalize_model_grads([ddp])
    assert optimizer.step()[0]


def assert_equal_bits(model: nn.Module, other: nn.Module) -> None:
    for (name, got), want in zip(model.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(got, want), f"{name}: off by {(got - want).abs().max()}"


def test_the_largest_runs_that_come_nearest_to_the_fraction_are_chosen() -> None:
    numels = [10, 40, 0, 30, 20]
    assert choose_segments(numels, 0.0) == []
    assert choose_segments(numels, 1.0) == [0, 1, 3, 4]
    assert choose_segments(numels, 0.4) == [1]
    assert choose_segments(numels, 0.5) == [0, 1]  # 40 fits, 30 and 20 do not, 10 does
    assert choose_segments(numels, 0.7) == [1, 3]
    assert choose_segments([5, 5, 5, 5], 0.5) == [0, 1]
    assert choose_segments([100], 0.4) == [] and choose_segments([100], 0.5) == [0]
    for fraction in (0.1, 0.25, 0.33, 0.6, 0.9):
        mixed = [(7 * i) % 50 + 1 for i in range(40)]
        chosen = sum(mixed[i] for i in choose_segments(mixed, fraction))
        assert abs(chosen - fraction * sum(mixed)) <= min(mixed), "as near as the smallest segment allows"


@ranks(1, 2)
@pytest.mark.parametrize("strategy", ["no_shard", "optim"])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.in_suite()
def test_any_fraction_gives_the_bits_of_none(rank: int, world: int, strategy: str, algorithm: str) -> None:
    parallel_state.initialize_model_parallel()
    options = ALGORITHMS[algorithm]
    start, plain_model = make_net(width=61), make_net(width=61)
    plain_ddp, plain = build(plain_model, strategy, {**options, **offload(0.0)})
    joined_model = make_net(width=61)
    joined_ddp, joined = build(joined_model, strategy, options)
    models = []
    for fraction, overlap in ((0.3, False), (0.6, True), (1.0, True)):
        model = make_net(width=61)
        settings = offload(fraction, overlap_cpu_optimizer_d2h_h2d=overlap)
        models.append((model, *build(model, strategy, {**options, **settings})))
    for microbatch in range(3):
        for each in (plain, joined, *(optimizer for *_, optimizer in models)):
            for group in each.param_groups:  # as a scheduler does
                group["lr"] = options["lr"] / (microbatch + 1)
        train(plain_ddp, plain, rank, microbatch)
        train(joined_ddp, joined, rank, microbatch)
        for name, param in joined_model.named_parameters():
            torch.testing.assert_close(param, plain_model.get_parameter(name), rtol=1e-9, atol=1e-12)
        for model, ddp, optimizer in models:
            train(ddp, optimizer, rank, microbatch)
            assert_equal_bits(model, plain_model)
    assert (plain_model.second.weight - start.second.weight).norm() > 1e-2, "nothing has moved"
    inners = [optimizer.optimizer for *_, optimizer in models]
    assert all(isinstance(inner, OffloadedOptimizer) for inner in inners)
    for inner in inners:
        for segment in inner.hosted:
            assert segment.twin.data_ptr() != segment.master.data_ptr()
            assert torch.equal(segment.twin, segment.master), "the CPU's weights are those of the device"
    fractions = [inner.offloaded_fraction for inner in inners]
    assert fractions[0] <= fractions[1] <= fractions[2] == 1.0 and fractions[1] > 0.3


@ranks(2)
@pytest.mark.parametrize("strategy", ["no_shard", "optim"])
def test_bf16_parameters_with_fp32_masters_are_offloaded_too(rank: int, world: int, strategy: str) -> None:
    parallel_state.initialize_model_parallel()
    models = []
    for settings in (offload(0.0), offload(0.6, overlap_cpu_optimizer_d2h_h2d=True)):
        model = make_net(torch.bfloat16, width=61)
        options = {**ALGORITHMS["adam"], "bf16": True, **settings}
        models.append((model, *build(model, strategy, options, grad_reduce_in_fp32=True)))
    for microbatch in range(4):
        for _, ddp, optimizer in models:
            train(ddp, optimizer, rank, microbatch)
        assert_equal_bits(models[1][0], models[0][0])
        if microbatch == 1:  # weights that are loaded reach the twins
            for model, _, optimizer in models:
                with torch.no_grad():
                    for param in model.parameters():
                        param.mul_(0.5)
                optimizer.reload_model_params()
    copies_down = [segment.aliased for segment in models[1][2].optimizer.hosted]
    assert copies_down and not any(copies_down), "masters of their own are not copied down in every step"


@ranks(2)
@pytest.mark.parametrize("strategy", ["no_shard", "optim"])
def test_weights_written_into_the_model_and_frozen_parameters_are_followed(
    rank: int, world: int, strategy: str
) -> None:
    parallel_state.initialize_model_parallel()
    models = []
    for settings in (offload(0.0), offload(1.0)):
        model = make_net(width=61)
        models.append((model, *build(model, strategy, {**ALGORITHMS["adam"], **settings})))
    for microbatch in range(6):
        for model, ddp, optimizer in models:
            model.second.weight.requires_grad_(microbatch not in (2, 3))
            model.first.bias.requires_grad_(microbatch not in (3, 4))
            if microbatch == 4:
                for param in model.parameters():
                    param.data.mul_(0.9)
            train(ddp, optimizer, rank, microbatch)
        assert_equal_bits(models[1][0], models[0][0])


@ranks(2)
@pytest.mark.parametrize("strategy", ["no_shard", "optim"])
def test_saved_state_goes_from_offloaded_to_plain_and_back(rank: int, world: int, strategy: str) -> None:
    parallel_state.initialize_model_parallel()
    options = ALGORITHMS["adam"]
    model = make_net(width=61)
    ddp, optimizer = build(model, strategy, {**options, **offload(0.6)})
    for microbatch in range(3):
        train(ddp, optimizer, rank, microbatch)
    saved, weights = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(model.state_dict())
    train(ddp, optimizer, rank, 3)
    for settings in ({}, offload(0.3), offload(1.0)):
        resumed = make_net(width=61, seed=9)
        resumed_ddp, resumed_optimizer = build(resumed, strategy, {**options, **settings})
        if settings:
            train(resumed_ddp, resumed_optimizer, rank, 7)  # loading replaces a state that is there
        with torch.no_grad():
            resumed.load_state_dict(weights)
        resumed_optimizer.reload_model_params()
        resumed_optimizer.load_state_dict(copy.deepcopy(saved))
        train(resumed_ddp, resumed_optimizer, rank, 3)
        if settings:
            assert_equal_bits(resumed, model)
        for name, param in resumed.named_parameters():
            torch.testing.assert_close(param, model.get_parameter(name), rtol=1e-9, atol=1e-12)


@ranks(1)
def test_what_cannot_be_offloaded_is_refused(rank: int, world: int) -> None:
    parallel_state.initialize_model_parallel()
    for bad, why in (
        ({"optimizer_offload_fraction": 0.5}, "optimizer_cpu_offload is False"),
        (offload(1.5), r"of at least 0 and at most 1"),
    ):
        with pytest.raises(ValueError, match=why):
            OptimizerConfig(**bad)
    ddp = wrap(make_net(torch.bfloat16))
    with pytest.raises(ValueError, match="nothing can be offloaded.*grad_reduce_in_fp32"):
        get_megatron_optimizer(OptimizerConfig(lr=0.1, bf16=True, **offload(0.5)), [ddp])
    empty = wrap(nn.Module())  # a stage without parameters
    get_megatron_optimizer(OptimizerConfig(lr=0.1, **offload(0.5)), [empty])
    text = backends.report(get_megatron_optimizer(OptimizerConfig(lr=0.1, **offload(0.5)), [wrap(make_net())]))
    assert text.count("adam on cpu: fused") == 2


# -- on a device ------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an accelerator")
@pytest.mark.parametrize("overlap", [True, False])
def test_on_a_device_state_is_pinned_on_the_cpu_and_the_numbers_are_those_of_the_device(overlap: bool) -> None:
    from types import SimpleNamespace

    from core.optimizer.step.inner_optimizer import inner_optimizer

    device = torch.device("cuda", torch.cuda.current_device())
    torch.manual_seed(0)
    sizes = (100_000, 30_000, 7)
    weights = [torch.randn(size, device=device) for size in sizes]

    def make(settings: dict[str, Any]) -> tuple[Any, list[Any]]:
        segments = []
        for weight in weights:
            master = nn.Parameter(weight.clone())
            shard = SimpleNamespace(param=master, offset=0)
            segments.append(
                SimpleNamespace(master=master, group=0, shards=(shard,), numel=len(weight), in_scratch=False)
            )
        group = {
            "params": [segment.master for segment in segments],
            "optimizer": "adam",
            "weight_decay": 0.1,
            "name": "adam",
        }
        config = OptimizerConfig(lr=0.01, optimizer_backend="foreach", **settings)
        return inner_optimizer(config, [group], segments=segments), segments  # type: ignore[arg-type]

    plain, plain_runs = make({})
    hosted, hosted_runs = make(offload(0.9, overlap_cpu_optimizer_d2h_h2d=overlap))
    for step in range(5):
        for segments in (plain_runs, hosted_runs):
            for segment, weight in zip(segments, weights, strict=True):
                segment.master.grad = torch.sin(weight * (step + 1))
        plain.step()
        hosted.step()
    torch.cuda.synchronize()
    on_cpu = [segment for segment in hosted.hosted]
    assert len(on_cpu) == 2
    for segment in on_cpu:
        assert segment.twin.is_pinned() and segment.gradient.is_pinned()
        assert hosted.state[segment.master]["exp_avg"].device.type == "cpu"
    for one, other, weight in zip(plain_runs, hosted_runs, weights, strict=True):
        moved = (one.master - weight).norm()
        assert moved > 0.01 and (one.master - other.master).norm() < 1e-5 * moved
