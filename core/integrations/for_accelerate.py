"""accelerate's Accelerator over this package's wrapper: ``prepare`` wraps the model, and shards any torch optimizer."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Iterable
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from core.extras import require
from core.integrations.evaluation import EvaluationLoader, concatenated
from core.integrations.loop_optimizer import LoopOptimizer, config_or_default, data_parallel_groups, finalize_new
from core.optimizer.grad_scaler import GradScaler
from core.watch.warn_user import warn_user

if TYPE_CHECKING:
    from accelerate import Accelerator as Base
else:
    Base = object


class AcceleratorParts(Base):
    """Mixin that adds data-parallel sharding to accelerate's Accelerator.

    ``from core.integrations import Accelerator`` combines both. On one process accelerate's behaviour is unchanged.

    Args:
        ddp_config: Reduction and sharding of gradients. None replicates everything, as torch's DDP does.
        kwargs: Arguments of accelerate's Accelerator.

    Raises:
        ValueError: If accelerate's plugins for DeepSpeed, FSDP or Megatron, or a splitting ParallelismConfig, are
            passed.
    """

    def __init__(self, *args: Any, ddp_config: DistributedDataParallelConfig | None = None, **kwargs: Any) -> None:
        given = inspect.signature(super().__init__).bind_partial(*args, **kwargs).arguments
        config = config_or_default(ddp_config)
        _check_plugins(given)
        _check_parallelism(given.get("parallelism_config"))
        super().__init__(*args, **kwargs)
        _check_parallelism(self.parallelism_config)  # environment variables may have created it
        self.ddp_config = config
        self.evaluated: EvaluationLoader | None = None  # loader that a Trainer evaluates now
        self.replica_ranks = list(range(self.num_processes))  # one rank of each replica of the model
        if str(self.distributed_type.value) not in ("NO", "MULTI_CPU", "MULTI_GPU"):
            raise ValueError(
                f"accelerate is configured for {self.distributed_type.value}, which wraps models itself; remove its "
                "plugin, and set the sharding in ddp_config"
            )
        _check_handler(self.ddp_handler, warns=self.use_distributed and self.is_main_process)
        if self.mixed_precision == "fp16" and self.use_distributed:
            self.native_amp = True  # accelerate forgets fp16 on a CPU, without a word
            options = self.scaler_handler.to_kwargs() if self.scaler_handler is not None else {}
            self.scaler: Any = GradScaler(self.device.type, **options)
        if self.use_distributed:
            self.register_load_state_pre_hook(self._load_wrapped)

    # -- prepare ----------------------------------------------------------------------------------------------------

    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:
        """Prepare objects as accelerate does. An optimizer may be prepared before its model."""
        places = sorted(range(len(args)), key=lambda place: not isinstance(args[place], nn.Module))
        placement = None if device_placement is None else [device_placement[place] for place in places]
        prepared = super().prepare(*(args[place] for place in places), device_placement=placement)
        if len(args) < 2:
            return prepared
        return tuple(thing for _, thing in sorted(zip(places, prepared, strict=True), key=lambda pair: pair[0]))

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> Any:
        """Move the model, put autocast around its forward, and wrap it. Collective.

        Args:
            model: A module that is not wrapped yet.
            device_placement: False to leave the model on its device; None for accelerate's setting.
            evaluation_mode: True to leave it unwrapped; a later call wraps it, if a Trainer evaluates first.
        """
        if isinstance(model, DistributedDataParallel) or not self.use_distributed:
            return super().prepare_model(model, device_placement, evaluation_mode)
        prepared = super().prepare_model(model, device_placement, evaluation_mode=True)
        known = next((wrapped for wrapped in self._wrapped() if wrapped.module is prepared), None)
        if evaluation_mode or known is not None or not any(param.requires_grad for param in prepared.parameters()):
            return prepared if evaluation_mode or known is None else known
        groups = data_parallel_groups("accelerate")
        config = self.ddp_config
        if not getattr(self.ddp_handler, "broadcast_buffers", True):
            config = replace(config, broadcast_buffers=False)
        wrapped = DistributedDataParallel(None, config, prepared, pg_collection=groups)
        wrapped._is_accelerate_prepared = True
        self._models[:] = [each for each in self._models if each is not prepared]
        self._models.append(wrapped)
        return wrapped

    def prepare_optimizer(self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None) -> Any:
        """Return an optimizer that steps this rank's part of its model. Collective.

        Raises:
            ValueError: If no model was prepared.
        """
        if getattr(optimizer, "_is_accelerate_prepared", False) or not self.use_distributed:
            ours = getattr(optimizer, "optimizer", None)
            if isinstance(ours, LoopOptimizer) and ours.model_chunks[0] not in self._models:
                self._models.append(ours.model_chunks[0])  # a Trainer's second training has forgotten it
            return super().prepare_optimizer(optimizer, device_placement)
        held = {id(param) for group in optimizer.param_groups for param in group["params"]}
        for model in self._wrapped():
            if any(id(param) in held for param in model.module.parameters()):
                adopted = LoopOptimizer(model, optimizer)
                prepared = _prepared_class()(adopted, device_placement=False, scaler=self.scaler)
                self._optimizers.append(prepared)
                return prepared
        raise ValueError(
            "prepare was given an optimizer whose parameters are in no model that was prepared; give both to one call, "
            "prepare(model, optimizer), or the model first"
        )

    def unwrap_model(self, model: nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True) -> Any:
        """The module inside the wrapper."""
        inner = model.module if isinstance(model, DistributedDataParallel) else model
        return super().unwrap_model(inner, keep_fp32_wrapper, keep_torch_compile)

    # -- one step ---------------------------------------------------------------------------------------------------

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """Run backward as accelerate does; a step's last microbatch reduces the gradients. Collective then."""
        super().backward(loss, **kwargs)
        if self.sync_gradients:
            for model in self._wrapped():
                finalize_new(model)

    def clip_grad_norm_(
        self, parameters: Iterable[torch.Tensor] | torch.Tensor, max_norm: float, norm_type: float = 2
    ) -> Any:
        """Clip gradients as accelerate does. Collective. Sharded ones need all parameters of an optimizer."""
        params = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        optimizer = self._sharded_optimizer(params, "clip_grad_norm_")
        if optimizer is None:
            return super().clip_grad_norm_(params, max_norm, norm_type)
        self.unscale_gradients()
        return optimizer.clip(max_norm, norm_type)

    def clip_grad_value_(self, parameters: Iterable[torch.Tensor] | torch.Tensor, clip_value: float) -> None:
        """Clip gradients as accelerate does. Collective. Sharded ones need all parameters of an optimizer."""
        params = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        optimizer = self._sharded_optimizer(params, "clip_grad_value_")
        if optimizer is None:
            super().clip_grad_value_(params, clip_value)
            return
        self.unscale_gradients()
        optimizer.prepare_grads()
        optimizer.clamp(clip_value)

    def join_uneven_inputs(self, joinables: Any, even_batches: bool | None = None) -> Any:
        """Raise an error in a job of several ranks: the reductions of each step need every rank."""
        if self.use_distributed:
            raise NotImplementedError(
                "join_uneven_inputs: a rank without batches would leave the others waiting in a reduction; give all "
                "ranks as many batches (even_batches=True, accelerate's default)"
            )
        return super().join_uneven_inputs(joinables, even_batches)

    # -- values of all replicas --------------------------------------------------------------------------------------

    def gather(self, tensor: Any) -> Any:
        """Return the values of all replicas, one after another. Collective.

        In an evaluation of a Trainer the rows that only fill a batch are left out.
        """
        from accelerate.utils import recursively_apply

        gather = super().gather
        if self.evaluated is None and len(self.replica_ranks) == self.num_processes:
            return gather(tensor)

        def of_replicas(value: torch.Tensor) -> torch.Tensor:
            rows = self.evaluated.rows_of(value) if self.evaluated is not None else torch.atleast_1d(value)
            return concatenated(rows, gather, self.replica_ranks)

        return recursively_apply(of_replicas, tensor, error_on_other_type=True)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Gather as accelerate does. In an evaluation of a Trainer, ``gather`` already drops padding rows."""
        if self.evaluated is None or use_gather_object:
            return super().gather_for_metrics(input_data, use_gather_object)
        return self.gather(input_data)

    # -- state ------------------------------------------------------------------------------------------------------

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> Any:
        """Return the model's full state dict, without a prefix. Collective if parameters are sharded."""
        if isinstance(model, DistributedDataParallel):
            return apart(model.state_dict())
        return super().get_state_dict(model, unwrap)

    def load_state(self, input_dir: str | None = None, load_kwargs: Any = None, **options: Any) -> None:
        """Load a folder of ``save_state``. Collective. Raises ValueError for options of ``load_model``."""
        if self.use_distributed and set(options) - {"map_location"}:
            raise ValueError(
                f"load_state was given {', '.join(sorted(options))}, which speak to safetensors' load_model; our "
                "wrapper loads all weights by name. Leave them out, or call model.load_state_dict(..., strict=False)"
            )
        super().load_state(input_dir, load_kwargs, **options)

    def _load_wrapped(self, models: list[nn.Module], input_dir: str) -> None:
        """Load the models in place of accelerate, which rejects parameters that share one memory."""
        from accelerate.utils import load_state_dict as read
        from accelerate.utils.constants import MODEL_NAME, SAFE_MODEL_NAME

        for number, model in enumerate(models):
            ending = f"_{number}" if number > 0 else ""
            path = Path(input_dir) / f"{SAFE_MODEL_NAME}{ending}.safetensors"
            if path.exists():
                tied = read(str(path))
            else:
                tied = torch.load(path.with_name(f"{MODEL_NAME}{ending}.bin"), map_location="cpu", weights_only=True)
            model.load_state_dict(with_tied(tied, model))
        models.clear()

    # -- looking up -------------------------------------------------------------------------------------------------

    def _wrapped(self) -> list[DistributedDataParallel]:
        return [model for model in self._models if isinstance(model, DistributedDataParallel)]

    def _sharded_optimizer(self, params: list[torch.Tensor], call: str) -> LoopOptimizer | None:
        """The optimizer of these parameters, if it is sharded. ValueError for a part of its parameters."""
        given = {id(param) for param in params if param.requires_grad}
        for prepared in self._optimizers:
            optimizer = prepared.optimizer
            if not isinstance(optimizer, LoopOptimizer) or not optimizer.model_chunks[0].ddp_config.sharded:
                continue
            own = {id(param) for part in optimizer.user_params for param in part if param.requires_grad}
            if not given & own:
                continue
            if given != own:
                raise ValueError(
                    f"{call} was given {len(given)} parameters and the sharded optimizer trains {len(own)}: a rank "
                    "holds only its shard of each gradient. Pass all of them, model.parameters()"
                )
            if not self.sync_gradients:
                raise RuntimeError(
                    f"{call} came before the last microbatch of a step, when gradients are not reduced; call it under "
                    "`if accelerator.sync_gradients:`"
                )
            return optimizer
        return None


def apart(state: dict[str, Any]) -> dict[str, Any]:
    """Return a state dict whose tensors share no buffer, as safetensors needs. Tied weights stay one tensor."""
    copies: dict[tuple[int, torch.Size], torch.Tensor] = {}
    found = {}
    for name, value in state.items():
        if isinstance(value, torch.Tensor):
            value = copies.setdefault((value.data_ptr(), value.shape), value.clone())
        found[name] = value
    return found


def with_tied(state: dict[str, Any], model: nn.Module) -> dict[str, Any]:
    """A state dict with the names that a file of safetensors leaves out: second names of tied weights."""
    names: dict[int, list[str]] = {}
    for name, param in model.state_dict(keep_vars=True).items():
        names.setdefault(id(param), []).append(name)
    found = dict(state)
    for tied in names.values():
        there = [name for name in tied if name in state]
        found |= {name: state[there[0]] for name in tied if there and name not in state}
    return found


def _check_parallelism(config: Any) -> None:
    """Raise ValueError for a ParallelismConfig that asks accelerate to shard or split. Replicas are the default."""
    instead = {
        "dp_shard_size": "say in ddp_config=DistributedDataParallelConfig(data_parallel_sharding_strategy=...) what to "
        "shard, and in num_distributed_optimizer_instances over how many ranks",
        "tp_size": "for a split model write the loop yourself, or take HybridParallelPlugin of core.booster",
        "cp_size": "for a split sequence write the loop yourself, or take HybridParallelPlugin of core.booster",
        "sp_size": "for a split sequence write the loop yourself, or take HybridParallelPlugin of core.booster",
    }
    for name, ours in instead.items():
        if config is not None and getattr(config, name, 1) > 1:
            raise ValueError(f"ParallelismConfig({name}={getattr(config, name)}) is accelerate's own wrapping; {ours}")


def _check_plugins(given: dict[str, Any]) -> None:
    """Reject plugins that shard or split, which accelerate takes without a word on a CPU; its environment's too."""
    shard = (
        'shard by ddp_config=DistributedDataParallelConfig(data_parallel_sharding_strategy="optim_grads_params"), or '
        '"optim_grads", or "optim"'
    )
    split = "split a model by HybridParallelPlugin of core.booster, in Trainer(plugin=...) too"
    refused = {
        "fsdp_plugin": ("FSDP; in a Trainer it is TrainingArguments(fsdp=...)", shard),
        "deepspeed_plugin": ("DeepSpeed; in a Trainer it is TrainingArguments(deepspeed=...)", shard),
        "deepspeed_plugins": ("DeepSpeed", shard),
        "megatron_lm_plugin": ("Megatron-LM", split),
        "torch_tp_plugin": ("torch's tensor parallelism", split),
    }
    for name, (library, ours) in refused.items():
        variable = f"ACCELERATE_USE_{name.rpartition('_')[0].upper()}"
        if given.get(name) is not None:
            raise ValueError(f"{name} is for {library}. Leave it out, and {ours}")
        if os.environ.get(variable, "false").lower() == "true":
            raise ValueError(f"{variable}=true is for {library}. Unset it, and {ours}")


def _check_handler(handler: Any, *, warns: bool) -> None:
    """Reject options of torch's DDP that would change something and have another name here; warn of idle ones."""
    instead = {
        "bucket_cap_mb": "bucket_size, in elements, or num_buckets",
        "comm_hook": "grad_communication_dtype",
        "comm_wrapper": "grad_communication_dtype",
    }
    idle = {
        "find_unused_parameters": "parameters without a gradient need no search, and each step may use other ones",
        "static_graph": "the graph may change from step to step",
        "dim": "each rank has one device, so inputs are not cut",
        "check_reduction": "torch ignores it too",
        "comm_state_option": "there is no comm_hook",
    }
    obeyed = ("broadcast_buffers", "gradient_as_bucket_view")  # `.grad` is a view in any case
    for field in () if handler is None else fields(handler):
        name, value = field.name, getattr(handler, field.name)
        setting = f"{name}={getattr(value, 'value', value)!r})"
        option = f"DistributedDataParallelKwargs({setting}, or TrainingArguments(ddp_{setting} of a Trainer,"
        if value == getattr(type(handler)(), name) or name in obeyed:
            continue
        if name not in idle:
            ours = instead.get(name, "an option for it, if there is one, or leave it out")
            raise ValueError(
                f"{option} speaks to torch's DDP; here give ddp_config=DistributedDataParallelConfig(...) with {ours}"
            )
        if warns:
            warn_user(f"{option} changes nothing here: {idle[name]}; leave it out")


@functools.cache
def _prepared_class() -> Any:
    from accelerate.optimizer import AcceleratedOptimizer

    class PreparedOptimizer(AcceleratedOptimizer):
        """Reports a step that ours has skipped, with or without a loss scale, so that schedulers wait."""

        @property
        def step_was_skipped(self) -> bool:
            return bool(self.optimizer.step_was_skipped)

    return PreparedOptimizer


def prepared_optimizer(optimizer: Any) -> Any:
    """An optimizer of this package as accelerate's loops take it: it steps after the last microbatch of a step."""
    return _prepared_class()(optimizer, device_placement=False, scaler=None)


@functools.cache
def derived() -> Any:
    """The class to use: accelerate's, with these parts. MissingExtra where accelerate is not installed."""
    theirs = require("accelerate", "core.integrations.Accelerator", "integrations")
    return type("Accelerator", (AcceleratorParts, theirs.Accelerator), {"__doc__": AcceleratorParts.__doc__})
