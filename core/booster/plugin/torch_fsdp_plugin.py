"""TorchFSDPPlugin: torch's FSDP2 (``fully_shard``), which shards parameters, gradients and optimizer state over
ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffload,
    FSDPModule,
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardingStrategy,
    fully_shard,
)
from torch.distributed.tensor import DTensor

from core.booster.checkpoint_io import TorchFSDPCheckpointIO, shard_like
from core.booster.mixed_precision import FP16TorchMixedPrecision, TorchAMPOptimizer
from core.booster.plugin.dp_plugin_base import DPPluginBase
from core.booster.plugin.fsdp_collectives import FP8AllGather, FP8ReduceScatter
from core.booster.plugin.fsdp_options import (
    HYBRID,
    RESHARDED,
    Unit,
    check_kinds,
    mesh_of,
    offload_of,
    own_modules,
    units_of,
)
from core.booster.plugin.label_mean import LabelMeanModel
from core.booster.plugin.limit_agreement import check_limit
from core.booster.plugin.model_agreement import agree_on_model
from core.booster.plugin.plugin_base import Boosted
from core.groups import agree
from core.hugging_face.read.precision import kept_dtypes
from core.interface import OptimizerWrapper
from core.interface.optimizer import check_clip_value, check_max_norm
from core.optimizer.loss_scaler import DynamicLossScaler
from core.watch.waiting import waiting


class TorchFSDPModel(LabelMeanModel):
    """Boosted model with sharded units. ``module`` is the user's own module, whose parameters are DTensors.

    ``data_groups`` are the groups of ranks that shard, and of ranks that replicate.
    """

    _syncs = True

    def __init__(self, module: nn.Module, data_groups: Sequence[dist.ProcessGroup]) -> None:
        super().__init__(module)
        self.data_groups = data_groups

    @property
    def require_backward_grad_sync(self) -> bool:
        """False while backward keeps full gradients and reduces nothing, like torch DDP's attribute."""
        return self._syncs

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, syncs: bool) -> None:
        self._syncs = bool(syncs)
        for part in self.modules():
            if isinstance(part, FSDPModule):
                part.set_requires_gradient_sync(self._syncs, recurse=False)

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model's own ``generate``. Every forward all-gathers parameters, so all ranks continue until the last
        ends.
        """
        kwargs.setdefault("synced_gpus", True)
        return super().generate(*args, **kwargs)


class FSDPOptimizerWrapper(OptimizerWrapper):
    """Optimizer over shards, whose norms, limits and overflow checks cover the full gradient and are collective.

    A step or a clipping raises RuntimeError if FSDP has left a gradient unreduced. ``groups`` are those of ranks that
    shard, and of ranks that replicate.
    """

    def __init__(self, optim: Any, model: nn.Module, groups: Sequence[dist.ProcessGroup], device: torch.device) -> None:
        super().__init__(optim)
        self._model = model
        named = dict(model.named_parameters())
        self._sharded = {name for name, param in named.items() if isinstance(param, DTensor)}
        self._local = {param for name, param in named.items() if name not in self._sharded}  # in ignored modules
        self.groups = groups  # groups of ranks that shard, and of ranks that replicate
        self.device = device

    def clip_grad_by_norm(self, max_norm: float, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Clip the norm of all ranks' gradients, as ``OptimizerWrapper.clip_grad_by_norm`` does. Collective.

        Raises ValueError on every rank if ``max_norm`` is not positive or differs between ranks, and RuntimeError if
        FSDP has left a gradient unreduced.
        """
        check_limit("max_norm", max_norm, check_max_norm, self.groups)
        self._check_reduced()
        return super().clip_grad_by_norm(max_norm, *args, **kwargs)

    def clip_grad_by_value(self, clip_value: float, *args: Any, **kwargs: Any) -> None:
        """Clamp each element of the gradient to [-clip_value, clip_value]. Collective. Raises as ``clip_grad_by_norm``
        does.
        """
        check_limit("clip_value", clip_value, check_clip_value, self.groups)
        self._check_reduced()
        super().clip_grad_by_value(clip_value, *args, **kwargs)

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """Update the shards. Raises RuntimeError if FSDP has left a gradient unreduced."""
        self._check_reduced()
        return super().step(*args, **kwargs)

    def _check_reduced(self) -> None:
        """Raise RuntimeError, with the parameter's name, for a gradient that FSDP has not reduced.

        A reentrant checkpoint runs a separate backward. FSDP takes its end for the last use of the layer, reduces the
        gradients so far, and does not track later uses. A parameter added after boost belongs to no unit.
        """
        for name, param in self._model.named_parameters():
            if param.grad is None or isinstance(param, DTensor) or param in self._local:
                continue
            if name in self._sharded:
                raise RuntimeError(
                    f"rank {dist.get_rank()}: FSDP has left a gradient of {name!r} unreduced, so the gradient that it "
                    "did reduce is wrong. The layer is used more than once, and one use runs under "
                    "torch.utils.checkpoint with use_reentrant=True; set use_reentrant=False, which trains right, or "
                    "leave the layer out of auto_wrap_policy. Or the parameter was exchanged after boost"
                )
            raise RuntimeError(
                f"rank {dist.get_rank()}: parameter {name!r} was added after TorchFSDPPlugin boosted the model, and "
                "FSDP does not reduce its gradient, so each rank would train its own copy. Add it before boost"
            )

    def agree_on_overflow(self, found: bool) -> bool:
        """Return ``True`` if any rank found inf or NaN in its shard. Collective."""
        return agree.any(found, self.groups, "an overflow")


class TorchFSDPPlugin(DPPluginBase):
    """Plugin for sharded data parallelism with torch's FSDP2, using the options of FullyShardedDataParallel.

    ``fully_shard`` keeps a shard of each parameter, its gradient and its optimizer state on each rank.

        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
        TorchFSDPPlugin(auto_wrap_policy={TransformerLayer}, mixed_precision=policy)

    Args:
        process_group: Ranks to shard over: a group, a DeviceMesh, or (shard group, replicate group) for hybrid
            strategies. Defaults to the world.
        sharding_strategy: FULL_SHARD (default), SHARD_GRAD_OP (parameters stay gathered between forward and backward),
            NO_SHARD (every rank keeps everything), or HYBRID_SHARD and _HYBRID_SHARD_ZERO2 (sharded in a machine,
            replicated between machines).
        cpu_offload: CPUOffload(offload_params=True) keeps shards and their optimizer state on the host.
        auto_wrap_policy: Policy that selects the modules that are gathered together. By default the full model is
            gathered at once.
        backward_prefetch: BACKWARD_PRE (default) gathers the next unit while this one's backward computes;
            BACKWARD_POST gathers after it, with less memory and less overlap.
        mixed_precision: MixedPrecision or MixedPrecisionPolicy. With fp16 parameters the loss is scaled too.
        ignored_modules: Modules that are neither sharded nor reduced.
        param_init_fn: Function that materializes one module on the meta device. Defaults to ``to_empty`` and
            ``reset_parameters()``.
        sync_module_states: Start from rank 0's parameters and buffers.
        fp8_communication: Send parameters and gradients in 8 bits. core/distributed/wire/fp8_communication.py has the
            rounding errors.
        loss_scaler: Loss scale for fp16 parameters. Defaults to DynamicLossScaler(2**16, growth_interval=2000,
            hysteresis=1).

    Raises:
        TypeError: If an option has a wrong type.
        ValueError: If options cannot be combined.
        RuntimeError: If torch.distributed is not initialized.
    """

    def __init__(
        self,
        process_group: Any = None,
        sharding_strategy: ShardingStrategy | None = None,
        cpu_offload: CPUOffload | None = None,
        auto_wrap_policy: Any = None,
        backward_prefetch: BackwardPrefetch | None = None,
        mixed_precision: MixedPrecision | MixedPrecisionPolicy | None = None,
        ignored_modules: Iterable[nn.Module] | None = None,
        param_init_fn: Callable[[nn.Module], None] | None = None,
        sync_module_states: bool = False,
        fp8_communication: bool = False,
        *,
        loss_scaler: DynamicLossScaler | None = None,
    ) -> None:
        super().__init__()
        self.sharding_strategy = ShardingStrategy.FULL_SHARD if sharding_strategy is None else sharding_strategy
        if not isinstance(self.sharding_strategy, ShardingStrategy):
            raise TypeError(
                f"sharding_strategy is {sharding_strategy!r}; expected a torch.distributed.fsdp.ShardingStrategy"
            )
        check_kinds(
            process_group=process_group,
            cpu_offload=cpu_offload,
            auto_wrap_policy=auto_wrap_policy,
            backward_prefetch=backward_prefetch,
            mixed_precision=mixed_precision,
            param_init_fn=param_init_fn,
        )
        if isinstance(process_group, DeviceMesh):
            pair = process_group.ndim == 2
        else:
            pair = isinstance(process_group, (tuple, list))
        if process_group is not None and pair != (self.sharding_strategy in HYBRID):
            raise ValueError(
                f"sharding_strategy {self.sharding_strategy.name} with process_group {process_group!r}: hybrid "
                "strategies take a pair (shard group, replicate group) or a mesh [replicate, shard], the others one "
                "group or a mesh [shard]"
            )
        if isinstance(mixed_precision, MixedPrecision) and mixed_precision.keep_low_precision_grads:
            raise ValueError(
                "mixed_precision.keep_low_precision_grads=True is not possible with fully_shard, whose gradients have "
                "the dtype of the sharded parameters; set it to False, or make the model's parameters 16-bit"
            )
        if fp8_communication and self.sharding_strategy is ShardingStrategy.NO_SHARD:
            raise ValueError(
                "fp8_communication has no effect with NO_SHARD, which neither gathers parameters nor scatters "
                "gradients; use TorchDDPPlugin(fp8_communication=True)"
            )
        self.process_group = process_group
        self.cpu_offload = cpu_offload
        self.auto_wrap_policy = auto_wrap_policy
        self.backward_prefetch = backward_prefetch
        self.mixed_precision = mixed_precision
        self.ignored_modules = list(ignored_modules or ())
        self.param_init_fn = param_init_fn
        self.sync_module_states = sync_module_states
        self.fp8_communication = fp8_communication
        self.loss_scaler = loss_scaler
        if loss_scaler is not None and not self._is_fp16():
            raise ValueError("loss_scaler is for fp16: give mixed_precision=MixedPrecision(param_dtype=torch.float16)")

    def supported_precisions(self) -> list[str]:
        """Return the plugin's precisions (fp32, fp16, bf16), to which the Booster's ``mixed_precision`` adds fp8 and
        autocast.
        """
        return ["fp32", "fp16", "bf16", "fp8"]

    def control_precision(self) -> bool:
        """Return ``True`` if the plugin has a ``mixed_precision``. Otherwise the Booster's applies."""
        return self.mixed_precision is not None

    def configure(
        self,
        model: nn.Module,
        optimizer: Any = None,
        criterion: Callable[..., Any] | None = None,
        dataloader: Any = None,
        lr_scheduler: Any = None,
    ) -> Boosted:
        """Shard the model and the state of the optimizer, which gets the shards. See ``Plugin.configure``."""
        device = self.device()
        ignored = {inner for module in self.ignored_modules for inner in module.modules()}
        units = units_of(model, self.auto_wrap_policy, self.mixed_precision, ignored)
        mesh = mesh_of(self.process_group, self.sharding_strategy, device)
        originals = dict(model.named_parameters())
        tied = _tied_names(model)
        buffer_dtype = getattr(self.mixed_precision, "buffer_dtype", None)
        kept = () if buffer_dtype is None else kept_dtypes(model, buffer_dtype).keys()
        groups = [mesh.get_group(dim) for dim in range(mesh.ndim)]
        for group in groups:
            agree_on_model(model, group, "TorchFSDPPlugin", warn_of_values=not self.sync_module_states)
        for unit in units:
            borders = {other.module for other in units} | ignored
            self._prepare(unit, borders, mesh, device, kept)
        for module in self.ignored_modules:
            module.to(device)
        _tie(model, tied)
        ignored_params = {param for module in ignored for param in module.parameters(recurse=False)}
        for unit in units:
            self._shard(unit, mesh, device, ignored_params)
        if optimizer is not None:
            replace_parameters(optimizer, originals, dict(model.named_parameters()))
            optimizer = FSDPOptimizerWrapper(optimizer, model, groups, device)
            optimizer.name_parameters(model)
            if self._is_fp16():
                optimizer = TorchAMPOptimizer(optimizer, self.loss_scaler or FP16TorchMixedPrecision().new_scaler())
        return TorchFSDPModel(model, groups), optimizer, criterion, dataloader, lr_scheduler

    def _prepare(
        self, unit: Unit, borders: set[nn.Module], mesh: DeviceMesh, device: torch.device, kept: Collection[str]
    ) -> None:
        """Move a unit's own tensors to the device, with rank 0's values and their dtype. ``kept`` names are not
        cast.
        """
        for path, module in own_modules(unit.module, borders, f"{unit.name}."):
            if any(tensor.is_meta for tensor in own_tensors(module)):
                self._materialize(path.strip(".") or "the model", module, device)
            for tensor in own_tensors(module):
                tensor.data = tensor.data.to(device)
                if self.sync_module_states:
                    for dim in reversed(range(mesh.ndim)):  # in the shard group, then in the replicate group
                        with waiting("the weights of the first rank", mesh.get_group(dim)):
                            dist.broadcast(tensor.data, group=mesh.get_group(dim), group_src=0)
            exempt = isinstance(module, tuple(getattr(self.mixed_precision, "_module_classes_to_ignore", ())))
            buffer_dtype = None if exempt else getattr(self.mixed_precision, "buffer_dtype", None)
            for name, buffer in module.named_buffers(recurse=False):
                if buffer_dtype is not None and buffer.is_floating_point() and f"{path}{name}".strip(".") not in kept:
                    buffer.data = buffer.data.to(buffer_dtype)

    def _materialize(self, name: str, module: nn.Module, device: torch.device) -> None:
        if self.param_init_fn is not None:
            self.param_init_fn(module)
        elif hasattr(module, "reset_parameters"):
            module.to_empty(device=device, recurse=False)
            module.reset_parameters()
        if any(tensor.is_meta for tensor in own_tensors(module)):
            raise ValueError(
                f"TorchFSDPPlugin: {name!r} ({type(module).__name__}) has tensors on the meta device "
                + ("after param_init_fn" if self.param_init_fn else "and no reset_parameters()")
                + "; let param_init_fn(module) do module.to_empty(device=..., recurse=False) and set its values"
            )

    def _shard(self, unit: Unit, mesh: DeviceMesh, device: torch.device, ignored: set[nn.Parameter]) -> None:
        # The root is used last in forward and first in backward, so FULL_SHARD keeps it gathered between the two.
        reshard = (unit.name != "" or None) if self.sharding_strategy in RESHARDED else False
        fully_shard(
            unit.module,
            mesh=mesh,
            reshard_after_forward=reshard,
            mp_policy=unit.policy,
            offload_policy=offload_of(self.cpu_offload, device),
            ignored_params=ignored,
        )
        if self.backward_prefetch is BackwardPrefetch.BACKWARD_POST:
            # A module that prefetches only itself leaves the next unit to be gathered in that unit's own backward.
            unit.module.set_modules_to_backward_prefetch([unit.module])
        if self.fp8_communication:
            unit.module.set_custom_all_gather(FP8AllGather())
            unit.module.set_custom_reduce_scatter(FP8ReduceScatter())

    def _is_fp16(self) -> bool:
        return getattr(self.mixed_precision, "param_dtype", None) is torch.float16

    def data_rank(self) -> int:
        """Return this rank's index in the group that the model is sharded and replicated over."""
        shard, replicate = self._groups()
        before = dist.get_rank(replicate) * dist.get_world_size(shard) if replicate else 0
        return before + dist.get_rank(shard)

    def data_size(self) -> int:
        """Return the size of the group that the model is sharded and replicated over."""
        shard, replicate = self._groups()
        return dist.get_world_size(shard) * (dist.get_world_size(replicate) if replicate else 1)

    def _groups(self) -> tuple[dist.ProcessGroup | None, dist.ProcessGroup | None]:
        group = self.process_group
        if isinstance(group, DeviceMesh):
            return group.get_group(group.ndim - 1), group.get_group(0) if group.ndim == 2 else None
        if isinstance(group, (tuple, list)):
            return group[0], group[1]
        return group, None

    def control_checkpoint_io(self) -> bool:
        """Return ``True``, because shards are gathered one tensor at a time."""
        return True

    def get_checkpoint_io(self) -> TorchFSDPCheckpointIO:
        """Return a CheckpointIO with full tensors in files and shards in memory."""
        return TorchFSDPCheckpointIO(self.process_group if isinstance(self.process_group, dist.ProcessGroup) else None)

    def support_no_sync(self) -> bool:
        """Return ``True``, because unreduced gradients can be kept."""
        return True

    def no_sync(self, model: nn.Module, optimizer: Any = None) -> AbstractContextManager[None]:
        """Context manager in which backward keeps full gradients on every rank and reduces nothing.

        It saves communication at the cost of memory.

        Args:
            model (Module): The boosted model, which may have been wrapped further.
            optimizer: Ignored.

        Raises:
            ValueError: If the plugin has not boosted the model.
        """
        for module in () if model is None else model.modules():
            if isinstance(module, FSDPModule):
                return _no_sync(module)
        raise ValueError(
            f"no_sync got a {type(model).__name__} that TorchFSDPPlugin has not boosted; pass boost's model"
        )


@contextmanager
def _no_sync(module: FSDPModule) -> Iterator[None]:
    module.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        module.set_requires_gradient_sync(True)


def replace_parameters(optimizer: Any, originals: dict[str, nn.Parameter], parameters: dict[str, nn.Parameter]) -> None:
    """Replace the parameters in an optimizer's groups by the sharded parameters with the same names.

    Groups are kept, and state is sharded.
    """
    name_of = {param: name for name, param in originals.items()}
    state, optimizer.state = optimizer.state, type(optimizer.state)(dict)
    for group in optimizer.param_groups:
        for place, old in enumerate(group["params"]):
            new = group["params"][place] = parameters[name_of[old]]
            if old in state:
                optimizer.state[new] = {key: shard_like(value, new) for key, value in state[old].items()}


def own_tensors(module: nn.Module) -> list[torch.Tensor]:
    """Return a module's parameters and buffers, without its children's."""
    return [*module.parameters(recurse=False), *module.buffers(recurse=False)]


def _tied_names(model: nn.Module) -> list[list[str]]:
    names: dict[nn.Parameter, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        names.setdefault(param, []).append(name)
    return [group for group in names.values() if len(group) > 1]


def _tie(model: nn.Module, tied: list[list[str]]) -> None:
    """Tie parameters again that were one parameter before each module was given separate memory."""
    for first, *others in tied:
        param = model.get_parameter(first)
        for name in others:
            path, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(path), attribute, param)
