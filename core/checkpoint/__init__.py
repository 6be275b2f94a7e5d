"""Checkpoints: durable directories of parameters and optimizer state by global name and slice, for any layout."""

from core.checkpoint.directory import find_intact, latest_step, list_steps
from core.checkpoint.errors import CheckpointError, CheckpointNotFound
from core.checkpoint.load import LoadReport, load_checkpoint
from core.checkpoint.save import save_checkpoint
from core.checkpoint.saver import CheckpointSaver, SaveReport
from core.checkpoint.stop_signal import StopSignal
from core.checkpoint.tree import OptimizerState, ShardedObject, ShardedTensor, ShardedTensorFactory
from core.checkpoint.tree_files import LoadedTree, load_tree, module_tree, save_tree

__all__ = [
    "CheckpointError",
    "CheckpointNotFound",
    "CheckpointSaver",
    "LoadReport",
    "LoadedTree",
    "OptimizerState",
    "SaveReport",
    "ShardedObject",
    "ShardedTensor",
    "ShardedTensorFactory",
    "StopSignal",
    "find_intact",
    "latest_step",
    "list_steps",
    "load_checkpoint",
    "load_tree",
    "module_tree",
    "save_checkpoint",
    "save_tree",
]
