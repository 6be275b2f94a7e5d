"""Draws docs/source/run/*.svg: the loss curve and one step's buckets of the main job, for light and for dark pages.

    torchrun --standalone --nproc-per-node 4 docs/draw_run.py --ddp.bucket-size 60000

It trains as `make train` does, and takes the same flags; small buckets make a picture with more to see.
The pictures are those of the run's directory, drawn twice without a background.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib

from core_train import reporter
from core_train.main import main

PICTURES = Path(__file__).parent / "source" / "run"
COMMON = {"savefig.transparent": True, "svg.fonttype": "none", "svg.hashsalt": "run", "font.size": 11}
INK = ("text.color", "axes.edgecolor", "axes.labelcolor", "axes.titlecolor", "xtick.color", "ytick.color")
THEMES = {"light": "#1f2328", "dark": "#d8dee4"}  # the colour of text and axes


def in_both_themes(draw: Callable[..., None], directory: Path) -> Callable[..., None]:
    """`draw`, which is given a path in the run's directory, and draws two pictures of that name into `directory`."""

    def drawn(path: Path, *arguments: Any) -> None:
        draw(path, *arguments)
        for theme, ink in THEMES.items():
            with matplotlib.rc_context({**COMMON, **dict.fromkeys(INK, ink), "legend.framealpha": 0}):
                draw(directory / f"{path.stem}_{theme}.svg", *arguments)

    return drawn


def run(flags: list[str], directory: Path = PICTURES) -> int:
    """Train as one rank of torchrun's; the exit status."""
    reporter.draw_loss_curve = in_both_themes(reporter.draw_loss_curve, directory)
    reporter.draw_bucket_timeline = in_both_themes(reporter.draw_bucket_timeline, directory)
    return main(flags)


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
