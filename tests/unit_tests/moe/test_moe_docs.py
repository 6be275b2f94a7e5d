"""The program on the page about experts runs, and trains the same on every rank."""

import pytest
import torch
import torch.distributed as dist

from tests.unit_tests.ranks import ranks
from tests.unit_tests.test_docs import ROOT, run_page


@ranks(4)
def test_the_page_on_experts_does_what_it_says(rank: int, world: int) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        names = run_page(ROOT / "docs" / "source" / "experts.md", monkeypatch)
    losses = names["losses"]
    assert losses[-1] < losses[0] - 0.3
    contracts = names["ddp"].contracts
    for name, param in names["ddp"].module.named_parameters():
        is_expert = ".experts." in name
        assert contracts[name].is_expert == is_expert and contracts[name].divisor == world
        copies = [torch.empty_like(param) for _ in range(world)]
        dist.all_gather(copies, param.detach())
        assert torch.equal(copies[0], copies[2]) and torch.equal(copies[1], copies[3]), name
        assert torch.equal(copies[0], copies[1]) == (not is_expert or "bias" in name) or "bias" in name, name
