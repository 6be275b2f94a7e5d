"""The picture of a report: a row a module, a cell a rank, the culprit marked."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree

import pytest

from core.verify.picture import COLOURS, svg
from core.verify.place import Measured, Row, Where

NAMESPACE = "{http://www.w3.org/2000/svg}"
WHERE = Where(
    (
        Row("embedding", {0: Measured(0.0, 0.0), 1: Measured(1e-12, 1e-2)}, {0: Measured(0.5, 5e9)}),
        Row("layers.0<1>", {0: Measured(1e-12, 1e-3), 1: Measured(0.2, 2e9)}, {}),
        Row("", {}, {}),
    ),
    forward="layers.0<1>",
)


@pytest.mark.parametrize("dark", [False, True])
def test_a_picture_has_a_row_a_module_and_a_cell_a_rank(dark: bool) -> None:
    text, right, wrong, nothing, _, here = COLOURS[dark]
    root = ElementTree.fromstring(svg(WHERE, dark=dark))
    boxes = [box.attrib for box in root.iter(f"{NAMESPACE}rect")]
    colours = [box["fill"] for box in boxes]
    assert colours[:4] == [right, right, wrong, nothing], "the embedding: two outputs, two gradients"
    assert colours[4:9] == [here, right, wrong, nothing, nothing], "the row of the culprit lies under its cells"
    assert colours[9:] == [nothing] * 4
    words = [word.text for word in root.iter(f"{NAMESPACE}text")]
    assert [word for word in words if word in ("=", "-2.0", "9.7", "-3.0", "9.3")] == [
        "=",
        "-2.0",
        "9.7",
        "-3.0",
        "9.3",
    ]
    assert "layers.0<1>" in words and "the whole model" in words and words.count("← here") == 1
    assert text in (root.find(f"{NAMESPACE}style").text or "")  # type: ignore[union-attr]
    width, height = float(root.attrib["width"]), float(root.attrib["height"])
    assert all(float(b["x"]) + float(b["width"]) <= width and float(b["y"]) < height for b in boxes)


def test_a_report_without_modules_has_a_picture() -> None:
    ElementTree.fromstring(svg(Where(())))
