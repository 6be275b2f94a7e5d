"""A GPT in stages trains as the whole GPT does: every gradient and the loss against one process, in fp64."""

from __future__ import annotations

import pytest

from core.pipeline_parallel import PipelineLayout
from tests.unit_tests.pipeline_reference import build_whole, check_steps, start_pipeline
from tests.unit_tests.ranks import ranks


@ranks(2)
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_two_stages_under_1f1b(rank: int, world: int, tied: bool) -> None:
    runner = start_pipeline(PipelineLayout.even(4, pp=2), "1F1B", config={"share_embeddings_and_output_weights": tied})
    check_steps(runner, build_whole(share_embeddings_and_output_weights=tied), 3)
