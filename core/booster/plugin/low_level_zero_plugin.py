"""LowLevelZeroPlugin: the optimizer's state (stage 1) and reduced gradients (stage 2) sharded over the data ranks."""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Literal

import torch
from torch import nn

from core import parallel_state
from core.booster.accelerator import device_of_group
from core.booster.checkpoint_io.low_level_zero_checkpoint_io import LowLevelZeroCheckpointIO
from core.booster.mixed_precision.fp8 import use_fp8_linears, why_not
from core.booster.plugin.dp_plugin_base import DPPluginBase
from core.booster.plugin.low_level_zero_model import LowLevelZeroModel
from core.booster.plugin.low_level_zero_optimizer import LowLevelZeroOptimizer
from core.booster.plugin.plugin_base import Boosted
from core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from core.interface.optimizer import is_number
from core.optimizer.adopted_optimizer import AdoptedOptimizer, needs_shapes
from core.optimizer.loss_scaler import DynamicLossScaler
from core.optimizer.optimizer_config import OptimizerConfig
from core.process_groups import ProcessGroups
from core.rank_grid import GRADIENT_KINDS, RankGrid, axes_of, group_ranks

logger = logging.getLogger(__name__)

DTYPES: dict[str, torch.dtype | None] = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": None}
WIRE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MEGA = 1024 * 1024


class LowLevelZeroPlugin(DPPluginBase):
    """ZeRO stages 1 and 2 (arXiv:1910.02054): every rank keeps all parameters, and a part of what trains them.

    stage: 1 shards masters and moments, 2 the reduced gradients as well. precision: 'fp16', 'bf16', or 'fp32', which
    leaves parameters as they are; otherwise the whole model is cast, and with cast_inputs each floating input.
    initial_scale .. max_scale: of the dynamic loss scale, with fp16 only.
    max_norm: clip the global norm of kind norm_type inside `step`; 0 does not.
    reduce_bucket_size_in_m: gradients that travel together, in 1024 * 1024 elements. communication_dtype: of gradients
    on the wire; None for the parameters' own. fp8_communication: gradients travel in 8 bits with a scale for each 256.
    overlap_communication: reduce buckets while backward goes on. overlap_allgather: step bucket by bucket, and gather
    a bucket's parameters while the next one is stepped. cpu_offload: masters, moments and the step on the CPU.
    master_weights: fp32 copies of 16-bit parameters; False leaves no fp32 copy of anything.
    use_fp8: linear layers multiply in 8 bits; with 'bf16', where the machine can. verbose: log what is wrapped how.
    extra_dp_size: shard within world / extra_dp_size neighbouring ranks only, and replicate across: an update gathers
    within these. reduce_microbatches: with stage 2 and `no_sync`, keep whole gradients until the 'last' microbatch, or
    reduce 'every' one (less memory, more traffic).

    Experts (parameters with allreduce = False) are reduced over the expert data group of
    `core.parallel_state.initialize_model_parallel`, if that was called. Raises ValueError for what cannot work.
    """

    def __init__(
        self,
        stage: int = 1,
        precision: str = "fp16",
        initial_scale: float = 2**32,
        min_scale: float = 1,
        growth_factor: float = 2,
        backoff_factor: float = 0.5,
        growth_interval: int = 1000,
        hysteresis: int = 2,
        max_scale: float = 2**32,
        max_norm: float = 0.0,
        norm_type: float = 2.0,
        reduce_bucket_size_in_m: float = 12,
        communication_dtype: torch.dtype | None = None,
        overlap_communication: bool = True,
        overlap_allgather: bool = False,
        cpu_offload: bool = False,
        master_weights: bool = True,
        verbose: bool = False,
        cast_inputs: bool = True,
        fp8_communication: bool = False,
        use_fp8: bool = False,
        extra_dp_size: int = 1,
        *,
        reduce_microbatches: Literal["last", "every"] = "last",
    ) -> None:
        super().__init__()
        if stage not in (1, 2):
            raise ValueError(
                f"LowLevelZeroPlugin only supports stage 1/2 training, and stage is {stage!r}; for stage 3 use "
                "TorchFSDPPlugin"
            )
        if precision not in DTYPES:
            raise ValueError(f"LowLevelZeroPlugin: precision {precision!r} is none of {', '.join(DTYPES)}")
        _check_numbers(
            {"max_norm": max_norm, "norm_type": norm_type, "reduce_bucket_size_in_m": reduce_bucket_size_in_m}
            | {"extra_dp_size": extra_dp_size}
            | {"initial_scale": initial_scale, "min_scale": min_scale}
            | ({} if max_scale is None else {"max_scale": max_scale})
            | {"growth_factor": growth_factor, "backoff_factor": backoff_factor}
            | {"growth_interval": growth_interval, "hysteresis": hysteresis}
        )
        if not max_norm >= 0 or not norm_type > 0:
            raise ValueError(
                f"LowLevelZeroPlugin: max_norm is {max_norm} and norm_type {norm_type}; expected max_norm >= 0 (0: no "
                "clipping) and norm_type > 0 (math.inf: the largest magnitude)"
            )
        if not 0 < reduce_bucket_size_in_m < math.inf:
            raise ValueError(f"reduce_bucket_size_in_m is {reduce_bucket_size_in_m}; a bucket needs a positive size")
        if communication_dtype is not None and communication_dtype not in WIRE_DTYPES:
            raise ValueError(f"communication_dtype is {communication_dtype}; expected None or one of {WIRE_DTYPES}")
        if fp8_communication and communication_dtype is not None:
            raise ValueError(
                f"fp8_communication and communication_dtype={communication_dtype} both say what travels; give one"
            )
        if extra_dp_size < 1 or self.world_size % extra_dp_size:
            raise ValueError(f"the world of {self.world_size} ranks does not split into extra_dp_size={extra_dp_size}")
        if reduce_microbatches not in ("last", "every"):
            raise ValueError(f"reduce_microbatches {reduce_microbatches!r} is none of last, every")
        if reduce_microbatches == "every" and stage == 1:
            raise ValueError("reduce_microbatches='every' adds to shards of gradients, which only stage=2 has")
        if cpu_offload and not master_weights and precision != "fp32":
            raise ValueError(
                f"cpu_offload keeps fp32 masters on the CPU, and with master_weights=False {precision} training has "
                "none; set master_weights=True"
            )
        self.scaler_options: dict[str, Any] = {
            "initial_scale": initial_scale,
            "min_scale": min_scale,
            "growth_factor": growth_factor,
            "backoff_factor": backoff_factor,
            "growth_interval": growth_interval,
            "hysteresis": hysteresis,
            "max_scale": max_scale,
        }
        DynamicLossScaler(**self.scaler_options)  # refuses numbers that make no scaler
        if use_fp8:
            _check_fp8(precision)
        self.stage = stage
        self.precision = precision
        self.max_norm = max_norm
        self.norm_type = norm_type
        self.bucket_size = max(1, int(reduce_bucket_size_in_m * MEGA))
        self.communication_dtype = communication_dtype
        self.overlap_communication = overlap_communication
        self.overlap_allgather = overlap_allgather
        self.cpu_offload = cpu_offload
        self.master_weights = master_weights
        self.verbose = verbose
        self.cast_inputs = cast_inputs
        self.fp8_communication = fp8_communication
        self.use_fp8 = use_fp8
        self.extra_dp_size = extra_dp_size
        self.reduce_microbatches: Literal["last", "every"] = reduce_microbatches
        self._groups: ProcessGroups | None = None

    # -- what the Booster asks --------------------------------------------------------------------------------------

    def supported_precisions(self) -> list[str]:
        """Those that `precision` may name."""
        return list(DTYPES)

    def control_precision(self) -> bool:
        """`precision` says it."""
        return True

    def control_checkpoint_io(self) -> bool:
        """Shards of the optimizer's state are gathered, one parameter at a time."""
        return True

    def get_checkpoint_io(self) -> LowLevelZeroCheckpointIO:
        """Whole tensors in files, shards in memory."""
        return LowLevelZeroCheckpointIO()

    def support_no_sync(self) -> bool:
        """In both stages."""
        return True

    def no_sync(self, model: nn.Module | None = None, optimizer: Any = None) -> AbstractContextManager[None]:
        """Inside, backward adds to this rank's gradients without reducing them; the model or the optimizer do."""
        for boosted in (model, optimizer):
            if isinstance(boosted, (LowLevelZeroModel, LowLevelZeroOptimizer)):
                return boosted.no_sync()
        raise ValueError("no_sync got neither a model nor an optimizer that LowLevelZeroPlugin has boosted; pass one")

    def data_rank(self) -> int:
        """Which part of the data is this rank's."""
        return self.groups().rank("dp") if parallel_state.model_parallel_is_initialized() else self.rank

    def data_size(self) -> int:
        """In how many parts the data is split."""
        return self.groups().size("dp") if parallel_state.model_parallel_is_initialized() else self.world_size

    # -- boost ------------------------------------------------------------------------------------------------------

    def configure(
        self,
        model: nn.Module,
        optimizer: Any = None,
        criterion: Callable[..., Any] | None = None,
        dataloader: Any = None,
        lr_scheduler: Any = None,
    ) -> Boosted:
        """Move and cast the model, give every rank rank 0's weights, shard the optimizer. Collective.

        The optimizer is a torch optimizer. One that looks at whole parameters (Adafactor, Muon, a class of yours with
        `needs_shapes = True`) gets every parameter whole, on one rank. Adapters of `enable_lora` that the optimizer
        does not hold are added to it.
        """
        shaped = False
        if optimizer is not None:
            self.complete_optimizer(model, optimizer)
            shaped = needs_shapes(optimizer)
        dtype = DTYPES[self.precision]
        model = model.to(self.device())
        if dtype is not None:
            model = model.half() if dtype is torch.float16 else model.bfloat16()  # complex buffers stay, unlike by `to`
        if self.use_fp8 and not use_fp8_linears(model):
            raise ValueError("use_fp8 would change nothing: no nn.Linear's sizes are multiples of 16. Leave it out")
        cast_to = dtype if self.cast_inputs else None
        if optimizer is None:
            return LowLevelZeroModel(model, cast_to), None, criterion, dataloader, lr_scheduler
        self._freeze_what_nobody_trains(model, optimizer)
        wrapped = DistributedDataParallel(None, self._wrapper_config(shaped), model, pg_collection=self.groups())
        engine = AdoptedOptimizer(self._optimizer_config(), wrapped, optimizer)
        if self.precision == "fp16":
            engine.grad_scaler = DynamicLossScaler(**self.scaler_options)
        boosted = LowLevelZeroModel(wrapped, cast_to, engine)
        if self.verbose and self.rank == 0:
            logger.info("LowLevelZeroPlugin, stage %d, %s:\n%s", self.stage, self.precision, wrapped.describe())
        zero = LowLevelZeroOptimizer(optimizer, engine, wrapped, self.max_norm, verbose=self.verbose)
        zero.name_parameters(model)
        return boosted, zero, criterion, dataloader, lr_scheduler

    def _freeze_what_nobody_trains(self, model: nn.Module, optimizer: Any) -> None:
        held = {id(param) for group in optimizer.param_groups for param in group["params"]}
        left = [(name, p) for name, p in model.named_parameters() if p.requires_grad and id(p) not in held]
        if left:
            warnings.warn(
                f"{len(left)} parameters of the model, the first {left[0][0]!r}, are not in the optimizer; no "
                "gradients are kept or reduced for them, and requires_grad is set to False",
                stacklevel=4,
            )
        for _, param in left:
            param.requires_grad_(False)

    def _wrapper_config(self, shaped: bool) -> DistributedDataParallelConfig:
        memory, wire = self._gradient_dtypes()
        return DistributedDataParallelConfig(
            grad_reduce_in_fp32=memory is torch.float32,
            overlap_grad_reduce=self.overlap_communication,
            overlap_param_gather=self.overlap_allgather,
            num_distributed_optimizer_instances=self.extra_dp_size,
            bucket_size=self.bucket_size,
            data_parallel_sharding_strategy="optim" if self.stage == 1 else "optim_grads",
            reduce_microbatches=self.reduce_microbatches,
            initial_weights="broadcast",
            # Sums that are divided later could leave fp16's range.
            scale_in_optimizer=torch.float16 not in (wire, DTYPES[self.precision]),
            keep_params_whole="all" if shaped else False,
            grad_communication_dtype=wire,
        )

    def _gradient_dtypes(self) -> tuple[torch.dtype | None, torch.dtype | None]:
        """What gradients are kept in and what they travel in; None for what they are in anyway."""
        own = DTYPES[self.precision]
        if self.fp8_communication:
            return torch.float32 if self.cpu_offload else None, torch.float8_e4m3fn
        if own is None:
            return None, self.communication_dtype
        # The CPU steps fp32 gradients; they are kept so, and travel as they would otherwise.
        memory = torch.float32 if self.cpu_offload or self.communication_dtype is torch.float32 else own
        wire = self.communication_dtype or own
        return memory, None if wire is memory else wire

    def _optimizer_config(self) -> OptimizerConfig:
        dtype = DTYPES[self.precision]
        small: dict[str, Any] = {}
        if not self.master_weights and dtype is not None:
            memory, _ = self._gradient_dtypes()
            small = {
                "use_precision_aware_optimizer": True,
                "main_grads_dtype": memory or dtype,
                "main_params_dtype": dtype,
                "exp_avg_dtype": torch.bfloat16,
                "exp_avg_sq_dtype": torch.bfloat16,
            }
        return OptimizerConfig(
            fp16=self.precision == "fp16",
            bf16=self.precision == "bf16",
            clip_grad=self.max_norm,
            grad_norm_type=self.norm_type,
            optimizer_cpu_offload=self.cpu_offload,
            optimizer_offload_fraction=1.0 if self.cpu_offload else 0.0,
            overlap_cpu_optimizer_d2h_h2d=self.cpu_offload,
            **small,
        )

    def groups(self) -> ProcessGroups:
        """The data-parallel groups: parallel_state's, or made here at the first call. Collective then."""
        if self._groups is None:
            if parallel_state.model_parallel_is_initialized():
                self._groups = _data_parallel_groups(self.extra_dp_size)
            else:
                members = group_ranks(RankGrid(self.world_size), self.rank, num_instances=self.extra_dp_size)
                data_groups = {kind: ranks for kind, ranks in members.items() if kind in GRADIENT_KINDS}
                self._groups = ProcessGroups.build(data_groups)
        return self._groups


def _data_parallel_groups(extra_dp_size: int) -> ProcessGroups:
    groups = parallel_state.get_process_groups()
    for name in (axis.name for axis in axes_of(expert=False) if axis.option):
        if groups.size(name) > 1:
            raise ValueError(
                f"LowLevelZeroPlugin trains a whole model on every rank, and parallel_state has a {name!r} group of "
                f"{groups.size(name)} ranks; use core.distributed and core.optimizer directly for that layout"
            )
    instances = groups.size("dp_cp") // groups.size("intra_dp_cp")
    if instances != extra_dp_size:
        raise ValueError(
            f"extra_dp_size is {extra_dp_size}, and parallel_state was initialized with "
            f"num_distributed_optimizer_instances={instances}; give both the same number"
        )
    return groups


def _check_numbers(arguments: dict[str, Any]) -> None:
    for name, value in arguments.items():
        if not is_number(value) or isinstance(value, bool):
            hint = "; 0 does not clip" if name == "max_norm" else ""
            raise ValueError(f"LowLevelZeroPlugin: {name} is {value!r}; it must be a number{hint}")


def _check_fp8(precision: str) -> None:
    if precision != "bf16":
        raise ValueError(f"use_fp8 gives products in bf16, and precision is {precision!r}; set precision='bf16'")
    reason = why_not(device_of_group())
    if reason is not None:
        raise RuntimeError(f"LowLevelZeroPlugin: use_fp8 cannot run here: {reason}. Leave it out")
