"""Attention over a split sequence: outputs and gradients are those of one process that holds all of it, in fp64."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from core.context_parallel import COMM_TYPES, blocks, context_parallel_attention, join_sequence, split_sequence
from core.context_parallel.blocks import Block
from tests.unit_tests.ranks import ranks

HEAD_SIZE, BATCH = 4, 2


def loop_attention(query: Tensor, key: Tensor, value: Tensor, documents: Tensor | None) -> Tensor:
    """One query at a time, in words: the softmax over the keys it may see."""
    length, batch, heads, size = query.shape
    per_group = heads // key.shape[2]
    rows = []
    for s in range(length):
        for b in range(batch):
            for h in range(heads):
                seen = [t for t in range(s + 1) if documents is None or documents[b, t] == documents[b, s]]
                keys, values = key[seen, b, h // per_group], value[seen, b, h // per_group]
                rows.append(torch.softmax(keys @ query[s, b, h] / size**0.5, dim=0) @ values)
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
