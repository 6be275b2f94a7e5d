"""Record sketches of a run's steps that do not depend on its layout, and find the first difference between two runs."""

from core.verify.record.compare import Comparison, compare_recordings
from core.verify.record.recorder import StepRecording, record_with

__all__ = ["Comparison", "StepRecording", "compare_recordings", "record_with"]
