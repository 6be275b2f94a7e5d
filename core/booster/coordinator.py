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
    """Coordinates printing and execution order across ranks. A group of ``None`` is the world.

        coordinator = DistCoordinator()
        with coordinator.priority_execution():
            dataset = download()  # rank 0 first, then the others from its cache

    Raises:
        RuntimeError: If torch.distributed is not initialized.
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
        """Return ``True`` on the first rank of ``process_group``."""
        return dist.get_rank(process_group) == 0

    def is_node_master(self) -> bool:
        """Return ``True`` on the first rank of each machine."""
        return self.local_rank == 0

    def is_last_process(self, process_group: Group = None) -> bool:
        """Return ``True`` on the last rank of ``process_group``."""
        return dist.get_rank(process_group) == dist.get_world_size(process_group) - 1

    def print_on_master(self, msg: str, process_group: Group = None) -> None:
        """Print a message on the first rank of a group.

        Args:
            msg (str): Message to print.
            process_group (Group, optional): Process group. Defaults to the world.
        """
        if self.is_master(process_group):
            print(msg, flush=True)

    def print_on_node_master(self, msg: str) -> None:
        """Print a message on the first rank of each machine."""
        if self.is_node_master():
            print(msg, flush=True)

    @contextmanager
    def priority_execution(self, executor_rank: int = 0, process_group: Group = None) -> Iterator[None]:
        """Run the body on one rank of a group first, then on the others. Collective over the group.

        An error of the first rank is raised on every rank; in ColossalAI the others would wait forever.

        Args:
            executor_rank (int, optional): Rank within the group that runs the body first.
            process_group (Group, optional): Process group. Defaults to the world.
        """
        what = f"priority_execution of rank {executor_rank}"
        if dist.get_rank(process_group) != executor_rank:
            agree.refuse(None, process_group, what)
            yield
            return
        with agree.together(process_group, what):
            yield

    def destroy(self, process_group: Group = None) -> None:
        """Destroy ``process_group``, or all groups if it is ``None``."""
        dist.destroy_process_group(process_group)

    def block_all(self, process_group: Group = None) -> None:
        """Wait until every rank of ``process_group`` has made this call. Collective over the group."""
        with waiting("block_all", process_group or dist.group.WORLD):
            dist.barrier(process_group)

    def on_master_only(self, process_group: Group = None) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Return a decorator for functions that run only on a group's first rank and return ``None`` on the others."""

        def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(function)
            def on_master(*args: Any, **kwargs: Any) -> Any:
                return function(*args, **kwargs) if self.is_master(process_group) else None

            return on_master

        return decorate
