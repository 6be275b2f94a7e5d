"""Twenty steps of training in stages are twenty steps of one process: gradients, norm, clipping, update."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from core import parallel_state
from core.checkpoint import load_checkpoint, save_checkpoint
from core.models import GPTModel
from core.optimizer import OptimizerConfig, get_megatron_optimizer
from core.pipeline_parallel import plan_pipeline
from core.tensor_parallel import tensor_parallel_slice
from tests.unit_tests.pipeline_parallel.pipeline_reference import build_whole, full_name, microbatch, start_pipeline
from tests.unit_tests.ranks import ranks

COUNT, CLIP = 4, 0.2

# (schedule, strategy, tp, steps)
CASES = [
    ("Interleaved1F1B", "optim", 2, 8),
    ("ZBVZeroBubble", "optim", 1, 8),
    *(
        pytest.param(*case, 20, marks=pytest.mark.nightly)
        for case in itertools.product(("1F1B", "Interleaved1F1B", "ZBVZeroBubble"), ("no_shard", "optim"), (1, 2))
    ),
]


@ranks(4)
@pytest.mark.parametrize(("schedule", "strategy", "tp", "steps"), CASES)
def test_every_step_is_that_of_one_process(
    rank: int, world: int, schedule: str, strategy: str, tp: int, steps: int
) -> None:
    runner = start_pipeline(
        plan_pipeline(4, 2, schedule=schedule, chunks=1 if schedule == "1F1B" else 2),
        schedule,
        tp=tp,
        config={"sequence_parallel": tp > 1},
        ddp={
            "data_parallel_sharding_strategy": strategy,
            "overlap_grad_reduce": True,
            "overlap_param_gather": strategy == "optim",
        },
    )
    groups = parallel_state.get_process_groups()
    options = OptimizerConfig(optimizer="adam", lr=0.05, weight_decay=0.0, clip_grad=CLIP, adam_eps=1e-3)
    optimizer = get_megatron_optimizer(options, runner.chunks)
    whole = build_whole()
    start = {name: param.detach().clone() for name, param in whole.named_parameters()}
    adam = torch.optim.Adam(whole.parameters(), lr=0.05, betas=(options.adam_beta1, options.adam_beta2), eps=1e-3)
    clipped = 0
    for step in range(steps):
        for chunk in runner.chunks:
            chunk.zero_grad_buffer()
        data_rank, data_ranks = groups.rank("dp"), groups.size("dp")
        outcome = runner.step([microbatch(data_rank, COUNT * step + n) for n in range(COUNT)])
        _, norm, _ = optimizer.step()

        adam.zero_grad()
        total = 0.0
        for other in range(data_ranks):
            for number in range(COUNT):
                batch = microbatch(other, COUNT * step + number)
                value = (whole(batch["tokens"], labels=batch["labels"]) * batch["loss_mask"]).sum()
                value = value / batch["loss_mask"].sum() / COUNT
                (value / data_ranks).backward()
                total += value.item() if other == data_rank else 0.0
        expected_norm = torch.nn.utils.clip_grad_norm_(whole.parameters(), CLIP).item()
        adam.step()
        assert outcome.loss.item() == pytest.approx(total, rel=1e-6)
        assert float(norm) == pytest.approx(expected_norm, rel=1e-6)
        clipped += expected_norm > CLIP
    assert clipped > steps / 4

    trained = dict(whole.named_parameters())
    for chunk, number in zip(runner.chunks, runner.stage_numbers, strict=True):
        for name, param in chunk.module.named_parameters():
            full = full_name(name, runner.layout.stage(number).layer_numbers, tied=True)
            want = trained[full].detach()
            assert (want - start[full]).norm() > 1e-2, f"{full} has hardly moved"
            if getattr(param, "tensor_model_parallel", False):
                want = tensor_parallel_slice(
                    want, param.partition_dim, groups.size("tp"), groups.rank("tp"), param.partition_stride
                )
            torch.testing.assert_close(
                param.detach(), want, rtol=1e-6, atol=1e-6, msg=lambda m, full=full: f"{full}: {m}"
            )
    dist.barrier()


@ranks(2)
@pytest.mark.parametrize("frozen", [0, 1], ids=["first", "last"])
@pytest.mark.parametrize("strategy", ["no_shard", "optim_grads_params"])
@pytest.mark.in_suite()
def test_our_optimizer_steps_measures_and_saves_where_a_stage_trains_nothing(
    rank: int, world: int, frozen: int, strategy: str, tmp_path: Path
) -> None:
    """`get_grad_norm` after a step once measured again on the frozen stage alone, and waited."""
    untied = {"share_embeddings_and_output_weights": False}

    def prepare(stages: list[GPTModel]) -> None:
        for stage in stages if rank == frozen else ():
            stage.requires_grad_(False)

    layout = plan_pipeline(4, 2)
    runner = start_pipeline(
        layout, "1F1B", config=untied, ddp={"data_parallel_sharding_strategy": strategy}, prepare=prepare
    )
    optimizer = get_megatron_optimizer(OptimizerConfig(optimizer="adam", lr=0.05, clip_grad=CLIP), runner.chunks)
    whole = build_whole(**untied)
    numbers = layout.stage(1 - frozen).layer_numbers
    ends = ("embedding.",) if frozen else ("output_layer.", "decoder.final")
    for name, param in whole.named_parameters():
        param.requires_grad_(name.startswith((*(f"decoder.layers.{n}." for n in numbers), *ends)))
    for step in range(3):
        runner.chunks[0].zero_grad_buffer()
        batches = [microbatch(0, COUNT * step + n) for n in range(2)]
        runner.step(batches)
        expected = optimizer.get_grad_norm()
        assert optimizer.step()[1] == expected
        assert optimizer.get_grad_norm() == optimizer.get_grad_norms()[None] == expected
        if step == 0:
            for batch in batches:
                value = (whole(batch["tokens"], labels=batch["labels"]) * batch["loss_mask"]).sum()
                (value / batch["loss_mask"].sum() / 2).backward()
            grads = [param.grad for param in whole.parameters() if param.grad is not None]
            assert expected == pytest.approx(float(torch.nn.utils.get_total_norm(grads)), rel=1e-9)
    optimizer.load_state_dict(optimizer.state_dict())
    save_checkpoint(tmp_path, 3, runner.chunks, optimizer)
    losses = [float(runner.evaluate(batches).loss)]
    runner.chunks[0].zero_grad_buffer()
    runner.step(batches)
    optimizer.step()
    losses.append(float(runner.evaluate(batches).loss))
    load_checkpoint(tmp_path, runner.chunks, optimizer)
    assert float(runner.evaluate(batches).loss) == losses[0] != losses[1]
    runner.chunks[0].zero_grad_buffer()
    runner.step(batches)
    optimizer.step()
    assert float(runner.evaluate(batches).loss) == pytest.approx(losses[1], rel=1e-9)
