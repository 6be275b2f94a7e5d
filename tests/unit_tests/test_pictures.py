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
    shown = re.search(rf'\{{image\}} pictures/{name}_{palette}.svg\n:alt: "(.+)"\n:class: only-{palette}\n', PAGES)
    assert shown is not None and len(shown[1]) > 60


def test_what_the_terminal_shows_is_what_the_readme_quotes() -> None:
    readme = (ROOT / "README.md").read_text()
    for line in DRAWN["TERMINAL"]:
        assert line.removeprefix("$ ").removesuffix(" ...") in readme, line
