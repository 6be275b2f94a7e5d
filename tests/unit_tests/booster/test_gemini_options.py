"""Each parameter of GeminiPlugin does what it says, or is refused by its name: these fail when one is ignored."""

import contextlib
import copy
import inspect
import io
import math
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from core.booster import Booster
from core.booster.mixed_precision.fp8 import why_not
from core.booster.plugin import GeminiPlugin, LowLevelZeroPlugin
from core.booster.plugin.chunk_search import search_chunk_size
from core.distributed import MemStats
from tests.unit_tests.booster.booster_reference import full_weights, mean_loss, new_model, new_optimizer, one_backward
from tests.unit_tests.booster.test_gemini import SCALE, TINY_CHUNKS, check
from tests.unit_tests.booster.test_low_level_zero_options import over_sockets
from tests.unit_tests.ranks import ranks
from tests.unit_tests.reference import batch

SEARCH = {"search_range_m": 32, "hidden_dim": None, "min_chunk_size_m": 32}  # the defaults, where nothing is searched


def boosted(precision: str = "fp32", **options: Any) -> tuple[Booster, Any, Any]:
    booster = Booster(plugin=GeminiPlugin(precision=precision, **{**TINY_CHUNKS, **options}))
    model = new_model()
    model, optimizer, *_ = booster.boost(model, new_optimizer(model), mean_loss)
    return booster, model, optimizer


def buckets_of(model: Any) -> list[Any]:
    buckets: list[Any] = model.module.reducer.buckets
    return buckets


# -- chunks ---------------------------------------------------------------------------------------------------------


def unused(numels: list[int], size: int) -> int:
    """Elements of full chunks that are not used, by a loop."""
    chunks, filled = 1, 0
    for numel in reversed(numels):
        start = -(-filled // 64) * 64
        if filled and start + numel > size:
            chunks, start = chunks + 1, 0
        filled = start + numel
    return chunks * size - sum(numels)


def test_the_chunk_size_is_the_candidate_that_leaves_the_least_unused() -> None:
    numels = [640, 64, 1280, 704, 64, 640, 1920, 128, 64, 1280]
    for least, search_range, interval in ((0, 4096, 64), (2000, 2048, 128), (2500, 0, 100), (100, 3000, 1024)):
        first = -(-max(least, 1920) // interval) * interval
        candidates = range(first, first + search_range + 1, interval)
        wanted = min(candidates, key=lambda size: (unused(numels, size), size))
        found = search_chunk_size(numels, least=least, search_range=search_range, interval=interval)
        assert found == wanted
    assert len({unused(numels, size) for size in range(1920, 4096, 64)}) > 5, "every size would do"


def test_a_small_model_is_one_chunk_and_a_huge_parameter_does_not_decide() -> None:
    assert search_chunk_size([100, 28], least=1000, search_range=0, interval=10) == 192
    assert search_chunk_size([], least=0, search_range=0, interval=10) == 1
    layers = [640] * 40
    alone = search_chunk_size(layers, least=0, search_range=2048, interval=128)
    assert search_chunk_size([64000, *layers], least=0, search_range=2048, interval=128) == alone < 3000


@ranks(2)
def test_chunks_are_buckets_of_the_size_that_was_found_or_given(rank: int, world: int) -> None:
    assert len(buckets_of(boosted(min_chunk_size_m=32)[1])) == 1
    assert len(buckets_of(boosted()[1])) == 4
    given = {2: {"chunk_size": 210, "keep_gathered": False}, 4: {"chunk_size": 1}}
    for _ in range(2):  # the dictionary is not used up
        _, model, _ = boosted(chunk_config_dict=given, **SEARCH)
        assert len(buckets_of(model)) == 3
    assert len(buckets_of(boosted(hidden_dim=256)[1])) == 2
    assert len(buckets_of(boosted(min_chunk_size_m=130 / 1024**2)[1])) == 3
    assert len(buckets_of(boosted(hidden_dim=32)[1])) == 6  # of 96 elements
    assert len(buckets_of(boosted(hidden_dim=32, search_range_m=32 / 1024**2)[1])) == 4  # 4 * 128 are fewer than 6 * 96
    for config, words in (
        ({4: {"chunk_size": 1}}, r"has chunks for \[4\] data ranks, and there are 2"),
        ({2: {"chunk_size": 0}}, "chunk_size.: elements"),
        ({2: {"chunk_size": 5, "keep": 1}}, "chunk_size.: elements"),
    ):
        with pytest.raises(ValueError, match=words):
            GeminiPlugin(chunk_config_dict=config)


@ranks(2)
def test_parameters_are_sharded_or_replicated_as_asked_for(rank: int, world: int) -> None:
    given = {2: {"chunk_size": 100, "keep_gathered": True}}
    for options in ({}, {"strict_ddp_mode": True}, {"chunk_config_dict": given, **SEARCH}):
        booster, model, optimizer = boosted(**options)
        one_backward(booster, model, optimizer, rank)
        optimizer.step()
        state = sum(t.numel() for s in optimizer.optim.state.values() for t in s.values() if t.dim())
        params = sum(param.numel() for param in model.parameters())
        unsharder = model.module.engine.params
        if not options:
            kept = sum(unit.shard.numel() for unit in unsharder.units)
            assert kept == sum(bucket.layout.numel for bucket in buckets_of(model)) // world
            assert state <= kept
        else:
            assert not unsharder.units and state >= params


# -- precision, scale, norm -------------------------------------------------------------------------------------------


@ranks(1)
def test_precision_and_outputs(rank: int, world: int) -> None:
    for precision, dtype in (("fp16", torch.float16), ("bf16", torch.bfloat16), ("fp32", torch.float32)):
        _, model, _ = boosted(precision)
        assert {param.dtype for param in model.parameters()} == {dtype}
        assert model(torch.ones(2, 5)).dtype == dtype
        _, model, _ = boosted(precision, force_outputs_fp32=True)
        assert model(torch.ones(2, 5)).dtype == torch.float32
    model, optimizer, *_ = Booster(plugin=GeminiPlugin(precision="bf16")).boost(new_model())
    assert optimizer is None and model(torch.ones(1, 5)).dtype == torch.bfloat16
    with model.gathered():
        assert not list(model.unwrap().parameters())[0].isnan().any()


@ranks(2)
def test_the_loss_scale_follows_all_of_its_options(rank: int, world: int) -> None:
    weight = nn.Linear(1, 1, bias=False)
    nn.init.ones_(weight.weight)
    plugin = GeminiPlugin(
        initial_scale=64.0, growth_factor=4.0, backoff_factor=0.25, growth_interval=2, min_scale=8.0, max_scale=512.0,
        hysteresis=3,
    )  # fmt: skip
    booster = Booster(plugin=plugin)
    model, optimizer, *_ = booster.boost(weight, torch.optim.SGD(weight.parameters(), lr=1.0))
    scales, weights = [], []
    for overflow in (*[False] * 4, *[True] * 6):
        optimizer.zero_grad()
        factor = torch.inf if overflow and rank == 1 else 0.125
        booster.backward((model(torch.ones(1, 1)) * factor).sum(), optimizer)
        optimizer.step()
        assert optimizer.found_inf == overflow
        scales.append(optimizer.scaler.value)
        weights.append(full_weights(model)["weight"].item())
    assert scales == [64.0, 256.0, 256.0, 512.0, 512.0, 512.0, 128.0, 32.0, 8.0, 8.0]
    assert weights == [0.875, 0.75, 0.625, *[0.5] * 7]
    assert GeminiPlugin().scaler_options["initial_scale"] == 2**16


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
        ours = full_weights(model)
        for name, theirs in reference.named_parameters():
            torch.testing.assert_close(ours[name].double(), theirs, atol=1e-6, rtol=1e-6)


@ranks(2)
@pytest.mark.parametrize("share", [True, False])
def test_8_bit_products_give_the_bits_of_stage_2_or_are_refused_by_name(rank: int, world: int, share: bool) -> None:
    if why_not(torch.device("cpu")) is not None:
        with pytest.raises(RuntimeError, match="GeminiPlugin: use_fp8 cannot run here: .*Leave it out"):
            GeminiPlugin(precision="bf16", use_fp8=True)
        return
    torch.manual_seed(0)
    start = nn.Sequential(nn.Linear(32, 48), nn.Tanh(), nn.Linear(48, 16))
    found = []
    for kind, small in ((GeminiPlugin, True), (LowLevelZeroPlugin, True), (GeminiPlugin, False)):
        sizes: dict[str, Any] = TINY_CHUNKS if kind is GeminiPlugin else {"stage": 2}
        with contextlib.nullcontext() if share else over_sockets:
            booster = Booster(plugin=kind(precision="bf16", use_fp8=small, **sizes))
            model: Any = copy.deepcopy(start)
            model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.5))
            for step in range(2):
                optimizer.zero_grad()
                x = torch.randn(32, 32, generator=torch.Generator().manual_seed(10 * step + rank))
                booster.backward(model(x).float().square().mean(), optimizer)
                optimizer.step()
            found.append(full_weights(model))
    fp8, stage2, bf16 = found
    assert len(fp8) == 4 and all(torch.equal(fp8[name], weight) for name, weight in stage2.items())
    moved = [(fp8[name] - value).norm() for name, value in start.state_dict().items()]
    away = [(fp8[name] - weight).norm() for name, weight in bf16.items()]
    assert all(0 < off < 0.2 * far for off, far in zip(away, moved, strict=True)), (away, moved)
    booster = Booster(plugin=GeminiPlugin(precision="bf16", use_fp8=True))
    with pytest.raises(ValueError, match="use_fp8 would change nothing"):
        booster.boost(nn.Linear(5, 5))


@ranks(2)
def test_without_master_weights_nothing_is_kept_in_fp32_and_small_updates_vanish(rank: int, world: int) -> None:
    for masters in (True, False):
        model: Any = nn.Linear(4, 4, bias=False)
        nn.init.ones_(model.weight)
        optimizer: Any = torch.optim.Adam(model.parameters(), lr=2.0**-10)
        booster = Booster(plugin=GeminiPlugin(precision="bf16", master_weights=masters))
        model, optimizer, *_ = booster.boost(model, optimizer)
        for _ in range(8):
            optimizer.zero_grad()
            booster.backward(-model(torch.ones(1, 4)).float().sum(), optimizer)
            optimizer.step()
        # 8 steps of 2**-10 are one of bf16's, 2**-7; each alone is rounded away.
        assert full_weights(model)["weight"].unique().tolist() == [1 + 2.0**-7 if masters else 1.0]


# -- reductions -------------------------------------------------------------------------------------------------------


@ranks(2)
def test_chunks_are_reduced_in_backward_or_after_it_and_each_microbatch_or_once(rank: int, world: int) -> None:
    for asynchronous in (True, False):
        booster, model, optimizer = boosted(enable_async_reduce=asynchronous)
        one_backward(booster, model, optimizer, rank)
        in_flight = [bucket.step.handle is not None for bucket in buckets_of(model)]
        assert any(in_flight) == asynchronous
        optimizer.step()
    sent = {}
    for stored in (False, True):
        booster, model, optimizer = boosted(enable_gradient_accumulation=stored)
        optimizer.zero_grad()
        for microbatch in range(3):
            with booster.no_sync(model, optimizer) if microbatch < 2 else contextlib.nullcontext():
                one_backward(booster, model, optimizer, rank, microbatch)
            held = [type(param.grad) is torch.Tensor for param in model.parameters()]
            assert not any(held) if stored or microbatch == 2 else all(held)
        optimizer.step()
        sent[stored] = model.module.step_report().bytes_sent
    assert sent[True] == 3 * sent[False] > 0


@ranks(2)
@over_sockets
def test_gradients_travel_in_8_bits_if_asked_for(rank: int, world: int) -> None:
    sent = []
    for small in (False, True):
        booster, model, optimizer = boosted(fp8_communication=small)
        one_backward(booster, model, optimizer, rank)
        optimizer.step()
        sent.append(model.module.step_report().bytes_sent)
    assert 0 < sent[1] < 0.3 * sent[0]


@ranks(2)
@over_sockets
def test_the_next_chunk_is_gathered_ahead_if_asked_for(rank: int, world: int) -> None:
    for most in (0, 1):
        booster, model, optimizer = boosted(max_prefetch=most)
        unsharder = model.module.engine.params
        for _ in range(3):
            optimizer.zero_grad()
            one_backward(booster, model, optimizer, rank)
            optimizer.step()
        optimizer.zero_grad()
        with mock.patch.object(unsharder.order, "record", wraps=unsharder.order.record) as gather:
            one_backward(booster, model, optimizer, rank)
        why = [call.args[1] for call in gather.call_args_list]
        assert (" prefetched" in why) == (most == 1) and len(why) > len(unsharder.units)


@ranks(4)
def test_extra_data_parallelism_shards_within_neighbours(rank: int, world: int) -> None:
    model = check(rank, world, "fp32", 2, True, extra_dp_size=2)
    units = model.module.engine.params.units
    assert all(unit.shard.numel() == unit.layout.numel // 2 for unit in units)
    with pytest.raises(ValueError, match="4 ranks does not split into extra_dp_size=3"):
        GeminiPlugin(extra_dp_size=3)


@ranks(2)
def test_verbose_prints_the_chunks_and_each_step_on_one_rank(rank: int, world: int) -> None:
    for verbose in (False, True):
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            booster, model, optimizer = boosted("fp16", verbose=verbose, initial_scale=SCALE)
            one_backward(booster, model, optimizer, rank)
            optimizer.step()
        text = printed.getvalue()
        wanted = verbose and rank == 0
        assert ("static placement, chunks of 120 elements, fp16" in text and "third.weight" in text) == wanted
        assert ("step made" in text and "loss scale 1024" in text) == wanted


# -- what is refused --------------------------------------------------------------------------------------------------


@ranks(1, 2)
def test_what_cannot_work_is_refused_with_what_to_change(rank: int, world: int) -> None:
    size = {world: {"chunk_size": 10}}
    for options, words in (
        ({"precision": "fp8"}, "precision 'fp8' is none of fp16, bf16, fp32"),
        ({"placement_policy": "const"}, "placement_policy 'const' is none of static, auto"),
        ({"norm_type": 0}, r"norm_type 0; expected"),
        ({"max_norm": None}, r"GeminiPlugin: max_norm is None; it must be a number; 0 does not clip"),
        ({"shard_param_frac": 1.5}, "shard_param_frac is 1.5; it is a fraction"),
        ({"offload_optim_frac": 0.5}, "On a CPU they go to files; name a directory with offload_directory"),
        ({"offload_param_frac": 1}, "On a CPU they go to files; name a directory with offload_directory"),
        ({"offload_directory": "/tmp"}, "nothing is offloaded to it"),
        (
            {"offload_directory": "/tmp", "offload_param_frac": 0.5, "shard_param_frac": 0.3},
            "only sharded buckets can be offloaded",
        ),
        ({"offload_directory": "/tmp", "offload_optim_frac": 1, "strict_ddp_mode": True}, "offload nothing"),
        ({"shard_param_frac": 0.5, "strict_ddp_mode": True}, "shard_param_frac is 0.5, and strict_ddp_mode or"),
        ({"max_prefetch": 1, "strict_ddp_mode": True}, "max_prefetch is 1, and strict_ddp_mode or .*; leave it 0"),
        ({"enable_gradient_accumulation": True, "strict_ddp_mode": True}, "accumulation is True, and strict_ddp_mode"),
        ({"chunk_config_dict": size, "hidden_dim": 64}, "hidden_dim is 64, and chunk_config_dict gives the size"),
        ({"chunk_config_dict": size, "search_range_m": 1}, "search_range_m is 1, and chunk_config_dict .*leave it 32"),
        ({"chunk_config_dict": size, "min_chunk_size_m": 0}, "min_chunk_size_m is 0, and chunk_config_dict gives"),
        ({"offload_optim_frac": -1}, "offload_optim_frac is -1; it is a fraction"),
        ({"offload_param_frac": "1"}, "offload_param_frac is '1'; it must be a number"),
        ({"warmup_non_model_data_ratio": 0.5}, "only placement_policy='auto' reads it; leave it 0.8"),
        ({"steady_cuda_cap_ratio": 0.5}, "only placement_policy='auto' reads it; leave it 0.9"),
        ({"gpu_margin_mem_ratio": 0.5}, "only placement_policy='auto' reads it; leave it 0.0"),
        ({"memstats": object()}, "memstats is <object.*; it is the MemStats that the first step of an earlier run has"),
        ({"memstats": MemStats((0,), 0)}, "memstats is MemStats.*, but it has no effect if all buckets"),
        ({"search_range_m": -1}, "search_range_m is -1"),
        ({"min_chunk_size_m": math.inf}, "min_chunk_size_m inf"),
        ({"hidden_dim": 0}, "hidden_dim is 0"),
        ({"chunk_init_device": torch.device("cuda")}, "chunk_init_device is 'cuda', but chunks are created on 'cpu'"),
        ({"tp_size": 3}, "does not split into tp_size=3 times extra_dp_size=1"),
        ({"tp_size": 0}, "does not split into tp_size=0 times extra_dp_size=1"),
        ({"enable_flash_attention": True}, "enable_flash_attention=True is an option"),
        ({"enable_sequence_parallelism": True}, "enable_sequence_parallelism=True is an option"),
        ({"max_prefetch": 2}, "max_prefetch is 2; one chunk is gathered ahead at most"),
        ({"pin_memory": True}, "pin_memory pins the host memory of tensors offloaded from a GPU, but nothing is"),
        ({"use_fp8": True}, "precision is 'fp16'; set precision='bf16'"),
        ({"growth_factor": 1.0}, "growth_factor is 1.0"),
        ({"initial_scale": 0.5}, "initial_scale is 0.5; expected it between min_scale 1"),
    ):
        with pytest.raises(ValueError, match=words):
            GeminiPlugin(**options)
    assert GeminiPlugin(chunk_init_device=torch.device("cpu")).device() == torch.device("cpu")
    idle = ("enable_all_optimization", "enable_fused_normalization", "enable_jit_fused", "enable_sequence_overlap")
    with pytest.warns(UserWarning, match="GeminiPlugin: these options change nothing here. ") as warned:
        GeminiPlugin(**dict.fromkeys(idle, True))
    (only,) = warned
    assert all(f"{name}=True: modules stay as" in str(only.message) for name in idle[:3]) and idle[3] in str(
        only.message
    )
    assert only.filename == __file__


def test_names_order_and_defaults_are_those_of_colossalai() -> None:
    parameters = list(inspect.signature(GeminiPlugin).parameters.values())
    assert [(p.name, p.default) for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD] == [
        ("chunk_config_dict", None), ("chunk_init_device", None), ("placement_policy", "static"),
        ("enable_gradient_accumulation", False), ("max_prefetch", 0), ("shard_param_frac", 1.0),
        ("offload_optim_frac", 0.0), ("offload_param_frac", 0.0), ("warmup_non_model_data_ratio", 0.8),
        ("steady_cuda_cap_ratio", 0.9), ("precision", "fp16"), ("master_weights", True), ("pin_memory", False),
        ("force_outputs_fp32", False), ("strict_ddp_mode", False), ("search_range_m", 32), ("hidden_dim", None),
        ("min_chunk_size_m", 32), ("memstats", None), ("gpu_margin_mem_ratio", 0.0), ("initial_scale", 2**16),
        ("min_scale", 1), ("growth_factor", 2), ("backoff_factor", 0.5), ("growth_interval", 1000), ("hysteresis", 2),
        ("max_scale", 2**32), ("max_norm", 0.0), ("norm_type", 2.0), ("tp_size", 1), ("extra_dp_size", 1),
        ("enable_all_optimization", False), ("enable_fused_normalization", False), ("enable_flash_attention", False),
        ("enable_sequence_parallelism", False), ("enable_jit_fused", False), ("enable_sequence_overlap", False),
        ("enable_async_reduce", True), ("use_fp8", False), ("verbose", False), ("fp8_communication", False),
    ]  # fmt: skip
