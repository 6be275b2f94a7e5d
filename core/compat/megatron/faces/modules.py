"""MegatronModule, Float16Module, module specs, and what programs ask of a wrapped model."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from core import parallel_state
from core.compat.megatron.faces.checkpoint import sharded_state_dict


class MegatronModule(nn.Module):
    """A module with a `config`, and the names by which checkpoint code asks it."""

    def __init__(self, config: Any = None) -> None:
        super().__init__()
        self.config = config

    state_dict_for_save_checkpoint = nn.Module.state_dict
    sharded_state_dict = sharded_state_dict

    def set_is_first_microbatch(self) -> None:
        """Nothing: no 8-bit copies of weights are kept."""


class Float16Module(MegatronModule):
    """A module in 16 bits: inputs of the first stage are cast, outputs of the last one are fp32.

    config: says fp16 or bf16. The module's parameters are cast in place, and keep their names in the whole model.
    """

    def __init__(self, config: Any, module: nn.Module) -> None:
        super().__init__(config)
        if bool(config.fp16) == bool(config.bf16):
            raise ValueError(f"Float16Module: config has fp16={config.fp16} and bf16={config.bf16}; set one of the two")
        self.dtype = torch.float16 if config.fp16 else torch.bfloat16
        self.module = module.to(self.dtype)
        self.vp_stage = getattr(module, "vp_stage", None)
        own = {name: name for name in (*module._modules, *module._parameters)} | getattr(module, "global_names", {})
        self.global_names = {f"module.{theirs}": name for theirs, name in own.items()}

    def set_input_tensor(self, hidden: Tensor | None) -> None:
        """Hand the hidden state of the stage before to the module."""
        get_attr_wrapped_model(self.module, "set_input_tensor")(hidden)

    def forward(self, *inputs: Any, fp32_output: bool = True, **kwargs: Any) -> Any:
        if self._is_stage("pre_process", parallel_state.is_pipeline_first_stage):
            inputs, kwargs = _cast((inputs, kwargs), torch.float32, self.dtype)
        output = self.module(*inputs, **kwargs)
        is_last = fp32_output and self._is_stage("post_process", parallel_state.is_pipeline_last_stage)
        return _cast(output, self.dtype, torch.float32) if is_last else output

    def _is_stage(self, name: str, in_pipeline: Callable[..., bool]) -> bool:
        known = getattr(self.module, name, None)
        if known is not None or not parallel_state.is_initialized():
            return known is not False
        return in_pipeline(ignore_virtual=False, vp_stage=self.vp_stage)


def _cast(value: Any, before: torch.dtype, after: torch.dtype) -> Any:
    return tree_map(lambda part: part.to(after) if isinstance(part, Tensor) and part.dtype == before else part, value)


def get_attr_wrapped_model(model: Any, attr: str, allow_none: bool = True, return_model_obj: bool = False) -> Any:
    """An attribute of the outermost module that has it; with allow_none=False one that is not None.

    return_model_obj: that module instead. RuntimeError where no module has it.
    """
    if isinstance(model, list):
        raise RuntimeError(f"get_attr_wrapped_model({attr!r}) was given a list; ask one of its model chunks")
    part = model
    while not (hasattr(part, attr) and (allow_none or getattr(part, attr) is not None)):
        if not hasattr(part, "module"):
            raise RuntimeError(f"no module of this {type(model).__name__} has the attribute {attr!r}")
        part = part.module
    return part if return_model_obj else getattr(part, attr)


get_model_config = functools.partial(get_attr_wrapped_model, attr="config", allow_none=False)
get_model_type = functools.partial(get_attr_wrapped_model, attr="model_type")


def get_model_xattn(model: Any) -> bool:
    """False unless a module says that it has cross attention."""
    return bool(getattr(unwrap_model(model), "xattn_needed", False))


def unwrap_model(model: Any, module_instances: Any = None) -> Any:
    """The module inside all wrappers, or inside those of the types `module_instances`; of a list, a list."""
    if isinstance(model, list):
        return [unwrap_model(part, module_instances) for part in model]
    while isinstance(model, module_instances) if module_instances else hasattr(model, "module"):
        model = model.module
    return model


def param_is_not_shared(param: Tensor) -> bool:
    """False for the copy of a tied weight, which norms leave out."""
    return not getattr(param, "shared", False)


@dataclass
class ModuleSpec:
    """A module's class, or the path to it, with arguments for its constructor."""

    module: Any
    params: dict[str, Any] = field(default_factory=dict)
    submodules: Any = None
    metainfo: dict[str, Any] = field(default_factory=dict)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return build_module(self, *args, **kwargs)


def import_module(module_path: tuple[str, str]) -> Any:
    """The object (module, name)."""
    return getattr(importlib.import_module(module_path[0]), module_path[1])


def get_module(spec_or_module: Any, **additional_kwargs: Any) -> Any:
    """The class or function that a spec names."""
    found = spec_or_module.module if isinstance(spec_or_module, ModuleSpec) else spec_or_module
    return import_module(found) if isinstance(found, tuple) else found


def build_module(spec_or_module: Any, *args: Any, **kwargs: Any) -> Any:
    """Make what a spec names; a function is returned unchanged."""
    found, spec = get_module(spec_or_module), spec_or_module
    if isinstance(found, type) and isinstance(spec, ModuleSpec):
        parts = {} if spec.submodules is None else {"submodules": spec.submodules}
        return found(*args, **{**spec.params, **kwargs, **parts})
    return found(*args, **kwargs) if isinstance(found, type) else found


class IdentityOp(nn.Module):
    """Gives its first argument back."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()

    def forward(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        return x


class IdentityFuncOp(IdentityOp):
    """Gives a function that gives its first argument back."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward
