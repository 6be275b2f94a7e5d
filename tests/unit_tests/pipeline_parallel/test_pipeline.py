"""A GPT in stages trains as the whole GPT does: every gradient and the loss against one process, in fp64."""

from __future__ import annotations

import itertools

import pytest
import torch

from core.pipeline_parallel import PipelineLayout, PipelineRunner, plan_pipeline
from tests.unit_tests.pipeline_parallel.pipeline_reference import (
    build_whole,
    check_steps,
    microbatch,
    start_pipeline,
    whole_step,
)
from tests.unit_tests.ranks import ranks
from tests.unit_tests.reference import whole_grads

UNTIED = {"share_embeddings_and_output_weights": False}


@ranks(2)
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_two_stages_under_1f1b(rank: int, world: int, tied: bool) -> None:
    config = {"share_embeddings_and_output_weights": tied}
    runner = start_pipeline(PipelineLayout.even(4, pp=2), "1F1B", config=config)
    check_steps(runner, build_whole(**config), 3)


@ranks(2)
@pytest.mark.parametrize("per_token", [True, False], ids=["per token", "per microbatch"])
@pytest.mark.parametrize("weight", [0.3, 0.015])
def test_a_loss_mask_counts_by_its_weights_however_small(rank: int, world: int, weight: float, per_token: bool) -> None:
    config = {"calculate_per_token_loss": per_token}
    runner = start_pipeline(PipelineLayout.even(4, pp=2), "1F1B", config=config)
    whole = build_whole()
    check_steps(runner, whole, 3, steps=1, per_token=per_token, token_weight=weight)
    evaluated = runner.evaluate([microbatch(0, number, weight) for number in range(3)])
    _, (loss,) = whole_step(whole, 1, 3, per_token=per_token, token_weight=weight)
    assert evaluated.loss.item() == pytest.approx(loss, rel=1e-12)


@ranks(2)
@pytest.mark.parametrize(
    ("schedule", "layers", "count"),
    [
        ("GPipe", (2, 2), 3),
        ("GPipe", (3, 1), 1),
        ("1F1B", (3, 1), 2),
        ("Interleaved1F1B", (1, 1, 1, 1), 4),
        ("Interleaved1F1B", (1, 0, 2, 1, 0, 0), 2),
        ("InterleavedZeroBubble", (1, 1, 1, 1), 4),
        ("InterleavedZeroBubble", (2, 2), 3),
        ("ZBVZeroBubble", (1, 2, 1, 0), 3),
        ("ZBVZeroBubble", (1, 1, 1, 1), 1),
        ("DualPipeV", (1, 1, 1, 1), 4),
        ("DualPipeV", (0, 2, 1, 1), 6),
    ],
    ids=str,
)
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.in_suite()
def test_every_schedule_on_two_ranks(
    rank: int, world: int, schedule: str, layers: tuple[int, ...], count: int, tied: bool
) -> None:
    config = {"share_embeddings_and_output_weights": tied}
    layout = plan_pipeline(sum(layers), 2, schedule=schedule, layers_per_stage=layers, microbatches=count)
    runner = start_pipeline(layout, schedule, config=config, ddp={"overlap_grad_reduce": True, "bucket_size": 100})
    check_steps(runner, build_whole(num_layers=sum(layers), **config), count)


@ranks(3)
@pytest.mark.parametrize(
    ("schedule", "layers", "count"),
    [("1F1B", (1, 3, 0), 4), ("InterleavedZeroBubble", (1, 2, 1), 6), ("ZBVZeroBubble", (1, 1, 0, 1, 2, 0), 5)],
    ids=str,
)
def test_three_ranks_and_uneven_layers(
    rank: int, world: int, schedule: str, layers: tuple[int, ...], count: int
) -> None:
    layout = plan_pipeline(sum(layers), 3, schedule=schedule, layers_per_stage=layers)
    runner = start_pipeline(layout, schedule, ddp={"overlap_grad_reduce": True})
    check_steps(runner, build_whole(num_layers=sum(layers)), count)


@ranks(4)
@pytest.mark.parametrize(
    ("schedule", "count"), [("GPipe", 2), ("1F1B", 5), ("InterleavedZeroBubble", 4), ("DualPipeV", 8)], ids=str
)
def test_four_stages(rank: int, world: int, schedule: str, count: int) -> None:
    chunks = 2 if schedule == "DualPipeV" else 1
    layout = plan_pipeline(8 // (3 - chunks), 4, schedule=schedule)
    runner = start_pipeline(layout, schedule)
    check_steps(runner, build_whole(num_layers=layout.num_layers), count, steps=1)


# By day each schedule meets either strategy, with and without overlap in turn; by night all of them.
BY_DAY = {("1F1B", False), ("Interleaved1F1B", True), ("ZBVZeroBubble", False)}  # overlap next to no_shard
TWO_BY_TWO = [
    pytest.param(
        *case,
        marks=() if ((case[0], case[2]) in BY_DAY) == (case[1] == "no_shard") else pytest.mark.nightly,
        id="-".join([*case[:2], "overlap" if case[2] else ""]),
    )
    for case in itertools.product(("1F1B", "Interleaved1F1B", "ZBVZeroBubble"), ("no_shard", "optim"), (False, True))
]


@ranks(4)
@pytest.mark.parametrize(("schedule", "strategy", "overlap"), TWO_BY_TWO)
@pytest.mark.in_suite()
def test_two_stages_of_two_data_ranks(rank: int, world: int, schedule: str, strategy: str, overlap: bool) -> None:
    ddp = {"data_parallel_sharding_strategy": strategy, "overlap_grad_reduce": overlap, "bucket_size": 100}
    layout = plan_pipeline(4, 2, schedule=schedule, chunks=1 if schedule == "1F1B" else 2)
    runner = start_pipeline(layout, schedule, ddp=ddp)
    check_steps(runner, build_whole(), 4, steps=3)


@ranks(4)
@pytest.mark.parametrize("schedule", ["ZBVZeroBubble", "DualPipeV"])
def test_a_last_stage_gathers_the_sharded_embedding_of_the_first(rank: int, world: int, schedule: str) -> None:
    """In a V both lie on one rank, and the logits are made by a parameter of the other chunk's wrapper."""
    ddp = {"data_parallel_sharding_strategy": "optim_grads_params", "reduce_microbatches": "last", "bucket_size": 100}
    runner = start_pipeline(plan_pipeline(4, 2, schedule=schedule), schedule, ddp=ddp)
    check_steps(runner, build_whole(), 4)
    runner.evaluate([microbatch(0, 0)])


@ranks(8)
@pytest.mark.parametrize("schedule", ["Interleaved1F1B", "ZBVZeroBubble"])
def test_pipeline_next_to_sequence_and_data_parallelism(rank: int, world: int, schedule: str) -> None:
    runner = start_pipeline(
        plan_pipeline(4, 2, schedule=schedule, chunks=2),
        schedule,
        tp=2,
        config={"sequence_parallel": True, "calculate_per_token_loss": True},
        ddp={"overlap_grad_reduce": True, "data_parallel_sharding_strategy": "optim"},
    )
    check_steps(runner, build_whole(), 2, per_token=True)


@ranks(2)
@pytest.mark.parametrize("schedule", ["1F1B", "InterleavedZeroBubble", "DualPipeV"])
@pytest.mark.parametrize("recompute", [None, "full", "selective"])
@pytest.mark.in_suite()
def test_recomputation_and_fused_weight_gradients(rank: int, world: int, schedule: str, recompute: str | None) -> None:
    config = {"recompute_granularity": recompute, "gradient_accumulation_fusion": True, "activation": "swiglu"}
    config["recompute_modules"] = ("core_attn", "layernorm", "mlp_act")
    runner = start_pipeline(plan_pipeline(4, 2, schedule=schedule), schedule, config=config)
    check_steps(runner, build_whole(activation="swiglu"), 4)


@ranks(2)
@pytest.mark.parametrize("schedule", ["1F1B", "ZBVZeroBubble"])
@pytest.mark.parametrize("per_token", [False, True], ids=["", "per token"])
@pytest.mark.in_suite()
def test_losses_are_scaled_by_the_users_function(rank: int, world: int, schedule: str, per_token: bool) -> None:
    config = {"grad_scale_func": lambda loss: loss * 8.0, "calculate_per_token_loss": per_token}
    runner = start_pipeline(plan_pipeline(4, 2, schedule=schedule), schedule, config=config)
    check_steps(runner, build_whole(), 4, per_token=per_token, scale=8.0)


@ranks(2)
@pytest.mark.parametrize("schedule", ["1F1B", "InterleavedZeroBubble", "ZBVZeroBubble"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.in_suite()
def test_gradients_kept_in_fp32(rank: int, world: int, schedule: str, dtype: torch.dtype) -> None:
    layout = plan_pipeline(4, 2, schedule=schedule)
    runner = start_pipeline(layout, schedule, config={"params_dtype": dtype}, ddp={"grad_reduce_in_fp32": True})
    whole = build_whole(params_dtype=dtype).double()
    rtol = 0.1 if dtype == torch.bfloat16 else 1e-4
    check_steps(runner, whole, 4, rtol=rtol)
    assert all(grad.dtype == torch.float32 for chunk in runner.chunks for grad in whole_grads(chunk).values())


@ranks(2)
@pytest.mark.parametrize("schedule", ["1F1B", "ZBVZeroBubble"])
@pytest.mark.parametrize("overlap", [False, True], ids=["", "overlap"])
@pytest.mark.in_suite()
def test_gradients_that_were_set_to_none_between_steps(rank: int, world: int, schedule: str, overlap: bool) -> None:
    def clear(runner: PipelineRunner) -> None:
        for chunk in runner.chunks:
            for param in chunk.parameters():
                param.grad = None

    runner = start_pipeline(plan_pipeline(4, 2, schedule=schedule), schedule, ddp={"overlap_grad_reduce": overlap})
    check_steps(runner, build_whole(), 4, steps=3, clear=clear)
