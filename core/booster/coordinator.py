"""DistCoordinator: printing, waiting and running first on chosen ranks."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch.distributed as dist

from core.groups import agree
from core.watch.waiting import waiting

Group: TypeAlias = "dist.ProcessGroup | None"


class DistCoordinator:
    """Position of this process among the ranks. A group of None is the world.

    Raises:
        RuntimeError: If torch.distributed is not started.
    """

    def __init__(self) -> None:
        if not dist.is_initialized():
            raise RuntimeError(
                "DistCoordinator needs started ranks; call core.booster.launch.launch_from_torch(), or "
                "torch.distributed.init_process_group(), first"
            )
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        # The launcher sets the rank on this machine; without a launcher all ranks are on one machine.
        self.local_rank = int(os.environ.get("LOCAL_RANK", self.rank))

    def is_master(self, process_group: Group = None) -> bool:
        """Return True on the first rank of a group.

        Args:
            process_group: The group.
        """
        return dist.get_rank(process_group) == 0

    def is_node_master(self) -> bool:
        """Return True on the first rank of each machine."""
        return self.local_rank == 0

    def is_last_process(self, process_group: Group = None) -> bool:
        """Return True on the last rank of a group.

        Args:
            process_group: The group.
        """
        return dist.get_rank(process_group) == dist.get_world_size(process_group) - 1

    def print_on_master(self, msg: str, process_group: Group = None) -> None:
        """Print a message on the first rank of a group.

        Args:
            msg: The message.
            process_group: The group.
        """
        if self.is_master(process_group):
            print(msg, flush=True)

    def print_on_node_master(self, msg: str) -> None:
        """Print a message on the first rank of each machine.

        Args:
            msg: The message.
        """
        if self.is_node_master():
            print(msg, flush=True)

    @contextmanager
    def priority_execution(self, executor_rank: int = 0, process_group: Group = None) -> Iterator[None]:
        """Run the body on one rank of a group first, then on the others. Collective over the group.

        An error of the first rank is raised on every rank; in ColossalAI the others would wait forever.

        Args:
            executor_rank: Rank within the group that runs the body first.
            process_group: The group.
        """
        what = f"priority_execution of rank {executor_rank}"
        if dist.get_rank(process_group) != executor_rank:
            agree.refuse(None, process_group, what)
            yield
            return
        with agree.together(process_group, what):
            yield

    def destroy(self, process_group: Group = None) -> None:
        """Destroy a group.

        Args:
            process_group: The group; None for all groups.
        """
        dist.destroy_process_group(process_group)

    def block_all(self, process_group: Group = None) -> None:
        """Wait until every rank of a group has called this. Collective over the group.

        Args:
            process_group: The group.
        """
        with waiting("block_all", process_group or dist.group.WORLD):
            dist.barrier(process_group)

    def on_master_only(self, process_group: Group = None) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Return a decorator for functions that run only on a group's first rank and return None on the others.

        Args:
            process_group: The group.
        """

        def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(function)
            def on_master(*args: Any, **kwargs: Any) -> Any:
                return function(*args, **kwargs) if self.is_master(process_group) else None

            return on_master

        return decorate
