"""ColossalAI's module paths with the objects behind their names, and the advice for names that are absent.

The lines have the format of core_compat.install.read_rows.
"""

from __future__ import annotations

from core_compat.install import read_rows

MODULES = read_rows(
    """
- .starting launch launch_from_torch launch_from_slurm launch_from_openmpi
initialize @
accelerator,api .devices get_accelerator BaseAccelerator=DeviceAccelerator
cluster @cluster.dist_coordinator @cluster.process_group_mesh
cluster.dist_coordinator core.booster DistCoordinator
cluster.process_group_mesh core.booster.process_group_mesh ProcessGroupMesh
logging,logger .starting get_dist_logger=DistributedLogger DistributedLogger
    core.booster.rank_logger disable_existing_loggers
utils,common,cuda,device,timer .devices get_current_device Timer MultiTimer core.booster.launch set_seed

nn @nn.optimizer
nn.optimizer,hybrid_adam,cpu_adam,fused_adam,fused_sgd,lamb,lars,came .optimizers HybridAdam CPUAdam FusedAdam FusedSGD
    core.optimizer.algorithms.layerwise Lamb Lars CAME
nn.lr_scheduler,cosine,linear,multistep,onecycle,poly,torch .schedules CosineAnnealingLR FlatAnnealingLR MultiStepLR
    OneCycleLR PolynomialLR LambdaLR MultiplicativeLR StepLR ExponentialLR
    CosineAnnealingWarmupLR FlatAnnealingWarmupLR LinearWarmupLR MultiStepWarmupLR PolynomialWarmupLR
lazy,lazy_init .lazy_init LazyInitContext

booster core.booster * core.booster.plugin Plugin
booster.booster core.booster Booster
booster.accelerator core.booster Accelerator
booster.plugin,plugin_base,torch_ddp_plugin,torch_fsdp_plugin,low_level_zero_plugin,gemini_plugin,hybrid_parallel_plugin
    core.booster.plugin *
booster.plugin.moe_hybrid_parallel_plugin @booster.plugin
booster.plugin.pp_plugin_base core.booster.plugin PipelinePluginBase
booster.plugin.dp_plugin_base core.booster.plugin DPPluginBase
booster.mixed_precision,mixed_precision_base,fp16_torch core.booster.mixed_precision *
    FP16_Torch_MixedPrecision=FP16TorchMixedPrecision FP32_MixedPrecision=FP32MixedPrecision
    BF16_MixedPrecision=BF16MixedPrecision FP8_MixedPrecision=FP8MixedPrecision
shardformer,shard core.booster.plugin GradientCheckpointConfig PipelineGradientCheckpointConfig
    .shard_former ShardConfig ShardFormer
shardformer.policies.base_policy core.hugging_face Policy
checkpoint_io,checkpoint_io_base,general_checkpoint_io core.booster.checkpoint_io *
interface core.interface *
interface.model core.interface ModelWrapper AMPModelMixin
interface.optimizer core.interface OptimizerWrapper
amp.naive_amp.grad_scaler core.optimizer.loss_scaler DynamicGradScaler=DynamicLossScaler BaseGradScaler=LossScaler
    ConstantGradScaler=ConstantLossScaler
zero @zero.low_level @zero.gemini
zero.gemini,gemini_ddp,gemini_optimizer .without_booster GeminiDDP GeminiOptimizer
zero.low_level,low_level_optim .without_booster LowLevelZeroOptimizer

engine.gradient_handler core.gradient_handler *
legacy.engine.gradient_handler @engine.gradient_handler
registry core.gradient_handler GRADIENT_HANDLER Registry
legacy.registry @registry
utils.gradient_accumulation core.gradient_accumulation *
engine.gradient_accumulation @utils.gradient_accumulation
legacy.engine.gradient_accumulation @utils.gradient_accumulation
""",
)

# Advice, '|', and the names or packages that it is for.
ABSENT = {
    name: sentence
    for line in """
use Booster(mixed_precision=...), or the precision of a plugin | amp
no layout is searched for; choose a plugin of core.booster | auto_parallel
it never trained in ColossalAI; use 'fp16' | booster.mixed_precision.FP16NaiveMixedPrecision
apex's amp is not called; use 'fp16' | booster.mixed_precision.FP16_Apex_MixedPrecision
an index is JSON with 'metadata' and 'weight_map'; read it with json.load | checkpoint_io.CheckpointIndexFile
of the engine before the Booster only gradient handlers and gradient accumulation are here; write the loop with \
core.booster.Booster | context core engine legacy trainer
models are not traced here; use torch.fx | fx
use booster.plugin.GeminiPlugin, which makes the sharded model and its optimizer together | gemini zero.gemini \
nn.parallel
models are trained here, and served elsewhere: save them with Booster.save_model(shard=True) | inference
torch's own fused kernels are used | kernel
use core.moe | moe
use core.tensor_parallel, or torch.nn | nn.layer
use torch.nn, or core.tensor_parallel.vocab_parallel_cross_entropy | nn.loss
use torch.optim.Adafactor, which every plugin takes | nn.optimizer.Adafactor nn.optimizer.DistributedAdaFactor
projected gradients are not here; use nn.optimizer.CAME or torch.optim.Adafactor, whose states are small too | \
nn.optimizer.DistGaloreAwamW nn.optimizer.GaLoreAdafactor nn.optimizer.GaLoreAdamW nn.optimizer.GaLoreAdamW8bit
every plugin shards the plain class itself, so no second class is needed: use nn.optimizer.CAME, nn.optimizer.Lamb | \
nn.optimizer.DistributedCAME nn.optimizer.DistributedLamb nn.optimizer.cast_to_distributed
use nn.optimizer.Lamb(bias_correction=True), and clip by the plugin's max_norm | nn.optimizer.FusedLAMB
use core.pipeline_parallel, or booster.plugin.HybridParallelPlugin(pp_size=...) | pipeline
quantized weights are not trained here; use Booster.enable_lora without quantize | quantization
a policy is a core.hugging_face.Policy of rules; families have theirs in core.hugging_face.POLICIES | shardformer
tensors are torch's here; a model is split by core.tensor_parallel or core.hugging_face | tensor
these are for ColossalAI's own tests; use torch.testing | testing
build the model plainly, or in lazy.LazyInitContext | zero.ColoInitContext
use booster.plugin.LowLevelZeroPlugin, or zero.LowLevelZeroOptimizer without a Booster | zero
""".splitlines()
    for sentence, _, names in [line.partition(" | ")]
    for name in names.split()
}
