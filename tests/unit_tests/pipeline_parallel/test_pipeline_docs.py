"""The page on pipelines: its program trains, its table and its message are the code's."""

from __future__ import annotations

import dataclasses
import re

import pytest
import torch
import torch.distributed as dist

from core.groups.process_groups import ProcessGroups
from core.models import GPTModel
from core.pipeline_parallel import SCHEDULES, plan_pipeline
from tests.unit_tests.ranks import ranks
from tests.unit_tests.test_docs import ROOT, run_page

PAGE = ROOT / "docs" / "source" / "pipeline.md"


@ranks(4)
def test_the_program_of_the_page_trains_two_stages(rank: int, world: int) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        names = run_page(PAGE, monkeypatch)
    losses = names["losses"]
    everywhere = [torch.empty(len(losses), dtype=torch.float64) for _ in range(world)]
    dist.all_gather(everywhere, torch.tensor(losses, dtype=torch.float64))
    assert torch.equal(everywhere[0], everywhere[2])  # the two stages of a data rank
    assert not torch.equal(everywhere[0], everywhere[1])  # two data ranks, two batches
    assert losses[-1] < 0.75 * losses[0]

    whole = GPTModel(dataclasses.replace(names["config"], pipeline_model_parallel_size=1), ProcessGroups())
    generator = torch.Generator().manual_seed(rank % 2)
    values = []
    for _ in range(4):
        tokens = (torch.randint(0, 64, (2, 1), generator=generator) + torch.arange(17)) % 64
        values.append(whole(tokens[:, :-1], labels=tokens[:, 1:]).mean().item())
    assert sum(values) / 4 == pytest.approx(losses[0], rel=1e-5)


def test_the_table_lists_every_schedule() -> None:
    rows = dict(re.findall(r"^\| `(\w+)` \|.*\| ([\w, ]+) \|$", PAGE.read_text(), flags=re.MULTILINE))
    assert list(rows) == list(SCHEDULES)
    for name, when in rows.items():
        assert when.startswith("later") == SCHEDULES[name].splits_backward


def test_the_message_on_the_page_is_the_one_that_comes() -> None:
    with pytest.raises(ValueError) as refused:
        plan_pipeline(10, 4)
    assert str(refused.value) in " ".join(PAGE.read_text().split())
