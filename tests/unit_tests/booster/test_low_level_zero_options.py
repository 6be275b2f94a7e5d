"""Each parameter of LowLevelZeroPlugin does what it says: these fail when one is ignored."""

import contextlib
import copy
import inspect
import io
import math
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from core.booster import Booster
from core.booster.mixed_precision import fp8 as fp8_file
from core.booster.plugin import LowLevelZeroPlugin
from core.distributed.wire.shared_memory import HostMemory
from tests.unit_tests.booster.booster_reference import full_weights, mean_loss, new_model, new_optimizer, one_backward
from tests.unit_tests.booster.test_low_level_zero import SCALE, TINY_BUCKETS, booster_buckets, check
from tests.unit_tests.ranks import ranks
from tests.unit_tests.reference import batch, mean_over_ranks

# Only there do formats that are cast and those that are not take the same way, and so the same bytes.
over_sockets = mock.patch.object(HostMemory, "share", lambda *_: None)


def boosted(precision: str = "fp32", **options: Any) -> tuple[Booster, Any, Any]:
    booster = Booster(plugin=LowLevelZeroPlugin(precision=precision, **options))
    model = new_model()
    model, optimizer, *_ = booster.boost(model, new_optimizer(model), mean_loss)
    return booster, model, optimizer


def elements(model: Any) -> tuple[int, int]:
    """(elements of all buckets, of gradients that are kept between steps)."""
    buffers = model.module.grad_buffers
    return sum(buffer.numel for buffer in buffers), sum(buffer.grad_data.numel() for buffer in buffers)


@ranks(2, 3)
def test_stages_shard_the_state_and_then_the_gradients(rank: int, world: int) -> None:
    for stage in (1, 2):
        booster, model, optimizer = boosted(stage=stage)
        one_backward(booster, model, optimizer, rank)
        optimizer.step()
        whole, kept = elements(model)
        assert kept == (whole if stage == 1 else whole // world)
        state = sum(t.numel() for s in optimizer.optim.state.values() for t in s.values() if t.dim())
        assert state <= whole // world
        parts: list[Any] = [None] * world
        dist.all_gather_object(parts, state)
        assert whole >= sum(parts) >= sum(param.numel() for param in model.parameters())


@ranks(1)
def test_precision_and_cast_inputs(rank: int, world: int) -> None:
    for precision, dtype in (("fp16", torch.float16), ("bf16", torch.bfloat16), ("fp32", torch.float32)):
        _, model, _ = boosted(precision)
        assert {param.dtype for param in model.parameters()} == {dtype}
        assert model(torch.ones(2, 5)).dtype == dtype
        rotation = nn.Module()
        rotation.register_buffer("angles", torch.ones(2, dtype=torch.complex64))
        plain = Booster(plugin=LowLevelZeroPlugin(precision=precision)).boost(rotation)[0].unwrap()
        assert plain.angles.dtype == torch.complex64
        if precision != "fp32":
            _, strict, _ = boosted(precision, cast_inputs=False)
            with pytest.raises(RuntimeError, match="dtype"):
                strict(torch.ones(2, 5))

    class Seen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1))

        def forward(self, nested: Any, *, extra: Any) -> Any:
            return nested["x"][0].dtype, extra.dtype

    model, *_ = Booster(plugin=LowLevelZeroPlugin(precision="bf16")).boost(Seen())
    assert model({"x": [torch.ones(1)]}, extra=torch.ones(1).long()) == (torch.bfloat16, torch.int64)


@ranks(2)
def test_the_loss_scale_follows_all_of_its_options(rank: int, world: int) -> None:
    """One rank overflows; every rank skips, and has the same scale afterwards."""
    weight = nn.Linear(1, 1, bias=False)
    nn.init.ones_(weight.weight)
    plugin = LowLevelZeroPlugin(
        1, "fp16", initial_scale=64.0, growth_factor=4.0, backoff_factor=0.25, growth_interval=2, min_scale=8.0,
        max_scale=512.0, hysteresis=3,
    )  # fmt: skip
    booster = Booster(plugin=plugin)
    model, optimizer, *_ = booster.boost(weight, torch.optim.SGD(weight.parameters(), lr=1.0))
    scales, weights = [], []
    for overflow in (*[False] * 4, *[True] * 6):
        optimizer.zero_grad()
        loss = (model.unwrap().weight * (torch.inf if overflow and rank == 1 else 0.125)).sum()
        booster.backward(loss, optimizer)
        optimizer.step()
        assert optimizer.found_inf == overflow
        scales.append(optimizer.scaler.value)
        weights.append(model.unwrap().weight.item())
    # 64, grown by 4 after two, to at most 512; two overflows are forgiven, then a quarter, to at least 8.
    assert scales == [64.0, 256.0, 256.0, 512.0, 512.0, 512.0, 128.0, 32.0, 8.0, 8.0]
    assert weights == [0.875, 0.75, 0.625, *[0.5] * 7]


@ranks(1)
def test_the_default_scale_of_2_to_the_32_backs_off_until_steps_are_made(rank: int, world: int) -> None:
    booster, model, optimizer = boosted("fp16")
    before = {name: weight.clone() for name, weight in full_weights(model).items()}
    skipped = 0
    for _ in range(40):
        optimizer.zero_grad()
        one_backward(booster, model, optimizer, rank)
        optimizer.step()
        if not optimizer.found_inf:
            break
        skipped += 1
        assert all(torch.equal(before[name], now) for name, now in full_weights(model).items())
    assert 5 < skipped < 30
    assert optimizer.scaler.value == 2.0 ** (32 - skipped + 1)  # hysteresis forgives one
    assert any(not torch.equal(before[name], now) for name, now in full_weights(model).items())


@ranks(3)
def test_the_norm_type_is_that_of_the_clipped_norm(rank: int, world: int) -> None:
    for norm_type in (1.0, math.inf):
        reference = new_model().double()
        sgd = new_optimizer(reference)
        parts = [batch(r, 0) for r in range(world)]
        inputs, targets = (torch.cat(part) for part in zip(*parts, strict=True))
        mean_loss(reference(inputs), targets).backward()
        limit = 0.05
        norm = float(nn.utils.clip_grad_norm_(reference.parameters(), limit, norm_type))
        sgd.step()
        booster, model, optimizer = boosted(max_norm=limit, norm_type=norm_type)
        one_backward(booster, model, optimizer, rank)
        optimizer.step()
        assert optimizer.get_grad_norm() == pytest.approx(norm, rel=1e-6) and norm > 2 * limit
        for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(ours.double(), theirs, atol=1e-6, rtol=1e-6)


@ranks(2)
def test_buckets_and_overlap_are_as_asked_for(rank: int, world: int) -> None:
    assert len(booster_buckets(boosted()[1])) == 1
    for overlap in (True, False):
        booster, model, optimizer = boosted(overlap_communication=overlap, reduce_bucket_size_in_m=TINY_BUCKETS)
        count = len(booster_buckets(model))
        assert count == (4 if overlap else 1)
        one_backward(booster, model, optimizer, rank)
        assert model.module.reducer.next == (count if overlap else 0)  # launched within backward
        optimizer.step()
    for overlap in (True, False):
        booster, model, optimizer = boosted(overlap_allgather=overlap, reduce_bucket_size_in_m=TINY_BUCKETS)
        one_backward(booster, model, optimizer, rank)
        sync = model.module.param_sync
        with mock.patch.object(sync, "finish_update", wraps=sync.finish_update) as at_once:
            optimizer.step()
        assert at_once.call_count == (0 if overlap else 1)  # else each bucket before the next one's step
        gathers = model.module.param_sync.gathers
        assert len(model.module.param_sync.events()) == 4 == len(gathers)
        assert all(gather.waited for gather in gathers.values())


def gradient_of(model: Any, optimizer: Any) -> torch.Tensor:
    return torch.cat([optimizer.get_param_grad(param).flatten() for param in model.unwrap().parameters()])


@ranks(2, 3)
@over_sockets
def test_gradients_travel_in_the_communication_dtype(rank: int, world: int) -> None:
    """Bytes on the wire, and errors of the size that rounding to the dtype makes: neither larger nor zero."""
    start = new_model()
    exact = mean_over_ranks(start, world, loss=lambda m, r, b: mean_loss(m(batch(r, b)[0]), batch(r, b)[1]))
    wanted = torch.cat([grad.flatten() for grad in exact.values()])
    sent = {}
    for name, options in (
        ("fp32", {}),
        ("bf16", {"communication_dtype": torch.bfloat16}),
        ("fp16", {"communication_dtype": torch.float16}),
        ("fp8", {"fp8_communication": True}),
    ):
        for stage in (1, 2):
            booster, model, optimizer = boosted(stage=stage, **options)
            one_backward(booster, model, optimizer, rank)
            error = (gradient_of(model, optimizer).double() - wanted).abs().max() / wanted.abs().max()
            low, high = {"fp32": (0, 1e-6), "bf16": (1e-5, 8e-3), "fp16": (1e-6, 1e-3), "fp8": (1e-4, 0.13)}[name]
            assert low <= error <= high, (name, stage, error)
            sent[name, stage] = model.module.step_report().bytes_sent
            optimizer.step()
    for stage in (1, 2):
        assert sent["bf16", stage] == sent["fp16", stage] == sent["fp32", stage] // 2
        assert sent["fp8", stage] < 0.3 * sent["fp32", stage]


@ranks(2)
@over_sockets
def test_16_bit_gradients_travel_in_fp32_if_asked_for(rank: int, world: int) -> None:
    sent = []
    for dtype in (None, torch.float32, torch.float16):
        booster, model, optimizer = boosted("bf16", communication_dtype=dtype)
        one_backward(booster, model, optimizer, rank)
        optimizer.step()
        sent.append(model.module.step_report().bytes_sent)
        kept = {buffer.grad_data.dtype for buffer in model.module.grad_buffers}
        assert kept == {torch.float32 if dtype is torch.float32 else torch.bfloat16}
    assert sent == [sent[0], 2 * sent[0], sent[0]]


@ranks(2)
def test_offloading_steps_on_the_cpu_with_the_same_bits(rank: int, world: int) -> None:
    for precision in ("fp32", "bf16"):
        weights = []
        for offload in (False, True):
            model = new_model()
            optimizer: Any = torch.optim.Adam(model.parameters(), lr=0.1)
            scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
            options = {"communication_dtype": torch.float32} if precision == "bf16" else {}
            booster = Booster(plugin=LowLevelZeroPlugin(1, precision, cpu_offload=offload, **options))
            model, optimizer, *_ = booster.boost(model, optimizer)
            for step in range(3):
                optimizer.zero_grad()
                one_backward(booster, model, optimizer, rank, step)
                optimizer.step()
                scheduler.step()
            weights.append(full_weights(model))
        assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


@ranks(2)
@over_sockets
def test_offloaded_16_bit_gradients_still_travel_in_16_bits(rank: int, world: int) -> None:
    sent = []
    for offload in (False, True):
        booster, model, optimizer = boosted("bf16", cpu_offload=offload)
        one_backward(booster, model, optimizer, rank)
        optimizer.step()
        sent.append(model.module.step_report().bytes_sent)
    assert sent[0] == sent[1] > 0


@ranks(2)
def test_without_master_weights_nothing_is_kept_in_fp32_and_small_updates_vanish(rank: int, world: int) -> None:
    for masters in (True, False):
        model = nn.Linear(4, 4, bias=False)
        nn.init.ones_(model.weight)
        optimizer: Any = torch.optim.Adam(model.parameters(), lr=2.0**-10)
        booster = Booster(plugin=LowLevelZeroPlugin(1, "bf16", master_weights=masters))
        model, optimizer, *_ = booster.boost(model, optimizer)
        for _ in range(8):
            optimizer.zero_grad()
            booster.backward(-model(torch.ones(1, 4)).float().sum(), optimizer)
            optimizer.step()
        # 8 steps of 2**-10 are one of bf16's, 2**-7; each alone is rounded away.
        assert model.unwrap().weight.unique().tolist() == [1 + 2.0**-7 if masters else 1.0]
        entries = [entry for found in optimizer.engine.state_by_parameter().values() for entry in found]
        dtypes = {value.dtype for e in entries for key, value in e.items() if isinstance(value, torch.Tensor)
                  and key != "step"}  # fmt: skip
        assert not entries or dtypes == {torch.float32 if masters else torch.bfloat16}
        assert any("master" in entry for entry in entries) == (masters and bool(entries))


@ranks(2)
def test_verbose_prints_the_layout_and_each_step_on_one_rank(rank: int, world: int) -> None:
    for verbose in (False, True):
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            booster, model, optimizer = boosted("fp16", verbose=verbose, initial_scale=SCALE)
            one_backward(booster, model, optimizer, rank)
            optimizer.step()
        text = printed.getvalue()
        assert ("stage 1, fp16" in text and "third.weight" in text) == (verbose and rank == 0)
        assert ("step made" in text and "loss scale 1024" in text) == (verbose and rank == 0)


@ranks(1)
def test_8_bit_products_run_or_are_refused_by_name(rank: int, world: int) -> None:
    with pytest.raises(ValueError, match="precision is 'fp16'; set precision='bf16'"):
        LowLevelZeroPlugin(use_fp8=True)
    reason = fp8_file.why_not(torch.device("cpu"))
    if reason is not None:
        with pytest.raises(RuntimeError, match="LowLevelZeroPlugin: use_fp8 cannot run here"):
            LowLevelZeroPlugin(precision="bf16", use_fp8=True)
        return
    booster = Booster(plugin=LowLevelZeroPlugin(precision="bf16", use_fp8=True))
    torch.manual_seed(0)
    start = nn.Sequential(nn.Linear(32, 48), nn.Tanh(), nn.Linear(48, 16))
    outputs = []
    x = torch.randn(32, 32)
    for precise in (True, False):
        model = copy.deepcopy(start)
        sgd = torch.optim.SGD(model.parameters(), lr=0.5)
        which = Booster(plugin=LowLevelZeroPlugin(precision="fp32")) if precise else booster
        model, optimizer, *_ = which.boost(model, sgd)
        for _ in range(2):
            optimizer.zero_grad()
            which.backward(model(x).float().square().mean(), optimizer)
            optimizer.step()
        outputs.append(model(x).float())
    error = (outputs[1] - outputs[0]).norm() / outputs[0].norm()
    assert 0.01 < error < 0.12  # bf16 alone is off by less than 0.01
    with pytest.raises(ValueError, match="use_fp8 would change nothing"):
        booster.boost(nn.Linear(5, 5))


@ranks(4)
def test_extra_data_parallelism_shards_within_neighbours(rank: int, world: int) -> None:
    for stage in (1, 2):
        check(rank, world, stage, "fp32", 2, True, extra_dp_size=2)
        _, model, optimizer = boosted(stage=stage, extra_dp_size=2)
        whole, _ = elements(model)
        assert sum(masters.grad.numel() for masters in optimizer.engine.masters) == whole // 2
    with pytest.raises(ValueError, match="4 ranks does not split into extra_dp_size=3"):
        LowLevelZeroPlugin(extra_dp_size=3)


@ranks(2)
def test_reducing_every_microbatch_costs_traffic_and_saves_memory(rank: int, world: int) -> None:
    sent = {}
    for how in ("last", "every"):
        booster, model, optimizer = boosted(stage=2, reduce_microbatches=how)
        optimizer.zero_grad()
        for microbatch in range(4):
            with booster.no_sync(model, optimizer) if microbatch < 3 else contextlib.nullcontext():
                one_backward(booster, model, optimizer, rank, microbatch)
            held = [type(param.grad) is torch.Tensor for param in model.parameters()]
            assert all(held) if how == "last" and microbatch < 3 else not any(held)
        optimizer.step()
        sent[how] = model.module.step_report().bytes_sent
    assert sent["every"] == 4 * sent["last"] > 0


@ranks(1, 2)
def test_what_cannot_work_is_refused_with_what_to_change(rank: int, world: int) -> None:
    for options, words in (
        (
            {"stage": 3},
            "only supports stage 1/2 training, and stage is 3; for stage 3 use TorchFSDPPlugin or GeminiPlugin",
        ),
        ({"precision": "fp8"}, "precision 'fp8' is none of fp16, bf16, fp32"),
        ({"norm_type": 0}, r"norm_type 0; expected"),
        ({"max_norm": None}, r"max_norm is None; it must be a number; 0 does not clip"),
        ({"norm_type": "2"}, r"norm_type is '2'; it must be a number$"),
        ({"reduce_bucket_size_in_m": "12"}, r"reduce_bucket_size_in_m is '12'; it must be a number$"),
        ({"extra_dp_size": None}, r"extra_dp_size is None; it must be a number$"),
        ({"initial_scale": "2**16"}, r"initial_scale is '2\*\*16'; it must be a number$"),
        ({"max_norm": -1.0}, r"max_norm is -1.0"),
        ({"max_norm": math.nan}, r"max_norm is nan"),
        ({"reduce_bucket_size_in_m": 0}, "reduce_bucket_size_in_m is 0"),
        ({"communication_dtype": torch.int8}, "communication_dtype is torch.int8"),
        ({"communication_dtype": torch.bfloat16, "fp8_communication": True}, "both set the dtype of communication"),
        ({"cpu_offload": True, "master_weights": False}, "set master_weights=True"),
        ({"extra_dp_size": 5}, "does not split into extra_dp_size=5"),
        ({"reduce_microbatches": "first", "stage": 2}, "'first' is none of last, every"),
        ({"reduce_microbatches": "every"}, "which only stage=2 has"),
        ({"growth_factor": 1.0}, "growth_factor is 1.0"),
        ({"initial_scale": 0.5}, "initial_scale is 0.5; expected it between min_scale 1"),
        ({"hysteresis": 0}, "hysteresis 0"),
    ):
        with pytest.raises(ValueError, match=words):
            LowLevelZeroPlugin(**options)
    plugin = LowLevelZeroPlugin()
    assert type(plugin).__name__ == "LowLevelZeroPlugin"
    with pytest.raises(ValueError, match="neither a model nor an optimizer"):
        plugin.no_sync(nn.Linear(1, 1))


def test_names_order_and_defaults_are_those_of_colossalai() -> None:
    parameters = list(inspect.signature(LowLevelZeroPlugin).parameters.values())
    assert [(p.name, p.default) for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD] == [
        ("stage", 1), ("precision", "fp16"), ("initial_scale", 2**32), ("min_scale", 1), ("growth_factor", 2),
        ("backoff_factor", 0.5), ("growth_interval", 1000), ("hysteresis", 2), ("max_scale", 2**32), ("max_norm", 0.0),
        ("norm_type", 2.0), ("reduce_bucket_size_in_m", 12), ("communication_dtype", None),
        ("overlap_communication", True), ("overlap_allgather", False), ("cpu_offload", False), ("master_weights", True),
        ("verbose", False), ("cast_inputs", True), ("fp8_communication", False), ("use_fp8", False),
        ("extra_dp_size", 1),
    ]  # fmt: skip
