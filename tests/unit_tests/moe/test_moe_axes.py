"""Experts together with pipeline stages and with a split sequence: every gradient is that of one process, in fp64."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from core import parallel_state
from core.context_parallel import get_batch_on_this_cp_rank
from core.distributed import DistributedDataParallelConfig, finalize_model_grads
from core.groups.process_groups import ProcessGroups
from core.models import GPTModel
from core.moe import auxiliary_loss_scale
from core.pipeline_parallel import (
    PipelineLayout,
    PipelineRunner,
    build_gpt_stages,
    gpt_activations,
    gpt_forward_step,
    wrap_stages,
)
from tests.unit_tests.moe.moe_reference import add_noise, assert_close, assert_grads, make_config, my_slice
from tests.unit_tests.pipeline_parallel.pipeline_reference import full_name, microbatch
from tests.unit_tests.ranks import ranks
from tests.unit_tests.reference import whole_grads, wrap

EXPERTS: dict[str, Any] = {
    "moe_aux_loss_coeff": 0.2,
    "moe_z_loss_coeff": 0.1,
    "moe_layer_freq": 2,
    "moe_shared_expert_intermediate_size": 8,
}


def check_pipeline(
    schedule: str, virtual: int | None, count: int, sizes: dict[str, int], strategy: str = "no_shard"
) -> None:
    """Every second layer of four has experts, so both stages hold some; tied embeddings; a loss scaler."""
    layout = PipelineLayout.even(4, 2, virtual or 1)
    parallel_state.initialize_model_parallel(
        pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=virtual, **sizes
    )
    groups = parallel_state.get_process_groups()
    common: dict[str, Any] = {"num_layers": 4, **EXPERTS}
    config = make_config(
        pipeline_model_parallel_size=2,
        virtual_pipeline_model_parallel_size=virtual,
        sequence_parallel="tensor_model_parallel_size" in sizes,
        grad_scale_func=lambda loss: loss * 8.0,
        **sizes,
        **common,
    )
    reference = GPTModel(make_config(**common), ProcessGroups())
    chunks = wrap_stages(
        config,
        DistributedDataParallelConfig(data_parallel_sharding_strategy=strategy),
        build_gpt_stages(config, layout),
    )
    shape = gpt_activations(config, 2, 8)
    runner = PipelineRunner(chunks, layout, gpt_forward_step, shape, schedule=schedule)

    runner.step([microbatch(groups.rank("dp"), number) for number in range(count)])

    for data_rank in range(groups.size("dp")):
        for number in range(count):
            batch = microbatch(data_rank, number)
            loss = (reference(batch["tokens"], labels=batch["labels"]) * batch["loss_mask"]).sum()
            weight = 8.0 / count / groups.size("dp")
            with auxiliary_loss_scale(weight):
                (loss / batch["loss_mask"].sum() * weight).backward()
    expected = dict(reference.named_parameters())
    for chunk, number in zip(chunks, runner.stage_numbers, strict=True):
        grads, params = whole_grads(chunk), dict(chunk.module.named_parameters())
        for name, grad in grads.items():
            full = full_name(name, layout.stage(number).layer_numbers, tied=True)
            assert_close(full, grad, my_slice(expected[full].grad, params[name], groups))


@ranks(4)
@pytest.mark.parametrize(
    ("schedule", "virtual"), [("1F1B", None), ("Interleaved1F1B", 2), ("InterleavedZeroBubble", 2)]
)
def test_experts_in_stages_are_those_of_one_process(rank: int, world: int, schedule: str, virtual: int | None) -> None:
    check_pipeline(schedule, virtual, 4, {"expert_model_parallel_size": 2})


@pytest.mark.nightly
@ranks(8)
@pytest.mark.parametrize("strategy", ["no_shard", "optim"])
def test_the_full_house_is_one_process(rank: int, world: int, strategy: str) -> None:
    """tp 2, sequence parallel, pp 2, dp 2, ep 2, etp 1, tied, experts every second layer."""
    sizes = {"tensor_model_parallel_size": 2, "expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1}
    check_pipeline("1F1B", None, 3, sizes, strategy)


@ranks(4)
@pytest.mark.parametrize("per_token", [False, True], ids=["mean", "per token"])
@pytest.mark.parametrize("tp", [1, 2])
def test_experts_of_a_split_sequence_are_those_of_one_process(rank: int, world: int, tp: int, per_token: bool) -> None:
    sizes = dict(tensor_model_parallel_size=tp, context_parallel_size=2, expert_model_parallel_size=2)
    parallel_state.initialize_model_parallel(**sizes)
    groups = parallel_state.get_process_groups()
    common: dict[str, Any] = {**EXPERTS, "calculate_per_token_loss": per_token}
    config = make_config(sequence_parallel=tp > 1, **sizes, **common)
    model, reference = GPTModel(config, groups), GPTModel(make_config(**common), ProcessGroups())
    add_noise(model, groups)
    add_noise(reference, ProcessGroups())
    ddp = wrap(model, config)
    dp = groups.size("dp")

    def loss_of(gpt: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        losses = gpt(batch["tokens"], labels=batch["labels"])
        return losses.sum() if per_token else losses.mean()

    for data_rank in range(dp):
        loss = loss_of(reference, microbatch(data_rank, 0))
        tokens = microbatch(data_rank, 0)["tokens"].numel()
        weight = 1 / dp / (tokens if per_token else 1)
        with auxiliary_loss_scale(weight):
            (loss * weight).backward()
    batch = get_batch_on_this_cp_rank(microbatch(groups.rank("dp"), 0))
    loss_of(ddp, batch).backward()
    finalize_model_grads([ddp], torch.tensor(batch["tokens"].numel()) if per_token else None)

    assert_grads(ddp, whole_grads(ddp), reference)
