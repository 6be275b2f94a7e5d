"""Pictures of a plan: what they show, and the page's own."""

from __future__ import annotations

import re
import runpy
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from core.plan.command import main
from tests.unit_tests.test_docs import ROOT

matplotlib = pytest.importorskip("matplotlib")


def test_a_plan_is_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = (
        "--ranks 4 --tp 1 --pp 2 --global-batch 8 --model.num-layers 4 --model.hidden-size 64 --model.vocab-size 256"
    )
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        assert main([*flags.split(), "--picture", str(tmp_path / "pictures")]) == 0
    drawn = {path.stem: path.read_text() for path in (tmp_path / "pictures").iterdir()}
    assert set(drawn) == {"memory", "time_line", "roofline"}
    words = {
        name: {text.text for text in ElementTree.fromstring(svg).iter() if text.tag.endswith("text")}
        for name, svg in drawn.items()
    }
    assert {"parameters", "gradients", "activations", "GiB"} <= words["memory"]
    assert {"rank 0", "rank 2", "forward", "backward", "optimizer"} <= words["time_line"]
    assert {"dp_cp", "pp"} <= words["roofline"]
    assert "drawn:" in capsys.readouterr().out


def test_a_picture_where_nothing_can_be_written_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--ranks", "1", "--picture", "/proc/none"]) == 2
    assert "--picture /proc/none" in capsys.readouterr().err


def test_the_pages_pictures_are_of_its_first_plan() -> None:
    script = runpy.run_path(str(ROOT / "docs" / "draw_plan.py"), run_name="drawn")
    plan = script["first_plan"]()
    page = (ROOT / "docs" / "source" / "plan.md").read_text()
    assert f"rank {plan.fullest.rank} holds most, {plan.fullest.peak / 2**30:.2f} GiB" in page
    shown = set(re.findall(r"\{image\} plan/(\w+)_(light|dark)\.png", page))
    assert shown == {(name, theme) for name in script["PICTURES"] for theme in script["RUN"]["THEMES"]}
