"""ZeroPluginBase: what plugins have in common that train by the sharded optimizer of core.optimizer."""

from __future__ import annotations

import warnings
from abc import abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

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
from core.groups.process_groups import ProcessGroups
from core.groups.rank_grid import GRADIENT_KINDS, RankGrid, axes_of, group_ranks
from core.hugging_face.precision import cast_model
from core.interface.optimizer import is_number
from core.optimizer.adopted_optimizer import AdoptedOptimizer, needs_shapes
from core.optimizer.loss_scaler import DynamicLossScaler
from core.optimizer.optimizer_config import OptimizerConfig

DTYPES: dict[str, torch.dtype | None] = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": None}
WIRE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MEGA = 1024 * 1024


class ZeroPluginBase(DPPluginBase):
    """Every rank trains the whole model on data of its own, and keeps a shard of what trains it.

    A derived class says in `_wrapper_config` what is sharded, and in `_optimizer_config` where that lies if the two
    attributes below do not.

    scaler: the options of DynamicLossScaler, used with fp16. Raises ValueError for what cannot work.
    """

    communication_dtype: torch.dtype | None = None  # of gradients on the wire; None for their own
    cpu_offload = False  # masters, moments and the step on the CPU
    check_for_nan_in_grad = False  # True: a gradient that is not finite is an error on all ranks, and is named

    def __init__(
        self,
        precision: str,
        scaler: dict[str, Any],
        *,
        max_norm: float,
        norm_type: float,
        master_weights: bool,
        verbose: bool,
        cast_inputs: bool,
        fp8_communication: bool,
        use_fp8: bool,
        extra_dp_size: int,
    ) -> None:
        super().__init__()
        if precision not in DTYPES:
            raise ValueError(f"{self._name}: precision {precision!r} is none of {', '.join(DTYPES)}")
        numbers = {"max_norm": max_norm, "norm_type": norm_type, "extra_dp_size": extra_dp_size}
        limited = {name: value for name, value in scaler.items() if name != "max_scale" or value is not None}
        self._check_numbers(numbers | limited)
        if not max_norm >= 0 or not norm_type > 0:
            raise ValueError(
                f"{self._name}: max_norm is {max_norm} and norm_type {norm_type}; expected max_norm >= 0 (0: no "
                "clipping) and norm_type > 0 (math.inf: the largest magnitude)"
            )
        if extra_dp_size < 1 or self.world_size % extra_dp_size:
            raise ValueError(f"the world of {self.world_size} ranks does not split into extra_dp_size={extra_dp_size}")
        DynamicLossScaler(**scaler)  # refuses numbers that make no scaler
        if use_fp8:
            self._check_fp8(precision)
        self.precision = precision
        self.scaler_options = scaler
        self.max_norm = max_norm
        self.norm_type = norm_type
        self.master_weights = master_weights
        self.verbose = verbose
        self.cast_inputs = cast_inputs
        self.fp8_communication = fp8_communication
        self.use_fp8 = use_fp8
        self.extra_dp_size = extra_dp_size
        self._groups: ProcessGroups | None = None

    @property
    def _name(self) -> str:
        """The plugin's name, for messages."""
        return type(self).__name__

    def _check_numbers(self, arguments: dict[str, Any]) -> None:
        """ValueError, by the argument's name, for what is no number."""
        for name, value in arguments.items():
            if not is_number(value) or isinstance(value, bool):
                hint = "; 0 does not clip" if name == "max_norm" else ""
                raise ValueError(f"{self._name}: {name} is {value!r}; it must be a number{hint}")

    def _check_fp8(self, precision: str) -> None:
        if precision != "bf16":
            raise ValueError(f"use_fp8 gives products in bf16, and precision is {precision!r}; set precision='bf16'")
        reason = why_not(device_of_group())
        if reason is not None:
            raise RuntimeError(f"{self._name}: use_fp8 cannot run here: {reason}. Leave it out")

    # -- what a derived class says ------------------------------------------------------------------------------------

    @property
    @abstractmethod
    def _title(self) -> str:
        """The way of training in words, for the log."""

    @abstractmethod
    def _wrapper_config(self, model: nn.Module, shaped: bool) -> DistributedDataParallelConfig:
        """Options of the wrapper for gradients. shaped: True if the optimizer needs whole parameters."""

    def _optimizer_config(self) -> OptimizerConfig:
        """Options of the engine's optimizer for masters and moments."""
        return OptimizerConfig(
            **self._master_options(),
            optimizer_cpu_offload=self.cpu_offload,
            optimizer_offload_fraction=1.0 if self.cpu_offload else 0.0,
            overlap_cpu_optimizer_d2h_h2d=self.cpu_offload,
        )

    def _boosted_model(
        self, module: nn.Module, cast_to: torch.dtype | None, engine: AdoptedOptimizer | None
    ) -> LowLevelZeroModel:
        """The model that `boost` returns."""
        return LowLevelZeroModel(module, cast_to, engine)

    def engine_configs(
        self, model: nn.Module, optimizer: torch.optim.Optimizer
    ) -> tuple[DistributedDataParallelConfig, OptimizerConfig]:
        """Options by which `boost` wraps this rank's part of a model, with its adapters, and keeps masters and
        moments. Local, also without torch.distributed (`planned_world`).
        """
        return self._wrapper_config(model, needs_shapes(optimizer)), self._optimizer_config()

    # -- what the Booster asks ----------------------------------------------------------------------------------------

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
        """Gradients can be kept from being reduced for a while."""
        return True

    def no_sync(self, model: nn.Module | None = None, optimizer: Any = None) -> AbstractContextManager[None]:
        """Inside, backward adds to this rank's gradients without reducing them; the model or the optimizer do."""
        for boosted in (model, optimizer):
            if isinstance(boosted, (LowLevelZeroModel, LowLevelZeroOptimizer)):
                return boosted.no_sync()
        raise ValueError(f"no_sync got neither a model nor an optimizer that {self._name} has boosted; pass one")

    def data_rank(self) -> int:
        """Index of this rank's part of the data."""
        return self.groups().rank("dp") if parallel_state.model_parallel_is_initialized() else self.rank

    def data_size(self) -> int:
        """In how many parts the data is split."""
        return self.groups().size("dp") if parallel_state.model_parallel_is_initialized() else self.world_size

    # -- boost --------------------------------------------------------------------------------------------------------

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
        if optimizer is not None:
            self.complete_optimizer(model, optimizer)
            needs_shapes(optimizer)  # refuses one of which that is not known
        empty = next((name for name, param in model.named_parameters() if param.is_meta), None)
        if empty is not None:
            raise ValueError(
                f"parameter {empty!r} is on the meta device and has no values; give the model to "
                "core.distributed.materialize before its optimizer is made"
            )
        model = self._cast(model.to(self.device()))
        cast_to = DTYPES[self.precision] if self.cast_inputs else None
        if optimizer is None:
            return self._boosted_model(model, cast_to, None), None, criterion, dataloader, lr_scheduler
        self._freeze_untrained(model, optimizer)
        ddp_config, optimizer_config = self.engine_configs(model, optimizer)
        wrapped = DistributedDataParallel(None, ddp_config, model, pg_collection=self.groups())
        engine = AdoptedOptimizer(optimizer_config, wrapped, optimizer)
        if self.precision == "fp16":
            engine.grad_scaler = DynamicLossScaler(**self.scaler_options)
        boosted = self._boosted_model(wrapped, cast_to, engine)
        if self.verbose and self.rank == 0:
            print(f"{self._title}, {self.precision}:\n{wrapped.describe()}", flush=True)
        zero = LowLevelZeroOptimizer(optimizer, engine, wrapped, self.max_norm, verbose=self.verbose)
        zero.name_parameters(model)
        return boosted, zero, criterion, dataloader, lr_scheduler

    def _cast(self, model: nn.Module) -> nn.Module:
        """The model in `precision` (`cast_model`), with linear layers that multiply in 8 bits if `use_fp8` says so."""
        dtype = DTYPES[self.precision]
        if dtype is not None:
            model = cast_model(model, dtype)
        if self.use_fp8 and not use_fp8_linears(model):
            raise ValueError("use_fp8 would change nothing: no nn.Linear's sizes are multiples of 16. Leave it out")
        return model

    def _freeze_untrained(self, model: nn.Module, optimizer: Any) -> None:
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

    def _gradient_dtypes(self) -> tuple[torch.dtype | None, torch.dtype | None]:
        """Dtypes in which gradients are kept and sent; None for their own."""
        own = DTYPES[self.precision]
        if self.fp8_communication:
            return torch.float32 if self.cpu_offload else None, torch.float8_e4m3fn
        if own is None:
            return None, self.communication_dtype
        # The CPU steps fp32 gradients; they are kept so, and travel as they would otherwise.
        memory = torch.float32 if self.cpu_offload or self.communication_dtype is torch.float32 else own
        wire = self.communication_dtype or own
        return memory, None if wire is memory else wire

    def _reductions(self) -> dict[str, Any]:
        """Options of the wrapper that follow from the precision alone."""
        memory, wire = self._gradient_dtypes()
        return {
            "grad_reduce_in_fp32": memory is torch.float32,
            "check_for_nan_in_grad": self.check_for_nan_in_grad,
            "num_distributed_optimizer_instances": self.extra_dp_size,
            "initial_weights": "broadcast",
            # Sums that are divided later could leave fp16's range.
            "scale_in_optimizer": torch.float16 not in (wire, DTYPES[self.precision]),
            "grad_communication_dtype": wire,
        }

    def _master_options(self) -> dict[str, Any]:
        """Options of the optimizer that follow from the precision, the norm and `master_weights` alone."""
        dtype = DTYPES[self.precision]
        options: dict[str, Any] = {
            "fp16": self.precision == "fp16",
            "bf16": self.precision == "bf16",
            "clip_grad": self.max_norm,
            "grad_norm_type": self.norm_type,
        }
        if not self.master_weights and dtype is not None:
            memory, _ = self._gradient_dtypes()
            options |= {
                "use_precision_aware_optimizer": True,
                "main_grads_dtype": memory or dtype,
                "main_params_dtype": dtype,
                "exp_avg_dtype": torch.bfloat16,
                "exp_avg_sq_dtype": torch.bfloat16,
            }
        return options

    def groups(self) -> ProcessGroups:
        """The data-parallel groups: parallel_state's, or made here at the first call. Collective then."""
        if self._groups is None:
            if parallel_state.model_parallel_is_initialized():
                self._groups = self._data_parallel_groups()
            else:
                members = group_ranks(RankGrid(self.world_size), self.rank, num_instances=self.extra_dp_size)
                data_groups = {kind: ranks for kind, ranks in members.items() if kind in GRADIENT_KINDS}
                self._groups = ProcessGroups.build(data_groups)
        return self._groups

    def _data_parallel_groups(self) -> ProcessGroups:
        groups = parallel_state.get_process_groups()
        for name in (axis.name for axis in axes_of(expert=False) if axis.option):
            if groups.size(name) > 1:
                raise ValueError(
                    f"{self._name} trains a whole model on every rank, and parallel_state has a {name!r} group of "
                    f"{groups.size(name)} ranks; use core.distributed and core.optimizer directly for that layout"
                )
        return self.expect_instances(groups)

    def expect_instances(self, groups: ProcessGroups) -> ProcessGroups:
        """The groups; ValueError unless they have the instances that `extra_dp_size` says."""
        instances = groups.size("dp_cp") // groups.size("intra_dp_cp")
        if instances != self.extra_dp_size:
            raise ValueError(
                f"extra_dp_size is {self.extra_dp_size}, and parallel_state was initialized with "
                f"num_distributed_optimizer_instances={instances}; give both the same number"
            )
        return groups
