"""Megatron Core's DistributedDataParallel and distributed optimizer, on CPU over gloo; benchmarks/peers.md installs it.

Its optimizers expect tensors that are called 'torch.cuda.FloatTensor' and put a scalar of their own on CUDA.
`_cuda_names_mean_cpu` stands for that while an arm is built and has ended before the first step, so that a step runs
Megatron's code and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

from benchmarks.arms import LR, Arm, Microbatch, Step
from benchmarks.arms_torch import adamw
from benchmarks.workloads import Workload

MEASURED_WITH = "megatron-core 0.16.1"
IMPORTS = ("megatron.core.distributed", "megatron.core.optimizer.distrib_optimizer", "megatron.core.parallel_state")
BUCKET_NUMEL = 2_000_000


class _CudaNames(TorchFunctionMode):
    """CPU tensors are called CUDA tensors, and tensors for 'cuda' are made on the CPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if kwargs.get("device") == "cuda":
            kwargs["device"] = "cpu"
        answer = func(*args, **kwargs)
        if func is torch.Tensor.type and isinstance(answer, str):
            return answer.replace("torch.Float", "torch.cuda.Float")
        return answer


@contextmanager
def _cuda_names_mean_cpu() -> Iterator[None]:
    with _CudaNames(), mock.patch("torch.cuda.current_device", lambda: torch.device("cpu")):
        yield


def _build(
    workload: Workload, ranks: int, accumulation: int, *, sharded: bool, overlap: bool = True, bucket_numel: int | None
) -> Step:
    """sharded: with the distributed optimizer. bucket_numel: parameters a bucket; None is Megatron's 40 million."""
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
    from megatron.core.optimizer.optimizer import FP32Optimizer
    from megatron.core.optimizer.optimizer_config import OptimizerConfig
    from megatron.core.transformer.transformer_config import TransformerConfig

    reduction = DistributedDataParallelConfig(
        overlap_grad_reduce=overlap,
        overlap_param_gather=overlap and sharded,
        use_distributed_optimizer=sharded,
        bucket_size=bucket_numel,
    )
    update = OptimizerConfig(
        lr=LR, clip_grad=0.0, use_distributed_optimizer=sharded, overlap_param_gather=overlap and sharded
    )
    # The wrapper reads how a loss is averaged from it; the layers that it describes are not the workload's.
    described = TransformerConfig(num_layers=1, hidden_size=workload.width, num_attention_heads=1)
    with _cuda_names_mean_cpu():
        parallel_state.initialize_model_parallel()
        model = DistributedDataParallel(described, reduction, workload.model())
        if sharded:
            optimizer = DistributedOptimizer(
                adamw(model.parameters()),
                update,
                grad_scaler=None,
                init_state_fn=None,
                model_chunks=[model],
                per_model_buffers={0: model.buffers},
                data_parallel_group=parallel_state.get_data_parallel_group(with_context_parallel=True),
                data_parallel_group_gloo=None,
                data_parallel_group_idx=dist.get_rank(),
                distributed_optimizer_instance_id=0,
            )
        else:
            optimizer = FP32Optimizer(adamw(model.parameters()), update, None)
    model.broadcast_params()

    def step(microbatches: Sequence[Microbatch]) -> float:
        model.zero_grad_buffer()
        optimizer.zero_grad()
        total = 0.0
        for number, (inputs, targets) in enumerate(microbatches, start=1):
            with model.no_sync() if number < len(microbatches) else nullcontext():
                loss = model(inputs, targets)
                (loss / len(microbatches)).backward()
            total += loss.item()
        model.finish_grad_sync()
        optimizer.step()
        return total / len(microbatches)

    return step


ARMS = (
    Arm(
        "megatron ddp",
        f"overlap_grad_reduce, buckets of {BUCKET_NUMEL / 1e6:g} M parameters, fused AdamW",
        "no_shard",
        partial(_build, sharded=False, bucket_numel=BUCKET_NUMEL),
        imports=IMPORTS,
        measured_with=MEASURED_WITH,
    ),
    Arm(
        "megatron distributed optimizer",
        f"overlap_grad_reduce, overlap_param_gather, buckets of {BUCKET_NUMEL / 1e6:g} M parameters, fused AdamW",
        "optim",
        partial(_build, sharded=True, bucket_numel=BUCKET_NUMEL),
        imports=IMPORTS,
        measured_with=MEASURED_WITH,
    ),
)
