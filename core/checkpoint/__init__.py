"""Checkpoints: durable directories of parameters and optimizer state by global name and slice, for any layout."""

from core.checkpoint.directory import find_intact, latest_step, list_steps
from core.checkpoint.errors import CheckpointError, CheckpointNotFound
from core.checkpoint.load import LoadReport, load_checkpoint
from core.checkpoint.save import save_checkpoint
from core.checkpoint.saver import CheckpointSaver, SaveReport
from core.checkpoint.stop_signal import StopSignal

__all__ = [
    "CheckpointError",
    "CheckpointNotFound",
    "CheckpointSaver",
    "LoadReport",
    "SaveReport",
    "StopSignal",
    "find_intact",
    "latest_step",
    "list_steps",
    "load_checkpoint",
    "save_checkpoint",
]
