"""What is rounded where: fp32 buffers, 16 bits on the wire, averages, and sums in one fixed order."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn

from core import parallel_state
from core.distributed import finalize_model_grads
from tests.unit_tests.ranks import ranks
from tests.unit_tests.reference import assert_same, check_steps, loss_of, make_net, mean_over_ranks, whole_grads, wrap

SETTINGS = [(strategy, overlap) for strategy in ("no_shard", "optim", "optim_grads") for overlap in (False, True)]


class Weight(nn.Module):
    """Its gradient is what you multiply it with."""

    def __init__(self, numel: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(numel, dtype=dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.weight * x.to(self.weight.dtype)).sum()


def values(rank: int, microbatch: int = 0, numel: int = 300) -> torch.Tensor:
    """bf16 numbers of very different sizes, so that the order and the precision of a sum show."""
    generator = torch.Generator().manual_seed(rank * 31 + microbatch)
    size = torch.exp(3 * torch.randn(numel, generator=generator))
    return (torch.randn(numel, generator=generator) * size).bfloat16()


@ranks(2)
def test_bf16_gradients_accumulate_and_reduce_in_fp32(rank: int, world: int) -> None:
    """64 microbatches: a bf16 sum would stop growing; in fp32 it is exact to fp32's rounding."""
    parallel_state.initialize_model_parallel()
    for strategy, overlap in SETTINGS:
        ddp = wrap(
            Weight(300, torch.bfloat16),
            data_parallel_sharding_strategy=strategy,
            overlap_grad_reduce=overlap,
            grad_reduce_in_fp32=True,
        )
        assert ddp.grad_buffers[0].grad_data.dtype == torch.float32
        for _ in range(2):
            ddp.zero_grad_buffer()
            with ddp.no_sync():
                for microbatch in range(63):
                    ddp(values(rank, microbatch)).backward()
            ddp(values(rank, 63)).backward()
            finalize_model_grads([ddp])
            exact = sum(values(r, m).double() for r in range(world) for m in range(64)) / world
            largest = sum(values(r, m).double().abs() for r in range(world) for m in range(64)) / world
            got = whole_grads(ddp)["weight"]
            assert got.dtype == torch.float32
            assert ((got.double() - exact).abs() <= 1e-5 * largest).all()
            in_bf16 = torch.zeros(300, dtype=torch.bfloat16)
            for microbatch in range(64):
                in_bf16 += values(rank, microbatch)
            one_rank = sum(values(rank, m).double() for m in range(64))
            assert ((in_bf16.double() - one_rank).abs() > 1e-3 * largest).any()  # the test can tell


@ranks(4, 3)
@pytest.mark.parametrize("strategy", ["no_shard", "optim", "optim_grads"])
@pytest.mark.in_suite()
def test_bf16_on_the_wire_is_added_in_fp32(rank: int, world: int, strategy: str) -> None:
    """The result is the fp64 sum of the bf16 values, rounded once; a sum in bf16 is not."""
    parallel_state.initialize_model_parallel()
    for overlap in (False, True):
        ddp = wrap(
            Weight(300, torch.bfloat16),
            data_parallel_sharding_strategy=strategy,
            overlap_grad_reduce=overlap,
            reduce_scatter_with_fp32_accumulation=True,
        )
        for step in range(2):
            ddp.zero_grad_buffer()
            ddp(values(rank, step)).backward()
            finalize_model_grads([ddp])
            # The division happens before the wire: what travels is bf16(value * bf16 or fp32 1/world).
            sent = [values(r, step).mul(1.0 / world) for r in range(world)]
            exact = sum(each.double() for each in sent)
            in_bf16 = sent[0].clone()
            for each in sent[1:]:
                in_bf16 += each
            got = whole_grads(ddp)["weight"]
            assert got.dtype == torch.bfloat16
            # fp32 sums of bf16 values are not always exact in fp64's sense: allow a double rounding, one in a hundred.
            assert (got == exact.bfloat16()).sum() >= 297
            assert (in_bf16 != exact.bfloat16()).sum() > 30
            assert ddp.grad_buffers[0].grad_data.dtype == torch.bfloat16


@ranks(2, 3)
def test_average_in_collective_is_the_same_mean(rank: int, world: int) -> None:
    parallel_state.initialize_model_parallel()
    for strategy, overlap in SETTINGS:
        for ordered in (False, True):
            model = make_net()
            plain = copy.deepcopy(model)
            ddp = wrap(
                model,
                data_parallel_sharding_strategy=strategy,
                overlap_grad_reduce=overlap,
                bucket_size=60,
                average_in_collective=True,
                deterministic_reduction=ordered,
            )
            check_steps(ddp, plain, rank, world, 2, loss_of)


@ranks(4)
def test_average_in_collective_with_two_optimizer_instances(rank: int, world: int) -> None:
    parallel_state.initialize_model_parallel(num_distributed_optimizer_instances=2)
    for overlap in (False, True):
        model = make_net()
        plain = copy.deepcopy(model)
        ddp = wrap(
            model,
            use_distributed_optimizer=True,
            num_distributed_optimizer_instances=2,
            overlap_grad_reduce=overlap,
            average_in_collective=True,
            bucket_size=60,
        )
        check_steps(ddp, plain, rank, world, 2, loss_of)


@ranks(3, 4)
def test_deterministic_reduction_is_bitwise_equal_over_overlap_bucket_size_and_strategy(rank: int, world: int) -> None:
    """In fp32, with numbers of very different sizes: any other order of the sum gives other bits."""
    parallel_state.initialize_model_parallel()
    results = []
    for strategy, overlap in SETTINGS:
        for bucket_size in (1, 60, None):
            ddp = wrap(
                make_net(torch.float32),
                data_parallel_sharding_strategy=strategy,
                overlap_grad_reduce=overlap,
                bucket_size=bucket_size,
                deterministic_reduction=True,
            )
            for step in range(2):
                ddp.zero_grad_buffer()
                (loss_of(ddp, rank, step) * 10.0 ** (3 * rank - 3)).backward()
                finalize_model_grads([ddp])
            results.append(whole_grads(ddp))
    for other in results[1:]:
        for name, grad in results[0].items():
            assert torch.equal(grad, other[name]), name
    # By hand: rank 0's part first, then rank 1's, and so on.
    parts = []
    for r in range(world):
        model = make_net(torch.float32)
        (loss_of(model, r, 1) * 10.0 ** (3 * r - 3)).backward()
        parts.append({name: param.grad * (1.0 / world) for name, param in model.named_parameters()})
    differs = 0
    for name, grad in results[0].items():
        total = parts[0][name].clone()
        for part in parts[1:]:
            total += part[name]
        assert torch.equal(grad, total), name
        backwards = parts[-1][name].clone()
        for part in reversed(parts[:-1]):
            backwards += part[name]
        differs += int((backwards != total).sum())
    assert differs > 0


@ranks(4)
def test_deterministic_reduction_with_instances_unused_and_late_gradients(rank: int, world: int) -> None:
    parallel_state.initialize_model_parallel(num_distributed_optimizer_instances=2)
    for instances in (1, 2):
        model = make_net()
        plain = copy.deepcopy(model)
        ddp = wrap(
            model,
            use_distributed_optimizer=True,
            num_distributed_optimizer_instances=instances,
            overlap_grad_reduce=True,
            bucket_size=30,
            deterministic_reduction=True,
        )

        def loss(model: nn.Module, rank: int, step: int) -> torch.Tensor:
            value = loss_of(model, rank, step)
            return value + loss_of(model, rank, step + 10) if rank == 1 else value

        for step in range(2):
            ddp.zero_grad_buffer()
            loss_of(ddp, rank, step).backward()
            if rank == 1:
                loss_of(ddp, rank, step + 10).backward()
            finalize_model_grads([ddp])
            assert_same(whole_grads(ddp), mean_over_ranks(plain, world, (step,), loss))


@ranks(2)
def test_the_sum_is_not_divided_where_the_loss_is_per_token(rank: int, world: int) -> None:
    from types import SimpleNamespace

    parallel_state.initialize_model_parallel()
    config = SimpleNamespace(calculate_per_token_loss=True)
    for strategy, overlap in SETTINGS:
        model = make_net()
        mean = mean_over_ranks(model, world)
        ddp = wrap(model, config, data_parallel_sharding_strategy=strategy, overlap_grad_reduce=overlap)
        for _ in range(2):
            ddp.zero_grad_buffer()
            loss_of(ddp, rank, 0).backward()
            finalize_model_grads([ddp], num_tokens=torch.tensor(3 + rank))
            assert_same(whole_grads(ddp), {name: grad * world / (3 + 4) for name, grad in mean.items()})
    with pytest.raises(ValueError, match="average_in_collective=False"):
        wrap(make_net(), config, average_in_collective=True)
    dist.barrier()
