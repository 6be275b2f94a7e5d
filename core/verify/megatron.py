"""Megatron Core's wrappers, groups, and optimizers, if a program has imported them. This module never imports it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import chain
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

from core.groups.global_names import declare_layer_names
from core.groups.process_groups import ProcessGroups

WRAPPERS = (
    ("megatron.core.distributed.distributed_data_parallel", "DistributedDataParallel"),
    ("megatron.core.transformer.module", "Float16Module"),
)
# Lists of the model's parameters, by group, in optimizers that step copies or shards of them.
COPIED = ("float16_groups", "fp32_from_fp32_groups", "model_float16_groups", "model_fp32_groups")
# Our name of each group, the name in Megatron's function, and its arguments.
GROUPS: tuple[tuple[str, str, dict[str, bool]], ...] = (
    ("dp", "data_parallel", {}),
    ("dp_cp", "data_parallel", {"with_context_parallel": True}),
    ("tp", "tensor_model_parallel", {}),
    ("cp", "context_parallel", {}),
    ("pp", "pipeline_model_parallel", {}),
    ("ep", "expert_model_parallel", {}),
    ("expt_tp", "expert_tensor_parallel", {}),
    ("expt_dp", "expert_data_parallel", {}),
    ("embd", "embedding", {"check_initialized": False}),
    ("pos_embd", "position_embedding", {"check_initialized": False}),
)


def is_wrapper(part: nn.Module) -> bool:
    """True for Megatron Core's DistributedDataParallel and Float16Module."""
    return any((kind.__module__, kind.__name__) in WRAPPERS for kind in type(part).__mro__)


def groups_of(outer: nn.Module) -> ProcessGroups | None:
    """Return Megatron Core's process groups under our names; None without initialized groups.

    Raises:
        ValueError: For layouts whose parts cannot be read.
    """
    state = imported("megatron.core.parallel_state")
    if state is None or not state.model_parallel_is_initialized():
        return None
    unread = []
    if (state.get_virtual_pipeline_model_parallel_world_size() or 1) > 1:
        unread.append("virtual_pipeline_model_parallel_size above 1")
    for part in _wrappers(outer):
        if part.ddp_config.num_distributed_optimizer_instances > 1:
            unread.append("num_distributed_optimizer_instances above 1")
    if any("weight1" in part._parameters for part in outer.modules() if type(part).__name__ == "GroupedMLP"):
        unread.append("moe_grouped_gemm=True")
    if unread:
        raise ValueError(
            f"Megatron Core runs with {' and '.join(unread)}, of which the parts of the model cannot be read; set it "
            "to its default for the check, or use the import lines of core_compat.megatron"
        )
    return ProcessGroups(**{ours: getattr(state, f"get_{name}_group")(**given) for ours, name, given in GROUPS})


def declare_names(module: nn.Module, groups: ProcessGroups) -> None:
    """Declare the names of a rank's layers and experts in the unsplit model, by ``global_names``."""
    declare_layer_names(module)
    for part in module.modules():
        experts: Any = getattr(part, "local_experts", None)
        if isinstance(experts, nn.ModuleList):
            first = len(experts) * groups.rank("ep")
            names = {f"local_experts.{number}": f"local_experts.{first + number}" for number in range(len(experts))}
            part.global_names = names


@contextmanager
def marked_sinks(module: nn.Module) -> Iterator[None]:
    """Mark attention sinks as split by heads. Inside the context only, because Megatron Core's norm reads the mark."""
    sinks: list[Any] = [param for name, param in module.named_parameters() if name.endswith(".softmax_offset")]
    sinks = [param for param in sinks if not getattr(param, "tensor_model_parallel", False)]
    for param in sinks:
        param.tensor_model_parallel, param.partition_dim = True, 0
    yield
    for param in sinks:
        del param.tensor_model_parallel, param.partition_dim


def gathered_gradients(outer: nn.Module) -> dict[int, Tensor]:
    """Return gradients of which a rank has only a shard, gathered, by the parameter's id. Collective.

    Megatron's distributed optimizer reduces into the shard of this rank in each bucket; the rest of the bucket holds
    this rank's own gradients.
    """
    found = {}
    for wrapper in _wrappers(outer):
        if not wrapper.ddp_config.use_distributed_optimizer:
            continue
        for buffer in (*wrapper.buffers, *wrapper.expert_parallel_buffers):
            group = buffer.data_parallel_group
            size, rank = dist.get_world_size(group), dist.get_rank(group)
            gathered = []
            for bucket in buffer.buckets:
                flat = torch.empty_like(bucket.grad_data)
                shards = list(flat.chunk(size))
                dist.all_gather(shards, bucket.grad_data.chunk(size)[rank].contiguous(), group=group)
                gathered.append(flat)
            for param, (start, end, number) in buffer.param_index_map.items():
                offset = buffer.buckets[number].offset
                found[id(param)] = gathered[number][start - offset : end - offset].view(param.shape)
    return found


@contextmanager
def around_steps(
    method: str, before: Callable[[Any], None], after: Callable[[Any, Any], None] = lambda optimizer, result: None
) -> Iterator[None]:
    """Call functions around the outermost call of a method of Megatron Core's optimizers, which call one another."""
    running = False

    def watched(run: Callable[..., Any]) -> Callable[..., Any]:
        def run_between(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            nonlocal running
            if running:
                return run(optimizer, *args, **kwargs)
            running = True
            try:
                before(optimizer)
                result = run(optimizer, *args, **kwargs)
                after(optimizer, result)
                return result
            finally:
                running = False

        return run_between

    module = imported("megatron.core.optimizer.optimizer")
    kinds = [] if module is None else [module.MegatronOptimizer]
    for kind in kinds:
        kinds += [each for each in kind.__subclasses__() if each not in kinds]
    with ExitStack() as stack:
        for kind in kinds:
            if method in vars(kind):
                stack.enter_context(mock.patch.object(kind, method, watched(vars(kind)[method])))
        yield


def stepped(optimizer: Any) -> list[tuple[Any, list[list[Any]]]]:
    """Return (torch's optimizer, the model's parameters in each group) for optimizers that step copies or shards."""
    found = []
    for each in getattr(optimizer, "chained_optimizers", [optimizer]):
        kinds = [getattr(each, kind) for kind in COPIED if hasattr(each, kind)]
        if kinds:
            found.append((each.optimizer, [[*chain(*copied)] for copied in zip(*kinds, strict=True)]))
    return found


def gathers_later(optimizer: Any) -> bool:
    """True if an optimizer's step leaves the gathering of its weights to the next forward."""
    options = [getattr(each, "ddp_config", None) for each in getattr(optimizer, "chained_optimizers", [optimizer])]
    return any(getattr(each, "overlap_param_gather", False) for each in options)


def _wrappers(outer: nn.Module) -> list[Any]:
    return [part for part in outer.modules() if is_wrapper(part) and hasattr(part, "ddp_config")]


def imported(name: str) -> Any:
    """Return a module of Megatron Core that the program has imported; None for our module of that name."""
    module = sys.modules.get(name)
    return module if getattr(module, "__name__", "") == name else None
