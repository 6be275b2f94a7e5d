"""Arms that go wrong, for the tests of `python -m benchmarks steps`."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from benchmarks.arms import Arm, Microbatch, Step
from benchmarks.arms_torch import adamw, plain_step
from benchmarks.workloads import Workload


def _raise() -> None:
    raise RuntimeError("this arm has a fault")


def _hang() -> None:
    time.sleep(600)


def _die() -> None:
    os._exit(7)


def faulty(workload: Workload, ranks: int, accumulation: int, *, fault: Callable[[], None]) -> Step:
    """torch DDP that trains rightly until the second rank's third step."""
    step = plain_step(model := DistributedDataParallel(workload.model()), adamw(model.parameters()))
    taken = []

    def watched(microbatches: Sequence[Microbatch]) -> float:
        taken.append(None)
        if len(taken) == 3 and dist.get_rank() == 1:
            fault()
        return step(microbatches)

    return watched


def too_fast(workload: Workload, ranks: int, accumulation: int) -> Step:
    """torch DDP with half as large a learning rate again."""
    model = DistributedDataParallel(workload.model())
    optimizer = adamw(model.parameters())
    for group in optimizer.param_groups:
        group["lr"] *= 1.5
    return plain_step(model, optimizer)


ARMS = (
    Arm("raises", "raises in its third step", "no_shard", partial(faulty, fault=_raise)),
    Arm("hangs", "hangs in its third step", "no_shard", partial(faulty, fault=_hang)),
    Arm("dies", "ends in its third step", "no_shard", partial(faulty, fault=_die)),
    Arm("too fast", "another learning rate", "no_shard", too_fast),
    Arm("not there", "a package that nobody has", "no_shard", too_fast, imports=("no_such_package",)),
)
