"""The page of what users expect: no empty cell, every link leads somewhere, and the numbered rows do what they say."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

from tests.unit_tests.ranks import ranks
from tests.unit_tests.test_docs import ROOT, run_page

SOURCE = ROOT / "docs" / "source"
PAGE = SOURCE / "expectations.md"
NUMBERED = 12


def rows() -> list[list[str]]:
    found = [line for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    cells = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in found]
    return [row for row in cells if row[0] != "you expect"]


def anchors_of(text: str) -> set[str]:
    """As the docs make them of headings: small letters, hyphens for blanks, no other signs."""
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_the_table_has_no_empty_cell() -> None:
    assert len(rows()) > 50
    for row in rows():
        assert len(row) == 3 and all(len(cell) > 1 for cell in row), row


def test_every_row_has_a_link_or_is_in_the_program_and_links_lead_somewhere() -> None:
    wrong = []
    for row in rows():
        links = re.findall(r"\]\(([^)#]+)(?:#([^)]+))?\)", row[2])
        shown = re.search(r"\(\d+\)$", row[0])
        if not links and not shown and "`" not in row[2] and "torch" not in row[2]:
            wrong.append(f"{row[0]}: neither a link nor a name")
        for name, anchor in links:
            target = SOURCE / name
            if not target.is_file():
                wrong.append(f"{row[0]}: there is no {name}")
            elif anchor and anchor not in anchors_of(target.read_text()):
                wrong.append(f"{row[0]}: {name} has no heading {anchor}")
    assert not wrong, wrong


def test_every_numbered_row_is_in_the_program() -> None:
    told = {int(number) for row in rows() for number in re.findall(r"\((\d+)\)$", row[0])}
    program = PAGE.read_text().partition("```python")[2]
    assert told == {int(number) for number in re.findall(r"# \((\d+)\)", program)} == set(range(1, NUMBERED + 1))


@ranks(2)
def test_the_program_does_what_the_rows_say(rank: int, world: int) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        names = run_page(PAGE, monkeypatch)
    model, plain, start = names["model"], names["plain"], names["Net"]()
    assert names["norm"] > 0.1 and names["clipped"] == pytest.approx(0.1, rel=1e-4)
    assert names["optimizer"].param_groups[0]["lr"] == pytest.approx(0.05 / 4)
    for ours, loaded, before in zip(model.parameters(), plain.parameters(), start.parameters(), strict=True):
        assert torch.equal(ours, loaded) and not torch.equal(ours, before)
    inputs = torch.randn(4, 8, generator=torch.Generator().manual_seed(rank))
    torch.testing.assert_close(names["other"], start(inputs))
    averages = dict(names["average"].module.named_parameters())
    assert all(not torch.equal(averages[name], value) for name, value in plain.named_parameters())
    assert sorted(names["listed"]) == sorted(plain.state_dict())
    grads = [[p.grad for p in held.parameters()] for held in (model, names["wrapped_after"])]
    reference = names["Net"]()
    reference.load_state_dict(plain.state_dict())
    for other in range(world):
        data = torch.randn(4, 8, generator=torch.Generator().manual_seed(other))
        with torch.autocast("cpu", torch.bfloat16):
            loss = reference(data).float().square().mean() / world
        loss.backward()
    for compiled in grads:
        for ours, theirs in zip(compiled, reference.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs.grad, atol=2e-2 * float(theirs.grad.abs().max()), rtol=0)
    trained = names["adapted"].module
    assert torch.equal(trained.first.weight, start.first.weight)
    assert not torch.equal(trained.second.weight, start.second.weight)
    assert isinstance(trained, nn.Module)
