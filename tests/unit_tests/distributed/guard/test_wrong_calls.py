"""Calls with arguments missing, swapped or of another kind: taken where the meaning is clear, else the right call is
named.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from core import parallel_state
from core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from core.model_parallel_config import ModelParallelConfig
from core.optimizer import OptimizerConfig, get_megatron_optimizer
from tests.unit_tests.ranks import ranks
from tests.unit_tests.reference import assert_same, loss_of, make_net, mean_over_ranks, whole_grads, wrap

DDP, OPTIONS, SGD = DistributedDataParallel, DistributedDataParallelConfig, OptimizerConfig(optimizer="sgd", lr=0.1)
RIGHT_WRAP = r"call DistributedDataParallel\(module=model\), or DistributedDataParallel\(None, "
RIGHT_FINALIZE = r"call finalize_model_grads\(\[model\]\)"
RIGHT_OPTIMIZER = r"call get_megatron_optimizer\(OptimizerConfig\(...\), \[model\]\)"

WRONG: dict[str, tuple[Callable[[Any, Any], Any], str]] = {
    "a model alone": (lambda net, ddp: DDP(net), rf"given \(Net, NoneType, NoneType\).*{RIGHT_WRAP}"),
    "model, options": (lambda net, ddp: DDP(net, OPTIONS()), RIGHT_WRAP),
    "options, model": (lambda net, ddp: DDP(OPTIONS(), net), RIGHT_WRAP),
    "None, model, options": (lambda net, ddp: DDP(None, net, OPTIONS()), rf"\(NoneType, Net, Dist.*{RIGHT_WRAP}"),
    "options, None, model": (lambda net, ddp: DDP(OPTIONS(), None, net), RIGHT_WRAP),
    "other options": (lambda net, ddp: DDP(None, SimpleNamespace(), net), RIGHT_WRAP),
    "a list of modules": (lambda net, ddp: DDP(None, OPTIONS(), [net]), RIGHT_WRAP),
    "groups of another kind": (
        lambda net, ddp: DDP(None, OPTIONS(), net, pg_collection=SimpleNamespace(dp_cp=None)),
        r"pg_collection is a SimpleNamespace; pass core.groups.process_groups.ProcessGroups\(dp_cp",
    ),
    "finalize a config": (lambda net, ddp: finalize_model_grads(OPTIONS()), RIGHT_FINALIZE),
    "finalize a plain model": (lambda net, ddp: finalize_model_grads(net), f"Net is not wrapped.*{RIGHT_FINALIZE}"),
    "finalize nothing": (lambda net, ddp: finalize_model_grads([]), r"finalize_model_grads\(\[model\]\)"),
    "optimizer, swapped": (lambda net, ddp: get_megatron_optimizer([ddp], SGD), RIGHT_OPTIMIZER),
    "optimizer of a plain model": (
        lambda net, ddp: get_megatron_optimizer(SGD, [net]),
        f"Net is not wrapped.*{RIGHT_OPTIMIZER}",
    ),
    "optimizer of parameters": (
        lambda net, ddp: get_megatron_optimizer(SGD, ddp.parameters()),
        f"Parameter is not wrapped.*{RIGHT_OPTIMIZER}",
    ),
    "optimizer of one model twice": (
        lambda net, ddp: get_megatron_optimizer(SGD, [ddp, wrap(net), ddp]),
        f"model chunks 0 and 2 are one wrapped model.*{RIGHT_OPTIMIZER}",
    ),
    "finalize one model twice": (
        lambda net, ddp: finalize_model_grads([ddp, ddp]),
        f"model chunks 0 and 1 are one wrapped model.*{RIGHT_FINALIZE}",
    ),
}


@ranks(1)
def test_a_wrong_call_is_answered_with_the_right_one(rank: int, world: int) -> None:
    parallel_state.initialize_model_parallel()
    for name, (call, wanted) in WRONG.items():
        with pytest.raises((TypeError, ValueError), match=wanted) as raised:
            call(make_net(), wrap(make_net()))
        assert len(str(raised.value)) < 400, name


@ranks(2)
@pytest.mark.parametrize("given", ["model", "list", "tuple", "ModuleList", "generator"])
def test_one_model_may_stand_for_a_list_of_one(rank: int, world: int, given: str) -> None:
    parallel_state.initialize_model_parallel()
    ways: dict[str, Callable[[nn.Module], Any]] = {
        "model": lambda ddp: ddp,
        "list": lambda ddp: [ddp],
        "tuple": lambda ddp: (ddp,),
        "ModuleList": lambda ddp: nn.ModuleList([ddp]),
        "generator": lambda ddp: iter([ddp]),
    }
    for strategy in ("no_shard", "optim", "optim_grads"):
        model = make_net()
        expected = mean_over_ranks(model, world)
        start = {name: param.detach().clone() for name, param in model.named_parameters()}
        ddp = wrap(model, data_parallel_sharding_strategy=strategy)
        config = OptimizerConfig(optimizer="sgd", lr=0.1, clip_grad=0.0, weight_decay=0.0)
        optimizer = get_megatron_optimizer(config, ways[given](ddp))
        loss_of(ddp, rank, 0).backward()
        finalize_model_grads(ways[given](ddp))
        assert_same(whole_grads(ddp), expected)
        assert optimizer.step()[0]
        moved = {name: start[name] - param.detach() for name, param in model.named_parameters()}
        assert_same(moved, {name: 0.1 * grad for name, grad in expected.items()}, rtol=1e-8)


@ranks(2)
@pytest.mark.parametrize("number", [4, 0.25, torch.tensor(4)])
def test_the_number_of_tokens_may_be_a_plain_number(rank: int, world: int, number: Any) -> None:
    parallel_state.initialize_model_parallel()
    config = ModelParallelConfig(calculate_per_token_loss=True)
    for strategy in ("no_shard", "optim", "optim_grads"):
        ddp = wrap(make_net(), config, data_parallel_sharding_strategy=strategy)
        expected = mean_over_ranks(ddp.module, world)
        loss_of(ddp, rank, 0).backward()
        finalize_model_grads(ddp, num_tokens=number)
        assert_same(whole_grads(ddp), {name: grad / float(number) for name, grad in expected.items()})


@ranks(2)
def test_groups_given_to_finalize_may_be_any_object_with_some_of_them(rank: int, world: int) -> None:
    """As Megatron's collection, which lacks the attributes that were not set."""
    parallel_state.initialize_model_parallel()
    groups = parallel_state.get_process_groups()
    for given in (SimpleNamespace(dp_cp=groups.dp_cp), SimpleNamespace(tp=groups.tp, pp=groups.pp), SimpleNamespace()):
        ddp = wrap(make_net())
        loss_of(ddp, rank, 0).backward()
        finalize_model_grads(ddp, pg_collection=given)
        assert_same(whole_grads(ddp), mean_over_ranks(ddp.module, world))
    loss_of(ddp, rank, 1).backward()
    with pytest.raises(ValueError, match=r"pg_collection\.tp holds ranks \[0, 1\], and the model was wrapped with"):
        finalize_model_grads(ddp, pg_collection=SimpleNamespace(tp=groups.dp_cp))
