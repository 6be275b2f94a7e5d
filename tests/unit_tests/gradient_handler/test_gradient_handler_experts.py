"""Gradient handlers of shared modules and of experts."""

from __future__ import annotations

import types

import pytest
import torch
import torch.distributed as dist
from torch import nn

from core import parallel_state
from core.distributed import ContractError, LayoutMismatch
from core.gradient_handler import (
    DataParallelGradientHandler,
    GradientHandlerError,
    MoeGradientHandler,
    PipelineSharedModuleGradientHandler,
)
from tests.unit_tests.gradient_handler.test_gradient_handler import coded, codes_of, counted_calls
from tests.unit_tests.rank_codes import ODD, digits
from tests.unit_tests.ranks import ranks

# -- shared modules -------------------------------------------------------------------------------------------------


@ranks(4)
def test_a_shared_module_is_summed_over_its_stages_and_not_averaged(rank: int, world: int) -> None:
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    bag = coded(rank, own=ODD, tied=(4, 3))
    bag.tied.pipeline_shared_module_pg = groups[rank % 2]
    handler = PipelineSharedModuleGradientHandler(bag, None)
    with counted_calls() as calls:
        handler.handle_gradient()
    assert codes_of(bag) == {"own": 10.0**rank, "tied": digits(rank % 2, rank % 2 + 2)}
    assert [numel for _, numel in calls] == [12]


@ranks(3)
def test_groups_that_overlap_in_a_circle_do_not_wait_for_each_other(rank: int, world: int) -> None:
    pairs = [dist.new_group(pair) for pair in ([0, 1], [1, 2], [0, 2])]
    mine = {0: (0, 2), 1: (1, 0), 2: (2, 1)}[rank]  # each rank meets its two groups in another order
    bag = coded(rank, first=(3,), second=(3,))
    bag.first.pipeline_shared_module_pg = pairs[mine[0]]
    bag.second.pipeline_shared_module_pg = pairs[mine[1]]
    PipelineSharedModuleGradientHandler(bag, None).handle_gradient()
    sums = [digits(0, 1), digits(1, 2), digits(0, 2)]
    assert codes_of(bag) == {"first": sums[mine[0]], "second": sums[mine[1]]}


@ranks(2)
def test_a_tied_embedding_under_another_name_on_each_stage_gets_both_uses(rank: int, world: int) -> None:
    """Against one process that uses the weight twice."""
    torch.manual_seed(0)
    weight = torch.randn(6, 4, dtype=torch.float64)
    tokens = torch.tensor([1, 4, 4])
    whole = nn.Parameter(weight.clone())
    hidden = whole[tokens]
    (hidden.tanh() @ whole.t()).pow(2).sum().backward()

    stage = nn.Module()
    param = nn.Parameter(weight.clone())
    stage.register_parameter("embedding" if rank == 0 else "head", param)
    param.pipeline_shared_module_pg = dist.group.WORLD
    ahead = torch.zeros(3, 4, dtype=torch.float64)
    if rank == 0:
        output = param[tokens]
        dist.send(output.detach(), 1)
        dist.recv(ahead, 1)
        output.backward(ahead)
    else:
        dist.recv(ahead, 0)
        ahead.requires_grad_()
        (ahead.tanh() @ param.t()).pow(2).sum().backward()
        dist.send(ahead.grad, 0)
    PipelineSharedModuleGradientHandler(stage, None).handle_gradient()
    assert whole.grad.norm() > 1
    torch.testing.assert_close(param.grad, whole.grad, rtol=1e-12, atol=1e-12)


@ranks(2)
def test_shared_modules_of_other_shapes_are_an_error_on_both_stages(rank: int, world: int) -> None:
    bag = coded(rank, tied=(3, 4 + rank))
    bag.tied.pipeline_shared_module_pg = dist.group.WORLD
    with pytest.raises(LayoutMismatch, match="shared parameter 0"):
        PipelineSharedModuleGradientHandler(bag, None).handle_gradient()


# -- experts --------------------------------------------------------------------------------------------------------


@ranks(4)
def test_experts_are_summed_over_their_own_group_and_divided_by_the_whole_data_group(rank: int, world: int) -> None:
    parallel_state.initialize_model_parallel(expert_model_parallel_size=2)
    bag = coded(rank, dense=ODD, expert=(5,)).tag("expert", allreduce=False)
    MoeGradientHandler(bag, None).handle_gradient()
    assert codes_of(bag) == {"dense": 1111 / 4, "expert": digits(rank % 2, rank % 2 + 2) / 4}


@ranks(4)
def test_an_expert_on_one_rank_only_is_divided_too(rank: int, world: int) -> None:
    parallel_state.initialize_model_parallel(expert_model_parallel_size=4)
    bag = coded(rank, dense=ODD, expert=(5,)).tag("expert", allreduce=False)
    MoeGradientHandler(bag, None).handle_gradient()
    assert codes_of(bag) == {"dense": 1111 / 4, "expert": 10.0**rank / 4}


@ranks(4)
def test_experts_marked_the_way_of_colossalai_use_their_own_group(rank: int, world: int) -> None:
    pairs = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    bag = coded(rank, dense=ODD, expert=(5,), shared=(4,))
    bag.expert.moe_info = types.SimpleNamespace(ep_size=2, dp_group=pairs[rank % 2])
    bag.shared.moe_info = types.SimpleNamespace(ep_size=1, dp_group=None)
    MoeGradientHandler(bag, None, group=dist.group.WORLD).handle_gradient()
    assert codes_of(bag) == {"dense": 1111 / 4, "expert": digits(rank % 2, rank % 2 + 2) / 4, "shared": 1111 / 4}


@ranks(2)
def test_two_experts_on_two_ranks_equal_one_process_with_both(rank: int, world: int) -> None:
    """Every rank routes half of its tokens to each expert; reference: both experts and all tokens on one process."""
    parallel_state.initialize_model_parallel(expert_model_parallel_size=2)
    torch.manual_seed(1)
    router = torch.randn(4, 4, dtype=torch.float64)
    experts = torch.randn(2, 4, 4, dtype=torch.float64)
    tokens = torch.randn(2, 6, 4, dtype=torch.float64)  # [rank, token, feature]; the first 3 go to expert 0

    def forward(dense: torch.Tensor, own: list[torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        hidden = x @ dense
        return torch.cat([hidden[:, :3] @ own[0], hidden[:, 3:] @ own[1]], dim=1)

    dense, both = router.clone().requires_grad_(), experts.clone().requires_grad_()
    losses = forward(dense, [both[0], both[1]], tokens).pow(2).mean(dim=(1, 2))  # one a rank
    losses.mean().backward()

    model = nn.Module()
    model.dense = nn.Parameter(router.clone())
    model.expert = nn.Parameter(experts[rank].clone())
    model.expert.allreduce = False
    # Tokens travel to the rank of their expert and back; so does the gradient of each rank's own loss.
    here = forward(model.dense, [experts[0], experts[1]], tokens[rank : rank + 1]).pow(2).mean()
    here.backward()
    kept = tokens[:, :3] if rank == 0 else tokens[:, 3:]
    per_rank = ((kept @ router) @ model.expert).pow(2).sum(dim=(1, 2)) / 24
    per_rank.sum().backward()
    MoeGradientHandler(model, None).handle_gradient()
    assert both.grad.norm() > 0.1
    torch.testing.assert_close(model.expert.grad, both.grad[rank], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(model.dense.grad, dense.grad, rtol=1e-12, atol=1e-12)


@ranks(2)
def test_an_expert_is_refused_by_the_handler_of_dense_models(rank: int, world: int) -> None:
    parallel_state.initialize_model_parallel(expert_model_parallel_size=2)
    bag = coded(rank, expert=(5,)).tag("expert", allreduce=False)
    with pytest.raises(ContractError, match="'expert' is an expert's.*MoeGradientHandler"):
        DataParallelGradientHandler(bag, None).handle_gradient()


@ranks(4)
def test_what_is_wrong_with_an_expert_is_reported_on_all_ranks(rank: int, world: int) -> None:
    """Ranks 1 and 3 hold the expert with the sparse gradient; 0 and 2 must not wait for them."""
    parallel_state.initialize_model_parallel(expert_model_parallel_size=2)
    bag = coded(rank, dense=ODD, expert=(5, 2)).tag("expert", allreduce=False)
    if rank == 3:
        bag.expert.grad = bag.expert.grad.to_sparse()
    with pytest.raises(GradientHandlerError, match="'expert' is torch.sparse_coo"):
        MoeGradientHandler(bag, None).handle_gradient()
