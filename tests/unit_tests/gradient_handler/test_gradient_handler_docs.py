"""The programs in the pages on gradient handlers and on accumulation run, and do what the text says."""

import pytest
import torch

from core.booster import Booster
from core.booster.plugin import LowLevelZeroPlugin
from core.gradient_accumulation import accumulate_gradient
from core.gradient_handler import registry
from tests.unit_tests.ranks import ranks
from tests.unit_tests.test_docs import ROOT, run_page


def batch(number: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    inputs = torch.randn(16, 8, generator=torch.Generator().manual_seed(100 * number + rank))
    return inputs, inputs.sum(1, keepdim=True)


def new_model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Linear(8, 1)


def assert_stepped(model: torch.nn.Module, updates: list[list[tuple[torch.Tensor, torch.Tensor]]], **options: float):
    """The reference: one process, one large batch an update."""
    reference = new_model()
    for number, group in enumerate(updates):
        inputs, targets = (torch.cat(parts) for parts in zip(*group, strict=True))
        reference.zero_grad()
        (reference(inputs) - targets).square().mean().backward()
        if "max_norm" in options:
            assert torch.nn.utils.clip_grad_norm_(reference.parameters(), options["max_norm"]) > 1.1
        with torch.no_grad():
            for param in reference.parameters():
                param -= 0.1 * options.get("gamma", 1.0) ** number * param.grad
    for ours, want, before in zip(model.parameters(), reference.parameters(), new_model().parameters(), strict=True):
        torch.testing.assert_close(ours, want, rtol=1e-5, atol=1e-6)
        assert (want - before).abs().max() > 3e-4


@ranks(4)
def test_the_page_on_gradient_handlers_does_what_it_says(rank: int, world: int) -> None:
    known = dict(registry.GRADIENT_HANDLER._modules)
    try:
        with pytest.MonkeyPatch.context() as monkeypatch:
            names = run_page(ROOT / "docs" / "source" / "gradient_handlers.md", monkeypatch)
    finally:
        registry.GRADIENT_HANDLER._modules = known
    assert_stepped(names["model"], [[batch(0, r) for r in range(world)]])
    model, (mean, clamp) = names["model"], names["handlers"]
    for param in model.parameters():
        param.grad = torch.full_like(param, float(rank))
    mean.handle_gradient()
    assert model.bias.grad.item() == 1.5 and mean.bucket_cap_mb == 25
    clamp.handle_gradient()
    assert model.bias.grad.item() == 0.5


def boosted_over_cycles(data: list[tuple[torch.Tensor, torch.Tensor]]) -> torch.nn.Module:
    """Train a boosted model as the page trains a wrapped one."""
    booster = Booster(plugin=LowLevelZeroPlugin(stage=1, precision="fp32", max_norm=1.0))
    plain = new_model()
    model, optimizer, *_ = booster.boost(plain, torch.optim.SGD(plain.parameters(), lr=0.1))
    optimizer, loader, _, _ = accumulate_gradient(model, optimizer, data, 4)
    for inputs, targets in loader:
        optimizer.zero_grad()
        optimizer.backward((model(inputs) - targets).square().mean())
        optimizer.step()
    return model.unwrap()


@ranks(2)
def test_the_page_on_accumulation_does_what_it_says(rank: int, world: int) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        names = run_page(ROOT / "docs" / "source" / "gradient_accumulation.md", monkeypatch)
    cycles = [[batch(number, r) for number in range(4 * c, 4 * c + 4) for r in range(world)] for c in range(2)]
    assert_stepped(names["model"].module, cycles, max_norm=1.0, gamma=0.5)
    assert_stepped(boosted_over_cycles(names["data"]), cycles, max_norm=1.0)
    kept = [tuple(part[: 1 + 5 * r + n] for part in batch(n, r)) for n in range(3) for r in range(world)]
    assert_stepped(names["uneven"].module, [kept])
    assert_stepped(names["resumed"], [[batch(0, rank), batch(1, rank)]])
