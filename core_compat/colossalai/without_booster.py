"""ZeRO without a Booster, with ColossalAI's names: LowLevelZeroOptimizer for a torch optimizer, and GeminiDDP."""

from __future__ import annotations

import itertools
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from core.booster.plugin import GeminiPlugin, LowLevelZeroPlugin
from core.booster.plugin.low_level_zero_optimizer import LowLevelZeroOptimizer as ShardedOptimizer
from core.interface import ModelWrapper
from core_compat.arguments import arguments

PRECISIONS = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}
_ADVICE = {
    "pg_to_param_list": "set allreduce = False on experts' parameters",
    "extra_dp_group": "use LowLevelZeroPlugin(extra_dp_size=...)",
    "forced_dtype": "cast the model before the optimizer is made",
    "overlap_allgather": "use LowLevelZeroPlugin, which knows when the next forward begins",
    "backward_context": "enter the context around backward",
}


class LowLevelZeroOptimizer(ShardedOptimizer):
    """Optimizer that shards the state of ``optimizer`` over data ranks. Collective.

        adam = HybridAdam(model.parameters())
        optimizer = LowLevelZeroOptimizer(adam, partition_grad=True, clip_grad_norm=1.0)
        optimizer.zero_grad(); optimizer.backward(loss); optimizer.step()

    The parameters must already be on the device and in their final dtype. The model is used unchanged; its parameters
    are set to rank 0's values.

    Args:
        reduce_bucket_size: Bucket size in elements.
        partition_grad: True for ZeRO stage 2, else stage 1.
        dp_process_group: None or the world; other groups are rejected.
        given: Options of LowLevelZeroPlugin, which does the same for a Booster.

    Raises:
        ValueError: If the caller passes groups or contexts, or the parameters have several dtypes.
    """

    @arguments(
        "self optimizer !pg_to_param_list=None initial_scale=65536 min_scale=1 growth_factor=2.0 backoff_factor=0.5 "
        "growth_interval=2000 hysteresis=2 max_scale=16777216 clip_grad_norm>max_norm=0.0 verbose=False "
        "reduce_bucket_size=1048576 communication_dtype=None overlap_communication=False partition_grad=False "
        "cpu_offload=False dp_process_group=None !extra_dp_group=None !forced_dtype=None master_weights=True "
        "!overlap_allgather=False fp8_communication=False !backward_context=None",
        _ADVICE,
    )
    def __init__(
        self, optimizer: Any, reduce_bucket_size: int, partition_grad: bool, dp_process_group: Any, **given: Any
    ) -> None:
        if dp_process_group not in (None, dist.group.WORLD):
            raise ValueError(
                "LowLevelZeroOptimizer(dp_process_group=...) is not supported; "
                "parallel_state.initialize_model_parallel makes the data group"
            )
        dtypes = {param.dtype for group in optimizer.param_groups for param in group["params"]}
        if len(dtypes) != 1 or not dtypes <= PRECISIONS.keys():
            raise ValueError(
                f"the optimizer's parameters are {sorted(map(str, dtypes))}, expected one of "
                f"{[str(dtype) for dtype in PRECISIONS]}; cast the model before creating the optimizer"
            )
        given |= {"stage": 2 if partition_grad else 1, "reduce_bucket_size_in_m": reduce_bucket_size / 2**20}
        plugin = LowLevelZeroPlugin(precision=PRECISIONS[dtypes.pop()], **given)
        holder = nn.ParameterList(itertools.chain.from_iterable(group["params"] for group in optimizer.param_groups))
        plugin.agree(None, holder, optimizer)
        made: Any = plugin.configure(holder, optimizer)[1]
        vars(self).update(vars(made))


class GeminiDDP(ModelWrapper):
    """Model that GeminiOptimizer will shard.

        model = GeminiDDP(model, mixed_precision=torch.bfloat16, min_chunk_size_m=1)
        optimizer = GeminiOptimizer(HybridAdam(model.parameters()), model, max_norm=1.0)
        optimizer.backward(loss_of(model(batch))); optimizer.step(); optimizer.zero_grad()

    ``mixed_precision`` is fp16, bf16 or fp32; another dtype raises ValueError. ``options`` are those of GeminiPlugin,
    except the optimizer's, and raise its errors.
    """

    def __init__(self, module: nn.Module, *, mixed_precision: torch.dtype = torch.float16, **options: Any) -> None:
        if mixed_precision not in PRECISIONS:
            raise ValueError(f"mixed_precision is {mixed_precision}; expected one of {list(map(str, PRECISIONS))}")
        super().__init__(module)
        self.options = {"precision": PRECISIONS[mixed_precision], **options}
        if self.options.get("tp_size", 1) != 1:
            raise ValueError("GeminiDDP takes no tp_size; use a Booster with GeminiPlugin(tp_size=...)")
        GeminiPlugin(**self.options)  # raises errors in options here instead of in the optimizer

    def unwrap(self) -> nn.Module:
        return self.module.unwrap() if isinstance(self.module, ModelWrapper) else self.module


class GeminiOptimizer(ShardedOptimizer):
    """Optimizer that shards ``module`` and steps ``optim``. Collective over the world.

    ``options`` are GeminiPlugin's initial_scale to max_scale, max_norm, norm_type, gpu_margin_mem_ratio and verbose.
    """

    def __init__(self, optim: torch.optim.Optimizer, module: GeminiDDP, **options: Any) -> None:
        if not isinstance(module, GeminiDDP) or isinstance(module.module, ModelWrapper):
            raise TypeError("GeminiOptimizer takes a GeminiDDP that no other optimizer has sharded; make it again")
        plugin = GeminiPlugin(**{"initial_scale": 2**32, **module.options, **options})
        plain = module.module
        plugin.agree(None, plain, optim)
        module.module, made, *_ = plugin.configure(plain, optim)
        vars(self).update(vars(made))
