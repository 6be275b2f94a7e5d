"""Experts where ranks differ: uneven tokens, none at all, dropped ones, one busy expert; bias and loss scale.

Every rank gives the layer tokens of its own, as in a layer under sequence parallelism. The reference runs all ranks'
tokens through one whole layer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from core import parallel_state
from core.distributed import DistributedDataParallel, finalize_model_grads
from core.groups.process_groups import ProcessGroups
from core.models import GPTModel
from core.moe import MoELayer, TopKRouter, auxiliary_loss_scale
from tests.unit_tests.moe.moe_reference import (
    EXPERTS,
    HIDDEN,
    add_noise,
    assert_close,
    assert_grads,
    balance_loss_by_hand,
    make_config,
    route,
    sum_over,
    tokens_of,
)
from tests.unit_tests.ranks import ranks
from tests.unit_tests.reference import whole_grads, wrap

DISPATCHERS = ["alltoall", "allgather"]
Layout = tuple[int, int, int]  # tp, ep, etp
LAYOUTS: list[Layout] = [(1, 2, 1), (1, 4, 1), (2, 2, 1), (2, 2, 2)]  # of four ranks


def new_layer(groups: ProcessGroups, **changes: Any) -> MoELayer:
    layer = MoELayer(make_config(**changes), pg_collection=groups, name="mlp")
    add_noise(layer, groups)
    return layer


def wrapped_layer(layout: Layout, strategy: str = "no_shard", **changes: Any) -> DistributedDataParallel:
    tp, ep, etp = layout
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tp, expert_model_parallel_size=ep, expert_tensor_parallel_size=etp
    )
    sizes: dict[str, Any] = dict(
        tensor_model_parallel_size=tp,
        expert_model_parallel_size=ep,
        expert_tensor_parallel_size=etp,
        sequence_parallel=tp > 1,
    )
    layer = new_layer(parallel_state.get_process_groups(), **sizes, **changes)
    return wrap(layer, layer.config, data_parallel_sharding_strategy=strategy)


def weighted(output: Tensor) -> Tensor:
    weights = torch.arange(1, output.numel() + 1, dtype=torch.float64).view(output.shape) / 10
    return (output * weights).sum()


def check_layer(
    ddp: DistributedDataParallel,
    reference: MoELayer,
    rank: int,
    world: int,
    tokens: Callable[[int], Tensor] = tokens_of,
    still: tuple[str, ...] = (),
) -> None:
    """Output, gradient of the input and of every weight."""
    hidden = tokens(rank).requires_grad_()
    output = ddp(hidden)
    weighted(output).backward()
    finalize_model_grads([ddp])

    for r in range(world):
        whole = tokens(r).requires_grad_()
        expected = reference(whole)
        (weighted(expected) / ddp.groups.size("dp")).backward()
        if r == rank and whole.numel():
            assert_close("output", output.detach(), expected.detach())
            assert_close("input", hidden.grad, whole.grad * ddp.groups.size("dp"))
    assert_grads(ddp, whole_grads(ddp), reference, still)


@ranks(4)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("dispatcher", DISPATCHERS)
@pytest.mark.in_suite()
def test_ranks_may_have_unequal_numbers_of_tokens_and_none(
    rank: int, world: int, dispatcher: str, layout: Layout
) -> None:
    ddp = wrapped_layer(layout, moe_token_dispatcher_type=dispatcher)
    check_layer(ddp, new_layer(ProcessGroups()), rank, world, lambda r: tokens_of(r, positions=3 * r))


@ranks(4)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("dispatcher", DISPATCHERS)
@pytest.mark.in_suite()
def test_all_tokens_may_go_to_one_expert(rank: int, world: int, dispatcher: str, layout: Layout) -> None:
    settings: dict[str, Any] = {"moe_router_topk": 1, "moe_router_pre_softmax": True}
    ddp = wrapped_layer(layout, "optim", moe_token_dispatcher_type=dispatcher, **settings)
    reference = new_layer(ProcessGroups(), **settings)
    busy = 2
    with torch.no_grad():
        for layer in (ddp.module, reference):
            layer.router.weight[busy] = layer.router.weight.max() + 0.2

    def positive(r: int) -> Tensor:
        return tokens_of(r).abs()

    assert all(route(reference.config, reference.router.weight @ token, None)[0][0] == busy
               for r in range(world) for token in positive(r).view(-1, HIDDEN))  # fmt: skip
    check_layer(ddp, reference, rank, world, positive)
    for name in ("weight1", "weight2", "bias1", "bias2"):
        grad = reference.get_parameter(f"experts.{name}").grad
        assert [bool(part.abs().sum() > 0) for part in grad] == [expert == busy for expert in range(EXPERTS)]


@ranks(4)
@pytest.mark.parametrize("policy", ["probs", "position"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.in_suite()
def test_each_rank_drops_by_the_capacity_of_its_own_tokens(rank: int, world: int, layout: Layout, policy: str) -> None:
    settings: dict[str, Any] = {"moe_expert_capacity_factor": 0.75, "moe_token_drop_policy": policy}
    dispatcher = DISPATCHERS[policy == "probs"]
    ddp = wrapped_layer(layout, moe_token_dispatcher_type=dispatcher, **settings)
    reference = new_layer(ProcessGroups(), **settings)
    flat = tokens_of(rank).view(-1, HIDDEN)
    _, kept = reference.router(flat)
    assert 0 < kept.sum() < 2 * len(flat), "nothing was dropped, so this says nothing"
    check_layer(ddp, reference, rank, world)


@ranks(4)
def test_the_expert_bias_moves_by_the_tokens_of_all_ranks(rank: int, world: int) -> None:
    rate, microbatches = 0.2, 2
    settings: dict[str, Any] = {
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_bias_update_rate": rate,
    }
    ddp = wrapped_layer((2, 2, 1), **settings)
    router = ddp.module.router
    weight = router.weight.detach().clone()
    expected = torch.zeros(EXPERTS)
    for step in range(3):
        counts = torch.zeros(EXPERTS)
        for r in range(world):
            for microbatch in range(microbatches):
                for token in tokens_of(r, 10 * step + microbatch).view(-1, HIDDEN):
                    for expert, _ in route(ddp.module.config, weight @ token, expected):
                        counts[expert] += 1
        ddp.zero_grad_buffer()
        for microbatch in range(microbatches):
            weighted(ddp(tokens_of(rank, 10 * step + microbatch))).backward()
            with torch.no_grad():
                ddp(tokens_of(rank))  # an evaluation counts nothing
        assert sum_over(router.local_tokens_per_expert, None).tolist() == counts.tolist()
        finalize_model_grads([ddp])
        assert router.local_tokens_per_expert.sum() == 0
        expected += rate * torch.sign(counts.mean() - counts)
        assert torch.equal(router.expert_bias, expected), f"step {step}"
    assert expected.any()


@ranks(2)
def test_the_expert_bias_moves_by_the_same_counts_where_layers_are_recomputed(rank: int, world: int) -> None:
    parallel_state.initialize_model_parallel(expert_model_parallel_size=2)
    found = []
    for recompute in (None, "full"):
        config = make_config(
            expert_model_parallel_size=2,
            recompute_granularity=recompute,
            moe_router_score_function="sigmoid",
            moe_router_enable_expert_bias=True,
        )
        model = GPTModel(config)
        ddp = wrap(model, config)
        generator = torch.Generator().manual_seed(rank)
        for microbatch in range(3):
            # Another number of layers in every microbatch: counts that are all doubled move the bias alike.
            model.decoder.num_full_recompute = microbatch if recompute else 0
            tokens = torch.randint(0, 13, (2, 8), generator=generator)
            with ddp.no_sync():
                ddp(tokens, labels=tokens).sum().backward()
        routers = [module for module in model.modules() if isinstance(module, TopKRouter)]
        counts = [router.local_tokens_per_expert.tolist() for router in routers]
        finalize_model_grads([ddp])
        found.append((counts, [router.expert_bias.tolist() for router in routers]))
    assert found[1] == found[0]
    assert sum(found[0][0][0]) == 3 * 2 * 8 * config.moe_router_topk and any(found[0][1][0])


@ranks(4)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("per_token", [False, True], ids=["mean", "per token"])
@pytest.mark.parametrize("kind", ["aux_loss", "global_aux_loss"])
@pytest.mark.in_suite()
def test_auxiliary_losses_are_those_of_the_tokens_that_share_them(
    rank: int, world: int, kind: str, per_token: bool, layout: Layout
) -> None:
    """The main loss is multiplied by zero: what the router gets is the losses, in their right scale, and all of it."""
    microbatches, scaler = 2, 16.0
    ddp = wrapped_layer(
        layout,
        moe_router_load_balancing_type=kind,
        moe_aux_loss_coeff=0.3,
        moe_z_loss_coeff=0.1,
        calculate_per_token_loss=per_token,
    )
    reference = new_layer(ProcessGroups())
    tp, dp = ddp.groups.size("tp"), ddp.groups.size("dp")

    total = torch.zeros((), dtype=torch.float64)
    for microbatch in range(microbatches):
        by_rank = [tokens_of(r, microbatch).view(-1, HIDDEN) @ reference.router.weight.t() for r in range(world)]
        for d in range(dp):
            mine = torch.cat(by_rank[d * tp : (d + 1) * tp])
            loss = 0.1 * torch.log(torch.exp(mine).sum(dim=1)).square().mean()
            loss = loss + (0.3 * balance_loss_by_hand(reference.config, mine) if kind == "aux_loss" else 0.0)
            total = total + loss / dp / microbatches
        if kind == "global_aux_loss":
            total = total + 0.3 * balance_loss_by_hand(reference.config, torch.cat(by_rank)) / microbatches
    total.backward()

    # Per token the losses are sums, which finalize divides by the tokens; a loss scaler is in the scale either way.
    with auxiliary_loss_scale(scaler if per_token else torch.tensor(scaler / microbatches)):
        for microbatch in range(microbatches):
            (ddp(tokens_of(rank, microbatch)) * 0.0).sum().backward()
    tokens_of_data_rank = microbatches * tp * tokens_of(0).numel() // HIDDEN
    finalize_model_grads([ddp], torch.tensor(tokens_of_data_rank) if per_token else None)

    assert_close("router", whole_grads(ddp)["router.weight"] / scaler, reference.router.weight.grad)
