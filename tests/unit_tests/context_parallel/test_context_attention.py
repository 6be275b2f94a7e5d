"""Attention over a split sequence: outputs and gradients are those of one process that holds all of it, in fp64."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from core.context_parallel import COMM_TYPES, blocks, context_parallel_attention, join_sequence, kernels, split_sequence
from core.context_parallel.all_gather import full_key_blocks
from core.context_parallel.blocks import Block, Sight
from core.context_parallel.ring import Scores, ring_attention
from tests.unit_tests.ranks import ranks

HEAD_SIZE, BATCH = 4, 2
PLAIN = Scores()


def loop_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    documents: Tensor | None,
    scores: Scores = PLAIN,
    sinks: Tensor | None = None,
) -> Tensor:
    """One query at a time, in words: the softmax over the keys it may see, and over its sink, which has no value."""
    length, batch, heads, size = query.shape
    per_group = heads // key.shape[2]
    rows = []
    for s in range(length):
        for b in range(batch):
            for h in range(heads):
                first = 0 if scores.window is None else max(0, s + 1 - scores.window)
                seen = [t for t in range(first, s + 1) if documents is None or documents[b, t] == documents[b, s]]
                keys, values = key[seen, b, h // per_group], value[seen, b, h // per_group]
                of_keys = keys @ query[s, b, h] / size**0.5
                of_keys = of_keys if scores.cap is None else scores.cap * torch.tanh(of_keys / scores.cap)
                of_all = of_keys if sinks is None else torch.cat([of_keys, sinks[h : h + 1]])
                rows.append(torch.softmax(of_all, dim=0)[: len(seen)] @ values)
    return torch.stack(rows).view(length, batch, heads, size)


def make_inputs(length: int, heads: int, groups: int) -> tuple[list[Tensor], Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    shapes = [(length, BATCH, number, HEAD_SIZE) for number in (heads, groups, groups, heads)]
    *inputs, weights = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    # Documents that end inside a chunk, one that returns later, and another cut in the second row.
    documents = torch.arange(length).div(5, rounding_mode="floor").repeat(BATCH, 1)
    documents[0, -1] = 0
    documents[1] = torch.arange(length).ge(3)
    return inputs, weights, documents


@ranks(2, 3, 4)
@pytest.mark.parametrize("comm_type", COMM_TYPES)
@pytest.mark.parametrize("packed", [False, True], ids=["", "packed"])
@pytest.mark.in_suite()
def test_output_and_gradients_are_those_of_the_whole_sequence(
    rank: int, world: int, comm_type: str, packed: bool
) -> None:
    heads, groups = 2 * world, world
    inputs, weights, documents = make_inputs(4 * world, heads, groups)
    seen = documents if packed else None
    whole = [part.clone().requires_grad_() for part in inputs]
    expected = loop_attention(*whole, seen)
    (expected * weights).sum().backward()

    parts = [split_sequence(part, 0, world, rank).requires_grad_() for part in inputs]
    output = context_parallel_attention(*parts, dist.group.WORLD, comm_type, seen)
    (output * split_sequence(weights, 0, world, rank)).sum().backward()

    torch.testing.assert_close(output, split_sequence(expected, 0, world, rank), atol=1e-12, rtol=1e-12)
    for part, full in zip(parts, whole, strict=True):
        torch.testing.assert_close(part.grad, split_sequence(full.grad, 0, world, rank), atol=1e-12, rtol=1e-12)


@ranks(2)
@pytest.mark.parametrize("comm_type", ["p2p", "all_gather"])
def test_tiles_of_queries_change_nothing(rank: int, world: int, comm_type: str) -> None:
    inputs, weights, documents = make_inputs(12, 4, 2)
    parts = [split_sequence(part, 0, world, rank).requires_grad_() for part in inputs]
    found = []
    for rows in (blocks.TILE_ROWS, 2):
        with mock.patch.object(blocks, "TILE_ROWS", rows):
            output = context_parallel_attention(*parts, dist.group.WORLD, comm_type, documents)
            grads = torch.autograd.grad((output * split_sequence(weights, 0, world, rank)).sum(), parts)
        found.append((output, *grads))
    torch.testing.assert_close(found[0], found[1], atol=1e-13, rtol=1e-13)


@ranks(2)
@pytest.mark.parametrize("packed", [False, True], ids=["", "packed"])
def test_windows_caps_and_sinks_over_a_ring_are_those_of_one_process(rank: int, world: int, packed: bool) -> None:
    inputs, weights, documents = make_inputs(12, 4, 2)
    seen, scores, sinks = documents if packed else None, Scores(window=3, cap=1.5), torch.arange(4.0).double() - 1
    whole = [part.clone().requires_grad_() for part in (*inputs, sinks)]
    expected = loop_attention(*whole[:3], seen, scores, whole[3])
    (expected * weights).sum().backward()
    parts = [*(split_sequence(part, 0, world, rank).requires_grad_() for part in inputs), sinks.requires_grad_()]
    for rows in (blocks.TILE_ROWS, 2):  # with two queries in a tile, windows miss some blocks altogether
        with mock.patch.object(blocks, "TILE_ROWS", rows):
            output = ring_attention(*parts[:3], dist.group.WORLD, seen, scores, parts[3])
            grads = list(torch.autograd.grad((output * split_sequence(weights, 0, world, rank)).sum(), parts))
        torch.testing.assert_close(output, split_sequence(expected, 0, world, rank), atol=1e-12, rtol=1e-12)
        dist.all_reduce(grads[3])  # each rank's gradient is that of its own queries
        for grad, full in zip(grads[:3], whole, strict=False):
            torch.testing.assert_close(grad, split_sequence(full.grad, 0, world, rank), atol=1e-12, rtol=1e-12)
        torch.testing.assert_close(grads[3], whole[3].grad, atol=1e-12, rtol=1e-12)


def test_tiles_cover_each_pair_once() -> None:
    def pairs(block: Block) -> Tensor:
        seen = torch.zeros(10, 10)
        seen[block.queries, block.keys] = 1
        if block.causal:
            seen[block.queries, block.keys].tril_()
        return seen

    for block in (Block(slice(3, 10), slice(3, 10), causal=True), Block(slice(2, 9), slice(0, 4))):
        tiles = list(block.tiles(3))
        assert max(tile.queries.stop - tile.queries.start for tile in tiles) == 3
        assert torch.equal(sum(pairs(tile) for tile in tiles), pairs(block))


@ranks(2)
@pytest.mark.parametrize("comm_type", COMM_TYPES)
@pytest.mark.parametrize("packed", [False, True], ids=["", "packed"])
@pytest.mark.in_suite()
def test_16_bit_attention_rounds_no_more_than_one_process(rank: int, world: int, comm_type: str, packed: bool) -> None:
    inputs, weights, documents = make_inputs(32, 4, 2)
    seen = documents if packed else None
    inputs, weights = [part.bfloat16() for part in inputs], weights.bfloat16()
    whole = [part.double().requires_grad_() for part in inputs]
    expected = loop_attention(*whole, seen)
    (expected * weights).sum().backward()

    parts = [split_sequence(part, 0, world, rank).requires_grad_() for part in inputs]
    output = context_parallel_attention(*parts, dist.group.WORLD, comm_type, seen)
    (output * split_sequence(weights, 0, world, rank)).sum().backward()

    assert output.dtype == torch.bfloat16
    pairs = [(output, expected), *((part.grad, full.grad) for part, full in zip(parts, whole, strict=True))]
    for got, want in pairs:
        want = split_sequence(want, 0, world, rank)
        assert (got.double() - want).abs().max() <= 2e-2 * want.abs().max()


@pytest.mark.parametrize("cp", [1, 2, 3, 4])
def test_join_is_the_inverse_of_split(cp: int) -> None:
    whole = torch.arange(2 * 12 * cp).view(2, 12 * cp)
    parts = [split_sequence(whole, 1, cp, rank) for rank in range(cp)]
    assert torch.equal(join_sequence(torch.cat(parts, 1), 1, cp), whole)


def test_each_rank_holds_a_chunk_of_the_head_and_its_mirror_of_the_tail() -> None:
    whole = torch.arange(8)
    assert [split_sequence(whole, 0, 2, rank).tolist() for rank in range(2)] == [[0, 1, 6, 7], [2, 3, 4, 5]]


def flash_on_cpu() -> torch.library.Library:
    """The operators that a GPU has, by the CPU's kernel: what they are given, and what is read of what they return."""
    library = torch.library.Library("aten", "IMPL")

    def forward(query: Tensor, key: Tensor, value: Tensor, dropout: float = 0.0, causal: bool = False, *_: Any) -> Any:
        output, lse = kernels.ON_CPU.forward(query, key, value, causal)
        return output, lse, None, None, query.shape[2], key.shape[2], torch.empty(2), torch.empty(()), torch.empty(0)

    def backward(*given: Any) -> Any:
        grad, query, key, value, output, lse, *packed, longest_query, longest_key, dropout, causal, _, _ = given
        assert packed == [None, None] and dropout == 0.0 and lse.is_contiguous()
        assert (longest_query, longest_key) == (query.shape[2], key.shape[2])
        return kernels.ON_CPU.backward(grad, query, key, value, output, lse, causal)

    library.impl("_scaled_dot_product_flash_attention", forward, "CPU")
    library.impl("_scaled_dot_product_flash_attention_backward", backward, "CPU")
    return library


@ranks(2)
@pytest.mark.parametrize("comm_type", ["p2p", "all_gather"])
def test_the_kernel_of_a_gpu_is_given_what_that_of_a_cpu_is(rank: int, world: int, comm_type: str) -> None:
    inputs, weights, _ = make_inputs(12, 4, 2)
    parts = [split_sequence(part, 0, world, rank).requires_grad_() for part in inputs]
    found = []
    library = flash_on_cpu()
    for kernel in (kernels.ON_CPU, kernels.FLASH):
        with mock.patch.object(blocks, "kernel_for", return_value=kernel) as chosen:
            output = context_parallel_attention(*parts, dist.group.WORLD, comm_type)
            grads = torch.autograd.grad((output * split_sequence(weights, 0, world, rank)).sum(), parts)
        assert chosen.call_count >= 4
        found.append((output, *grads))
    library._destroy()
    torch.testing.assert_close(found[0], found[1], atol=0, rtol=0)


def test_torch_has_the_operators_of_a_gpu_with_these_arguments_and_shapes() -> None:
    with FakeTensorMode():
        query, key = (torch.empty(2, n, s, 16, dtype=torch.bfloat16, device="cuda") for n, s in ((4, 32), (2, 64)))
        output, lse = kernels.FLASH.forward(query, key, key, False)
        assert (output.shape, lse.shape, lse.dtype) == (query.shape, query.shape[:-1], torch.float32)
        grads = kernels.FLASH.backward(output, query, key, key, output, lse, False)
    assert [grad.shape for grad in grads] == [query.shape, key.shape, key.shape]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_on_a_gpu_blocks_in_16_bits_are_attended_by_its_kernel() -> None:
    generator = torch.Generator().manual_seed(3)
    shapes = (2, 4, 32, 16), (2, 2, 64, 16), (2, 2, 64, 16), (2, 4, 32, 16)
    *parts, weights = (torch.randn(shape, generator=generator).bfloat16() for shape in shapes)
    of_rank = full_key_blocks(32, 2, 1)
    whole = [part.double().requires_grad_() for part in parts]
    expected = blocks.block_attention(*whole, of_rank, Sight())
    expected = (expected, *torch.autograd.grad((expected * weights).sum(), whole))
    here = [part.cuda().requires_grad_() for part in parts]
    assert kernels.kernel_for(*here) is kernels.FLASH
    output = blocks.block_attention(*here, of_rank, Sight())
    for got, want in zip((output, *torch.autograd.grad((output * weights.cuda()).sum(), here)), expected, strict=True):
        assert (got.cpu().double() - want).abs().max() <= 2e-2 * want.abs().max()
