"""The oracle: every gradient of a layout against one process that splits nothing. `python -m core.verify` runs ours."""

from core.verify.check import check_gradients
from core.verify.layouts import Layout
from core.verify.loop import LoopCheck, verify_with
from core.verify.place import Where
from core.verify.program import note
from core.verify.report import GradientReport, TrainingReport, WrongGradientError

__all__ = [
    "GradientReport",
    "Layout",
    "LoopCheck",
    "TrainingReport",
    "Where",
    "WrongGradientError",
    "check_gradients",
    "note",
    "verify_with",
]
