"""TorchDDPCheckpointIO: one rank writes, all ranks read, and an error on one rank is raised on all."""

from __future__ import annotations

import time

import torch.distributed as dist

from core.booster.checkpoint_io.general_checkpoint_io import GeneralCheckpointIO
from core.checkpoint.errors import CheckpointError
from core.groups import agree
from core.watch.waiting import expect, waiting


class TorchDDPCheckpointIO(GeneralCheckpointIO):
    """Checkpoints of models that are complete on every rank of a group.

    ``ALONE_LIMIT_S`` limits how long, in seconds, the writing rank waits for the others. A program may call save only
    on that rank by mistake, while the others are on their way to another collective: both would wait forever.

    Args:
        group (ProcessGroup, optional): Ranks that hold the model. Defaults to the world.
    """

    ALONE_LIMIT_S = 20.0

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        super().__init__()
        self.group = group

    def writes(self) -> bool:
        """Return ``True`` on the group's first rank."""
        return dist.get_rank(self.group) == 0

    def agree(self, error: Exception | None, what: str) -> None:
        """Raise on every rank if any has an error. A rank that returns knows that all have reached this point."""
        self._expect_others(what)
        agree.refuse(error, self.group, "a save or load")  # ranks may write the path differently

    def _expect_others(self, what: str) -> None:
        """Raise CheckpointError on the writing rank if others do not call, and PeerLost at once if one has ended.

        Each rank counts its calls in the store.
        """
        store = dist.group.WORLD.get_group_store()
        ranks = dist.get_process_group_ranks(self.group or dist.group.WORLD)
        calls = store.add(f"checkpoint_io/{ranks}/{dist.get_rank()}", 1)
        if not self.writes():
            return
        until = time.monotonic() + self.ALONE_LIMIT_S
        missing = [rank for rank in ranks if rank != dist.get_rank()]
        with waiting(f"all ranks to save or load {what}", ranks):
            while missing := [rank for rank in missing if store.add(f"checkpoint_io/{ranks}/{rank}", 0) < calls]:
                expect(missing)
                if time.monotonic() > until:
                    raise CheckpointError(
                        f"{what}: rank {dist.get_rank()} called and ranks {missing} have not in "
                        f"{self.ALONE_LIMIT_S:g} s. Saving and loading are for all ranks to call: take the call out of "
                        "`if rank == 0` or is_master(); rank 0 writes alone. If the others are only late, raise "
                        f"{type(self).__name__}.ALONE_LIMIT_S"
                    )
                time.sleep(0.002)
