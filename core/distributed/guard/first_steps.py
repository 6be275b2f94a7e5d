"""FirstSteps: checks of a wrapped model's first two steps, because most program errors show in the first step.

Only violations of the contracts are errors, because everything else is correct in some program. Copies of a gradient
must be equal after the first backward. A parameter on two stages must have a rule that adds its gradients. Copies of a
weight must be equal after the first two steps (`guard.weights`). After a violation, the ranks compare their weights,
inputs, or optimizers' steps and settings, and the error names a difference as the likeliest cause. All ranks raise,
before the step.

A first step with a non-finite gradient, as with a loss scale that is still too high, does not count.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from core.distributed.buffer.bucket import Bucket
from core.distributed.distributed_data_parallel_config import DistributedDataParallelConfig
from core.distributed.guard.finite import ReplicaDriftError, are_finite, unequal_gradients
from core.distributed.guard.inputs import Inputs
from core.distributed.guard.replicas import AFTER_THE_WRAP, held_twice, raise_or_warn, unequal_within_stage
from core.distributed.guard.weights import WeightWatch
from core.distributed.layout.model_plan import ModelPlan
from core.groups import agree
from core.groups.process_groups import ProcessGroups, world_chain, world_groups

MOST_TRIES = 64  # limit for first steps that overflow
ADVICE = "If it is right all the same, set first_steps='warn' in DistributedDataParallelConfig"


class FirstSteps:
    """Checks a wrapped chunk until its first step has been compared.

    Args:
        module: Model chunk.
        plan: Layout and contracts of the chunk's parameters.
        buckets: Gradient buckets of the chunk.
        groups: The model's process groups.
        ddp_config: Wrapper config.
        config: Model config, or None.
    """

    def __init__(
        self,
        module: nn.Module,
        plan: ModelPlan,
        buckets: Sequence[Bucket],
        groups: ProcessGroups,
        ddp_config: DistributedDataParallelConfig,
        config: Any,
    ) -> None:
        several = any(groups.size(name) > 1 for name in world_chain(groups))
        compares = ddp_config.first_steps != "ignore" and ddp_config.initial_weights != "ignore"
        self.looks = several and compares  # until the gradients of a first step have been compared
        self.is_paused = False
        self.warns = ddp_config.first_steps == "warn"
        self.module, self.plan, self.buckets, self.config = module, plan, list(buckets), config
        self.groups = groups
        self.computes_in_16_bits = False
        self.tries = 0  # steps that do not count
        self.inputs = Inputs()

    @property
    def active(self) -> bool:
        """True while forwards are recorded and gradients are compared."""
        return self.looks and not self.is_paused

    def note_forward(self, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """Record a forward that records gradients.

        Args:
            args: Its arguments.
            kwargs: Its keyword arguments.
        """
        lower = torch.get_float32_matmul_precision() != "highest"
        self.computes_in_16_bits |= torch.is_autocast_enabled(self.plan.device.type) or lower
        if self.groups.size("tp") > 1:
            self.inputs.note({**dict(enumerate(args)), **kwargs})

    def cuts_inputs(self) -> bool:
        """Return True if tensor-parallel ranks may get parts of a sequence or of a batch."""
        tags = (getattr(param, "sequence_parallel", False) for param in self.plan.named.values())
        averaged = any(contract.averaged_over for contract in self.plan.contracts.values())
        return bool(getattr(self.config, "sequence_parallel", False)) or averaged or any(tags)

    def end_step(self, *, counts: bool) -> None:
        """Finish the comparison of a step.

        Args:
            counts: False if the step overflowed.
        """
        self.tries += 1
        self.inputs = Inputs()
        self.looks = not counts and self.tries < MOST_TRIES


@contextmanager
def paused(watches: Sequence[FirstSteps]) -> Iterator[None]:
    """Return a context whose steps are not compared and do not count, because the caller compares more.

    Args:
        watches: Checks to pause.
    """
    counted = [watch for watch in watches if not watch.is_paused]
    for watch in counted:
        watch.is_paused = True
    try:
        yield
    finally:
        for watch in counted:
            watch.is_paused = False


def look(watches: Sequence[FirstSteps], weights: Sequence[WeightWatch], groups: ProcessGroups) -> None:
    """Compare the gradients of one model's first step, after the reduction and before the optimizer gets them.

    Collective: every rank of the job must call it.

    Args:
        watches: Checks of the model's chunks on this rank.
        weights: Weight checks of these chunks.
        groups: Process groups of the model.

    Raises:
        ReplicaDriftError: On all ranks, if copies of a gradient differ or two stages hold one parameter.
    """
    buckets = [bucket for watch in watches for bucket in watch.buckets]
    coarse = any(watch.computes_in_16_bits for watch in watches)
    drift = unequal_gradients(buckets, groups, coarse=coarse)  # all ranks of a group make its collective
    found = held_twice([(watch.module, watch.plan) for watch in watches], groups) or drift
    overflows = not are_finite(buckets)
    chain = world_groups(groups)
    _, (is_wrong, any_overflows) = agree.bounds([found is not None, overflows], chain, "the first steps")
    if is_wrong:
        # Under sequence parallelism ranks may be given parts.
        asks = groups.size("tp") > 1 and not any(watch.cuts_inputs() for watch in watches)
        causes = [watch.inputs.difference(groups) for watch in watches] if asks else []
        unequal = [unequal_within_stage(watch.copies(), groups) for watch in weights]
        causes += [f"{finding[2]}. {AFTER_THE_WRAP}" for finding in unequal if finding is not None]
        everyone = agree.gather((found, [cause for cause in causes if cause]), chain, "the first steps").values()
        _, rank, text = min(finding for finding, _ in everyone if finding is not None)
        seen = [cause for _, causes in everyone for cause in causes][:1]
        text = ". Likeliest, because it was seen in this step: ".join([text, *seen])
        raise_or_warn(ReplicaDriftError(f"{text}. {ADVICE}"), rank, warns=watches[0].warns)
    for watch in watches:
        watch.end_step(counts=not any_overflows)
