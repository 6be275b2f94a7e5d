"""The page on checkpoints: its program resumes at another strategy and after a signal; it quotes what the code says."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from core.checkpoint.directory import find_intact, list_steps
from core.checkpoint.save import LAYOUT_AXES
from tests.unit_tests.checkpoint.checkpoint_saves import save_alone
from tests.unit_tests.ranks import ranks
from tests.unit_tests.test_docs import ROOT, run_page

PAGE = ROOT / "docs" / "source" / "checkpoints.md"


@ranks(2)
def test_the_program_of_the_page_continues_where_it_was(rank: int, world: int) -> None:
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

    # The last rank got a signal in step 7.
    assert names["step"] == 8 and names["last"].step == 8
    assert list_steps(names["folder"][0]) == [6, 8]
    assert names["stop"].reason == f"rank {world - 1} got SIGTERM"
    assert all(torch.isfinite(param).all() for param in names["safe"].module.parameters())
    dist.barrier()
    if rank == 0:
        for folder in ("root", "trees", "folder"):
            shutil.rmtree(names[folder][0])


def test_the_sizes_that_random_streams_depend_on_are_those_of_the_page() -> None:
    (sizes,) = re.findall(r"all parallel sizes \(([a-z, ]+)\)", PAGE.read_text())
    assert sorted(sizes.split(", ")) == sorted(LAYOUT_AXES)


def test_the_quoted_warning_is_what_the_code_says(tmp_path: Path) -> None:
    text = PAGE.read_text()
    save_alone(tmp_path, 6, 8)
    path = tmp_path / "step_00000008.0002" / "rank_00000_000.distcp"
    data = bytearray(path.read_bytes())
    data[900] ^= 1
    path.write_bytes(data)
    with pytest.warns(RuntimeWarning) as heard:
        find_intact(tmp_path)
    said = str(heard[0].message)
    (quoted,) = re.findall(r"```text\n(Checkpoint of step 8.*?)```", text, flags=re.DOTALL)

    def without_values(message: str) -> str:
        for pattern in (r"\S*/(?=step_)", r"[0-9a-f]{8}", r"rank_\d+_\d+", r"\d+", r"'[^']*'"):
            message = re.sub(pattern, "", message)
        return " ".join(message.split())

    assert without_values(said) == without_values(quoted)
