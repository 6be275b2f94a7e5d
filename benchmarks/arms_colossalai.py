"""ColossalAI's low level zero, on CPU over gloo; benchmarks/peers.md installs it.

Low level zero is written for an accelerator with streams and refuses to run where it is not called 'cuda' or 'npu'. The
arm hands ColossalAI an accelerator by its public `set_accelerator`: its own CpuAccelerator under that name, with
streams that do nothing. Reductions are blocking calls there, so overlap_communication has nothing to offer on a CPU
(and cannot be switched on: it records CUDA streams on tensors).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

from benchmarks.arms import Arm, Microbatch, Stage, Step
from benchmarks.arms_torch import adamw
from benchmarks.workloads import Workload

MEASURED_WITH = "colossalai 0.5.0"
IMPORTS = ("colossalai.booster.plugin", "colossalai.accelerator")


def _use_host_accelerator() -> None:
    """A host in the place of a device: everything is in order already, no stream has to wait for another."""
    from colossalai.accelerator import CpuAccelerator, set_accelerator

    class Host(CpuAccelerator):
        name = "cuda"  # only the name; tensors stay where CpuAccelerator says

        def Stream(self, *arguments: Any, **options: Any) -> None:
            return None

        def current_stream(self, device: Any = None) -> None:
            return None

        def stream(self, stream_: None) -> AbstractContextManager[None]:
            return nullcontext()

    set_accelerator(Host())


def _build(workload: Workload, ranks: int, accumulation: int, *, plugin: dict[str, Any]) -> Step:
    """plugin: arguments of LowLevelZeroPlugin."""
    _use_host_accelerator()
    from colossalai.booster import Booster
    from colossalai.booster.plugin import LowLevelZeroPlugin

    plain = workload.model()
    booster = Booster(plugin=LowLevelZeroPlugin(precision="fp32", overlap_communication=False, **plugin))
    model, optimizer, *_ = booster.boost(plain, adamw(plain.parameters()))
    may_wait = booster.plugin.support_no_sync()  # stage 2 reduces every microbatch

    def step(microbatches: Sequence[Microbatch]) -> float:
        optimizer.zero_grad()
        total = 0.0
        for number, (inputs, targets) in enumerate(microbatches, start=1):
            waits = may_wait and number < len(microbatches)
            with booster.no_sync(model, optimizer) if waits else nullcontext():
                loss = model(inputs, targets)
                booster.backward(loss / len(microbatches), optimizer)
            total += loss.item()
        optimizer.step()
        return total / len(microbatches)

    return step


def _arm(stage: int, strategy: Stage, **settings: Any) -> Arm:
    about = ", ".join(f"{name}={value}" for name, value in settings.items())
    return Arm(
        f"colossalai zero {stage}",
        f"{about or 'default settings'}, no overlap, fused AdamW",
        strategy,
        partial(_build, plugin={"stage": stage, **settings}),
        imports=IMPORTS,
        measured_with=MEASURED_WITH,
    )


# fp32 weights need no fp32 copies; smaller buckets are reduced and gathered while they are in the cache.
HOST: dict[str, Any] = {"master_weights": False, "reduce_bucket_size_in_m": 2}

ARMS = (
    _arm(1, "optim", **HOST),
    _arm(2, "optim_grads", **HOST),
)
