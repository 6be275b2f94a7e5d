"""Draws docs/source/plan/*.png: the pictures of the page's first plan, for light and for dark pages.

python docs/draw_plan.py
"""

from __future__ import annotations

import re
import runpy
import shlex
from pathlib import Path
from typing import Any

import matplotlib

from core_plan import RunPlan, plan_run
from core_plan.job.config_file import load_config
from core_plan.pictures import PICTURES

DOCS = Path(__file__).parent
FOLDER = DOCS / "source" / "plan"
RUN: dict[str, Any] = runpy.run_path(str(DOCS / "draw_run.py"))


def first_plan() -> RunPlan:
    """That of the page's first command."""
    page = (DOCS / "source" / "plan.md").read_text()
    command = re.search(r"\$ python -m core plan ((?:.*\\\n)*.*)\n", page)
    assert command is not None, "the page begins with a plan"
    flags = shlex.split(command[1].replace("\\\n", " "))
    short = {"--seq": "--model.sequence-length", "--global-batch": "--run.global-batch-size"}
    short |= {"--micro-batch": "--run.micro-batch-size", "--tp": "--parallel.tp", "--pp": "--parallel.pp"}
    told = {name: flags.pop(flags.index(name) + 1) for name in ("--ranks", "--device")}
    flags = [short.get(flag, flag) for flag in flags if flag not in told]
    return plan_run(load_config(flags), int(told["--ranks"]), told["--device"])


def main(directory: Path = FOLDER) -> None:
    """Each picture twice, without a background."""
    plan = first_plan()
    directory.mkdir(exist_ok=True)
    for name, draw in PICTURES.items():
        for theme, ink in RUN["THEMES"].items():
            style = {**RUN["COMMON"], **dict.fromkeys(RUN["INK"], ink), "legend.framealpha": 0, "savefig.dpi": 120}
            with matplotlib.rc_context(style):
                draw(directory / f"{name}_{theme}.png", plan)


if __name__ == "__main__":
    main()
