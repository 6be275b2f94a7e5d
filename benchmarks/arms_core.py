"""Ours, as a user would write it: the public classes and functions, the settings that the docs name for speed."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

from benchmarks.arms import BETAS, EPS, LR, WEIGHT_DECAY, Arm, Microbatch, Step
from benchmarks.workloads import Workload

IMPORTS = ("core.distributed", "core.optimizer", "core.parallel_state")


def build(workload: Workload, ranks: int, accumulation: int, **options: Any) -> Step:
    """A step of our wrapper and optimizer. options: of DistributedDataParallelConfig."""
    from core import parallel_state
    from core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from core.optimizer import OptimizerConfig, get_megatron_optimizer

    parallel_state.initialize_model_parallel()
    config = DistributedDataParallelConfig(**options)
    model = DistributedDataParallel(None, config, workload.model())
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            lr=LR,
            adam_beta1=BETAS[0],
            adam_beta2=BETAS[1],
            adam_eps=EPS,
            weight_decay=WEIGHT_DECAY,
            optimizer_backend="fused",
            clip_grad=0.0,
        ),
        [model],
        no_weight_decay_cond=lambda name, param: False,  # all parameters decay, as in torch.optim.AdamW
    )

    def step(microbatches: Sequence[Microbatch]) -> float:
        optimizer.zero_grad()
        total = 0.0
        for number, (inputs, targets) in enumerate(microbatches, start=1):
            with model.no_sync() if number < len(microbatches) else nullcontext():
                loss = model(inputs, targets)
                (loss / len(microbatches)).backward()
            total += loss.item()
        finalize_model_grads([model])
        updated, _, _ = optimizer.step()
        if not updated:
            raise RuntimeError("the optimizer skipped a step")
        return total / len(microbatches)

    return step


def _arm(stage: Any, *, overlap: bool = False, sockets: bool = False) -> Arm:
    options: dict[str, Any] = {"data_parallel_sharding_strategy": stage}
    if overlap:
        options["overlap_grad_reduce"] = True
        if stage != "no_shard":
            options["overlap_param_gather"] = True
    if sockets:
        options["share_host_memory"] = False
    about = ", ".join(f"{name}={value!r}" for name, value in options.items())
    name = f"core {stage}" + (" overlapped" if overlap else "") + (" over sockets" if sockets else "")
    return Arm(name, about, stage, partial(build, **options), "ours", IMPORTS)


STAGES = ("no_shard", "optim", "optim_grads")
ARMS = (
    *(_arm(stage, overlap=overlap) for stage in STAGES for overlap in (False, True)),
    _arm("optim_grads_params"),
    *(_arm(stage, sockets=True) for stage in STAGES[:2]),  # as ranks of several hosts would reduce
    replace(_arm("optim_grads_params", sockets=True), name="core optim_grads_params gloo"),  # the same
)
