"""Where stages lie, and what is refused before any group exists: numbers that make no pipeline."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from core import parallel_state
from core.pipeline_parallel import (
    SCHEDULES,
    MicrobatchLoss,
    PipelineLayout,
    PipelineRunner,
    build_gpt_stages,
    gpt_activations,
    plan_pipeline,
)
from core.pipeline_parallel.schedules import check_microbatches, find_schedule
from tests.unit_tests.pipeline_parallel.pipeline_reference import make_config, microbatch, start_pipeline
from tests.unit_tests.ranks import ranks


def test_layers_are_dealt_in_order() -> None:
    layout = PipelineLayout((1, 0, 3, 2), pp=2)
    assert [list(layout.stage(n).layer_numbers) for n in range(4)] == [[0], [], [1, 2, 3], [4, 5]]
    assert [(layout.stage(n).pre_process, layout.stage(n).post_process) for n in (0, 1, 3)] == [
        (True, False),
        (False, False),
        (False, True),
    ]
    assert [layout.stages_of(rank) for rank in (0, 1)] == [(0, 2), (1, 3)]
    assert (layout.num_layers, layout.chunks, layout.last_rank, layout.ends_share_a_rank) == (6, 2, 1, False)
    assert layout.embedding_ranks([4, 6]) == [4, 6]


def test_a_v_turns_around_on_the_last_rank() -> None:
    layout = PipelineLayout.even(6, pp=3, chunks=2, placement="v")
    assert [layout.stages_of(rank) for rank in range(3)] == [(0, 5), (1, 4), (2, 3)]
    assert (layout.last_rank, layout.ends_share_a_rank, layout.embedding_ranks([1, 3, 5])) == (0, True, [1])


def test_one_rank_holds_everything() -> None:
    layout = PipelineLayout.even(3, pp=1)
    assert (layout.stage(0).pre_process, layout.stage(0).post_process, layout.ends_share_a_rank) == (True, True, False)
    assert layout.embedding_ranks([7]) == [7]


def test_embedding_and_head_may_count_as_layers() -> None:
    assert PipelineLayout.even(6, 4, count_embedding=True, count_head=True).layers_per_stage == (1, 2, 2, 1)
    assert PipelineLayout.even(7, 4, count_head=True).layers_per_stage == (2, 2, 2, 1)


def test_the_description_names_what_lies_where() -> None:
    assert PipelineLayout((2, 0, 1, 1), 2).describe() == (
        "rank 0: stage 0 (embeddings, layers 0-1); stage 2 (layers 2-2)\n"
        "rank 1: stage 1 (no layers); stage 3 (layers 3-3, head, loss)"
    )


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "layers that do not divide": (
        dict(num_layers=10, pp=4),
        r"10 layers do not divide over 4 stages \(pp 4 x 1 chunks\): 10 / 4 = 2.5. Use 8 or 12 layers, or pp 2 or 5; "
        r"or say how many each stage gets, layers_per_stage=\[2, 3, 3, 2\]",
    ),
    "layers over chunks": (
        dict(num_layers=12, pp=4, chunks=2, schedule="Interleaved1F1B"),
        r"over 8 stages \(pp 4 x 2 chunks\): 12 / 8 = 1.5. Use 8 or 16 layers, or pp 3 or 6",
    ),
    "layers with embedding and head": (
        dict(num_layers=8, pp=4, count_embedding=True, count_head=True),
        r"8 layers \+ 2 for embedding and head do not divide .*10 / 4 = 2.5. Use 6 or 10 layers",
    ),
    "fewer layers than stages": (dict(num_layers=1, pp=2), r"1 / 2 = 0.5. Use 2 layers, or pp 1"),
    "a layout for another model": (
        dict(num_layers=8, pp=2, layers_per_stage=(3, 4)),
        r"\[3, 4\] places 7 layers, and the model has 8; for example \[4, 4\]",
    ),
    "stages that ranks cannot share": (
        dict(num_layers=6, pp=2, layers_per_stage=(2, 2, 2)),
        r"names 3 stages, which 2 ranks cannot share evenly \(3 / 2 = 1.5\); name 2 or 4 stages",
    ),
    "a negative number of layers": (dict(num_layers=2, pp=2, layers_per_stage=(3, -1)), "integers of at least 0"),
    "no rank": (dict(num_layers=2, pp=0), "at least 1"),
    "chunks under 1F1B": (
        dict(num_layers=8, pp=2, chunks=2),
        "schedule 1F1B runs one stage a rank, and the layout has 2 .* or Interleaved1F1B",
    ),
    "chunks beside a list": (
        dict(num_layers=4, pp=2, layers_per_stage=(2, 2), chunks=2, schedule="Interleaved1F1B"),
        "names 2 stages, 1 on each of 2 ranks, and chunks is 2; name 4 stages",
    ),
    "a V of three": (
        dict(num_layers=6, pp=2, chunks=3, schedule="ZBVZeroBubble"),
        "placement 'v' has 2 stages a rank, so 4 on 2 ranks; layers_per_stage names 6",
    ),
    "an unknown schedule": (dict(num_layers=4, pp=2, schedule="2F1B"), "'2F1B'; expected one of GPipe, 1F1B, "),
    "1F1B with too few microbatches": (
        dict(num_layers=4, pp=4, microbatches=3),
        r"3 microbatches do not fit schedule 1F1B with 4 stages on 4 ranks: at least one .* Nearest: 4$",
    ),
    "DualPipeV with too few microbatches": (
        dict(num_layers=4, pp=2, schedule="DualPipeV", microbatches=3),
        "3 microbatches do not fit schedule DualPipeV with 4 stages on 2 ranks: .* Nearest: 4$",
    ),
    "rounds that are not whole": (
        dict(num_layers=8, pp=4, chunks=2, schedule="Interleaved1F1B", microbatches=11),
        r"11 microbatches .* rounds. Nearest: 10 or 12$",
    ),
    "no microbatch": (dict(num_layers=4, pp=2, schedule="GPipe", microbatches=0), "at least one .* Nearest: 1$"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_plan_that_does_not_fit_is_refused_with_the_nearest_that_does(case: str) -> None:
    arguments, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        plan_pipeline(**arguments)


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("pp", [2, 3])
def test_our_rules_for_microbatches_are_those_of_torch(name: str, pp: int) -> None:
    """Built on no process: torch's constructors only read these attributes of a stage."""
    from types import SimpleNamespace

    from core.pipeline_parallel.schedules import build_schedule

    kind = find_schedule(name)
    layout = plan_pipeline(2 * pp, pp, schedule=name, chunks=2 if kind.many_chunks else 1)
    for microbatches in range(1, 12):
        stages = [
            SimpleNamespace(
                num_stages=layout.num_stages, group_size=pp, group_rank=0, stage_index=n, submod=nn.Identity()
            )
            for n in layout.stages_of(0)
        ]
        legal = True
        try:
            check_microbatches(kind, layout, microbatches)
        except ValueError:
            legal = False
        if legal:
            build_schedule(kind, stages, microbatches)
        else:
            with pytest.raises(ValueError):
                build_schedule(kind, stages, microbatches)


def test_a_sequence_that_does_not_divide_is_refused() -> None:
    config = make_config(tensor_model_parallel_size=2, sequence_parallel=True)
    with pytest.raises(ValueError, match=r"7 is not divisible by .* 7 / 2 = 3.5; use 6 or 8"):
        gpt_activations(config, 1, 7)
    assert gpt_activations(config, 3, 8)[0].shape == (4, 3, 8)
    split = make_config(context_parallel_size=2)
    with pytest.raises(ValueError, match=r"6 is not divisible by 2 \* context_parallel_size .*6 / 4 = 1.5; use 4 or 8"):
        gpt_activations(split, 1, 6)  # divides by cp, and not by its 2 * cp chunks
    assert gpt_activations(split, 3, 8)[0].shape == (4, 3, 8)


@ranks(2)
def test_what_a_rank_knows_is_refused_before_it_communicates(rank: int, world: int) -> None:
    """Rank 0 alone makes each mistake: an error that communicated would hang."""
    runner = start_pipeline(PipelineLayout.even(4, pp=2), "1F1B")
    if rank == 1:
        return
    shape = runner.activations
    step = runner.forward_step
    with pytest.raises(ValueError, match="1 microbatches do not fit schedule 1F1B .* Nearest: 2$"):
        runner.step([microbatch(0, 0)])
    with pytest.raises(ValueError, match=r"holds stages \[0\] and was given 2 chunks"):
        PipelineRunner(runner.chunks * 2, runner.layout, step, shape)
    with pytest.raises(ValueError, match=r"for 4 pipeline ranks and group 'pp' \[0, 1\] has 2"):
        PipelineRunner(runner.chunks, PipelineLayout.even(4, 4), step, shape)
    with pytest.raises(ValueError, match="DualPipeV needs placement 'v'"):
        PipelineRunner(runner.chunks, runner.layout, step, shape, schedule="DualPipeV")
    config = make_config(pipeline_model_parallel_size=2, no_sync_func=[None, None])
    with pytest.raises(ValueError, match="no_sync_func holds 2 functions, and this rank has 1 chunks"):
        PipelineRunner(runner.chunks, runner.layout, step, shape, config=config)
    with pytest.raises(ValueError, match="places 4 layers, and the model has 5"):
        build_gpt_stages(make_config(pipeline_model_parallel_size=2, num_layers=5), runner.layout)
    with pytest.raises(ValueError, match="the layout has 2 pipeline ranks of 1 chunks, and the config says"):
        build_gpt_stages(make_config(), runner.layout)
    v_config = make_config(pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=2)
    with pytest.raises(
        ValueError, match=r"embedding is on ranks \[0\], but group 'embd' has \[0, 1\].*embedding_ranks="
    ):
        build_gpt_stages(v_config, plan_pipeline(4, 2, schedule="ZBVZeroBubble"))


@ranks(1)
def test_a_loss_that_is_no_number_or_lacks_its_tokens_is_refused(rank: int, world: int) -> None:
    parallel_state.initialize_model_parallel()
    model = nn.Linear(2, 2)

    def run(loss: Any, **config: Any) -> None:
        layout = PipelineLayout((1,), 1)
        PipelineRunner([model], layout, lambda *_: loss, (), config=make_config(**config)).evaluate([None])

    with pytest.raises(ValueError, match=r"gave shape \[2\] as the loss of microbatch 0; expected one number"):
        run(torch.ones(2))
    with pytest.raises(ValueError, match="gave None as the loss"):
        run(None)
    with pytest.raises(ValueError, match="calculate_per_token_loss, and the forward step .* gave no num_tokens"):
        run(MicrobatchLoss(torch.ones(())), calculate_per_token_loss=True)


@ranks(2)
def test_an_activation_of_another_shape_is_named_on_all_ranks(rank: int, world: int) -> None:
    runner = start_pipeline(
        PipelineLayout.even(4, pp=2), "1F1B", activations=[torch.empty(5, 2, 8, dtype=torch.float64)]
    )
    with pytest.raises(
        ValueError, match=r"stage 0 was declared to send \[\(\[5, 2, 8\], torch.float64\)\] and its .*8, 2, 8"
    ):
        runner.evaluate([microbatch(0, 0)])


@ranks(2)
def test_an_error_of_the_model_leaves_as_it_is(rank: int, world: int) -> None:
    runner = start_pipeline(PipelineLayout.even(4, pp=2), "1F1B")
    if rank == 0:
        stage = runner._schedule(2, runner.activations)[1][0]
        stage.args_recv_info[0] = ()
        stage.run_chunk = lambda number, received: [][number]
        with pytest.raises(IndexError, match="list index out of range"):
            stage.forward_one_chunk(0, (), {})
