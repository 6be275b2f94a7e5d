"""The programs in the README and in the docs run, and do what the text around them says."""

import contextlib
import dataclasses
import io
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from core.groups.process_groups import ProcessGroups
from core.models.gpt import GPTModel
from core_train import plots
from tests.unit_tests.ranks import as_torchrun_starts, ranks

ROOT = Path(__file__).parents[2]
OWN_LOOP = ROOT / "docs" / "source" / "your_own_loop.md"
EXAMPLE = ROOT / "examples" / "my_loop.py"
ARCHITECTURE = ROOT / "docs" / "source" / "architecture.md"


def program_of(page: Path, language: str = "python", *, begin: str = "", end: str = "") -> str:
    """All blocks of a page in a language, each line at its line number in the page.

    begin, end: headings between which the blocks are taken; without them the page's beginning and end.
    """
    lines, inside, wanted = [], False, not begin
    for line in page.read_text().splitlines():
        wanted = (wanted or line == (begin or None)) and line != (end or None)
        inside = line == f"```{language}" or (inside and line != "```")
        lines.append(line if wanted and inside and line != f"```{language}" else "")
    return "\n".join(lines)


def run_page(page: Path, monkeypatch: pytest.MonkeyPatch, *, begin: str = "", end: str = "") -> dict[str, Any]:
    """Run a page's program, or a part's, in the group that the test has already; answer with its names."""
    names: dict[str, Any] = {"__name__": "page"}
    monkeypatch.setattr(dist, "init_process_group", lambda backend: None)
    exec(compile(program_of(page, begin=begin, end=end), str(page), "exec"), names)
    return names


def stepped(model: torch.nn.Module, optimizer: torch.optim.Optimizer, batches: list[Any], steps: int = 1) -> None:
    """The reference: one process, the whole batch."""
    optimizer.zero_grad()
    inputs, targets = (torch.cat(parts) for parts in zip(*batches, strict=True))
    F.mse_loss(model(inputs), targets).backward()
    optimizer.step()


def assert_same_weights(model: torch.nn.Module, reference: torch.nn.Module, start: torch.nn.Module) -> None:
    for ours, theirs, before in zip(model.parameters(), reference.parameters(), start.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
        assert (theirs - before).abs().max() > 3e-4, "the reference has hardly moved, so equality says nothing"


@ranks(1, 4)
def test_the_loop_in_the_readme_trains_like_one_process_on_the_whole_batch(rank: int, world: int) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        names = run_page(ROOT / "README.md", monkeypatch)

    def new_model() -> torch.nn.Module:
        torch.manual_seed(0)
        return torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.GELU(), torch.nn.Linear(64, 1))

    reference = new_model()
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.02)
    data = [torch.Generator().manual_seed(r) for r in range(world)]
    for _ in range(50):
        inputs = [torch.randn(32, 16, generator=generator) for generator in data]
        stepped(reference, optimizer, [(x, x.sum(1, keepdim=True)) for x in inputs])
    assert_same_weights(names["model"].module, reference, new_model())


@ranks(2)
def test_the_loop_on_sharded_parameters_trains_like_one_process(rank: int, world: int) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        names = run_page(ROOT / "docs" / "source" / "sharded_parameters.md", monkeypatch)

    def new_model() -> torch.nn.Module:
        torch.manual_seed(0)
        return torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.GELU(), torch.nn.Linear(64, 1))

    reference, trained = new_model(), new_model()
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.02)
    data = [torch.Generator().manual_seed(r) for r in range(world)]
    for _ in range(50):
        inputs = [torch.randn(32, 16, generator=generator) for generator in data]
        stepped(reference, optimizer, [(x, x.sum(1, keepdim=True)) for x in inputs])
    trained.load_state_dict(names["weights"])
    assert_same_weights(trained, reference, new_model())


@ranks(4)
def test_the_page_on_your_own_loop_does_what_it_says(rank: int, world: int) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        names = run_page(OWN_LOOP, monkeypatch)
    new_model = names["new_model"]

    def batches(step: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        seeds = [100 * step + r for r in range(world)]
        inputs = [torch.randn(16, 8, generator=torch.Generator().manual_seed(seed)) for seed in seeds]
        return [(x, x.sum(dim=1, keepdim=True)) for x in inputs]

    reference = new_model()
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.05)
    for step in range(3):
        stepped(reference, optimizer, batches(step))
    stepped(reference, optimizer, [batch for step in range(10, 14) for batch in batches(step)])
    assert_same_weights(names["model"].module, reference, new_model())

    sharded = new_model()
    adam = torch.optim.AdamW(
        [{"params": [p for p in sharded.parameters() if p.dim() > 1]},
         {"params": [p for p in sharded.parameters() if p.dim() == 1], "weight_decay": 0.0}],
        lr=0.01, weight_decay=0.01,
    )  # fmt: skip
    for step in range(3):
        inputs, targets = (torch.cat(parts) for parts in zip(*batches(step), strict=True))
        adam.zero_grad()
        F.mse_loss(sharded(inputs), targets).backward()
        norm = torch.nn.utils.clip_grad_norm_(sharded.parameters(), 1.0)
        adam.step()
    assert_same_weights(names["sharded"].module, sharded, new_model())
    assert names["updated"] and names["grad_norm"] == pytest.approx(norm.item(), rel=1e-4)

    per_token = new_model()
    kept = [(x[: 4 * r], y[: 4 * r]) for r, (x, y) in enumerate(batches(20))]
    inputs, targets = (torch.cat(parts) for parts in zip(*kept, strict=True))
    F.mse_loss(per_token(inputs), targets).backward()
    for ours, theirs in zip(names["per_token"].module.parameters(), per_token.parameters(), strict=True):
        torch.testing.assert_close(ours.main_grad, theirs.grad)

    whole_config = dataclasses.replace(names["config"], tensor_model_parallel_size=1, sequence_parallel=False)
    whole = GPTModel(whole_config, pg_collection=ProcessGroups())
    tokens = torch.cat([torch.randint(64, (2, 17), generator=torch.Generator().manual_seed(r)) for r in range(2)])
    whole(tokens[:, :-1], labels=tokens[:, 1:]).mean().backward()
    reference_grads = {name: param.grad for name, param in whole.named_parameters()}
    compared = 0
    for name, param in names["gpt"].module.named_parameters():
        if param.shape == reference_grads[name].shape:  # not split: norms and biases of row-split layers
            torch.testing.assert_close(param.main_grad, reference_grads[name], atol=1e-6, rtol=1e-4)
            compared += 1
    assert compared > 8


def assert_losses_fall(printed: str) -> None:
    losses = [float(loss) for loss in re.findall(r"^step \d+: loss (\S+)$", printed, flags=re.MULTILINE)]
    assert len(losses) == 5 and losses[-1] < 0.1 * losses[0], printed


@ranks(2)
def test_the_readme_loop_is_an_example_that_prints_falling_losses(rank: int, world: int) -> None:
    assert EXAMPLE.read_text().strip() == program_of(ROOT / "README.md").strip()
    with as_torchrun_starts(rank, world), contextlib.redirect_stdout(io.StringIO()) as printed:
        runpy.run_path(str(EXAMPLE), run_name="__main__")
    if rank == 0:
        assert_losses_fall(printed.getvalue())


@pytest.mark.nightly
def test_the_readme_loop_runs_under_torchrun() -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(EXAMPLE)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr
    assert_losses_fall(done.stdout)


def test_the_readme_example_fits_a_glance_and_names_both_commands() -> None:
    readme = (ROOT / "README.md").read_text()
    assert len([line for line in program_of(ROOT / "README.md").splitlines() if line.strip()]) <= 22
    assert "make train" in readme and "make test" in readme and "make nightly" in readme


@ranks(2)
def test_the_test_in_the_page_for_contributors_passes(rank: int, world: int) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        names = run_page(ROOT / "CONTRIBUTING.md", monkeypatch)
    names["test_a_sum_over_ranks_is_the_sum"].rank_function(rank, world)


def test_the_page_on_plans_does_what_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    assert run_page(ROOT / "docs" / "source" / "plan.md", monkeypatch)["plan"].fits


def anchors(page: Path) -> set[str]:
    """What a link's part behind # can name: the headings of a page, in small letters with hyphens."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), flags=re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading).strip().lower().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md"])
def test_links_and_pictures_of_a_page_outside_of_the_docs_lead_somewhere(page: str) -> None:
    text = (ROOT / page).read_text()
    targets = re.findall(r"\]\(([^)\s]+)\)|(?:src|srcset)=\"([^\"]+)\"", text)
    found = [link or picture for link, picture in targets if "://" not in link]
    assert found
    for target in found:
        path, _, anchor = target.partition("#")
        assert (ROOT / path).exists(), target
        assert not anchor or anchor in anchors(ROOT / (path or page)), target
    assert text.count("<img") == len(re.findall(r'<img [^>]*alt="[^"]{20,}"', text)), "a picture without words"


def test_the_pictures_of_a_run_are_drawn_for_light_and_for_dark_pages(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    script = runpy.run_path(str(ROOT / "docs" / "draw_run.py"))

    def draw(path: Path, width: float) -> None:
        picture = plots.figure(width, 1)
        picture.text(0.5, 0.5, "words")
        picture.savefig(path)

    script["in_both_themes"](draw, tmp_path)(tmp_path / "loss.png", 2.0)
    assert (tmp_path / "loss.png").exists()
    drawn = {theme: (tmp_path / f"loss_{theme}.svg").read_text() for theme in ("light", "dark")}
    for theme, other in (("light", "dark"), ("dark", "light")):
        assert script["THEMES"][theme] in drawn[theme] and script["THEMES"][other] not in drawn[theme]
        assert "fill: #ffffff" not in drawn[theme], "a background"
    pictures = {f"{name}_{theme}.svg" for name in ("loss", "buckets") for theme in script["THEMES"]}
    assert pictures == {path.name for path in script["PICTURES"].iterdir()}


def test_files_named_in_the_docs_exist() -> None:
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs" / "source").rglob("*.md")]
    missing = []
    for page in pages:
        for name in re.findall(r"`((?:core|tests|docs|benchmarks)/[\w./]*)`", page.read_text()):
            if not (ROOT / name).exists():
                missing.append(f"{page.relative_to(ROOT)}: {name}")
    assert not missing, missing
