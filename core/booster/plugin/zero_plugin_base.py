"""ZeroPluginBase: common base of the plugins that train with the sharded optimizer of core.optimizer."""

from __future__ import annotations

import dataclasses
from abc import abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from core import parallel_state
from core.booster.accelerator import device_of_group
from core.booster.checkpoint_io.hybrid_parallel_checkpoint_io import HybridParallelCheckpointIO
from core.booster.checkpoint_io.low_level_zero_checkpoint_io import LowLevelZeroCheckpointIO
from core.booster.checkpoint_io.torch_ddp_checkpoint_io import TorchDDPCheckpointIO
from core.booster.mixed_precision.fp8 import use_fp8_linears, why_not
from core.booster.plugin.dp_plugin_base import DPPluginBase
from core.booster.plugin.hybrid_parallel_model import HybridParallelModel
from core.booster.plugin.label_mean import replicas_of
from core.booster.plugin.low_level_zero_model import LowLevelZeroModel
from core.booster.plugin.low_level_zero_optimizer import LowLevelZeroOptimizer
from core.booster.plugin.plugin_base import Boosted
from core.checkpoint.tied_tensors import tied_names
from core.distributed import DistributedDataParallelConfig
from core.distributed.materialize import MARK as MATERIALIZED
from core.distributed.wire.collectives import as_bytes
from core.groups.process_groups import ProcessGroups
from core.groups.rank_grid import GRADIENT_KINDS, RankGrid, axes_of, group_ranks
from core.hugging_face import stages_config
from core.hugging_face.cut_model import CutModel, Cutting, cut_model
from core.hugging_face.read.precision import cast_model
from core.interface.optimizer import is_number
from core.optimizer.adopted_optimizer import AdoptedOptimizer
from core.optimizer.algorithms.names import undeclared, update_scope
from core.optimizer.loss_scaler import DynamicLossScaler
from core.optimizer.optimizer_config import OptimizerConfig
from core.pipeline_parallel import wrap_stages
from core.watch.waiting import waiting
from core.watch.warn_user import warn_user

DTYPES: dict[str, torch.dtype | None] = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": None}
WIRE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MEGA = 1024 * 1024
SCALER = ("initial_scale", "min_scale", "growth_factor", "backoff_factor", "growth_interval", "hysteresis", "max_scale")


class ZeroPluginBase(DPPluginBase):
    """Base class of ZeRO plugins: ranks train copies of a model on different data, and each keeps a shard of its state.

    Subclasses decide how the model is split (``cutting``), which state is sharded, and where it is stored. They end
    their __init__ with ``_set_configs``. ``configure`` makes the same five calls for all of them:

        broadcast   every rank gets rank 0's weights, on its device
        cast        parameters get the dtype of training, in which the split is verified
        cut         a CutModel: this rank's parts, and facts about the full model
        wrap        parts get the engine's wrappers, and the optimizer gets their parameters
        adopt       model and optimizer get the interfaces that a loop calls

    ``scaler`` has the options of DynamicLossScaler, used with fp16. The subclasses document the other arguments.

    Raises:
        ValueError: If options are out of range or cannot be combined.
        RuntimeError: If this machine cannot run ``use_fp8``.
    """

    cutting: Cutting | None = None  # None: every rank has the full model, which may be any module
    dp_outside = True  # True if ranks of one replica of a split model are neighbors; False if ranks of one stage are
    _outside = "dp_outside"  # name of that option, for messages
    broadcast_buffers = True
    force_outputs_fp32 = False  # True to cast floating-point outputs of the forward to fp32
    ddp_config: DistributedDataParallelConfig
    optimizer_config: OptimizerConfig

    def __init__(
        self,
        precision: str,
        scaler: dict[str, Any],
        *,
        max_norm: float,
        fp8_communication: bool,
        use_fp8: bool,
        norm_type: float = 2.0,
        master_weights: bool = True,
        verbose: bool = False,
        cast_inputs: bool = True,
        extra_dp_size: int = 1,
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
        DynamicLossScaler(**scaler)  # raises for numbers out of range
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
        return type(self).__name__

    def _check_numbers(self, arguments: dict[str, Any]) -> None:
        """Raise ValueError, with the argument's name, for a value that is not a number."""
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

    # -- for subclasses -----------------------------------------------------------------------------------------------

    @property
    @abstractmethod
    def _title(self) -> str:
        """Return the description that is logged."""

    def _set_configs(
        self, *, cpu_offload: bool = False, communication_dtype: torch.dtype | None = None, **wrapper: Any
    ) -> None:
        """Set the options of the engine's wrapper, ``ddp_config``, and of its optimizer, ``optimizer_config``.

        ``wrapper`` has the wrapper's options: which state is sharded, in which buckets, and when gradients are reduced.
        """
        own = DTYPES[self.precision]
        # Dtypes in which gradients are stored and sent; None for their own.
        if self.fp8_communication:
            memory, wire = torch.float32 if cpu_offload else None, torch.float8_e4m3fn
        elif own is None:
            memory, wire = None, communication_dtype
        else:  # the CPU steps fp32 gradients, which are stored so; the dtype in collectives is unchanged
            memory = torch.float32 if cpu_offload or communication_dtype is torch.float32 else own
            wire = None if (communication_dtype or own) is memory else communication_dtype or own
        self.ddp_config = DistributedDataParallelConfig(
            grad_reduce_in_fp32=memory is torch.float32,
            num_distributed_optimizer_instances=self.extra_dp_size,
            initial_weights="broadcast",
            # Sums that are divided later could leave fp16's range.
            scale_in_optimizer=torch.float16 not in (wire, own),
            grad_communication_dtype=wire,
            **wrapper,
        )
        masters: dict[str, Any] = {}
        if not self.master_weights and own is not None:
            masters = {
                "use_precision_aware_optimizer": True,
                "main_grads_dtype": memory or own,
                "main_params_dtype": own,
                "exp_avg_dtype": torch.bfloat16,
                "exp_avg_sq_dtype": torch.bfloat16,
            }
        self.optimizer_config = OptimizerConfig(
            fp16=self.precision == "fp16",
            bf16=self.precision == "bf16",
            clip_grad=self.max_norm,
            grad_norm_type=self.norm_type,
            optimizer_cpu_offload=cpu_offload,
            optimizer_offload_fraction=1.0 if cpu_offload else 0.0,
            overlap_cpu_optimizer_d2h_h2d=cpu_offload,
            **masters,
        )

    def engine_configs(
        self, model: nn.Module, optimizer: torch.optim.Optimizer
    ) -> tuple[DistributedDataParallelConfig, OptimizerConfig]:
        """Return the options with which ``boost`` wraps this rank's part of a model and creates its optimizer.

        It does not communicate, and works without torch.distributed (``planned_world``). The model has its adapters
        already.
        """
        config = self.ddp_config
        if update_scope(type(optimizer)) != "element":
            config = dataclasses.replace(config, keep_params_whole="all")
        if self.cutting is None or self.cutting.pp_size == 1:
            # Buffers that are not saved, such as rotary frequencies, are constants, so they need no broadcast.
            params = {name for name, _ in model.named_parameters(remove_duplicate=False)}
            saves_buffers = not model.state_dict(keep_vars=True).keys() <= params
            config = dataclasses.replace(config, broadcast_buffers=self.broadcast_buffers and saves_buffers)
        return config, self.optimizer_config

    # -- what the Booster asks ----------------------------------------------------------------------------------------

    def supported_precisions(self) -> list[str]:
        return list(DTYPES)

    def control_precision(self) -> bool:
        """Return ``True``, because ``precision`` applies."""
        return True

    def control_checkpoint_io(self) -> bool:
        """Return ``True``, because shards of the optimizer state are gathered one parameter at a time."""
        return True

    def get_checkpoint_io(self) -> TorchDDPCheckpointIO:
        """Return a CheckpointIO with full tensors in files and shards in memory."""
        return LowLevelZeroCheckpointIO() if self.cutting is None else HybridParallelCheckpointIO()

    def support_no_sync(self) -> bool:
        """Return ``True``, because unreduced gradients can be kept."""
        return True

    def no_sync(self, model: nn.Module | None = None, optimizer: Any = None) -> AbstractContextManager[None]:
        """Context manager in which backward accumulates this rank's gradients without reducing them.

        One of ``model`` and ``optimizer`` may be ``None``. Raises ValueError if the plugin has boosted neither.
        """
        for boosted in (model, optimizer):
            if isinstance(boosted, (LowLevelZeroModel, LowLevelZeroOptimizer)):
                return boosted.no_sync()
        raise ValueError(f"no_sync got neither a model nor an optimizer that {self._name} has boosted; pass one")

    def data_rank(self) -> int:
        """Return the index of this rank's part of the data, the same on all ranks of a replica."""
        has_groups = self.cutting is not None or parallel_state.model_parallel_is_initialized()
        return self.groups().rank("dp") if has_groups else self.rank

    def data_size(self) -> int:
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
        """Broadcast, cast, cut, wrap and adopt a model and its optimizer. Collective over the world.

        Without a split the model may be any module. Otherwise it is a complete transformers model, with or without
        adapters from ``enable_lora``, or one on the meta device, which must be loaded before its first forward. The
        optimizer of a split model must not have made a step, and keeps only this rank's slices.

        An optimizer that needs full parameters (Adafactor, Muon) gets every parameter of this rank unsplit, on one
        rank. Custom classes declare their needs (``core.optimizer.algorithms.names.update_scope``). Adapters that the
        optimizer lacks are added. Criterion, dataloader and scheduler are returned unchanged.
        """
        names = [] if optimizer is None else self._names_in(optimizer, model)
        model = self._cast(self._broadcast(model))
        if self.cutting is None:
            cut = CutModel(model, [model], {name: names for names in tied_names(model) for name in names})
        else:
            cut = cut_model(model, self.cutting, self.groups(), self.device())
        chunks = self._wrap(cut, optimizer, names)
        return *self._adopt(cut, chunks, optimizer, names), criterion, dataloader, lr_scheduler

    def facts_of(self, model: nn.Module, optimizer: Any) -> list[str]:
        """Return the parameters of a model that will be split, one per line. Does not communicate.

        Raises ValueError if an unsplit model has no values, a model to split comes from ``materialize``, or the
        optimizer's state or algorithm cannot be sharded.
        """
        empty = next((name for name, param in model.named_parameters() if param.is_meta), None)
        if empty is not None and self.cutting is None:
            raise ValueError(
                f"parameter {empty!r} is on the meta device and has no values; call core.distributed.materialize on "
                "the model before creating its optimizer"
            )
        if self.cutting is not None and self.cutting.tp_size > 1 and MATERIALIZED in vars(model):
            raise ValueError(
                "materialize() creates a model module by module, so it cannot be split over "
                f"tp_size={self.cutting.tp_size} ranks first; boost the model on the meta device, then call "
                "booster.load_model"
            )
        if optimizer is not None:
            cut = self.cutting
            cuts = cut is not None and cut.tp_size * cut.pp_size * cut.ep_size > 1
            shards = self.ddp_config.sharded and self.world_size > self.extra_dp_size
            if update_scope(type(optimizer)) == "group" and (cuts or shards):
                raise ValueError(undeclared(type(optimizer)))
            if optimizer.state and self.cutting is not None and self.cutting.is_needed:
                raise ValueError(
                    "the optimizer already has state for the unsplit model, and this state cannot be split; boost a "
                    "new optimizer, then call booster.load_optimizer"
                )
        if self.cutting is None:  # the wrapper compares the model
            return []
        return [f"{n} {list(p.shape)} {p.dtype}{' on meta' * p.is_meta}" for n, p in model.named_parameters()]

    def _names_in(self, optimizer: Any, model: nn.Module) -> list[list[str]]:
        """Return the parameter names in each optimizer group. Missing parameters are frozen, with a warning."""
        trained = {id(param) for group in optimizer.param_groups for param in group["params"]}
        left = [(name, p) for name, p in model.named_parameters() if p.requires_grad and id(p) not in trained]
        if left:
            warn_user(
                f"{len(left)} parameters of the model, the first {left[0][0]!r}, are not in the optimizer; no "
                "gradients are kept or reduced for them, and requires_grad is set to False"
            )
        for _, param in left:
            param.requires_grad_(False)
        names = {id(param): name for name, param in model.named_parameters()}
        return [[names[id(param)] for param in group["params"]] for group in optimizer.param_groups]

    def _broadcast(self, model: nn.Module) -> nn.Module:
        """Broadcast rank 0's weights before ranks take slices. An unsplit model is broadcast by the wrapper."""
        if self.cutting is None:
            return model.to(self.device())
        device, world = self.device(), dist.group.WORLD
        for tensor in [*model.parameters(), *(model.buffers() if self.broadcast_buffers else ())]:
            if not tensor.is_meta:
                tensor.data = tensor.detach().to(device)
                with waiting("the weights of rank 0", world):
                    dist.broadcast(as_bytes(tensor.detach()), 0)
        return model if any(param.is_meta for param in model.parameters()) else model.to(device)

    def _cast(self, model: nn.Module) -> nn.Module:
        """Cast the model to ``precision`` (``cast_model``). With ``use_fp8``, make linear layers multiply in 8 bits."""
        dtype = DTYPES[self.precision]
        if dtype is not None:
            model = cast_model(model, dtype)
        if self.use_fp8 and not use_fp8_linears(model):
            raise ValueError("use_fp8 would change nothing: no nn.Linear's sizes are multiples of 16. Leave it out")
        return model

    def _wrap(self, cut: CutModel, optimizer: Any, names: Sequence[Sequence[str]]) -> list[Any]:
        """Wrap the parts and put their parameters into the optimizer. Without an optimizer, return the plain parts."""
        if optimizer is None:
            return list(cut.parts)
        for group, of_group in zip(optimizer.param_groups, names, strict=True):
            group["params"] = [cut.parameters[name] for name in of_group if name in cut.parameters]
        groups, (ddp_config, _) = self.groups(), self.engine_configs(cut.parts[-1], optimizer)
        config = None if cut.layout is None else stages_config(cut.layout, groups.size("tp"))
        return list(wrap_stages(config, ddp_config, cut.parts, groups))

    def _adopt(
        self, cut: CutModel, chunks: Sequence[Any], optimizer: Any, names: Sequence[Sequence[str]]
    ) -> tuple[LowLevelZeroModel, LowLevelZeroOptimizer | None]:
        """Create the model and the optimizer that ``boost`` returns."""
        engine: AdoptedOptimizer | None = None
        wrapped: LowLevelZeroOptimizer | None = None
        if optimizer is not None:
            engine = AdoptedOptimizer(self.optimizer_config, chunks, optimizer)
            if self.precision == "fp16":
                engine.grad_scaler = DynamicLossScaler(**self.scaler_options)
            wrapped = LowLevelZeroOptimizer(optimizer, engine, chunks, self.max_norm, cut, names, verbose=self.verbose)
            if cut.layout is not None and wrapped.scaler is not None:
                chunks[0].config.grad_scale_func = wrapped.scale_loss  # one config for all chunks
            if self.verbose and self.rank == 0:
                print(f"{self._title}, {self.precision}:\n{chunks[0].describe()}", flush=True)
        cast_to = DTYPES[self.precision] if self.cast_inputs else None
        kind = LowLevelZeroModel if self.cutting is None else HybridParallelModel
        data_groups = replicas_of(self.groups())
        model = kind(cut, chunks, cast_to, engine, outputs_fp32=self.force_outputs_fp32, data_groups=data_groups)
        return model, wrapped

    # -- groups -------------------------------------------------------------------------------------------------------

    def groups(self) -> ProcessGroups:
        """Return the groups of ``parallel_state``, or create groups at the first call, which is then collective."""
        if self._groups is None:
            if self.cutting is not None:
                self._groups = self._groups_of_cut(self.cutting)
            elif parallel_state.model_parallel_is_initialized():
                self._groups = self._data_parallel_groups()
            else:
                members = group_ranks(RankGrid(self.world_size), self.rank, num_instances=self.extra_dp_size)
                data_groups = {kind: ranks for kind, ranks in members.items() if kind in GRADIENT_KINDS}
                self._groups = ProcessGroups.build(data_groups)
        return self._groups

    def _groups_of_cut(self, cutting: Cutting) -> ProcessGroups:
        if not parallel_state.model_parallel_is_initialized():
            ends_share_a_rank = cutting.schedule == "ZBVZeroBubble"
            parallel_state.initialize_model_parallel(
                cutting.tp_size,
                cutting.pp_size,
                context_parallel_size=cutting.sp_size,
                expert_model_parallel_size=cutting.ep_size,
                num_distributed_optimizer_instances=self.extra_dp_size,
                order="tp-cp-ep-pp-dp" if self.dp_outside else "tp-cp-ep-dp-pp",
                get_embedding_ranks=lambda ranks: [ranks[0]] if ends_share_a_rank else sorted({ranks[0], ranks[-1]}),
            )
        groups = parallel_state.get_process_groups()
        found = {name: groups.size(name) for name in ("tp", "pp", "cp", "ep")}
        wanted = {"tp": cutting.tp_size, "pp": cutting.pp_size, "cp": cutting.sp_size, "ep": cutting.ep_size}
        if found != wanted:
            raise ValueError(
                f"parallel_state was initialized with {found}, and {self._name} with tp_size={wanted['tp']}, "
                f"pp_size={wanted['pp']}, sp_size={wanted['cp']} (cp), ep_size={wanted['ep']}; give both the same "
                "sizes, or let the plugin initialize it"
            )
        if groups.size("pp") > 1 and groups.size("dp") > 1:
            first, second = groups.ranks("pp")[:2]
            outside = second - first < groups.ranks("dp")[1] - groups.ranks("dp")[0]
            if outside != self.dp_outside:
                raise ValueError(
                    f"parallel_state was initialized with stages {second - first} ranks apart, which is "
                    f"{self._outside}={outside}, and {self._name} with {self._outside}={self.dp_outside}; give both "
                    "the same order, or let the plugin initialize it"
                )
        return groups

    def _data_parallel_groups(self) -> ProcessGroups:
        groups = parallel_state.get_process_groups()
        for name in (axis.name for axis in axes_of(expert=False) if axis.option):
            if groups.size(name) > 1:
                raise ValueError(
                    f"{self._name} trains an unsplit model on every rank, but parallel_state has a {name!r} group of "
                    f"{groups.size(name)} ranks; use core.distributed and core.optimizer directly for that layout"
                )
        return self.expect_instances(groups)

    def expect_instances(self, groups: ProcessGroups) -> ProcessGroups:
        """Return the groups. Raises ValueError if their number of optimizer instances is not ``extra_dp_size``."""
        instances = groups.size("dp_cp") // groups.size("intra_dp_cp")
        if instances != self.extra_dp_size:
            raise ValueError(
                f"extra_dp_size is {self.extra_dp_size}, and parallel_state was initialized with "
                f"num_distributed_optimizer_instances={instances}; give both the same number"
            )
        return groups
