"""HybridParallelPlugin: transformers models over tensor, pipeline and data parallelism, with ZeRO stages 0 to 2."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from core import agree, parallel_state
from core.booster.checkpoint_io.hybrid_parallel_checkpoint_io import HybridParallelCheckpointIO
from core.booster.plugin import hybrid_parallel_parts as parts_of
from core.booster.plugin.hybrid_parallel_model import HybridParallelModel, WholeModel
from core.booster.plugin.hybrid_parallel_optimizer import HybridParallelOptimizer
from core.booster.plugin.layer_checkpointing import GradientCheckpointConfig, checkpoint_layers
from core.booster.plugin.plugin_base import Boosted, PipelinePluginBase
from core.booster.plugin.sequence_options import resolve_sequence
from core.booster.plugin.zero_plugin_base import DTYPES, MEGA, WIRE_DTYPES, ZeroPluginBase
from core.distributed import DistributedDataParallelConfig
from core.hugging_face import Plan, Policy, read_plan, split_model, split_stages, stage_activations, stages_config
from core.hugging_face.parallel_loss import gather_logits, refuse_use_of_split_logits
from core.hugging_face.stages import find_cut, stage_of
from core.optimizer.adopted_optimizer import AdoptedOptimizer, needs_shapes
from core.optimizer.loss_scaler import DynamicLossScaler
from core.pipeline_parallel import MicrobatchLoss, PipelineLayout, PipelineRunner, plan_pipeline, wrap_stages
from core.process_groups import ProcessGroups

SCHEDULES = {"1f1b": "1F1B", "interleaved": "Interleaved1F1B", "zbv": "ZBVZeroBubble"}
# Option -> (its default, why no other value is taken).
REFUSED: dict[str, tuple[Any, str]] = {
    "enable_all_optimization": (False, "modules stay as the family wrote them; set enable_flash_attention=True alone"),
    "enable_fused_normalization": (False, "modules stay as the family wrote them, and so do its norms"),
    "enable_jit_fused": (False, "modules stay as the family wrote them; compile the model with torch.compile yourself"),
    "enable_sequence_overlap": (False, "a gather waits for its module; the option went from ColossalAI too"),
    "find_unused_parameters": (False, "parameters without a gradient are always found"),
    "check_reduction": (False, "the first step always compares the gradients of copies"),
    "gradient_as_bucket_view": (False, "gradients are always views of their buckets"),
    "static_graph": (False, "the graph may change in every step, at no cost"),
    "enable_metadata_cache": (True, "shapes are known before a step, so no metadata is sent"),
    "overlap_p2p": (True, "stages always send while they compute"),
    "make_vocab_size_divisible_by": (64, "a vocabulary is padded to the next multiple of tp_size"),
    "scheduler_nodes": (None, "the schedule of pp_style='zbv' is torch's"),
}


class HybridParallelPlugin(ZeroPluginBase, PipelinePluginBase):
    """Splits a transformers model over tp_size x pp_size x sp_size ranks, and trains replicas of it on the others.

    tp_size, pp_size: tensor-parallel ranks and pipeline ranks. enable_sequence_parallelism: cut the sequence as
    sequence_parallelism_mode says: 'split_gather' (the default) or 'ring' over the tensor-parallel ranks, 'all_to_all'
    or 'ring_attn' over sp_size ranks of their own. dp_outside: True if ranks of one replica are neighbours;
    False if those of one stage are. precision: 'fp16', 'bf16', or 'fp32', which leaves parameters as they are.
    zero_stage: 0 keeps everything on each data rank, 1 shards masters and moments, 2 reduced gradients too (without
    stages only). parallel_output: leave logits split and compute a causal model's loss from the parts.
    custom_policy: a core.hugging_face.Policy, for a family without a plan.
    num_microbatches, microbatch_size: of a pipeline's batch, one of the two. pp_style: '1f1b', 'interleaved' (with
    num_model_chunks stages a rank) or 'zbv' (2 stages a rank). num_layers_per_stage: for each stage.
    gradient_checkpoint_config: a GradientCheckpointConfig. enable_flash_attention: attention by torch's
    scaled_dot_product_attention.
    initial_scale .. max_scale: of the dynamic loss scale, with fp16 only. max_norm: clip the global norm inside `step`.
    broadcast_buffers: give rank 0's buffers to all ranks at `boost`. ddp_bucket_cap_mb, zero_bucket_size_in_m: what
    travels together, without and with ZeRO. overlap_communication: reduce buckets while backward goes on.
    communication_dtype, fp8_communication: of gradients on the wire. With ZeRO: overlap_allgather, cpu_offload.
    use_fp8: linear layers multiply in 8 bits, with 'bf16' and tp_size = pp_size = 1.

    docs/source/hybrid_parallel.md says which parameters are refused, and why. Raises ValueError for what cannot work.
    """

    ep_size = 1  # ranks over which a model's experts are spread
    _outside = "dp_outside"

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
    ) -> None:
        given = dict(locals())
        for name, (default, reason) in REFUSED.items():
            if given[name] != default:
                raise ValueError(f"HybridParallelPlugin: {name}={given[name]!r} would change nothing: {reason}")
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
            enable_sequence_parallelism, sequence_parallelism_mode, tp_size, sp_size, inner_ring_size
        )
        self._check_sizes(tp_size, pp_size)
        self._check_pipeline(pp_size, pp_style, num_model_chunks, num_microbatches, microbatch_size)
        self._check_zero(zero_stage, pp_size, cpu_offload, overlap_allgather)
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
        self.tp_size, self.pp_size, self.zero_stage = tp_size, pp_size, zero_stage
        self.pp_style, self.num_model_chunks = pp_style, 2 if pp_style == "zbv" else num_model_chunks
        self.num_layers_per_stage = None if num_layers_per_stage is None else tuple(num_layers_per_stage)
        self.num_microbatches, self.microbatch_size = num_microbatches, microbatch_size
        self.parallel_output = parallel_output
        self.custom_policy = custom_policy
        self.gradient_checkpoint_config = gradient_checkpoint_config
        self.broadcast_buffers = broadcast_buffers
        self.enable_flash_attention = enable_flash_attention
        # The grid of experts has no cp, so stages can only be outermost beside it.
        self.dp_outside = dp_outside and (self.sp_size == 1 or pp_size == 1)
        elements = ddp_bucket_cap_mb * MEGA / 4 if zero_stage == 0 else zero_bucket_size_in_m * MEGA
        self.bucket_size = max(1, int(elements))
        self.overlaps = overlap_communication, overlap_allgather
        self.cpu_offload = cpu_offload
        self.communication_dtype = communication_dtype

    # -- arguments --------------------------------------------------------------------------------------------------

    def _check_sizes(self, tp_size: int, pp_size: int) -> None:
        for name, size in (("tp_size", tp_size), ("pp_size", pp_size)):
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise ValueError(f"HybridParallelPlugin: {name} is {size!r}; it is a number of ranks, at least 1")
        if self.world_size % (tp_size * pp_size * self.sp_size):
            own_ranks = f" * sp_size {self.sp_size}" if self.sp_size > 1 else ""
            raise ValueError(
                f"World size {self.world_size} is not divisible by tp_size {tp_size} * pp_size {pp_size}{own_ranks}; "
                "sizes must multiply to a divisor of the world"
            )

    def _check_pipeline(
        self, pp_size: int, style: str, chunks: int, microbatches: int | None, microbatch_size: int | None
    ) -> None:
        if style not in SCHEDULES:
            raise ValueError(f"pp_style {style!r} is none of {', '.join(SCHEDULES)}")
        fits = {"1f1b": chunks == 1, "interleaved": chunks > 1, "zbv": chunks in (1, 2)}[style]
        if not fits:
            raise ValueError(
                f"num_model_chunks is {chunks} with pp_style={style!r}; expected 1 for '1f1b', more for 'interleaved', "
                "and 2 for 'zbv'"
            )
        if pp_size == 1 and style != "1f1b":
            raise ValueError(f"pp_style={style!r} needs a pipeline, and pp_size is 1")
        if pp_size > 1 and microbatches is None and microbatch_size is None:
            raise ValueError(f"pp_size is {pp_size}; give num_microbatches or microbatch_size")
        for name, value in (("num_microbatches", microbatches), ("microbatch_size", microbatch_size)):
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise ValueError(f"{name} is {value!r}; expected a whole number of at least 1")

    def _check_zero(self, stage: int, pp_size: int, cpu_offload: bool, overlap_allgather: bool) -> None:
        if stage not in (0, 1, 2):
            raise ValueError(f"zero_stage is {stage!r}; expected 0, 1 or 2 (GeminiPlugin shards parameters too)")
        if stage == 2 and pp_size > 1:
            raise ValueError(
                "zero_stage=2 reduces gradients in every microbatch, and a pipeline has many; with pp_size > 1 use "
                "zero_stage 0 or 1"
            )
        if stage == 0 and (cpu_offload or overlap_allgather):
            name = "cpu_offload" if cpu_offload else "overlap_allgather"
            raise ValueError(f"{name}=True is an option of ZeRO, and zero_stage is 0; set zero_stage=1")

    # -- what the Booster asks --------------------------------------------------------------------------------------

    def get_checkpoint_io(self) -> HybridParallelCheckpointIO:
        """Whole models in files, slices in memory."""
        return HybridParallelCheckpointIO()

    def support_lora(self) -> bool:
        """Adapters of models that are cut are made by core.hugging_face instead."""
        return self.tp_size * self.pp_size * self.sp_size == 1

    def data_rank(self) -> int:
        """Which part of the data is this rank's: that of its replica of the model."""
        return self.groups().rank("dp")

    def data_size(self) -> int:
        """How many replicas of the model there are."""
        return self.groups().size("dp")

    def groups(self) -> ProcessGroups:
        """parallel_state's groups, made here at the first call if nobody has. Collective then."""
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
            data_parallel_sharding_strategy=("no_shard", "optim", "optim_grads")[self.zero_stage],
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

        model: whole, of transformers; any module where tp_size = pp_size = 1. The optimizer is a torch optimizer over
        its parameters that has made no step; it is left with this rank's slices.
        """
        groups = self.groups()
        failure: Exception | None = None
        layout: PipelineLayout | None = None
        whole_groups: list[list[str]] = []
        try:
            names = {id(param): name for name, param in model.named_parameters()}
            if optimizer is not None:
                self.complete_optimizer(model, optimizer)
                if optimizer.state and self.tp_size * self.pp_size * self.ep_size > 1:
                    raise ValueError(
                        "the optimizer has made steps on the whole model, and its state cannot be cut; boost a new "
                        "one, and load the state by booster.load_optimizer"
                    )
                self._freeze_what_nobody_trains(model, optimizer)
                whole_groups = [[names[id(param)] for param in group["params"]] for group in optimizer.param_groups]
            layout = self._layout(model)
            plan = self._plan(model)
        except (ValueError, AttributeError) as error:
            failure = error
        agree.refuse(failure, None, "boost", ValueError)
        model = model.to(self.device())
        self._give_weights(model)
        tied = parts_of.ties_of(model)
        shell = copy.deepcopy(model, {id(p): nn.Parameter(p.to("meta"), p.requires_grad) for p in model.parameters()})
        if self.enable_flash_attention:
            self._use_flash_attention(model)
        dtype = DTYPES[self.precision]
        model = self._cast(model)
        if dtype is not None:
            shell = shell.to(dtype)
        parts = self._cut(model, layout, plan)
        if self.gradient_checkpoint_config is not None:
            checkpoint_layers(parts, self.gradient_checkpoint_config, parts_of.find_layers(parts[0], layout))
        here = parts_of.parameters_here(parts, tied)
        splits = {name: split for part in parts for name, split in parts_of.splits_of(part).items()}
        whole = WholeModel(shell, tied, splits)
        if optimizer is None:
            boosted = HybridParallelModel(parts, layout, whole, groups, dtype, None)
            return boosted, None, criterion, dataloader, lr_scheduler
        shaped = needs_shapes(optimizer)
        for group, names_of_group in zip(optimizer.param_groups, whole_groups, strict=True):
            group["params"] = [here[name][0] for name in names_of_group if name in here]
        config = stages_config(layout, self.tp_size) if layout is not None else None
        chunks = wrap_stages(config, self._wrapper_config(model, shaped), parts, groups)
        engine = AdoptedOptimizer(self._optimizer_config(), chunks, optimizer)
        if self.precision == "fp16":
            engine.grad_scaler = DynamicLossScaler(**self.scaler_options)
        wrapped = HybridParallelOptimizer(optimizer, engine, chunks, self.max_norm, whole_groups, here)
        wrapped.param_names = {param: name for name, (param, _) in here.items()}
        if config is not None and wrapped.scaler is not None:
            config.grad_scale_func = wrapped.scale_loss
        boosted = HybridParallelModel(chunks, layout, whole, groups, dtype, engine)
        return boosted, wrapped, criterion, dataloader, lr_scheduler

    def _layout(self, model: Any) -> PipelineLayout | None:
        if self.pp_size == 1:
            if self.num_layers_per_stage is not None:
                raise ValueError("num_layers_per_stage is for a pipeline, and pp_size is 1")
            return None
        counts, stages, layers = self.num_layers_per_stage, self.pp_size * self.num_model_chunks, find_cut(model).count
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
        if self.custom_policy is None:
            return None
        if self.tp_size == 1:
            raise ValueError("custom_policy says how a model is split over tensor parallelism, and tp_size is 1")
        return read_plan(model, self.custom_policy)

    def _give_weights(self, model: nn.Module) -> None:
        """Slices of different models would make a model that nobody has made."""
        agree.same(
            [
                (
                    "the model",
                    dist.group.WORLD,
                    [f"{name} {list(p.shape)} {p.dtype}" for name, p in model.named_parameters()],
                )
            ],
            kind=ValueError,
            advice="All ranks must build the same model",
        )
        tensors = [*model.parameters(), *(model.buffers() if self.broadcast_buffers else ())]
        for tensor in tensors:
            dist.broadcast(tensor.detach(), 0)

    def _use_flash_attention(self, model: Any) -> None:
        if not hasattr(model, "set_attn_implementation"):
            raise ValueError(f"enable_flash_attention needs a transformers model, and got a {type(model).__name__}")
        model.set_attn_implementation("sdpa")

    def _cut(self, model: Any, layout: PipelineLayout | None, plan: Plan | None) -> list[Any]:
        """This rank's parts of the model."""
        if self.tp_size * self.pp_size * self.ep_size * self.sp_size == 1:
            return [model]
        loss = getattr(getattr(model, "loss_function", None), "__name__", "")
        options: dict[str, Any] = {
            "parallel_output": self.parallel_output and self.tp_size * self.sp_size > 1 and loss == "ForCausalLMLoss",
            "sequence_parallel": self.sequence_parallel,
            "pg_collection": self.groups(),
        }
        if layout is not None:
            return split_stages(model, layout, plan, **options)
        split_model(model, plan, **options)
        return [model]

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
        gives a microbatch's mean loss; None takes the model's own. Returns {'loss': the mean over microbatches, on all
        stages; 'outputs': those of the last stage, put together}; None for what was not asked for.
        Collective over the replica, and outside `no_sync` over all ranks: gradients are whole then.
        """
        if not isinstance(model, HybridParallelModel) or model.layout is None:
            raise RuntimeError(
                "execute_pipeline needs a model that HybridParallelPlugin has boosted with pp_size > 1; with pp_size=1 "
                "call the model and booster.backward"
            )
        if not hasattr(data_iter, "__next__"):
            raise TypeError(
                f"execute_pipeline takes an iterator, and got a {type(data_iter).__name__}, of which it would take the "
                "first batch each time; pass iter(dataloader), once an epoch"
            )
        following: Any = data_iter
        batch = model.cast(dict(next(following)))
        microbatches = parts_of.microbatches_of(batch, self.num_microbatches, self.microbatch_size)
        outputs: list[Any] = []

        def forward_step(chunk: nn.Module, microbatch: dict[str, Any], hidden: Any) -> Any:
            output = chunk(received=hidden, **microbatch)
            if not stage_of(chunk).part.post_process:
                return output
            output = refuse_use_of_split_logits(stage_of(chunk).model, output)
            if return_outputs:
                tensors = {k: v.detach() for k, v in output.items() if isinstance(v, torch.Tensor)}
                outputs.append({name: gather_logits(value) for name, value in tensors.items()})
            loss = output.loss if criterion is None else criterion(output, microbatch)
            return MicrobatchLoss(loss)

        ids = microbatches[0]["input_ids"]
        shape = stage_activations(model.chunks[0], *ids.shape[:2])
        if model.runner is None:
            schedule = SCHEDULES[self.pp_style]
            model.runner = PipelineRunner(
                model.chunks, model.layout, forward_step, shape, schedule=schedule, pg_collection=self.groups()
            )
        runner: PipelineRunner = model.runner
        runner.forward_step = forward_step
        if optimizer is None or not torch.is_grad_enabled():
            outcome = runner.evaluate(microbatches, activations=shape)
        else:
            outcome = runner.step(microbatches, finalize=model.is_syncing(), activations=shape)
        return {
            "loss": outcome.loss.float() if return_loss else None,
            "outputs": parts_of.joined_outputs(outputs) if return_outputs and outputs else None,
        }
