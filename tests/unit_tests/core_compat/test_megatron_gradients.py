"""What programs for Megatron ask of gradients: buffers, kernels' flags, norms and clipping, and precision options."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from core_compat.megatron.distributed import DistributedDataParallel, DistributedDataParallelConfig
from core_compat.megatron.distributed.param_and_grad_buffer import (
    BufferType,
    _ParamAndGradBucketGroup,
    _ParamAndGradBuffer,
    partition_buckets,
    shard_buffer,
)
from core_compat.megatron.model_parallel_config import ModelParallelConfig
from core_compat.megatron.optimizer import OptimizerConfig, get_megatron_optimizer
from core_compat.megatron.optimizer.clip_grads import (
    clip_grad_by_total_norm_fp32,
    count_zeros_fp32,
    get_grad_norm_fp32,
)
from core_compat.megatron.tensor_parallel.utils import divide
from torch import Tensor, nn

from core import parallel_state
from tests.unit_tests.ranks import ranks


class KernelProduct(torch.autograd.Function):
    """A product whose backward adds to main_grad where the weight says that this is asked for, as fused kernels do."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Any) -> Tensor:
        ctx.save_for_backward(rows)
        ctx.weight = weight
        return rows @ weight.T

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (rows,) = ctx.saved_tensors
        weight, product = ctx.weight, grad.T @ rows
        if hasattr(weight, "grad_added_to_main_grad"):
            weight.main_grad.add_(product)
            weight.grad_added_to_main_grad = True
            product = torch.full_like(weight, 99.0)  # a dummy
        return grad @ weight, product


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 4, bias=False), nn.Linear(4, 2)
        self.register_buffer("shift", torch.ones(3))

    def forward(self, rows: Tensor) -> Tensor:
        return self.second(KernelProduct.apply(rows + self.shift, self.first.weight).tanh())


def new_model() -> Model:
    torch.manual_seed(4)
    return Model()


def wrapped(model: nn.Module, **options: Any) -> DistributedDataParallel:
    parallel_state.initialize_model_parallel()
    return DistributedDataParallel(ModelParallelConfig(), DistributedDataParallelConfig(**options), model)


def rows_of(rank: int) -> Tensor:
    return torch.randn(5, 3, generator=torch.Generator().manual_seed(7 + rank))


@ranks(2)
@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.in_suite(2)
def test_a_kernel_that_adds_to_main_grad_is_believed_and_buffers_are_a_list(
    rank: int, world: int, sharded: bool
) -> None:
    reference = new_model()
    torch.stack([reference(rows_of(number)).square().mean() for number in range(world)]).mean().backward()
    ddp = wrapped(new_model(), use_distributed_optimizer=sharded)
    assert [param.grad_added_to_main_grad for param in ddp.parameters()] == [False] * 3
    ddp(rows_of(rank)).square().mean().backward()
    ddp.finish_grad_sync()
    half = world if sharded else 1
    for param, expected in zip(ddp.parameters(), reference.parameters(), strict=True):
        assert param.grad_added_to_main_grad is False
        if not sharded:
            torch.testing.assert_close(param.main_grad, expected.grad, atol=1e-6, rtol=0)
    mine = torch.cat([shard_buffer(bucket.memory.grad, half)[rank % half] for bucket in partition_buckets(ddp.buffers)])
    total = torch.tensor([mine.square().sum()])
    if sharded:
        dist.all_reduce(total)
    wanted = sum(float(param.grad.square().sum()) for param in reference.parameters() if param.grad is not None)
    assert float(total) == pytest.approx(wanted, rel=1e-5) and wanted > 0.01

    both = ddp.buffers + ddp.expert_parallel_buffers
    assert both == ddp.grad_buffers and len(ddp.buffers) == 1
    assert isinstance(both[0], _ParamAndGradBuffer) and not isinstance(ddp, _ParamAndGradBuffer)
    assert all(isinstance(group, _ParamAndGradBucketGroup) for group in ddp.bucket_groups)
    assert [buffer.tolist() for buffer in ddp.buffers()] == [[1.0, 1.0, 1.0]]  # as torch's method
    assert list(ddp.buffers(recurse=False)) == []
    with pytest.raises(NotImplementedError, match="DistributedDataParallel makes the buffers"):
        _ParamAndGradBuffer(1, 2)


def test_a_flat_tensor_is_cut_into_equal_views() -> None:
    flat = torch.arange(6.0)
    parts = shard_buffer(flat, 3)
    parts[1].zero_()
    assert [part.tolist() for part in parts] == [[0, 1], [0, 0], [4, 5]] and flat[2] == 0
    with pytest.raises(ValueError, match="6"):
        shard_buffer(flat, 4)
    assert divide(6, 3) == 2 and [kind.name for kind in BufferType] == ["PARAM", "GRAD"]


@ranks(2)
def test_norm_clip_and_zeros_are_those_of_all_ranks(rank: int, world: int) -> None:
    parallel_state.initialize_model_parallel()
    grads = [torch.tensor([3.0, 0.0]), torch.tensor([-4.0])] if rank == 0 else [torch.tensor([12.0, 0.0, 0.0])]
    params = [nn.Parameter(torch.zeros_like(grad)) for grad in grads]
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad.clone()
    assert get_grad_norm_fp32(grads) == pytest.approx(13.0)  # 9 + 16 + 144
    assert get_grad_norm_fp32(grads, 1, dist.group.WORLD) == pytest.approx(19.0)
    assert get_grad_norm_fp32(grads, float("inf")) == 12.0
    assert get_grad_norm_fp32(grads if rank else [], 2.0) == pytest.approx(12.0)
    assert get_grad_norm_fp32(grads[0].bfloat16(), 2.0) == pytest.approx(153**0.5, rel=1e-6)
    unused = nn.Parameter(torch.zeros(5))
    copied = copy.copy(params[0])
    copied.grad, copied.shared = grads[0], True
    assert count_zeros_fp32([*params, unused, copied], dist.group.WORLD) == 3.0
    clip_grad_by_total_norm_fp32(params, max_norm=6.5, total_norm=13.0)
    for param, grad in zip(params, grads, strict=True):
        torch.testing.assert_close(param.grad, grad / 2, rtol=1e-6, atol=0)
    clip_grad_by_total_norm_fp32(params, max_norm=20.0, total_norm=6.5)
    torch.testing.assert_close(params[0].grad, grads[0] / 2, rtol=1e-6, atol=0)
    with pytest.raises(ValueError, match="use_decoupled_grad=True.*gradients lie in .grad"):
        clip_grad_by_total_norm_fp32(params, 1.0, 1.0, use_decoupled_grad=True)


@ranks(2)
@pytest.mark.parametrize("name", ["fp16", "bf16"])
@pytest.mark.in_suite(2)
def test_a_16_bit_option_for_an_fp32_model_is_a_warning_and_changes_nothing(rank: int, world: int, name: str) -> None:
    reference = new_model()
    expected = torch.optim.SGD(reference.parameters(), lr=0.5)
    ddp = wrapped(new_model())
    config = OptimizerConfig(optimizer="sgd", lr=0.5, weight_decay=0.0, sgd_momentum=0.0, clip_grad=0.0, **{name: True})
    with pytest.warns(UserWarning, match=rf"OptimizerConfig.{name}=True changes nothing here") as warned:
        optimizer = get_megatron_optimizer(config, [ddp])
    assert warned[0].filename == __file__
    optimizer.prepare_model_params_for_param_sync()
    for _ in range(2):
        ddp.zero_grad_buffer()
        optimizer.zero_grad()
        optimizer.scale_loss(ddp(rows_of(rank)).square().mean()).backward()
        ddp.finish_grad_sync()
        optimizer.step()
        expected.zero_grad()
        torch.stack([reference(rows_of(number)).square().mean() for number in range(world)]).mean().backward()
        expected.step()
    for param, wanted, first in zip(ddp.parameters(), reference.parameters(), new_model().parameters(), strict=True):
        torch.testing.assert_close(param, wanted, atol=2e-6, rtol=0)
        assert float((wanted - first).abs().max()) > 1e-3


@ranks(2)
def test_a_16_bit_option_for_a_16_bit_model_scales_without_a_warning(rank: int, world: int) -> None:
    ddp = wrapped(nn.Linear(3, 2).half())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer = get_megatron_optimizer(OptimizerConfig(optimizer="sgd", lr=0.1, fp16=True), [ddp])
    assert float(optimizer.get_loss_scale()) > 1.0


def test_a_conditional_embedder_is_a_warning() -> None:
    with pytest.warns(UserWarning, match=r"has_cond_embedder=True changes nothing here: gradients of parameters with"):
        assert ModelParallelConfig(has_cond_embedder=True).has_cond_embedder
