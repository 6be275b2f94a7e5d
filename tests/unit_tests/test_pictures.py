"""The pictures of the docs are those that docs/pictures.py draws, and pages show both palettes with a text for each."""

from __future__ import annotations

import re
import runpy
import xml.etree.ElementTree as ElementTree
from typing import Any

import pytest

from tests.unit_tests.test_docs import ROOT

DRAWN: dict[str, Any] = runpy.run_path(str(ROOT / "docs" / "pictures.py"))
PAGES = "".join(page.read_text() for page in sorted((ROOT / "docs" / "source").glob("*.md")))


@pytest.mark.parametrize("palette", list(DRAWN["PALETTES"]))
@pytest.mark.parametrize("name", list(DRAWN["PICTURES"]))
def test_a_picture_is_drawn_as_it_is_kept_and_is_on_a_page(name: str, palette: str) -> None:
    text = DRAWN["drawn"](name, palette)
    assert (DRAWN["FOLDER"] / f"{name}_{palette}.svg").read_text() == text, "run python docs/pictures.py"
    ElementTree.fromstring(text)
    assert f"{{picture}} pictures/{name}.svg\n" in PAGES


def test_what_the_terminal_shows_is_what_the_readme_quotes() -> None:
    readme = (ROOT / "README.md").read_text()
    for line in DRAWN["TERMINAL"]:
        assert line.removeprefix("$ ").removesuffix(" ...") in readme, line


def test_every_picture_has_a_form_for_dark_pages_a_transparent_ground_and_words() -> None:
    assert not re.findall(r"!\[.*\]\(.*\.(?:png|svg)\)", PAGES), "a picture for light pages only"
    pictures = re.findall(r"^```\{picture\} (\S+)\.(svg|png)\n(.+)\n```$", PAGES, flags=re.MULTILINE)
    assert len(pictures) == PAGES.count("{picture}") > 10 and "{image}" not in PAGES
    shown = [(*picture, kind) for picture in pictures for kind in ("light", "dark")]
    source = ROOT / "docs" / "source"
    assert {path.suffix for path in source.rglob("*.*g")} == {".svg", ".png"}
    assert {path.relative_to(source).as_posix() for path in source.rglob("*.*g")} == {
        f"{stem}_{kind}.{suffix}" for stem, suffix, _, kind in shown
    }
    for stem, suffix, words, kind in shown:
        assert len(words) > 60, stem
        path = source / f"{stem}_{kind}.{suffix}"
        if suffix == "png":
            corner = pytest.importorskip("matplotlib.image").imread(path)[0, 0]
            assert corner[3] == 0, path
        else:
            width = re.search(r"viewBox=.0 0 (\S+) (\S+?).>?\s", path.read_text())
            assert width is None or f'width="{width[1]}" height="{width[2]}" fill="#ffffff"' not in path.read_text()
