"""Data average, tokens, loss scale and clipping are one number, applied while the optimizer reads gradients."""

from __future__ import annotations

import math
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from core import parallel_state
from core.distributed import finalize_model_grads
from core.groups.agree import SyncError
from core.optimizer import ChainedOptimizer, OptimizerConfig, get_megatron_optimizer
from core.optimizer.masters.master_weights import Segment
from core.optimizer.step.inner_step import InnerStep
from tests.unit_tests.optimizer.test_optimizer import ALGORITHMS, Reference
from tests.unit_tests.ranks import ranks
from tests.unit_tests.reference import Net, loss_of, make_net, wrap

STRATEGIES = ("no_shard", "optim", "optim_grads")
CLIP = 3.0


def step(ddp: Any, optimizer: Any, rank: int, microbatch: int, tokens: int | None = None) -> Any:
    """One step with the loss scaled; with tokens the loss is a sum over them."""
    optimizer.zero_grad()
    loss = loss_of(ddp, rank, microbatch)
    optimizer.scale_loss(loss * tokens if tokens else loss).backward()
    finalize_model_grads([ddp], None if tokens is None else torch.tensor(tokens))
    return optimizer.step()


@ranks(1, 3, nightly=(2, 4))
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("scale_in_optimizer", [False, True])
@pytest.mark.in_suite()
def test_all_factors_together_make_the_steps_of_one_process(
    rank: int, world: int, strategy: str, scale_in_optimizer: bool
) -> None:
    """Every rank's loss is multiplied by 5, and there are 5 x ranks tokens; the loss scale is no power of two."""
    parallel_state.initialize_model_parallel()
    for algorithm, dtype in (("sgd", torch.float64), ("adamw", torch.float64), ("adamw", torch.float32)):
        model = make_net(dtype, width=61)
        reference = Reference(make_net(width=61), world, clip_grad=CLIP, **ALGORITHMS[algorithm])
        ddp = wrap(
            model,
            SimpleNamespace(calculate_per_token_loss=True),
            data_parallel_sharding_strategy=strategy,
            scale_in_optimizer=scale_in_optimizer,
            overlap_grad_reduce=True,
            bucket_size=300,
        )
        config = OptimizerConfig(clip_grad=CLIP, loss_scale=1000.0, **ALGORITHMS[algorithm])
        optimizer = get_megatron_optimizer(config, [ddp])
        for microbatch in range(4):
            updated, norm, _ = step(ddp, optimizer, rank, microbatch, tokens=5)
            expected = reference.step(microbatch)
            assert updated and expected > 2 * CLIP
            assert norm == pytest.approx(expected, rel=1e-10 if dtype is torch.float64 else 1e-4)
        reference.assert_equals(ddp, rtol=1e-9 if dtype is torch.float64 else 1e-4)


class Passes(TorchDispatchMode):
    """How many elements of some memory the operations inside read or write, by operation; views do not count."""

    def __init__(self, memory: torch.Tensor) -> None:
        super().__init__()
        self.storage = memory.untyped_storage().data_ptr()
        self.elements: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view and func.namespace == "aten":
            touched = [t for t in tree_leaves((args, kwargs or {})) if isinstance(t, torch.Tensor)]
            touched = [t for t in touched if t.untyped_storage().data_ptr() == self.storage]
            if touched:
                self.elements[str(func)] += sum(t.numel() for t in touched)
        return func(*args, **(kwargs or {}))


def passes_of_a_step(
    rank: int,
    dtype: torch.dtype,
    *,
    options: dict[str, Any],
    scale_in_optimizer: bool = True,
    log_num_zeros_in_grad: bool = False,
    **wrapping: Any,
) -> float:
    """Passes over the gradients, from finalize to the end of the step, as a multiple of their elements."""
    model = Net(900).to(dtype)  # the padding of a shard is a small part of it
    ddp = wrap(
        model,
        SimpleNamespace(calculate_per_token_loss=True),
        scale_in_optimizer=scale_in_optimizer,
        initial_weights="broadcast",
        **wrapping,
    )
    config = OptimizerConfig(clip_grad=0.01, loss_scale=8.0, log_num_zeros_in_grad=log_num_zeros_in_grad, **options)
    optimizer = get_megatron_optimizer(config, [ddp])
    step(ddp, optimizer, rank, 0, tokens=3)
    optimizer.zero_grad()
    optimizer.scale_loss(loss_of(ddp, rank, 1)).backward()
    (buffer,) = ddp.grad_buffers
    with Passes(buffer.grad_data) as passes:
        finalize_model_grads([ddp], torch.tensor(3))
        updated, norm, _ = optimizer.step()
    assert updated and norm > 0.1, "nothing was clipped"
    owned = sum(masters.grad.numel() for masters in optimizer.masters)
    return sum(passes.elements.values()) / owned


@ranks(1)
def test_a_step_makes_one_pass_to_measure_and_one_to_step(rank: int, world: int) -> None:
    parallel_state.initialize_model_parallel()
    adam, sgd = ALGORITHMS["adamw"], ALGORITHMS["sgd"]
    for wrapping in ({}, {"use_distributed_optimizer": True}):
        for options in (adam, sgd):
            assert passes_of_a_step(rank, torch.float32, options=options, **wrapping) == pytest.approx(2, abs=0.1)
        passes = passes_of_a_step(rank, torch.bfloat16, options=adam, grad_reduce_in_fp32=True, **wrapping)
        assert passes == pytest.approx(2, abs=0.1)
        # 16-bit gradients are read once for the norm and once into fp32 scratch.
        assert passes_of_a_step(rank, torch.bfloat16, options=adam, **wrapping) == pytest.approx(2, abs=0.1)
    # What is counted here can be more: zeros are a pass, and so is every factor that is not left to the step.
    counted = passes_of_a_step(rank, torch.float32, options=adam, log_num_zeros_in_grad=True)
    assert counted == pytest.approx(3, abs=0.1)
    eager = passes_of_a_step(rank, torch.float32, options=adam, scale_in_optimizer=False)
    assert eager == pytest.approx(3, abs=0.1)
    # fp64 is stepped by foreach kernels, with one pass for all factors together.
    assert passes_of_a_step(rank, torch.float64, options=adam) == pytest.approx(3, abs=0.1)


@ranks(2)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_clipping_can_be_left_out_or_called_apart(rank: int, world: int, strategy: str) -> None:
    """Megatron's three calls instead of one step."""
    parallel_state.initialize_model_parallel()
    for clip in (0.0, CLIP):
        reference = Reference(make_net(), world, clip_grad=clip, **ALGORITHMS["sgd"])
        ddp = wrap(make_net(), data_parallel_sharding_strategy=strategy, scale_in_optimizer=True)
        optimizer = get_megatron_optimizer(OptimizerConfig(clip_grad=99.0, **ALGORITHMS["sgd"]), [ddp])
        for microbatch in range(3):
            optimizer.zero_grad()
            loss_of(ddp, rank, microbatch).backward()
            finalize_model_grads([ddp])
            expected = reference.step(microbatch)
            assert optimizer.get_grad_norm() == pytest.approx(expected, rel=1e-12)
            assert not optimizer.prepare_grads()
            assert optimizer.count_zeros() == 0
            if clip:
                assert optimizer.clip_grad_norm(clip) == pytest.approx(expected, rel=1e-12)
            assert optimizer.step_with_ready_grads()
        reference.assert_equals(ddp)
        with pytest.raises(SyncError, match="prepare_grads"):
            optimizer.step_with_ready_grads()


@ranks(2)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("chained", [False, True])
@pytest.mark.in_suite()
def test_gradients_make_one_step_and_their_norm_is_known_until_the_next(
    rank: int, world: int, strategy: str, chained: bool
) -> None:
    """A second step would divide by the loss scale again."""
    parallel_state.initialize_model_parallel()
    ddp = wrap(make_net(torch.float32), data_parallel_sharding_strategy=strategy, scale_in_optimizer=True)
    optimizer = get_megatron_optimizer(OptimizerConfig(lr=0.1, clip_grad=0.01, loss_scale=8.0), [ddp])
    if chained:
        optimizer = ChainedOptimizer([optimizer])
    for microbatch in range(2):
        _, norm, _ = step(ddp, optimizer, rank, microbatch)
        assert norm > 0.1
        assert optimizer.get_grad_norm() == norm
        weights = {name: value.clone() for name, value in ddp.state_dict().items()}
        with pytest.raises(SyncError, match="already"):
            optimizer.step()
        assert all(torch.equal(value, weights[name]) for name, value in ddp.state_dict().items())
    optimizer.zero_grad()
    with pytest.raises(SyncError, match="finalize_model_grads"):
        optimizer.get_grad_norm()


def test_runs_with_different_factors_are_stepped_in_one_call() -> None:
    """Experts and separate norm groups may have factors of their own; extreme ones do not overflow fp32."""
    for fused in (True, False):
        for factors in ([0.5, 0.5, 0.25], [2.0, 3.0, 2.0], [1.0, 1.0, 1.0], [1e-30, 1e-37, 4.0], [1e-39, 1e-39, 1.0]):
            params = [nn.Parameter(torch.full((3,), 1.0)) for _ in factors]
            # A gradient times its factor is 1, or 0.34 where 1 cannot be reached.
            grads = [torch.full((3,), min(1.0 / factor, 3.4e38)) for factor in factors]
            optimizer = torch.optim.SGD(params, lr=0.25, fused=fused, foreach=not fused)
            segments = [
                Segment((SimpleNamespace(param=p, group=0),), g, p, g)  # type: ignore[arg-type]
                for p, g in zip(params, grads, strict=True)
            ]
            want = [1.0 - 0.25 * float(g[0]) * f for g, f in zip(grads, factors, strict=True)]
            InnerStep(optimizer).step_segments(segments, factors)
            for param, value in zip(params, want, strict=True):
                assert param.tolist() == pytest.approx([value] * 3, rel=1e-6), f"fused {fused}, factors {factors}"
            assert not math.isclose(want[0], 1.0, abs_tol=0.05)


def test_stepping_some_runs_leaves_the_groups_as_they_were() -> None:
    params = [nn.Parameter(torch.ones(2)) for _ in range(3)]
    optimizer = torch.optim.SGD([{"params": params[:2]}, {"params": params[2:], "lr": 1.0}], lr=0.5)
    for param in params:
        param.grad = torch.ones(2)
    segment = Segment((SimpleNamespace(param=params[2], group=1),), params[2].grad, params[2], params[2].grad)  # type: ignore[arg-type]
    InnerStep(optimizer).step_segments([segment], [1.0])
    assert [param.tolist() for param in params] == [[1, 1], [1, 1], [0, 0]]
    assert [len(group["params"]) for group in optimizer.param_groups] == [2, 1]
