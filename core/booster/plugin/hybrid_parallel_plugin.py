"""HybridParallelPlugin: transformers models over tensor, pipeline and data parallelism, with ZeRO stages 0 to 3."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from core import parallel_state
from core.booster.checkpoint_io.hybrid_parallel_checkpoint_io import HybridParallelCheckpointIO
from core.booster.plugin import hybrid_parallel_parts as parts_of
from core.booster.plugin.hybrid_parallel_model import HybridParallelModel, WholeModel
from core.booster.plugin.hybrid_parallel_optimizer import HybridParallelOptimizer
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
from core.booster.plugin.layer_checkpointing import GradientCheckpointConfig, checkpoint_layers
from core.booster.plugin.mesh_attributes import MeshAttributes
from core.booster.plugin.plugin_base import Boosted, PipelinePluginBase
from core.booster.plugin.split_adapters import MARK, put_on, take_off
from core.booster.plugin.zero_plugin_base import DTYPES, MEGA, WIRE_DTYPES, ZeroPluginBase
from core.distributed import DistributedDataParallelConfig
from core.distributed.distributed_data_parallel_config import STRATEGIES
from core.groups import agree
from core.groups.process_groups import ProcessGroups
from core.hugging_face import Plan, Policy, read_plan, split_model, split_stages, stages_config, use_chunked_loss
from core.hugging_face.precision import cast_model
from core.hugging_face.split_stages import draw, split_empty
from core.hugging_face.stages import find_cut
from core.optimizer.adopted_optimizer import AdoptedOptimizer
from core.optimizer.loss_scaler import DynamicLossScaler
from core.pipeline_parallel import PipelineLayout, plan_pipeline, wrap_stages
from core.watch.waiting import waiting


class HybridParallelPlugin(MeshAttributes, ZeroPluginBase, PipelinePluginBase):
    """Splits a transformers model over tp_size x pp_size x sp_size ranks, and trains replicas of it on the others.

    tp_size, pp_size: tensor-parallel ranks and pipeline ranks. enable_sequence_parallelism: cut the sequence as
    sequence_parallelism_mode says: 'split_gather' (the default) or 'ring' over the tensor-parallel ranks, 'all_to_all'
    or 'ring_attn' over sp_size ranks of their own. dp_outside: True if ranks of one replica are neighbours;
    False if those of one stage are. precision: 'fp16', 'bf16', or 'fp32', which leaves parameters as they are.
    zero_stage: 0 keeps everything on each data rank, 1 shards masters and moments, 2 reduced gradients too, 3 all
    parameters too. parallel_output: leave logits split and compute a causal model's loss from the parts, where the
    model allows it; else they are whole, with a warning. example: arguments of a small forward of the whole model,
    equal on all ranks, which the split is proved with; None to have it made from the model's main input.
    custom_policy: a core.hugging_face.Policy, for a family without a plan. make_vocab_size_divisible_by: over tp_size,
    each rank's rows of a vocabulary are padded to a multiple of it; what is saved has no padding.
    logits_chunk: a causal model computes its loss over so many tokens at a time; 0 for all, None for chunks where
    logits are large (`use_chunked_loss`).
    num_microbatches, microbatch_size: of a pipeline's batch, one of the two; the first wins. pp_style: '1f1b',
    'interleaved' (with num_model_chunks stages a rank) or 'zbv' (2 stages a rank). num_layers_per_stage: for each
    stage.
    gradient_checkpoint_config: a GradientCheckpointConfig. enable_flash_attention: attention by torch's
    scaled_dot_product_attention.
    initial_scale .. max_scale: of the dynamic loss scale, with fp16 only. max_norm: clip the global norm inside `step`.
    broadcast_buffers: give rank 0's buffers to all ranks at `boost`. ddp_bucket_cap_mb: gradients that travel
    together without ZeRO, in MiB of fp32. zero_bucket_size_in_m: the same with ZeRO, in 1024 * 1024 elements.
    overlap_communication: reduce buckets during backward. communication_dtype: of gradients on the wire.
    fp8_communication: gradients travel in 8 bits. cpu_offload: with ZeRO, masters, moments and the step on the CPU.
    overlap_allgather: with ZeRO 1 and 2, step bucket by bucket, and gather a bucket's parameters under the next step.
    use_fp8: linear layers multiply in 8 bits, with 'bf16' and tp_size = pp_size = 1.

    A warning names parameters that change nothing, with the reason. Raises ValueError for what cannot work.
    """

    ep_size = 1  # ranks over which a model's experts are spread
    _outside = "dp_outside"

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
        scaler = ("initial_scale", "min_scale", "growth_factor", "backoff_factor", "growth_interval", "hysteresis")
        super().__init__(
            precision,
            {name: given[name] for name in (*scaler, "max_scale")},
            max_norm=max_norm,
            norm_type=2.0,
            master_weights=True,
            verbose=False,
            cast_inputs=True,
            fp8_communication=fp8_communication,
            use_fp8=use_fp8,
            extra_dp_size=1,
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
            raise ValueError("use_fp8 exchanges the linear layers of whole models; it needs all sizes to be 1")
        self._given = given
        self.tp_size, self.pp_size, self.zero_stage = tp_size, pp_size, zero_stage
        self.pp_style, self.num_model_chunks = pp_style, 2 if pp_style == "zbv" else num_model_chunks
        self.num_layers_per_stage = None if num_layers_per_stage is None else tuple(num_layers_per_stage)
        self.num_microbatches, self.microbatch_size = num_microbatches, microbatch_size
        self.parallel_output = parallel_output
        self.custom_policy = custom_policy
        if isinstance(make_vocab_size_divisible_by, bool) or make_vocab_size_divisible_by < 1:
            raise ValueError(
                f"make_vocab_size_divisible_by is {make_vocab_size_divisible_by!r}; each rank's rows of a split "
                "vocabulary are padded to a multiple of it, so it is a number, at least 1"
            )
        self.make_vocab_size_divisible_by = make_vocab_size_divisible_by
        self.example = example
        self.logits_chunk = logits_chunk
        self.gradient_checkpoint_config = gradient_checkpoint_config
        self.broadcast_buffers = broadcast_buffers
        self.enable_flash_attention = enable_flash_attention
        # The grid of experts has no cp, so stages can only be outermost with it.
        self.dp_outside = dp_outside and (self.sp_size == 1 or pp_size == 1)
        elements = ddp_bucket_cap_mb * MEGA / 4 if zero_stage == 0 else zero_bucket_size_in_m * MEGA
        self.bucket_size = max(1, int(elements))
        self.overlaps = overlap_communication, overlap_allgather
        self.cpu_offload = cpu_offload
        self.communication_dtype = communication_dtype

    # -- what the Booster asks --------------------------------------------------------------------------------------

    def get_checkpoint_io(self) -> HybridParallelCheckpointIO:
        """Whole models in files, slices in memory."""
        return HybridParallelCheckpointIO()

    def support_lora(self) -> bool:
        """Adapters are cut with the layers that they adapt."""
        return True

    def data_rank(self) -> int:
        """Index of this rank's part of the data: that of its replica of the model."""
        return self.groups().rank("dp")

    def data_size(self) -> int:
        """Number of replicas of the model."""
        return self.dp_size

    def groups(self) -> ProcessGroups:
        """parallel_state's groups, made here at the first call if there are none. Collective then."""
        if self._groups is None:
            if not parallel_state.model_parallel_is_initialized():
                parallel_state.initialize_model_parallel(
                    self.tp_size,
                    self.pp_size,
                    context_parallel_size=self.sp_size,
                    expert_model_parallel_size=self.ep_size,
                    order="tp-cp-ep-pp-dp" if self.dp_outside else "tp-cp-ep-dp-pp",
                    get_embedding_ranks=self._ends,
                )
            groups = parallel_state.get_process_groups()
            found = {name: groups.size(name) for name in ("tp", "pp", "cp", "ep")}
            if found != {"tp": self.tp_size, "pp": self.pp_size, "cp": self.sp_size, "ep": self.ep_size}:
                raise ValueError(
                    f"parallel_state was initialized with {found}, and {self._name} with tp_size={self.tp_size}, "
                    f"pp_size={self.pp_size}, sp_size={self.sp_size} (cp), ep_size={self.ep_size}; give both the same "
                    "sizes, or let the plugin initialize it"
                )
            self._check_places(groups)
            self._groups = groups
        return self._groups

    def _check_places(self, groups: ProcessGroups) -> None:
        """ValueError unless ranks of groups that are there already lie as `dp_outside` says."""
        if groups.size("pp") == 1 or groups.size("dp") == 1:
            return
        first, second = groups.ranks("pp")[:2]
        outside = second - first < groups.ranks("dp")[1] - groups.ranks("dp")[0]
        if outside != self.dp_outside:
            raise ValueError(
                f"parallel_state was initialized with stages {second - first} ranks apart, which is {self._outside}="
                f"{outside}, and {self._name} with {self._outside}={self.dp_outside}; give both the same order, or let "
                "the plugin initialize it"
            )

    def _ends(self, ranks: Sequence[int]) -> list[int]:
        """The ranks of a pipeline on which a tied embedding lies."""
        return [ranks[0]] if self.pp_style == "zbv" else sorted({ranks[0], ranks[-1]})

    # -- boost --------------------------------------------------------------------------------------------------------

    @property
    def _title(self) -> str:
        experts = f", ep {self.ep_size}" if self.ep_size > 1 else ""
        return f"{self._name}, tp {self.tp_size}, pp {self.pp_size}{experts}, ZeRO stage {self.zero_stage}"

    def _wrapper_config(self, model: nn.Module, shaped: bool) -> DistributedDataParallelConfig:
        overlap_communication, overlap_allgather = self.overlaps
        return DistributedDataParallelConfig(
            overlap_grad_reduce=overlap_communication,
            overlap_param_gather=overlap_allgather,
            bucket_size=self.bucket_size,
            data_parallel_sharding_strategy=STRATEGIES[self.zero_stage],
            reduce_microbatches="last",
            keep_params_whole="all" if shaped and self.zero_stage else False,
            **self._reductions(),
        )

    def configure(
        self,
        model: nn.Module,
        optimizer: Any = None,
        criterion: Callable[..., Any] | None = None,
        dataloader: Any = None,
        lr_scheduler: Any = None,
    ) -> Boosted:
        """Give every rank rank 0's weights, cut the model, cast it, shard the optimizer. Collective over the world.

        model: whole, of transformers, with adapters of `enable_lora` or without; any module where all sizes are 1. One
        on the meta device gets no values here: load it before its first forward. The optimizer is a torch optimizer
        over its parameters that has made no step; it is left with this rank's slices.
        """
        groups = self.groups()
        failure: Exception | None = None
        layout: PipelineLayout | None = None
        whole_groups: list[list[str]] = []
        try:
            names = {id(param): name for name, param in model.named_parameters()}
            if optimizer is not None:
                self.complete_optimizer(model, optimizer)
                if optimizer.state and self._cuts:
                    raise ValueError(
                        "the optimizer has made steps on the whole model, and its state cannot be cut; boost a new "
                        "one, and load the state by booster.load_optimizer"
                    )
                self._freeze_untrained(model, optimizer)
                whole_groups = [[names[id(param)] for param in group["params"]] for group in optimizer.param_groups]
            tied = parts_of.ties_of(model)
            learning = {n for name, p in model.named_parameters() if p.requires_grad for n in tied.get(name, (name,))}
            memo = {id(p): nn.Parameter(p.to("meta"), p.requires_grad) for p in model.parameters()}
            shell = copy.deepcopy(model, memo)
            empty = any(param.is_meta for param in model.parameters())
            base, adapters = take_off(model) if self._cuts or empty else (model, None)
            layout = self.layout_of(base)
            plan = self._plan(base)
        except (ValueError, AttributeError) as error:
            failure = error
        agree.refuse(failure, None, "boost", ValueError)
        base = base if empty else base.to(self.device())
        self._give_weights(base, () if adapters is None else adapters.values.values())
        if self.enable_flash_attention:
            self._use_flash_attention(base)
        dtype = DTYPES[self.precision]
        base = self._cast(base)
        if dtype is not None:
            shell = cast_model(shell, dtype)
        parts = self._cut(base, layout, plan, empty=empty)
        if self.gradient_checkpoint_config is not None:
            checkpoint_layers(parts, self.gradient_checkpoint_config, parts_of.find_layers(parts[0], layout))
        if adapters is not None:
            parts = put_on(parts, adapters, learning, groups, staged=layout is not None)
            parts = parts if dtype is None else [cast_model(part, dtype) for part in parts]
        for part in parts:
            use_chunked_loss(part, self.logits_chunk)
        here = parts_of.parameters_here(parts, tied)
        splits = {name: split for part in parts for name, split in parts_of.splits_of(part).items()}
        whole = WholeModel(shell, tied, splits, self.custom_policy)
        unread = {name for name in shell.state_dict() if MARK not in name} if empty else set()
        if optimizer is None:
            boosted = HybridParallelModel(parts, layout, whole, groups, dtype, None, unread)
            return boosted, None, criterion, dataloader, lr_scheduler
        ddp_config, optimizer_config = self.engine_configs(base, optimizer)
        for group, names_of_group in zip(optimizer.param_groups, whole_groups, strict=True):
            group["params"] = [here[name][0] for name in names_of_group if name in here]
        config = stages_config(layout, self.tp_size) if layout is not None else None
        chunks = wrap_stages(config, ddp_config, parts, groups)
        engine = AdoptedOptimizer(optimizer_config, chunks, optimizer)
        if self.precision == "fp16":
            engine.grad_scaler = DynamicLossScaler(**self.scaler_options)
        wrapped = HybridParallelOptimizer(optimizer, engine, chunks, self.max_norm, whole_groups, here)
        wrapped.param_names = {param: name for name, (param, _) in here.items()}
        if config is not None and wrapped.scaler is not None:
            config.grad_scale_func = wrapped.scale_loss
        boosted = HybridParallelModel(chunks, layout, whole, groups, dtype, engine, unread)
        return boosted, wrapped, criterion, dataloader, lr_scheduler

    def layout_of(self, model: Any) -> PipelineLayout | None:
        """Layout of a whole model's layers; None without a pipeline. Local; ValueError for what cannot be."""
        if self.pp_size == 1:
            if self.num_layers_per_stage is not None:
                raise ValueError("num_layers_per_stage is for a pipeline, and pp_size is 1")
            return None
        cut = find_cut(model)
        if cut.tied and self.zero_stage == 3 and self.pp_style == "zbv":
            raise ValueError(
                f"{cut.family}: with pp_style='zbv' the first stage lends its tied {sorted(cut.tied)[0]!r} to the last "
                "one, which cannot gather it under zero_stage=3; use zero_stage 2, or another pp_style"
            )
        counts, stages, layers = self.num_layers_per_stage, self.pp_size * self.num_model_chunks, cut.count
        if counts is None and layers % stages:  # more layers in the middle, away from embeddings and head
            each, rest = divmod(layers, stages)
            first = (stages - rest) // 2
            counts = tuple(each + (first <= stage < first + rest) for stage in range(stages))
        return plan_pipeline(
            layers,
            self.pp_size,
            schedule=SCHEDULES[self.pp_style],
            chunks=self.num_model_chunks,
            layers_per_stage=counts,
        )

    def _plan(self, model: Any) -> Plan | None:
        """The plan over tensor parallelism, by the family's own or the policy; None where there is none."""
        if self.tp_size == 1:
            if self.custom_policy is not None:
                raise ValueError("custom_policy says how a model is split over tensor parallelism, and tp_size is 1")
            return None
        return read_plan(model, self.custom_policy).with_vocabulary(self.make_vocab_size_divisible_by)

    @property
    def _cuts(self) -> bool:
        """True if a rank has a part of the model, or uses a part of its input."""
        return self.tp_size * self.pp_size * self.ep_size * self.sp_size > 1

    def _give_weights(self, model: nn.Module, more: Iterable[nn.Parameter]) -> None:
        """Give all ranks the weights of rank 0, before they take slices. more: parameters taken off before."""
        agree.same(
            [
                (
                    "the model",
                    dist.group.WORLD,
                    [f"{n} {list(p.shape)} {p.dtype}{' on meta' * p.is_meta}" for n, p in model.named_parameters()],
                )
            ],
            kind=ValueError,
            advice="All ranks must build the same model",
        )
        device = self.device()
        for tensor in [*model.parameters(), *(model.buffers() if self.broadcast_buffers else ()), *more]:
            if not tensor.is_meta:
                tensor.data = tensor.detach().to(device)
                with waiting("the weights of rank 0", dist.group.WORLD):
                    dist.broadcast(tensor.detach(), 0)

    def _use_flash_attention(self, model: Any) -> None:
        if not hasattr(model, "set_attn_implementation"):
            raise ValueError(f"enable_flash_attention needs a transformers model, and got a {type(model).__name__}")
        model.set_attn_implementation("sdpa")

    def _cut(self, model: Any, layout: PipelineLayout | None, plan: Plan | None, *, empty: bool) -> list[Any]:
        """This rank's parts of the model. empty: True if it is on the meta device."""
        if not self._cuts:
            if empty:
                draw(model, self.device())
            return [model]
        options: dict[str, Any] = {
            "example": self.example,
            "parallel_output": "where possible" if self.parallel_output else False,
            "sequence_parallel": self.sequence_parallel,
            "pg_collection": self.groups(),
        }
        if empty:
            return split_empty(model, layout, plan, device=self.device(), **options)
        if layout is not None:
            return split_stages(model, layout, plan, **options)
        split_model(model, plan, **options)
        return [model]

    def splits_logits(self, model: Any) -> bool:
        """True if logits of a causal model stay split by its class, and its loss is computed from the parts.

        `boost` runs a forward with labels to see it.
        """
        loss = getattr(getattr(model, "loss_function", None), "__name__", "")
        return self.parallel_output and self.tp_size * self.sp_size > 1 and loss == "ForCausalLMLoss"

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
        """Forward and backward of the next batch of an iterator; without an optimizer, or gradients, the forward alone.

        The batch is a mapping of the model's arguments, the same on all ranks of a replica. criterion(outputs, batch)
        gives a microbatch's mean loss; None takes the model's own, which is the mean over the labels of the whole
        batch, or their sum / num_items_in_batch where the batch has that. Returns {'loss': the mean over microbatches
        and replicas, equal on all ranks; 'outputs': those of the last stage, put together}; None for what was not asked
        for. Collective over all ranks; a forward alone over the replica. Outside `no_sync` gradients are whole then.
        """
        return run_pipeline(
            *(data_iter, model, criterion, optimizer),
            schedule=SCHEDULES[self.pp_style],
            microbatches=(self.num_microbatches, self.microbatch_size),
            returns=(return_loss, return_outputs),
        )
