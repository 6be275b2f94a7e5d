"""Runs are stepped by the torch optimizer's own `step()`, with its hooks, and by nothing else."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from core import parallel_state
from core.optimizer.masters import scratch
from core.optimizer.masters.master_weights import Segment
from core.optimizer.step.inner_step import InnerStep
from tests.unit_tests.optimizer.test_optimizer_precision import BF16, THROUGHOUT, aware, build, train
from tests.unit_tests.ranks import ranks


@pytest.mark.parametrize("fused", [False, True])
def test_some_runs_are_stepped_as_torch_steps_an_optimizer_that_holds_them_alone(fused: bool) -> None:
    """Two groups with numbers of their own, step counts that differ, a factor that is exact in fp32."""
    generator = torch.Generator().manual_seed(3)
    values = [torch.randn(n, generator=generator) for n in (70, 33, 100)]
    params, copies = ([nn.Parameter(value.clone()) for value in values] for _ in range(2))
    special = {"lr": 0.3, "weight_decay": 0.0, "betas": (0.5, 0.7)}
    optimizer, reference = (
        torch.optim.AdamW([{"params": ps[:2]}, {"params": ps[2:], **special}], lr=0.1, weight_decay=0.2, fused=fused)
        for ps in (params, copies)
    )
    for count in range(4):
        segments = []
        reference.zero_grad()
        for index in range(3 if count != 1 else 2):  # the last is a step behind
            grad = torch.randn(len(values[index]), generator=generator)
            copies[index].grad = grad * 0.25
            shard = SimpleNamespace(param=params[index], group=int(index == 2))
            segments.append(Segment((shard,), grad, params[index], grad))  # type: ignore[arg-type]
        InnerStep(optimizer).step_segments(segments, [0.25] * len(segments))
        reference.step()
    for param, copy, start in zip(params, copies, values, strict=True):
        assert torch.equal(param, copy) and float((param.detach() - start).abs().min()) > 0.0


def test_gradients_of_16_bits_are_multiplied_by_the_kernel_alone_each_by_its_own_factor() -> None:
    generator = torch.Generator().manual_seed(3)
    values = [torch.randn(1000, generator=generator).to(BF16) for _ in range(3)]
    params, copies = ([nn.Parameter(value.clone()) for value in values] for _ in range(2))
    optimizer, reference = (torch.optim.AdamW(ps, lr=0.1, eps=1e-3, fused=True) for ps in (params, copies))
    factors = {"a": 0.3, "b": 0.7}
    names = ("a", "b", "a")
    for _ in range(3):
        grads = [torch.randn(1000, generator=generator).to(BF16) for _ in values]
        shards = [
            SimpleNamespace(param=param, group=0, norm_group=name) for param, name in zip(params, names, strict=True)
        ]
        segments = [Segment((s,), g.clone(), s.param, g.clone()) for s, g in zip(shards, grads, strict=True)]  # type: ignore[arg-type]
        bucket: Any = SimpleNamespace(
            segments=segments, waves=[], tier=None, is_apart=False, record_written=lambda: None
        )
        InnerStep(optimizer).step_buckets([bucket], [factors], scratch=None)  # type: ignore[arg-type]
        for copy, grad, name in zip(copies, grads, names, strict=True):
            reference.zero_grad()
            copy.grad = grad
            reference.grad_scale = torch.tensor(1 / factors[name])  # type: ignore[attr-defined]
            reference.step()
    for param, copy, start in zip(params, copies, values, strict=True):
        assert torch.equal(param, copy) and float((param - start).detach().abs().max()) > 0.1


@ranks(1)
@pytest.mark.parametrize("kept", ["fp32 copies", "bf16 throughout"])
def test_a_hook_on_the_inner_optimizer_sees_every_element_once_a_step(rank: int, world: int, kept: str) -> None:
    parallel_state.initialize_model_parallel()
    options: dict[str, Any] = {"lr": 0.05, "bf16": True, **({} if kept == "fp32 copies" else THROUGHOUT)}
    ddp, optimizer = build("optim", options, grads_in_fp32=False)
    seen: list[int] = []

    def hook(inner: torch.optim.Optimizer, *unused: Any) -> None:
        seen.append(sum(master.numel() for group in inner.param_groups for master in group["params"]))

    optimizer.optimizer.register_step_pre_hook(hook)
    train(ddp, optimizer, rank, range(2))
    assert sum(seen) == 2 * sum(segment.numel for masters in optimizer.masters for segment in masters.segments)


class Counting(torch.optim.SGD):
    """An algorithm that counts its steps in its param groups, and steps by lr / count."""

    needs_shapes = False

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
            for param in group["params"]:
                param.data.add_(param.grad, alpha=-group["lr"] / group["count"])


@ranks(1)
def test_an_algorithm_that_counts_in_its_groups_counts_one_a_step_in_however_many_calls(rank: int, world: int) -> None:
    parallel_state.initialize_model_parallel()
    whole, scratch.CPU_NUMEL = scratch.CPU_NUMEL, 128
    try:
        options = {"optimizer": Counting, "lr": 0.1, "weight_decay": 0.0, "clip_grad": 0.0}
        in_one, one = build("no_shard", {**options, "bf16": True})
        in_waves, several = build("no_shard", {**options, "bf16": True, **aware()})
        overlap = {"overlap_param_gather_with_optimizer_step": True}
        in_buckets, overlapped = build("optim", {**options, "bf16": True, **overlap})
    finally:
        scratch.CPU_NUMEL = whole
    assert len(overlapped.masters) > 1
    for ddp, optimizer in ((in_one, one), (in_waves, several), (in_buckets, overlapped)):
        train(ddp, optimizer, rank, range(3))
        assert {group["count"] for group in optimizer.param_groups} == {3}
        for param, want in zip(ddp.parameters(), in_one.parameters(), strict=True):
            torch.testing.assert_close(param, want, rtol=2**-7, atol=0)  # a remainder rounds ties the other way
    assert sum(len(masters.waves) for masters in several.masters) > 1
