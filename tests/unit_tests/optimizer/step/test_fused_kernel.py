"""torch's fused kernel called directly makes the bits of `optimizer.step()`, and only where that would do no more."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from core import parallel_state
from core.optimizer.masters.master_weights import Run
from core.optimizer.step import fused_kernel
from core.optimizer.step.fused_kernel import plain_fused_adam
from core.optimizer.step.inner_step import step_runs
from tests.unit_tests.optimizer.test_optimizer_precision import BF16, FP16, FP32, aware, build, train
from tests.unit_tests.ranks import ranks

ADAM = {"lr": 0.05, "weight_decay": 0.1, "clip_grad": 0.5}
THROUGHOUT = aware(main_grads_dtype=BF16, main_params_dtype=BF16, exp_avg_dtype=BF16, exp_avg_sq_dtype=BF16)
KEPT = {
    "fp32 copies": {},
    "remainders": aware(main_grads_dtype=BF16),
    "remainders, fp16 moments": aware(main_grads_dtype=BF16, exp_avg_dtype=FP16, exp_avg_sq_dtype=FP16),
    "bf16 throughout": THROUGHOUT,
}


def adam(**options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW([nn.Parameter(torch.ones(4))], **{"lr": 0.1, "fused": True, **options})


def test_only_fused_adam_that_does_no_more_is_called_directly() -> None:
    assert plain_fused_adam(adam()) and plain_fused_adam(adam(maximize=True))
    assert plain_fused_adam(torch.optim.Adam([nn.Parameter(torch.ones(4))], fused=True))
    assert not plain_fused_adam(torch.optim.SGD([nn.Parameter(torch.ones(4))], fused=True))
    assert not plain_fused_adam(adam(amsgrad=True))
    assert not plain_fused_adam(adam(fused=False))
    assert not plain_fused_adam(adam(lr=torch.tensor(0.1)))

    class Mine(torch.optim.AdamW):
        pass

    assert not plain_fused_adam(Mine([nn.Parameter(torch.ones(4))], fused=True))
    scheduled = adam()
    torch.optim.lr_scheduler.StepLR(scheduled, 1)  # it notes that `step` was called by a `step` of its own
    assert not plain_fused_adam(scheduled)


@pytest.mark.parametrize("register", ["register_step_pre_hook", "register_step_post_hook"])
def test_a_hook_is_called(register: str) -> None:
    optimizer, calls = adam(), []
    handle = getattr(optimizer, register)(lambda *unused: calls.append(1))
    assert not plain_fused_adam(optimizer)
    handle.remove()
    assert plain_fused_adam(optimizer)
    handle = register_optimizer_step_post_hook(lambda *unused: None)
    try:
        assert not plain_fused_adam(optimizer)
    finally:
        handle.remove()


@pytest.mark.parametrize("decoupled", [False, True])
@pytest.mark.parametrize("maximize", [False, True])
def test_the_kernel_makes_the_bits_of_step(decoupled: bool, maximize: bool) -> None:
    """Two groups with numbers of their own, step counts that differ, a factor."""
    generator = torch.Generator().manual_seed(3)
    values = [torch.randn(n, generator=generator) for n in (70, 33, 100)]
    found: list[list[torch.Tensor]] = []
    for direct in (False, True):
        params = [nn.Parameter(value.clone()) for value in values]
        make: Any = torch.optim.AdamW if decoupled else torch.optim.Adam
        groups = [{"params": params[:2]}, {"params": params[2:], "lr": 0.3, "weight_decay": 0.0, "betas": (0.5, 0.7)}]
        optimizer = make(groups, lr=0.1, weight_decay=0.2, maximize=maximize, fused=True)
        grads = torch.Generator().manual_seed(4)
        for count in range(4):
            runs = []
            for index, param in enumerate(params[: 3 if count != 1 else 2]):  # the last is a step behind
                grad = torch.randn(len(param), generator=grads)
                piece = SimpleNamespace(param=param, group=int(index == 2))
                runs.append(Run((piece,), grad, param, grad))  # type: ignore[arg-type]
            step_runs(optimizer, runs, [0.3] * len(runs), direct=direct)
        states = [optimizer.state[param] for param in params]
        assert [int(state["step"]) for state in states] == [4, 4, 3]
        found.append([*params, *(state[key] for state in states for key in ("exp_avg", "exp_avg_sq"))])
    for one, other, start in zip(found[0], found[1], [*values, *[None] * 6], strict=True):
        assert torch.equal(one, other)
        assert start is None or float((one.detach() - start).abs().min()) > 0.0


def entries_of(optimizer: Any) -> dict[str, torch.Tensor]:
    """Every number of the state, by parameter, offset and key."""
    return {
        f"{name} {entry['offset']} {key}": value.clone()
        for name, entries in optimizer.state_by_parameter().items()
        for entry in entries
        for key, value in entry.items()
        if isinstance(value, torch.Tensor)
    }


@ranks(1, 3)
@pytest.mark.parametrize("kept", KEPT)
@pytest.mark.parametrize("clip_grad", [0.0, 0.5])
def test_every_precision_steps_as_by_way_of_step(rank: int, world: int, kept: str, clip_grad: float) -> None:
    """A hook that does nothing has every step made by torch's `step()`, in scratch memory."""
    parallel_state.initialize_model_parallel()
    options = {**ADAM, "bf16": True, **KEPT[kept], "clip_grad": clip_grad}
    for strategy in ("no_shard", "optim"):
        plain, plain_optimizer = build(strategy, options, grads_in_fp32=False)
        plain_optimizer.optimizer.register_step_pre_hook(lambda *unused: None)
        ddp, optimizer = build(strategy, options, grads_in_fp32=False)
        start = [param.detach().clone() for param in ddp.parameters()]
        with patch.object(fused_kernel, "call_kernel", wraps=fused_kernel.call_kernel) as call:
            norms = train(plain, plain_optimizer, rank, range(5))
            assert not call.called, "the hook was not seen"
            assert train(ddp, optimizer, rank, range(5)) == norms
        assert call.call_count >= 4 or optimizer.is_stub_optimizer, "the kernel was never called directly"
        for one, other, before in zip(plain.parameters(), ddp.parameters(), start, strict=True):
            assert torch.equal(one, other) and not torch.equal(one, before)
        want, got = entries_of(plain_optimizer), entries_of(optimizer)
        assert want.keys() == got.keys() and all(torch.equal(want[key], got[key]) for key in want)


@ranks(1)
def test_what_is_in_bf16_throughout_needs_no_scratch_once_it_has_begun(rank: int, world: int) -> None:
    parallel_state.initialize_model_parallel()
    ddp, optimizer = build("optim", {**ADAM, "bf16": True, **THROUGHOUT}, grads_in_fp32=False)
    train(ddp, optimizer, rank, range(1))
    for memory in optimizer.scratch.memory.values():
        memory.fill_(float("nan"))
    train(ddp, optimizer, rank, range(1, 3))
    assert all(memory.isnan().all() for memory in optimizer.scratch.memory.values() if memory.dtype == FP32)
    assert all(bool(param.isfinite().all()) for param in ddp.parameters())
