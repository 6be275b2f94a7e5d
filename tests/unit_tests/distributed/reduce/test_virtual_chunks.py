"""Several model chunks on a rank share communicators: their buckets leave in one order, whatever backward did."""

import copy
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from core import parallel_state
from core.distributed import finalize_model_grads
from tests.unit_tests.ranks import ranks
from tests.unit_tests.reference import assert_same, mean_over_ranks, whole_grads, wrap


class Chunk(nn.Module):
    """Four layers of one size, so that buckets of different chunks could be mistaken for one another."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.ModuleList(nn.Linear(4, 4, dtype=torch.float64) for _ in range(4))

    def forward(self, x: torch.Tensor, skipped: int) -> torch.Tensor:
        for number, layer in enumerate(self.layers):
            if number != skipped:
                x = torch.tanh(layer(x))
        return x


class Both(nn.Module):
    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.chunks = nn.ModuleList([first, second])


def loss(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    """Every rank leaves out another layer of the second chunk, in every step another one."""
    generator = torch.Generator().manual_seed(rank + 10 * step)
    x = torch.randn(3, 4, generator=generator, dtype=torch.float64)
    hidden = model.chunks[0](x, -1)
    return model.chunks[1](hidden, (rank + step) % 5).pow(2).sum() * (1 + rank)


@ranks(3)
@pytest.mark.parametrize("strategy", ["no_shard", "optim"])
@pytest.mark.parametrize("zero", ["buffer", "none"])
@pytest.mark.in_suite()
def test_chunks_that_ranks_use_differently_are_reduced_right(rank: int, world: int, strategy: str, zero: str) -> None:
    parallel_state.initialize_model_parallel()
    plain = Both(Chunk(1), Chunk(2))
    config = SimpleNamespace(virtual_pipeline_model_parallel_size=2)
    chunks = [
        wrap(chunk, config, data_parallel_sharding_strategy=strategy, overlap_grad_reduce=True, bucket_size=1)
        for chunk in plain.chunks
    ]
    in_backward: list[list[int]] = []
    for step in range(8):
        for chunk in chunks:
            if zero == "buffer":
                chunk.zero_grad_buffer()
            else:
                for param in chunk.parameters():
                    param.grad = None
        loss(Both(*chunks), rank, step).backward()
        in_backward.append([chunk.reducer.launches - 8 * step for chunk in chunks])
        finalize_model_grads(chunks)
        expected = mean_over_ranks(plain, world, (step,), loss)
        for number, chunk in enumerate(chunks):
            got = {f"chunks.{number}.{name}": grad for name, grad in whole_grads(chunk).items()}
            assert_same(got, {name: grad for name, grad in expected.items() if name.startswith(f"chunks.{number}.")})
    assert in_backward[0] == [0, 0]  # the order of the chunks is not known before the first finalize
    assert any(last > 0 for _, last in in_backward)
    assert all(last == 8 for first, last in in_backward if first > 0)  # the last chunk's buckets go first


@ranks(3)
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_chunks_can_be_finished_one_by_one(rank: int, world: int, order: tuple[int, int]) -> None:
    parallel_state.initialize_model_parallel()
    plain = Both(Chunk(1), Chunk(2))
    config = SimpleNamespace(virtual_pipeline_model_parallel_size=2)
    chunks = [wrap(chunk, config, overlap_grad_reduce=True, bucket_size=1) for chunk in plain.chunks]
    for step in range(6):
        for chunk in chunks:
            chunk.zero_grad_buffer()
        loss(Both(*chunks), rank, step).backward()
        chunks[order[0]].start_grad_sync()
        for number in order:
            chunks[number].finish_grad_sync()
        finalize_model_grads(chunks)
        expected = mean_over_ranks(plain, world, (step,), loss)
        for number, chunk in enumerate(chunks):
            got = {f"chunks.{number}.{name}": grad for name, grad in whole_grads(chunk).items()}
            assert_same(got, {name: grad for name, grad in expected.items() if name.startswith(f"chunks.{number}.")})


@ranks(2)
@pytest.mark.parametrize("share", [True, False])
def test_chunks_with_sharded_parameters_have_their_weights_compared(rank: int, world: int, share: bool) -> None:
    """Weights of all chunks are read together, and those of one chunk must not be taken for saved by another."""
    parallel_state.initialize_model_parallel()
    plain = Both(Chunk(1), Chunk(2))
    config = SimpleNamespace(virtual_pipeline_model_parallel_size=2)
    options = {"data_parallel_sharding_strategy": "optim_grads_params", "share_host_memory": share}
    options["reduce_microbatches"] = "last"
    chunks = [wrap(copy.deepcopy(chunk), config, check_weights_interval=1, **options) for chunk in plain.chunks]
    for _ in range(2):
        for chunk in chunks:
            chunk.zero_grad_buffer()
        hidden = chunks[0](torch.ones(3, 4, dtype=torch.float64), -1)
        chunks[1](hidden, -1).sum().backward()
        finalize_model_grads(chunks)
    plain.zero_grad()
    plain.chunks[1](plain.chunks[0](torch.ones(3, 4, dtype=torch.float64), -1), -1).sum().backward()
    for chunk, wanted in zip(chunks, plain.chunks, strict=True):
        assert_same(whole_grads(chunk), {name: param.grad for name, param in wanted.named_parameters()})
