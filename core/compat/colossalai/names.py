"""ColossalAI's module paths and what is behind their names here; and what is said of names that are not here.

The lines are those of core.compat.install.read_rows.
"""

from __future__ import annotations

from core.compat.install import read_rows

MODULES = read_rows(
    """
- .starting launch launch_from_torch launch_from_slurm launch_from_openmpi
initialize .starting launch launch_from_torch launch_from_slurm launch_from_openmpi
accelerator .devices get_accelerator BaseAccelerator=DeviceAccelerator
accelerator.api @accelerator
cluster @cluster.dist_coordinator @cluster.process_group_mesh
cluster.dist_coordinator .coordinator DistCoordinator
cluster.process_group_mesh .group_mesh ProcessGroupMesh
logging .rank_logger get_dist_logger DistributedLogger disable_existing_loggers
logging.logger @logging
utils @utils.common @utils.timer
utils.common .devices get_current_device .starting set_seed
utils.device .devices get_current_device .starting set_seed
utils.timer .devices Timer MultiTimer

nn.optimizer .optimizers HybridAdam CPUAdam FusedAdam FusedSGD Lamb Lars CAME
nn.optimizer.hybrid_adam .optimizers HybridAdam
nn.optimizer.cpu_adam .optimizers CPUAdam
nn.optimizer.fused_adam .optimizers FusedAdam
nn.optimizer.fused_sgd .optimizers FusedSGD
nn.optimizer.lamb .optimizers Lamb
nn.optimizer.lars .optimizers Lars
nn.optimizer.came .optimizers CAME
nn.lr_scheduler @nn.lr_scheduler.cosine @nn.lr_scheduler.linear @nn.lr_scheduler.multistep @nn.lr_scheduler.onecycle
    @nn.lr_scheduler.poly @nn.lr_scheduler.torch
nn.lr_scheduler.cosine .lr_schedules CosineAnnealingLR CosineAnnealingWarmupLR FlatAnnealingLR FlatAnnealingWarmupLR
nn.lr_scheduler.linear .lr_schedules LinearWarmupLR
nn.lr_scheduler.multistep .lr_schedules MultiStepLR MultiStepWarmupLR
nn.lr_scheduler.onecycle .lr_schedules OneCycleLR
nn.lr_scheduler.poly .lr_schedules PolynomialLR PolynomialWarmupLR
nn.lr_scheduler.torch .lr_schedules LambdaLR MultiplicativeLR StepLR ExponentialLR
lazy .lazy_init LazyInitContext
lazy.lazy_init @lazy

booster core.booster * core.booster.plugin Plugin
booster.booster core.booster Booster
booster.accelerator core.booster Accelerator
booster.plugin core.booster.plugin *
booster.plugin.plugin_base core.booster.plugin Plugin
booster.plugin.pp_plugin_base core.booster.plugin PipelinePluginBase
booster.plugin.dp_plugin_base core.booster.plugin DPPluginBase
booster.plugin.torch_ddp_plugin core.booster.plugin TorchDDPPlugin
booster.plugin.torch_fsdp_plugin core.booster.plugin TorchFSDPPlugin
booster.plugin.low_level_zero_plugin core.booster.plugin LowLevelZeroPlugin
booster.plugin.gemini_plugin core.booster.plugin *
booster.plugin.hybrid_parallel_plugin core.booster.plugin *
booster.mixed_precision core.booster.mixed_precision * FP16_Apex_MixedPrecision=FP16ApexMixedPrecision
    FP16_Torch_MixedPrecision=FP16TorchMixedPrecision FP32_MixedPrecision=FP32MixedPrecision
    BF16_MixedPrecision=BF16MixedPrecision FP8_MixedPrecision=FP8MixedPrecision
shardformer core.booster.plugin GradientCheckpointConfig PipelineGradientCheckpointConfig
    .shard_former ShardConfig ShardFormer
shardformer.shard @shardformer
shardformer.policies.base_policy core.hugging_face Policy
checkpoint_io core.booster.checkpoint_io *
interface core.interface *
interface.model core.interface ModelWrapper AMPModelMixin
interface.optimizer core.interface OptimizerWrapper
amp.naive_amp.grad_scaler core.optimizer.loss_scaler DynamicGradScaler=DynamicLossScaler BaseGradScaler=LossScaler
zero @zero.low_level @zero.gemini
zero.gemini .gemini_ddp GeminiDDP GeminiOptimizer
zero.low_level .low_level_zero LowLevelZeroOptimizer

engine.gradient_handler core.gradient_handler *
legacy.engine.gradient_handler core.gradient_handler *
legacy.registry core.gradient_handler GRADIENT_HANDLER Registry
registry core.gradient_handler GRADIENT_HANDLER Registry
engine.gradient_accumulation core.gradient_accumulation *
legacy.engine.gradient_accumulation core.gradient_accumulation *
utils.gradient_accumulation core.gradient_accumulation *
""",
)

_LEGACY = (
    "of the engine before the Booster only gradient handlers and gradient accumulation are here; write the loop with "
    "core.booster.Booster"
)
_CHUNKS = "use booster.plugin.GeminiPlugin, which makes the sharded model and its optimizer together"
_POLICY = "a policy is a core.hugging_face.Policy of rules; families have theirs in core.hugging_face.POLICIES"
_ADAFACTOR = "use torch.optim.Adafactor, which every plugin takes"
_GALORE = "projected gradients are not here; use nn.optimizer.CAME or torch.optim.Adafactor, whose states are small too"
_WHOLE = "every plugin shards the plain class itself, so no second class is needed"

ABSENT: dict[str, str] = {
    "amp": "use Booster(mixed_precision=...), or the precision of a plugin",
    "auto_parallel": "no layout is searched for; choose a plugin of core.booster",
    "booster.mixed_precision.FP16NaiveMixedPrecision": "it never trained in ColossalAI; use 'fp16'",
    "checkpoint_io.CheckpointIndexFile": "an index is JSON with 'metadata' and 'weight_map'; read it with json.load",
    "context": _LEGACY,
    "core": _LEGACY,
    "engine": _LEGACY,
    "fx": "models are not traced here; use torch.fx",
    "gemini": _CHUNKS,
    "inference": "models are trained here, and served elsewhere: save them with Booster.save_model(shard=True)",
    "kernel": "torch's own fused kernels are used",
    "legacy": _LEGACY,
    "moe": "use core.moe",
    "nn.layer": "use core.tensor_parallel, or torch.nn",
    "nn.loss": "use torch.nn, or core.tensor_parallel.vocab_parallel_cross_entropy",
    "nn.optimizer.Adafactor": _ADAFACTOR,
    "nn.optimizer.DistGaloreAwamW": _GALORE,
    "nn.optimizer.DistributedAdaFactor": f"{_WHOLE}: {_ADAFACTOR}",
    "nn.optimizer.DistributedCAME": f"{_WHOLE}: use nn.optimizer.CAME",
    "nn.optimizer.DistributedLamb": f"{_WHOLE}: use nn.optimizer.Lamb",
    "nn.optimizer.FusedLAMB": "use nn.optimizer.Lamb(bias_correction=True), and clip by the plugin's max_norm",
    "nn.optimizer.GaLoreAdafactor": _GALORE,
    "nn.optimizer.GaLoreAdamW": _GALORE,
    "nn.optimizer.GaLoreAdamW8bit": _GALORE,
    "nn.optimizer.cast_to_distributed": _WHOLE,
    "nn.parallel": _CHUNKS,
    "pipeline": "use core.pipeline_parallel, or booster.plugin.HybridParallelPlugin(pp_size=...)",
    "quantization": "quantized weights are not trained here; use Booster.enable_lora without quantize",
    "shardformer": _POLICY,
    "tensor": "tensors are torch's here; a model is split by core.tensor_parallel or core.hugging_face",
    "testing": "these are for ColossalAI's own tests; use torch.testing",
    "trainer": _LEGACY,
    "zero.ColoInitContext": "build the model plainly, or in lazy.LazyInitContext",
    "zero.gemini": _CHUNKS,
    "zero": "use booster.plugin.LowLevelZeroPlugin, or zero.LowLevelZeroOptimizer without a Booster",
}
