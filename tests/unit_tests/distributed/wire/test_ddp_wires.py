"""Gradients next to other traffic: exchanges in backward, groups that a user assembled, several control groups."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from core import parallel_state
from core.distributed import SyncError, finalize_model_grads
from core.groups.process_groups import ProcessGroups
from tests.unit_tests.ranks import ranks
from tests.unit_tests.reference import wrap


class SumInBackward(torch.autograd.Function):
    """An exchange in backward, as of experts or of a split sequence."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        grad = grad.clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class Exchanging(nn.Module):
    """Backward: `last` (or not), then `middle`, then the exchange, then `first`."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = (nn.Parameter(torch.ones(4)) for _ in range(3))

    def forward(self, x: torch.Tensor, use_last: bool, group: dist.ProcessGroup) -> torch.Tensor:
        x = SumInBackward.apply(x * self.first, group) * self.middle
        return (x * self.last if use_last else x).sum()


@ranks(2)
@pytest.mark.parametrize("whose", ["parallel_state", "the user"])
def test_a_bucket_is_never_taken_for_an_exchange_of_activations(rank: int, world: int, whose: str) -> None:
    """Rank 1 leaves `last` out: there the exchange comes before the first bucket, on rank 0 after it."""
    parallel_state.initialize_model_parallel(expert_model_parallel_size=2)
    groups = parallel_state.get_process_groups()
    if whose == "the user":
        groups = ProcessGroups(dp_cp=dist.group.WORLD, ep=dist.group.WORLD)
    model = Exchanging()
    ddp = wrap(model, overlap_grad_reduce=True, bucket_size=1, pg_collection=groups)
    for _ in range(2):
        ddp.zero_grad_buffer()
        ddp(torch.full((4,), float(rank + 1)), rank == 0, groups.require("ep")).backward()
        finalize_model_grads([ddp])
        got = [param.grad[0].item() for param in (model.first, model.middle, model.last)]
        assert got == [3.0, 1.5, 0.5]


@ranks(2)
def test_models_wrapped_with_two_collections_of_the_same_groups_do_not_mix(rank: int, world: int) -> None:
    parallel_state.initialize_model_parallel()
    models = [nn.Linear(4, 1, bias=False) for _ in range(2)]
    for model in models:
        nn.init.ones_(model.weight)
    copied = parallel_state.ProcessGroupCollection.use_mpu_process_groups()
    wrapped = [
        wrap(models[0], overlap_grad_reduce=True),
        wrap(models[1], overlap_grad_reduce=True, pg_collection=copied),
    ]
    x = torch.full((1, 4), float(rank + 1))
    for number in (0, 1) if rank == 0 else (1, 0):
        wrapped[number](x * 10**number).sum().backward()
    for ddp in wrapped:
        finalize_model_grads([ddp])
    assert [model.weight.grad[0, 0].item() for model in models] == [1.5, 15.0]


class DenseAndExpert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.dense, self.expert, self.frozen = (nn.Parameter(torch.ones(4)) for _ in range(3))
        self.dense.tensor_model_parallel = True
        self.expert.allreduce = False
        self.frozen.requires_grad_(False)

    def forward(self) -> torch.Tensor:
        return (self.dense + self.expert + self.frozen).sum()


@ranks(4)
def test_a_problem_on_one_rank_reaches_every_rank_of_every_data_group(rank: int, world: int) -> None:
    """The experts' data group of all four ranks reaches further than the dense ones of two."""
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2, expert_tensor_parallel_size=1)
    model = DenseAndExpert()
    ddp = wrap(model, SimpleNamespace(tensor_model_parallel_size=2))
    if rank == 0:
        model.frozen.requires_grad_(True)
    ddp().backward()
    with pytest.raises(SyncError, match="rank 0: parameter 'frozen' was frozen when"):
        finalize_model_grads([ddp])
