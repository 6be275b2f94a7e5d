"""UnusedParameters: which parameters got no gradient in a step, on any rank.

A buffer cannot tell: what no backward touched lies there as zeros, and an optimizer would let momentum and decay move
it. torch's optimizers skip a parameter without a gradient, and so must a sharded one, alike on every rank.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from core.distributed.bucket import Bucket
from core.distributed.collectives import agree_max, control_device

if TYPE_CHECKING:
    from core.distributed.distributed_data_parallel import DistributedDataParallel


class UnusedParameters:
    """Watches a wrapped model's backwards: one flag a parameter, one small maximum a data group and step."""

    def __init__(self, model: DistributedDataParallel) -> None:
        self.model = model
        self.watches = [
            _Watch([bucket for bucket in control.buckets], control.group) for control in model.reducer.control
        ]
        self.found: list[nn.Parameter] = []

    @property
    def any_arrived(self) -> bool:
        """Has a backward of this rank given any parameter a gradient in this step?"""
        return any(1 in watch.seen for watch in self.watches)

    def note_assigned(self) -> None:
        """Before gradients leave `.grad`: one that somebody wrote there has not passed through a hook."""
        for watch in self.watches:
            watch.note_assigned()

    def agree(self) -> None:
        """Let the ranks of each data group tell each other what was used. Collective.

        After every bucket was launched: a rank may be in its backward yet, waiting for a bucket of this one.
        """
        self.found = [param for watch in self.watches for param in watch.agreed()]

    def reset(self) -> None:
        """A new step begins."""
        for watch in self.watches:
            watch.used.zero_()
            watch.seen[:] = bytes(len(watch.seen))
        self.found = []


class _Watch:
    """The parameters of one data group, in the order that its ranks share."""

    def __init__(self, buckets: list[Bucket], group: Any) -> None:
        self.buckets = buckets
        self.params = [param for bucket in buckets for param in bucket.params]
        self.group = group
        self.seen = bytearray(len(self.params))
        self.used = torch.zeros(len(self.params), dtype=torch.int64, device=control_device(group))
        for index, param in enumerate(self.params):
            param.register_post_accumulate_grad_hook(_note(self.seen, index))

    def agreed(self) -> list[nn.Parameter]:
        """Those that no rank of the group has used, and that are not frozen anyway."""
        self.used.copy_(torch.frombuffer(self.seen, dtype=torch.uint8) if self.seen else self.used)
        if self.params:
            agree_max(self.used, self.group).wait()
        flags = self.used.tolist()
        return [p for p, flag in zip(self.params, flags, strict=True) if not flag and p.requires_grad]

    def note_assigned(self) -> None:
        """Note gradients that are neither in the buffer nor were noted."""
        index = 0
        for bucket in self.buckets:
            homes = set(map(id, bucket.views))
            for param in bucket.params:
                if param.grad is not None and id(param.grad) not in homes:
                    self.seen[index] = 1
                index += 1


def _note(seen: bytearray, index: int) -> Callable[[torch.Tensor], None]:
    def hook(_param: torch.Tensor) -> None:
        seen[index] = 1

    return hook
