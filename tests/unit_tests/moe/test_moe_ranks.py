"""Experts in every layout: loss, output and every gradient are those of one process, in fp64."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from core import parallel_state
from core.distributed import finalize_model_grads
from core.groups.process_groups import ProcessGroups
from core.models import GPTModel
from core.moe import auxiliary_loss_scale
from tests.unit_tests.moe.moe_reference import add_noise, assert_close, assert_grads, make_config
from tests.unit_tests.ranks import ranks
from tests.unit_tests.reference import whole_grads, wrap

# (ranks, tp, ep, etp, sequence parallelism)
LAYOUTS_2 = [(1, 2, 1, False), (2, 1, 1, True), (2, 1, 2, True), (2, 2, 1, False), (1, 1, 2, False)]
LAYOUTS_4 = [(1, 4, 1, False), (1, 2, 1, False), (2, 2, 1, True), (2, 2, 2, True), (2, 4, 1, True), (1, 2, 2, False)]
LAYOUTS_8 = [(2, 2, 1, True), (2, 4, 1, True), (2, 2, 2, True), (4, 2, 1, True), (2, 4, 2, False), (4, 2, 2, True)]

VARIANTS: dict[str, dict[str, Any]] = {
    "alltoall, shared expert with gate, losses": {
        "moe_shared_expert_intermediate_size": 8,
        "moe_shared_expert_gate": True,
        "moe_aux_loss_coeff": 0.2,
        "moe_z_loss_coeff": 0.1,
    },
    "full recompute": {"recompute_granularity": "full", "moe_aux_loss_coeff": 0.2},
    "allgather, SwiGLU, one loss a sequence, every second layer": {
        "moe_token_dispatcher_type": "allgather",
        "activation": "swiglu",
        "moe_layer_freq": 2,
        "moe_aux_loss_coeff": 0.2,
        "moe_router_load_balancing_type": "seq_aux_loss",
        "recompute_granularity": "selective",
        "recompute_modules": ("layernorm", "mlp_act", "moe_act"),
    },
}


def batch_of(data_rank: int, microbatch: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(10 * data_rank + microbatch)
    tokens, labels = torch.randint(0, 13, (2, 2, 8), generator=generator)
    return tokens, labels, torch.rand(2, 8, generator=generator, dtype=torch.float64)


def gpt(groups: ProcessGroups, **changes: Any) -> GPTModel:
    model = GPTModel(make_config(**changes), groups)
    add_noise(model, groups)
    return model


def run(model: torch.nn.Module, data_rank: int, scale: float, microbatches: int = 2) -> torch.Tensor:
    """The sum of the microbatches' weighted losses, each times `scale`; gradients accumulate."""
    total = torch.zeros((), dtype=torch.float64)
    for microbatch in range(microbatches):
        tokens, labels, weights = batch_of(data_rank, microbatch)
        loss = (model(tokens, labels=labels) * weights).sum() * scale
        with auxiliary_loss_scale(scale):
            loss.backward()
        total += loss.detach()
    return total


def check_gpt(layout: tuple[int, int, int, bool], strategy: str, instances: int = 1, **changes: Any) -> None:
    tp, ep, etp, sequence_parallel = layout
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tp,
        expert_model_parallel_size=ep,
        expert_tensor_parallel_size=etp,
        num_distributed_optimizer_instances=instances,
    )
    groups = parallel_state.get_process_groups()
    reference = gpt(ProcessGroups(), **changes)
    ddp = wrap(
        gpt(
            groups,
            tensor_model_parallel_size=tp,
            expert_model_parallel_size=ep,
            expert_tensor_parallel_size=etp,
            sequence_parallel=sequence_parallel,
            **changes,
        ),
        make_config(
            tensor_model_parallel_size=tp,
            expert_model_parallel_size=ep,
            expert_tensor_parallel_size=etp,
            sequence_parallel=sequence_parallel,
            **changes,
        ),
        data_parallel_sharding_strategy=strategy,
        overlap_grad_reduce=strategy == "optim",
        num_distributed_optimizer_instances=instances,
        bucket_size=200,
    )
    dp = groups.size("dp")
    expected = [run(reference, data_rank, 0.5 / dp) for data_rank in range(dp)]

    loss = run(ddp, groups.rank("dp"), 0.5)
    finalize_model_grads([ddp])

    assert_close("loss", loss, expected[groups.rank("dp")] * dp)
    assert_grads(ddp, whole_grads(ddp), reference)


@ranks(2)
@pytest.mark.parametrize("layout", LAYOUTS_2, ids=str)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.in_suite()
def test_two_ranks_have_the_gradients_of_one_process(
    rank: int, world: int, layout: tuple[int, int, int, bool], variant: str
) -> None:
    check_gpt(layout, "no_shard", **VARIANTS[variant])


@ranks(4)
@pytest.mark.parametrize("layout", LAYOUTS_4, ids=str)
@pytest.mark.parametrize("strategy", ["no_shard", "optim"])
@pytest.mark.in_suite()
def test_four_ranks_have_the_gradients_of_one_process(
    rank: int, world: int, strategy: str, layout: tuple[int, int, int, bool]
) -> None:
    check_gpt(layout, strategy, **VARIANTS["alltoall, shared expert with gate, losses"])


@pytest.mark.nightly
@ranks(8)
@pytest.mark.parametrize("layout", LAYOUTS_8, ids=str)
@pytest.mark.parametrize("strategy", ["no_shard", "optim"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_eight_ranks_have_the_gradients_of_one_process(
    rank: int, world: int, variant: str, strategy: str, layout: tuple[int, int, int, bool]
) -> None:
    check_gpt(layout, strategy, **VARIANTS[variant])


@pytest.mark.nightly
@ranks(8)
def test_two_optimizer_instances_have_the_gradients_of_one_process(rank: int, world: int) -> None:
    check_gpt((1, 2, 1, False), "optim", instances=2, **VARIANTS["full recompute"])
    parallel_state.destroy_model_parallel()
    check_gpt((2, 2, 1, True), "optim", instances=2, gradient_accumulation_fusion=True)
