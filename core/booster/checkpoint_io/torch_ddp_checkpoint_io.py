"""TorchDDPCheckpointIO: one rank writes, all read; an error on one rank is raised on all."""

from __future__ import annotations

import torch.distributed as dist

from core import agree
from core.booster.checkpoint_io.general_checkpoint_io import GeneralCheckpointIO


class TorchDDPCheckpointIO(GeneralCheckpointIO):
    """For models that every rank of a group holds whole. group: default the world."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        super().__init__()
        self.group = group

    def writes(self) -> bool:
        """The group's first rank does."""
        return dist.get_rank(self.group) == 0

    def agree(self, error: Exception | None, what: str) -> None:
        """Raise on every rank if any has an error; so a rank that returns knows that all have come this far."""
        agree.refuse(error, self.group, what)
