"""Sizes that context parallelism cannot split are refused, with the arithmetic and the nearest sizes that it can."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from core import parallel_state
from core.context_parallel import check_sequence_length, context_parallel_attention, get_batch_on_this_cp_rank
from core.groups.process_groups import ProcessGroups
from core.models import GPTModel
from core.transformer import TransformerConfig
from tests.unit_tests.ranks import ranks
from tests.unit_tests.transformer.test_gpt import make_config


@pytest.mark.parametrize(
    ("length", "sizes", "words"),
    [
        (10, (2, 1, False), r"10 is not divisible by 2 \* context_parallel_size \(2 \* 2 = 4\): 10 / 4 = 2.5; use 8"),
        (20, (2, 4, True), r"_size \* tensor_model_parallel_size \(2 \* 4 = 8\).*20 / 8 = 2.5; use 16 or 24"),
        (9, (3, 3, True), r"\(2 \* 3 = 6\) and .*\(3 \* 3 = 9\) under sequence_parallel: 9 / 18 = 0.5; use 18$"),
        (5, (1, 2, True), r"5 is not divisible by .*\(1 \* 2 = 2\) under sequence_parallel: 5 / 2 = 2.5; use 4 or 6"),
        (0, (2, 1, False), r"0 is not divisible .*; use 4$"),
    ],
)  # fmt: skip
def test_a_length_that_does_not_divide_is_refused(length: int, sizes: tuple[int, int, bool], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        check_sequence_length(length, *sizes)


@pytest.mark.parametrize(("length", "sizes"), [(7, (1, 2, False)), (12, (3, 1, False)), (24, (2, 3, True))])
def test_a_length_that_divides_is_accepted(length: int, sizes: tuple[int, int, bool]) -> None:
    check_sequence_length(length, *sizes)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"context_parallel_size": 3},
            "4 query heads .4 / 3 = 1.33333.; use context_parallel_size 2 or 4, 6 key/value heads",
        ),
        (
            {"context_parallel_size": 4, "num_query_groups": 2},
            "2 key/value heads for 4 query heads .2 / 4 = 0.5.; use context_parallel_size 2, 4 key/value heads",
        ),
        (
            {"context_parallel_size": 4, "tensor_model_parallel_size": 2},
            "a tensor-parallel rank has 2 key/value heads for 2 query heads",
        ),
    ],
)
def test_heads_that_do_not_divide_are_refused_before_anything_is_built(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make_config(**{"cp_comm_type": "a2a", **changes})
    assert isinstance(make_config(**changes), TransformerConfig), "the other kinds need no heads"


def test_options_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match=r"cp_comm_type is 'ring', expected one of \('p2p', 'all_gather', 'a2a'\)"):
        make_config(cp_comm_type="ring")
    with pytest.raises(ValueError, match="attention_dropout is 0.1 with context_parallel_size 2"):
        make_config(context_parallel_size=2, attention_dropout=0.1)
    mask = torch.ones(1, 1, 8, 8, dtype=torch.bool)
    with pytest.raises(ValueError, match=r"same b and s; got \{'tokens': \[1, 8\], 'labels': \[1, 7\]\}"):
        get_batch_on_this_cp_rank({"tokens": torch.zeros(1, 8), "labels": torch.zeros(1, 7)})
    with pytest.raises(ValueError, match=r"got \{'lengths': \[8\]\}"):
        get_batch_on_this_cp_rank({"lengths": torch.zeros(8)})
    with pytest.raises(ValueError, match="the batch has an 'attention_mask'"):
        get_batch_on_this_cp_rank({"tokens": torch.zeros(1, 8), "attention_mask": mask})


@ranks(2)
def test_ranks_refuse_models_batches_and_kinds_that_do_not_fit(rank: int, world: int) -> None:
    parallel_state.initialize_model_parallel(context_parallel_size=world)
    with pytest.raises(ValueError, match="context_parallel_size is 1 and the context-parallel group has 2 ranks"):
        GPTModel(make_config())
    with pytest.raises(ValueError, match="context_parallel_size is 2 and the context-parallel group has 1 ranks"):
        GPTModel(make_config(context_parallel_size=2), ProcessGroups())
    with pytest.raises(ValueError, match="sequence length 6 is not divisible by"):
        get_batch_on_this_cp_rank({"tokens": torch.zeros(1, 6)})
    with pytest.raises(ValueError, match="sequence length 4 is not divisible by.*use 8"):
        get_batch_on_this_cp_rank({"tokens": torch.zeros(1, 4)}, tp=4, sequence_parallel=True)
    query = torch.zeros(2, 1, 2, 4)
    with pytest.raises(ValueError, match="'a2a' distributes heads over 2 context-parallel ranks"):
        context_parallel_attention(query, query[:, :, :1], query[:, :, :1], dist.group.WORLD, "a2a")
    with pytest.raises(ValueError, match="cp_comm_type is 'ring'"):
        context_parallel_attention(query, query, query, dist.group.WORLD, "ring")
    model = GPTModel(make_config(context_parallel_size=2, max_sequence_length=6))
    with pytest.raises(ValueError, match="a sequence has 8 tokens; max_sequence_length: 6"):
        model(torch.zeros(1, 4, dtype=torch.int64))
    batch = get_batch_on_this_cp_rank({"tokens": torch.arange(8)[None], "attention_mask": None})
    assert batch["attention_mask"] is None
    assert batch["tokens"].tolist() == [[[0, 1, 6, 7], [2, 3, 4, 5]][rank]]
