"""Plugins of the Booster, one for each form of parallelism. Derive from ``Plugin`` or ``DPPluginBase`` to add one."""

from core.booster.plugin.dp_plugin_base import DPPluginBase
from core.booster.plugin.gemini_plugin import GeminiPlugin
from core.booster.plugin.hybrid_parallel_plugin import HybridParallelPlugin
from core.booster.plugin.low_level_zero_plugin import LowLevelZeroPlugin
from core.booster.plugin.moe_hybrid_parallel_plugin import MoeHybridParallelPlugin
from core.booster.plugin.plugin_base import PipelinePluginBase, Plugin
from core.booster.plugin.torch_ddp_plugin import TorchDDPPlugin
from core.booster.plugin.torch_fsdp_plugin import TorchFSDPPlugin
from core.hugging_face.run.layer_checkpointing import GradientCheckpointConfig, PipelineGradientCheckpointConfig

__all__ = [
    "DPPluginBase",
    "GeminiPlugin",
    "GradientCheckpointConfig",
    "HybridParallelPlugin",
    "LowLevelZeroPlugin",
    "MoeHybridParallelPlugin",
    "PipelineGradientCheckpointConfig",
    "PipelinePluginBase",
    "Plugin",
    "TorchDDPPlugin",
    "TorchFSDPPlugin",
]
