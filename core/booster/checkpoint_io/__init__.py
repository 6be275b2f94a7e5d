"""Checkpoints of the Booster: single files, shards with an index, safetensors, and background writes.

A checkpoint written under one plugin loads under any other, without a plugin, and with Hugging Face's from_pretrained.
"""

from core.booster.checkpoint_io.general_checkpoint_io import CheckpointIO, GeneralCheckpointIO
from core.booster.checkpoint_io.low_level_zero_checkpoint_io import LowLevelZeroCheckpointIO
from core.booster.checkpoint_io.torch_ddp_checkpoint_io import TorchDDPCheckpointIO
from core.booster.checkpoint_io.torch_fsdp_checkpoint_io import TorchFSDPCheckpointIO, gather, shard_like

__all__ = [
    "CheckpointIO",
    "GeneralCheckpointIO",
    "LowLevelZeroCheckpointIO",
    "TorchDDPCheckpointIO",
    "TorchFSDPCheckpointIO",
    "gather",
    "shard_like",
]
