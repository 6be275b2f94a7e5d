"""The page on checkpoints: its program resumes at another strategy, its message is the one that comes."""

from __future__ import annotations

import re
import shutil

import pytest
import torch
import torch.distributed as dist

from core.checkpoint.save import LAYOUT_AXES
from tests.unit_tests.ranks import ranks
from tests.unit_tests.test_docs import ROOT, run_page

PAGE = ROOT / "docs" / "source" / "checkpoints.md"


@ranks(2)
def test_the_program_of_the_page_goes_on_where_it_was(rank: int, world: int) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        names = run_page(PAGE, monkeypatch)
    unbroken, resumed = names["model"].module, names["resumed"].module
    start = names["build"]("no_shard")[0].module
    for one, other, before in zip(unbroken.parameters(), resumed.parameters(), start.parameters(), strict=True):
        # Steps after the load are another strategy's: torch's kernels round differently on flat shards.
        torch.testing.assert_close(one, other, rtol=0, atol=1e-7)
        assert (one - before).abs().max() > 1e-3
    assert (names["report"].step, names["report"].extra) == (3, {"samples": 12})
    loaded = names["loaded"]
    assert torch.equal(loaded["average"], torch.arange(3.0) + 3 * rank) and loaded["seen"] == 12
    assert all(torch.equal(loaded["model"][name], value) for name, value in unbroken.state_dict().items())
    dist.barrier()
    if rank == 0:
        shutil.rmtree(names["root"][0])
        shutil.rmtree(names["trees"][0])


def test_the_sizes_that_random_streams_depend_on_are_those_of_the_page() -> None:
    (sizes,) = re.findall(r"all parallel sizes \(([a-z, ]+)\)", PAGE.read_text())
    assert sorted(sizes.split(", ")) == sorted(LAYOUT_AXES)
