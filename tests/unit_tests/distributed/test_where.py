"""ddp.where(name): what it says agrees with where the gradient is, for every strategy at every moment of a step."""

import re
from typing import Any

import pytest
import torch
from torch import nn

from core import parallel_state
from core.distributed import DistributedDataParallel, finalize_model_grads
from core.optimizer import OptimizerConfig, get_megatron_optimizer
from tests.unit_tests.ranks import ranks
from tests.unit_tests.reference import wrap

STRATEGIES = [
    {},
    {"overlap_grad_reduce": True},
    {"use_distributed_optimizer": True},
    {"use_distributed_optimizer": True, "overlap_grad_reduce": True},
    {"data_parallel_sharding_strategy": "optim_grads"},
    {"data_parallel_sharding_strategy": "optim_grads", "overlap_grad_reduce": True},
    {"data_parallel_sharding_strategy": "optim_grads", "reduce_microbatches": "every"},
]


class Layers(nn.Module):
    """Three weights of 12 elements, a bucket each; the middle one may be left out."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 3, bias=False) for _ in range(3))
        self.frozen = nn.Linear(2, 2, bias=False).requires_grad_(False)

    def forward(self, skip: bool = False) -> torch.Tensor:
        used = self.layers[::2] if skip else self.layers
        return sum((layer(torch.ones(4)).sum() for layer in used), torch.zeros(()))


def spoken(ddp: DistributedDataParallel, number: int = 1) -> str:
    name = f"layers.{number}.weight"
    words = ddp.where(name)
    assert words.startswith(f"the gradient of {name!r} ")
    return words


def held(words: str) -> int:
    """How many elements a rank holds, in words."""
    found = re.search(r"this rank holds (?:all (\d+) elements|\[(\d+), (\d+)\) of \d+)", words)
    assert found, words
    whole, low, high = found.groups()
    return int(whole) if whole else int(high) - int(low)


@ranks(2)
@pytest.mark.parametrize("options", STRATEGIES)
def test_where_follows_a_gradient_through_a_step(rank: int, world: int, options: dict[str, Any]) -> None:
    parallel_state.initialize_model_parallel()
    ddp = wrap(Layers(), bucket_size=1, **options)
    optimizer = get_megatron_optimizer(OptimizerConfig(lr=0.1), [ddp])
    sharded, streams = len(options) > ("overlap_grad_reduce" in options), ddp.grad_buffers[0].pool is not None
    every, in_backward = "reduce_microbatches" in options, streams or "overlap_grad_reduce" in options
    place = f"bucket {int(in_backward)} of buffer 0"  # all lie in one bucket where buckets do not leave in backward
    weight = ddp.module.layers[1].weight
    for _ in range(2):
        ddp.zero_grad_buffer()
        words = spoken(ddp)
        assert "has not come in this step" in words and ("`.grad` is None" in words) == (weight.grad is None) == streams

        with ddp.no_sync():
            ddp(skip=False).backward()
        words = spoken(ddp)
        if every:
            assert f"is in flight in {place}; `.grad` is a placeholder" in words
        elif streams:
            assert f"accumulates in `.grad`, a tensor of its own, which moves into {place}" in words
        else:
            assert words.endswith(f"accumulates in {place}, and `.grad` is that memory")

        ddp(skip=False).backward()
        assert (f"is in flight in {place}" in spoken(ddp)) == in_backward

        ddp.finish_grad_sync()
        words = spoken(ddp)
        assert f"is reduced in {place}, before sync rules" in words
        finalize_model_grads([ddp])
        words = spoken(ddp)
        assert f"is final in {place}" in words
        assert ("placeholder, because it is sharded" in words) == sharded != words.endswith("`.grad` is that memory")
        parts = torch.tensor([held(words)])
        torch.distributed.all_reduce(parts)
        assert parts.item() == (12 if sharded else 24)

        optimizer.step()
        weight.grad = None
        assert "you have set `.grad` to None" in spoken(ddp)


@ranks(2)
@pytest.mark.parametrize("options", STRATEGIES)
def test_where_says_why_a_gradient_is_none(rank: int, world: int, options: dict[str, Any]) -> None:
    parallel_state.initialize_model_parallel()
    ddp = wrap(Layers(), bucket_size=1, **options)
    weight = ddp.module.layers[1].weight
    ddp(skip=True).backward()  # on no rank
    finalize_model_grads([ddp])
    assert weight.grad is None and "no rank used the parameter in this step" in spoken(ddp)
    ddp.zero_grad_buffer()
    ddp(skip=False).backward()
    finalize_model_grads([ddp])  # from here on the bucket waits for this gradient again
    ddp.zero_grad_buffer()
    ddp(skip=rank == 0).backward()
    ddp.start_grad_sync()
    words = spoken(ddp)
    assert ("as zeros: none had come here; `.grad` is None" in words) == (weight.grad is None) == (rank == 0)
    ddp(skip=rank == 1).backward()
    late = "is kept in `.grad`, and finalize_model_grads reduces and adds it"
    if "reduce_microbatches" not in options:  # there a second backward begins another reduction
        assert (late in spoken(ddp)) == (rank == 0)
    finalize_model_grads([ddp])
    assert "is final" in spoken(ddp)
    weight.requires_grad_(False)
    assert "does not exist: the parameter is frozen" in spoken(ddp)


@ranks(1)
def test_where_knows_every_other_name_too(rank: int, world: int) -> None:
    parallel_state.initialize_model_parallel()
    ddp = wrap(Layers(), scale_in_optimizer=True, average_in_collective=False)
    assert ddp.where("frozen.weight") == "'frozen.weight' was frozen when the model was wrapped, so it has no gradient"
    with pytest.raises(ValueError, match="no parameter is called 'layers.3.weight'"):
        ddp.where("layers.3.weight")
    ddp(skip=False).backward()
    ddp.module.layers[0].weight.grad = torch.ones(3, 4)
    assert "accumulates in `.grad`, a tensor of its own" in spoken(ddp, 0)
    finalize_model_grads([ddp])
    ddp.module.layers[0].weight.grad = torch.ones(3, 4)
    assert "you have put another tensor into `.grad`" in spoken(ddp, 0)
