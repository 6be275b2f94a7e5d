"""HybridParallelPlugin: transformers models over tensor, pipeline and data parallelism, with ZeRO stages 0 to 3."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from core.booster.plugin.hybrid_parallel_options import (
    SCHEDULES,
    WITHOUT_EFFECT,
    check_pipeline,
    check_sizes,
    check_zero,
    resolve_sequence,
    warn_without_effect,
)
from core.booster.plugin.hybrid_parallel_step import run_pipeline
from core.booster.plugin.mesh_attributes import MeshAttributes
from core.booster.plugin.plugin_base import PipelinePluginBase
from core.booster.plugin.zero_plugin_base import MEGA, SCALER, WIRE_DTYPES, ZeroPluginBase
from core.distributed.distributed_data_parallel_config import STRATEGIES
from core.hugging_face import Policy
from core.hugging_face.cut_model import Cutting
from core.hugging_face.run.layer_checkpointing import GradientCheckpointConfig


class HybridParallelPlugin(ZeroPluginBase, MeshAttributes, PipelinePluginBase):
    """Plugin that splits a transformers model over tensor-parallel, pipeline and sequence-parallel ranks.

    The model is split over tp_size x pp_size x sp_size ranks, and the other ranks train replicas on different data. Use
    it if layers, or the sequence, are too large for one rank. A warning names options without effect and the reason.

        plugin = HybridParallelPlugin(tp_size=2, pp_size=2, num_microbatches=4, zero_stage=1)

    Args:
        tp_size: Number of tensor-parallel ranks.
        pp_size: Number of pipeline ranks.
        sp_size: Number of separate ranks for the sequence, in the modes that need them.
        precision: 'fp16', 'bf16', or 'fp32', which does not change the parameters' dtype.
        zero_stage: 0 keeps everything on each data rank, 1 shards masters and moments, 2 also shards reduced gradients,
            and 3 also shards parameters.
        enable_flash_attention: Use torch's scaled_dot_product_attention.
        enable_sequence_parallelism: Split the sequence, as ``sequence_parallelism_mode`` selects.
        sequence_parallelism_mode: 'split_gather' (the default) or 'ring' over the tensor-parallel ranks, 'all_to_all'
            or 'ring_attn' over sp_size separate ranks.
        parallel_output: Leave logits split and compute a causal model's loss from the parts, if the model allows it.
            Otherwise logits are gathered, with a warning.
        num_microbatches: Number of microbatches per batch in a pipeline; takes precedence over ``microbatch_size``.
        microbatch_size: Rows per microbatch.
        initial_scale, min_scale, growth_factor, backoff_factor, growth_interval, hysteresis, max_scale: Options of
            DynamicLossScaler, used with fp16 only.
        max_norm: Limit of the global gradient norm, applied inside ``step``. 0 disables clipping.
        broadcast_buffers: Broadcast rank 0's buffers to all ranks at ``boost``.
        ddp_bucket_cap_mb: Gradient bucket size without ZeRO, in MiB of fp32.
        zero_bucket_size_in_m: Gradient bucket size with ZeRO, in 1024 * 1024 elements.
        cpu_offload: Keep and step masters and moments on the CPU, with ZeRO.
        communication_dtype: Dtype of gradients in collectives. Defaults to the parameters' dtype.
        overlap_communication: Reduce buckets during backward.
        custom_policy: A core.hugging_face.Policy, for a model family without a plan.
        pp_style: '1f1b', 'interleaved' (with num_model_chunks stages per rank) or 'zbv' (2 stages per rank).
        num_model_chunks: Number of stages per rank.
        num_layers_per_stage: Number of layers of each stage. Defaults to equal stages.
        gradient_checkpoint_config: A GradientCheckpointConfig, or None.
        make_vocab_size_divisible_by: Each rank's rows of a split vocabulary are padded to a multiple of this number.
            Saved files have no padding.
        dp_outside: True if ranks of one replica are neighbors; False if ranks of one stage are.
        overlap_allgather: Step bucket by bucket, and gather a bucket's parameters during the next one's step, with ZeRO
            1 and 2.
        fp8_communication: Send gradients in 8 bits.
        use_fp8: Multiply in 8 bits in linear layers, with 'bf16' and an unsplit model.
        example: Arguments of a small forward of the full model, the same on all ranks, that verifies the split. By
            default created from the model's main input.
        logits_chunk: Number of tokens at a time for which a causal model computes its loss; 0 for all, None for chunks
            if logits are large (``use_chunked_loss``).

    Raises:
        ValueError: If an option is out of range, or options cannot be combined.
        RuntimeError: If torch.distributed is not initialized, or this machine cannot run ``use_fp8``.
    """

    cutting: Cutting
    ep_size = 1  # ranks that share a model's experts

    without_effect = WITHOUT_EFFECT

    def __init__(
        self,
        tp_size: int,
        pp_size: int,
        sp_size: int | None = None,
        precision: str = "fp16",
        zero_stage: int = 0,
        enable_all_optimization: bool = False,
        enable_fused_normalization: bool = False,
        enable_flash_attention: bool = False,
        enable_jit_fused: bool = False,
        enable_sequence_parallelism: bool = False,
        sequence_parallelism_mode: str | None = None,
        enable_sequence_overlap: bool = False,
        parallel_output: bool = True,
        num_microbatches: int | None = None,
        microbatch_size: int | None = None,
        initial_scale: float = 2**16,
        min_scale: float = 1,
        growth_factor: float = 2,
        backoff_factor: float = 0.5,
        growth_interval: int = 1000,
        hysteresis: int = 2,
        max_scale: float = 2**32,
        max_norm: float = 0,
        broadcast_buffers: bool = True,
        ddp_bucket_cap_mb: int = 25,
        find_unused_parameters: bool = False,
        check_reduction: bool = False,
        gradient_as_bucket_view: bool = False,
        static_graph: bool = False,
        zero_bucket_size_in_m: int = 12,
        cpu_offload: bool = False,
        communication_dtype: torch.dtype | None = None,
        overlap_communication: bool = True,
        custom_policy: Policy | None = None,
        pp_style: str = "1f1b",
        num_model_chunks: int = 1,
        scheduler_nodes: Any = None,
        num_layers_per_stage: Sequence[int] | None = None,
        gradient_checkpoint_config: GradientCheckpointConfig | None = None,
        enable_metadata_cache: bool = True,
        make_vocab_size_divisible_by: int = 64,
        dp_outside: bool = True,
        overlap_p2p: bool = True,
        overlap_allgather: bool = False,
        fp8_communication: bool = False,
        use_fp8: bool = False,
        inner_ring_size: int | None = None,
        *,
        example: Mapping[str, Any] | None = None,
        logits_chunk: int | None = None,
    ) -> None:
        given = {name: value for name, value in locals().items() if name not in ("self", "__class__")}
        warn_without_effect(self._name, given)
        super().__init__(
            precision,
            {name: given[name] for name in SCALER},
            max_norm=max_norm,
            fp8_communication=fp8_communication,
            use_fp8=use_fp8,
        )
        self.sequence_parallel, self.sp_size = resolve_sequence(
            enable_sequence_parallelism, sequence_parallelism_mode, tp_size, sp_size
        )
        check_sizes(self.world_size, self.sp_size, tp_size=tp_size, pp_size=pp_size)
        check_pipeline(pp_size, pp_style, num_model_chunks, num_microbatches, microbatch_size)
        check_zero(zero_stage, cpu_offload, overlap_allgather)
        self._check_numbers({"ddp_bucket_cap_mb": ddp_bucket_cap_mb, "zero_bucket_size_in_m": zero_bucket_size_in_m})
        if not ddp_bucket_cap_mb > 0 or not zero_bucket_size_in_m > 0:
            raise ValueError(
                f"ddp_bucket_cap_mb is {ddp_bucket_cap_mb} and zero_bucket_size_in_m {zero_bucket_size_in_m}; a bucket "
                "needs a positive size"
            )
        if communication_dtype is not None and (communication_dtype not in WIRE_DTYPES or fp8_communication):
            raise ValueError(
                f"communication_dtype is {communication_dtype}; expected None or one of {WIRE_DTYPES}, without "
                "fp8_communication"
            )
        if custom_policy is not None and not isinstance(custom_policy, Policy):
            raise ValueError(f"custom_policy is {custom_policy!r}; expected a core.hugging_face.Policy")
        if use_fp8 and tp_size * pp_size * self.sp_size > 1:
            raise ValueError("use_fp8 supports unsplit linear layers only; set tp_size, pp_size and sp_size to 1")
        self._arguments = given
        self.tp_size, self.pp_size, self.zero_stage = tp_size, pp_size, zero_stage
        self.pp_style = pp_style
        self.num_microbatches, self.microbatch_size = num_microbatches, microbatch_size
        if isinstance(make_vocab_size_divisible_by, bool) or make_vocab_size_divisible_by < 1:
            raise ValueError(
                f"make_vocab_size_divisible_by is {make_vocab_size_divisible_by!r}; each rank's rows of a split "
                "vocabulary are padded to a multiple of it, so it is a number, at least 1"
            )
        self.cutting = Cutting(
            *(tp_size, pp_size, self.sp_size, self.ep_size),
            sequence_parallel=self.sequence_parallel,
            parallel_output=parallel_output,
            policy=custom_policy,
            vocabulary_multiple=make_vocab_size_divisible_by,
            example=example,
            schedule=SCHEDULES[pp_style],
            num_chunks=2 if pp_style == "zbv" else num_model_chunks,
            layers_per_stage=None if num_layers_per_stage is None else tuple(num_layers_per_stage),
            flash_attention=enable_flash_attention,
            logits_chunk=logits_chunk,
            checkpointing=gradient_checkpoint_config,
        )
        self.broadcast_buffers = broadcast_buffers
        # The grid of experts has no cp axis, so with cp the stages must be outermost.
        self.dp_outside = dp_outside and (self.sp_size == 1 or pp_size == 1)
        elements = ddp_bucket_cap_mb * MEGA / 4 if zero_stage == 0 else zero_bucket_size_in_m * MEGA
        self._set_configs(
            cpu_offload=cpu_offload,
            communication_dtype=communication_dtype,
            overlap_grad_reduce=overlap_communication,
            overlap_param_gather=overlap_allgather,
            bucket_size=max(1, int(elements)),
            data_parallel_sharding_strategy=STRATEGIES[zero_stage],
            reduce_microbatches="last",
        )

    # -- what the Booster asks --------------------------------------------------------------------------------------

    def data_size(self) -> int:
        """Return the number of model replicas."""
        return self.dp_size

    # -- boost --------------------------------------------------------------------------------------------------------

    @property
    def _title(self) -> str:
        experts = f", ep {self.ep_size}" if self.ep_size > 1 else ""
        return f"{self._name}, tp {self.tp_size}, pp {self.pp_size}{experts}, ZeRO stage {self.zero_stage}"

    # -- a pipeline's step --------------------------------------------------------------------------------------------

    def execute_pipeline(
        self,
        data_iter: Iterable[Any],
        model: nn.Module,
        criterion: Callable[[Any, Any], Any] | None,
        optimizer: Any = None,
        return_loss: bool = True,
        return_outputs: bool = False,
    ) -> dict[str, Any]:
        """Run forward and backward of an iterator's next batch, or only the forward without an optimizer or gradients.

        This is a collective over all ranks, or over the replica for a forward only. Outside ``no_sync``, gradients are
        fully reduced on return.

        Args:
            data_iter (Iterable[Any]): Iterator over batches. A batch is a mapping of the model's arguments, the same on
                all ranks of a replica.
            model (Module): The boosted model.
            criterion (Callable[[Any, Any], Any]): Function of (outputs, batch) that returns a microbatch's mean loss.
                ``None`` for the model's own loss: the mean over the labels of the entire batch, or their sum /
                num_items_in_batch if the batch has that key.
            optimizer (OptimizerWrapper, optional): The boosted optimizer.
            return_loss (bool, optional): Return the loss.
            return_outputs (bool, optional): Return the outputs.

        Returns:
            A dict with 'loss', the mean over microbatches and replicas on all ranks, and 'outputs', the last stage's
            outputs joined over microbatches. A value that is not requested is ``None``.
        """
        return run_pipeline(
            *(data_iter, model, criterion, optimizer),
            schedule=SCHEDULES[self.pp_style],
            microbatches=(self.num_microbatches, self.microbatch_size),
            returns=(return_loss, return_outputs),
        )
