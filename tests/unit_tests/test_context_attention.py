"""Attention over a split sequence: outputs and gradients are those of one process that holds all of it, in fp64."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from core.context_parallel import COMM_TYPES, context_parallel_attention, join_sequence, split_sequence
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


@pytest.mark.parametrize("cp", [1, 2, 3, 4])
def test_join_is_the_inverse_of_split(cp: int) -> None:
    whole = torch.arange(2 * 12 * cp).view(2, 12 * cp)
    parts = [split_sequence(whole, 1, cp, rank) for rank in range(cp)]
    assert torch.equal(join_sequence(torch.cat(parts, 1), 1, cp), whole)


def test_each_rank_holds_a_chunk_of_the_head_and_its_mirror_of_the_tail() -> None:
    whole = torch.arange(8)
    assert [split_sequence(whole, 0, 2, rank).tolist() for rank in range(2)] == [[0, 1, 6, 7], [2, 3, 4, 5]]
