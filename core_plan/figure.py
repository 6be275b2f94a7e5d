"""Figures of matplotlib without a screen, and the colors of the parts of a step."""

from __future__ import annotations

from typing import Any

from core.extras import require

# Okabe and Ito's, which colour-blind readers can distinguish too.
SPAN_COLORS = {
    "data": "#dddddd",
    "forward": "#56b4e9",
    "backward": "#d55e00",
    "input gradient": "#d55e00",
    "weight gradient": "#0072b2",
    "finalize": "#f0e442",
    "optimizer": "#009e73",
    "loss": "#dddddd",
}


def figure(width: float, height: float) -> Any:
    """A matplotlib figure that draws into a file, with or without a screen."""
    require("matplotlib", "drawing the plots").use("Agg")
    return require("matplotlib.pyplot", "drawing the plots").figure(figsize=(width, height), layout="constrained")
