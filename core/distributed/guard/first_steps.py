"""FirstSteps: comparison of gradients in a wrapped model's first step, where most program errors show.

Only violations of the contracts are errors, because everything else is correct in some program. Copies of a gradient
must be equal after the first backward. A parameter on two stages must have a rule that adds its gradients. After a
violation, the ranks compare their weights and their inputs, and the error names a difference as the likeliest cause.
All ranks raise, before the step.

A first step with a non-finite gradient does not count, because a loss scale may still be too high.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from core.distributed.buffer.bucket import Bucket
from core.distributed.buffer.grad_placeholder import tensors_in
from core.distributed.distributed_data_parallel_config import DistributedDataParallelConfig
from core.distributed.guard.finite import Finding, ReplicaDriftError, are_finite, unequal_gradients
from core.distributed.guard.replicas import (
    AFTER_THE_WRAP,
    WeightWatch,
    checksum,
    is_readable,
    raise_or_warn,
    unequal_weights,
)
from core.distributed.layout.model_plan import ModelPlan
from core.groups import agree
from core.groups.global_names import namer, without_transparent
from core.groups.process_groups import ProcessGroups, world_chain, world_groups

MOST_FORWARDS = 16  # number of forwards whose inputs are recorded
ADVICE = "If it is right all the same, set first_steps='warn' in DistributedDataParallelConfig"


class FirstSteps:
    """Records a wrapped chunk's forwards until the gradients of a first step have been compared."""

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
        self.is_due = several and compares  # until the gradients of a first step have been compared
        self.is_paused = False
        self.warns = ddp_config.first_steps == "warn"
        self.module, self.plan, self.buckets, self.config = module, plan, list(buckets), config
        self.groups = groups
        self.computes_in_16_bits = False
        self.forwards = 0
        self.inputs: dict[str, tuple[tuple[int, ...], torch.Tensor]] = {}  # shapes and checksums of integer inputs

    @property
    def active(self) -> bool:
        """True while forwards are recorded and gradients are compared."""
        return self.is_due and not self.is_paused

    def record_forward(self, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """Record a training forward. Queues a few small operations on the device and does not wait for them.

        Only inputs of integers, such as tokens, are recorded: others may be activations, which differ by rounding.
        """
        lower = torch.get_float32_matmul_precision() != "highest"
        self.computes_in_16_bits |= torch.is_autocast_enabled(self.plan.device.type) or lower
        if self.groups.size("tp") > 1 and self.forwards < MOST_FORWARDS:
            for number, tensor in enumerate(tensors_in([list(args), kwargs])):
                if tensor.dim() and not tensor.is_floating_point() and is_readable(tensor):
                    self.inputs[f"forward {self.forwards}, input {number}"] = tuple(tensor.shape), checksum(tensor)
        self.forwards += 1

    def unequal_inputs(self) -> str | None:
        """Describe the first input that differs between tensor-parallel ranks, or return None. Collective over them."""
        mine = {place: (shape, sums.tolist()) for place, (shape, sums) in self.inputs.items()}
        answers = agree.gather(mine, self.groups.control("tp"), "the inputs over group tp")
        (rank, reference), *others = answers.items()
        for other, theirs in others:
            place = next((place for place in reference if place in theirs and theirs[place] != reference[place]), None)
            if place is not None:
                return (
                    f"the inputs differ between ranks {rank} and {other} of group 'tp' {list(answers)}, first in "
                    f"{place}. These ranks see the same batch in most programs: choose data by "
                    "parallel_state.get_data_parallel_rank(), and draw it from one seed in such a group"
                )
        return None

    def splits_inputs(self) -> bool:
        """Return True if tensor-parallel ranks may get parts of a sequence or of a batch."""
        tags = (getattr(param, "sequence_parallel", False) for param in self.plan.named.values())
        averaged = any(contract.averaged_over for contract in self.plan.contracts.values())
        return bool(getattr(self.config, "sequence_parallel", False)) or averaged or any(tags)


@contextmanager
def paused(watches: Sequence[FirstSteps]) -> Iterator[None]:
    """Return a context whose steps are not compared and do not count, because the caller compares more."""
    counted = [watch for watch in watches if not watch.is_paused]
    for watch in counted:
        watch.is_paused = True
    try:
        yield
    finally:
        for watch in counted:
            watch.is_paused = False


def compare_first_step(watches: Sequence[FirstSteps], weights: Sequence[WeightWatch], groups: ProcessGroups) -> None:
    """Compare the gradients of one model's first step, after the reduction and before the optimizer gets them.

    Collective over the job. Raises ReplicaDriftError on all ranks if copies of a gradient differ, or if two stages hold
    one parameter.
    """
    buckets = [bucket for watch in watches for bucket in watch.buckets]
    coarse = any(watch.computes_in_16_bits for watch in watches)
    drift = unequal_gradients(buckets, groups, coarse=coarse)  # all ranks of a group make its collective
    finding = _untied_parameter(watches, groups) or drift
    overflows = not are_finite(buckets)
    chain, what = world_groups(groups), "the first steps"
    _, (is_broken, any_overflows) = agree.bounds([finding is not None, overflows], chain, what)
    if is_broken:
        causes: list[str | None] = []
        if groups.size("tp") > 1 and not any(watch.splits_inputs() for watch in watches):
            causes += [watch.unequal_inputs() for watch in watches]
        unequal = [unequal_weights(watch.copies(), groups) for watch in weights]
        causes += [f"{found[2]}. {AFTER_THE_WRAP}" for found in unequal if found is not None]
        everyone = agree.gather((finding, [cause for cause in causes if cause]), chain, what).values()
        _, rank, text = min(found for found, _ in everyone if found is not None)
        first_cause = [cause for _, causes in everyone for cause in causes][:1]
        text = ". Likeliest, because it was seen in this step: ".join([text, *first_cause])
        raise_or_warn(ReplicaDriftError(f"{text}. {ADVICE}"), rank, warns=watches[0].warns)
    for watch in watches:
        watch.is_due, watch.forwards, watch.inputs = bool(any_overflows), 0, {}


def _untied_parameter(watches: Sequence[FirstSteps], groups: ProcessGroups) -> Finding | None:
    """Find a parameter that two stages hold under one global name, without a rule that adds its gradients. Collective.

    Names count only if a module declares them (``global_names``), because stages number their own layers otherwise.
    """
    if groups.size("pp") == 1:
        return None
    mine = []
    for watch in watches:
        name_of, plan = namer(watch.module), watch.plan
        for name in plan.params:
            full_name = name_of(name)
            is_declared = full_name != without_transparent(name.split("."))
            mine.append((full_name, is_declared, plan.contracts[name].crosses_stages))
    answers = agree.gather(mine, groups.control("pp"), "the names of parameters of all stages")
    first: dict[str, tuple[int, bool, bool]] = {}
    for rank, names in answers.items():
        for name, is_declared, is_added in names:
            other, was_declared, was_added = first.setdefault(name, (rank, is_declared, is_added))
            if other != rank and (is_declared or was_declared) and not (is_added and was_added):
                text = (
                    f"parameter {name!r} of the whole model is held by two stages, on ranks {other} and {rank} of "
                    f"pipeline {list(answers)}, and no rule adds their gradients. Tie copies of one weight "
                    "(shared_embedding = True on both), or give each layer to one stage and name it so (global_names)"
                )
                return 1, dist.get_rank(), text
    return None
