"""fp16 parameters and the loss scale: small gradients survive, overflows are skipped together, one scale for all."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from core import parallel_state
from core.distributed import finalize_model_grads
from core.optimizer import ChainedOptimizer, OptimizerConfig, get_megatron_optimizer
from core.pipeline_parallel import plan_pipeline
from tests.unit_tests.logged import logged
from tests.unit_tests.optimizer.test_optimizer import ALGORITHMS, STRATEGIES
from tests.unit_tests.pipeline_parallel.pipeline_reference import microbatch, start_pipeline
from tests.unit_tests.ranks import ranks
from tests.unit_tests.reference import loss_of, make_net, wrap


def set_gradients(ddp: Any, value: float) -> None:
    """Leave this in every gradient, as a backward of the scaled loss would."""
    for param in ddp.module.parameters():
        param.grad.fill_(value)
    ddp.reducer.note_forward()


def snapshot(ddp: Any, optimizer: Any) -> Any:
    state = {key: value for key, value in optimizer.state_dict().items() if key != "grad_scaler"}
    return copy.deepcopy((ddp.state_dict(), state))


def assert_bit_equal(got: Any, want: Any, where: str = "") -> None:
    assert type(got) is type(want), where
    if isinstance(got, torch.Tensor):
        assert torch.equal(got, want), where
    elif isinstance(got, dict):
        assert got.keys() == want.keys(), where
        for key in got:
            assert_bit_equal(got[key], want[key], f"{where}.{key}")
    elif isinstance(got, (list, tuple)):
        for number, (one, other) in enumerate(zip(got, want, strict=True)):
            assert_bit_equal(one, other, f"{where}[{number}]")
    else:
        assert got == want, where


@ranks(1, 3, nightly=(2, 4))
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("grads_in_fp32", [True, False])
@pytest.mark.in_suite()
def test_gradients_below_the_range_of_fp16_move_fp32_masters(
    rank: int, world: int, strategy: str, grads_in_fp32: bool
) -> None:
    """The true gradient is 2**-30; fp16 ends at 2**-24, so unscaled it would be 0 and nothing would ever move."""
    parallel_state.initialize_model_parallel()
    ddp = wrap(make_net(torch.float16), data_parallel_sharding_strategy=strategy, grad_reduce_in_fp32=grads_in_fp32)
    config = OptimizerConfig(
        optimizer="sgd",
        sgd_momentum=0.0,
        lr=2.0**18,
        weight_decay=0.0,
        clip_grad=0.0,
        fp16=True,
        initial_loss_scale=2.0**20,
        loss_scale_window=3,
    )
    optimizer = get_megatron_optimizer(config, [ddp])
    params = list(ddp.module.parameters())
    expected = [p.detach().float() for p in params]
    for number in range(8):
        scale = 2.0 ** (20 + number // 3)
        assert optimizer.get_loss_scale().tolist() == [scale]
        optimizer.zero_grad()
        # What backward of the scaled loss leaves: exact in fp16, as is its mean over up to 4 ranks.
        true = 2.0**-30 * (1 + rank)
        set_gradients(ddp, true * float(optimizer.scale_loss(torch.ones(()))))
        finalize_model_grads([ddp])
        updated, norm, _ = optimizer.step()
        mean = 2.0**-30 * (world + 1) / 2
        assert updated and norm == pytest.approx(mean * sum(p.numel() for p in params) ** 0.5, rel=1e-3)
        expected = [e - 2.0**18 * mean for e in expected]
    tolerance = 0.0 if world in (1, 2, 4) else 2e-3  # a third is not exact
    for param, want, start in zip(params, expected, make_net(torch.float16).parameters(), strict=True):
        assert not torch.equal(param, start)
        assert torch.allclose(param.float(), want.half().float(), rtol=tolerance, atol=tolerance)


@ranks(2)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_training_starts_at_megatrons_scale_and_finds_its_own(rank: int, world: int, strategy: str) -> None:
    """From 2**32 the first steps overflow; afterwards fp16 trains to the loss that fp64 reaches."""
    parallel_state.initialize_model_parallel()
    losses = {}
    for dtype in (torch.float64, torch.float16):
        ddp = wrap(make_net(dtype, width=61), data_parallel_sharding_strategy=strategy)
        options = {"optimizer": "adam", "lr": 0.01, "weight_decay": 0.0, "adam_eps": 1e-4}
        optimizer = get_megatron_optimizer(OptimizerConfig(fp16=dtype is torch.float16, **options), [ddp])
        made = 0
        losses[dtype] = []
        while made < 30:
            optimizer.zero_grad()
            loss = loss_of(ddp, rank, made % 2)
            optimizer.scale_loss(loss.float()).backward()
            finalize_model_grads([ddp])
            if optimizer.step()[0]:
                losses[dtype].append(loss.item())
                made += 1
        if dtype is torch.float16:
            assert optimizer.steps_skipped > 10
            assert 2.0**4 < optimizer.get_loss_scale().item() <= 2.0**20
    assert losses[torch.float64][-1] < 0.4 * losses[torch.float64][0]
    for got, want in zip(losses[torch.float16], losses[torch.float64], strict=True):
        assert got == pytest.approx(want, rel=0.1, abs=0.1)


@ranks(4)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_an_overflow_anywhere_skips_the_step_of_all_and_halves_the_one_scale(
    rank: int, world: int, strategy: str
) -> None:
    """Two stages with two data ranks; stage 0 holds a dense and an expert parameter, stage 1 none that trains."""
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
    stage = parallel_state.get_pipeline_model_parallel_rank()
    model = nn.Module()
    model.register_parameter("dense", nn.Parameter(torch.ones(130, dtype=torch.float16), requires_grad=stage == 0))
    if stage == 0:
        model.register_parameter("expert", nn.Parameter(torch.ones(70, dtype=torch.float16)))
        model.expert.allreduce = False
    ddp = wrap(model, data_parallel_sharding_strategy=strategy)
    config = OptimizerConfig(
        **{**ALGORITHMS["adamw"], "lr": 0.25}, fp16=True, initial_loss_scale=4096.0, hysteresis=1, loss_scale_window=2
    )
    optimizer = get_megatron_optimizer(config, [ddp])
    assert optimizer.is_stub_optimizer == (stage == 1)

    def one_step(name: str | None) -> bool:
        optimizer.zero_grad()
        if stage == 0:
            loss = model.dense.float().sum() + model.expert.float().sum()
            optimizer.scale_loss(loss).backward()
        else:
            ddp.reducer.note_forward()
        finalize_model_grads([ddp])
        if name and stage == 0:
            buffer = (ddp.grad_buffers if name == "dense" else ddp.expert_parallel_buffers)[0]
            part = buffer.buckets[0].valid_part(0)
            if part.numel() and rank == (1 if strategy == "optim" else 0):
                part[-1] = float("inf")
        updated: bool = optimizer.step()[0]
        return updated

    assert one_step(None)
    for name in ("dense", "expert"):
        scale = optimizer.get_loss_scale().item()
        before = snapshot(ddp, optimizer)
        assert not one_step(name)
        assert optimizer.get_loss_scale().item() == scale / 2
        assert_bit_equal(snapshot(ddp, optimizer), before)
    assert optimizer.steps_skipped == 2
    assert [one_step(None), one_step(None)] == [True, True]
    assert optimizer.get_loss_scale().item() == 2048.0
    if stage == 0:
        assert float(model.dense[0]) < 0.9 and float(model.expert[0]) < 0.9


@ranks(2)
def test_a_constant_scale_changes_no_step_and_survives_an_overflow(rank: int, world: int) -> None:
    parallel_state.initialize_model_parallel()
    trained = []
    for loss_scale in (None, 512.0):
        ddp = wrap(make_net(torch.float32), use_distributed_optimizer=True)
        optimizer = get_megatron_optimizer(OptimizerConfig(loss_scale=loss_scale, **ALGORITHMS["sgd"]), [ddp])
        for number in range(3):
            optimizer.zero_grad()
            optimizer.scale_loss(loss_of(ddp, rank, number)).backward()
            finalize_model_grads([ddp])
            assert optimizer.step()[0]
        trained.append(ddp.state_dict())
    assert_bit_equal(trained[0], trained[1])  # a power of two is exact
    optimizer.zero_grad()
    set_gradients(ddp, float("inf"))
    finalize_model_grads([ddp])
    assert optimizer.step() == (False, None, None)
    assert optimizer.get_loss_scale().item() == 512.0


@ranks(2)
def test_the_scaler_is_saved_with_the_state(rank: int, world: int, caplog: Any = None) -> None:
    parallel_state.initialize_model_parallel()
    ddp = wrap(make_net(torch.float16), use_distributed_optimizer=True)
    config = OptimizerConfig(**ALGORITHMS["adamw"], fp16=True, initial_loss_scale=64.0, hysteresis=2)
    optimizer = get_megatron_optimizer(config, [ddp])
    for value in (1.0, float("inf"), float("inf"), 1.0):
        optimizer.zero_grad()
        set_gradients(ddp, value)
        finalize_model_grads([ddp])
        optimizer.step()
    state = optimizer.state_dict()
    assert state["grad_scaler"] == {"scale": 32.0, "growth_tracker": 1, "hysteresis_tracker": 0}
    again = get_megatron_optimizer(config, [wrap(make_net(torch.float16), use_distributed_optimizer=True)])
    again.load_state_dict(state)
    assert again.get_loss_scale().item() == 32.0
    assert again.state_dict()["grad_scaler"] == state["grad_scaler"]


@ranks(1)
def test_what_was_skipped_and_why_is_logged(rank: int, world: int) -> None:
    parallel_state.initialize_model_parallel()
    ddp = wrap(make_net(torch.float16))
    optimizer = get_megatron_optimizer(OptimizerConfig(lr=0.1, fp16=True, initial_loss_scale=64.0, hysteresis=1), [ddp])
    with logged("core.optimizer.optimizer") as records:
        optimizer.zero_grad()
        set_gradients(ddp, 1.0)
        ddp.module.second.weight.grad[0, :3] = float("inf")
        finalize_model_grads([ddp])
        optimizer.step()
    (message,) = records
    assert "rank 0: the gradient of 'second.weight' holds inf in 3 of 77 elements" in message
    assert "the next loss scale is 32" in message


@ranks(1)
@pytest.mark.parametrize("chained", [False, True])
def test_steps_that_only_look_for_a_loss_scale_are_reported_in_two_lines(rank: int, world: int, chained: bool) -> None:
    """The first with its reason, the others counted; later overflows each have their line."""
    parallel_state.initialize_model_parallel()
    ddp = wrap(make_net(torch.float16))
    config = OptimizerConfig(lr=0.1, fp16=True, initial_loss_scale=2.0**10, hysteresis=2)
    optimizer: Any = get_megatron_optimizer(config, [ddp])
    if chained:
        optimizer = ChainedOptimizer([optimizer])
    with logged("core.optimizer.optimizer") as records:
        for value in (*[float("inf")] * 6, 1.0, 1.0, float("inf")):
            optimizer.zero_grad()
            set_gradients(ddp, value)
            finalize_model_grads([ddp])
            optimizer.step()
    first, together, later = records
    assert "holds inf" in first and "the next loss scale is 1024. Until a step is made" in first
    assert together.startswith("5 more steps were skipped while the loss scale came down from 1024 to 32,")
    assert "holds inf" in later and later.endswith("the next loss scale is 16")
    assert optimizer.steps_skipped == 7


@ranks(1)
def test_a_loss_scale_that_has_nowhere_to_go_is_reported_in_every_step(rank: int, world: int) -> None:
    parallel_state.initialize_model_parallel()
    ddp = wrap(make_net(torch.float16))
    config = OptimizerConfig(lr=0.1, fp16=True, initial_loss_scale=4.0, min_loss_scale=1.0, hysteresis=1)
    optimizer = get_megatron_optimizer(config, [ddp])
    with logged("core.optimizer.optimizer") as records:
        for _ in range(4):
            optimizer.zero_grad()
            set_gradients(ddp, float("nan"))
            finalize_model_grads([ddp])
            optimizer.step()
    assert ["the next loss scale is 2." in records[0], *(r.endswith("scale is 1") for r in records[1:])] == [True] * 4


@ranks(1)
def test_a_guard_that_raises_on_overflow_is_refused_next_to_a_dynamic_scale(rank: int, world: int) -> None:
    parallel_state.initialize_model_parallel()
    ddp = wrap(make_net(torch.float16), check_for_nan_in_grad=True)
    with pytest.raises(ValueError, match="record_nan_in_grad=True instead"):
        get_megatron_optimizer(OptimizerConfig(lr=0.1, fp16=True), [ddp])
    get_megatron_optimizer(OptimizerConfig(lr=0.1, fp16=True, loss_scale=8.0), [ddp])


@ranks(2)
def test_a_pipeline_scales_its_losses_with_grad_scale_func(rank: int, world: int) -> None:
    norms = []
    for loss_scale in (None, 4096.0):
        runner = start_pipeline(plan_pipeline(4, 2), "1F1B")
        optimizer = get_megatron_optimizer(OptimizerConfig(lr=0.0, loss_scale=loss_scale), runner.chunks)
        runner.config.grad_scale_func = optimizer.scale_loss
        for chunk in runner.chunks:
            chunk.zero_grad_buffer()
        runner.step([microbatch(0, n) for n in range(4)])
        raw = sum(float(g.double().square().sum()) for g in optimizer.get_main_grads_for_grad_norm())
        norms.append((optimizer.step()[1], raw))
        parallel_state.destroy_model_parallel()
    assert norms[0][0] == pytest.approx(norms[1][0], rel=1e-5)
    assert norms[1][1] == pytest.approx(norms[0][1] * 4096.0**2, rel=1e-5)
