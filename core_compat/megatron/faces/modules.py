"""Float16Module, and functions that read attributes of a wrapped model."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from core import parallel_state
from core.groups.global_names import declare_layer_names
from core_compat.megatron.faces.checkpoint import sharded_state_dict


class Float16Module(nn.Module):
    """Wrapper that runs a module in 16 bits: the first stage casts inputs, and the last stage returns fp32.

    The module's parameters are cast in place, and keep their names in the full model. ``config`` must have exactly one
    of fp16 and bf16.
    """

    def __init__(self, config: Any, module: nn.Module) -> None:
        super().__init__()
        self.config = config
        if bool(config.fp16) == bool(config.bf16):
            raise ValueError(f"Float16Module: config has fp16={config.fp16} and bf16={config.bf16}; set one of the two")
        self.dtype = torch.float16 if config.fp16 else torch.bfloat16
        self.module = module.to(self.dtype)
        self.vp_stage = getattr(module, "vp_stage", None)
        declare_layer_names(module)
        own = {name: name for name in (*module._modules, *module._parameters)} | getattr(module, "global_names", {})
        self.global_names = {f"module.{theirs}": name for theirs, name in own.items()}

    sharded_state_dict = sharded_state_dict

    def set_input_tensor(self, hidden: Tensor | None) -> None:
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
    """Return an attribute of the outermost module that has it, or with ``return_model_obj`` the module.

    Without ``allow_none``, skip modules whose attribute is ``None``. Raises RuntimeError if no module has the
    attribute, or ``model`` is a list.
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
    """Return False unless the module declares cross attention."""
    return bool(getattr(unwrap_model(model), "xattn_needed", False))


def unwrap_model(model: Any, module_instances: Any = None) -> Any:
    """Return the module inside all wrappers, or inside wrappers of the types ``module_instances``; for a list, a
    list.
    """
    if isinstance(model, list):
        return [unwrap_model(part, module_instances) for part in model]
    while isinstance(model, module_instances) if module_instances else hasattr(model, "module"):
        model = model.module
    return model


def param_is_not_shared(param: Tensor) -> bool:
    """Return False for the copy of a tied weight, which norms skip."""
    return not getattr(param, "shared", False)
