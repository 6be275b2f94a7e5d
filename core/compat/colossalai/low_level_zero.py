"""LowLevelZeroOptimizer by ColossalAI's arguments: made of a torch optimizer alone, without a Booster."""

from __future__ import annotations

import itertools
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from core.booster.plugin import LowLevelZeroPlugin
from core.booster.plugin.low_level_zero_optimizer import LowLevelZeroOptimizer as ShardedOptimizer

PRECISIONS = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}


class LowLevelZeroOptimizer(ShardedOptimizer):
    """Shards what trains the parameters of `optimizer`, which are already on the device and in their final dtype.

        optimizer = LowLevelZeroOptimizer(HybridAdam(model.parameters()), partition_grad=True, clip_grad_norm=1.0)
        optimizer.zero_grad(); optimizer.backward(loss); optimizer.step()

    The model is used as it is; its parameters become rank 0's. partition_grad: stage 2. reduce_bucket_size: in
    elements. The other arguments are those of LowLevelZeroPlugin, which does the same for a Booster. Collective.
    Raises ValueError for groups and contexts of the caller's own, and for parameters of several dtypes.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        pg_to_param_list: Any = None,
        initial_scale: float = 2**16,
        min_scale: float = 1,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        hysteresis: int = 2,
        max_scale: float = 2**24,
        clip_grad_norm: float = 0.0,
        verbose: bool = False,
        reduce_bucket_size: int = 1024 * 1024,
        communication_dtype: torch.dtype | None = None,
        overlap_communication: bool = False,
        partition_grad: bool = False,
        cpu_offload: bool = False,
        dp_process_group: dist.ProcessGroup | None = None,
        extra_dp_group: dist.ProcessGroup | None = None,
        forced_dtype: torch.dtype | None = None,
        master_weights: bool = True,
        overlap_allgather: bool = False,
        fp8_communication: bool = False,
        backward_context: Any = None,
    ) -> None:
        own = dp_process_group if dp_process_group is not dist.group.WORLD else None
        _refuse(
            pg_to_param_list=(pg_to_param_list, "set allreduce = False on experts' parameters"),
            dp_process_group=(own, "parallel_state.initialize_model_parallel makes the data group"),
            extra_dp_group=(extra_dp_group, "use LowLevelZeroPlugin(extra_dp_size=...)"),
            forced_dtype=(forced_dtype, "cast the model before the optimizer is made"),
            overlap_allgather=(overlap_allgather, "use LowLevelZeroPlugin, which knows when the next forward begins"),
            backward_context=(backward_context, "enter the context around backward"),
        )
        plugin = LowLevelZeroPlugin(
            stage=2 if partition_grad else 1,
            precision=_precision(optimizer),
            initial_scale=initial_scale,
            min_scale=min_scale,
            growth_factor=growth_factor,
            backoff_factor=backoff_factor,
            growth_interval=growth_interval,
            hysteresis=hysteresis,
            max_scale=max_scale,
            max_norm=clip_grad_norm,
            reduce_bucket_size_in_m=reduce_bucket_size / 2**20,
            communication_dtype=communication_dtype,
            overlap_communication=overlap_communication,
            cpu_offload=cpu_offload,
            master_weights=master_weights,
            verbose=verbose,
            fp8_communication=fp8_communication,
        )
        holder = nn.ParameterList(itertools.chain.from_iterable(group["params"] for group in optimizer.param_groups))
        made: ShardedOptimizer = plugin.configure(holder, optimizer)[1]
        super().__init__(made.optim, made.engine, made.model, made.max_norm, verbose=verbose)
        self.name_parameters(holder)


def _precision(optimizer: torch.optim.Optimizer) -> str:
    dtypes = {param.dtype for group in optimizer.param_groups for param in group["params"]}
    if len(dtypes) != 1 or not dtypes <= PRECISIONS.keys():
        raise ValueError(
            f"the optimizer's parameters are {sorted(map(str, dtypes))}; LowLevelZeroOptimizer takes one of "
            f"{[str(dtype) for dtype in PRECISIONS]}: cast the model before the optimizer is made"
        )
    return PRECISIONS[dtypes.pop()]


def _refuse(**arguments: tuple[Any, str]) -> None:
    for name, (value, advice) in arguments.items():
        if value:
            raise ValueError(f"LowLevelZeroOptimizer({name}=...) is not here: leave it out; {advice}")
