"""The program on the page about GeminiPlugin runs, and trains like one process."""

from typing import Any

import pytest
import torch

from tests.unit_tests.ranks import ranks
from tests.unit_tests.test_docs import ROOT, run_page


@ranks(2)
def test_the_page_on_gemini_trains_like_one_process(rank: int, world: int) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        names = run_page(ROOT / "docs" / "source" / "gemini.md", monkeypatch)
    assert len(names["model"].module.reducer.buckets) == 2
    with names["model"].gathered():
        now = {name: param.detach().clone() for name, param in names["model"].unwrap().named_parameters()}
    check(names, now)
    assert all(torch.equal(value.bfloat16(), now[name]) for name, value in names["weights"].items())


def check(names: dict[str, Any], weights: dict[str, torch.Tensor]) -> None:
    """The page's four steps, on one process in fp32."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.GELU(), torch.nn.Linear(64, 16))
    start = [param.detach().clone() for param in model.parameters()]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=4)
    norms = []
    for seeds in [[10 * step + r for r in range(2)] for step in range(4)]:
        optimizer.zero_grad()
        for seed in seeds:
            x = torch.randn(8, 16, generator=torch.Generator().manual_seed(seed))
            ((model(x) - x).square().mean() / len(seeds)).backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
        optimizer.step()
        scheduler.step()
    assert names["grad_norm"] == pytest.approx(norms[3], rel=2e-2)
    for ours, theirs, before in zip(weights.values(), model.parameters(), start, strict=True):
        moved = (theirs - before).norm()
        assert ours.dtype == torch.bfloat16 and moved > 0.03
        assert (ours.float() - theirs).norm() < 0.2 * moved  # Adam makes steps of small gradients, which bf16 rounds
