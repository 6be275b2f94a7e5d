"""Steps on a GPU: what they compute is what the CPU computes, streams and waits included. All need one.

`python -m benchmarks gpu` compares the same again before it measures; docs/source/gpu.md says which test holds which
claim.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from benchmarks import gpu, gpu_steps
from benchmarks.gpu_steps import MODELS, Setting
from core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from core.optimizer import OptimizerConfig, get_megatron_optimizer

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]


@pytest.fixture
def cuda() -> Any:
    device = torch.device("cuda", torch.cuda.current_device())
    with gpu.one_rank(device):
        yield device


@pytest.mark.parametrize("overlap", [False, True], ids=["", "overlapped"])
@pytest.mark.parametrize("strategy", gpu_steps.STRATEGIES)
def test_losses_of_a_step_are_those_of_plain_pytorch_on_the_cpu(cuda: Any, strategy: str, overlap: bool) -> None:
    here = Setting(MODELS["test"], cuda, autocast=False, lr=gpu_steps.CHECKED_LR)
    cpu = here.on("cpu")
    want = gpu_steps.losses(gpu_steps.plain(cpu), cpu.batches(8))
    wrong = gpu_steps.losses(gpu_steps.plain(cpu, gradient_factor=0.5), cpu.batches(8))
    got = gpu_steps.losses(gpu_steps.wrapped(here, strategy, overlap=overlap), here.batches(8))
    gpu_steps.check("ours", got, want, gpu.CHECK_TOLERANCE)
    gpu_steps.check_control(wrong, want, 5 * gpu.CHECK_TOLERANCE)


class Step:
    """A wrapped linear layer and one step of it at a time."""

    def __init__(self, device: torch.device, strategy: str) -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(512, 512), nn.GELU(), nn.Linear(512, 512)).to(device)
        config = DistributedDataParallelConfig(data_parallel_sharding_strategy=strategy, overlap_grad_reduce=True)
        self.ddp = DistributedDataParallel(None, config, model)
        self.optimizer = get_megatron_optimizer(OptimizerConfig(lr=0.01, clip_grad=1.0), [self.ddp])

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        self.optimizer.zero_grad()
        loss = self.ddp(x).square().mean()
        loss.backward()
        finalize_model_grads([self.ddp])
        self.optimizer.step()
        return loss.detach()


@pytest.mark.parametrize("strategy", gpu_steps.STRATEGIES)
def test_a_step_waits_for_the_device_once(cuda: Any, strategy: str) -> None:
    """For the norm. torch warns at every other place where the host would stop."""
    step, x = Step(cuda, strategy), torch.randn(64, 512, device=cuda)
    for _ in range(3):
        step(x)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with pytest.warns(UserWarning, match="synchroniz") as seen:
            step(x)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    waits = [f"{warning.filename}:{warning.lineno}" for warning in seen if "synchroniz" in str(warning.message)]
    assert len(waits) == 1 and "clip_grads.py" in waits[0], waits


@pytest.mark.parametrize("strategy", gpu_steps.STRATEGIES)
def test_steps_on_a_stream_of_the_users_own_behind_slow_work_are_the_same(cuda: Any, strategy: str) -> None:
    """Whatever core queues elsewhere must wait for the stream that the step runs on, and the step for it."""
    torch.manual_seed(1)
    batches = [torch.randn(64, 512, device=cuda) for _ in range(4)]
    plain = Step(cuda, strategy)
    want = [plain(batch).item() for batch in batches]
    step, stream = Step(cuda, strategy), torch.cuda.Stream(cuda)
    stream.wait_stream(torch.cuda.current_stream(cuda))
    with torch.cuda.stream(stream):
        got = []
        for batch in batches:
            torch.cuda._sleep(20_000_000)  # some 10 ms, in which the host runs ahead
            got.append(step(batch))
    stream.synchronize()
    assert want[0] != want[-1] and torch.stack(got).tolist() == want


def test_gradients_need_no_pass_of_their_own_for_the_clip_factor(cuda: Any) -> None:
    """torch's fused kernel takes the factor: no multiplication of a list of tensors runs in a clipped step."""
    step, x = Step(cuda, "no_shard"), 100 * torch.randn(64, 512, device=cuda)
    for _ in range(2):
        step(x)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        step(x)
    names = {event.key for event in profile.key_averages()}
    assert "aten::_fused_adamw_" in names and "aten::_foreach_mul_" not in names
