"""DeepSpeed's ZeRO stages, on CPU over gloo; benchmarks/peers.md installs it and lists the settings that were tried."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from benchmarks.arms import Arm, Microbatch, Stage, Step
from benchmarks.arms_torch import adamw
from benchmarks.workloads import Workload

MEASURED_WITH = "deepspeed 0.19.8"
# The second is imported while an engine is made, and with it 50 MB of torch's compiler.
IMPORTS = ("deepspeed", "deepspeed.runtime.zero.muon.muon_optimizer")


def _build(workload: Workload, ranks: int, accumulation: int, *, zero: dict[str, Any]) -> Step:
    """zero: DeepSpeed's `zero_optimization`."""
    import deepspeed

    model = workload.model()
    settings = {
        "train_micro_batch_size_per_gpu": workload.samples,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": 0.0,  # where it is left out DeepSpeed clips at 1.0, and its losses are not ours
        "zero_optimization": zero,
        "steps_per_print": 1_000_000,
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=adamw(model.parameters()), config=settings)

    def step(microbatches: Sequence[Microbatch]) -> float:
        total = 0.0
        for inputs, targets in microbatches:
            loss = engine(inputs, targets)
            engine.backward(loss)  # divides by gradient_accumulation_steps
            engine.step()  # updates after the last microbatch only
            total += loss.item()
        return total / len(microbatches)

    return step


def _arm(stage: int, strategy: Stage, **settings: Any) -> Arm:
    about = ", ".join(f"{name}={value}" for name, value in settings.items())
    return Arm(
        f"deepspeed zero {stage}",
        f"{about or 'default settings'}, no clipping, fused AdamW",
        strategy,
        partial(_build, zero={"stage": stage, **settings}),
        imports=IMPORTS,
        measured_with=MEASURED_WITH,
        copies=8.5 if stage == 3 else 6.0,
    )


# Of the defaults, which are made for NCCL and large models, these cost time on gloo; benchmarks/peers.md.
HOST: dict[str, Any] = {"contiguous_gradients": False, "reduce_scatter": False, "compute_grad_norm": False}

ARMS = (
    _arm(1, "optim", **HOST),
    _arm(2, "optim_grads", **HOST),
    _arm(
        3,
        "optim_grads_params",
        overlap_comm=False,
        stage3_use_all_reduce_for_fetch_params=True,
        # A tower of tiny layers (1 427 parameters a module) is fetched as a whole, the model (1 449) is not: it fails.
        stage3_module_granularity_threshold=1430,
    ),
)
