"""Compare every gradient of a parallel layout with the gradients of one process that splits nothing."""

from core.interface.whole import note
from core.verify.check import check_gradients
from core.verify.loop import LoopCheck, verify_with
from core.verify.place import Where
from core.verify.report import GradientReport, WrongGradientError
from core.verify.splits import declare_splits

__all__ = [
    "GradientReport",
    "LoopCheck",
    "Where",
    "WrongGradientError",
    "check_gradients",
    "declare_splits",
    "note",
    "verify_with",
]
