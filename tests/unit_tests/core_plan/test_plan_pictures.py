"""The pictures of the documentation's page on plans."""

from __future__ import annotations

import itertools
import math
import re
import runpy
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from core.pipeline_parallel.schedules import Action
from core_plan import plan_run
from core_plan.job.config_file import load_config
from core_plan.time_line import TimedAction
from core_train.plots import EXPOSED, IN_FLIGHT, SPAN_COLORS
from tests.unit_tests.test_docs import ROOT

matplotlib = pytest.importorskip("matplotlib")
SCRIPT = runpy.run_path(str(ROOT / "docs" / "draw_plan.py"), run_name="drawn")


def test_a_plan_is_drawn(tmp_path: Path) -> None:
    flags = "--tp 1 --pp 2 --run.global-batch-size 8 --model.num-layers 4 --model.hidden-size 64 --model.vocab-size 256"
    plan = plan_run(load_config(flags.split()), 4)
    words = {}
    for name, draw in SCRIPT["PICTURES"].items():
        with matplotlib.rc_context({"svg.fonttype": "none"}):
            draw(tmp_path / f"{name}.svg", plan)
        texts = ElementTree.parse(tmp_path / f"{name}.svg").iter()
        words[name] = {text.text for text in texts if text.tag.endswith("text")}
    assert {"parameters", "gradients", "activations", "GiB"} <= words["memory"]
    assert {"rank 0", "rank 2", "forward", "backward", "optimizer"} <= words["time_line"]
    assert {"dp_cp", "pp"} <= words["roofline"]


def test_a_long_step_is_drawn_by_its_first_and_last_microbatches() -> None:
    """One bar a second: microbatch n runs from n to n + 1, and 128 of them are too thin to see."""

    def panels(microbatches: int) -> list[tuple[float, float]]:
        spans = [TimedAction(0, Action("F", 0, n), float(n), n + 1.0) for n in range(microbatches)]
        found: list[tuple[float, float]] = SCRIPT["time_panels"](spans, microbatches + 0.5)
        return found

    assert panels(128) == [(0.0, 8.0), (120.0, 128.5)]
    assert panels(17) == [(0.0, 8.0), (9.0, 17.5)]
    assert panels(16) == [(0.0, 16.5)]


def test_the_pages_pictures_are_of_its_first_plan() -> None:
    plan = SCRIPT["first_plan"]()
    page = (ROOT / "docs" / "source" / "plan.md").read_text()
    assert f"rank {plan.fullest.rank} holds most, {plan.fullest.peak / 2**30:.2f} GiB" in page
    assert set(re.findall(r"\{picture\} plan/(\w+)\.png", page)) == set(SCRIPT["PICTURES"])


# Machado, Oliveira and Fernandes 2009, of full severity: what people see who are blind to red, green or blue light.
SEEN = {
    "all": ((1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0)),
    "no red": ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998)),
    "no green": ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.011820, 0.042940, 0.968881)),
    "no blue": ((1.255528, -0.076749, -0.178779), (-0.078411, 0.930809, 0.147602), (0.004733, 0.691367, 0.303900)),
}
TO_XYZ = ((0.4124564, 0.3575761, 0.1804375), (0.2126729, 0.7151522, 0.0721750), (0.0193339, 0.1191920, 0.9503041))
WHITE = (0.95047, 1.0, 1.08883)


def times(matrix: tuple[tuple[float, ...], ...], vector: list[float]) -> list[float]:
    return [sum(a * b for a, b in zip(row, vector, strict=True)) for row in matrix]


def lab(color: str, eyes: str) -> list[float]:
    """CIELAB of a colour as some eyes see it; 2.3 apart is the least difference that people see."""
    parts = [int(color[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    seen = [min(1.0, max(0.0, part)) for part in times(SEEN[eyes], linear)]
    x, y, z = (
        ratio ** (1 / 3) if ratio > 0.008856 else 7.787 * ratio + 16 / 116
        for ratio in (value / white for value, white in zip(times(TO_XYZ, seen), WHITE, strict=True))
    )
    return [116 * y - 16, 500 * (x - y), 200 * (y - z)]


@pytest.mark.parametrize("eyes", SEEN)
def test_what_a_picture_shows_next_to_each_other_can_be_distinguished(eyes: str) -> None:
    colors = {name: lab(color, eyes) for name, color in SPAN_COLORS.items() if name != "loss"}
    colors |= {"in flight": lab(IN_FLIGHT, eyes), "exposed": lab(EXPOSED, eyes)}
    apart = {
        (one, other): math.dist(colors[one], colors[other])
        for one, other in itertools.combinations(colors, 2)
        if {one, other} != {"backward", "input gradient"}  # a picture has one of the two
    }
    assert min(apart.values()) > 15, min(apart, key=lambda pair: apart[pair])
    assert apart["forward", "backward"] > 50
    assert math.dist(lab("#7fb3d5", eyes), lab("#5499c7", eyes)) < 15  # the two blues of before
    assert {color for _, color in SCRIPT["ACTIONS"].values()} == {
        SPAN_COLORS[name] for name in ("forward", "backward", "weight gradient")
    }


@pytest.mark.parametrize("eyes", SEEN)
def test_kinds_of_memory_can_be_distinguished(eyes: str) -> None:
    seen = [lab(color, eyes) for color in SCRIPT["COLORS"]]
    assert min(math.dist(one, other) for one, other in itertools.combinations(seen, 2)) > 15
    assert min(map(math.dist, seen, seen[1:])) > 45  # neighbours in a stack
