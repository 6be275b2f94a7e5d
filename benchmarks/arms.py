"""Arms of `python -m benchmarks steps`: an arm is one way to train a workload on several ranks.

An arm works in rank processes of its own, so it may patch torch, and its peak memory is its own. In each of them, with
the default process group up (gloo, one thread), the harness imports `arm.imports`, measures the memory so far, calls
`arm.build(workload, ranks, accumulation)` once and the Step that it returns once a step.

All arms train alike: fp32, the weights of `workload.model()`, AdamW with `ADAM` on every parameter (fused where there
is the choice), no clipping, the loss of a step the mean over its microbatches and ranks.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from benchmarks.workloads import Workload

Microbatch = tuple[torch.Tensor, torch.Tensor]  # the two arguments of a workload's model, which returns the mean loss

# One whole optimizer step: clear gradients, forward and backward over the microbatches (each loss divided by their
# number), reduction, AdamW. Returns this rank's mean loss, before the update.
Step = Callable[[Sequence[Microbatch]], float]
Build = Callable[[Workload, int, int], Step]

Stage = Literal["no_shard", "optim", "optim_grads", "optim_grads_params", "none"]
Kind = Literal["reference", "control", "floor", "peer", "ours"]

# AdamW nearly cancels a constant factor of the gradients, and with it the commonest mistake, a sum for a mean. It does
# not where eps is as large as the gradients themselves: then a wrong scale shows in the losses. eps costs no time.
LR = 1e-3
BETAS = (0.9, 0.95)
EPS = 1e-3
WEIGHT_DECAY = 0.01

MODULES = (
    "benchmarks.arms_torch",
    "benchmarks.arms_core",
    "benchmarks.arms_megatron",
    "benchmarks.arms_deepspeed",
    "benchmarks.arms_colossalai",
)


@dataclass(frozen=True)
class Arm:
    """One row of the table.

    name: unique, lower case, as given to --arms. about: one line, the settings included. stage: whose peer it is, a
    DistributedDataParallelConfig.data_parallel_sharding_strategy, or 'none'. build: see the module's docstring; called
    on all ranks of the arm together. kind: 'reference' for the one whose losses are right, 'control' for one that is
    wrong and must be caught, 'floor' for one that communicates nothing (its losses are not checked). imports: modules
    that build needs (not torch), imported in the rank processes before the memory's zero is taken; where one is not
    installed the arm is absent. measured_with: of a peer, the package and version that the figures are of. copies: of
    the parameters, that a rank holds at its peak at most; so many arms are alive together as this leaves room for.
    """

    name: str
    about: str
    stage: Stage
    build: Build
    kind: Kind = "peer"
    imports: tuple[str, ...] = ()
    measured_with: str = ""
    copies: float = 6.0

    def why_absent(self) -> str | None:
        """The package that is missing, or None where the arm can be tried."""
        for module in self.imports:
            package = module.partition(".")[0]
            if importlib.util.find_spec(package) is None:
                version = f" (measured with {self.measured_with}; benchmarks/peers.md)" if self.measured_with else ""
                return f"the package {package!r} is not installed{version}"
        return None


def all_arms(modules: Sequence[str] = MODULES) -> tuple[dict[str, Arm], dict[str, str]]:
    """(every arm by name, the reason for each module without arms). Modules import their packages only in `build`."""
    arms: dict[str, Arm] = {}
    missing: dict[str, str] = {}
    for module in modules:
        if importlib.util.find_spec(module) is None:
            missing[module] = f"there is no module {module}"
            continue
        for arm in importlib.import_module(module).ARMS:
            if arm.name in arms:
                raise ValueError(f"two arms are called {arm.name!r}, the second in {module}; rename one")
            arms[arm.name] = arm
    return arms, missing
